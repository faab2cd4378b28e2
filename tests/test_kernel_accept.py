"""The walk down the tree and the settling of what it accepts, in Triton's interpreter against the references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.kernels.accept import COUNT, LAST, TOKENS, accept, accept_reference
from selfspec.kernels.kv_compaction import PAGE_SIZE, settle, settle_reference
from selfspec.speculation.plan import Plan
from tests.strategies import plans


def children_of(plan: Plan) -> torch.Tensor:
    width = max((len(kids) for kids in plan.children), default=0) or 1
    return torch.tensor([[*kids, *[-1] * (width - len(kids))] for kids in plan.children], dtype=torch.int32)


@settings(deadline=None, max_examples=60)
@given(plan=plans(), sequences=st.integers(1, 4), seed=st.integers(0, 2**20), vocabulary=st.sampled_from([1, 2, 3, 9]))
def test_the_walk_is_the_references(plan: Plan, sequences: int, seed: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes, depths = len(plan) + 1, plan.depth + 1
    chosen, tokens = torch.randint(0, vocabulary, (2, nodes * sequences), generator=generator, dtype=torch.int32)
    active = torch.randint(0, 2, (sequences,), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, 200, (sequences,), generator=generator, dtype=torch.int32)
    before, pending = lengths.clone(), torch.full((sequences,), 77, dtype=torch.int32)
    bases, paths = (
        torch.full((sequences,), -1, dtype=torch.int32),
        torch.full((sequences, depths), -1, dtype=torch.int32),
    )
    report = torch.full((sequences, TOKENS + depths), -1, dtype=torch.int32)
    accept(chosen, tokens, children_of(plan), active, lengths, bases, pending, paths, report)
    assert torch.equal(bases, before)
    for sequence, (path, emitted) in enumerate(accept_reference(chosen, tokens, children_of(plan), sequences)):
        if not active[sequence]:
            assert report[sequence, COUNT] == 0
            assert (lengths[sequence], pending[sequence]) == (before[sequence], 77)
            continue
        count = len(path)
        assert report[sequence, COUNT] == count
        assert report[sequence, LAST] == path[-1]
        assert report[sequence, TOKENS : TOKENS + count].tolist() == emitted
        assert paths[sequence, :count].tolist() == path
        assert lengths[sequence] == before[sequence] + count
        assert pending[sequence] == emitted[-1]


@pytest.mark.parametrize("depths", [1, 3, 17, 64])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 64), (5, 24)])
@pytest.mark.parametrize("known", [False, True])
def test_settling_moves_the_paths_in_all_layers(depths: int, heads: int, dim: int, known: bool) -> None:
    generator = torch.Generator().manual_seed(depths)
    sequences, layers = 3, 2
    pages = torch.randn(2, layers, 12, PAGE_SIZE, heads, dim, generator=generator).half()
    table = torch.randperm(12, generator=generator).view(3, 4).int()
    bases = torch.tensor([0, 63, 100], dtype=torch.int32)
    # Ascending nodes that may skip some: neighbours' sources and targets overlap.
    paths = torch.stack([torch.randperm(63, generator=generator)[: depths - 1].sort().values + 1 for _ in range(3)])
    paths = torch.cat((torch.zeros(3, 1, dtype=torch.int64), paths), dim=1).int()
    counts = torch.tensor([depths, max(1, depths // 2), 0], dtype=torch.int32)
    expected = pages.clone()
    for tensor in expected:
        settle_reference(tensor, table, bases, counts, paths)
    states = torch.randn(sequences * 65, 10, generator=generator) if known else None
    moved = None if states is None else states.clone()
    settle(pages[0], pages[1], table, bases, counts, paths, moved)
    assert torch.equal(pages, expected)
    if states is not None and moved is not None:
        for sequence in range(sequences):
            last = paths[sequence, counts[sequence] - 1] if counts[sequence] else -1
            assert torch.equal(moved[sequence], states[(last + 1) * sequences + sequence])
        assert torch.equal(moved[sequences:], states[sequences:])


def test_a_report_without_room_is_refused() -> None:
    ints = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="no room"):
        accept(ints, ints, ints[None], ints, ints, ints, ints, torch.zeros(1, 2).int(), torch.zeros(1, 3).int())
