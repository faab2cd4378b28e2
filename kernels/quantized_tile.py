"""The loop over K of a matmul with a quantized weight, for kernels of matmuls and LM head. `quantized_weight` explains
units (64 columns), steps (128 columns) and groups (columns that share a scale).

The loop makes a weight of each stored number, as `QuantizedWeight.rounded` defines it: rounded to x's dtype, in which
scale and offset are rounded first. So no scale remains to be applied to sums, whatever the group's size.

A program's warps divide K into SPLITS splits, and the weight rows of its tile among ROW_WARPS warps: warp b sums split
b // ROW_WARPS of K for part b % ROW_WARPS of the weight rows. The splits are added as a balanced tree. The result of a
row of x depends on that row and the weight alone (SPLITS follows from the weight's shape): with every tile, each warp
executes the same instruction in the same order, since Triton compiles a dot of three dimensions to `mma`, never to
`wgmma`.

No operand goes through shared memory, and no warp waits for another one until the splits are added. Tensors have the
axes (lane % 4, lane // 4, warp, rows / 8, ...): the compiler distributes the first two axes over the threads of a warp
and the third one over the warps (see `load_lanes`). So each thread itself loads the numbers that it passes to the
tensor cores, two steps of the loop ahead. Another distribution of these axes would cost time only. The last axis must
stay in the first registers of a thread, where the PTX expects it: `tests/compiling.py` checks that of every kernel.
"""

from __future__ import annotations

from selfspec.kernels.gemm_common import load_squares, matmul_tile, rms_factor_of_squares
from selfspec.kernels.noise import mul_rounded
from selfspec.kernels.pdl import prefetch_weight
from selfspec.kernels.quantized_operand import (
    by_lane,
    load_all_scales,
    load_group_value,
    load_lanes,
    operand,
    scaling_of,
    stored_number,
    weight_pairs,
    x_operand,
)
from selfspec.kernels.triton_compat import jit, tl


