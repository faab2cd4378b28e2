"""Prefix reuse: prompts that begin with the tokens of other texts reuse their pages, and get the tokens that they get
without.

Float64 models, so that no rounding tie hides or fakes a fault.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec import Engine
from selfspec import scheduler as scheduler_module
from selfspec.backends import torch_backend
from selfspec.batch import Batch
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.cache.prefixes import PageKeys, PrefillKind, Prefixes
from selfspec.sequence import Sequence
from selfspec.speculation.exit_scoring import PROMPT_END
from selfspec.speculation.plan import NONE
from tests.scripted import random_prompt
from tests.test_random_requests import Call, run
from tests.test_scheduler import (
    LEAST_PAGES,
    PLAIN,
    TREE,
    assert_all_pages_free,
    generate,
    hf_model,
    new_engine,
    plain_engine,
    request_of,
    tokens_of,
)

GREEDY: dict[str, Any] = {"do_sample": False}
SPECULATIONS: list[dict[str, Any]] = [{}, PLAIN, TREE, {"exit_layer": 1, "plan": "chain:4"}]


@cache
def without_reuse() -> Engine:
    return new_engine(prefix_reuse=False)


@cache
def expected(prompt: tuple[int, ...], seed: int, count: int, samples: int) -> list[list[int]]:
    """The tokens of the samples of a prompt, decoded plainly and alone, without reuse."""
    return generate(without_reuse(), list(prompt), **sampled(seed, count, samples), **PLAIN)


def sampled(seed: int, count: int, samples: int = 1) -> dict[str, Any]:
    return {"do_sample": True, "seed": seed, "max_new_tokens": count, "num_return_sequences": samples}


def random_text(random: Random) -> list[int]:
    """The beginning of one of two texts, in half of the cases with the answer to it, and some tokens of its own."""
    begin = random_prompt(150, random.randrange(2))[: random.choice([40, 64, 100, 129, 150])]
    if random.random() < 0.5:
        begin = begin + expected(tuple(begin), 0, 30, 1)[0]
    return begin + random_prompt(random.choice([1, 5, 40]), random.randrange(3))


@settings(max_examples=4)
@given(st.randoms(use_true_random=True))
def test_every_sequence_gets_the_tokens_that_it_gets_without_reuse(random: Random) -> None:
    calls = []
    for _ in range(random.randint(2, 9)):
        setting = random.randrange(2), random.choice([1, 7, 30]), random.choice([1, 1, 2])
        options = {**sampled(*setting), **random.choice(SPECULATIONS), "setting": setting}
        cancelled = random.choice([None] * 5 + [0, 1, 5, 15])
        calls.append(Call([random_text(random)], options, random.choice([0, 0, 2, 10, 30]), cancelled))
    engine = new_engine(random.choice([LEAST_PAGES + 3, LEAST_PAGES + 6, None]), random.choice([1, 3, 16]))
    settings_of = [call.options.pop("setting") for call in calls]
    for call in calls:
        call.request = request_of(engine, call.prompts, **call.options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "_STEP_POSITIONS", random.choice([1, scheduler_module._STEP_POSITIONS]))
        patch.setattr(torch_backend, "PREFILL_CHUNK", random.choice([16, 512]))
        run(engine, calls)
    for call, setting in zip(calls, settings_of, strict=True):
        assert call.request.error is None
        for got, alone in zip(tokens_of(call.request), expected(tuple(call.prompts[0]), *setting), strict=True):
            assert got == (alone if call.is_cancelled_at is None else alone[: len(got)])
    prompts = [sequence for call in calls for sequence in call.request.sequences if sequence.is_prefilled]
    summary = engine.metrics()
    assert summary.prefix_cache_hits == sum(sequence.cached_tokens for sequence in prompts if sequence.parent is None)
    assert summary.prefix_cache_queries == sum(len(sequence.prompt) for sequence in prompts if sequence.parent is None)
    assert_all_pages_free(engine)
    assert_all_pages_can_be_taken(engine.cache)


def assert_all_pages_can_be_taken(cache: Cache) -> None:
    kv = cache.open()
    cache.reserve(kv, cache.num_pages * PAGE_SIZE)
    assert sorted(kv.pages) == list(range(cache.num_pages)) and cache.reusable_pages == 0
    cache.close(kv)


def answered(engine: Engine, prompt: list[int], **options: Any) -> Sequence:
    request = request_of(engine, [prompt], **options)
    engine.scheduler.submit(request)
    engine.scheduler.wait(request)
    return request.sequences[0]


@pytest.mark.parametrize("speculation", [PLAIN, TREE], ids=["plain", "tree"])
def test_the_second_turn_of_a_chat_reuses_prompt_and_answer(speculation: dict[str, Any]) -> None:
    engine, options = new_engine(), {**GREEDY, **speculation, "max_new_tokens": 70}
    first = answered(engine, random_prompt(100), **options)
    assert first.cached_tokens == 0
    held = engine.memory()
    assert held["cache_used"] == 0 and held["cache_reusable"] == 2 * held["cache"] // engine.cache.num_pages
    prompt = first.tokens + random_prompt(PROMPT_END)
    second = answered(engine, prompt, **options)
    assert second.cached_tokens == 2 * PAGE_SIZE
    assert second.tokens == prompt + generate(plain_engine(), prompt, **GREEDY, **PLAIN, max_new_tokens=70)[0]
    summary = engine.metrics()
    assert summary.prefix_cache_queries == 100 + len(prompt) and summary.prefix_cache_hits == 2 * PAGE_SIZE


def test_prompts_with_another_exit_or_without_reuse_share_no_pages() -> None:
    engine, off = new_engine(), without_reuse()
    prompt = random_prompt(140)
    for options in (PLAIN, TREE, {"exit_layer": 1, "plan": "chain:2"}):
        assert answered(engine, prompt, **GREEDY, max_new_tokens=2, **options).cached_tokens == 0
        assert answered(engine, prompt, **GREEDY, max_new_tokens=2, **options).cached_tokens == PAGE_SIZE
    for _ in range(2):
        assert answered(off, prompt, **GREEDY, max_new_tokens=2, **PLAIN).cached_tokens == 0
    assert off.cache.reusable_pages == off.memory()["cache_reusable"] == 0


def test_a_request_that_drafts_reuses_the_prompt_of_a_request_for_one_token() -> None:
    engine, prompt = new_engine(), random_prompt(140)
    first = answered(engine, prompt, **GREEDY, max_new_tokens=1, exit_layer=1)
    assert (first.history.drafted, first.disabled_reason) == (0, "goodput")
    assert answered(engine, prompt, **GREEDY, max_new_tokens=9, exit_layer=1).cached_tokens == PAGE_SIZE


def test_a_prompt_reuses_the_pages_of_a_sequence_that_is_still_decoding() -> None:
    engine = new_engine()
    prompt = random_prompt(140)
    calls = [Call([prompt], {**GREEDY, "max_new_tokens": 30, **PLAIN}, arrives) for arrives in (0, 5)]
    for call in calls:
        call.request = request_of(engine, call.prompts, **call.options)
    run(engine, calls)
    assert [call.request.sequences[0].cached_tokens for call in calls] == [0, PAGE_SIZE]
    assert tokens_of(calls[0].request) == tokens_of(calls[1].request)


def test_reusable_pages_hold_the_keys_and_values_of_a_fresh_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the exit too: pages whose exit KV plain steps have left unfilled are not reusable."""
    engine, fresh = new_engine(), new_engine()
    sequence = answered(engine, random_prompt(50), **GREEDY, max_new_tokens=120, **TREE)
    monkeypatch.setattr(Batch, "_choose_plan", lambda _: (NONE, "goodput"))
    plain = answered(engine, random_prompt(130), **GREEDY, max_new_tokens=70, **TREE)
    assert plain.history.drafted == 0
    exit = engine.drafters.exits[2]
    for found, pages in ((sequence, 2), (plain, 2)):
        tokens = found.tokens
        keys = PageKeys(PrefillKind("torch", PAGE_SIZE, True), (2, id(exit.block))).first(pages + 1, tokens)
        reusable = engine.cache._prefixes.find(keys)
        assert len(reusable) == pages
        other = request_of(fresh, [tokens[: pages * PAGE_SIZE + 1]], **GREEDY, max_new_tokens=2, **TREE).sequences[0]
        while not fresh.new_backend().prefill([other], exit):
            pass
        for ours, theirs in ((engine.cache.keys, fresh.cache.keys), (engine.cache.values, fresh.cache.values)):
            torch.testing.assert_close(ours[:, reusable], theirs[:, other.kv.pages[:pages]], atol=1e-9, rtol=1e-9)


