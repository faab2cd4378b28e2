"""Chooses a token for each of R rows among those that top-k, top-p and min-p keep: the model's choice.

Input is `topk.Scores` over the whole vocabulary, written by `lm_head_topk` or `score_logits`. The scores of a sequence
that is not truncated include the noise (of a greedy one, none): its choice is the best score. The scores of a truncated
sequence have no noise: the kernels find the kept tokens, add noise to them, and choose the best. Up to four launches do
this:

1. `_mass_kernel`: sums the softmax denominator, in parts of SPAN columns, of rows with a top-p and no top-k.
2. `_sort_kernel` with FIRST: sorts the 64 best tokens of each row. Decides rows of sequences that are not truncated,
   rows with a top-k up to 64, and rows whose top-p or min-p cutoff lies among the 64 tokens.
3. `_sort_kernel` again: sorts the 256 best tokens of rows that are not decided yet.
4. `_search_kernel`: finds the cutoff by bisection over all columns of rows that are not decided yet.

If every truncated sequence has a top-k up to 64 (`Truncation.small_top_k`), launch 2 decides all rows and runs alone.

The choice of a row does not depend on other rows: one program handles one row (launch 1: one part of a row), in an
order that depends on the vocabulary alone, and the row's own scores and parameters decide which launch decides it. A
row whose best score is infinite or NaN gets the choice -1. As in `selfspec.sampling`, of equal scores at the cutoff the
lower token ids are kept, and the best token is always kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from selfspec.kernels.logits_processing import Processing, check_sampling
from selfspec.kernels.noise import (
    Noise,
    Truncation,
    check_tensor,
    from_int_scores,
    gumbel_of,
    is_finite,
    is_truncated,
    load_sampling,
    log,
    pack_keys,
    perturbed_reference,
    to_int_scores,
    unpack_finite_tokens,
    unpack_tokens,
)
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.score_logits import score_logits, score_logits_reference
from selfspec.kernels.topk import (
    GROUP,
    MAX_WIDTH,
    TILE,
    Scores,
    candidate_capacity,
    gather_candidates,
    num_tiles,
    rank_candidates,
    topk_tokens,
)
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton

SPAN = 4096  # columns that a program reads at once: 16 for each of 256 threads
FIRST_SORTED = 64  # tokens of a row that the first sorting launch sorts: enough for the usual top-k and top-p


@dataclass(frozen=True)
class SampleWorkspace:
    """Buffers for R rows over a vocabulary."""

    scores: Scores
    masses: torch.Tensor  # [R, spans] float32: sums of exp(value - the row's largest value) over SPAN columns
    undecided: torch.Tensor = field(repr=False)  # [R] int32: not 0 for rows that a later launch must decide

    @classmethod
    def empty(
        cls, rows: int, vocabulary: int, device: torch.device | str, small_top_k: bool = False
    ) -> SampleWorkspace:
        """Returns uninitialised buffers. small_top_k: as in `Truncation`; needs less memory."""
        return cls(
            Scores.empty(rows, vocabulary, FIRST_SORTED if small_top_k else MAX_WIDTH, device),
            torch.empty(rows, -(-vocabulary // SPAN), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )


def sample_reference(
    logits: torch.Tensor, noise: Noise, truncation: Truncation, processing: Processing | None = None
) -> torch.Tensor:
    """Returns the choice [R] for logits [R, V] by sorting whole rows; computes in float64 if the logits are."""
    values = score_logits_reference(logits, noise, truncation, processing)
    truncated = truncation.on & (noise.temperature > 0)
    kept = values.clone()
    for row in range(len(values)):
        sequence = row % len(truncated)
        if truncated[sequence]:
            top_k, top_p, min_p = (part[sequence] for part in truncation.tensors)
            kept[row] = _keep_reference(values[row], int(top_k), top_p, min_p)
    # Truncated rows are divided by the temperature already: adds noise to them at temperature 1, to others at 0 (none).
    late_noise = replace(noise, temperature=truncated.float())
    drawn = perturbed_reference(kept, torch.arange(values.shape[-1], device=values.device), late_noise)
    return torch.where(drawn.amax(-1).isfinite(), drawn.argmax(-1), -1)


def _keep_reference(values: torch.Tensor, top_k: int, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Returns the values [V] of one row, with -inf where top-k, top-p or min-p removes them."""
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


