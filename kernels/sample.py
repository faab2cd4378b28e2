"""The target's choice among the tokens that top-k, top-p and min-p leave, on the device, for all rows at once.

Starts from scores without noise (`best.Scores`: levels of logits over temperature), made by the head itself or, where
something has to happen to the logits first, by `score`. The quick kernel sorts each row's best few; the thorough one,
where these do not decide, searches the level of the cut over the whole row. Noise is added to what stays.

One program does one row, in an order that depends on nothing but the sizes: a row's choice is its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from selfspec.kernels.lm_head_topk import perturbed_reference
from selfspec.kernels.noise import (
    Noise,
    check_scalar,
    check_tensor,
    from_levels,
    gumbel_of,
    gumbel_run,
    log,
    pack,
    read_scalar,
    to_levels,
    token_of,
)
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.topk import MOST, TILE, Scores, gather_best, rank_found, room, tiles, top_merge
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl

SPAN = 4096  # columns that one program scores, or sums the mass of


@dataclass(frozen=True)
class Cuts:
    """Which tokens may be drawn: each cut is one number on the device, or None if it is off."""

    top_k: torch.Tensor | None = None  # int32; below 1 it cuts nothing
    top_p: torch.Tensor | None = None  # float32
    min_p: torch.Tensor | None = None  # float32
    most: int | None = None  # top_k is from 1 to this, at most 256: much quicker than not knowing it

    def check(self, device: torch.device) -> None:
        if self.top_k is None and self.top_p is None and self.min_p is None:
            raise ValueError("no cut at all: draw with the noise in the scores, or give at least one cut")
        for name, kind in (("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32)):
            if getattr(self, name) is not None:
                check_scalar(getattr(self, name), name, (kind,), device)
        if self.most is not None and (self.top_k is None or not 1 <= self.most <= MOST):
            raise ValueError(f"most={self.most} is not possible: it bounds a top_k, from 1 to {MOST}")

    @property
    def listed(self) -> int:
        """How many of the best tokens the quick kernel sorts."""
        return MOST if self.most is None else 1 << (self.most - 1).bit_length()


@dataclass(frozen=True)
class Workspace:
    """What the kernels need for rows over a vocabulary."""

    scores: Scores
    masses: torch.Tensor  # [R, spans] float32: the sums of exp(value - the row's largest)
    undecided: torch.Tensor = field(repr=False)  # [R] int32: not 0 where the thorough kernel has to decide

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device | str, most: int = MOST) -> Workspace:
        """most: as in the cuts; with a bound there, less is needed."""
        return cls(
            Scores.empty(rows, vocabulary, max(2, 1 << (most - 1).bit_length()), device),
            torch.empty(rows, -(-vocabulary // SPAN), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )


def choose_reference(logits: torch.Tensor, noise: Noise, cuts: Cuts) -> torch.Tensor:
    """The choice [R] among what the cuts leave of logits [R, V]; sorted by the book, in float64 if the logits are."""
    values = logits / noise.temperature
    order = values.sort(dim=-1, descending=True, stable=True).indices
    best = values.gather(-1, order)
    keep = torch.ones_like(best, dtype=torch.bool)
    if cuts.top_k is not None and cuts.top_k >= 1:
        keep[:, cuts.top_k :] = False
    if cuts.top_p is not None:
        mass = best.masked_fill(~keep, -torch.inf).softmax(-1)
        keep[:, 1:] &= (mass.cumsum(-1) - mass)[:, 1:] < (cuts.top_p if cuts.top_p < 1 else torch.inf)
    if cuts.min_p is not None:
        keep &= best >= best[:, :1] + cuts.min_p.log()
    kept = torch.full_like(values, -torch.inf).scatter(-1, order, best.masked_fill(~keep, -torch.inf))
    untempered = Noise(noise.seeds, noise.copies, noise.positions, 1.0, noise.stream)
    return perturbed_reference(kept, torch.arange(values.shape[-1], device=values.device), untempered).argmax(-1)


@jit
def _score_kernel(
    logits,
    keys,
    levels,
    seeds,
    copies,
    positions,
    temperature,
    V,
    tile_count,
    logits_stride,
    keys_stride,
    levels_stride,
    sequences,
    TEMPERED: tl.constexpr,
    NOISY: tl.constexpr,
    STREAM: tl.constexpr,
    TEMPERATURE_IS_POINTER: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Levels and each tile's best for one span of one row of logits."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SPAN
    column = first + tl.arange(0, SPAN)
    values = tl.load(logits + row * logits_stride + column, mask=column < V, other=0.0)
    if TEMPERED:
        heat = read_scalar(temperature, TEMPERATURE_IS_POINTER)
        values = tl.math.div_rn(values, tl.full((SPAN,), 1.0, tl.float32) * heat)
    if NOISY:
        sequence = tl.program_id(0) % sequences
        one = tl.zeros((1, 1), tl.int64)
        seed, copy = one + tl.load(seeds + sequence), one + tl.load(copies + sequence)
        position = one + tl.load(positions + row)
        values += tl.reshape(gumbel_run(seed, copy, position, first, SPAN, STREAM), (SPAN,))
    level = tl.where(column < V, to_levels(values), -0x80000000)
    if levels is not None:
        tl.store(levels + row * levels_stride + column, level, mask=column < tile_count * TILE)
    level = tl.reshape(level, (SPAN // TILE, TILE))
    best = tl.max(level, 1)
    token = tl.reshape(column, (SPAN // TILE, TILE))
    of_best = tl.min(tl.where(level == best[:, None], token, 0x7FFFFFFF), 1)
    tile = tl.program_id(1) * (SPAN // TILE) + tl.arange(0, SPAN // TILE)
    tl.store(keys + row * keys_stride + tile, pack(best, of_best), mask=tile < tile_count)


@jit
def _largest(keys, tile_count, NT: tl.constexpr):
    """The levels of the tiles' bests [NT], and the row's largest value."""
    index = tl.arange(0, NT)
    bests = (tl.load(keys + index, mask=index < tile_count, other=-0x8000000000000000) >> 32).to(tl.int32)
    return bests, from_levels(tl.max(bests, 0))


@jit
def _mass(values, largest):
    """exp(values - largest), 1 for the largest even where it is infinite."""
    return tl.where(values == largest, 1.0, tl.exp(values - largest))


@jit
def _mass_kernel(
    keys, levels, masses, tile_count, keys_stride, levels_stride, masses_stride,
    NT: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The mass of one span of one row."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, largest = _largest(keys + row * keys_stride, tile_count, NT)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    level = tl.load(levels + row * levels_stride + column, mask=column < tile_count * TILE, other=-0x80000000)
    mass = tl.where(level > -0x80000000, _mass(from_levels(level), largest), 0.0)
    tl.store(masses + row * masses_stride + tl.program_id(1), tl.sum(mass, 0))


@jit
def _limit(top_p):
    """A token stays if what ranks above it has less mass than this."""
    share = tl.load(top_p)
    return tl.where(share < 1, share, float("inf"))


@jit
def _least(largest, min_p):
    """The smallest value that min-p leaves."""
    share = tl.load(min_p)
    return tl.where(share > 0, largest + log(share), float("-inf"))


@jit
def _best_drawn(values, tokens, keep, seed, copy, position, STREAM: tl.constexpr):
    """The key of the best of these values with noise."""
    noisy = values + gumbel_of(seed, copy, position, tokens, STREAM)
    return tl.max(pack(tl.where(keep, to_levels(noisy), -0x80000000), tokens), 0)


@jit
def _quick_kernel(
    keys,
    levels,
    chosen,
    found,
    masses,
    undecided,
    tokens_out,
    top_k,
    top_p,
    min_p,
    seeds,
    copies,
    positions,
    V,
    tile_count,
    spans,
    keys_stride,
    levels_stride,
    chosen_stride,
    found_stride,
    masses_stride,
    out_stride,
    sequences,
    STREAM: tl.constexpr,
    LISTED: tl.constexpr,
    ROOM: tl.constexpr,
    NT: tl.constexpr,
    NS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sorts the LISTED best tokens of a row and cuts there. Without a top-k the cut may lie further down."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.full((), LISTED, tl.int32)
    if top_k is not None:
        k = tl.minimum(tl.maximum(tl.load(top_k).to(tl.int32), 1), LISTED)
    bests, largest = _largest(keys + row * keys_stride, tile_count, NT)
    found += row * found_stride
    count = gather_best(
        bests, levels + row * levels_stride, None, chosen + row * chosen_stride, found, k, ROOM, TILE, GROUP
    )
    candidates, rank = rank_found(found, count, ROOM)
    tl.store(found + ROOM + rank, candidates, mask=tl.arange(0, ROOM) < count)
    tl.debug_barrier()
    index = tl.arange(0, LISTED)
    listed = index < tl.minimum(count, k)
    ordered = tl.load(found + ROOM + index, mask=listed, other=-0x8000000000000000)
    tokens = token_of(ordered)
    values = from_levels((ordered >> 32).to(tl.int32))
    keep = listed
    if top_p is not None:
        mass = tl.where(listed, _mass(values, largest), 0.0)
        if top_k is None:
            span = tl.arange(0, NS)
            total = tl.sum(tl.load(masses + row * masses_stride + span, mask=span < spans, other=0.0), 0)
        else:
            total = tl.sum(mass, 0)
        share = tl.math.div_rn(mass, tl.full((LISTED,), 1.0, tl.float32) * total)
        keep &= (tl.cumsum(share, 0) - share < _limit(top_p)) | (index == 0)
    if min_p is not None:
        keep &= values >= _least(largest, min_p)
    sequence = tl.program_id(0) % sequences
    seed, copy = tl.load(seeds + sequence), tl.load(copies + sequence)
    best = _best_drawn(values, tokens, keep, seed, copy, tl.load(positions + row), STREAM)
    tl.store(tokens_out + row * out_stride, token_of(best))
    if top_k is None:
        # What is cut off at the end of the list is cut off behind it.
        last_stays = tl.sum((keep & (index == LISTED - 1)).to(tl.int32), 0)
        tl.store(undecided + row, tl.where(V > LISTED, last_stays, 0))


@jit
def _above(levels, columns, level, largest, BY_MASS: tl.constexpr, SPAN: tl.constexpr):
    """The number, or the mass, of a row's columns above a level; both in float32, where such numbers are exact."""
    total = tl.zeros((SPAN,), tl.float32)
    for first in range(0, columns, SPAN):
        column = first + tl.arange(0, SPAN)
        here = tl.load(levels + column, mask=column < columns, other=-0x80000000)
        if BY_MASS:
            total += tl.where(here > level, _mass(from_levels(here), largest), 0.0)
        else:
            total += tl.where(here > level, 1.0, 0.0)
    return tl.sum(total, 0)


