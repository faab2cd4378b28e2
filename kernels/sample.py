"""The target's choice among the tokens that top-k, top-p and min-p leave, on the device, for all rows at once.

Starts from scores (`topk.Scores`) made by the head itself or, where logits are written out, by `score`. Rows of a
sequence without a cut have their noise in the scores and take the best; those of a cut one have levels of values over
temperature, and noise is added to what stays. A quick kernel sorts a row's best few; the thorough one, where these do
not decide, searches the level of the cut over the whole row.

One program does one row, in an order that depends on nothing but the sizes, and a row's own scores and parameters say
which kernel decides it: a row's choice is its own. A row whose largest value is no finite number has no choice: -1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from selfspec.kernels.logits_processing import Processing, check_drawing
from selfspec.kernels.noise import (
    Cuts,
    Noise,
    check_tensor,
    finite_token_of,
    from_levels,
    gumbel_of,
    is_cut,
    is_finite,
    load_drawing,
    log,
    pack,
    perturbed_reference,
    to_levels,
    token_of,
)
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.score_logits import score, score_reference
from selfspec.kernels.topk import MOST, TILE, Scores, gather_best, rank_found, room, tiles, top_merge
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl

SPAN = 4096  # columns that one program sums the mass of
FIRST_LISTED = 64  # tokens that the first quick kernel sorts: enough for most rows


@dataclass(frozen=True)
class Workspace:
    """What the kernels need for rows over a vocabulary."""

    scores: Scores
    masses: torch.Tensor  # [R, spans] float32: the sums of exp(value - the row's largest)
    undecided: torch.Tensor = field(repr=False)  # [R] int32: not 0 where the thorough kernel has to decide

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device | str, few: bool = False) -> Workspace:
        """few: as in the cuts; less is needed then."""
        return cls(
            Scores.empty(rows, vocabulary, FIRST_LISTED if few else MOST, device),
            torch.empty(rows, -(-vocabulary // SPAN), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )


def choose_reference(
    logits: torch.Tensor, noise: Noise, cuts: Cuts, processing: Processing | None = None
) -> torch.Tensor:
    """The choice [R] among what the cuts leave of logits [R, V]; sorted by the book, in float64 if the logits are."""
    values, cut = score_reference(logits, noise, cuts, processing), cuts.on & (noise.temperature > 0)
    kept = values.clone()
    for row in range(len(values)):
        sequence = row % len(cut)
        if cut[sequence]:
            kept[row] = _kept(values[row], int(cuts.top_k[sequence]), cuts.top_p[sequence], cuts.min_p[sequence])
    untempered = replace(noise, temperature=cut.float())
    drawn = perturbed_reference(kept, torch.arange(values.shape[-1], device=values.device), untempered)
    return torch.where(drawn.amax(-1).isfinite(), drawn.argmax(-1), -1)


def _kept(values: torch.Tensor, top_k: int, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Values [V] of one row, -inf where a cut removes them."""
    best, order = values.sort(descending=True, stable=True)
    keep = torch.ones_like(best, dtype=torch.bool)
    if top_k >= 1:
        keep[top_k:] = False
    if top_p < 1:
        mass = best.masked_fill(~keep, -torch.inf).softmax(-1)
        keep[1:] &= (mass.cumsum(-1) - mass)[1:] < top_p
    if min_p > 0:
        keep &= best >= best[0] + min_p.log()
    return torch.full_like(values, -torch.inf).scatter(-1, order, best.masked_fill(~keep, -torch.inf))


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
    keys, levels, masses, noise, cuts, tile_count, keys_stride, levels_stride, masses_stride, sequences,
    NT: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The mass of one span of one row, where a top-p without a top-k asks for it."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    heat, top_k, top_p, _min_p = load_drawing(noise, cuts, tl.program_id(0) % sequences)
    if (heat > 0) & (top_k < 1) & (top_p < 1):
        _bests, largest = _largest(keys + row * keys_stride, tile_count, NT)
        column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        level = tl.load(levels + row * levels_stride + column, mask=column < tile_count * TILE, other=-0x80000000)
        mass = tl.where(level > -0x80000000, _mass(from_levels(level), largest), 0.0)
        tl.store(masses + row * masses_stride + tl.program_id(1), tl.sum(mass, 0))


@jit
def _least(largest, min_p):
    """The smallest value that min-p leaves."""
    return tl.where(min_p > 0, largest + log(min_p), float("-inf"))


