"""Embeddings and row metadata of one depth of a tree, in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from selfspec.kernels.embed_rope import PAGE_SIZE, RowMetadata, embed_rope, embed_rope_reference
from selfspec.kernels.lm_head_topk import lm_head_scores
from selfspec.kernels.norm import NextNorm, scaled_reference, squares_per_row, squares_reference
from selfspec.kernels.topk import MAX_SCAN_WIDTH, Ranking, Scores, topk_tokens


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def empty_metadata(rows: int, ropes: int, half: int, dtype: torch.dtype = torch.float32) -> RowMetadata:
    ints = torch.full((rows,), -7, dtype=torch.int32)
    cos, sin = (poisoned(ropes, rows, half, dtype=dtype) for _ in range(2))
    return RowMetadata(ints, ints.clone(), ints.clone(), ints.long(), cos, sin)


def first_norm(rows: int, hidden: int, dtype: torch.dtype = torch.float32) -> NextNorm:
    weight = torch.randn(hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    return NextNorm(weight, 1.0, poisoned(rows, squares_per_row(hidden)), poisoned(rows, hidden, dtype=dtype))


@pytest.mark.parametrize(
    ("hidden", "ropes", "scaled", "dtype"),
    [
        (16, 1, False, torch.float32),
        (48, 2, True, torch.float16),  # squares that fill no power of two
        (2080, 1, True, torch.float32),  # squares over 32 columns
    ],
)
def test_rows_are_filled_as_the_reference_says(hidden: int, ropes: int, scaled: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(hidden)
    sequences, half, first = 3, 12, 2
    nodes = torch.arange(first, first + 5)
    depths = torch.tensor([1, 1, 2, 2, 2], dtype=torch.int32)
    parents = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    ranks = torch.tensor([1, 0, 2, 1, 1], dtype=torch.int32)
    ranked = torch.randint(0, 50, (2 * sequences, 3), generator=generator, dtype=torch.int32)
    embedding = torch.randn(50, hidden, generator=generator).to(dtype)
    scale = torch.tensor(2.5, dtype=dtype) if scaled else None
    lengths = torch.tensor([0, 61, 130], dtype=torch.int32)
    page_table = torch.randperm(12, generator=generator).view(3, 4).int()
    inv_freq, factors = torch.rand(ropes, half, generator=generator), torch.tensor([1.0, 1.25][:ropes])

    rows = sequences * len(nodes)
    metadata = empty_metadata(rows, ropes, half, dtype)
    states, next_norm = poisoned(rows, hidden, dtype=dtype), first_norm(rows, hidden, dtype)
    embed_rope(
        metadata, states, next_norm, embedding, scale, lengths, page_table, depths, inv_freq, factors, first,
        ranked=ranked, parents=parents, ranks=ranks,
    )  # fmt: skip

    place, sequence = torch.arange(rows) // sequences, torch.arange(rows) % sequences
    tokens = ranked[parents[place] * sequences + sequence, ranks[place].long()]
    expected, truth = embed_rope_reference(
        tokens, embedding, scale, lengths, page_table, nodes, depths, inv_freq, factors
    )
    assert torch.equal(metadata.tokens, tokens)
    assert torch.equal(metadata.positions, truth.positions)
    assert torch.equal(metadata.next_positions, truth.positions + 1)
    assert torch.equal(metadata.slots, truth.slots)
    assert torch.equal(states, expected)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(metadata.cos, truth.cos, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(metadata.sin, truth.sin, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(next_norm.squares, squares_reference(expected))
    assert torch.equal(next_norm.scaled, scaled_reference(expected, next_norm.weight, next_norm.offset))


@pytest.mark.parametrize(("width", "trimmed"), [(1, True), (3, True), (MAX_SCAN_WIDTH, False)])
def test_tokens_found_in_scores_are_those_that_topk_extracts(width: int, trimmed: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    columns, sequences, above = 150, 3, 2
    x, weight = (torch.randn(size, 16, generator=generator) for size in (above * sequences, columns))
    rows = torch.randperm(400, generator=generator)[:columns].int() if trimmed else None
    scores = Scores.empty(len(x) + 2, columns, width, "cpu")  # with room for more rows
    lm_head_scores(x, weight, scores, token_ids=rows)
    ranked = torch.full((len(x), width), -7, dtype=torch.int32)
    topk_tokens(scores, ranked, token_ids=rows)
    places = torch.cartesian_prod(torch.arange(above), torch.arange(width)).int()
    parents, ranks = places[:, 0].contiguous(), places[:, 1].contiguous()
    found = []
    for source in (ranked, Ranking(scores, width, rows)):
        metadata = empty_metadata(len(places) * sequences, 1, 4)
        embed_rope(
            metadata, poisoned(len(metadata.tokens), 16), first_norm(len(metadata.tokens), 16), torch.zeros(400, 16),
            None, torch.zeros(sequences, dtype=torch.int32), torch.arange(sequences, dtype=torch.int32)[:, None],
            torch.ones(len(places), dtype=torch.int32), torch.ones(1, 4), torch.ones(1), 1,
            ranked=source, parents=parents, ranks=ranks,
        )  # fmt: skip
        found.append(metadata.tokens)
    assert torch.equal(*found)
    assert len(set(found[0].tolist())) > width


def test_the_root_has_the_pending_token() -> None:
    metadata, states = empty_metadata(2, 1, 4), poisoned(2, 16)
    embedding = torch.arange(5 * 16.0).view(5, 16)
    lengths = torch.tensor([PAGE_SIZE - 1, PAGE_SIZE], dtype=torch.int32)
    table = torch.tensor([[3, 9], [5, 1]], dtype=torch.int32)
    embed_rope(
        metadata, states, first_norm(2, 16), embedding, None, lengths, table, torch.zeros(1, dtype=torch.int32),
        torch.ones(1, 4), torch.ones(1), 0, given_tokens=torch.tensor([4, 2], dtype=torch.int32),
    )  # fmt: skip
    assert metadata.tokens.tolist() == [4, 2]
    assert torch.equal(states, embedding[[4, 2]])
    assert metadata.slots.tolist() == [3 * PAGE_SIZE + PAGE_SIZE - 1, PAGE_SIZE]
    assert metadata.positions.tolist() == [PAGE_SIZE - 1, PAGE_SIZE]


def test_nodes_past_the_count_of_their_sequence_get_no_slot() -> None:
    rows = 3 * 2
    metadata, table = empty_metadata(rows, 1, 4), torch.tensor([[3, 9], [5, 1]], dtype=torch.int32)
    lengths, counts = torch.tensor([PAGE_SIZE - 2, 7], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    embed_rope(
        metadata, poisoned(rows, 16), first_norm(rows, 16), torch.zeros(5, 16), None, lengths, table,
        torch.arange(3, dtype=torch.int32), torch.ones(1, 4), torch.ones(1), 0,
        given_tokens=torch.zeros(2, dtype=torch.int32), counts=counts,
    )  # fmt: skip
    page = PAGE_SIZE * table
    there = [page[0, 0] + PAGE_SIZE - 2, page[1, 0] + 7, page[0, 0] + PAGE_SIZE - 1]
    assert metadata.slots.tolist() == [*map(int, there), -1, int(page[0, 1]), -1]


def test_arguments_that_do_not_fit_are_refused() -> None:
    zeros = torch.zeros(1, dtype=torch.int32)
    rope = (torch.ones(1, 4), torch.ones(1))

    def run(rows: int = 1, hidden_out: torch.Tensor | None = None, **sources: torch.Tensor) -> None:
        out = poisoned(rows, 16) if hidden_out is None else hidden_out
        fixed = (first_norm(rows, 16), torch.zeros(5, 16), None, zeros, zeros[None], zeros)
        embed_rope(empty_metadata(rows, 1, 4), out, *fixed, *rope, 0, **sources)

    for sources in ({}, {"given_tokens": zeros, "ranked": zeros[None]}):
        with pytest.raises(ValueError, match="given_tokens"):
            run(**sources)
    with pytest.raises(ValueError, match="2 rows are not 1 nodes"):
        run(rows=2, given_tokens=zeros)
    with pytest.raises(ValueError, match="contiguous"):
        run(hidden_out=poisoned(1, 32)[:, ::2], given_tokens=zeros)
