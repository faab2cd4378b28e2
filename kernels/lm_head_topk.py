"""The LM head with the choice inside: logits stay float32 from the accumulator on and are not written out.

Every program multiplies all rows with one tile of the vocabulary, processes the logits, adds noise, and leaves the
tile's best column and, where more than one is asked for, the scores of all (`topk.Scores`); `topk.top_merge` or
`sample.choose_scored` finish the choice. The rows come normed or, with a norm, as a scaled stream (see `norm`).

The sum over K runs in one fixed order in one program, and what follows is done to each element on its own, with the
parameters of its row's sequence, or is a maximum of integers. So a row's result does not depend on the other rows.
"""

from __future__ import annotations

import math

import torch

from selfspec.kernels.gemm_common import norm_constants, norm_squares, product_reference, row_squares, squares_factor
from selfspec.kernels.logits_processing import (
    Processing,
    check_drawing,
    drawing_arguments,
    load_processing,
    process,
)
from selfspec.kernels.noise import (
    Cuts,
    Noise,
    check_scalar,
    check_tensor,
    load_drawing,
    pack,
    perturb,
    product,
    to_levels,
)
from selfspec.kernels.norm import Norm, check_squares
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.topk import TILE, Scores, tiles
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def head_reference(
    x: torch.Tensor, weight: torch.Tensor, softcap: float | None = None, norm: Norm | None = None
) -> torch.Tensor:
    """Logits [R, V] of rows [R, K], in float64 if x is."""
    logits = product_reference(x, weight, None, norm)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@jit
def _tanh(x):
    """From exp of a negative number, which cannot overflow; accurate to float32's epsilon, not to the last bit."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = tl.math.div_rn(1.0 - small, 1.0 + small)
    return tl.where(x < 0, -size, size)


# What a plan fixes changes no code; a kernel compiled for each of its kinds would only cost time.
@jit(do_not_specialize=["first_node", "path_stride"])
def _head_kernel(
    x,  # [R, K]
    weight,  # [V, K]
    rows,  # [V] tokens of a trimmed head, or None
    count,  # how many of the V columns are there, or None
    keys,  # [R, tiles], or None
    levels,  # [R, tiles * TILE], or None
    logits,  # [R, V], or None
    squares,  # [R, T], or None
    noise,  # Noise.tensors, or None
    cuts,  # Cuts.tensors, or None
    processing,  # Processing.tensors, or None
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
    first_node,
    path_stride,
    K: tl.constexpr,
    T: tl.constexpr,
    CHUNKS: tl.constexpr,
    EPS: tl.constexpr,
    SHRINK: tl.constexpr,
    GATHER: tl.constexpr,
    STREAM: tl.constexpr,
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
    # Asked for early: what the loads give is needed only after the sum.
    sequence = tl.where(row < R, row, 0) % sequences
    if noise is not None:
        drawing = load_drawing(noise, cuts, sequence)
    if processing is not None:
        loaded = load_processing(processing, safe_row, sequence)

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
        values = product(values, tl.broadcast_to(squares_factor(entries, K, EPS, SHRINK, BM)[:, None], (BM, TILE)))
    if softcap is not None:
        cap = tl.full((BM, TILE), 1.0, tl.float32) * softcap
        values = product(_tanh(tl.math.div_rn(values, cap)), cap)
    if logits is not None:
        at = logits + safe_row[:, None] * logits_stride + column[None, :]
        tl.store(at, values, mask=(row < R)[:, None] & there[None, :])
    if keys is not None:
        token = column
        if rows is not None:
            token = tl.load(rows + column, mask=there, other=0).to(tl.int32)
        if processing is not None:
            values = process(
                values, loaded, processing, tl.where(row < R, row, 0), sequence, sequences, first_node, path_stride,
                token, there,
            )  # fmt: skip
        if noise is not None:
            values = perturb(
                values, drawing, noise, cuts, safe_row, sequence, token, tile * TILE, rows is None, STREAM
            )  # fmt: skip
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
    cuts: Cuts | None = None,
    processing: Processing | None = None,
) -> None:
    """Scores the vocabulary for every row: logits, processed as `processing` says, over temperature and plus noise as
    `noise` says. With `cuts`, rows of a sequence that has one get no noise: `choose_scored` adds it to what they leave.

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
    vocabulary = weight.shape[0] if rows is None or gather else None
    check_drawing(x.shape[0], vocabulary, noise, cuts, processing, x.device)
    _launch(
        x, weight, columns, scores, rows=rows, gather=gather, count=count, norm=norm, softcap=softcap, noise=noise,
        cuts=cuts, processing=processing,
    )  # fmt: skip


def head_logits(
    x: torch.Tensor,  # [R, K], normed
    weight: torch.Tensor,  # [V, K]
    logits_out: torch.Tensor,  # [R, V] float32
    *,
    softcap: float | None = None,
) -> None:
    """The very logits that `head_top` processes and chooses from, written out."""
    _check_inputs(x, weight, softcap)
    check_tensor(logits_out, "logits_out", (x.shape[0], weight.shape[0]), (torch.float32,), x.device)
    _launch(x, weight, weight.shape[0], None, logits=logits_out, softcap=softcap)


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
    *,
    logits: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    gather: bool = False,
    count: torch.Tensor | None = None,
    norm: Norm | None = None,
    softcap: float | None = None,
    noise: Noise | None = None,
    cuts: Cuts | None = None,
    processing: Processing | None = None,
    bm: int | None = None,
) -> None:
    r, k = x.shape
    bm = bm or row_tile(r)
    bk = 256 // x.element_size()
    keys, levels = (None, None) if scores is None else (scores.keys, scores.levels)
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
        **drawing_arguments(noise, cuts, processing),
        K=k, **norm_constants(k, x.dtype, norm), GATHER=gather,
        BM=bm, TILE=TILE, BK=bk, num_warps=warps, num_stages=min(stages, 96 * 1024 // stage),
        **({"PDL": True, "launch_pdl": True} if use_pdl(x) else {"PDL": False}),
    )  # fmt: skip
