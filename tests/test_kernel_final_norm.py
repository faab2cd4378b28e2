"""What is known at rows, and what waits for an exit: in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from selfspec.kernels.final_norm import UnfilledStates, final_norm, final_norm_reference, unfilled_capacity
from selfspec.kernels.norm import rms_norm

EPS, OFFSET = 1e-5, 1.0


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize("hidden", [16, 48, 576, 2080])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("recalls", [False, True])
def test_rows_are_known_as_the_reference_says_with_the_bits_of_the_norm(hidden: int, rows: int, recalls: bool) -> None:
    """A plain cycle and a tree's must leave the same bits, and so must one without an exit."""
    last, weight, middle = drawn(rows, hidden), drawn(hidden, seed=1), drawn(rows, hidden, seed=2) if recalls else None
    room = poisoned(rows, (2 if recalls else 1) * hidden + 5)  # rows further apart
    known = room[:, :-5]
    final_norm(last, weight, EPS, OFFSET, known, middle)
    torch.testing.assert_close(known, final_norm_reference(last, weight, EPS, OFFSET, middle))
    assert room[:, -5:].isnan().all()
    normed = poisoned(rows, hidden)
    rms_norm(last, weight, EPS, OFFSET, normed)
    assert torch.equal(known[:, :hidden], normed)
    if middle is not None:
        rms_norm(middle, None, torch.finfo(middle.dtype).eps, 0.0, normed)
        assert torch.equal(known[:, hidden:], normed)


@pytest.mark.parametrize("recalls", [False, True])
def test_states_wait_in_the_order_in_which_they_came_with_what_was_known_before(recalls: bool) -> None:
    sequences, hidden, width = 2, 48, 96 if recalls else 48
    rows = unfilled_capacity(sequences) * sequences
    waiting = UnfilledStates(torch.zeros(sequences, dtype=torch.int32), poisoned(rows, 48), poisoned(rows, 96))
    known, weight = drawn(sequences, width, seed=9), drawn(hidden, seed=1)
    waiting.counts[1] = 2  # of one of them more is waiting than of the other
    for step in range(3):
        before, states = known.clone(), drawn(sequences, hidden, seed=20 + step)
        middle = drawn(sequences, hidden, seed=30 + step) if recalls else None
        last = drawn(sequences, hidden, seed=40 + step)
        final_norm(last, weight, EPS, OFFSET, known, middle, hidden=states, unfilled=waiting)
        torch.testing.assert_close(known, final_norm_reference(last, weight, EPS, OFFSET, middle))
        for sequence, place in enumerate((step, step + 2)):
            at = place * sequences + sequence
            assert torch.equal(waiting.hidden[at], states[sequence])
            assert torch.equal(waiting.previous[at], before[sequence]) if recalls else waiting.previous.isnan().all()
    assert waiting.counts.tolist() == [3, 5]
    written = ~waiting.hidden.isnan().any(1)
    assert written.nonzero().flatten().tolist() == sorted([0, 2, 4] + [5, 7, 9])


def test_no_more_waits_than_there_is_room_for() -> None:
    room = unfilled_capacity(1)
    waiting = UnfilledStates.empty(torch.full((1,), room, dtype=torch.int32), 16, torch.float32)
    around = torch.zeros(room + 1, 16)
    waiting = UnfilledStates(waiting.counts, around[:room], waiting.previous)
    final_norm(drawn(1, 16), drawn(16), EPS, 0.0, poisoned(1, 16), hidden=drawn(1, 16) + 9, unfilled=waiting)
    assert waiting.counts.tolist() == [room]
    assert not around[room].any()


@pytest.mark.parametrize(("sequences", "places"), [(1, 32), (2, 32), (4, 16), (16, 16), (32, 16)])
def test_of_few_sequences_more_can_wait(sequences: int, places: int) -> None:
    waiting = UnfilledStates.empty(torch.zeros(sequences, dtype=torch.int32), 16, torch.float32)
    assert waiting.capacity == unfilled_capacity(sequences) == places


def test_what_does_not_fit_is_refused() -> None:
    waiting = UnfilledStates.empty(torch.zeros(2, dtype=torch.int32), 16, torch.float32)
    with pytest.raises(ValueError, match="out must have"):
        final_norm(drawn(2, 16), drawn(16), EPS, 0.0, poisoned(2, 32))
    for wrong in ({"unfilled": waiting}, {"hidden": drawn(3, 16), "unfilled": waiting}):
        with pytest.raises(ValueError, match="one row per sequence"):
            final_norm(drawn(3, 16), drawn(16), EPS, 0.0, poisoned(3, 16), **wrong)  # type: ignore[arg-type]
