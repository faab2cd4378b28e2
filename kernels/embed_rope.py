"""Token embedding, and the metadata that the rows of a pass need: positions, cache slots and rotary angles.

A pass runs M nodes of B sequences as R = M * B rows, node-major: row = node * B + sequence, so every depth of a tree,
and the whole tree, is one contiguous range of rows. For each row one program finds its token (the sequence's newest
token for the root, a copied or ranked token for other nodes), writes `RowMetadata`, the embedding [R, hidden], and what
the first layer's norm reads (see `norm`). Lengths, pages and tokens are read on the device, so a captured graph serves
any step. A row depends on no other row; sums of squares run over fixed blocks of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.constants import PAGE_SIZE
from selfspec.kernels.norm import NextNorm, columns_per_square, next_scale, next_tensors, shrink
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.quantized_format import format_of
from selfspec.kernels.quantized_launch import Weight, weight_arguments
from selfspec.kernels.quantized_tile import dequantize_row
from selfspec.kernels.quantized_weight import QuantizedWeight
from selfspec.kernels.topk import Ranking, nth_best
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton


@dataclass(frozen=True)
class RowMetadata:
    """Token, position, cache slot and rotary angles of each of R rows; filled by `embed_rope`."""

    tokens: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [R] int32
    next_positions: torch.Tensor  # [R] int32: positions + 1, where the token after the row stands
    slots: torch.Tensor  # [R] int64: page * PAGE_SIZE + offset; -1: the row's keys and values are not stored
    cos: torch.Tensor  # [ropes, R, D / 2]
    sin: torch.Tensor  # [ropes, R, D / 2]

    @classmethod
    def empty(cls, rows: int, ropes: int, half: int, dtype: torch.dtype, device: torch.device | str) -> RowMetadata:
        tokens, positions, next_positions = torch.zeros(3, rows, dtype=torch.int32, device=device)
        cos, sin = torch.zeros(2, ropes, rows, half, dtype=dtype, device=device)
        slots = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(tokens, positions, next_positions, slots, cos, sin)

    def rows(self, start: int, stop: int) -> RowMetadata:
        at = slice(start, stop)
        ints = (self.tokens[at], self.positions[at], self.next_positions[at])
        return RowMetadata(*ints, self.slots[at], self.cos[:, at], self.sin[:, at])


def embed_rope_reference(
    tokens: torch.Tensor,  # [R]
    embedding: Weight,  # [V, hidden]
    scale: torch.Tensor | None,  # scalar, in the model's dtype
    lengths: torch.Tensor,  # [B]
    page_table: torch.Tensor,  # [B, P]
    nodes: torch.Tensor,  # [M]
    depths: torch.Tensor,  # [M]
    inv_freq: torch.Tensor,  # [ropes, D / 2] float32
    rope_scaling: torch.Tensor,  # [ropes] float32
    dtype: torch.dtype | None = None,  # of the model; None: that of the embedding
) -> tuple[torch.Tensor, RowMetadata]:
    """Embeddings [R, hidden] of `tokens`, and the metadata of the rows of these nodes."""
    embedding = embedding.dequantize() if isinstance(embedding, QuantizedWeight) else embedding
    embedding = embedding.to(dtype or embedding.dtype)
    hidden = embedding[tokens] if scale is None else embedding[tokens] * scale
    sequences = torch.arange(len(lengths), device=lengths.device).repeat(len(nodes))
    node, depth = (x.repeat_interleave(len(lengths)).long() for x in (nodes, depths))
    slots, positions = lengths[sequences] + node, lengths[sequences] + depth
    flat = page_table[sequences, slots // PAGE_SIZE].long() * PAGE_SIZE + slots % PAGE_SIZE
    angles = positions[None, :, None].float() * inv_freq[:, None]
    cos, sin = (turn * rope_scaling[:, None, None] for turn in (angles.cos(), angles.sin()))
    dtype = embedding.dtype
    return hidden, RowMetadata(tokens.int(), positions.int(), positions.int() + 1, flat, cos.to(dtype), sin.to(dtype))


_INTS = ["tile_count", "sequences", "first_node", "page_table_stride", "ranked_stride", "keys_stride"]
_ROWS = ["given_tokens", "ranked", "parents", "ranks", "depths", "tokens", "positions", "next_positions", "slots"]


# Of _ROWS a program reads or writes one value. They begin at any row or node of a plan: specializing on their alignment
# would only compile more.
@jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_ROWS)
def _embed_rope_kernel(
    given_tokens, ranked, tile_keys, int_scores, token_ids, parents, ranks, embedding, scale, lengths, page_table,
    depths, inv_freq, rope_scaling,
    tokens, positions, next_positions, slots, cos, sin, hidden_out,
    next_weight, squares, scaled, counts, sequences, first_node, page_table_stride, ranked_stride, tile_count,
    keys_stride, scores_stride, cos_rope_stride, squares_stride,
    HIDDEN: tl.constexpr, SQUARES: tl.constexpr, SQUARES_P2: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, HALF_P2: tl.constexpr, ROPES: tl.constexpr,
    NEXT_OFFSET: tl.constexpr, SHRINK: tl.constexpr,
    WIDTH: tl.constexpr, NT: tl.constexpr, TILE: tl.constexpr, BY_ROW: tl.constexpr, BEGINS: tl.constexpr,
    PAGE: tl.constexpr, STRIDE: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row.

    BEGINS: the first launch of a pass, or of a beam's depth. It releases the next launch only after all earlier work is
    done, so that the other kernels may read lengths, pages, trees and committed tokens before they wait.
    """
    if BEGINS:
        wait(PDL)
        release(PDL)
    else:
        release(PDL)
        wait(PDL)
    row = tl.program_id(0)
    sequence = row % sequences
    place = row // sequences  # of the node among those of this launch
    if given_tokens is not None:
        token = tl.load(given_tokens + (row if BY_ROW else sequence)).to(tl.int32)
    else:
        parent = (tl.load(parents + place) * sequences + sequence).to(tl.int64)
        rank = tl.load(ranks + place)
        if ranked is not None:
            token = tl.load(ranked + parent * ranked_stride + rank).to(tl.int32)
        else:
            of_row = int_scores if WIDTH == 1 else int_scores + parent * scores_stride
            token = nth_best(tile_keys + parent * keys_stride, of_row, token_ids, tile_count, rank, WIDTH, NT, TILE)
    tl.store(tokens + row, token)
    token = tl.maximum(token, 0)  # -1: nothing to copy, or the head has fewer tokens than the plan asks for
    length = tl.load(lengths + sequence)
    slot = length + first_node + place
    page = tl.load(page_table + sequence * page_table_stride + slot // PAGE).to(tl.int64)
    flat_slot = page * PAGE + slot % PAGE
    if counts is not None:
        flat_slot = tl.where(place < tl.load(counts + sequence), flat_slot, -1)
    tl.store(slots + row, flat_slot)
    position = length + tl.load(depths + place)
    tl.store(positions + row, position)
    tl.store(next_positions + row, position + 1)

    pair = tl.arange(0, HALF_P2)
    for rope in tl.static_range(ROPES):
        angle = position.to(tl.float32) * tl.load(inv_freq + rope * HALF + pair, mask=pair < HALF, other=0.0)
        factor = tl.load(rope_scaling + rope)
        at = rope * cos_rope_stride + row * HALF + pair
        tl.store(cos + at, (tl.cos(angle) * factor).to(cos.dtype.element_ty), mask=pair < HALF)
        tl.store(sin + at, (tl.sin(angle) * factor).to(sin.dtype.element_ty), mask=pair < HALF)

    block = tl.arange(0, SQUARES_P2)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [SQUARES_P2, BLOCK]: one row
    if FORMAT is None:
        state = tl.load(embedding + token.to(tl.int64) * HIDDEN + column, mask=column < HIDDEN, other=0.0)
    else:
        values = dequantize_row(embedding, token.to(tl.int64), column, column < HIDDEN, STRIDE, FORMAT)
        state = values.to(hidden_out.dtype.element_ty)
    if scale is not None:
        state = (state.to(tl.float32) * tl.load(scale).to(tl.float32)).to(hidden_out.dtype.element_ty)
    tl.store(hidden_out + row * HIDDEN + column, state, mask=column < HIDDEN)
    wide = state.to(tl.float32)
    next_scales = next_scale(next_weight, column, column < HIDDEN, NEXT_OFFSET, SHRINK)
    tl.store(scaled + row * HIDDEN + column, (wide * next_scales).to(scaled.dtype.element_ty), mask=column < HIDDEN)
    tl.store(squares + row * squares_stride + block, tl.sum(wide * wide, axis=1), mask=block < SQUARES)


def embed_rope(
    metadata: RowMetadata,  # of R rows, to fill
    hidden_out: torch.Tensor,  # [R, hidden], to fill
    next_norm: NextNorm,  # the first layer's norm
    embedding: Weight,  # [V, hidden]
    scale: torch.Tensor | None,  # scalar in the model's dtype: embeddings are multiplied by it
    lengths: torch.Tensor,  # [B] int32: committed tokens of each sequence
    page_table: torch.Tensor,  # [B, P] int32
    depths: torch.Tensor,  # [M] int32
    inv_freq: torch.Tensor,  # [ropes, D / 2] float32
    rope_scaling: torch.Tensor,  # [ropes] float32
    first_node: int,  # node i of this launch has slot length + first_node + i; 0 begins a pass
    given_tokens: torch.Tensor | None = None,  # [B]: tokens of the root; or [R]: of every row, -1 where there is none
    ranked: torch.Tensor | Ranking | None = None,  # [R of the parents' depth, W] tokens by rank, or where to find them
    parents: torch.Tensor | None = None,  # [M] int32: index of each node's parent at its depth
    ranks: torch.Tensor | None = None,  # [M] int32: rank of each node's token among its parent's
    counts: torch.Tensor | None = None,  # [B] int32: nodes of each sequence that are stored; others get slot -1
    begins: bool = False,  # as where `first_node` is 0: an earlier launch of this pass has changed the trees
) -> None:
    """Fills metadata, embeddings and what the first norm reads for M nodes of B sequences."""
    rows, hidden = hidden_out.shape
    sequences = lengths.shape[0]
    if (given_tokens is None) == (ranked is None):
        raise ValueError("pass either `given_tokens` (of roots, copied nodes, beams) or `ranked` (for other nodes)")
    if rows != sequences * depths.shape[0]:
        raise ValueError(f"{rows} rows are not {depths.shape[0]} nodes of {sequences} sequences")
    quantized = embedding if isinstance(embedding, QuantizedWeight) else None
    contiguous = (hidden_out, next_norm.scaled, metadata.tokens, metadata.slots)
    if not all(t.is_contiguous() for t in contiguous) or (
        isinstance(embedding, torch.Tensor) and not embedding.is_contiguous()
    ):
        raise ValueError("embedding, hidden_out, scaled, tokens and slots must be contiguous")
    next_norm.check(hidden_out)
    squares, half = next_norm.squares.shape[1], inv_freq.shape[1]
    tokens = ranked if isinstance(ranked, torch.Tensor) else None
    ranking = ranked if isinstance(ranked, Ranking) else None
    tensors, sizes = ((None,) * 3, (0,) * 3) if ranking is None else (ranking.tensors, ranking.sizes)
    ranking_constants = {"WIDTH": 0, "NT": 0, "TILE": 0} if ranking is None else ranking.constants
    stored, stride = weight_arguments(embedding)
    _embed_rope_kernel[(rows,)](
        given_tokens, tokens, *tensors, parents, ranks, stored, scale, lengths,
        page_table, depths, inv_freq, rope_scaling,
        metadata.tokens, metadata.positions, metadata.next_positions, metadata.slots, metadata.cos, metadata.sin,
        hidden_out, *next_tensors(next_norm), counts, sequences, first_node, page_table.stride(0),
        0 if tokens is None else tokens.stride(0), *sizes, metadata.cos.stride(0), next_norm.squares.stride(0),
        HIDDEN=hidden, SQUARES=squares, SQUARES_P2=triton.next_power_of_2(squares), BLOCK=columns_per_square(hidden),
        HALF=half, HALF_P2=triton.next_power_of_2(half), ROPES=inv_freq.shape[0],
        NEXT_OFFSET=float(next_norm.offset), SHRINK=shrink(hidden_out.dtype),
        **ranking_constants, BY_ROW=given_tokens is not None and len(given_tokens) == rows,
        BEGINS=begins or first_node == 0, PAGE=PAGE_SIZE,
        STRIDE=stride, FORMAT=None if quantized is None else format_of(quantized, hidden_out.dtype, 1),
        num_warps=4, **pdl_options(hidden_out),
    )  # fmt: skip