@jit
def _lowest(levels, columns, low, high, target, largest, BY_MASS: tl.constexpr, SPAN: tl.constexpr):
    """The lowest level, above `low` and up to `high`, that has less than `target` above it; and how much it has."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    above = tl.full((), 0.0, tl.float32)
    while high - low > 1:
        middle = low + (high - low) // 2
        measured = _above(levels, columns, middle.to(tl.int32), largest, BY_MASS, SPAN)
        if measured < target:
            high = middle
            above = measured
        else:
            low = middle
    return high.to(tl.int32), above


@jit
def _thorough_kernel(
    keys,
    levels,
    undecided,
    tokens_out,
    top_k,
    top_p,
    min_p,
    seeds,
    copies,
    positions,
    V,
    tile_count,
    keys_stride,
    levels_stride,
    out_stride,
    sequences,
    STREAM: tl.constexpr,
    NT: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finds the level at which a row is cut by bisection, and how many of the columns at it stay."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if undecided is not None:  # noqa: SIM102  (the outer one is decided at compile time)
        if tl.load(undecided + row) == 0:
            return
    levels += row * levels_stride
    columns = tile_count * TILE
    bests, largest = _largest(keys + row * keys_stride, tile_count, NT)
    highest = tl.max(bests, 0)
    cut = tl.full((), -0x7FFFFFFF, tl.int32)
    stay = tl.full((), 0x7FFFFFFF, tl.int32)
    if top_k is not None:
        k = tl.load(top_k).to(tl.int32)
        k = tl.where(k < 1, V, tl.minimum(k, V))
        cut, above = _lowest(levels, columns, cut - 1, highest, k.to(tl.float32), largest, False, SPAN)
        stay = k - above.to(tl.int32)
    if top_p is not None:
        # In exact arithmetic: a token stays if (mass above it) / (mass that top-k leaves) < top_p.
        at_cut = _mass(from_levels(cut), largest)
        if top_k is None:
            total = _above(levels, columns, cut - 1, largest, True, SPAN)
        else:
            total = tl.math.fma(stay.to(tl.float32), at_cut, _above(levels, columns, cut, largest, True, SPAN))
        target = _limit(top_p) * total
        lowest, above = _lowest(levels, columns, cut - 1, highest, target, largest, True, SPAN)
        each = _mass(from_levels(lowest), largest)
        fitting = tl.ceil(tl.minimum(tl.math.div_rn(target - above, tl.maximum(each, 1e-30)), 1e9)).to(tl.int32)
        stay = tl.minimum(tl.where(lowest == cut, stay, 0x7FFFFFFF), tl.maximum(fitting, 1))
        cut = lowest
    least = tl.full((), float("-inf"), tl.float32)
    if min_p is not None:
        least = _least(largest, min_p)
    sequence = tl.program_id(0) % sequences
    seed, copy = tl.load(seeds + sequence), tl.load(copies + sequence)
    position = tl.load(positions + row)
    best = tl.full((), -0x8000000000000000, tl.int64)
    equal = tl.full((), 0, tl.int32)
    for first in range(0, columns, SPAN // 4):  # noise takes many registers
        column = first + tl.arange(0, SPAN // 4)
        here = tl.load(levels + column, mask=column < columns, other=-0x80000000)
        at = (here == cut).to(tl.int32)
        values = from_levels(here)
        keep = ((here > cut) | ((here == cut) & (equal + tl.cumsum(at, 0) <= stay))) & (values >= least)
        equal += tl.sum(at, 0)
        best = tl.maximum(best, _best_drawn(values, column, keep, seed, copy, position, STREAM))
    tl.store(tokens_out + row * out_stride, token_of(best))


def score(
    logits: torch.Tensor,  # [R, V] float32
    scores: Scores,
    *,
    noise: Noise | None = None,
    noisy: bool = True,
) -> None:
    """Scores logits as the head scores its own: as they are, or over temperature, plus noise if `noisy`."""
    rows, columns = logits.shape
    check_tensor(logits, "logits", (rows, columns), (torch.float32,), logits.device)
    check_tensor(scores.keys[:rows], "the scores' keys", (rows, tiles(columns)), (torch.int64,), logits.device)
    if noise is not None:
        noise.check(rows, logits.device)
    keys, levels = scores.keys, scores.levels
    _score_kernel[(rows, triton.cdiv(columns, SPAN))](
        logits, keys, levels,
        seeds=noise and noise.seeds, copies=noise and noise.copies, positions=noise and noise.positions,
        temperature=noise and noise.temperature, V=columns, tile_count=keys.shape[1],
        logits_stride=logits.stride(0), keys_stride=keys.stride(0),
        levels_stride=0 if levels is None else levels.stride(0),
        sequences=1 if noise is None else noise.seeds.shape[0],
        TEMPERED=noise is not None, NOISY=noise is not None and noisy, STREAM=noise.stream if noise else 0,
        TEMPERATURE_IS_POINTER=noise is not None and isinstance(noise.temperature, torch.Tensor),
        TILE=TILE, SPAN=SPAN, num_warps=8, **_pdl(keys),
    )  # fmt: skip


def choose(
    logits: torch.Tensor,  # [R, V] float32
    tokens_out: torch.Tensor,  # [R] int32 or int64
    work: Workspace,
    *,
    noise: Noise | None = None,
    cuts: Cuts | None = None,
) -> None:
    """The choice for every row of logits: the largest without noise, else drawn among what the cuts leave."""
    if cuts is not None and noise is None:
        raise ValueError("cuts change nothing where the largest logit is chosen: give the noise to draw with")
    score(logits, work.scores, noise=noise, noisy=cuts is None)
    if cuts is None or noise is None:
        top_merge(work.scores, tokens_out[:, None])
    else:
        choose_scored(logits.shape[1], tokens_out, work, noise=noise, cuts=cuts)


def choose_scored(vocabulary: int, tokens_out: torch.Tensor, work: Workspace, *, noise: Noise, cuts: Cuts) -> None:
    """The choice among what the cuts leave of a vocabulary whose scores, without noise, are in the workspace."""
    _check(vocabulary, tokens_out, work, noise, cuts)
    scores, rows, keys = work.scores, tokens_out.shape[0], work.scores.keys
    levels, chosen, found = scores.levels, scores.chosen, scores.found
    assert levels is not None and chosen is not None and found is not None
    drawing = {
        "top_k": cuts.top_k, "top_p": cuts.top_p, "min_p": cuts.min_p, "V": vocabulary, "tile_count": keys.shape[1],
        "seeds": noise.seeds, "copies": noise.copies, "positions": noise.positions, "STREAM": noise.stream,
        "keys_stride": keys.stride(0), "levels_stride": levels.stride(0), "out_stride": tokens_out.stride(0),
        "sequences": noise.seeds.shape[0], "NT": triton.next_power_of_2(keys.shape[1]), "TILE": TILE,
        **_pdl(keys),
    }  # fmt: skip
    quick = cuts.top_k is None or cuts.most is not None
    spans = work.masses.shape[1]
    if quick and cuts.top_k is None and cuts.top_p is not None:
        _mass_kernel[(rows, spans)](
            keys, levels, work.masses, keys.shape[1], keys.stride(0), levels.stride(0), work.masses.stride(0),
            NT=drawing["NT"], TILE=TILE, SPAN=SPAN, num_warps=8, **_pdl(keys),
        )  # fmt: skip
    if quick:
        _quick_kernel[(rows,)](
            keys, levels, chosen, found, work.masses, work.undecided, tokens_out, spans=spans,
            chosen_stride=chosen.stride(0), found_stride=found.stride(0), masses_stride=work.masses.stride(0),
            LISTED=cuts.listed, ROOM=room(cuts.listed), NS=triton.next_power_of_2(spans), GROUP=32,
            num_warps=8, **drawing,
        )  # fmt: skip
    if cuts.most is None:
        undecided = work.undecided if quick else None
        _thorough_kernel[(rows,)](keys, levels, undecided, tokens_out, SPAN=SPAN, num_warps=16, **drawing)


def _pdl(tensor: torch.Tensor) -> dict[str, bool]:
    return {"PDL": True, "launch_pdl": True} if use_pdl(tensor) else {"PDL": False}


def _check(vocabulary: int, tokens_out: torch.Tensor, work: Workspace, noise: Noise, cuts: Cuts) -> None:
    keys, found = work.scores.keys, work.scores.found
    rows, device = tokens_out.shape[0], keys.device
    cuts.check(device)
    check_tensor(tokens_out, "tokens_out", (rows,), (torch.int32, torch.int64), device)
    if rows > keys.shape[0] or tiles(vocabulary) != keys.shape[1]:
        raise ValueError(
            f"the workspace is for up to {keys.shape[0]} rows and {keys.shape[1]} tiles of the vocabulary, "
            f"not for {rows} rows over {vocabulary} tokens: use Workspace.empty"
        )
    if found is None or found.shape[2] < room(cuts.listed):
        raise ValueError(f"the workspace is too small for the {cuts.listed} best tokens of a row: use Workspace.empty")
    noise.check(rows, device)
