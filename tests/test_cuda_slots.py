"""The slots of a batch against a model of them in plain Python: writes, moves, idle slots, processing parameters."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from selfspec.backends.cuda.slots import (
    DRAFTING,
    IDLE,
    IDLE_VALUES,
    MAX_STOPS,
    PLAIN,
    SlotStore,
    StepOptions,
    slot_values,
)
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request, Sequence

CAPACITY, PAGES, VOCABULARY, IDLE_PAGE = 8, 5, 11, 99
STATE_FIELDS = [name for name in slot_values(Sequence([1], 0, 0, 2)) if name != "stops"]
OFF = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}


class Model:
    """The expected values of each slot."""

    def __init__(self) -> None:
        self.slots: list[dict[str, Any]] = [self.idle() for _ in range(CAPACITY)]

    @staticmethod
    def idle() -> dict[str, Any]:
        fields = {name: OFF.get(name, 0) for name in STATE_FIELDS}
        return {
            **fields,
            "unfilled": 0,
            "stops": (),
            "seed": 0,
            "pages": [IDLE_PAGE],
            "processed": None,
            "feature": None,
        }

    def check(self, store: SlotStore, features: torch.Tensor) -> None:
        for count in (1, 2, 4, 8):
            view = store.first(count)
            for slot in range(count):
                self.check_slot(self.slots[slot], view, slot, store, features)

    def check_slot(
        self, expected: dict[str, Any], view: Any, slot: int, store: SlotStore, features: torch.Tensor
    ) -> None:
        if expected["active"] == IDLE:  # other values of an idle slot are not read
            assert [int(getattr(view, name)[slot]) for name in ("active", "lengths", "unfilled")] == [0, 0, 0]
            assert int(view.page_table[slot, 0]) == IDLE_PAGE
            return
        for name in (*STATE_FIELDS, "unfilled"):
            assert getattr(view, name)[slot].item() == pytest.approx(expected[name]), name
        assert int(view.seeds[slot]) == expected["seed"]
        assert view.stops[slot].tolist() == [*expected["stops"], *[-1] * (MAX_STOPS - len(expected["stops"]))]
        assert view.page_table[slot, : len(expected["pages"])].tolist() == expected["pages"]
        assert float(features[slot, 0]) == expected["feature"]
        bias, counts = expected["processed"] or ([0.0] * VOCABULARY, None)
        assert store.bias[slot].tolist() == bias
        assert counts is None or store.counts[slot].tolist() == counts


def random_values(dice: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {name: dice.randint(1, 90) for name in STATE_FIELDS}
    fields |= {name: dice.random() for name in OFF}
    fields["active"] = dice.choice([PLAIN, DRAFTING])
    return {**fields, "stops": tuple(dice.sample(range(VOCABULARY), dice.randint(0, 3)))}


def random_processing(
    dice: random.Random,
) -> tuple[tuple[SamplingParams, list[int], list[int]], tuple[list[float], list[int]]]:
    """Random arguments of `write_processing`, and the expected bias and counts."""
    allowed = tuple(sorted(dice.sample(range(VOCABULARY), 6))) if dice.random() < 0.5 else None
    banned = tuple(dice.sample(range(VOCABULARY), dice.randint(0, 2)))
    bias = tuple((token, dice.choice([-2.0, 0.5])) for token in dice.sample(range(VOCABULARY), dice.randint(0, 3)))
    text = [dice.choices(range(VOCABULARY), k=dice.randint(0, 6)) for _ in range(2)]
    values = [
        -math.inf if (allowed is not None and t not in allowed) or t in banned else 0.0 for t in range(VOCABULARY)
    ]
    for token, value in bias:
        values[token] += value
    counts = [(token in text[0]) + 2 * text[1].count(token) for token in range(VOCABULARY)]
    params = SamplingParams(logit_bias=bias, banned_token_ids=banned, allowed_token_ids=allowed)
    return (params, text[0], text[1]), (values, counts)


class Driven:
    """Slots and their model, to which the same random changes are made, by a seed."""

    def __init__(self, seed: int) -> None:
        self.dice, self.model = random.Random(seed), Model()
        self.store = SlotStore(CAPACITY, PAGES, VOCABULARY, torch.device("cpu"), IDLE_PAGE)
        self.features = torch.zeros(CAPACITY, 1)

    def free(self) -> list[int]:
        return [slot for slot, values in enumerate(self.model.slots) if values["active"] == IDLE]

    def taken(self) -> list[int]:
        return [slot for slot in range(CAPACITY) if slot not in self.free()]

    def some(self, slots: list[int]) -> list[int]:
        return sorted(self.dice.sample(slots, self.dice.randint(0, len(slots))))

    def write(self) -> None:
        """Takes some free slots and makes others idle in the same write."""
        joined, left = self.some(self.free()), self.some(self.taken())
        if not joined and not left:
            return
        values = [random_values(self.dice) for _ in joined]
        seeds = [self.dice.randint(0, 2**40) for _ in joined]
        pages = [[self.dice.randint(0, 90) for _ in range(self.dice.randint(1, PAGES))] for _ in joined]
        self.store.write(
            [*joined, *left], [*values, *(IDLE_VALUES for _ in left)], [*seeds, *(0 for _ in left)],
            [*pages, *([IDLE_PAGE] for _ in left)],
        )  # fmt: skip
        for slot in left:
            self.model.slots[slot] = self.model.idle()
        for slot, written, seed, of_slot in zip(joined, values, seeds, pages, strict=True):
            self.features[slot] = float(seed % 1000)
            own = {**written, "seed": seed, "pages": of_slot, "feature": float(seed % 1000)}
            self.model.slots[slot] = {**self.model.idle(), **own}
            if self.dice.random() < 0.5:
                written, expected = random_processing(self.dice)
                self.store.write_processing(slot, *written)
                self.model.slots[slot]["processed"] = expected
            else:
                self.store.clear_processing(slot)

    def grow(self) -> None:
        """Gives some slots' sequences a page; the slots need not be neighbours."""
        slots = [slot for slot in self.some(self.taken()) if len(self.model.slots[slot]["pages"]) < PAGES]
        for slot in slots:
            self.model.slots[slot]["pages"].append(self.dice.randint(0, 90))
        if slots:
            self.store.write_pages(slots, [self.model.slots[slot]["pages"] for slot in slots])

    def change_drafting(self) -> None:
        slots = self.some(self.taken())
        if not slots:
            return
        drafts = [self.dice.random() < 0.5 for _ in slots]
        self.store.write_drafting(slots, drafts)
        for slot, drafting in zip(slots, drafts, strict=True):
            self.model.slots[slot]["active"] = DRAFTING if drafting else PLAIN

    def move(self) -> None:
        sources, free = self.some(self.taken()), self.free()
        sources = sources[: len(free)]
        if not sources:
            return
        targets = self.dice.sample(free, len(sources))
        self.store.first(CAPACITY).unfilled[sources] = 3  # as plain steps count them
        for source in sources:
            self.model.slots[source]["unfilled"] = 3
        self.store.move(sources, targets, self.features)
        for source, target in zip(sources, targets, strict=True):
            self.model.slots[target], self.model.slots[source] = self.model.slots[source], self.model.idle()


