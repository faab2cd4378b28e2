"""Scores of logits that are written out, as the head scores its own: for hosts that change logits themselves.

One program does one span of one row, each element on its own: a row's scores do not depend on the other rows.
"""

from __future__ import annotations

import torch

from selfspec.kernels.logits_processing import (
    Processing,
    check_drawing,
    drawing_arguments,
    load_processing,
    process,
    process_reference,
)
from selfspec.kernels.noise import (
    Cuts,
    Noise,
    check_tensor,
    load_drawing,
    pack,
    perturb,
    perturbed_reference,
    to_levels,
)
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.topk import TILE, Scores, tiles
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl

SPAN = 4096  # columns of a program: 16 for each of 256 threads


def score_reference(
    logits: torch.Tensor, noise: Noise | None = None, cuts: Cuts | None = None, processing: Processing | None = None
) -> torch.Tensor:
    """The values [R, V] whose levels are the scores of logits [R, V]."""
    if processing is not None:
        logits = process_reference(logits, processing)
    if noise is None:
        return logits
    return perturbed_reference(logits, torch.arange(logits.shape[1], device=logits.device), noise, cuts)


@jit(do_not_specialize=["first_node", "path_stride"])
def _score_kernel(
    logits,
    keys,
    levels,
    noise,  # Noise.tensors, or None
    cuts,  # Cuts.tensors, or None
    processing,  # Processing.tensors, or None
    V,
    tile_count,
    logits_stride,
    keys_stride,
    levels_stride,
    sequences,
    first_node,
    path_stride,
    STREAM: tl.constexpr,
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
    values = tl.load(logits + row * logits_stride + column, mask=column < V, other=0.0)[None, :]
    rows = tl.program_id(0) + tl.zeros((1,), tl.int32)
    sequence = rows % sequences
    if processing is not None:
        loaded = load_processing(processing, rows, sequence)
        values = process(
            values, loaded, processing, rows, sequence, sequences, first_node, path_stride, column, column < V
        )
    if noise is not None:
        drawing = load_drawing(noise, cuts, sequence)
        values = perturb(values, drawing, noise, cuts, rows, sequence, column, first, True, STREAM)
    level = tl.where(column < V, to_levels(tl.reshape(values, (SPAN,))), -0x80000000)
    if levels is not None:
        tl.store(levels + row * levels_stride + column, level, mask=column < tile_count * TILE)
    level = tl.reshape(level, (SPAN // TILE, TILE))
    best = tl.max(level, 1)
    token = tl.reshape(column, (SPAN // TILE, TILE))
    of_best = tl.min(tl.where(level == best[:, None], token, 0x7FFFFFFF), 1)
    tile = tl.program_id(1) * (SPAN // TILE) + tl.arange(0, SPAN // TILE)
    tl.store(keys + row * keys_stride + tile, pack(best, of_best), mask=tile < tile_count)


def score(
    logits: torch.Tensor,  # [R, V] float32
    scores: Scores,
    *,
    noise: Noise | None = None,
    cuts: Cuts | None = None,
    processing: Processing | None = None,
) -> None:
    """Scores logits as `head_top` scores its own: processed, over temperature, plus noise where a row has no cut."""
    rows, columns = logits.shape
    check_tensor(logits, "logits", (rows, columns), (torch.float32,), logits.device)
    check_tensor(scores.keys[:rows], "the scores' keys", (rows, tiles(columns)), (torch.int64,), logits.device)
    check_drawing(rows, columns, noise, cuts, processing, logits.device)
    keys, levels = scores.keys, scores.levels
    _score_kernel[(rows, triton.cdiv(columns, SPAN))](
        logits, keys, levels, V=columns, tile_count=keys.shape[1],
        logits_stride=logits.stride(0), keys_stride=keys.stride(0),
        levels_stride=0 if levels is None else levels.stride(0),
        **drawing_arguments(noise, cuts, processing), TILE=TILE, SPAN=SPAN, num_warps=8,
        **({"PDL": True, "launch_pdl": True} if use_pdl(keys) else {"PDL": False}),
    )  # fmt: skip
