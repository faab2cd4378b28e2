"""The LM head: multiplies logits = x @ weight^T in float32 and scores them in the same kernel, without writing them.

x [R, K] are normed states or, with a norm, states scaled by the norm's weights (see `norm`). weight [V, K] is the LM
head or, for a trimmed head, the rows of its tokens. `lm_head_scores` applies softcap, logits processing, temperature
and noise to each logit and writes `topk.Scores`: the best token of each tile of 64 columns and, where more than one
token is needed, the score of every column. `topk.topk_tokens` or `sample.sample_scored` then makes the choice.
`lm_head_logits` writes the logits to memory instead, with the softcap only.

One program multiplies a tile of rows with a tile of the vocabulary. It sums over all of K, in blocks of BK columns, and
BK depends on the dtype alone; all further operations are elementwise with the parameters of the row's own sequence, or
maxima of integers. So a row's result does not depend on the other rows or their number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from selfspec.kernels.gemm_common import (
    LEAST_SHARED_BYTES,
    load_squares,
    matmul_reference,
    norm_constants,
    norm_squares,
    rms_factor_of_squares,
)
from selfspec.kernels.logits_processing import (
    Masks,
    Processing,
    check_sampling,
    load_processing,
    mask,
    process,
    sampling_arguments,
)
from selfspec.kernels.noise import (
    Noise,
    Truncation,
    check_tensor,
    load_sampling,
    mul_rounded,
    pack_keys,
    perturb,
    to_int_scores,
)
from selfspec.kernels.norm import Norm, check_squares
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.quantized_launch import Weight, choose_weight_tile, quantized_settings, weight_arguments
from selfspec.kernels.quantized_tile import quantized_sums
from selfspec.kernels.quantized_weight import QuantizedWeight
from selfspec.kernels.topk import TILE, Scores, num_tiles
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_K_BYTES = 256  # of a row of x or weight in one pipeline stage: 128 columns in 16 bits


def lm_head_reference(
    x: torch.Tensor, weight: Weight, softcap: float | None = None, norm: Norm | None = None
) -> torch.Tensor:
    """Returns the logits [R, V] of x [R, K]; in float64 if x is, else in float32."""
    logits = matmul_reference(x, weight, None, norm)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@jit
def _tanh(x):
    """Returns tanh(x) from the exp of a negative number, which cannot overflow. Exact up to float32's epsilon."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = tl.math.div_rn(1.0 - small, 1.0 + small)
    return tl.where(x < 0, -size, size)


