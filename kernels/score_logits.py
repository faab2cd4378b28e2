"""Scores of logits that are already in memory, as the LM head kernel scores its own.

Used where the host changes logits between the model and the choice (Python logits processors). Reads logits [R, V]
float32 and writes `topk.Scores`: processed (`logits_processing`), divided by temperature, plus noise (`noise`). One
program scores SPAN columns of one row, each element on its own, so a row's scores do not depend on other rows.
"""

from __future__ import annotations

import torch

from selfspec.kernels.logits_processing import (
    Processing,
    check_sampling,
    load_processing,
    process,
    process_logits_reference,
    sampling_arguments,
)
from selfspec.kernels.noise import (
    Noise,
    Truncation,
    check_tensor,
    load_sampling,
    pack_keys,
    perturb,
    perturbed_reference,
    to_int_scores,
)
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.topk import TILE, Scores, num_tiles
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton

SPAN = 4096  # columns of a program: 16 for each of its 256 threads


def score_logits_reference(
    logits: torch.Tensor,
    noise: Noise | None = None,
    truncation: Truncation | None = None,
    processing: Processing | None = None,
) -> torch.Tensor:
    """The scores of logits [R, V] as floats: [R, V]."""
    if processing is not None:
        logits = process_logits_reference(logits, processing)
    if noise is None:
        return logits
    return perturbed_reference(logits, torch.arange(logits.shape[1], device=logits.device), noise, truncation)


@jit(do_not_specialize=["sequences", "first_node", "path_stride"])
def _score_kernel(
    logits,  # [R, V]
    tile_keys,  # [R, tiles]
    int_scores,  # [R, tiles * TILE], or None
    noise,  # Noise.tensors, or None
    truncation,  # Truncation.tensors, or None
    processing,  # Processing.tensors, or None
    V,
    tile_count,
    logits_stride,
    keys_stride,
    scores_stride,
    sequences,
    first_node,
    path_stride,
    STREAM: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, span): int scores of SPAN columns, and the key of each of their tiles."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SPAN
    column = first + tl.arange(0, SPAN)
    values = tl.load(logits + row * logits_stride + column, mask=column < V, other=0.0)[None, :]
    rows = tl.program_id(0) + tl.zeros((1,), tl.int32)
    sequence = rows % sequences
    if processing is not None:
        loaded = load_processing(processing, rows, sequence)
        values = process(
            values, loaded, processing, rows, sequence, sequences, first_node, path_stride, column, column < V
        )
    if noise is not None:
        sampling = load_sampling(noise, truncation, sequence)
        values = perturb(values, sampling, noise, truncation, rows, sequence, column, first, True, STREAM)
    score = tl.where(column < V, to_int_scores(tl.reshape(values, (SPAN,))), -0x80000000)
    if int_scores is not None:
        tl.store(int_scores + row * scores_stride + column, score, mask=column < tile_count * TILE)
    score = tl.reshape(score, (SPAN // TILE, TILE))
    best = tl.max(score, 1)
    token = tl.reshape(column, (SPAN // TILE, TILE))
    best_token = tl.min(tl.where(score == best[:, None], token, 0x7FFFFFFF), 1)  # of equal scores the lower token
    tile = tl.program_id(1) * (SPAN // TILE) + tl.arange(0, SPAN // TILE)
    tl.store(tile_keys + row * keys_stride + tile, pack_keys(best, best_token), mask=tile < tile_count)


def score_logits(
    logits: torch.Tensor,  # [R, V] float32
    scores: Scores,
    *,
    noise: Noise | None = None,
    truncation: Truncation | None = None,
    processing: Processing | None = None,
) -> None:
    """Scores logits as `lm_head_scores` scores its own: processed, over temperature, plus noise unless truncated."""
    rows, columns = logits.shape
    check_tensor(logits, "logits", (rows, columns), (torch.float32,), logits.device)
    check_tensor(
        scores.tile_keys[:rows], "the scores' tile_keys", (rows, num_tiles(columns)), (torch.int64,), logits.device
    )
    check_sampling(rows, columns, noise, truncation, processing, logits.device)
    keys, int_scores = scores.tile_keys, scores.int_scores
    _score_kernel[(rows, triton.cdiv(columns, SPAN))](
        logits, keys, int_scores, V=columns, tile_count=keys.shape[1],
        logits_stride=logits.stride(0), keys_stride=keys.stride(0),
        scores_stride=0 if int_scores is None else int_scores.stride(0),
        **sampling_arguments(noise, truncation, processing), TILE=TILE, SPAN=SPAN, num_warps=8,
        **pdl_options(keys),
    )  # fmt: skip
