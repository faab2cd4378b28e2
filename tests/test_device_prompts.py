"""Short prompts through the kernels that decode, in Triton's interpreter: what PyTorch's prefill leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec import Engine
from selfspec.backends.cuda import prompt_scoring as device_judge
from selfspec.backends.cuda import short_prefill as device_prompts
from selfspec.backends.cuda.graphs import Machine
from selfspec.backends.cuda.short_prefill import (
    LONGEST,
    MOST_STRETCHES,
    SHORT,
    Marking,
    Prompts,
    pass_size,
    passes,
    stretches,
)
from selfspec.cache.kv_cache import CacheFull, Rows, Sequence, flat_slot
from selfspec.profiles.router import marks_of
from selfspec.speculation.exit import Exit, recalled
from tests.test_device_session import LAYER, engines, open_session

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter, where there is no GPU")

COUNT, STRETCH, END = 4, 4, 6  # small ones: interpreted kernels are slow
TEXTS = [[int(7 * i % 90 + 3) for i in range(length)] for length in (9, 3)]  # three stretches, and one


@given(st.lists(st.integers(1, LONGEST), max_size=40))
def test_texts_are_passed_in_their_order_and_no_pass_is_too_large(lengths: list[int]) -> None:
    groups = list(passes(lengths))
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    for group in groups:
        inside = [lengths[index] for index in group]
        count, stretch, longest = pass_size(inside)
        assert sum(map(stretches, inside)) <= count <= MOST_STRETCHES
        assert max(inside) <= stretch or stretch == 64
        assert max(inside) <= longest
    fuller = [
        sum(stretches(lengths[i]) for i in (*one, other[0])) for one, other in zip(groups, groups[1:], strict=False)
    ]
    assert all(taken > MOST_STRETCHES for taken in fuller)  # none ends before it has to


def machine_of(engine: Engine) -> Machine:
    assert engine._machine is not None
    return engine._machine


def run(engine: Engine, made: Any, texts: list[list[int]]) -> list[Sequence]:
    """One pass over some texts; their sequences then hold them."""
    sequences = [engine.cache.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        engine.cache.reserve(sequence, len(text))
    made.load([(text, sequence.pages) for text, sequence in zip(texts, sequences, strict=True)])
    with torch.inference_mode():
        made.launch()
    return sequences


def small(engine: Engine) -> tuple:
    machine = machine_of(engine)
    return engine.model, engine.cache, machine.scratch, COUNT, STRETCH, SHORT, machine.idle_page()


def left_in_cache(engine: Engine, sequence: Sequence, count: int) -> list[torch.Tensor]:
    slots = [flat_slot(sequence, slot) for slot in range(count)]
    return [tensor.flatten(1, 2)[:, slots] for tensor in (engine.cache.keys, engine.cache.values)]


def of_pytorch(engine: Engine, exit: Exit, text: list[int]) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """What a prompt leaves: keys and values, what is known at its end, and what it is judged by."""
    session = open_session(
        engine, [*text, 5], {"speculative_decoding": "force", "plan": "chain:1", "exit_layer": LAYER}
    )
    session.prefill()
    row = session.rows[0]
    left = left_in_cache(engine, row.sequence, len(text))
    assert row.known is not None
    known = row.known
    session.close()
    with torch.inference_mode():
        sequence = engine.cache.open()
        engine.cache.reserve(sequence, len(text))
        at, model = Rows.causal([sequence], len(text), engine.model.device), engine.model
        states = model.run(model.embed(torch.tensor([text])), 0, LAYER, at, engine.cache)
        middle = model.run(states, LAYER, exit.recalled_layer, at, engine.cache)
        last = model.run(middle, exit.recalled_layer, model.config.num_layers, at, engine.cache)
        of_all = recalled(model, middle, last)
        previous = torch.cat((torch.zeros_like(of_all[:, :1]), of_all[:, :-1]), dim=1)
        engine.cache.close(sequence)
    return left, known, torch.cat((states, previous, model.read(last)), dim=-1)[0, -END:]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_prompts_leave_what_pytorch_leaves(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device_prompts, device_judge):
        monkeypatch.setattr(module, "PROMPT_END", END)
    engine, pytorch = engines(family)
    exit = engine.drafters.exits[LAYER]
    made = Prompts(*small(engine), exit=exit)
    sequences = run(engine, made, TEXTS)
    for number, (text, sequence) in enumerate(zip(TEXTS, sequences, strict=True)):
        left, known, judged = of_pytorch(pytorch, exit, text)
        found = left_in_cache(engine, sequence, len(text))
        ends = made.judged[number, : min(len(text), END)]
        for ours, theirs in zip([*found, made.known[number], ends], [*left, known, judged], strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
        engine.cache.close(sequence)


def test_a_prompt_leaves_the_same_bits_in_any_company_and_whether_drafted_for_or_not() -> None:
    engine, _ = engines("llama")
    exit, layers = engine.drafters.exits[LAYER], engine.model.config.num_layers
    found = []
    for made, texts in (
        (Prompts(*small(engine), exit=exit), TEXTS),
        (Prompts(*small(engine), exit=exit), [TEXTS[1], TEXTS[0]]),
        (Prompts(*small(engine), exit=None), [TEXTS[0]]),
    ):
        sequences = run(engine, made, texts)
        place = texts.index(TEXTS[0])
        found.append(left_in_cache(engine, sequences[place], len(TEXTS[0])))
        for sequence in sequences:
            engine.cache.close(sequence)
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert torch.equal(ours[:layers], theirs[:layers])
    assert torch.equal(found[0][0][layers], found[1][0][layers])  # the exit's own keys


def test_sums_of_marks_are_those_of_routing() -> None:
    engine, _ = engines("llama")
    made = Marking(*small(engine), layer=LAYER)
    for sequence in run(engine, made, TEXTS):
        engine.cache.close(sequence)
    sums = torch.stack([of_text.sum(0) for of_text in made.sums.split([3, 1])])
    found = sums / torch.tensor([[len(text)] for text in TEXTS])
    torch.testing.assert_close(found, marks_of(engine.model, engine.cache, TEXTS, LAYER), atol=1e-5, rtol=1e-5)


def test_whole_requests_with_short_prompts_have_the_tokens_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = engines("llama")
    monkeypatch.setattr(machine_of(ours), "short_prompt", LONGEST)
    ids, mask = torch.tensor([[0, 0, 9, 40], [7, 11, 12, 13]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    written = [
        engine.generate(
            ids, mask, speculative_decoding="force", plan="chain:1", exit_layer=LAYER, max_new_tokens=3,
            do_sample=False, pad_token_id=0,
        ).tolist()
        for engine in (ours, theirs)
    ]  # fmt: skip
    assert written[0] == written[1]
    marked = machine_of(ours).marks([[9, 40]], LAYER)
    torch.testing.assert_close(marked, marks_of(theirs.model, theirs.cache, [[9, 40]], LAYER), atol=1e-5, rtol=1e-5)
    assert ours.cache.free_pages == ours.cache.num_pages - 1  # but for the idle one


def test_a_cache_that_is_full_fails_the_request_and_keeps_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engines("llama")
    machine, cache = machine_of(engine), engine.cache
    machine.idle_page()
    monkeypatch.setattr(machine, "short_prompt", LONGEST)
    monkeypatch.setattr(cache, "max_pages", cache.num_pages)
    taken = cache.open()
    cache.reserve(taken, 64 * cache.free_pages)
    session = open_session(engine, [5, 6, 7], {"speculative_decoding": False})
    with pytest.raises(CacheFull):
        list(session.run())
    assert cache.free_pages == 0 and not machine.owners
    cache.close(taken)
    assert cache.free_pages == cache.num_pages - 1  # but for the idle one
