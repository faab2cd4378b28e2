"""The loop over K of a matmul with a quantized weight (see `quantized_weight`): a part of the matmuls and the LM head.

The loop converts stored numbers to x's dtype, which holds them exactly, and multiplies the sums of a group with its
scale in float32, so no weight is rounded. Where a group has a zero or a minimum of its own, their part of the sum is
(scale * zero + minimum) times the sum of x over the group.

Each of `splits` warps sums over its own units of the K columns: in step i warp s takes unit i * splits + s. The sums of
the warps are added as a balanced tree. A row's bits depend on the weight's shape and format and on `splits`, which
depends on the weight's shape alone: each warp multiplies all of the tile with the same instruction (a dot of three
dimensions is never a warp group's), so neither the number of rows nor the tile changes the order of a sum.
"""

from __future__ import annotations

from selfspec.kernels.gemm_common import load_squares, matmul_tile, rms_factor_of_squares
from selfspec.kernels.noise import mul_rounded
from selfspec.kernels.pdl import prefetch_weight
from selfspec.kernels.triton_compat import jit, tl


@jit
def fp8_value(byte):
    """The float32 number of e4m3 bytes given as integers."""
    size = (byte & 127).to(tl.int32)
    value = ((size & 7) << 20 | (size >> 3) << 23).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where(byte > 127, -value, value)


