"""Top-k tokens of each row of scores, best first; ties go to the lower token id.

Input is `Scores`, written by `lm_head_topk` or `score_logits`. Each column of a row (a token, or an entry of a trimmed
head) has an *int score*: its float32 score as an int32 of the same order (`noise.to_int_scores`). Columns are grouped
in tiles of TILE, and for each tile the best column is stored as a *key*: an int64 with the int score in the high and
the inverted token id in the low 32 bits (`noise.pack_keys`), so that the larger key is the better token.

`topk_tokens` writes tokens_out [R, W] in one of two ways, neither of which sorts a row:

- scan (W up to MAX_SCAN_WIDTH): the W best columns lie in the W tiles with the best keys. One program per row and rank
  finds those tiles one after the other, then the column of its rank in them. Kernels that need just one token of a row
  call `nth_best` themselves and save a launch.
- gather and rank (W up to MAX_WIDTH): a threshold that at least W columns reach, but few others, is found by bisection
  over the tiles' best. The columns that reach it are the candidates; a candidate's rank is the number of better ones.

Everything is integer comparison and counting, and one program reads one row: the result does not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.noise import check_tensor, from_int_scores, pack_keys, unpack_finite_tokens, unpack_tokens
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton

TILE = 64  # columns of a tile: a power of two, as it is the shape of a Triton block
MAX_WIDTH = 256  # tokens per row that can be asked for: candidates are ranked in blocks of up to 512 keys
MAX_SCAN_WIDTH = 8  # tokens per row up to which scanning is faster than gathering and ranking
GROUP = 32  # tiles that a gathering program reads at once: 2048 columns for 256 threads
NO_SCORE = -(2**31)  # int score of a column that does not exist; in kernels -0x80000000, the key is -0x8000000000000000


def num_tiles(columns: int) -> int:
    return -(-columns // TILE)


def candidate_capacity(width: int) -> int:
    """Candidates per row that are kept to find the `width` best: a power of two, at least twice the width."""
    return max(128, 1 << (2 * width - 1).bit_length())


@dataclass(frozen=True)
class Scores:
    """The scores of up to R rows, and scratch memory to find their best columns."""

    tile_keys: torch.Tensor  # [R, tiles] int64: the key of each tile's best column
    int_scores: torch.Tensor | None  # [R, tiles * TILE] int32; None where only the best column is asked for
    candidates: torch.Tensor | None  # [R, 2, candidate_capacity] int64: scratch
    tile_list: torch.Tensor | None  # [R, tiles] int32: scratch

    @classmethod
    def empty(cls, rows: int, columns: int, width: int, device: torch.device | str) -> Scores:
        """Buffers to find up to `width` columns of each row."""
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"from 1 to {MAX_WIDTH} best columns can be found, not {width}")
        count = num_tiles(columns)
        keys = torch.empty(rows, count, dtype=torch.int64, device=device)
        if width == 1:
            return cls(keys, None, None, None)
        return cls(
            keys,
            torch.empty(rows, count * TILE, dtype=torch.int32, device=device),
            torch.empty(rows, 2, candidate_capacity(width), dtype=torch.int64, device=device),
            torch.empty(rows, count, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Ranking:
    """The `width` best tokens of each row, not extracted yet: a kernel finds the one it needs with `nth_best`."""

    scores: Scores
    width: int  # up to MAX_SCAN_WIDTH
    token_ids: torch.Tensor | None = None  # [N] the columns' tokens, all different; None: column i is token i

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Tile keys, int scores and token ids: the first arguments of `nth_best`."""
        return self.scores.tile_keys, self.scores.int_scores, self.token_ids

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of tiles, and the row strides of tile keys and int scores."""
        keys, int_scores = self.scores.tile_keys, self.scores.int_scores
        return keys.shape[1], keys.stride(0), 0 if int_scores is None else int_scores.stride(0)

    @property
    def constants(self) -> dict[str, int]:
        """The constexpr arguments of `nth_best`."""
        width, padded = (triton.next_power_of_2(size) for size in (self.width, self.scores.tile_keys.shape[1]))
        return {"WIDTH": width, "NT": padded, "TILE": TILE}


def topk_tokens_reference(int_scores: torch.Tensor, tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Int scores [R, N] of `tokens` [N] to the best tokens [R, width], -1 where a row has fewer."""
    keys = (int_scores.long() << 32) | (0x7FFFFFFF - tokens.long())
    best = keys.sort(-1, descending=True).values[:, :width]
    found = torch.full((int_scores.shape[0], width), -1)
    found[:, : best.shape[1]] = torch.where(best >> 32 > NO_SCORE, 0x7FFFFFFF - (best & 0xFFFFFFFF), -1)
    return found