# These arguments differ between plans and batches but change no code: specializing on them would only compile more.
@jit(do_not_specialize=["R", "sequences", "first_node", "path_stride"])
def _lm_head_kernel(
    x,  # [R, K]
    weight,  # [V, K]: row i gives column i; with GATHER the whole head, of which row token_ids[i] gives column i
    token_ids,  # [V] tokens of a trimmed head, or None
    count,  # [1] how many of the V columns exist, or None: all
    tile_keys,  # [R, tiles], or None
    int_scores,  # [R, tiles * TILE], or None
    logits,  # [R, V], or None
    squares,  # [R, T], or None
    noise,  # Noise.tensors, or None
    truncation,  # Truncation.tensors, or None
    processing,  # Processing.tensors, or None
    masks,  # Masks.tensors, or None
    softcap,  # float, or None
    R, V,  # rows; columns: the tokens of the vocabulary or of a trimmed head
    x_stride, weight_stride, keys_stride, scores_stride, logits_stride, squares_stride,
    sequences, first_node, path_stride,
    K: tl.constexpr,
    T: tl.constexpr, CHUNKS: tl.constexpr, EPS: tl.constexpr, SHRINK: tl.constexpr,  # of the norm, see `gemm_common`
    GATHER: tl.constexpr, STREAM: tl.constexpr,
    BM: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program scores BM rows at TILE columns; consecutive programs read the same tile of the weight."""
    row_tiles = tl.cdiv(R, BM)
    tile = tl.program_id(0) // row_tiles
    row = (tl.program_id(0) % row_tiles) * BM + tl.arange(0, BM)
    column = tile * TILE + tl.arange(0, TILE)
    limit = V
    if count is not None:
        limit = tl.minimum(tl.load(count), V).to(tl.int32)
    exists = column < limit
    # Columns from V on read row 0 of the weight, and their results are dropped. Rows of x from R on are not read: row 0
    # in their place would make every program read the same cache lines again.
    source = tl.where(column < V, column, 0).to(tl.int64)
    if GATHER:
        source = tl.load(token_ids + column, mask=exists, other=0).to(tl.int64)
    safe_row = tl.where(row < R, row, 0).to(tl.int64)
    wait(PDL)
    # Loaded before the matmul and needed after it, so that no operation waits for these loads.
    if squares is not None:
        entries = load_squares(squares, safe_row * squares_stride, T, CHUNKS)
    sequence = tl.where(row < R, row, 0) % sequences
    if noise is not None:
        sampling = load_sampling(noise, truncation, sequence)
    if processing is not None:
        loaded = load_processing(processing, safe_row, sequence)

    if FORMAT is not None:
        is_needed = None if count is None else tile * TILE < limit
        values = quantized_sums(
            x, weight, safe_row * x_stride, source, weight_stride, is_needed, K, BM, TILE, BK, FORMAT
        )
    else:
        inner = tl.arange(0, BK)
        x_at = x + safe_row[:, None] * x_stride + inner[None, :]
        weight_at = weight + source[None, :] * weight_stride + inner[:, None]
        values = tl.zeros((BM, TILE), tl.float32)
        stop = K
        if count is not None:
            stop = tl.where(tile * TILE < limit, K, 0)  # a tile without existing columns reads nothing
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
        factor = rms_factor_of_squares(entries, K, EPS, SHRINK, BM)
        values = mul_rounded(values, tl.broadcast_to(factor[:, None], (BM, TILE)))
    if softcap is not None:
        cap = tl.full((BM, TILE), 1.0, tl.float32) * softcap
        values = mul_rounded(_tanh(tl.math.div_rn(values, cap)), cap)
    if logits is not None:
        at = logits + safe_row[:, None] * logits_stride + column[None, :]
        tl.store(at, values, mask=(row < R)[:, None] & exists[None, :])
    if tile_keys is not None:
        token = column
        if token_ids is not None:
            token = tl.load(token_ids + column, mask=exists, other=0).to(tl.int32)
        if processing is not None:
            values = process(
                values, loaded, processing, tl.where(row < R, row, 0), sequence, sequences, first_node, path_stride,
                token, exists,
            )  # fmt: skip
        if masks is not None:
            values = mask(values, masks, safe_row, token, exists)
        if noise is not None:
            values = perturb(
                values, sampling, noise, truncation, safe_row, sequence, token, tile * TILE, token_ids is None, STREAM
            )  # fmt: skip
        score = tl.where(exists[None, :], to_int_scores(values), -0x80000000)
        if int_scores is not None:
            at = int_scores + safe_row[:, None] * scores_stride + column[None, :]
            tl.store(at, score, mask=(row < R)[:, None])
        best = tl.max(score, 1)
        best_token = tl.min(tl.where(score == best[:, None], token[None, :], 0x7FFFFFFF), 1)  # ties: the lower token
        tl.store(tile_keys + safe_row * keys_stride + tile, pack_keys(best, best_token), mask=row < R)


def lm_head_scores(
    x: torch.Tensor,  # [R, K]: normed states, or with `norm` scaled ones
    weight: Weight,  # [V, K]
    scores: Scores,
    *,
    token_ids: torch.Tensor | None = None,
    gather: bool = False,
    count: torch.Tensor | None = None,
    norm: Norm | None = None,
    softcap: float | None = None,
    noise: Noise | None = None,
    truncation: Truncation | None = None,
    processing: Processing | None = None,
    masks: Masks | None = None,
) -> None:
    """Writes the scores of all columns for every row: logits with softcap, processed, masked, divided by temperature,
    plus noise; each of these if given.

    Adds no noise for rows of a truncated sequence: `sample_scored` adds it to the tokens that truncation keeps.
    token_ids [V] int32 or int64: the tokens of a trimmed head; the weight is then a copy of their rows of the head, or
    with `gather` the whole head. count [1] int32: number of columns that exist; the values of later ones are not used.
    """
    columns = weight.shape[0] if token_ids is None else token_ids.shape[0]
    _check_inputs(x, weight, softcap)
    _check_trimmed(weight, token_ids, gather, count)
    if norm is not None:
        check_squares(norm.squares, *x.shape, x.device)
    wanted = (x.shape[0], num_tiles(columns))
    check_tensor(scores.tile_keys[: x.shape[0]], "the scores' tile_keys", wanted, (torch.int64,), x.device)
    vocabulary = weight.shape[0] if token_ids is None or gather else None
    check_sampling(x.shape[0], vocabulary, noise, truncation, processing, x.device)
    if masks is not None:
        masks.check(x.shape[0], vocabulary, x.device)
    _launch(
        x, weight, columns, scores, token_ids=token_ids, gather=gather, count=count, norm=norm, softcap=softcap,
        noise=noise, truncation=truncation, processing=processing, masks=masks,
    )  # fmt: skip


def lm_head_logits(
    x: torch.Tensor,  # [R, K], normed states
    weight: Weight,  # [V, K]
    logits_out: torch.Tensor,  # [R, V] float32
    *,
    softcap: float | None = None,
) -> None:
    """Writes the logits that `lm_head_scores` processes and scores, with the same bits."""
    _check_inputs(x, weight, softcap)
    check_tensor(logits_out, "logits_out", (x.shape[0], weight.shape[0]), (torch.float32,), x.device)
    _launch(x, weight, weight.shape[0], None, logits=logits_out, softcap=softcap)


def _check_inputs(x: torch.Tensor, weight: Weight, softcap: float | None) -> None:
    if x.dim() != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x and weight must be [R, K] and [V, K], not {list(x.shape)} and {list(weight.shape)}")
    if x.shape[1] % 16:
        raise ValueError(f"a hidden size of {x.shape[1]} is not possible: it must be a multiple of 16")
    check_tensor(x, "x", tuple(x.shape), FLOATS, x.device)
    if isinstance(weight, torch.Tensor):
        check_tensor(weight, "weight", tuple(weight.shape), (x.dtype,), x.device)
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap={softcap} is not possible: it must be a number above 0, or None")


def _check_trimmed(weight: Weight, token_ids: torch.Tensor | None, gather: bool, count: torch.Tensor | None) -> None:
    if gather and token_ids is None:
        raise ValueError("gather needs token_ids: which rows of the weight to take")
    if token_ids is not None:
        length = token_ids.shape[0] if gather else weight.shape[0]
        check_tensor(token_ids, "token_ids", (length,), (torch.int32, torch.int64), weight.device)
    if count is not None:
        check_tensor(count, "count", (1,), (torch.int32,), weight.device)


def row_tile(rows: int) -> int:
    """Returns the number of rows of a program's tile: the least that is enough, up to 64, as padding costs time. Does
    not change the result."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _launch(
    x: torch.Tensor,
    weight: Weight,
    columns: int,
    scores: Scores | None,
    *,
    logits: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    gather: bool = False,
    count: torch.Tensor | None = None,
    norm: Norm | None = None,
    softcap: float | None = None,
    noise: Noise | None = None,
    truncation: Truncation | None = None,
    processing: Processing | None = None,
    masks: Masks | None = None,
    bm: int | None = None,  # rows of a tile; None: `row_tile`
) -> None:
    r, k = x.shape
    keys, int_scores = (None, None) if scores is None else (scores.tile_keys, scores.int_scores)
    squares, squares_stride = norm_squares(norm)
    tensors, weight_stride = weight_arguments(weight)
    settings = _settings(x, weight, bm)
    _lm_head_kernel[(num_tiles(columns) * triton.cdiv(r, settings["BM"]),)](
        x, tensors, token_ids, count, keys, int_scores, logits, squares,
        masks=None if masks is None else masks.tensors, softcap=softcap, R=r, V=columns,
        x_stride=x.stride(0), weight_stride=weight_stride,
        keys_stride=0 if keys is None else keys.stride(0),
        scores_stride=0 if int_scores is None else int_scores.stride(0),
        logits_stride=0 if logits is None else logits.stride(0), squares_stride=squares_stride,
        **sampling_arguments(noise, truncation, processing),
        K=k, **norm_constants(k, x.dtype, norm), GATHER=gather,
        TILE=TILE, **settings, **pdl_options(x),
    )  # fmt: skip


def _settings(x: torch.Tensor, weight: Weight, bm: int | None) -> dict[str, Any]:
    """Returns launch settings: rows of a tile, columns of K per block, format of the weight, warps, pipeline stages."""
    if isinstance(weight, QuantizedWeight):
        config = choose_weight_tile("head", weight, x.shape[0])
        settings = quantized_settings(x, weight, replace(config, block_m=bm or config.block_m), TILE)
        return {name: value for name, value in settings.items() if name != "BN"}
    bm, bk = bm or row_tile(x.shape[0]), BLOCK_K_BYTES // x.element_size()
    stage_bytes = (bm + TILE) * bk * x.element_size()
    warps, stages = (2, 4) if x.shape[1] <= 2048 and bm == 16 else (4, 5)  # few rows, short K: bound by latency
    stages = min(stages, LEAST_SHARED_BYTES // stage_bytes)
    return {"BM": bm, "BK": bk, "FORMAT": None, "num_warps": warps, "num_stages": stages}
