"""Entering the model: the tokens of one level of a tree become hidden states, with all that later kernels need to know
of their rows: position, cache slot, and rotary angles.

Rows are node-major: row = node * B + sequence, so that every level of a tree, and the whole tree, is one range of
rows. Which tokens the nodes carry was ranked by the draft head, or is found here in its scores; lengths, pages and
pending tokens are device data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.constants import PAGE_SIZE
from selfspec.kernels.norm import NextNorm, block_width, next_scale, next_tensors, shrink
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.topk import Ranking, nth_best
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl


@dataclass(frozen=True)
class Places:
    """Where rows stand, filled by `enter`; each tensor has one entry for each row."""

    tokens: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [R] int32
    following: torch.Tensor  # [R] int32: the position of the token drawn there
    slots: torch.Tensor  # [R] int64: page * page size + offset; -1 where nothing is stored
    cos: torch.Tensor  # [ropes, R, D / 2]
    sin: torch.Tensor  # [ropes, R, D / 2]

    @classmethod
    def empty(cls, rows: int, ropes: int, half: int, dtype: torch.dtype, device: torch.device | str) -> Places:
        tokens, positions, following = torch.zeros(3, rows, dtype=torch.int32, device=device)
        cos, sin = torch.zeros(2, ropes, rows, half, dtype=dtype, device=device)
        slots = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(tokens, positions, following, slots, cos, sin)

    def rows(self, start: int, stop: int) -> Places:
        at = slice(start, stop)
        ints = (self.tokens[at], self.positions[at], self.following[at])
        return Places(*ints, self.slots[at], self.cos[:, at], self.sin[:, at])


def enter_reference(
    tokens: torch.Tensor,  # [R]
    embedding: torch.Tensor,  # [V, hidden]
    scale: torch.Tensor | None,  # scalar, in the model's dtype
    lengths: torch.Tensor,  # [B]
    page_table: torch.Tensor,  # [B, P]
    nodes: torch.Tensor,  # [M]
    depths: torch.Tensor,  # [M]
    inv_freq: torch.Tensor,  # [ropes, D / 2] float32
    rope_scaling: torch.Tensor,  # [ropes] float32
) -> tuple[torch.Tensor, Places]:
    """Hidden states [R, hidden] and the places of the rows of some nodes that carry `tokens`."""
    hidden = embedding[tokens] if scale is None else embedding[tokens] * scale
    sequences = torch.arange(len(lengths), device=lengths.device).repeat(len(nodes))
    node, depth = (x.repeat_interleave(len(lengths)).long() for x in (nodes, depths))
    slots, positions = lengths[sequences] + node, lengths[sequences] + depth
    flat = page_table[sequences, slots // PAGE_SIZE].long() * PAGE_SIZE + slots % PAGE_SIZE
    angles = positions[None, :, None].float() * inv_freq[:, None]
    cos, sin = (turn * rope_scaling[:, None, None] for turn in (angles.cos(), angles.sin()))
    kind = embedding.dtype
    return hidden, Places(tokens.int(), positions.int(), positions.int() + 1, flat, cos.to(kind), sin.to(kind))


@jit(do_not_specialize=["tile_count", "sequences", "first", "page_table_stride", "ranked_stride", "keys_stride"])
def _enter(
    pending, ranked, keys, levels, head_rows, parents, ranks, embedding, scale, lengths, page_table, depths, inv_freq,
    rope_scaling,
    tokens, positions, following, slots, cos, sin, hidden_out,
    next_weight, squares, scaled, counts, sequences, first, page_table_stride, ranked_stride, tile_count,
    keys_stride, levels_stride, cos_rope_stride, squares_stride,
    HIDDEN: tl.constexpr, TILES: tl.constexpr, TILES_P2: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, HALF_P2: tl.constexpr, ROPES: tl.constexpr,
    NEXT_OFFSET: tl.constexpr, SHRINK: tl.constexpr,
    WIDTH: tl.constexpr, NT: tl.constexpr, TILE: tl.constexpr, BEGINS: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program for each row.

    Where a pass begins, later launches may start only when all earlier work is done: from then on they may look at
    lengths, pages and committed text without waiting.
    """
    if BEGINS:
        wait(PDL)
        release(PDL)
    else:
        release(PDL)
        wait(PDL)
    row = tl.program_id(0)
    sequence = row % sequences
    place = row // sequences
    if pending is not None:
        token = tl.load(pending + sequence).to(tl.int32)
    else:
        parent = (tl.load(parents + place) * sequences + sequence).to(tl.int64)
        rank = tl.load(ranks + place)
        if ranked is not None:
            token = tl.load(ranked + parent * ranked_stride + rank).to(tl.int32)
        else:
            of_row = levels if WIDTH == 1 else levels + parent * levels_stride
            token = nth_best(keys + parent * keys_stride, of_row, head_rows, tile_count, rank, WIDTH, NT, TILE)
    token = tl.maximum(token, 0)  # a head with fewer tokens than were asked for ranks none
    tl.store(tokens + row, token)
    length = tl.load(lengths + sequence)
    slot = length + first + place
    page = tl.load(page_table + sequence * page_table_stride + slot // PAGE).to(tl.int64)
    lies = page * PAGE + slot % PAGE
    if counts is not None:
        lies = tl.where(place < tl.load(counts + sequence), lies, -1)
    tl.store(slots + row, lies)
    position = length + tl.load(depths + place)
    tl.store(positions + row, position)
    tl.store(following + row, position + 1)

    pair = tl.arange(0, HALF_P2)
    for rope in tl.static_range(ROPES):
        angle = position.to(tl.float32) * tl.load(inv_freq + rope * HALF + pair, mask=pair < HALF, other=0.0)
        factor = tl.load(rope_scaling + rope)
        at = rope * cos_rope_stride + row * HALF + pair
        tl.store(cos + at, (tl.cos(angle) * factor).to(cos.dtype.element_ty), mask=pair < HALF)
        tl.store(sin + at, (tl.sin(angle) * factor).to(sin.dtype.element_ty), mask=pair < HALF)

    tile = tl.arange(0, TILES_P2)
    column = tile[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    state = tl.load(embedding + token.to(tl.int64) * HIDDEN + column, mask=column < HIDDEN, other=0.0)
    if scale is not None:
        state = (state.to(tl.float32) * tl.load(scale).to(tl.float32)).to(hidden_out.dtype.element_ty)
    tl.store(hidden_out + row * HIDDEN + column, state, mask=column < HIDDEN)
    wide = state.to(tl.float32)
    next_scales = next_scale(next_weight, column, column < HIDDEN, NEXT_OFFSET, SHRINK)
    tl.store(scaled + row * HIDDEN + column, (wide * next_scales).to(scaled.dtype.element_ty), mask=column < HIDDEN)
    tl.store(squares + row * squares_stride + tile, tl.sum(wide * wide, axis=1), mask=tile < TILES)


def enter(
    level: Places,  # to fill: the places of the level's rows
    hidden_out: torch.Tensor,  # [R, hidden]
    next_norm: NextNorm,  # the first layer's
    embedding: torch.Tensor,
    scale: torch.Tensor | None,
    lengths: torch.Tensor,  # [B] int32
    page_table: torch.Tensor,  # [B, P] int32
    depths: torch.Tensor,  # [M] int32
    inv_freq: torch.Tensor,
    rope_scaling: torch.Tensor,
    first: int,  # the level's first node
    pending: torch.Tensor | None = None,  # [B] the root's tokens
    ranked: torch.Tensor | Ranking | None = None,  # [R of the level above, W] its ranked draft tokens, or any others
    parents: torch.Tensor | None = None,  # [M] int32: the place of each node's parent in the level above
    ranks: torch.Tensor | None = None,  # [M] int32
    counts: torch.Tensor | None = None,  # [B] int32: so many of each sequence's nodes are there; others have no slot
) -> None:
    """Tokens, places, hidden states and what their norm reads for all rows of a level."""
    rows, hidden = hidden_out.shape
    sequences = lengths.shape[0]
    if (pending is None) == (ranked is None):
        raise ValueError("a level's tokens come either from `pending` (the root) or from `ranked` (all others)")
    if rows != sequences * depths.shape[0]:
        raise ValueError(f"{rows} rows are not {depths.shape[0]} nodes of {sequences} sequences")
    if not all(t.is_contiguous() for t in (hidden_out, next_norm.scaled, embedding, level.tokens, level.slots)):
        raise ValueError("the rows that enter must be contiguous")
    next_norm.check(hidden_out)
    tiles, half = next_norm.squares.shape[1], inv_freq.shape[1]
    pdl = use_pdl(hidden_out)
    tokens = ranked if isinstance(ranked, torch.Tensor) else None
    ranking = ranked if isinstance(ranked, Ranking) else None
    tensors, sizes = ((None,) * 3, (0,) * 3) if ranking is None else (ranking.tensors, ranking.sizes)
    found = {"WIDTH": 0, "NT": 0, "TILE": 0} if ranking is None else ranking.constants
    _enter[(rows,)](
        pending, tokens, *tensors, parents, ranks, embedding, scale, lengths, page_table, depths,
        inv_freq, rope_scaling,
        level.tokens, level.positions, level.following, level.slots, level.cos, level.sin, hidden_out,
        *next_tensors(next_norm), counts, sequences, first, page_table.stride(0),
        0 if tokens is None else tokens.stride(0), *sizes, level.cos.stride(0),
        next_norm.squares.stride(0), HIDDEN=hidden, TILES=tiles, TILES_P2=triton.next_power_of_2(tiles),
        BLOCK=block_width(hidden),
        HALF=half, HALF_P2=triton.next_power_of_2(half), ROPES=inv_freq.shape[0],
        NEXT_OFFSET=float(next_norm.offset), SHRINK=shrink(hidden_out.dtype),
        **found, BEGINS=first == 0, PAGE=PAGE_SIZE, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
