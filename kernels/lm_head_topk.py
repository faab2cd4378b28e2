"""The LM head with the choice inside: logits stay float32 from the accumulator on and are not written out.

Every program multiplies all rows with one tile of the vocabulary and leaves the tile's best column and, where more than
one is asked for, the scores of all (`best.Scores`); `best.top_merge` or `choose.choose_scored` finish the choice.
The rows come normed or, with a norm, as a scaled stream (see `norm`).

The sum over K runs in one fixed order in one program, and what follows is done to each element on its own or is a
maximum of integers, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from selfspec.kernels.gemm_common import norm_constants, norm_squares, product_reference, row_squares, squares_factor
from selfspec.kernels.noise import (
    Noise,
    check_scalar,
    check_tensor,
    gumbel_of,
    gumbel_run,
    pack,
    read_scalar,
    to_levels,
)
from selfspec.kernels.norm import Norm, check_squares
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.philox import gumbel, uniform
from selfspec.kernels.topk import TILE, Scores, tiles
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def head_reference(
    x: torch.Tensor, weight: torch.Tensor, softcap: float | None = None, norm: Norm | None = None
) -> torch.Tensor:
    """Logits [R, V] of rows [R, K], in float64 if x is."""
    logits = product_reference(x, weight, None, norm)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def perturbed_reference(logits: torch.Tensor, tokens: torch.Tensor, noise: Noise) -> torch.Tensor:
    """Logits [R, N] of `tokens` [N], over temperature and with noise."""
    each = logits.shape[0] // noise.seeds.shape[0]
    seeds, copies = (part.long().repeat(each) for part in (noise.seeds, noise.copies))
    numbers = uniform(seeds, copies, noise.positions.long(), tokens.long().expand(logits.shape), noise.stream)
    return logits / noise.temperature + gumbel(numbers)


@jit
def _tanh(x):
    """From exp of a negative number, which cannot overflow; accurate to float32's epsilon, not to the last bit."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = tl.math.div_rn(1.0 - small, 1.0 + small)
    return tl.where(x < 0, -size, size)


