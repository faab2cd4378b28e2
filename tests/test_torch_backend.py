"""The reference backend: no layer runs twice for a node, perfect drafts are accepted whole, statistics count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from selfspec import Engine, GenerateOutput, Plan, Stats
from selfspec.backends import torch_backend
from selfspec.cache.layout import Rows
from selfspec.models.decoder import Attend, Decoder
from selfspec.sampling import SamplingParams
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock
from tests.scripted import (
    IRREGULAR,
    ScriptedExit,
    decoding,
    endless,
    left_padded,
    plan_id,
    random_prompt,
    silence,
)
from tests.tiny import FAMILIES, VOCABULARY, tiny_model

LAYERS = 4
PROMPTS = [random_prompt(9), random_prompt(17), random_prompt(4)]


@cache
def engine_of(family: str) -> Engine:
    return Engine.from_model(endless(tiny_model(family)))


@cache
def long_engine() -> Engine:
    return Engine.from_model(endless(tiny_model("llama", max_position_embeddings=2048)))


@cache
def silent_engine(family: str, start_layer: int) -> Engine:
    return Engine.from_model(silence(endless(tiny_model(family)), start_layer))


def stats_of(engine: Engine, prompts: list[list[int]], **options: Any) -> list[Stats]:
    ids, mask = left_padded(prompts)
    settings = {"do_sample": False, "speculative_decoding": "force", **options}
    output = engine.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings)
    assert isinstance(output, GenerateOutput)
    return output.stats


# Work


class Passes:
    """Every pass of rows through a layer: (layer, rows of the pass, batch size)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, Rows, int]] = []
        attend_cached = Decoder.attend_cached

        def counted(model: Decoder, spec: Any, cache_layer: int, rows: Rows, kv: Any) -> Attend:
            attend = attend_cached(model, spec, cache_layer, rows, kv)

            def counting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                assert q.shape[1] == k.shape[1] == v.shape[1] == len(rows.nodes)
                self.seen.append((cache_layer, rows, q.shape[0]))
                return attend(q, k, v)

            return counting

        monkeypatch.setattr(Decoder, "attend_cached", counted)

    def take(self) -> Counter[tuple[int, int, int]]:
        """How often each (sequence, layer, node) passed since the last call."""
        seen, self.seen = self.seen, []
        return Counter(
            (index, layer, node) for layer, rows, batch in seen for index in range(batch) for node in rows.nodes
        )


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


@pytest.mark.parametrize(("plan", "exit_layer"), [("none", 1), ("chain:4", 3), (IRREGULAR, 1)], ids=plan_id)
def test_every_node_passes_every_layer_exactly_once_a_step(plan: str, exit_layer: int, passes: Passes) -> None:
    engine = engine_of("llama")
    running = decoding(engine, PROMPTS, plan, Exit(engine.model, exit_layer), new_tokens=50).prefill()
    passes.take()
    nodes = range(len(Plan.parse(plan)) + 1)
    once = Counter((index, layer, node) for index in range(len(PROMPTS)) for layer in range(LAYERS) for node in nodes)
    for _ in range(3):
        running.step()
        assert passes.take() == once
    running.close()


def test_the_exit_block_runs_once_for_each_node_of_a_level_that_drafts(passes: Passes) -> None:
    engine = engine_of("llama")
    plan = Plan.parse(IRREGULAR)
    running = decoding(engine, PROMPTS[:1], IRREGULAR, exit_with_block(engine), new_tokens=50).prefill()
    passes.take()
    running.step()
    ran = {node: count for (_, layer, node), count in passes.take().items() if layer == LAYERS}
    levels_that_draft = {node for level in plan.levels if plan.width(level) for node in level}
    assert ran == dict.fromkeys(levels_that_draft, 1)
    running.close()


@pytest.mark.parametrize("length", [1, 513, 1030])
def test_prefill_runs_all_but_the_last_prompt_token_once(length: int, passes: Passes) -> None:
    engine = long_engine()
    running = decoding(engine, [random_prompt(length)], "chain:2", Exit(engine.model, 2), samples=3).prefill()
    positions = Counter((layer, position) for layer, rows, _ in passes.seen for position in rows.positions[0].tolist())
    assert positions == Counter((layer, position) for layer in range(LAYERS) for position in range(length - 1))
    assert [sequence.kv.length for sequence in running.sequences] == [length - 1] * 3
    running.close()


