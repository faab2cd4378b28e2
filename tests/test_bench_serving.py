"""Benchmarks that send many requests, on tiny models: token times, options, serving and exactness."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from bench import exactness, options, server, serving, synthetic, tables
from bench.requests import Target, TimedRequest, built_in_options, run_together
from bench.timing import Limit
from selfspec import Engine
from tests.scripted import endless, random_prompt
from tests.tiny import VOCABULARY, tiny_model
from tests.tiny_tokenizer import JSON_TOKENS, json_tokenizer

PROMPTS = [random_prompt(length) for length in (5, 9, 3)]
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "rope_theta": 10000.0, "max_position_embeddings": 2048,
}  # fmt: skip


@cache
def engine() -> Engine:
    return Engine.from_model(endless(tiny_model("llama")), max_batch=4)


def target(**speculation: Any) -> Target:
    return Target("tiny", engine(), {"any": PROMPTS}, speculation or {"plan": "tree:2,1", "exit_layer": 2})


def timed(*arrivals: tuple[float, int]) -> TimedRequest:
    request = TimedRequest(engine(), PROMPTS[0], 0, 8, {"do_sample": False})
    request.submitted_at, request.times.arrivals = 1.0, list(arrivals)
    return request


# Requests


def test_times_follow_from_the_arrivals_of_tokens() -> None:
    request = timed((3.0, 1), (4.0, 3), (7.0, 5))
    assert request.first_token_s == 2.0 and request.per_token_s == 1.0 and request.ended_at == 7.0
    assert timed((3.0, 2)).per_token_s is None
    assert request.gaps(4.5, 5.0) == [3.0] and request.gaps(3.5, 9.0) == [1.0, 3.0] and request.gaps(7.0, 9.0) == []


def test_requests_together_get_the_tokens_of_each_alone_and_every_arrival_is_recorded() -> None:
    drafting = target().speculation
    alone = [TimedRequest(engine(), prompt, 0, 8, {"do_sample": False}) for prompt in PROMPTS]
    for request in alone:
        assert run_together([request]) > 0
    together = [TimedRequest(engine(), prompt, 0, 8, {"do_sample": False, **drafting}) for prompt in PROMPTS]
    run_together(together)
    assert [request.tokens for request in together] == [request.tokens for request in alone]
    for request in together:
        (sequence,) = request.request.sequences
        assert len(request.times.arrivals) == sequence.history.steps and request.times.arrivals[-1][1] == 8 == len(
            request.tokens
        )


def test_the_built_in_options_need_no_python_callable() -> None:
    made = built_in_options(PROMPTS, [7], VOCABULARY)
    requests = {name: TimedRequest(engine(), PROMPTS[0], 0, 8, options).request for name, options in made.items()}
    assert not any(request.processors or request.criteria for request in requests.values())
    params = [request.sequences[0].params for request in requests.values()]
    assert len(set(params)) == len(params) and not params[0].changes_logits


# Commands


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", TINY)
    monkeypatch.setattr(synthetic, "own_text_agreement", lambda *_: synthetic.Agreement(0.5, 0.6))
    return "--shape tiny --device cpu --dtype float32 --limit 2 --prompt-tokens 6".split()


def test_every_part_of_serving_is_measured_in_both_modes(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--max-new-tokens 4 --requests 5 --decoding 2 --long-prompt 600 --running 2 --running-tokens 300 --repeat 1"
    assert serving.main([*command, *sizes.split(), "--chat", "200"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    counts = {part: [row["mode"] for row in found[part]].count("speculation") for part in serving.PARTS}
    assert counts == {"throughput": 1, "latency": 2, "joining": 1, "settings": 4, "second_turn": 1}
    assert all(2 * count == len(found[part]) for part, count in counts.items())
    plain, ninety = found["throughput"][0], found["latency"][-1]
    assert ninety["requests_per_s"] == pytest.approx(0.9 * plain["tokens_per_s"] / 4, rel=0.01)
    assert all(row["first_token_ms_p50"] <= row["first_token_ms_p99"] for row in found["latency"])
    *_, different, in_turn = (row for row in found["settings"] if row["mode"] == "plain")
    assert different["against_equal"] == pytest.approx(different["tokens_per_s"] / in_turn["tokens_per_s"], rel=0.01)
    for row in found["joining"]:
        assert row["chunks"] == 2 and row["prompt_tokens"] == 600
        assert row["longest_gap_ms"] > 0 and row["step_ms"] > 0 and row["chunk_ms"] > 0
        assert row["bound_ms"] == pytest.approx(row["chunk_ms"] + 2 * row["step_ms"], abs=0.01)
    for row in found["second_turn"]:
        assert row["prompt_tokens"] == 340 and row["reused_tokens"] == 256
        assert row["ratio"] == pytest.approx(row["first_token_ms"] / row["without_reuse_ms"], abs=0.01)


def test_a_shape_is_served_over_http_and_directly(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert server.main([*command, "--streams", "2", "--repeat", "1", "--max-new-tokens", "4"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["streams"], row["mode"]) for row in found["results"]] == [(2, "plain"), (2, "speculation")]
    assert all(row["direct"] > 0 and row["server"] > 0 and row["first_token_ms"] > 0 for row in found["results"])


def test_options_are_measured_beside_greedy_and_compared_with_plain_tokens(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert options.main([*command, "--max-new-tokens", "5", "--options", "penalty", "nothing"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = [row["option"] for row in found["results"]]
    assert names[0] == "greedy" and names[-1] == "processor that does nothing" and len(names) == 5
    assert found["results"][0]["plain_against_greedy"] == 1.0 and found["all_tokens_same"]
    assert all(row["same_tokens"] == row["sequences"] == 2 * 3 for row in found["results"])


def test_options_whose_tokens_change_with_speculation_are_counted() -> None:
    chosen = {"greedy": options.options_of(target())["greedy"]}
    found = options.measure(target(repetition_penalty=5.0), chosen, new_tokens=6, repeat=2, limit=Limit())
    (result,) = found["results"]
    assert result["same_tokens"] < result["sequences"] == 6


def test_a_spent_budget_leaves_one_run_of_every_option() -> None:
    found = options.measure(target(), options.options_of(target()), new_tokens=3, repeat=2, limit=Limit(0.0))
    assert len(found["results"]) == 15 and {row["sequences"] for row in found["results"]} == {1}


def test_parts_of_serving_beyond_the_budget_are_named() -> None:
    load = serving.Load(new_tokens=2, requests=2, decoding=2, repeat=1)
    found = serving.measure(target(), load, ["throughput", "latency"], Limit(0.0))
    assert tables.serving(found) == ["Not reached within the time budget: throughput, latency."]
    assert len(serving.measure(target(), load, ["throughput"], Limit())["throughput"]) == 2
    assert engine().scheduler.max_decoding == 4  # restored


def test_random_arrivals_have_the_tokens_of_each_request_alone() -> None:
    found = exactness.check_arrivals(target(), 1, new_tokens=8, limit=Limit(), count=20)
    told = exactness.summary(found)
    assert told["differing"] == 0 and told["compared"] >= 20 * 2 and len(found) > 5
    wrong = exactness.check_arrivals(target(repetition_penalty=5.0), 1, new_tokens=8, limit=Limit(), count=20)
    assert any(tally.differing and tally.first for tally in wrong.values())


def test_structured_output_is_measured_where_there_is_a_tokenizer() -> None:
    found = target()
    assert "JSON schema" not in options.options_of(found)
    model = tiny_model("llama", vocab_size=len(JSON_TOKENS))
    engine = Engine.from_model(model, json_tokenizer(), profile=None)
    found = Target("tiny", engine, {"text": [[1, 40]]}, {"plan": "chain:1", "exit_layer": 2})
    chosen = {name: option for name, option in options.options_of(found).items() if name in ("greedy", "JSON schema")}
    results = options.measure(found, chosen, new_tokens=8, repeat=1, limit=Limit())["results"]
    assert [(row["option"], row["same_tokens"]) for row in results] == [("greedy", 1), ("JSON schema", 1)]
