"""Draft info in the chunks of a stream: origins, accepted lengths, plan and reason, with and without stop texts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving import CHAT, events_of, serving, tiny_engine

SETTINGS: dict[str, Any] = {"messages": CHAT, "max_tokens": 24, "seed": 5, "stream": True}
AS_OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "seed": 5, "do_sample": True, "temperature": 1.0, "top_k": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tiny_engine(tmp_path_factory.mktemp("profile"), max_position_embeddings=128)) as running:
        yield running


def chunks(served, **fields: Any) -> list[Any]:
    events = events_of(served.http.post("/v1/chat/completions", json={**SETTINGS, **fields}))
    return [event["choices"][0] for event in events]


def test_draft_info_names_the_origin_of_every_token(served):
    expected = served.engine.complete(CHAT, speculative_decoding="force", **AS_OPTIONS)
    choices = chunks(served, speculative_decoding="force", return_draft_info=True)
    told = [choice for choice in choices if "draft_info" in choice]
    for choice in told:
        assert "".join(text for text, _ in choice["draft_info"]["tokens"]) == choice["delta"].get("content", "")
    infos = [choice["draft_info"] for choice in told]
    assert [origin for info in infos for _, origin in info["tokens"]] == expected.origins
    assert "drafted" in expected.origins
    lengths = [length for info in infos for length in info["accepted_lengths"]]
    assert (sum(lengths), len(lengths)) == (24, expected.stats.cycles)
    assert {info["plan"] for info in infos} == {change.plan for change in expected.stats.changes}
    seconds = [info["elapsed_s"] for info in infos]
    assert all(info["off_reason"] is None for info in infos) and seconds[0] > 0 and seconds == sorted(seconds)


def test_draft_info_of_plain_decoding_names_the_reason_and_comes_on_request_only(served):
    infos = [chunk["draft_info"] for chunk in chunks(served, speculative_decoding=False, return_draft_info=True)[1:-1]]
    assert {(info["plan"], info["off_reason"]) for info in infos} == {("none", "request")}
    assert {origin for info in infos for _, origin in info["tokens"]} == {"plain"}
    assert not any("draft_info" in choice for choice in chunks(served))
    answer = served.http.post("/v1/chat/completions", json={**SETTINGS, "stream": False, "return_draft_info": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_draft_info")


def test_the_tokens_of_held_back_text_join_to_the_text(served):
    text = served.engine.complete(CHAT, **AS_OPTIONS).text
    stops = {"stop": [text[9:13], "never said at all"], "speculative_decoding": "force", "logprobs": True}
    infos = [chunk["draft_info"] for chunk in chunks(served, return_draft_info=True, **stops) if "draft_info" in chunk]
    assert "".join(part for info in infos for part, _ in info["tokens"]) == text[: text.index(text[9:13])]
    whole = served.http.post("/v1/chat/completions", json={**SETTINGS, **stops, "stream": False}).json()
    assert sum(length for info in infos for length in info["accepted_lengths"]) == whole["usage"]["completion_tokens"]


def test_metrics_of_a_request_are_the_engines_statistics_of_its_sequences(served):
    stats = served.engine.complete(CHAT, speculative_decoding="force", **AS_OPTIONS).stats
    fields = {**SETTINGS, "speculative_decoding": "force", "return_metrics": True}
    whole = served.http.post("/v1/chat/completions", json={**fields, "stream": False}).json()
    events = events_of(served.http.post("/v1/chat/completions", json=fields))
    found = whole["metrics"]["speculative_decoding"]
    assert events[-1]["metrics"]["speculative_decoding"] == found and events[-1]["choices"] == []
    assert (found["num_accepted_draft_tokens"], found["num_draft_tokens"]) == (stats.accepted, stats.drafted)
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"]) == stats.reached_by_depth[0]
    assert sum(count * steps for count, steps in enumerate(found["acceptance_histogram"])) == stats.accepted > 0
    assert sum(found["plans"].values()) == stats.cycles and found["off_reasons"] == {}
    fields |= {"speculative_decoding": False, "stream_options": {"include_usage": True}}
    last = events_of(served.http.post("/v1/chat/completions", json=fields))[-1]
    plain = last["metrics"]["speculative_decoding"]
    assert last["usage"]["completion_tokens"] == 24 and plain["off_reasons"] == {"request": 1}
    assert (plain["num_spec_steps"], plain["mean_acceptance_length"], plain["acceptance_histogram"]) == (0, None, [])