@jit
def _best_drawn(values, tokens, keep, noise, row, sequence, STREAM: tl.constexpr):
    """The key of the best of these values with noise."""
    seeds, sample_indices, positions, _ = noise
    seed, index = tl.load(seeds + sequence), tl.load(sample_indices + sequence)
    noisy = values + gumbel_of(seed, index, tl.load(positions + row), tokens, STREAM)
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
    noise,
    cuts,
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
    FIRST: tl.constexpr,
    MORE: tl.constexpr,
    LISTED: tl.constexpr,
    ROOM: tl.constexpr,
    NT: tl.constexpr,
    NS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decides rows by their LISTED best tokens, sorted: those with a top-k up to LISTED, and those with none whose
    cut lies among these tokens. The first launch takes all rows, and the best token of those without a cut; if MORE
    kernels follow, it leaves the others to them."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(0) % sequences
    heat, top_k, top_p, min_p = load_drawing(noise, cuts, sequence)
    cut = (heat > 0) & is_cut(top_k, top_p, min_p)
    mine = cut & (top_k <= LISTED)
    index = tl.arange(0, NT)
    best_keys = tl.load(keys + row * keys_stride + index, mask=index < tile_count, other=-0x8000000000000000)
    if FIRST:
        if cut == 0:
            tl.store(tokens_out + row * out_stride, finite_token_of(tl.max(best_keys, 0)))
        if MORE:
            tl.store(undecided + row, (cut & (top_k > LISTED)).to(tl.int32))
    else:
        mine = mine & (tl.load(undecided + row) != 0)
    if mine:
        bests = (best_keys >> 32).to(tl.int32)
        highest = tl.max(bests, 0)
        largest = from_levels(highest)
        k = tl.where(top_k < 1, LISTED, top_k)
        ordered, listed = _sorted_best(
            bests, levels + row * levels_stride, chosen + row * chosen_stride, found + row * found_stride, k, LISTED,
            ROOM, TILE, GROUP,
        )  # fmt: skip
        values = from_levels((ordered >> 32).to(tl.int32))
        mass = tl.where(listed, _mass(values, largest), 0.0)
        total = tl.sum(mass, 0)
        if MORE:
            span = tl.arange(0, NS)
            of_row = tl.load(masses + row * masses_stride + span, mask=span < spans, other=0.0)
            total = tl.where((top_k < 1) & (top_p < 1), tl.sum(of_row, 0), total)  # summed only where both hold
        share = tl.math.div_rn(mass, tl.full((LISTED,), 1.0, tl.float32) * total)
        place = tl.arange(0, LISTED)
        limit = tl.where(top_p < 1, top_p, float("inf"))
        keep = listed & ((tl.cumsum(share, 0) - share < limit) | (place == 0))
        keep &= values >= _least(largest, min_p)
        best = _best_drawn(values, token_of(ordered), keep, noise, row, sequence, STREAM)
        tl.store(tokens_out + row * out_stride, tl.where(is_finite(highest), token_of(best), -1))
        if MORE:
            # What is cut off at the end of the list is cut off behind it.
            last_stays = tl.sum((keep & (place == LISTED - 1)).to(tl.int32), 0)
            tl.store(undecided + row, tl.where((top_k < 1) & (V > LISTED), last_stays, 0))


