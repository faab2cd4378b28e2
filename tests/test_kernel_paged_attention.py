"""Paged attention in PyTorch, against a loop over queries, heads and visible slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.kernels.paged_attention import paged_attention

GARBAGE = 1e6  # finite, as a cache promises, but ruinous if any of it is attended to


def attend_by_loops(q, keys, values, page_table, mask, slots: int, scale: float) -> torch.Tensor:
    """Every row and head on its own, over the keys it sees, in float64."""
    batch, rows, heads, _ = q.shape
    page_size, kv_heads = keys.shape[1:3]
    out = torch.empty_like(q, dtype=torch.float64)
    for b in range(batch):
        for m in range(rows):
            seen = [s for s in range(slots) if mask is None or mask[b, m, s]]
            places = [(page_table[b, s // page_size], s % page_size) for s in seen]
            for h in range(heads):
                shared = h * kv_heads // heads
                k = torch.stack([keys[page, offset, shared] for page, offset in places]).double()
                v = torch.stack([values[page, offset, shared] for page, offset in places]).double()
                out[b, m, h] = ((k @ q[b, m, h].double()) * scale).softmax(0) @ v
    return out


def paged_case(batch: int, rows: int, kv_heads: int, group: int, slots: int, page_size: int, seed: int = 0):
    """Random queries, and pages in random order among which everything not in the first `slots` is garbage."""
    g = torch.Generator().manual_seed(seed)
    dim, needed = 6, -(-slots // page_size)
    total = batch * needed + 3
    page_table = torch.randperm(total, generator=g)[: batch * needed].view(batch, needed)
    pages = torch.full((2, total, page_size, kv_heads, dim), GARBAGE, dtype=torch.float64)
    for row in page_table:
        content = torch.randn(2, needed * page_size, kv_heads, dim, generator=g, dtype=torch.float64)
        content[:, slots:] = GARBAGE
        pages[:, row] = content.view(2, needed, page_size, kv_heads, dim)
    q = torch.randn(batch, rows, kv_heads * group, dim, generator=g, dtype=torch.float64)
    mask = torch.rand(batch, rows, slots, generator=g) < 0.5
    mask[:, :, 0] |= ~mask.any(-1)  # a row sees something: itself at least
    return q, pages[0], pages[1], page_table, mask, slots


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    "case",
    [(1, 1, 1, 1, 1, 4), (3, 4, 2, 3, 10, 4), (2, 3, 1, 2, 130, 64)],
    ids=["one_query_one_slot", "batch_of_trees", "pages_of_64"],
)
def test_attention_equals_a_loop_over_visible_slots(case: tuple[int, ...], masked: bool) -> None:
    q, keys, values, page_table, mask, slots = paged_case(*case)
    arguments = (q, keys, values, page_table, mask if masked else None, slots, 0.3)
    torch.testing.assert_close(paged_attention(*arguments), attend_by_loops(*arguments))


@pytest.mark.parametrize("first", [0, 2])
def test_a_range_of_pages_is_the_table_of_those_pages(first: int) -> None:
    q, keys, values, _, mask, slots = paged_case(1, 5, 2, 2, 11, 4)
    keys, values = torch.randn_like(keys), torch.randn_like(values)
    table = torch.arange(first, first + 3)[None]
    got = paged_attention(q, keys, values, slice(first, first + 3), mask, slots, 0.3)
    torch.testing.assert_close(got, attend_by_loops(q, keys, values, table, mask, slots, 0.3))


@settings(max_examples=15)
@given(st.tuples(*(st.integers(1, top) for top in (3, 5, 3, 3, 13, 5))), st.integers(0, 2**32))
def test_attention_equals_a_loop_for_any_shape(case: tuple[int, ...], seed: int) -> None:
    arguments = paged_case(*case, seed=seed)
    torch.testing.assert_close(paged_attention(*arguments, 0.7), attend_by_loops(*arguments, 0.7))


def test_garbage_in_hidden_slots_changes_nothing() -> None:
    q, keys, values, page_table, mask, slots = paged_case(2, 3, 2, 2, 11, 4)
    mask[:, :, 5] = False
    before = paged_attention(q, keys, values, page_table, mask, slots, 0.3)
    for row in page_table:
        keys[row[5 // 4], 5 % 4] = GARBAGE
        values[row[5 // 4], 5 % 4] = -GARBAGE
    assert torch.equal(paged_attention(q, keys, values, page_table, mask, slots, 0.3), before)


def test_attention_keeps_float32_and_its_precision() -> None:
    q, keys, values, page_table, mask, slots = paged_case(2, 5, 2, 2, 40, 16)
    single = paged_attention(q.float(), keys.float(), values.float(), page_table, mask, slots, 0.3)
    assert single.dtype == torch.float32
    exact = attend_by_loops(q, keys, values, page_table, mask, slots, 0.3)
    torch.testing.assert_close(single.double(), exact, atol=1e-5, rtol=1e-5)