def test_a_failed_request_leaves_no_reusable_pages() -> None:
    engine = new_engine()

    def overflow(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan")

    request = request_of(engine, [random_prompt(140)], **GREEDY, max_new_tokens=5, logits_processor=[overflow])
    engine.scheduler.submit(request)
    with pytest.raises(ValueError, match="not finite"):
        engine.scheduler.wait(request)
    assert engine.cache.reusable_pages == 0 and engine.cache.free_pages == engine.cache.num_pages


def test_the_least_recently_used_pages_are_taken_back_first() -> None:
    prefixes = Prefixes()
    keys = [bytes([number]) for number in range(40)]
    for page, key in enumerate(keys):
        prefixes.register(key, page)
    for page in reversed(range(40)):
        assert prefixes.keep(page)
    assert not prefixes.keep(40)
    prefixes.hold(39)
    prefixes.keep(39)
    assert prefixes.take_back() == list(range(38, 22, -1))
    assert prefixes.find(keys) == list(range(23)) and prefixes.find(keys[39:]) == [39] and prefixes.reusable == 24


def test_a_pages_key_depends_on_all_tokens_up_to_its_end_on_the_kind_of_prefill_and_on_the_exit() -> None:
    tokens, kind = random_prompt(3 * PAGE_SIZE), PrefillKind("torch", PAGE_SIZE, True)
    keys = PageKeys(kind, None)
    assert keys.first(1, tokens) + keys.first(3, tokens)[1:] == PageKeys(kind, None).first(3, tokens)
    other = [tokens[0] + 1, *tokens[1:]]
    others = [(kind, None, other), (PrefillKind("chunks", 512, False), None, tokens), (kind, (2, 7), tokens)]
    found = {key for *given, text in others for key in PageKeys(*given).first(3, text)} | set(keys.first(3, tokens))
    assert len(found) == 12
    assert PageKeys(PrefillKind("chunks", 512, False), None).units(1100) == 16


def test_log_probabilities_of_a_prompt_are_those_of_a_fresh_prefill() -> None:
    engine, prompt = new_engine(), random_prompt(140)
    options: dict[str, Any] = {**GREEDY, "max_new_tokens": 2, "prompt_logprobs": 1, **PLAIN}
    for _ in range(2):
        found = answered(engine, prompt, **options)
        assert found.cached_tokens == 0 and len(found.prompt_logprobs) == len(prompt) - 1
    del options["prompt_logprobs"]
    assert answered(engine, prompt, **options).cached_tokens == PAGE_SIZE


def test_an_engine_of_a_live_model_whose_weights_may_change_reuses_nothing_unasked() -> None:
    engine = Engine.from_model(hf_model())
    assert [answered(engine, random_prompt(140), **GREEDY, max_new_tokens=2).cached_tokens for _ in range(2)] == [0, 0]