@jit
def _head_kernel(
    x,  # [R, K]
    weight,  # [V, K]
    rows,  # [V] tokens of a trimmed head, or None
    count,  # how many of the V columns are there, or None
    keys,  # [R, tiles], or None
    levels,  # [R, tiles * TILE], or None
    logits,  # [R, V], or None
    squares,  # [R, T], or None
    seeds,
    copies,
    positions,
    temperature,
    softcap,
    R,
    V,
    x_stride,
    weight_stride,
    keys_stride,
    levels_stride,
    logits_stride,
    squares_stride,
    sequences,
    K: tl.constexpr,
    T: tl.constexpr,
    CHUNKS: tl.constexpr,
    EPS: tl.constexpr,
    SHRINK: tl.constexpr,
    GATHER: tl.constexpr,
    TEMPERED: tl.constexpr,
    NOISY: tl.constexpr,
    STREAM: tl.constexpr,
    TEMPERATURE_IS_POINTER: tl.constexpr,
    BM: tl.constexpr,
    TILE: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Neighbouring programs share a tile of the weight.
    row_tiles = tl.cdiv(R, BM)
    tile = tl.program_id(0) // row_tiles
    row = (tl.program_id(0) % row_tiles) * BM + tl.arange(0, BM)
    column = tile * TILE + tl.arange(0, TILE)
    limit = V
    if count is not None:
        limit = tl.minimum(tl.load(count), V).to(tl.int32)
    there = column < limit
    # Columns outside repeat one inside, and what comes of them is dropped at the end. Rows outside are not read: every
    # program would ask for the same few lines again.
    source = tl.where(column < V, column, 0).to(tl.int64)
    if GATHER:
        source = tl.load(rows + column, mask=there, other=0).to(tl.int64)
    safe_row = tl.where(row < R, row, 0).to(tl.int64)
    wait(PDL)
    if squares is not None:
        entries = row_squares(squares, safe_row * squares_stride, T, CHUNKS)

    inner = tl.arange(0, BK)
    x_at = x + safe_row[:, None] * x_stride + inner[None, :]
    weight_at = weight + source[None, :] * weight_stride + inner[:, None]
    values = tl.zeros((BM, TILE), tl.float32)
    stop = K
    if count is not None:
        stop = tl.where(tile * TILE < limit, K, 0)  # there is nothing behind the last column
    for first in range(0, stop, BK):
        if K % BK == 0:
            x_part = tl.load(x_at + first, mask=(row < R)[:, None], other=0.0)
            weight_part = tl.load(weight_at + first)
        else:
            inside = first + inner < K
            x_part = tl.load(x_at + first, mask=inside[None, :] & (row < R)[:, None], other=0.0)
            weight_part = tl.load(weight_at + first, mask=inside[:, None], other=0.0)
        values = tl.dot(x_part, weight_part, values, input_precision="ieee")
    release(PDL)

    if squares is not None:
        values *= squares_factor(entries, K, EPS, SHRINK, BM)[:, None]
    if softcap is not None:
        values = _tanh(tl.math.div_rn(values, tl.full((BM, TILE), 1.0, tl.float32) * softcap)) * softcap
    if logits is not None:
        at = logits + safe_row[:, None] * logits_stride + column[None, :]
        tl.store(at, values, mask=(row < R)[:, None] & there[None, :])
    if keys is not None:
        token = column
        if rows is not None:
            token = tl.load(rows + column, mask=there, other=0).to(tl.int32)
        if TEMPERED:
            heat = read_scalar(temperature, TEMPERATURE_IS_POINTER)
            values = tl.math.div_rn(values, tl.full((BM, TILE), 1.0, tl.float32) * heat)
        if NOISY:
            sequence = tl.where(row < R, row, 0) % sequences
            seed = tl.load(seeds + sequence)[:, None]
            copy = tl.load(copies + sequence)[:, None]
            position = tl.load(positions + safe_row)[:, None]
            if rows is None:
                values += gumbel_run(seed, copy, position, tile * TILE, TILE, STREAM)
            else:
                values += gumbel_of(seed, copy, position, token[None, :], STREAM)
        level = tl.where(there[None, :], to_levels(values), -0x80000000)
        if levels is not None:
            at = levels + safe_row[:, None] * levels_stride + column[None, :]
            tl.store(at, level, mask=(row < R)[:, None])
        best = tl.max(level, 1)
        of_best = tl.min(tl.where(level == best[:, None], token[None, :], 0x7FFFFFFF), 1)
        tl.store(keys + safe_row * keys_stride + tile, pack(best, of_best), mask=row < R)


def head_top(
    x: torch.Tensor,  # [R, K], normed, or with a norm the scaled stream
    weight: torch.Tensor,  # [V, K]
    scores: Scores,
    *,
    rows: torch.Tensor | None = None,
    gather: bool = False,
    count: torch.Tensor | None = None,
    norm: Norm | None = None,
    softcap: float | None = None,
    noise: Noise | None = None,
    noisy: bool = True,
) -> None:
    """Scores the vocabulary for every row: logits, or with `noise` logits over temperature plus noise, or without the
    noise itself if not `noisy` (for cuts, which come before it).

    rows [V] int32 or int64: the tokens of a trimmed head. The weight is then the copy of these rows, or the whole head
    if `gather`. count: one int32 on the device, how many columns there are; those behind may hold anything.
    """
    columns = weight.shape[0] if rows is None else rows.shape[0]
    _check_inputs(x, weight, softcap)
    _check_rows(weight, rows, gather, count)
    if norm is not None:
        check_squares(norm.squares, *x.shape)
    wanted = (x.shape[0], tiles(columns))
    check_tensor(scores.keys[: x.shape[0]], "the scores' keys", wanted, (torch.int64,), x.device)
    if noise is not None:
        noise.check(x.shape[0], x.device)
    _launch(x, weight, columns, scores, None, rows, gather, count, norm, softcap, noise, noisy)


def head_logits(
    x: torch.Tensor,  # [R, K], normed
    weight: torch.Tensor,  # [V, K]
    logits_out: torch.Tensor,  # [R, V] float32
    *,
    softcap: float | None = None,
) -> None:
    """The very logits that `head_top` chooses from, written out."""
    _check_inputs(x, weight, softcap)
    check_tensor(logits_out, "logits_out", (x.shape[0], weight.shape[0]), (torch.float32,), x.device)
    _launch(x, weight, weight.shape[0], None, logits_out, None, False, None, None, softcap, None, False)


def _check_inputs(x: torch.Tensor, weight: torch.Tensor, softcap: float | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x and weight must be [R, K] and [V, K], not {list(x.shape)} and {list(weight.shape)}")
    if x.shape[1] % 16:
        raise ValueError(f"a hidden size of {x.shape[1]} is not possible: it must be a multiple of 16")
    check_tensor(x, "x", tuple(x.shape), FLOATS, x.device)
    check_tensor(weight, "weight", tuple(weight.shape), (x.dtype,), x.device)
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap={softcap} is not possible: it must be a number above 0, or None")


def _check_rows(weight: torch.Tensor, rows: torch.Tensor | None, gather: bool, count: torch.Tensor | None) -> None:
    if gather and rows is None:
        raise ValueError("gather needs rows: which rows of the weight to take")
    if rows is not None:
        length = rows.shape[0] if gather else weight.shape[0]
        check_tensor(rows, "rows", (length,), (torch.int32, torch.int64), weight.device)
    if count is not None:
        check_scalar(count, "count", (torch.int32,), weight.device)


def row_tile(rows: int) -> int:
    """Rows of a program's tile. They do not enter the result; fewer rows would be padded for nothing."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    columns: int,
    scores: Scores | None,
    logits: torch.Tensor | None,
    rows: torch.Tensor | None,
    gather: bool,
    count: torch.Tensor | None,
    norm: Norm | None,
    softcap: float | None,
    noise: Noise | None,
    noisy: bool,
    bm: int | None = None,
) -> None:
    r, k = x.shape
    bm = bm or row_tile(r)
    bk = 256 // x.element_size()
    keys, levels = (None, None) if scores is None else (scores.keys, scores.levels)
    drawing: dict[str, Any] = {"seeds": None, "copies": None, "positions": None, "temperature": None, "STREAM": 0}
    if noise is not None:
        drawing = {
            "seeds": noise.seeds, "copies": noise.copies, "positions": noise.positions,
            "temperature": noise.temperature, "STREAM": noise.stream,
        }  # fmt: skip
    squares, squares_stride = norm_squares(norm)
    stage = (bm + TILE) * bk * x.element_size()
    warps, stages = (2, 4) if k <= 2048 and bm == 16 else (4, 5)  # short sums of few rows are bound by latency
    _head_kernel[(tiles(columns) * triton.cdiv(r, bm),)](
        x, weight, rows, count, keys, levels, logits, squares,
        softcap=softcap, R=r, V=columns,
        x_stride=x.stride(0), weight_stride=weight.stride(0),
        keys_stride=0 if keys is None else keys.stride(0),
        levels_stride=0 if levels is None else levels.stride(0),
        logits_stride=0 if logits is None else logits.stride(0), squares_stride=squares_stride,
        sequences=1 if noise is None else noise.seeds.shape[0],
        K=k, **norm_constants(k, x.dtype, norm), GATHER=gather,
        TEMPERED=noise is not None, NOISY=noise is not None and noisy,
        TEMPERATURE_IS_POINTER=noise is not None and isinstance(noise.temperature, torch.Tensor),
        BM=bm, TILE=TILE, BK=bk, num_warps=warps, num_stages=min(stages, 96 * 1024 // stage), **drawing,
        **({"PDL": True, "launch_pdl": True} if use_pdl(x) else {"PDL": False}),
    )  # fmt: skip