@jit
def _run(PTX: tl.constexpr, bytes_, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(PTX, "=r,=r,r", [bytes_], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(PTX, "=r,=r,r", [bytes_], dtype=tl.float16, is_pure=True, pack=4)


@jit
def _ones(bytes_, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """As many ones as bytes. They are made from the bytes, so that the compiler gives x the same layout in both of its
    dots, which it needs to pipeline the loads of x."""
    PTX: tl.constexpr = FORMAT.ones
    if PTX is not None:
        return _run(PTX, bytes_, DTYPE)
    else:
        return tl.full(bytes_.shape, 1.0, DTYPE)


@jit
def _convert(bytes_, HIGH: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of the low or high 4 bits of bytes, or of whole bytes, in DTYPE."""
    PTX: tl.constexpr = FORMAT.high if HIGH else FORMAT.low
    if PTX is not None:
        return _run(PTX, bytes_, DTYPE)
    elif FORMAT.kind == "int4":
        number = bytes_ >> 4 if HIGH else bytes_ & 15
        return (number.to(tl.int32) + (FORMAT.bias - FORMAT.zero)).to(DTYPE)
    elif FORMAT.kind == "fp8":
        return fp8_value(bytes_).to(DTYPE)
    else:
        return bytes_.to(tl.float32).to(DTYPE)


@jit
def load_of_groups(source, column, rows, inside, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    """Values that COLUMNS columns of a row share, at some columns and rows; 0 where `source` is None."""
    if source is None:
        return tl.zeros(inside.shape, tl.int8)
    else:
        return tl.load(source + (column // COLUMNS).to(tl.int64) * FORMAT.rows + rows, mask=inside, other=0)


@jit
def _load_scales(weight, column, rows, inside, FORMAT: tl.constexpr):
    """Scales, zeros and minimums of groups as stored, without the super scales and super minimums."""
    GROUP: tl.constexpr = FORMAT.group
    return (
        load_of_groups(weight[1], column, rows, inside, GROUP, FORMAT),
        load_of_groups(weight[3], column, rows, inside, GROUP, FORMAT),
        load_of_groups(weight[4], column, rows, inside, GROUP, FORMAT),
    )


@jit
def _load_unit_scales(weight, column, rows, inside, FORMAT: tl.constexpr):
    """`_load_scales` of the columns 0, 16, 32 and 48 of units, as far as these can differ, and the super scales and
    super minimums; column: the first one of each unit."""
    scales = _load_scales(weight, column, rows, inside, FORMAT)
    scales_16 = scales
    scales_32 = scales
    scales_48 = scales
    if FORMAT.parts >= 2:
        scales_32 = _load_scales(weight, column + 32, rows, inside, FORMAT)
    if FORMAT.parts == 4:
        scales_16 = _load_scales(weight, column + 16, rows, inside, FORMAT)
        scales_48 = _load_scales(weight, column + 48, rows, inside, FORMAT)
    SUPER: tl.constexpr = FORMAT.super_columns
    super_scales = (
        load_of_groups(weight[2], column, rows, inside, SUPER, FORMAT),
        load_of_groups(weight[5], column, rows, inside, SUPER, FORMAT),
    )
    return scales, scales_16, scales_32, scales_48, super_scales


@jit
def _scale_and_offset(scales, super_scales, weight, FORMAT: tl.constexpr):
    """scale, and -(scale * (zero + bias) + minimum), in float32."""
    scale = scales[0].to(tl.float32)
    if weight[2] is not None:
        scale = scale * super_scales[0].to(tl.float32)
    minimum = scales[2].to(tl.float32)
    if weight[5] is not None:
        minimum = minimum * super_scales[1].to(tl.float32)
    return scale, tl.fma(-scale, scales[1].to(tl.float32) + FORMAT.bias, -minimum)


@jit
def _add_scaled(sums, part, x_sums, scales, super_scales, weight, FORMAT: tl.constexpr):
    """sums + scale * part + offset * x_sums; both multiply-adds are fused in every compilation."""
    scale, offset = _scale_and_offset(scales, super_scales, weight, FORMAT)
    sums = tl.fma(part, tl.broadcast_to(scale[:, :, None], part.shape), sums)
    if FORMAT.has_offsets:
        sums = tl.fma(x_sums, tl.broadcast_to(offset[:, :, None], part.shape), sums)
    return sums


@jit
def _add_group(sums, q, x, ones, scales, super_scales, weight, FORMAT: tl.constexpr):
    """Adds q @ x of columns that share a scale."""
    part = tl.dot(q, x, input_precision="ieee")
    x_sums = part
    if FORMAT.has_offsets:
        x_sums = tl.dot(ones, x, input_precision="ieee")
    return _add_scaled(sums, part, x_sums, scales, super_scales, weight, FORMAT)


@jit
def _add_half(sums, q, x, ones, scales, second_scales, super_scales, weight, FORMAT: tl.constexpr):
    """Adds q @ x of half a unit. Groups of an odd multiple of 16 columns divide it; the tensor cores take 32 columns of
    bytes at a time, so each part is a product with the other part's x set to 0."""
    if FORMAT.group % FORMAT.half == 0:
        return _add_group(sums, q, x, ones, scales, super_scales, weight, FORMAT)
    else:
        HALF: tl.constexpr = FORMAT.half
        is_first = (tl.arange(0, HALF) < HALF // 2)[None, :, None]
        sums = _add_group(sums, q, tl.where(is_first, x, 0.0).to(x.dtype), ones, scales, super_scales, weight, FORMAT)
        second = tl.where(is_first, 0.0, x).to(x.dtype)
        return _add_group(sums, q, second, ones, second_scales, super_scales, weight, FORMAT)


@jit
def _add_splits(sums, SPLITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """[SPLITS, BN, BM] to [BM, BN], as a balanced tree: each addition has two operands, which fixes every rounding."""
    for level in tl.static_range(4):
        if (SPLITS >> level) > 1:
            sums = tl.sum(tl.reshape(sums, (SPLITS >> (level + 1), 2, BN, BM)), axis=1)
    return tl.trans(tl.reshape(sums, (BN, BM)))


@jit
def row_offsets(weight_rows, weight_stride, FORMAT: tl.constexpr):
    """Offsets of the first bytes of weight rows; weight_stride: bytes from 16 rows to the next 16."""
    ROWS: tl.constexpr = FORMAT.tile_rows
    HALF: tl.constexpr = FORMAT.half
    return (weight_rows // ROWS).to(tl.int64) * weight_stride + (weight_rows % ROWS) * HALF


@jit
def _load_step(
    x_at, weight_at, column, unit, real, start, at,
    K: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The inputs of a step of the loop over K: both halves of x, and their weights' bytes (4 bits: the same bytes).
    start, at: the step's first column, and its first byte in a row's tiles."""
    HALF: tl.constexpr = FORMAT.half
    if K % STEP == 0:
        x_low = tl.load(x_at + start, mask=real[None, None, :], other=0.0)
        x_high = tl.load(x_at + start + HALF, mask=real[None, None, :], other=0.0)
        bytes_low = tl.load(weight_at + at)
        bytes_high = bytes_low if FORMAT.kind == "int4" else tl.load(weight_at + at + TILE)
    else:
        x_low = tl.load(x_at + start, mask=real[None, None, :] & (column < K - start), other=0.0)
        x_high = tl.load(x_at + start + HALF, mask=real[None, None, :] & (column < K - start - HALF), other=0.0)
        exists = (unit < PADDED - start)[:, None, None]
        bytes_low = tl.load(weight_at + at, mask=exists, other=0)
        bytes_high = bytes_low if FORMAT.kind == "int4" else tl.load(weight_at + at + TILE, mask=exists, other=0)
    return x_low, x_high, bytes_low, bytes_high


@jit
def quantized_sums(
    x, weight, real, x_rows, weight_rows, weight_stride, is_needed,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """x @ weight^T of BM rows, given by their offsets, and BN weight rows, given by their indices: [BM, BN] float32.

    weight: as of `weight_tensors`. Rows that are not `real` are not read. is_needed: where it is 0 the sums are 0, and
    nothing but the first scales is read; None: always.
    """
    HALF: tl.constexpr = FORMAT.half
    SPLITS: tl.constexpr = FORMAT.splits
    UNIT: tl.constexpr = 2 * HALF
    STEP: tl.constexpr = SPLITS * UNIT  # columns of a step
    PADDED: tl.constexpr = (K + UNIT - 1) // UNIT * UNIT
    dtype: tl.constexpr = x.dtype.element_ty
    unit = tl.arange(0, SPLITS) * UNIT  # first column of each split's unit in the first step
    column = unit[:, None, None] + tl.arange(0, HALF)[None, :, None]  # [splits, HALF, 1]
    x_at = x + x_rows[None, None, :] + column  # [splits, HALF, BM]
    TILE: tl.constexpr = FORMAT.tile_rows * HALF  # bytes of a tile: half a unit (8 bits) or a whole one (4 bits)
    UNIT_BYTES: tl.constexpr = TILE if FORMAT.kind == "int4" else 2 * TILE
    byte = (tl.arange(0, SPLITS) * UNIT_BYTES)[:, None, None] + tl.arange(0, HALF)[None, None, :]
    weight_at = weight[0] + row_offsets(weight_rows, weight_stride, FORMAT)[None, :, None] + byte
    rows = weight_rows[None, :]
    here = unit[:, None] + tl.zeros((SPLITS, BN), tl.int32)  # [splits, BN]: first column of the unit
    scales, scales_16, scales_32, scales_48, super_scales = _load_unit_scales(weight, here, rows, here < PADDED, FORMAT)
    sums = tl.zeros((SPLITS, BN, BM), tl.float32)
    x_sums = sums  # of one group; with one scale per row, of all of x
    steps = (PADDED + STEP - 1) // STEP
    if is_needed is not None:
        steps = tl.where(is_needed, steps, 0)
    for step in range(steps):
        start = step * STEP
        x_low, x_high, bytes_low, bytes_high = _load_step(
            x_at, weight_at, column, unit, real, start, step * (SPLITS * UNIT_BYTES), K, PADDED, STEP, TILE, FORMAT
        )
        low, high = _convert(bytes_low, False, FORMAT, dtype), _convert(bytes_high, True, FORMAT, dtype)
        ones = _ones(bytes_low, FORMAT, dtype)
        if FORMAT.by_row:
            sums = tl.dot(low, x_low, sums, input_precision="ieee")
            sums = tl.dot(high, x_high, sums, input_precision="ieee")
            if FORMAT.has_offsets:
                x_sums = tl.dot(ones, x_low, x_sums, input_precision="ieee")
                x_sums = tl.dot(ones, x_high, x_sums, input_precision="ieee")
        else:
            if FORMAT.parts == 1:
                part = tl.dot(low, x_low, input_precision="ieee")
                part = tl.dot(high, x_high, part, input_precision="ieee")
                if FORMAT.has_offsets:
                    x_sums = tl.dot(ones, x_low, input_precision="ieee")
                    x_sums = tl.dot(ones, x_high, x_sums, input_precision="ieee")
                sums = _add_scaled(sums, part, x_sums, scales, super_scales, weight, FORMAT)
            else:
                sums = _add_half(sums, low, x_low, ones, scales, scales_16, super_scales, weight, FORMAT)
                sums = _add_half(sums, high, x_high, ones, scales_32, scales_48, super_scales, weight, FORMAT)
            # Loaded one step ahead: the compiler does not pipeline loads that no dot reads.
            here += STEP
            scales, scales_16, scales_32, scales_48, super_scales = _load_unit_scales(
                weight, here, rows, here < PADDED, FORMAT
            )
    if FORMAT.by_row:
        sums = _add_scaled(tl.zeros(sums.shape, tl.float32), sums, x_sums, scales, super_scales, weight, FORMAT)
    return _add_splits(sums, SPLITS, BN, BM)


@jit
def _prefetch_of_groups(source, rows, COUNT: tl.constexpr, POWER: tl.constexpr, FORMAT: tl.constexpr):
    """Prefetches COUNT groups' values of some rows into L2; POWER: the next power of two."""
    if source is not None:
        group = tl.minimum(tl.arange(0, POWER), COUNT - 1).to(tl.int64)
        at = source + group[:, None] * FORMAT.rows + rows[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def prefetch_tile(
    weight, weight_rows, weight_offsets, weight_stride, BN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Prefetches the first COLUMNS columns of a tile's weight rows into L2 and all scales, zeros and minimums of a
    quantized weight: the loop loads these one step ahead, which hides the latency of L2 but not that of memory."""
    if FORMAT is None:
        prefetch_weight(weight, weight_offsets, BN, COLUMNS, PDL)
    else:
        # Neighbouring rows prefetch neighbouring parts of the first bytes of their tiles.
        TILE_ROWS: tl.constexpr = FORMAT.tile_rows
        parts = (weight_rows // TILE_ROWS).to(tl.int64) * weight_stride + (weight_rows % TILE_ROWS) * COLUMNS
        prefetch_weight(weight[0], parts, BN, COLUMNS, PDL)
        if FORMAT.ones is not None:
            # Of each 16 rows one even and one odd one: rows are neighbours, or those of two ranges alternate.
            pairs = tl.min(tl.reshape(weight_rows, (BN // 16, 8, 2)), axis=1)
            rows = tl.reshape(pairs, (BN // 8,))
            GROUPS: tl.constexpr = FORMAT.groups
            GROUPS_POWER: tl.constexpr = FORMAT.groups_power
            SUPERS: tl.constexpr = FORMAT.super_groups
            SUPERS_POWER: tl.constexpr = FORMAT.super_groups_power
            _prefetch_of_groups(weight[1], rows, GROUPS, GROUPS_POWER, FORMAT)
            _prefetch_of_groups(weight[3], rows, GROUPS, GROUPS_POWER, FORMAT)
            _prefetch_of_groups(weight[4], rows, GROUPS, GROUPS_POWER, FORMAT)
            _prefetch_of_groups(weight[2], rows, SUPERS, SUPERS_POWER, FORMAT)
            _prefetch_of_groups(weight[5], rows, SUPERS, SUPERS_POWER, FORMAT)


@jit
def weight_tile(
    x, weight, squares, real, x_rows, weight_rows, weight_offsets, squares_rows, weight_stride,
    K: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr, EPS: tl.constexpr, SHRINK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICING: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """`matmul_tile` for a weight in any format (None: dense); weight rows are given by indices and by offsets."""
    if FORMAT is None:
        return matmul_tile(
            x, weight, squares, real, x_rows, weight_offsets, squares_rows, K, T, CHUNKS, EPS, SHRINK, BM, BN, BK,
            SLICING,
        )  # fmt: skip
    else:
        if squares is not None:
            entries = load_squares(squares, squares_rows, T, CHUNKS)
        sums = quantized_sums(x, weight, real, x_rows, weight_rows, weight_stride, None, K, BM, BN, FORMAT)
        if squares is not None:
            sums *= rms_factor_of_squares(entries, K, EPS, SHRINK, BM)[:, None]
        return sums


@jit
def dequantize_row(weight, row, column, inside, STRIDE: tl.constexpr, FORMAT: tl.constexpr):
    """Some columns of one row of a weight in float32, rounded as `QuantizedWeight.dequantize` rounds them."""
    HALF: tl.constexpr = FORMAT.half
    GROUP: tl.constexpr = FORMAT.group
    SUPER: tl.constexpr = FORMAT.super_columns
    ROWS: tl.constexpr = FORMAT.tile_rows
    tile = column // (2 * HALF) if FORMAT.kind == "int4" else column // HALF
    at = weight[0] + row_offsets(row, STRIDE, FORMAT) + tile * (ROWS * HALF) + column % HALF
    byte = tl.load(at, mask=inside, other=0)
    if FORMAT.kind == "int4":
        q = tl.where(column // HALF % 2 == 0, byte & 15, byte >> 4).to(tl.float32)
    elif FORMAT.kind == "fp8":
        q = fp8_value(byte)
    else:
        q = byte.to(tl.float32)
    scale = load_of_groups(weight[1], column, row, inside, GROUP, FORMAT).to(tl.float32)
    if weight[2] is not None:
        scale *= load_of_groups(weight[2], column, row, inside, SUPER, FORMAT).to(tl.float32)
    zero = load_of_groups(weight[3], column, row, inside, GROUP, FORMAT).to(tl.float32) + FORMAT.zero
    value = mul_rounded(q - zero, scale)
    if weight[4] is not None:
        minimum = load_of_groups(weight[4], column, row, inside, GROUP, FORMAT).to(tl.float32)
        if weight[5] is not None:
            minimum *= load_of_groups(weight[5], column, row, inside, SUPER, FORMAT).to(tl.float32)
        value -= minimum
    return value
