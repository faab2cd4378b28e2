"""KV compaction: the CUDA backend's kernel in Triton's interpreter, and the reference backend's operation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.cache.kv_cache import compact
from selfspec.kernels.kv_compaction import PAGE_SIZE, compact_kv, compact_kv_reference


@pytest.mark.parametrize(
    ("depths", "heads", "dim", "first_node_row"),
    [
        (1, 1, 8, None),  # a plain step, no features
        (3, 5, 24, 3),  # columns that fill no power of two
        (17, 3, 64, 8),  # deeper than 16: several blocks of columns
        (64, 1, 8, 3),  # the deepest path
    ],
)
def test_accepted_paths_move_in_all_layers_and_the_newest_feature_moves_along(
    depths: int, heads: int, dim: int, first_node_row: int | None
) -> None:
    generator = torch.Generator().manual_seed(depths)
    sequences, layers = 3, 2
    pages = torch.randn(2, layers, 12, PAGE_SIZE, heads, dim, generator=generator).half()
    table = torch.randperm(12, generator=generator).view(3, 4).int()
    lengths = torch.tensor([0, 63, 100], dtype=torch.int32)
    # Ascending nodes that may skip some, so that sources and targets overlap.
    paths = torch.stack([torch.randperm(63, generator=generator)[: depths - 1].sort().values + 1 for _ in range(3)])
    paths = torch.cat((torch.zeros(3, 1, dtype=torch.int64), paths), dim=1).int()
    counts = torch.tensor([depths, max(1, depths // 2), 0], dtype=torch.int32)
    expected = pages.clone()
    for tensor in expected:
        compact_kv_reference(tensor, table, lengths, counts, paths)
    features = None if first_node_row is None else torch.randn(first_node_row + sequences * 64, 10, generator=generator)
    moved = None if features is None else features.clone()
    compact_kv(pages[0], pages[1], table, lengths, counts, paths, moved, first_node_row or 0)
    assert torch.equal(pages, expected)
    if features is not None and moved is not None and first_node_row is not None:
        for sequence in range(sequences):
            last = paths[sequence, counts[sequence] - 1]
            newest = first_node_row + last * sequences + sequence if counts[sequence] else sequence
            assert torch.equal(moved[sequence], features[newest])
        assert torch.equal(moved[sequences:], features[sequences:])


def test_tensors_that_do_not_fit_are_refused() -> None:
    keys, ints = torch.zeros(1, 2, PAGE_SIZE, 2, 8), torch.zeros(1, dtype=torch.int32)
    arguments = (ints[None], ints, ints, ints[None])
    with pytest.raises(ValueError, match="one shape"):
        compact_kv(keys, keys[:, :1], *arguments)
    with pytest.raises(ValueError, match="pages of a layer"):
        compact_kv(keys.transpose(3, 4), keys.transpose(3, 4), *arguments)
    with pytest.raises(ValueError, match="features must be contiguous"):
        compact_kv(keys, keys, *arguments, torch.zeros(4, 3).T)


# The reference backend's `compact`

LAYERS, PAGES, SMALL_PAGE = 3, 4, 4
SLOTS = PAGES * SMALL_PAGE


def random_pages() -> torch.Tensor:
    return torch.randn(LAYERS, PAGES, SMALL_PAGE, 2, 3, generator=torch.Generator().manual_seed(0))


def moved_one_by_one(pages: torch.Tensor, source: list[int], target: list[int]) -> torch.Tensor:
    """All entries are read, then all are written."""
    after = pages.clone()
    for layer in range(LAYERS):
        for s, t in zip(source, target, strict=True):
            after[layer, t // SMALL_PAGE, t % SMALL_PAGE] = pages[layer, s // SMALL_PAGE, s % SMALL_PAGE]
    return after


def assert_compacts(source: list[int], target: list[int]) -> None:
    pages = random_pages()
    expected = moved_one_by_one(pages, source, target)
    compact(pages, torch.tensor(source, dtype=torch.long), torch.tensor(target, dtype=torch.long))
    assert torch.equal(pages, expected)


def test_compact_reads_everything_before_it_writes() -> None:
    for source, target in (([], []), ([4, 5, 6], [3, 4, 5]), ([3, 4, 5], [4, 5, 6]), ([1, 2], [2, 1])):
        assert_compacts(source, target)


@settings(max_examples=30)
@given(st.data())
def test_compact_reads_all_then_writes_all_for_any_moves(data: st.DataObject) -> None:
    target = data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1))
    assert_compacts(data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=len(target), max_size=len(target))), target)