@jit
def _load_x(place, step, QUARTER: tl.constexpr, K: tl.constexpr, RAGGED: tl.constexpr, FORMAT: tl.constexpr):
    """Loads x at 32 columns, a quarter of a step: [4, 8, B, BM / 8, 4 words or 8 numbers]. `place`: see `_sum`."""
    _, _, x_at, first, lane_column = place
    column = step * FORMAT.step + QUARTER * FORMAT.half
    PER_ELEMENT: tl.constexpr = 2 if x_at.dtype.element_ty == tl.int32 else 1
    COUNT: tl.constexpr = 8 // PER_ELEMENT
    SIZE: tl.constexpr = x_at.dtype.element_ty.primitive_bitwidth // 8
    if RAGGED:
        return load_lanes(x_at + column // PER_ELEMENT, first + lane_column + column < K, COUNT, SIZE)
    else:
        return load_lanes(x_at + column // PER_ELEMENT, None, COUNT, SIZE)


@jit
def _load_words(at, column, WORDS: tl.constexpr, K: tl.constexpr, RAGGED: tl.constexpr, FORMAT: tl.constexpr):
    """Loads the words of the two units from `column` on: one tensor [4, 8, B, rows / 8, 2] for each unit or, with 8
    bits, for each half of a unit. L1 evicts them first, and so keeps x, which every warp of a program reads."""
    has_first = None
    has_second = None
    if RAGGED:
        has_first = column < K
        has_second = column + 2 * FORMAT.half < K
    if FORMAT.kind == "int4":
        return load_lanes(at, has_first, 2, 4, True), load_lanes(at + WORDS, has_second, 2, 4, True)
    else:
        return (
            load_lanes(at, has_first, 2, 4, True), load_lanes(at + WORDS, has_first, 2, 4, True),
            load_lanes(at + 2 * WORDS, has_second, 2, 4, True), load_lanes(at + 3 * WORDS, has_second, 2, 4, True),
        )  # fmt: skip


@jit
def _load_step(
    place, weight, step, K: tl.constexpr, AHEAD: tl.constexpr, RAGGED: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Loads a step: words, scales of groups and, if AHEAD, x. Where scales or x are not loaded, the first words stand
    in their place."""
    weight_at, rows, _, first, _ = place
    WORDS: tl.constexpr = FORMAT.tile_rows * FORMAT.half // 4  # words of 16 rows of a unit (8 bits: of half a unit)
    PARTS: tl.constexpr = 2 if FORMAT.kind == "int4" else 4
    at = weight_at + step * (PARTS * WORDS)
    words = _load_words(at, first + step * FORMAT.step, WORDS, K, RAGGED, FORMAT)
    if FORMAT.by_row:
        scales = (words[0], words[0], words[0])
    else:
        scales = load_all_scales(weight, first + step * FORMAT.step, rows, K, RAGGED, FORMAT)
    if AHEAD:
        x = (
            _load_x(place, step, 0, K, RAGGED, FORMAT), _load_x(place, step, 1, K, RAGGED, FORMAT),
            _load_x(place, step, 2, K, RAGGED, FORMAT), _load_x(place, step, 3, K, RAGGED, FORMAT),
        )  # fmt: skip
    else:
        x = (words[0], words[0], words[0], words[0])
    return words, scales, x


@jit
def _add_step(
    sums, loaded, place, fixed, weight, step, K: tl.constexpr, AHEAD: tl.constexpr, RAGGED: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Adds a step to `sums` [B, ROWS, BM]. fixed: the scaling of all steps where each row has one scale, else None."""
    words, scales, x = loaded
    B: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    BM: tl.constexpr = sums.shape[2]
    for quarter in tl.static_range(4):
        scaling = fixed if FORMAT.by_row else scaling_of(scales, weight, quarter, FORMAT, DTYPE)
        if FORMAT.kind == "int4":
            pairs = weight_pairs(words[quarter // 2], scaling, quarter % 2 == 1, FORMAT, DTYPE)
        else:
            pairs = weight_pairs(words[quarter], scaling, False, FORMAT, DTYPE)
        if AHEAD:
            x_part = x_operand(x[quarter], B, BM, DTYPE)
        else:
            x_part = x_operand(_load_x(place, step, quarter, K, RAGGED, FORMAT), B, BM, DTYPE)
        sums = tl.dot(operand(pairs, B, ROWS), x_part, sums, input_precision="ieee")
    return sums


@jit
def _add_splits(sums, SPLITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Adds the splits [SPLITS, BN, BM] to [BM, BN] as a balanced tree of additions, which fixes their rounding."""
    for level in tl.static_range(4):
        if (SPLITS >> level) > 1:
            sums = tl.sum(tl.reshape(sums, (SPLITS >> (level + 1), 2, BN, BM)), axis=1)
    return tl.trans(tl.reshape(sums, (BN, BM)))


@jit
def _sum(
    x, weight, x_rows, weight_rows, weight_stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROW_WARPS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The sums of each warp, before `_add_splits`: [SPLITS * ROW_WARPS, BN / ROW_WARPS, BM]."""
    STEP: tl.constexpr = FORMAT.step
    SPLITS: tl.constexpr = FORMAT.splits
    B: tl.constexpr = SPLITS * ROW_WARPS
    STEPS: tl.constexpr = ((K + STEP - 1) // STEP + SPLITS - 1) // SPLITS  # in a split
    RAGGED: tl.constexpr = STEPS * SPLITS * STEP != K
    WORDS: tl.constexpr = STEP // 8 if FORMAT.kind == "int4" else STEP // 4  # words of a row in a step
    AHEAD: tl.constexpr = FORMAT.rows_ahead >= BM  # load x two steps ahead
    dtype: tl.constexpr = x.dtype.element_ty
    lane = tl.arange(0, 4)[:, None, None, None, None]
    first = (tl.arange(0, B) // ROW_WARPS * (STEPS * STEP))[None, None, :, None, None]  # first column of a warp
    rows = by_lane(weight_rows.to(tl.int64), SPLITS, ROW_WARPS, BN)
    words = rows // FORMAT.tile_rows * weight_stride + rows % FORMAT.tile_rows * (FORMAT.half // 4)
    weight_at = weight[0] + (words + (first // STEP) * (FORMAT.tile_rows * WORDS) + lane * 2)
    x_rows = by_lane(x_rows.to(tl.int64), 1, 1, BM)
    if FORMAT.convert.low is None:
        x_at = x + (x_rows + first + lane * 8)
    else:  # two numbers at a time, which the loop keeps in one register
        x_at = x.to(tl.pointer_type(tl.int32), bitcast=True) + (x_rows // 2 + first // 2 + lane * 4)
    place = (weight_at, rows, x_at, first, lane * 8)  # where a thread reads words, scales and x
    sums = tl.zeros((B, BN // ROW_WARPS, BM), tl.float32)
    fixed = None
    if FORMAT.by_row:
        fixed = scaling_of(load_all_scales(weight, first * 0, rows, K, False, FORMAT), weight, 0, FORMAT, dtype)
    even = _load_step(place, weight, 0, K, AHEAD, RAGGED, FORMAT)
    odd = even
    if STEPS > 1:
        odd = _load_step(place, weight, 1, K, AHEAD, RAGGED, FORMAT)
    for step in range(0, STEPS - 2, 2):
        sums = _add_step(sums, even, place, fixed, weight, step, K, AHEAD, RAGGED, FORMAT, dtype)
        even = _load_step(place, weight, step + 2, K, AHEAD, RAGGED, FORMAT)
        sums = _add_step(sums, odd, place, fixed, weight, step + 1, K, AHEAD, RAGGED, FORMAT, dtype)
        odd = _load_step(place, weight, tl.minimum(step + 3, STEPS - 1), K, AHEAD, RAGGED, FORMAT)
    LAST: tl.constexpr = (STEPS - 1) // 2 * 2
    sums = _add_step(sums, even, place, fixed, weight, LAST, K, AHEAD, RAGGED, FORMAT, dtype)
    if STEPS % 2 == 0:
        sums = _add_step(sums, odd, place, fixed, weight, STEPS - 1, K, AHEAD, RAGGED, FORMAT, dtype)
    return sums


@jit
def quantized_sums(
    x, weight, x_rows, weight_rows, weight_stride, is_needed,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROW_WARPS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Returns x @ weight^T [BM, BN] float32 of BM rows, given by offsets, and BN weight rows, given by indices.

    weight: the tuple of `weight_tensors`. ROW_WARPS: warps among which the weight rows are divided. is_needed: if 0,
    nothing is read and the sums are 0; None: the same as 1.
    """
    SPLITS: tl.constexpr = FORMAT.splits
    if is_needed is None:
        sums = _sum(x, weight, x_rows, weight_rows, weight_stride, K, BM, BN, ROW_WARPS, FORMAT)
    else:
        sums = tl.zeros((SPLITS * ROW_WARPS, BN // ROW_WARPS, BM), tl.float32)
        if is_needed:
            sums = _sum(x, weight, x_rows, weight_rows, weight_stride, K, BM, BN, ROW_WARPS, FORMAT)
    return _add_splits(tl.reshape(sums, (SPLITS, BN, BM)), SPLITS, BN, BM) * FORMAT.convert.sum_factor


@jit
def prefetch_tile(
    weight, weight_rows, weight_offsets, weight_stride, BN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Prefetches the first COLUMNS columns (of a quantized weight: words) of a tile's weight rows into L2."""
    if FORMAT is None:
        prefetch_weight(weight, weight_offsets, BN, COLUMNS, PDL)
    else:
        # Row r of a tile prefetches the tile's words r * COLUMNS to (r + 1) * COLUMNS.
        TILE_ROWS: tl.constexpr = FORMAT.tile_rows
        parts = (weight_rows // TILE_ROWS).to(tl.int64) * weight_stride + (weight_rows % TILE_ROWS) * COLUMNS
        prefetch_weight(weight[0], parts, BN, COLUMNS, PDL)


@jit
def weight_tile(
    x, weight, squares, real, x_rows, weight_rows, weight_offsets, squares_rows, weight_stride,
    K: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr, EPS: tl.constexpr, SHRINK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICING: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """`matmul_tile` for a weight in any format (None: dense); weight rows are given by indices and by offsets. With a
    quantized weight BK has the number of ROW_WARPS (see `quantized_sums`)."""
    if FORMAT is None:
        return matmul_tile(
            x, weight, squares, real, x_rows, weight_offsets, squares_rows, K, T, CHUNKS, EPS, SHRINK, BM, BN, BK,
            SLICING,
        )  # fmt: skip
    else:
        if squares is not None:
            entries = load_squares(squares, squares_rows, T, CHUNKS)
        sums = quantized_sums(x, weight, x_rows, weight_rows, weight_stride, None, K, BM, BN, BK, FORMAT)
        if squares is not None:
            sums *= rms_factor_of_squares(entries, K, EPS, SHRINK, BM)[:, None]
        return sums


@jit
def dequantize_row(weight, row, column, inside, STRIDE: tl.constexpr, FORMAT: tl.constexpr):
    """The weights of one row at `column`, in float32, rounded as `QuantizedWeight.dequantize` rounds them."""
    HALF: tl.constexpr = FORMAT.half
    GROUP: tl.constexpr = FORMAT.group
    PARTS: tl.constexpr = FORMAT.parts
    SUPER: tl.constexpr = FORMAT.super_columns
    ROWS: tl.constexpr = FORMAT.tile_rows
    tile = column // (2 * HALF) if FORMAT.kind == "int4" else column // HALF
    at = (row // ROWS).to(tl.int64) * STRIDE + (tile * ROWS + row % ROWS) * (HALF // 4) + column % HALF // 4
    shift = column % 2 * 16 + column // 2 % 2 * 8
    if FORMAT.kind == "int4":
        shift += column // HALF % 2 * 4
    q = stored_number(tl.load(weight[0] + at, mask=inside, other=0) >> shift, 0, FORMAT)
    VALUES_PER_GROUP: tl.constexpr = 2 if FORMAT.has_minimum else 1
    COUNT: tl.constexpr = VALUES_PER_GROUP * PARTS
    scale = load_group_value(weight[1], column, row, inside, GROUP, PARTS, 0, COUNT, FORMAT)
    if weight[2] is not None:
        scale *= load_group_value(weight[2], column, row, inside, SUPER, 1, 0, VALUES_PER_GROUP, FORMAT)
    if FORMAT.has_zeros:
        q -= load_group_value(weight[3], column, row, inside, GROUP, PARTS, 0, PARTS, FORMAT)
    value = mul_rounded(q - FORMAT.zero, scale)
    if FORMAT.has_minimum:
        minimum = load_group_value(weight[1], column, row, inside, GROUP, PARTS, PARTS, COUNT, FORMAT)
        if weight[2] is not None:
            minimum *= load_group_value(weight[2], column, row, inside, SUPER, 1, 1, VALUES_PER_GROUP, FORMAT)
        value -= minimum
    return value
