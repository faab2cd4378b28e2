"""No page of the cache is ever lost: however a request ends, all are free again and the engine still answers right."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from selfspec import Engine
from selfspec.backends.torch_backend import Session
from selfspec.cache.kv_cache import PAGE_SIZE, Cache, CacheFull
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import Exit
from tests.scripted import endless, left_padded, open_session, random_prompt
from tests.tiny import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

PROMPTS = [random_prompt(70), random_prompt(5), random_prompt(30)]  # the first holds two pages
NEW_TOKENS = 6
DRAFTING: dict[str, Any] = {"exit_layer": 2, "plan": "tree:3,2,1", "speculative_decoding": "force"}

plans = pytest.mark.parametrize("plan", ["none", "chain:4", "tree:3,2,1"])


@cache
def shared_engine() -> Engine:
    return Engine.from_model(endless(tiny_model("llama")), tokenizer=tiny_tokenizer())


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine that must have lost nothing, and must still be right, when the test is over."""
    engine = shared_engine()
    yield engine
    assert_unharmed(engine)


@cache
def right_answer() -> list[list[int]]:
    ids, mask = left_padded(PROMPTS)
    engine = Engine.from_model(endless(tiny_model("llama")))
    return engine.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, plan="none").tolist()


def answer(engine: Engine, **options: Any) -> list[list[int]]:
    ids, mask = left_padded(PROMPTS)
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **DRAFTING, **options}
    return engine.generate(ids, attention_mask=mask, **settings).tolist()


def assert_unharmed(engine: Engine) -> None:
    assert engine.cache.free_pages == engine.cache.num_pages
    assert answer(engine) == right_answer()
    assert engine.cache.free_pages == engine.cache.num_pages > 0


def used_pages(engine: Engine) -> int:
    return engine.cache.num_pages - engine.cache.free_pages


class Accident(Exception):
    pass


class FailsAt:
    """Fails at its n-th call, from 0; before that it does nothing. A processor, a criterion and a streamer."""

    def __init__(self, call: int, error: type[BaseException] = Accident) -> None:
        self.call = call
        self.error = error
        self.calls = 0

    def count(self) -> None:
        if self.calls == self.call:
            raise self.error
        self.calls += 1

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.count()
        return torch.tensor([False]) if scores is None else scores

    def put(self, value: torch.Tensor) -> None:
        self.count()

    def end(self) -> None:
        self.count()


# Streams


@plans
@pytest.mark.parametrize("pieces", range(6))
def test_a_stream_closed_after_any_piece_frees_its_pages(engine: Engine, pieces: int, plan: str) -> None:
    stream = engine.stream("abcdef", max_new_tokens=60, do_sample=False, **{**DRAFTING, "plan": plan})
    assert len(list(islice(stream, pieces))) == pieces
    assert (used_pages(engine) > 0) == (pieces > 0)
    stream.close()
    assert used_pages(engine) == 0
    assert list(stream) == []


def test_closing_a_stream_twice_is_harmless(engine: Engine) -> None:
    stream = engine.stream("abcdef", max_new_tokens=60, **DRAFTING)
    next(stream)
    stream.close()
    stream.close()


def test_leaving_the_block_of_a_stream_by_an_exception_frees_its_pages(engine: Engine) -> None:
    with pytest.raises(Accident), engine.stream("abcdef", max_new_tokens=60, **DRAFTING) as stream:
        next(stream)
        raise Accident
    assert used_pages(engine) == 0


def test_a_stream_that_was_never_started_holds_no_pages(engine: Engine) -> None:
    stream = engine.stream("abcdef", max_new_tokens=60, **DRAFTING)
    assert used_pages(engine) == 0
    stream.close()


def test_a_stream_that_is_dropped_frees_its_pages_at_once(engine: Engine) -> None:
    stream = engine.stream("abcdef", max_new_tokens=60, **DRAFTING)
    next(stream)
    del stream
    assert used_pages(engine) == 0


def test_a_stream_that_has_run_out_holds_no_pages(engine: Engine) -> None:
    stream = engine.stream("abcdef", max_new_tokens=9, **DRAFTING)
    assert list(stream)
    assert used_pages(engine) == 0


def test_closing_one_stream_leaves_the_other_its_pages(engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, **DRAFTING}
    expected = engine.complete("abcdef", **options)
    first, second = engine.stream("xyz", **options), engine.stream("abcdef", **options)
    next(first)
    text = next(second)
    first.close()
    assert text + "".join(second) == expected.text  # type: ignore[union-attr]


# Accidents


@plans
@pytest.mark.parametrize("call", [0, 1, 4, 13])
@pytest.mark.parametrize("error", [Accident, KeyboardInterrupt], ids=["error", "interrupt"])
def test_a_failing_processor_costs_no_page(engine: Engine, error: type[BaseException], call: int, plan: str) -> None:
    with pytest.raises(error):
        answer(engine, plan=plan, logits_processor=LogitsProcessorList([FailsAt(call, error)]))