@pytest.mark.parametrize("where", ["draft", "verify", "accept"])
def test_a_step_that_fails_leaves_the_cache_at_its_committed_length(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("llama")
    running = decoding(engine, PROMPTS, "tree:3,2,1", Exit(engine.model, 2), new_tokens=50).prefill()
    running.step()
    before = [sequence.kv.length for sequence in running.sequences]
    features = [sequence.previous_feature for sequence in running.sequences]
    owner = torch_backend if where == "accept" else running.backend
    part = getattr(owner, where)

    def failing(*args: Any) -> None:
        part(*args)
        raise ZeroDivisionError

    monkeypatch.setattr(owner, where, failing)
    with pytest.raises(ZeroDivisionError):
        running.step()
    assert [sequence.kv.length for sequence in running.sequences] == before
    assert all(
        sequence.previous_feature is before for sequence, before in zip(running.sequences, features, strict=True)
    )
    running.close()
    assert engine.cache.free_pages == engine.cache.num_pages


def test_plain_requests_never_run_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("an exit was run")

    for step in ("head_input", "logits", "fill"):
        monkeypatch.setattr(Exit, step, forbidden)
    stats = stats_of(engine_of("llama"), PROMPTS, max_new_tokens=3, exit_layer=2, speculative_decoding=False)
    assert [each.new_tokens for each in stats] == [3, 3, 3]


# Drafts


def exit_with_block(engine: Engine) -> Exit:
    """An exit at layer 2 whose block is the layer that follows, a random affine and a random recall."""
    generator = torch.Generator().manual_seed(4)
    size = engine.model.config.hidden_size
    affine, *recall = 0.1 * torch.randn(1 + FEATURE_STATES, size, size, generator=generator, dtype=torch.float64)
    return Exit(engine.model, 2, block=ExitBlock(engine.model.layers[2], affine, affine[0], torch.cat(recall, dim=1)))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_drafts_depend_on_the_tokens_and_not_on_the_plans_that_decoded_them(family: str) -> None:
    """The exit block's KV is the same after plain and drafting steps as after a prefill of the same tokens."""
    engine = engine_of(family)
    exit = exit_with_block(engine)
    plans = ["tree:4,2,2,1", "none", IRREGULAR]
    grown = decoding(engine, PROMPTS[:1], plans, exit, new_tokens=100).prefill()
    grown.step(9)
    fresh = decoding(engine, [grown.sequences[0].tokens], "chain:4", exit, new_tokens=100).prefill()
    assert grown.draft("tree:3,2,2") == fresh.draft("tree:3,2,2")
    grown.close()
    fresh.close()


def drafted_with(params: SamplingParams, plan: str) -> list[list[int]]:
    engine = engine_of("llama")
    running = decoding(engine, PROMPTS, plan, Exit(engine.model, 2), params=params).prefill()
    tokens = running.draft(plan)
    running.close()
    return tokens


def test_top_k_applies_to_the_drafts_of_a_chain() -> None:
    top_1 = SamplingParams(do_sample=True, temperature=1.3, top_k=1)
    assert drafted_with(top_1, "chain:4") == drafted_with(SamplingParams(), "chain:4")
    assert drafted_with(replace(top_1, top_k=0), "chain:4") != drafted_with(SamplingParams(), "chain:4")


def test_truncation_does_not_apply_to_the_drafts_of_a_tree() -> None:
    sampled = SamplingParams(do_sample=True, temperature=1.3)
    truncated = replace(sampled, top_k=2, top_p=0.3, min_p=0.5)
    assert drafted_with(truncated, "tree:4,2") == drafted_with(sampled, "tree:4,2")


# Perfect drafts


# plan: (new tokens, steps, drafted, accepted) for whole steps of depth + 1 tokens, and with a last step cut short.
PERFECT = {
    "chain:1": [(6, 3, 3, 3), (7, 4, 3, 3)],
    "chain:4": [(10, 2, 8, 8), (13, 3, 10, 10)],
    "tree:3,2,1": [(8, 2, 30, 6), (10, 3, 33, 7)],
    "tree:4,2,2,1": [(10, 2, 88, 8), (13, 3, 100, 10)],
    IRREGULAR: [(10, 2, 20, 8), (13, 3, 26, 10)],
}


def assert_counts(stats: Stats, new_tokens: int, steps: int, drafted: int, accepted: int, accept_rate: float) -> None:
    counts = (stats.new_tokens, stats.cycles, stats.drafted, stats.accepted)
    assert counts == (new_tokens, steps, drafted, accepted)
    assert stats.accept_rate == pytest.approx(accept_rate)
    assert stats.tokens_per_cycle == pytest.approx(new_tokens / steps)


FULL_DEPTH = [("llama", plan) for plan in PERFECT] + [(family, IRREGULAR) for family in FAMILIES if family != "llama"]


@pytest.mark.parametrize(("family", "plan"), FULL_DEPTH, ids=plan_id)
def test_silent_layers_accept_the_full_depth_in_every_step(family: str, plan: str) -> None:
    for new_tokens, steps, drafted, accepted in PERFECT[plan]:
        for stats in stats_of(silent_engine(family, 2), PROMPTS, plan=plan, exit_layer=2, max_new_tokens=new_tokens):
            assert_counts(stats, new_tokens, steps, drafted, accepted, accept_rate=1)


@pytest.mark.parametrize("exit_layer", [1, 3], ids=lambda layer: f"exit{layer}")
def test_every_exit_below_silent_layers_is_always_right(exit_layer: int) -> None:
    (stats,) = stats_of(
        silent_engine("llama", 1), PROMPTS[:1], plan="chain:4", exit_layer=exit_layer, max_new_tokens=15
    )
    assert_counts(stats, new_tokens=15, steps=3, drafted=12, accepted=12, accept_rate=1)


@pytest.mark.parametrize(
    ("plan", "sampling"),
    [
        ("chain:4", {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2}),
        ("tree:4,2,2,1", {"top_k": 0, "repetition_penalty": 1.2}),
    ],
    ids=["chain", "tree"],
)
def test_sampled_drafts_of_silent_layers_are_coupled_to_the_target(plan: str, sampling: dict[str, Any]) -> None:
    """Draft and target share logits and noise, so they choose the same tokens. Only chains are truncated."""
    settings = {"do_sample": True, "temperature": 0.8, "seed": 3, "max_new_tokens": 15, **sampling}
    for stats in stats_of(silent_engine("llama", 2), PROMPTS, plan=plan, exit_layer=2, **settings):
        assert (stats.cycles, stats.accepted, stats.accept_rate) == (3, 12, 1.0)


def test_drafts_contain_no_end_token_before_min_new_tokens() -> None:
    engine = silent_engine("llama", 2)
    first = greedy_text(engine, 1)[0]
    settings: dict[str, Any] = {"eos_token_id": first, "min_new_tokens": 10, "max_new_tokens": 10}
    (stats,) = stats_of(engine, PROMPTS[:1], plan="chain:4", exit_layer=2, **settings)
    assert_counts(stats, new_tokens=10, steps=2, drafted=8, accepted=8, accept_rate=1)


def test_drafts_contain_the_end_token_as_soon_as_it_is_allowed() -> None:
    """It is allowed from the third node of the second step on, where the model chooses it."""
    engine = silent_engine("llama", 2)
    text = greedy_text(engine, 8)
    assert text[7] not in text[:7]
    settings: dict[str, Any] = {"eos_token_id": text[7], "min_new_tokens": 7, "max_new_tokens": 20}
    (stats,) = stats_of(engine, PROMPTS[:1], plan="chain:4", exit_layer=2, **settings)
    assert_counts(stats, new_tokens=8, steps=2, drafted=8, accepted=7, accept_rate=1)


TRIMMED = {
    "greedy-min_new_tokens": {"do_sample": False, "min_new_tokens": 15},
    "sampled-penalty": {"do_sample": True, "temperature": 0.8, "top_k": 0, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize(("name", "plan"), [("greedy-min_new_tokens", "chain:4"), ("sampled-penalty", "tree:4,2,2,1")])
def test_a_trimmed_head_with_the_rows_of_all_needed_tokens_is_always_right(name: str, plan: str) -> None:
    """The head has the rows of the tokens that are generated, and of an end token that would otherwise come first."""
    model = silence(endless(tiny_model("llama")), 2)
    engine = Engine.from_model(model)
    ids = torch.tensor([PROMPTS[0]])
    end = greedy_text(engine, 1)[0]
    settings = {"max_new_tokens": 15, "seed": 3, "eos_token_id": end, **TRIMMED[name]}
    text = engine.generate(ids, plan="none", **settings)[0, len(PROMPTS[0]) :].tolist()
    engine.drafters.exits[2] = Exit(engine.model, 2, head_rows=torch.tensor(sorted({*text, end, 7, 70})))
    (stats,) = stats_of(engine, PROMPTS[:1], plan=plan, exit_layer=2, **settings)
    assert_counts(stats, 15, steps=3, drafted=3 * len(Plan.parse(plan)), accepted=12, accept_rate=1)


def greedy_text(engine: Engine, new_tokens: int) -> list[int]:
    output = engine.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=new_tokens, do_sample=False, plan="none")
    assert isinstance(output, torch.Tensor)
    return output[0, len(PROMPTS[0]) :].tolist()


# Statistics


def test_a_plain_request_counts_one_token_per_step() -> None:
    (stats,) = stats_of(engine_of("llama"), PROMPTS[:1], max_new_tokens=7, speculative_decoding=False)
    assert_counts(stats, new_tokens=7, steps=7, drafted=0, accepted=0, accept_rate=0)
    assert (stats.plan, stats.exit_layer, stats.disabled_reason, stats.finish_reason) == (
        "none",
        None,
        "request",
        "length",
    )
    assert stats.elapsed_s > 0


def test_a_drafting_request_names_its_plan_and_exit() -> None:
    (stats,) = stats_of(silent_engine("llama", 2), PROMPTS[:1], plan="tree:3,2,1", exit_layer=3, max_new_tokens=10)
    assert (stats.plan, stats.exit_layer, stats.disabled_reason, stats.finish_reason) == (
        "tree:3,2,1",
        3,
        None,
        "length",
    )
    assert stats.elapsed_s > 0


@cache
def scripted_engine() -> Engine:
    """An engine of its own, since its exit is replaced."""
    return Engine.from_model(endless(tiny_model("llama")))


def scripted_stats(plan: str, new_tokens: int, rank_of_truth: Callable[[int], int | None], **options: Any) -> Stats:
    """Statistics where the model's new token i has rank `rank_of_truth(i)` in the draft; None: is not drafted."""
    engine = scripted_engine()
    text = greedy_text(engine_of("llama"), 40)

    def script(position: int) -> list[int]:
        token = position - len(PROMPTS[0])
        truth, rank = text[token], rank_of_truth(token)
        others = [token for token in range(VOCABULARY) if token != truth][:5]
        return others if rank is None else [*others[:rank], truth, *others[rank:]]

    engine.scheduler.call(engine.scheduler.close_idle_batches)  # a batch keeps its exit
    engine.drafters.exits[2] = ScriptedExit(engine.model, 2, script)
    (stats,) = stats_of(engine, PROMPTS[:1], plan=plan, exit_layer=2, max_new_tokens=new_tokens, **options)
    return stats


def test_accept_rate_of_a_chain_that_is_wrong_twice() -> None:
    """Tokens 0 and 1 are accepted, 2 rejected; 3 and 4 accepted, 5 rejected; 6, 7 and 8 accepted, 9 the model's."""
    stats = scripted_stats("chain:3", 10, lambda token: None if token in (2, 5) else 0)
    assert_counts(stats, new_tokens=10, steps=3, drafted=9, accepted=7, accept_rate=7 / 9)


def test_accept_rate_of_a_chain_that_is_never_right() -> None:
    stats = scripted_stats("chain:2", 5, lambda token: None)
    # Each step rejects its first node; the last two steps have one node and none.
    assert_counts(stats, new_tokens=5, steps=5, drafted=2 + 2 + 2 + 1 + 0, accepted=0, accept_rate=0)


def test_accept_rate_of_a_tree_whose_second_children_are_right() -> None:
    """A rejection counts once for all children; steps of 3, 2 (token 4 is rejected) and 3 tokens."""
    stats = scripted_stats("tree:2,2", 8, lambda token: None if token == 4 else 1)
    assert_counts(stats, new_tokens=8, steps=3, drafted=18, accepted=5, accept_rate=5 / 6)


def test_a_token_of_a_rank_that_the_plan_does_not_draft_is_rejected() -> None:
    stats = scripted_stats("nodes:0.0,0.2,2.0", 6, lambda token: 2 if token in (0, 3) else 1)
    # Step 1: token 0 has rank 2 (accepted), token 1 has rank 1 (rejected). Step 2: token 2 has rank 1, not drafted.
    # Step 3: token 3 is accepted, 4 rejected. Step 4: token 5, without nodes.
    assert_counts(stats, new_tokens=6, steps=4, drafted=9, accepted=2, accept_rate=2 / 5)


def test_an_end_of_text_on_an_accepted_path_is_no_rejection() -> None:
    text = greedy_text(engine_of("llama"), 12)
    assert text[6] not in text[:6]  # so it ends the text at the second token of the second step
    stats = scripted_stats("chain:4", 12, lambda token: 0, eos_token_id=text[6])
    assert_counts(stats, new_tokens=7, steps=2, drafted=8, accepted=6, accept_rate=1)
    assert stats.finish_reason == "stop"
