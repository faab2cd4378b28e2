"""The best columns of each row, in order: found through the best of every tile, without sorting the row.

A row's scores come as *levels*, integers in the order of the floats (`noise.to_levels`), in tiles of `TILE` columns,
with a packed key of each tile's best column. The k-th best of the tiles' bests is a level that at least k columns
reach and few others: these are gathered, and ranked by counting. A few are found one after the other, in as many tiles.
Ties go to the lower token id. What the levels are, logits or noise, is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.noise import check_tensor, finite_token_of, pack, token_of
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl

TILE = 64  # columns of a tile: a power of two
MOST = 256  # the most columns that can be asked for
FEW = 8  # columns that are found sooner one after the other
NO_LEVEL = -(2**31)  # of a column that is not there


def tiles(columns: int) -> int:
    return -(-columns // TILE)


@dataclass(frozen=True)
class Scores:
    """The buffers between the kernels that score the columns of up to R rows and those that find the best."""

    keys: torch.Tensor  # [R, tiles] int64: each tile's best
    levels: torch.Tensor | None  # [R, tiles * TILE] int32; not needed where only the one best column is asked for
    found: torch.Tensor | None  # [R, 2, candidates] int64: scratch
    chosen: torch.Tensor | None  # [R, tiles] int32: scratch

    @classmethod
    def empty(cls, rows: int, columns: int, width: int, device: torch.device | str) -> Scores:
        """For finding up to `width` columns of each row."""
        if not 1 <= width <= MOST:
            raise ValueError(f"from 1 to {MOST} best columns can be found, not {width}")
        count = tiles(columns)
        keys = torch.empty(rows, count, dtype=torch.int64, device=device)
        if width == 1:
            return cls(keys, None, None, None)
        return cls(
            keys,
            torch.empty(rows, count * TILE, dtype=torch.int32, device=device),
            torch.empty(rows, 2, room(width), dtype=torch.int64, device=device),
            torch.empty(rows, count, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Ranking:
    """The `width` best columns of each row, to be found in their scores; up to FEW by whoever needs one of them."""

    scores: Scores
    width: int
    rows: torch.Tensor | None = None  # [N] the columns' tokens, all different, where they are not simply 0, 1, ...

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Keys, levels and rows, as `nth_best` takes them."""
        return self.scores.keys, self.scores.levels, self.rows

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many tiles there are, and from row to row of keys and of levels."""
        keys, levels = self.scores.keys, self.scores.levels
        return keys.shape[1], keys.stride(0), 0 if levels is None else levels.stride(0)

    @property
    def constants(self) -> dict[str, int]:
        """What `nth_best` is compiled for."""
        width, padded = (triton.next_power_of_2(size) for size in (self.width, self.scores.keys.shape[1]))
        return {"WIDTH": width, "NT": padded, "TILE": TILE}


def room(width: int) -> int:
    """How many candidates are kept for the `width` best: a power of two."""
    return max(128, 1 << (2 * width - 1).bit_length())


def top_merge_reference(levels: torch.Tensor, tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Levels [R, N] of `tokens` [N] to the tokens [R, width] of the best, -1 where there are no more."""
    keys = (levels.long() << 32) | (0x7FFFFFFF - tokens.long())
    best = keys.sort(-1, descending=True).values[:, :width]
    found = torch.full((levels.shape[0], width), -1)
    found[:, : best.shape[1]] = torch.where(best >> 32 > NO_LEVEL, 0x7FFFFFFF - (best & 0xFFFFFFFF), -1)
    return found


@jit
def _next_best(keys, last):
    """The largest of some keys below the last one that was found; none is the least of all."""
    return tl.max(tl.where(keys < last, keys, -0x8000000000000000), 0)


