"""The final norm and the states it saves for the exit, in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from selfspec.kernels.final_norm import SlotUnfilled, final_norm, final_norm_reference, unfilled_capacity
from selfspec.kernels.norm import rms_norm

EPS, OFFSET = 1e-5, 1.0


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize(
    ("hidden", "rows", "recalls"),
    [(16, 1, False), (48, 3, True), (2080, 1, True)],  # 48: blocks that fill no power of two; 2080: wider blocks
)
def test_the_norm_matches_the_reference_and_has_the_bits_of_rms_norm(hidden: int, rows: int, recalls: bool) -> None:
    """Plain and drafting steps, with and without an exit, must give the LM head the same bits."""
    last, weight, middle = drawn(rows, hidden), drawn(hidden, seed=1), drawn(rows, hidden, seed=2) if recalls else None
    room = poisoned(rows, (2 if recalls else 1) * hidden + 5)  # rows further apart
    out = room[:, :-5]
    final_norm(last, weight, EPS, OFFSET, out, middle)
    torch.testing.assert_close(out, final_norm_reference(last, weight, EPS, OFFSET, middle))
    assert room[:, -5:].isnan().all()
    normed = poisoned(rows, hidden)
    rms_norm(last, weight, EPS, OFFSET, normed)
    assert torch.equal(out[:, :hidden], normed)
    if middle is not None:
        rms_norm(middle, None, torch.finfo(middle.dtype).eps, 0.0, normed)
        assert torch.equal(out[:, hidden:], normed)


@pytest.mark.parametrize("recalls", [False, True])
def test_exit_inputs_are_saved_in_order_with_the_previous_state(recalls: bool) -> None:
    sequences, hidden, width = 2, 48, 96 if recalls else 48
    rows = unfilled_capacity(sequences) * sequences
    unfilled = SlotUnfilled(torch.zeros(sequences, dtype=torch.int32), poisoned(rows, 48), poisoned(rows, 96))
    out, weight = drawn(sequences, width, seed=9), drawn(hidden, seed=1)
    unfilled.counts[1] = 2  # one sequence has more unfilled positions than the other
    for step in range(3):
        before, states = out.clone(), drawn(sequences, hidden, seed=20 + step)
        middle = drawn(sequences, hidden, seed=30 + step) if recalls else None
        last = drawn(sequences, hidden, seed=40 + step)
        final_norm(last, weight, EPS, OFFSET, out, middle, hidden=states, unfilled=unfilled)
        torch.testing.assert_close(out, final_norm_reference(last, weight, EPS, OFFSET, middle))
        for sequence, place in enumerate((step, step + 2)):
            at = place * sequences + sequence
            assert torch.equal(unfilled.hidden[at], states[sequence])
            assert torch.equal(unfilled.previous[at], before[sequence]) if recalls else unfilled.previous.isnan().all()
    assert unfilled.counts.tolist() == [3, 5]
    written = ~unfilled.hidden.isnan().any(1)
    assert written.nonzero().flatten().tolist() == sorted([0, 2, 4] + [5, 7, 9])


def test_a_full_buffer_is_not_exceeded() -> None:
    room = unfilled_capacity(1)
    unfilled = SlotUnfilled.empty(torch.full((1,), room, dtype=torch.int32), 16, torch.float32)
    around = torch.zeros(room + 1, 16)
    unfilled = SlotUnfilled(unfilled.counts, around[:room], unfilled.previous)
    final_norm(drawn(1, 16), drawn(16), EPS, 0.0, poisoned(1, 16), hidden=drawn(1, 16) + 9, unfilled=unfilled)
    assert unfilled.counts.tolist() == [room]
    assert not around[room].any()


def test_more_positions_of_few_sequences_can_be_saved() -> None:
    for sequences, capacity in ((1, 32), (2, 32), (4, 16), (32, 16)):
        unfilled = SlotUnfilled.empty(torch.zeros(sequences, dtype=torch.int32), 16, torch.float32)
        assert unfilled.capacity == unfilled_capacity(sequences) == capacity


def test_tensors_that_do_not_fit_are_refused() -> None:
    unfilled = SlotUnfilled.empty(torch.zeros(2, dtype=torch.int32), 16, torch.float32)
    with pytest.raises(ValueError, match="out must have"):
        final_norm(drawn(2, 16), drawn(16), EPS, 0.0, poisoned(2, 32))
    for wrong in ({"unfilled": unfilled}, {"hidden": drawn(3, 16), "unfilled": unfilled}):
        with pytest.raises(ValueError, match="one row per sequence"):
            final_norm(drawn(3, 16), drawn(16), EPS, 0.0, poisoned(3, 16), **wrong)  # type: ignore[arg-type]