@pytest.mark.parametrize("seed", range(3))
def test_slots_keep_their_values_through_writes_and_moves(seed: int) -> None:
    driven = Driven(seed)
    for _ in range(40):
        driven.dice.choice([driven.write, driven.grow, driven.change_drafting, driven.move])()
        driven.model.check(driven.store, driven.features)
    driven.store.idle()
    driven.model.slots = [Model.idle() for _ in range(CAPACITY)]
    driven.model.check(driven.store, driven.features)
    assert (driven.store.page_table == IDLE_PAGE).all()


def test_fields_begin_at_multiples_of_16_bytes() -> None:
    """Triton then compiles a kernel once for all capacities."""
    for capacity in (1, 2, 3, 16):
        store = SlotStore(capacity, 4, 5, torch.device("cpu"), 0)
        view = store.first(capacity)
        fields = [field for name, field in vars(view).items() if torch.is_tensor(field) and name != "page_table"]
        assert len(fields) == 17 and not any(field.data_ptr() % 16 for field in fields)


def test_processing_is_off_in_the_slot_of_a_sequence_with_callables() -> None:
    params = SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, min_new_tokens=3, stop_token_ids=(2,)
    )
    sequences = [Sequence([5] * 5, 0, 0, 9, params) for _ in range(2)]
    Request(sequences[1:], processors=(lambda tokens, logits: logits,))
    on, off = map(slot_values, sequences)
    names = ("repetition", "presence", "frequency", "min_length", "temperature")
    assert [on[name] for name in names] == [1.2, 0.3, 0.2, 8, 0.0]  # greedy
    assert [off[name] for name in names] == [1.0, 0.0, 0.0, 0, 0.0]


def test_step_options_cover_all_sequences_and_are_one_of_four() -> None:
    """Each combination is captured separately, so there are few."""
    greedy, sampled = SamplingParams(top_k=5), SamplingParams(do_sample=True)
    small_top_k, top_p = SamplingParams(do_sample=True, top_k=64, top_p=0.5), SamplingParams(do_sample=True, top_p=0.5)
    biased = SamplingParams(logit_bias={1: 1.0})
    truncating = StepOptions(samples=True)
    everything = StepOptions(samples=True, processes=True)
    assert StepOptions.of([greedy]) == StepOptions()
    assert StepOptions.of([greedy, biased]) == StepOptions(processes=True)
    assert StepOptions.of([greedy, sampled]) == StepOptions.of([sampled, small_top_k]) == truncating
    assert StepOptions.of([small_top_k, top_p]) == StepOptions.of([sampled, biased]) == everything