@jit
def _sorted_best(
    bests, levels, chosen, found, k, LISTED: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr
):
    """The keys [LISTED] of a row's k best columns, best first, and which of them are there."""
    count = gather_best(bests, levels, None, chosen, found, k, ROOM, TILE, GROUP)
    candidates, rank = rank_found(found, count, ROOM)
    tl.store(found + ROOM + rank, candidates, mask=tl.arange(0, ROOM) < count)
    tl.debug_barrier()
    index = tl.arange(0, LISTED)
    listed = index < tl.minimum(count, k)
    return tl.load(found + ROOM + index, mask=listed, other=-0x8000000000000000), listed


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
    noise,
    cuts,
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
    """Finds the level at which an undecided row is cut by bisection, and how many of the columns at it stay."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(undecided + row) == 0:
        return
    sequence = tl.program_id(0) % sequences
    _, top_k, top_p, min_p = load_drawing(noise, cuts, sequence)
    levels += row * levels_stride
    columns = tile_count * TILE
    bests, largest = _largest(keys + row * keys_stride, tile_count, NT)
    highest = tl.max(bests, 0)
    if is_finite(highest) == 0:
        tl.store(tokens_out + row * out_stride, -1)
        return
    cut, stay = _cut_level(levels, columns, highest, largest, V, top_k, top_p, SPAN)
    least = _least(largest, min_p)
    best = tl.full((), -0x8000000000000000, tl.int64)
    equal = tl.full((), 0, tl.int32)
    for first in range(0, columns, SPAN // 4):  # noise takes many registers
        column = first + tl.arange(0, SPAN // 4)
        here = tl.load(levels + column, mask=column < columns, other=-0x80000000)
        at = (here == cut).to(tl.int32)
        values = from_levels(here)
        keep = ((here > cut) | ((here == cut) & (equal + tl.cumsum(at, 0) <= stay))) & (values >= least)
        equal += tl.sum(at, 0)
        best = tl.maximum(best, _best_drawn(values, column, keep, noise, row, sequence, STREAM))
    tl.store(tokens_out + row * out_stride, token_of(best))


@jit
def _cut_level(levels, columns, highest, largest, V, top_k, top_p, SPAN: tl.constexpr):
    """The lowest level that top-k and top-p leave, and how many of the columns at it."""
    cut = tl.full((), -0x7FFFFFFF, tl.int32)
    stay = tl.full((), 0x7FFFFFFF, tl.int32)
    if top_k >= 1:
        k = tl.minimum(top_k, V)
        cut, above = _lowest(levels, columns, cut - 1, highest, k.to(tl.float32), largest, False, SPAN)
        stay = k - above.to(tl.int32)
    if top_p < 1:
        # In exact arithmetic: a token stays if (mass above it) / (mass that top-k leaves) < top_p.
        if top_k >= 1:
            at_cut = _mass(from_levels(cut), largest)
            total = tl.math.fma(stay.to(tl.float32), at_cut, _above(levels, columns, cut, largest, True, SPAN))
        else:
            total = _above(levels, columns, cut - 1, largest, True, SPAN)
        target = top_p * total
        lowest, above = _lowest(levels, columns, cut - 1, highest, target, largest, True, SPAN)
        each = _mass(from_levels(lowest), largest)
        fitting = tl.ceil(tl.minimum(tl.math.div_rn(target - above, tl.maximum(each, 1e-30)), 1e9)).to(tl.int32)
        stay = tl.minimum(tl.where(lowest == cut, stay, 0x7FFFFFFF), tl.maximum(fitting, 1))
        cut = lowest
    return cut, stay


def choose(
    logits: torch.Tensor,  # [R, V] float32
    tokens_out: torch.Tensor,  # [R] int32 or int64
    work: Workspace,
    *,
    noise: Noise | None = None,
    cuts: Cuts | None = None,
    processing: Processing | None = None,
) -> None:
    """The choice for every row of logits: the largest, or drawn among what the cuts leave; -1 where the largest value
    is no finite number."""
    score(logits, work.scores, noise=noise, cuts=cuts, processing=processing)
    if cuts is None or noise is None:
        top_merge(work.scores, tokens_out[:, None], finite=True)
    else:
        choose_scored(logits.shape[1], tokens_out, work, noise=noise, cuts=cuts)


def choose_scored(vocabulary: int, tokens_out: torch.Tensor, work: Workspace, *, noise: Noise, cuts: Cuts) -> None:
    """The choice for every row of a vocabulary whose scores, made with the same noise and cuts, are in the workspace;
    -1 where a row's largest value is no finite number."""
    _check(vocabulary, tokens_out, work, noise, cuts)
    scores, rows, keys = work.scores, tokens_out.shape[0], work.scores.keys
    levels, chosen, found = scores.levels, scores.chosen, scores.found
    assert levels is not None and chosen is not None and found is not None
    common: dict[str, Any] = {
        "noise": noise.tensors, "cuts": cuts.tensors, "tile_count": keys.shape[1],
        "keys_stride": keys.stride(0), "levels_stride": levels.stride(0), "sequences": noise.seeds.shape[0],
        "NT": triton.next_power_of_2(keys.shape[1]), "TILE": TILE,
        **({"PDL": True, "launch_pdl": True} if use_pdl(keys) else {"PDL": False}),
    }  # fmt: skip
    drawing = {"V": vocabulary, "out_stride": tokens_out.stride(0), "STREAM": noise.stream}
    spans, masses = work.masses.shape[1], work.masses

    def quick(first: bool, listed: int) -> None:
        _quick_kernel[(rows,)](
            keys, levels, chosen, found, masses, work.undecided, tokens_out, spans=spans,
            chosen_stride=chosen.stride(0), found_stride=found.stride(0), masses_stride=masses.stride(0),
            FIRST=first, MORE=not cuts.few, LISTED=listed, ROOM=room(listed), NS=triton.next_power_of_2(spans),
            GROUP=32, num_warps=8,
            **drawing, **common,
        )  # fmt: skip

    if not cuts.few:
        _mass_kernel[(rows, spans)](
            keys, levels, masses, masses_stride=masses.stride(0), SPAN=SPAN, num_warps=8, **common
        )  # fmt: skip
    quick(True, FIRST_LISTED)
    if cuts.few:
        return
    quick(False, MOST)
    _thorough_kernel[(rows,)](keys, levels, work.undecided, tokens_out, SPAN=SPAN, num_warps=16, **drawing, **common)


def _check(vocabulary: int, tokens_out: torch.Tensor, work: Workspace, noise: Noise, cuts: Cuts) -> None:
    keys, found = work.scores.keys, work.scores.found
    rows, device = tokens_out.shape[0], keys.device
    check_drawing(rows, vocabulary, noise, cuts, None, device)
    check_tensor(tokens_out, "tokens_out", (rows,), (torch.int32, torch.int64), device)
    if rows > keys.shape[0] or tiles(vocabulary) != keys.shape[1]:
        raise ValueError(
            f"the workspace is for up to {keys.shape[0]} rows and {keys.shape[1]} tiles of the vocabulary, "
            f"not for {rows} rows over {vocabulary} tokens: use Workspace.empty"
        )
    listed = FIRST_LISTED if cuts.few else MOST
    if found is None or found.shape[2] < room(listed):
        raise ValueError(f"the workspace is too small for the {listed} best tokens of a row: use Workspace.empty")