# Scan: one rank of one row per program.


@jit
def next_best(keys, last):
    """The largest key below `last`; the key of no token if there is none."""
    return tl.max(tl.where(keys < last, keys, -0x8000000000000000), 0)


@jit
def nth_best(
    tile_keys, int_scores, token_ids, tile_count, rank, WIDTH: tl.constexpr, NT: tl.constexpr, TILE: tl.constexpr
):
    """The token of this rank, from 0 to WIDTH - 1, of one row; -1 if the row has fewer tokens."""
    return unpack_tokens(_nth_key(tile_keys, int_scores, token_ids, tile_count, rank, WIDTH, NT, TILE))


@jit
def _nth_key(
    tile_keys, int_scores, token_ids, tile_count, rank, WIDTH: tl.constexpr, NT: tl.constexpr, TILE: tl.constexpr
):
    """The key of this rank of one row.

    The rank + 1 best columns lie in the rank + 1 tiles with the best keys, as no two columns have the same key. NT is
    the number of tiles, padded to a power of two.
    """
    index = tl.arange(0, NT)
    bests = tl.load(tile_keys + index, mask=index < tile_count, other=-0x8000000000000000)  # [NT]
    if WIDTH == 1:
        return tl.max(bests, 0)
    else:
        place = tl.arange(0, WIDTH * TILE)
        tile = tl.full((WIDTH * TILE,), -1, tl.int32)
        last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for found in range(rank + 1):
            last = next_best(bests, last)
            this = tl.max(tl.where((bests == last) & (last > -0x8000000000000000), index, -1), 0)
            tile = tl.where(place // TILE == found, this, tile)
        column = tile * TILE + place % TILE  # [WIDTH * TILE]: all columns of the rank + 1 best tiles
        score = tl.load(int_scores + column, mask=tile >= 0, other=-0x80000000)
        token = column
        if token_ids is not None:
            token = tl.load(token_ids + column, mask=score > -0x80000000, other=0).to(tl.int32)
        keys = pack_keys(score, token)
        last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for _ in range(rank + 1):
            last = next_best(keys, last)
        return last


@jit
def _log_probs(keys, tile_bests):
    """The scores of keys less the logarithm of the sum of exp over the tiles' best columns [NT], int scores: about
    the log probabilities of the columns, as few tiles hold two likely ones. NaN where that is not finite."""
    values = tl.where(tile_bests > -0x80000000, from_int_scores(tile_bests), float("-inf"))
    best = tl.max(values, 0)
    score = tl.where(keys > -0x8000000000000000, from_int_scores((keys >> 32).to(tl.int32)), float("-inf"))
    return score - (best + tl.log(tl.sum(tl.exp(values - best), 0)))


@jit
def _scan_kernel(
    tile_keys, int_scores, token_ids, tokens_out, log_probs_out, tile_count, keys_stride, scores_stride, out_stride,
    FINITE: tl.constexpr, WIDTH: tl.constexpr, NT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, rank) writes one token. FINITE: the best one, or -1 if its score is infinite or NaN."""
    release(PDL)
    wait(PDL)
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, NT)
    bests = tl.load(tile_keys + row * keys_stride + index, mask=index < tile_count, other=-0x8000000000000000)
    if FINITE:
        token = unpack_finite_tokens(tl.max(bests, 0))
    else:
        of_row = int_scores if WIDTH == 1 else int_scores + row * scores_stride
        key = _nth_key(tile_keys + row * keys_stride, of_row, token_ids, tile_count, rank, WIDTH, NT, TILE)
        token = unpack_tokens(key)
        if log_probs_out is not None:
            tl.store(log_probs_out + row * out_stride + rank, _log_probs(key, (bests >> 32).to(tl.int32)))
    tl.store(tokens_out + row * out_stride + rank, token)


# Gather and rank: one row per program. `sample` uses these parts too.


@jit
def threshold_of_kth(scores, k):
    """An int score that at least k of these [N] reach, and not many more than k; the lowest one if there are fewer.

    Bisection in 16 parts at a time: it ends when at most k + k / 4 scores reach the threshold, or when the threshold
    is exactly the k-th score.
    """
    STEPS: tl.constexpr = 16
    exists = scores > -0x80000000
    reached = tl.sum(exists.to(tl.int32), 0)
    low = tl.min(tl.where(exists, scores, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(scores, 0).to(tl.int64) + 1
    if reached < k:
        low = tl.full((), -0x7FFFFFFF, tl.int64)
        reached = k
    while (reached > k + k // 4) & (high - low > 1):
        width = (high - low + STEPS - 1) // STEPS
        steps = low + tl.arange(0, STEPS) * width
        limits = tl.minimum(steps, 0x7FFFFFFF).to(tl.int32)
        counts = tl.sum((scores[None, :] >= limits[:, None]).to(tl.int32), 1)
        enough = (counts >= k) & (steps < high)
        reached = tl.min(tl.where(enough, counts, 0x7FFFFFFF), 0)
        low += (tl.sum(enough.to(tl.int64), 0) - 1) * width
        high = tl.minimum(high, low + width)
    return low.to(tl.int32)


@jit
def _append_candidates(
    int_scores, token_ids, tile_list, tile_count, threshold, candidates, count,
    WHICH: tl.constexpr,  # 0: columns at or above the threshold, 1: above it, 2: at it
    CAPACITY: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Appends the keys of columns of the listed tiles to `candidates`, which holds `count` keys, as far as they fit.
    Returns `count` plus the number of all such columns."""
    index = tl.arange(0, GROUP * TILE)
    for first in range(0, tile_count, GROUP):
        slot = first + index // TILE
        column = tl.load(tile_list + slot, mask=slot < tile_count, other=0) * TILE + index % TILE
        score = tl.load(int_scores + column, mask=slot < tile_count, other=-0x80000000)
        if WHICH == 0:
            take = score >= threshold
        elif WHICH == 1:
            take = score > threshold
        else:
            take = score == threshold
        token = column
        if token_ids is not None:
            token = tl.load(token_ids + column, mask=take, other=0).to(tl.int32)
        place = count + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(candidates + place, pack_keys(score, token), mask=take & (place < CAPACITY))
        count += tl.sum(take.to(tl.int32), 0)
    return count


@jit
def _count_reaching(int_scores, tile_list, tile_count, threshold, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The number of columns of the listed tiles at or above the threshold."""
    index = tl.arange(0, GROUP * TILE)
    count = tl.full((), 0, tl.int32)
    for first in range(0, tile_count, GROUP):
        slot = first + index // TILE
        column = tl.load(tile_list + slot, mask=slot < tile_count, other=0) * TILE + index % TILE
        score = tl.load(int_scores + column, mask=slot < tile_count, other=-0x80000000)
        count += tl.sum((score >= threshold).to(tl.int32), 0)
    return count


@jit
def gather_candidates(
    tile_bests, int_scores, token_ids, tile_list, candidates, k,
    LEAST: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes the keys of at most CAPACITY columns of a row to `candidates`, the k best among them; returns how many.

    tile_bests [NT]: the int score of each tile's best column. Columns below the int score LEAST are not among the
    candidates. If more than CAPACITY columns reach the threshold, it is raised by bisection; among columns equal to the
    final threshold the first ones are kept.
    """
    none = tl.full((), 0, tl.int32)
    low = tl.maximum(threshold_of_kth(tile_bests, k), LEAST)
    reach = tile_bests >= low
    tile_count = tl.sum(reach.to(tl.int32), 0)
    tl.store(tile_list + tl.cumsum(reach.to(tl.int32), 0) - 1, tl.arange(0, tile_bests.shape[0]), mask=reach)
    tl.debug_barrier()  # threads read from memory what other threads wrote
    count = _append_candidates(
        int_scores, token_ids, tile_list, tile_count, low, candidates, none, 0, CAPACITY, TILE, GROUP
    )  # fmt: skip
    if count > CAPACITY:
        high = tl.max(tile_bests, 0).to(tl.int64) + 1
        while (count > CAPACITY) & (high - low > 1):
            middle = (low + (high - low) // 2).to(tl.int32)
            reached = _count_reaching(int_scores, tile_list, tile_count, middle, TILE, GROUP)
            if reached >= k:
                low = middle
                count = reached
            else:
                high = middle.to(tl.int64)
        # Either all columns that reach `low` fit, or fewer than k are above it and its equals fill the rest.
        tl.debug_barrier()
        count = _append_candidates(
            int_scores, token_ids, tile_list, tile_count, low, candidates, none, 1, CAPACITY, TILE, GROUP
        )  # fmt: skip
        count = _append_candidates(
            int_scores, token_ids, tile_list, tile_count, low, candidates, count, 2, CAPACITY, TILE, GROUP
        )  # fmt: skip
    tl.debug_barrier()
    return tl.minimum(count, CAPACITY)


@jit
def rank_candidates(candidates, count, CAPACITY: tl.constexpr):
    """The first `count` candidate keys [CAPACITY] and the rank of each among them; the first of equal keys is first."""
    CHUNK: tl.constexpr = 4096 // CAPACITY
    index = tl.arange(0, CAPACITY)
    keys = tl.load(candidates + index, mask=index < count, other=-0x8000000000000000)
    rank = tl.zeros((CAPACITY,), tl.int32)
    for first in range(0, count, CHUNK):
        other = first + tl.arange(0, CHUNK)
        others = tl.load(candidates + other, mask=other < count, other=-0x8000000000000000)
        better = others[None, :] > keys[:, None]  # [CAPACITY, CHUNK]
        better |= (others[None, :] == keys[:, None]) & (other[None, :] < index[:, None])
        rank += tl.sum(better.to(tl.int32), 1)
    return keys, rank


@jit(do_not_specialize=["width", "out_stride"])
def _gather_kernel(
    tile_keys, int_scores, token_ids, tile_list, candidates, tokens_out, log_probs_out, tile_count,
    keys_stride, scores_stride, tile_list_stride, candidates_stride, out_stride, width,
    CAPACITY: tl.constexpr, NT: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row) writes the row's `width` best tokens, and -1 behind the last one."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NT)
    keys = tl.load(tile_keys + row * keys_stride + index, mask=index < tile_count, other=-0x8000000000000000)
    tile_bests = (keys >> 32).to(tl.int32)
    candidates += row * candidates_stride
    tile_list += row * tile_list_stride
    count = gather_candidates(
        tile_bests, int_scores + row * scores_stride, token_ids, tile_list, candidates, width,
        -0x7FFFFFFF, CAPACITY, TILE, GROUP,
    )  # fmt: skip
    found, rank = rank_candidates(candidates, count, CAPACITY)
    place = tl.arange(0, CAPACITY)
    out = tokens_out + row * out_stride
    tl.store(out + rank, unpack_tokens(found), mask=(place < count) & (rank < width))
    tl.store(out + place, tl.full((CAPACITY,), -1, tl.int32), mask=(place >= count) & (place < width))
    if log_probs_out is not None:
        out = log_probs_out + row * out_stride
        log_probs = _log_probs(found, tile_bests)
        tl.store(out + rank, log_probs, mask=(place < count) & (rank < width))
        tl.store(out + place, float("-inf"), mask=(place >= count) & (place < width))


def topk_tokens(
    scores: Scores,
    tokens_out: torch.Tensor,
    *,
    token_ids: torch.Tensor | None = None,
    finite: bool = False,
    log_probs_out: torch.Tensor | None = None,
) -> None:
    """Writes the best tokens of each row, best first: tokens_out [R, W] int32 or int64, -1 where a row has fewer.

    token_ids [N] int32 or int64, all different: the columns' tokens; None: column i is token i.
    finite: for the model's choice, with W = 1: also -1 where the best score is infinite or NaN.
    log_probs_out [R, W] float32, with the strides of tokens_out: also writes the tokens' log probabilities, see
    `_log_probs`.
    """
    _check(scores, tokens_out, token_ids)
    if log_probs_out is not None and log_probs_out.stride() != tokens_out.stride():
        raise ValueError("log_probs_out must have the strides of tokens_out")
    if finite and tokens_out.shape[1] != 1:
        raise ValueError(f"finite asks for the one best column of a row, not for {tokens_out.shape[1]}")
    keys, (rows, width) = scores.tile_keys, tokens_out.shape
    pdl = pdl_options(keys)
    count = keys.shape[1]
    padded = triton.next_power_of_2(count)
    if width <= MAX_SCAN_WIDTH:
        ranking = Ranking(scores, width, token_ids)
        _scan_kernel[(rows, width)](
            *ranking.tensors, tokens_out, log_probs_out, *ranking.sizes, tokens_out.stride(0),
            FINITE=finite, num_warps=4 if padded <= 1024 else 8, **ranking.constants, **pdl,
        )  # fmt: skip
        return
    int_scores, tile_list, candidates = scores.int_scores, scores.tile_list, scores.candidates
    assert int_scores is not None and tile_list is not None and candidates is not None
    _gather_kernel[(rows,)](
        keys, int_scores, token_ids, tile_list, candidates, tokens_out, log_probs_out, count,
        keys.stride(0), int_scores.stride(0), tile_list.stride(0), candidates.stride(0), tokens_out.stride(0), width,
        CAPACITY=candidate_capacity(width), NT=padded, TILE=TILE, GROUP=GROUP, num_warps=8, **pdl,
    )  # fmt: skip


def _check(scores: Scores, tokens_out: torch.Tensor, token_ids: torch.Tensor | None) -> None:
    keys = scores.tile_keys
    if tokens_out.dim() != 2 or not 1 <= tokens_out.shape[1] <= MAX_WIDTH or tokens_out.shape[0] > keys.shape[0]:
        raise ValueError(
            f"tokens_out must be [up to {keys.shape[0]} rows, 1 to {MAX_WIDTH} tokens], not {list(tokens_out.shape)}"
        )
    dtypes = (torch.int32, torch.int64)
    check_tensor(tokens_out, "tokens_out", tuple(tokens_out.shape), dtypes, keys.device)
    if tokens_out.shape[1] == 1:
        return
    if scores.candidates is None or scores.candidates.shape[2] < candidate_capacity(tokens_out.shape[1]):
        raise ValueError(f"these scores were not made for {tokens_out.shape[1]} columns a row: use Scores.empty")
    if token_ids is not None and (token_ids.dim() != 1 or num_tiles(token_ids.shape[0]) != keys.shape[1]):
        raise ValueError(
            f"token_ids must be one token for each column of {keys.shape[1]} tiles, not {list(token_ids.shape)}"
        )
    if token_ids is not None:
        check_tensor(token_ids, "token_ids", (token_ids.shape[0],), dtypes, keys.device)