# Parts of the kernels below. NT and NS are the numbers of tiles and of spans, rounded up to powers of two.


@jit
def _load_bests(tile_keys, tile_count, NT: tl.constexpr):
    """Returns the int scores [NT] of the best columns of a row's tiles, and the row's largest value."""
    index = tl.arange(0, NT)
    bests = (tl.load(tile_keys + index, mask=index < tile_count, other=-0x8000000000000000) >> 32).to(tl.int32)
    return bests, from_int_scores(tl.max(bests, 0))


@jit
def _mass(values, largest):
    """Returns exp(values - largest), the unnormalized probability; 1 for the largest value, even if it is infinite."""
    return tl.where(values == largest, 1.0, tl.exp(values - largest))


@jit
def _least_kept(largest, min_p):
    """Returns the smallest value that min-p keeps; -inf without min-p."""
    return tl.where(min_p > 0, largest + log(min_p), float("-inf"))


@jit
def _best_with_noise(values, tokens, keep, noise, row, sequence, STREAM: tl.constexpr):
    """Returns the key of the best token after noise is added to the kept values."""
    seeds, sample_indices, positions, _ = noise
    seed, index = tl.load(seeds + sequence), tl.load(sample_indices + sequence)
    noisy = values + gumbel_of(seed, index, tl.load(positions + row), tokens, STREAM)
    return tl.max(pack_keys(tl.where(keep, to_int_scores(noisy), -0x80000000), tokens), 0)


# Launch 1: softmax denominators.


@jit(do_not_specialize=["sequences"])
def _mass_kernel(
    tile_keys, int_scores, masses, noise, truncation, tile_count, keys_stride, scores_stride, masses_stride, sequences,
    NT: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, span): sums exp(value - largest) over SPAN columns, if the row has a top-p and no top-k."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, _min_p = load_sampling(noise, truncation, tl.program_id(0) % sequences)
    if (temperature > 0) & (top_k < 1) & (top_p < 1):
        _bests, largest = _load_bests(tile_keys + row * keys_stride, tile_count, NT)
        column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        score = tl.load(int_scores + row * scores_stride + column, mask=column < tile_count * TILE, other=-0x80000000)
        mass = tl.where(score > -0x80000000, _mass(from_int_scores(score), largest), 0.0)
        tl.store(masses + row * masses_stride + tl.program_id(1), tl.sum(mass, 0))


# Launches 2 and 3: choose among a row's best tokens, sorted.