@plans
@pytest.mark.parametrize("call", [0, 1, 4, 13])
def test_a_failing_stopping_criterion_costs_no_page(engine: Engine, call: int, plan: str) -> None:
    with pytest.raises(Accident):
        answer(engine, plan=plan, stopping_criteria=StoppingCriteriaList([FailsAt(call)]))


@plans
@pytest.mark.parametrize("call", [0, 1, 2, 4, NEW_TOKENS + 1], ids=["prompt", "first", "second", "fourth", "end"])
def test_a_failing_streamer_costs_no_page(engine: Engine, call: int, plan: str) -> None:
    ids = torch.tensor(PROMPTS[:1])
    options = {**DRAFTING, "plan": plan, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    with pytest.raises(Accident):
        engine.generate(ids, streamer=FailsAt(call), **options)


@pytest.mark.parametrize("call", range(0, 32, 3))
def test_an_interrupt_in_any_layer_of_prefill_draft_or_verify_costs_no_page(engine: Engine, call: int) -> None:
    """Twelve calls prefill the three prompts; a cycle of this tree makes ten more."""
    failing, run_layer = FailsAt(call, KeyboardInterrupt), Decoder.run_layer

    def interrupted(*args: Any) -> torch.Tensor:
        failing.count()
        return run_layer(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "run_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(engine)


@pytest.mark.parametrize("where", ["draft", "verify", "accept"])
def test_a_cycle_that_fails_leaves_the_cache_at_its_committed_length(
    engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(engine, PROMPTS, "tree:3,2,1", Exit(engine.model, 2), new_tokens=NEW_TOKENS)
    session.prefill()
    session.cycle()
    sequences = [row.sequence for row in session.rows]
    before = [sequence.length for sequence in sequences]
    known = [row.known for row in session.rows]
    step = getattr(session, where)

    def failing(*args: Any) -> None:
        step(*args)
        raise Accident

    monkeypatch.setattr(session, where, failing)
    with pytest.raises(Accident):
        session.cycle()
    assert [(s.length, s.drafted, s.verified) for s in sequences] == [(length, 0, 0) for length in before]
    assert all(row.known is old for row, old in zip(session.rows, known, strict=True))
    session.close()


@pytest.mark.parametrize("call", [0, 1, 4])
def test_a_stream_whose_processor_fails_frees_its_pages_and_is_over(engine: Engine, call: int) -> None:
    processors = LogitsProcessorList([FailsAt(call)])
    stream = engine.stream("abcdef", max_new_tokens=20, logits_processor=processors, **DRAFTING)
    with pytest.raises(Accident):
        list(stream)
    assert used_pages(engine) == 0
    assert list(stream) == []
    assert stream.completion is None


# Ends at different times


@plans
def test_rows_that_end_give_their_pages_back_while_others_go_on(engine: Engine, plan: str) -> None:
    width = max(map(len, PROMPTS))
    ends = right_answer()[0][width + 2]
    assert ends not in right_answer()[2][width:]
    used: list[int] = []

    def watch(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        used.append(used_pages(engine))
        return torch.tensor([False])

    answer(engine, plan=plan, eos_token_id=ends, stopping_criteria=StoppingCriteriaList([watch]))
    assert used[0] == 4 > used[-1]
    assert used[-1] >= 1


def test_pages_that_a_finished_row_gave_back_belong_to_whoever_takes_them_next(engine: Engine) -> None:
    first = open_session(engine, PROMPTS, "chain:4", Exit(engine.model, 2), NEW_TOKENS)
    first.rows[0].max_length = len(PROMPTS[0]) + 1
    first.prefill()
    first.cycle()
    assert first.rows[0].finish_reason == "length"
    second = open_session(engine, PROMPTS[:1], "chain:4", Exit(engine.model, 2), NEW_TOKENS)
    second.prefill()
    finish(first)
    assert used_pages(engine) == len(second.rows[0].sequence.pages) == 2
    finish(second)
    assert second.rows[0].tokens == right_answer()[0]


def finish(session: Session) -> None:
    while session.active:
        session.cycle()
    session.close()


# Limits


def small_engine() -> Engine:
    """Room for one row of 64 positions and 64 nodes: two pages."""
    engine = Engine.from_model(endless(tiny_model("llama")), tokenizer=tiny_tokenizer(), max_batch=1, max_length=64)
    assert engine.cache.max_pages == 2
    return engine


def test_a_cache_that_is_full_fails_the_request_and_spares_the_others() -> None:
    engine = small_engine()
    options: dict[str, Any] = {"max_new_tokens": 55, "do_sample": False, **DRAFTING}
    expected = engine.complete("abcdef", **options).text  # type: ignore[union-attr]
    first, second = engine.stream("abcdef", **options), engine.stream("xyz", **options)
    text = next(first)
    next(second)
    with pytest.raises(CacheFull, match="full"):  # the two hold a page each, and the first now needs both
        text += "".join(first)
    assert used_pages(engine) == 1
    assert "".join(second)
    assert used_pages(engine) == 0
    assert expected.startswith(text)
    assert "".join(engine.stream("abcdef", **options)) == expected


def test_a_cache_that_is_full_at_prefill_frees_what_the_request_had_taken() -> None:
    engine = small_engine()
    stream = engine.stream("abcdef", max_new_tokens=40, do_sample=False, plan="none")
    next(stream)
    with pytest.raises(CacheFull):
        engine.generate(torch.tensor([random_prompt(60)]), max_new_tokens=4, do_sample=False, **DRAFTING)
    assert used_pages(engine) == 1
    stream.close()
    assert used_pages(engine) == 0


def test_a_cache_that_is_full_when_a_prompt_is_copied_frees_the_copies() -> None:
    engine = Engine.from_model(endless(tiny_model("llama")), max_batch=3, max_length=200)
    room = engine.cache.max_pages
    assert room == 15
    others = open_session(engine, [random_prompt(20)] * (room - 3), "none", None)
    others.prefill()
    ids = torch.tensor([random_prompt(PAGE_SIZE + 9)])  # one full page to share, and a page of its own for each copy
    with pytest.raises(CacheFull):
        engine.generate(ids, do_sample=True, num_return_sequences=3, **DRAFTING)
    assert used_pages(engine) == room - 3
    others.close()
    assert used_pages(engine) == 0


def test_a_limited_engine_serves_its_whole_context_again_and_again() -> None:
    engine = small_engine()
    for _ in range(3):
        output = engine.generate(torch.tensor([random_prompt(50)]), max_new_tokens=100, do_sample=False, **DRAFTING)
        assert output.shape == (1, 64)  # type: ignore[union-attr]
    assert engine.cache.free_pages == engine.cache.num_pages == 2


@pytest.mark.parametrize("call", [0, 1, 2, 3])
def test_running_out_of_memory_costs_no_page(call: int) -> None:
    engine = Engine.from_model(endless(tiny_model("llama")))
    failing, grow = FailsAt(call, torch.OutOfMemoryError), Cache._grow

    def limited(kv: Cache, missing: int) -> None:
        failing.count()
        kv.max_pages = kv.num_pages + missing  # so that every page asks anew
        grow(kv, missing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "_grow", limited)
        with pytest.raises(torch.OutOfMemoryError):
            answer(engine, max_new_tokens=60)
    engine.cache.max_pages = None
    assert engine.cache.free_pages == engine.cache.num_pages
    assert_unharmed(engine)


# Copies


@pytest.mark.parametrize(
    ("length", "shared", "own"),
    [(20, 0, 1), (PAGE_SIZE + 1, 1, 0), (2 * PAGE_SIZE + 1, 2, 0), (2 * PAGE_SIZE + 3, 2, 1)],
)
def test_copies_share_the_full_pages_of_their_prompt(engine: Engine, length: int, shared: int, own: int) -> None:
    copies = 4
    session = open_session(engine, [random_prompt(length)], "chain:2", Exit(engine.model, 2), copies=copies)
    session.prefill()
    assert used_pages(engine) == shared + own  # the last page too is shared until somebody writes to it
    session.cycle()
    assert used_pages(engine) == shared + copies
    session.close()


def test_a_copy_that_ends_leaves_the_shared_pages_to_the_others(engine: Engine) -> None:
    prompt, copies = random_prompt(2 * PAGE_SIZE + 3), 3
    session = open_session(engine, [prompt], "chain:4", Exit(engine.model, 2), NEW_TOKENS, copies)
    session.rows[0].max_length = len(prompt) + 1
    session.prefill()
    session.cycle()
    assert used_pages(engine) == 2 + copies - 1
    answer(engine)  # writes to every page that is free by mistake
    finish(session)
    expected = engine.generate(torch.tensor([prompt]), plan="none", do_sample=False, max_new_tokens=NEW_TOKENS)
    assert [row.tokens for row in session.rows[1:]] == [expected[0].tolist()] * 2  # type: ignore[union-attr]


def test_an_accident_among_copies_frees_shared_pages_once(engine: Engine) -> None:
    ids = torch.tensor([random_prompt(2 * PAGE_SIZE + 3)])
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": NEW_TOKENS}
    with pytest.raises(Accident):
        engine.generate(ids, logits_processor=LogitsProcessorList([FailsAt(9)]), **DRAFTING, **options)