@jit
def nth_best(keys, levels, rows, tile_count, rank, WIDTH: tl.constexpr, NT: tl.constexpr, TILE: tl.constexpr):
    """The token of this rank, below WIDTH, among a row's; -1 if there are not so many. The best columns lie in the
    tiles with the best bests: no key is there twice."""
    index = tl.arange(0, NT)
    bests = tl.load(keys + index, mask=index < tile_count, other=-0x8000000000000000)
    if WIDTH == 1:
        return token_of(tl.max(bests, 0))
    else:
        place = tl.arange(0, WIDTH * TILE)
        tile = tl.full((WIDTH * TILE,), -1, tl.int32)
        last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for found in range(rank + 1):
            last = _next_best(bests, last)
            this = tl.max(tl.where((bests == last) & (last > -0x8000000000000000), index, -1), 0)
            tile = tl.where(place // TILE == found, this, tile)
        column = tile * TILE + place % TILE
        level = tl.load(levels + column, mask=tile >= 0, other=-0x80000000)
        token = column
        if rows is not None:
            token = tl.load(rows + column, mask=level > -0x80000000, other=0).to(tl.int32)
        candidates = pack(level, token)
        last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for _ in range(rank + 1):
            last = _next_best(candidates, last)
        return token_of(last)


@jit
def _merge_few_kernel(
    keys, levels, rows, tokens_out, tile_count, keys_stride, levels_stride, out_stride,
    FINITE: tl.constexpr, WIDTH: tl.constexpr, NT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each rank of each row is found by itself."""
    release(PDL)
    wait(PDL)
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if FINITE:
        index = tl.arange(0, NT)
        bests = tl.load(keys + row * keys_stride + index, mask=index < tile_count, other=-0x8000000000000000)
        token = finite_token_of(tl.max(bests, 0))
    else:
        of_row = levels if WIDTH == 1 else levels + row * levels_stride
        token = nth_best(keys + row * keys_stride, of_row, rows, tile_count, rank, WIDTH, NT, TILE)
    tl.store(tokens_out + row * out_stride + rank, token)


@jit(do_not_specialize=["width"])
def _merge_kernel(
    keys,
    levels,
    rows,
    chosen,
    found,
    tokens_out,
    tile_count,
    keys_stride,
    levels_stride,
    chosen_stride,
    found_stride,
    out_stride,
    width,
    ROOM: tl.constexpr,
    NT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NT)
    keys_here = tl.load(keys + row * keys_stride + index, mask=index < tile_count, other=-0x8000000000000000)
    bests = (keys_here >> 32).to(tl.int32)
    found += row * found_stride
    chosen += row * chosen_stride
    count = gather_best(bests, levels + row * levels_stride, rows, chosen, found, width, ROOM, TILE, GROUP)
    candidates, rank = rank_found(found, count, ROOM)
    place = tl.arange(0, ROOM)
    out = tokens_out + row * out_stride
    tl.store(out + rank, token_of(candidates), mask=(place < count) & (rank < width))
    tl.store(out + place, tl.full((ROOM,), -1, tl.int32), mask=(place >= count) & (place < width))


@jit
def gather_best(bests, levels, rows, chosen, found, k, ROOM: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Writes the keys of at most ROOM columns of a row to `found`, its k best among them; returns how many."""
    none = tl.full((), 0, tl.int32)
    low = level_of_kth(bests, k)
    reach = bests >= low
    tile_count = tl.sum(reach.to(tl.int32), 0)
    tl.store(chosen + tl.cumsum(reach.to(tl.int32), 0) - 1, tl.arange(0, bests.shape[0]), mask=reach)
    tl.debug_barrier()  # what one thread has written to memory, others read
    count = _gather(levels, rows, chosen, tile_count, low, found, none, 0, ROOM, TILE, GROUP)
    if count > ROOM:
        high = tl.max(bests, 0).to(tl.int64) + 1
        while (count > ROOM) & (high - low > 1):
            middle = (low + (high - low) // 2).to(tl.int32)
            reached = _count(levels, chosen, tile_count, middle, TILE, GROUP)
            if reached >= k:
                low = middle
                count = reached
            else:
                high = middle.to(tl.int64)
        # Either all that reach `low` fit, or fewer than k are above it: of its equals, the first ones stay.
        tl.debug_barrier()
        count = _gather(levels, rows, chosen, tile_count, low, found, none, 1, ROOM, TILE, GROUP)
        count = _gather(levels, rows, chosen, tile_count, low, found, count, 2, ROOM, TILE, GROUP)
    tl.debug_barrier()
    return tl.minimum(count, ROOM)


@jit
def level_of_kth(levels, k):
    """A level that at least k of these reach, and not many more; that of any column where there are fewer than k."""
    STEPS: tl.constexpr = 16
    there = levels > -0x80000000
    reached = tl.sum(there.to(tl.int32), 0)
    low = tl.min(tl.where(there, levels, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(levels, 0).to(tl.int64) + 1
    if reached < k:
        low = tl.full((), -0x7FFFFFFF, tl.int64)
        reached = k
    while (reached > k + k // 4) & (high - low > 1):
        width = (high - low + STEPS - 1) // STEPS
        steps = low + tl.arange(0, STEPS) * width
        limits = tl.minimum(steps, 0x7FFFFFFF).to(tl.int32)
        counts = tl.sum((levels[None, :] >= limits[:, None]).to(tl.int32), 1)
        enough = (counts >= k) & (steps < high)
        reached = tl.min(tl.where(enough, counts, 0x7FFFFFFF), 0)
        low += (tl.sum(enough.to(tl.int64), 0) - 1) * width
        high = tl.minimum(high, low + width)
    return low.to(tl.int32)


@jit
def _gather(
    levels,
    rows,
    chosen,
    tile_count,
    low,
    found,
    count,
    WHICH: tl.constexpr,  # 0: those that reach `low`, 1: those above it, 2: those at it
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Appends the keys of columns of the chosen tiles to `found`, as far as there is room; counts them all."""
    index = tl.arange(0, GROUP * TILE)
    for first in range(0, tile_count, GROUP):
        slot = first + index // TILE
        column = tl.load(chosen + slot, mask=slot < tile_count, other=0) * TILE + index % TILE
        level = tl.load(levels + column, mask=slot < tile_count, other=-0x80000000)
        if WHICH == 0:
            take = level >= low
        elif WHICH == 1:
            take = level > low
        else:
            take = level == low
        token = column
        if rows is not None:
            token = tl.load(rows + column, mask=take, other=0).to(tl.int32)
        place = count + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(found + place, pack(level, token), mask=take & (place < ROOM))
        count += tl.sum(take.to(tl.int32), 0)
    return count


@jit
def _count(levels, chosen, tile_count, low, TILE: tl.constexpr, GROUP: tl.constexpr):
    """How many columns of the chosen tiles reach `low`."""
    index = tl.arange(0, GROUP * TILE)
    count = tl.full((), 0, tl.int32)
    for first in range(0, tile_count, GROUP):
        slot = first + index // TILE
        column = tl.load(chosen + slot, mask=slot < tile_count, other=0) * TILE + index % TILE
        level = tl.load(levels + column, mask=slot < tile_count, other=-0x80000000)
        count += tl.sum((level >= low).to(tl.int32), 0)
    return count


@jit
def rank_found(found, count, ROOM: tl.constexpr):
    """The keys found and the rank of each among them; the first of equal keys ranks first."""
    CHUNK: tl.constexpr = 4096 // ROOM
    index = tl.arange(0, ROOM)
    keys = tl.load(found + index, mask=index < count, other=-0x8000000000000000)
    rank = tl.zeros((ROOM,), tl.int32)
    for first in range(0, count, CHUNK):
        other = first + tl.arange(0, CHUNK)
        others = tl.load(found + other, mask=other < count, other=-0x8000000000000000)
        better = others[None, :] > keys[:, None]
        better |= (others[None, :] == keys[:, None]) & (other[None, :] < index[:, None])
        rank += tl.sum(better.to(tl.int32), 1)
    return keys, rank


def top_merge(
    scores: Scores, tokens_out: torch.Tensor, *, rows: torch.Tensor | None = None, finite: bool = False
) -> None:
    """The best columns of each row, best first: tokens_out [R, W] int32 or int64, -1 where a row has fewer than W.

    rows [N] int32 or int64, all different: the columns' tokens where they are not simply 0, 1, ...
    finite: for the target's choice, with W = 1: -1 also where the best score is infinite or no number.
    """
    _check(scores, tokens_out, rows)
    if finite and tokens_out.shape[1] != 1:
        raise ValueError(f"finite asks for the one best column of a row, not for {tokens_out.shape[1]}")
    keys, (r, width) = scores.keys, tokens_out.shape
    pdl = {"PDL": True, "launch_pdl": True} if use_pdl(keys) else {"PDL": False}
    count = keys.shape[1]
    padded = triton.next_power_of_2(count)
    if width <= FEW:
        ranking = Ranking(scores, width, rows)
        _merge_few_kernel[(r, width)](
            *ranking.tensors, tokens_out, *ranking.sizes, tokens_out.stride(0),
            FINITE=finite, num_warps=4 if padded <= 1024 else 8, **ranking.constants, **pdl,
        )  # fmt: skip
        return
    levels, chosen, found = scores.levels, scores.chosen, scores.found
    assert levels is not None and chosen is not None and found is not None
    _merge_kernel[(r,)](
        keys, levels, rows, chosen, found, tokens_out, count,
        keys.stride(0), levels.stride(0), chosen.stride(0), found.stride(0), tokens_out.stride(0), width,
        ROOM=room(width), NT=padded, TILE=TILE, GROUP=32, num_warps=8, **pdl,
    )  # fmt: skip


def _check(scores: Scores, tokens_out: torch.Tensor, rows: torch.Tensor | None) -> None:
    keys = scores.keys
    if tokens_out.dim() != 2 or not 1 <= tokens_out.shape[1] <= MOST or tokens_out.shape[0] > keys.shape[0]:
        raise ValueError(
            f"tokens_out must be [up to {keys.shape[0]} rows, 1 to {MOST} tokens], not {list(tokens_out.shape)}"
        )
    kinds = (torch.int32, torch.int64)
    check_tensor(tokens_out, "tokens_out", tuple(tokens_out.shape), kinds, keys.device)
    if tokens_out.shape[1] == 1:
        return
    if scores.found is None or scores.found.shape[2] < room(tokens_out.shape[1]):
        raise ValueError(f"these scores were not made for {tokens_out.shape[1]} columns a row: use Scores.empty")
    if rows is not None and (rows.dim() != 1 or tiles(rows.shape[0]) != keys.shape[1]):
        raise ValueError(f"rows must be one token for each column of {keys.shape[1]} tiles, not {list(rows.shape)}")
    if rows is not None:
        check_tensor(rows, "rows", (rows.shape[0],), kinds, keys.device)