@jit
def _sort_best(
    tile_bests, int_scores, tile_list, candidates, k,
    SORTED: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns the keys [SORTED] of a row's k best columns, best first, and which of the SORTED entries exist. Skips
    columns of -inf: where a mask allows fewer than k tokens, finding the best banned ones would take many passes."""
    LEAST: tl.constexpr = -0x7F800000  # the int score of the least finite number: the one of -inf is lower
    count = gather_candidates(tile_bests, int_scores, None, tile_list, candidates, k, LEAST, CAPACITY, TILE, GROUP)
    found, rank = rank_candidates(candidates, count, CAPACITY)
    tl.store(candidates + CAPACITY + rank, found, mask=tl.arange(0, CAPACITY) < count)
    tl.debug_barrier()
    index = tl.arange(0, SORTED)
    exists = index < tl.minimum(count, k)
    return tl.load(candidates + CAPACITY + index, mask=exists, other=-0x8000000000000000), exists


@jit(do_not_specialize=["sequences"])
def _sort_kernel(
    tile_keys, int_scores, tile_list, candidates, masses, undecided, tokens_out, noise, truncation, V, tile_count,
    spans, keys_stride, scores_stride, tile_list_stride, candidates_stride, masses_stride, out_stride, sequences,
    STREAM: tl.constexpr,
    FIRST: tl.constexpr,  # whether this is the first sorting launch, which takes all rows
    MORE: tl.constexpr,  # whether launches follow, which take the rows marked as undecided
    SORTED: tl.constexpr,  # tokens of a row that are sorted
    CAPACITY: tl.constexpr, NT: tl.constexpr, NS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): decides the row if its sequence is not truncated (with FIRST), if its top-k is at most SORTED, or
    if it has no top-k and its cutoff lies among its SORTED best tokens."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(0) % sequences
    temperature, top_k, top_p, min_p = load_sampling(noise, truncation, sequence)
    truncated = (temperature > 0) & is_truncated(top_k, top_p, min_p)
    sorts = truncated & (top_k <= SORTED)
    index = tl.arange(0, NT)
    best_keys = tl.load(tile_keys + row * keys_stride + index, mask=index < tile_count, other=-0x8000000000000000)
    if FIRST:
        if truncated == 0:
            tl.store(tokens_out + row * out_stride, unpack_finite_tokens(tl.max(best_keys, 0)))
        if MORE:
            tl.store(undecided + row, (truncated & (top_k > SORTED)).to(tl.int32))
    else:
        sorts = sorts & (tl.load(undecided + row) != 0)
    if sorts:
        tile_bests = (best_keys >> 32).to(tl.int32)
        highest = tl.max(tile_bests, 0)
        largest = from_int_scores(highest)
        k = tl.where(top_k < 1, SORTED, top_k)
        ordered, exists = _sort_best(
            tile_bests, int_scores + row * scores_stride, tile_list + row * tile_list_stride,
            candidates + row * candidates_stride, k, SORTED, CAPACITY, TILE, GROUP,
        )  # fmt: skip
        values = from_int_scores((ordered >> 32).to(tl.int32))
        mass = tl.where(exists, _mass(values, largest), 0.0)
        total = tl.sum(mass, 0)
        if MORE:
            span = tl.arange(0, NS)
            of_row = tl.load(masses + row * masses_stride + span, mask=span < spans, other=0.0)
            total = tl.where((top_k < 1) & (top_p < 1), tl.sum(of_row, 0), total)  # `_mass_kernel` summed these rows
        share = tl.math.div_rn(mass, tl.full((SORTED,), 1.0, tl.float32) * total)
        place = tl.arange(0, SORTED)
        limit = tl.where(top_p < 1, top_p, float("inf"))
        keep = exists & ((tl.cumsum(share, 0) - share < limit) | (place == 0))
        keep &= values >= _least_kept(largest, min_p)
        best = _best_with_noise(values, unpack_tokens(ordered), keep, noise, row, sequence, STREAM)
        tl.store(tokens_out + row * out_stride, tl.where(is_finite(highest), unpack_tokens(best), -1))
        if MORE:
            # If the last sorted token is not kept, no token after it is kept.
            last_kept = tl.sum((keep & (place == SORTED - 1)).to(tl.int32), 0)
            tl.store(undecided + row, tl.where((top_k < 1) & (V > SORTED), last_kept, 0))


# Launch 4: search the cutoff over the whole row.


@jit
def _amount_above(int_scores, columns, threshold, largest, BY_MASS: tl.constexpr, SPAN: tl.constexpr):
    """Returns the number, or with BY_MASS the mass, of a row's columns with an int score above a threshold. Numbers
    below 2^24 are exact in float32."""
    total = tl.zeros((SPAN,), tl.float32)
    for first in range(0, columns, SPAN):
        column = first + tl.arange(0, SPAN)
        score = tl.load(int_scores + column, mask=column < columns, other=-0x80000000)
        if BY_MASS:
            total += tl.where(score > threshold, _mass(from_int_scores(score), largest), 0.0)
        else:
            total += tl.where(score > threshold, 1.0, 0.0)
    return tl.sum(total, 0)


@jit
def _lowest_threshold(int_scores, columns, low, high, target, largest, BY_MASS: tl.constexpr, SPAN: tl.constexpr):
    """Returns the lowest threshold in (low, high] for which the number, or with BY_MASS the mass, of the columns above
    is less than `target`, and that number or mass."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    above = tl.full((), 0.0, tl.float32)
    while high - low > 1:
        middle = low + (high - low) // 2
        measured = _amount_above(int_scores, columns, middle.to(tl.int32), largest, BY_MASS, SPAN)
        if measured < target:
            high = middle
            above = measured
        else:
            low = middle
    return high.to(tl.int32), above


@jit
def _find_cutoff(int_scores, columns, highest, largest, V, top_k, top_p, SPAN: tl.constexpr):
    """Returns the lowest int score that top-k and top-p keep, and how many columns with this score they keep."""
    cutoff = tl.full((), -0x7FFFFFFF, tl.int32)
    num_at_cutoff = tl.full((), 0x7FFFFFFF, tl.int32)
    if top_k >= 1:
        k = tl.minimum(top_k, V)
        cutoff, above = _lowest_threshold(
            int_scores, columns, cutoff - 1, highest, k.to(tl.float32), largest, False, SPAN
        )  # fmt: skip
        num_at_cutoff = k - above.to(tl.int32)
    if top_p < 1:
        # A token is kept if (mass of higher scores) / (mass that top-k keeps) < top_p.
        if top_k >= 1:
            at_cutoff = _mass(from_int_scores(cutoff), largest)
            count = num_at_cutoff.to(tl.float32)
            total = tl.math.fma(count, at_cutoff, _amount_above(int_scores, columns, cutoff, largest, True, SPAN))
        else:
            total = _amount_above(int_scores, columns, cutoff - 1, largest, True, SPAN)
        target = top_p * total
        lowest, above = _lowest_threshold(int_scores, columns, cutoff - 1, highest, target, largest, True, SPAN)
        each = _mass(from_int_scores(lowest), largest)
        fitting = tl.ceil(tl.minimum(tl.math.div_rn(target - above, tl.maximum(each, 1e-30)), 1e9)).to(tl.int32)
        num_at_cutoff = tl.minimum(tl.where(lowest == cutoff, num_at_cutoff, 0x7FFFFFFF), tl.maximum(fitting, 1))
        cutoff = lowest
    return cutoff, num_at_cutoff


@jit(do_not_specialize=["sequences"])
def _search_kernel(
    tile_keys, int_scores, undecided, tokens_out, noise, truncation, V, tile_count,
    keys_stride, scores_stride, out_stride, sequences,
    STREAM: tl.constexpr, NT: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): decides an undecided row: finds its cutoff, then chooses among all kept columns."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(undecided + row) == 0:
        return
    sequence = tl.program_id(0) % sequences
    _, top_k, top_p, min_p = load_sampling(noise, truncation, sequence)
    int_scores += row * scores_stride
    columns = tile_count * TILE
    bests, largest = _load_bests(tile_keys + row * keys_stride, tile_count, NT)
    highest = tl.max(bests, 0)
    if is_finite(highest) == 0:
        tl.store(tokens_out + row * out_stride, -1)
        return
    cutoff, num_at_cutoff = _find_cutoff(int_scores, columns, highest, largest, V, top_k, top_p, SPAN)
    least = _least_kept(largest, min_p)
    best = tl.full((), -0x8000000000000000, tl.int64)
    seen = tl.full((), 0, tl.int32)  # columns at the cutoff so far
    for first in range(0, columns, SPAN // 4):  # a quarter of SPAN, because noise takes many registers
        column = first + tl.arange(0, SPAN // 4)
        score = tl.load(int_scores + column, mask=column < columns, other=-0x80000000)
        at_cutoff = (score == cutoff).to(tl.int32)
        values = from_int_scores(score)
        keep = (score > cutoff) | ((score == cutoff) & (seen + tl.cumsum(at_cutoff, 0) <= num_at_cutoff))
        keep = keep & (values >= least)
        seen += tl.sum(at_cutoff, 0)
        best = tl.maximum(best, _best_with_noise(values, column, keep, noise, row, sequence, STREAM))
    tl.store(tokens_out + row * out_stride, unpack_tokens(best))


# Launchers.


def sample(
    logits: torch.Tensor,  # [R, V] float32
    tokens_out: torch.Tensor,  # [R] int32 or int64
    work: SampleWorkspace,
    *,
    noise: Noise | None = None,
    truncation: Truncation | None = None,
    processing: Processing | None = None,
) -> None:
    """Writes the choice for every row of logits: the best token after processing and noise, among those that truncation
    keeps; -1 where the best score is infinite or NaN."""
    score_logits(logits, work.scores, noise=noise, truncation=truncation, processing=processing)
    if truncation is None or noise is None:
        topk_tokens(work.scores, tokens_out[:, None], finite=True)
    else:
        sample_scored(logits.shape[1], tokens_out, work, noise=noise, truncation=truncation)


def sample_scored(
    vocabulary: int, tokens_out: torch.Tensor, work: SampleWorkspace, *, noise: Noise, truncation: Truncation
) -> None:
    """Writes the choice for every row of `work.scores`, which must have been written with the same noise and
    truncation; see `sample`."""
    _check(vocabulary, tokens_out, work, noise, truncation)
    scores, rows, keys = work.scores, tokens_out.shape[0], work.scores.tile_keys
    int_scores, tile_list, candidates = scores.int_scores, scores.tile_list, scores.candidates
    assert int_scores is not None and tile_list is not None and candidates is not None
    common: dict[str, Any] = {
        "noise": noise.tensors, "truncation": truncation.tensors, "tile_count": keys.shape[1],
        "keys_stride": keys.stride(0), "scores_stride": int_scores.stride(0), "sequences": noise.seeds.shape[0],
        "NT": triton.next_power_of_2(keys.shape[1]), "TILE": TILE,
        **pdl_options(keys),
    }  # fmt: skip
    choosing = {"V": vocabulary, "out_stride": tokens_out.stride(0), "STREAM": noise.stream}
    spans, masses = work.masses.shape[1], work.masses

    def sort(first: bool, count: int) -> None:
        _sort_kernel[(rows,)](
            keys, int_scores, tile_list, candidates, masses, work.undecided, tokens_out, spans=spans,
            tile_list_stride=tile_list.stride(0), candidates_stride=candidates.stride(0),
            masses_stride=masses.stride(0), FIRST=first, MORE=not truncation.small_top_k, SORTED=count,
            CAPACITY=candidate_capacity(count), NS=triton.next_power_of_2(spans), GROUP=GROUP, num_warps=8,
            **choosing, **common,
        )  # fmt: skip

    if truncation.small_top_k:
        sort(True, FIRST_SORTED)
        return
    _mass_kernel[(rows, spans)](
        keys, int_scores, masses, masses_stride=masses.stride(0), SPAN=SPAN, num_warps=8, **common
    )  # fmt: skip
    sort(True, FIRST_SORTED)
    sort(False, MAX_WIDTH)
    _search_kernel[(rows,)](
        keys, int_scores, work.undecided, tokens_out, SPAN=SPAN, num_warps=16, **choosing, **common
    )  # fmt: skip


def _check(
    vocabulary: int, tokens_out: torch.Tensor, work: SampleWorkspace, noise: Noise, truncation: Truncation
) -> None:
    keys, candidates = work.scores.tile_keys, work.scores.candidates
    rows, device = tokens_out.shape[0], keys.device
    check_sampling(rows, vocabulary, noise, truncation, None, device)
    check_tensor(tokens_out, "tokens_out", (rows,), (torch.int32, torch.int64), device)
    if rows > keys.shape[0] or num_tiles(vocabulary) != keys.shape[1]:
        raise ValueError(
            f"the workspace is for up to {keys.shape[0]} rows and {keys.shape[1]} tiles of the vocabulary, "
            f"not for {rows} rows over {vocabulary} tokens: use SampleWorkspace.empty"
        )
    count = FIRST_SORTED if truncation.small_top_k else MAX_WIDTH
    if candidates is None or candidates.shape[2] < candidate_capacity(count):
        raise ValueError(f"the workspace is too small for the {count} best tokens of a row: use SampleWorkspace.empty")
