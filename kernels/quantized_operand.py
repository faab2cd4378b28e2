"""Parts of `quantized_tile`: loads words, scales and x, and converts them to operands of the tensor cores."""

from __future__ import annotations

from selfspec.kernels.triton_compat import IS_TRITON_3_6, jit, tl


@jit
def _fp8_value(byte):
    """Returns the float32 values of e4m3 bytes, given as integers."""
    size = (byte & 127).to(tl.int32)
    value = ((size & 7) << 20 | (size >> 3) << 23).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where(byte > 127, -value, value)


# Operands of the tensor cores. Of 32 columns of a row a thread has 8: two words [..., 2] become 4 tensors of pairs
# [..., 2], whose last axis is the two neighbouring columns of a pair.


@jit
def _run_ptx(PTX: tl.constexpr, words, scale, minus_offset, zero, dtype: tl.constexpr):
    """Runs PTX on words and, for each of them, pairs of equal numbers. Returns 4 tensors of pairs. Triton takes no
    constexpr tuple of dtypes, so both calls are written out."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [words, scale, minus_offset, zero],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [words, scale, minus_offset, zero],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@jit
def stored_number(word, SHIFT: tl.constexpr, FORMAT: tl.constexpr):
    """Returns in float32 the number that begins at bit SHIFT of each word."""
    if FORMAT.kind == "int4":
        return (word >> SHIFT & 15).to(tl.float32)
    elif FORMAT.kind == "fp8":
        return _fp8_value(word >> SHIFT & 255)
    else:
        return ((word << (24 - SHIFT)) >> 24).to(tl.float32)


@jit
def _pair(word, SHIFT: tl.constexpr, scale, minus_offset, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    first = tl.fma(stored_number(word, SHIFT, FORMAT) - zero, scale, minus_offset)
    second = tl.fma(stored_number(word, SHIFT + 16, FORMAT) - zero, scale, minus_offset)
    return tl.join(first, second).to(DTYPE)


@jit
def weight_pairs(words, scaling, HIGH: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Converts two words [..., 2] to 4 tensors of pairs of weights: two of the first word, two of the second. scaling:
    what `scaling_of` returned. HIGH: takes the high 4 bits of each byte."""
    PTX: tl.constexpr = FORMAT.convert.high if HIGH else FORMAT.convert.low
    scale = tl.broadcast_to(scaling[0][:, :, :, :, None], words.shape)
    minus_offset = tl.broadcast_to(scaling[1][:, :, :, :, None], words.shape)
    zero = tl.broadcast_to(scaling[2][:, :, :, :, None], words.shape)
    if PTX is None:
        SHIFT: tl.constexpr = 4 if HIGH and FORMAT.kind == "int4" else 0
        first, second = tl.split(words)
        scale, _ = tl.split(scale)
        minus_offset, _ = tl.split(minus_offset)
        zero, _ = tl.split(zero)
        return (
            _pair(first, SHIFT, scale, minus_offset, zero, FORMAT, DTYPE),
            _pair(first, SHIFT + 8, scale, minus_offset, zero, FORMAT, DTYPE),
            _pair(second, SHIFT, scale, minus_offset, zero, FORMAT, DTYPE),
            _pair(second, SHIFT + 8, scale, minus_offset, zero, FORMAT, DTYPE),
        )
    else:
        return _run_ptx(PTX, words, scale, minus_offset, zero, DTYPE)


@jit
def operand(pairs, B: tl.constexpr, ROWS: tl.constexpr):
    """Joins 4 pairs [4, 8, B, ROWS / 8, 2] to [B, ROWS, 32], in an order of columns that moves no number between
    threads."""
    v = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))  # [..., column, word, pair]
    return _ordered(tl.trans(v, 0, 1, 2, 3, 5, 6, 4), B, ROWS)


@jit
def _ordered(v, B: tl.constexpr, ROWS: tl.constexpr):
    """Reorders [4, 8, B, ROWS / 8, word, pair, column] to [B, ROWS, 32]. In Triton 3.6 a thread holds 4 neighbouring
    columns of a dot's operand, in later versions 2."""
    if IS_TRITON_3_6:
        return tl.reshape(tl.trans(v, 2, 3, 1, 5, 0, 4, 6), (B, ROWS, 32))
    else:
        return tl.reshape(tl.trans(v, 2, 3, 1, 4, 5, 0, 6), (B, ROWS, 32))


@jit
def x_operand(v, B: tl.constexpr, BM: tl.constexpr, DTYPE: tl.constexpr):
    """Reorders x [4, 8, B, BM / 8, 4 words or 8 numbers] to [B, 32, BM], with the columns in the order of `operand`."""
    if v.dtype == tl.int32:
        PTX: tl.constexpr = "mov.b32 $0, $2; mov.b32 $1, $3;"
        if tl.bfloat16 == DTYPE:
            first, second = tl.inline_asm_elementwise(
                PTX, "=r,=r,r,r", [v], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            first, second = tl.inline_asm_elementwise(
                PTX, "=r,=r,r,r", [v], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        v = tl.trans(tl.reshape(tl.join(first, second), (4, 8, B, BM // 8, 2, 2, 2)), 0, 1, 2, 3, 4, 6, 5)
    v = tl.reshape(v, (4, 8, B, BM // 8, 2, 2, 2))  # [..., word, pair, column]
    return tl.trans(_ordered(v, B, BM), 0, 2, 1)


@jit
def load_lanes(at, mask, COUNT: tl.constexpr, SIZE: tl.constexpr, READ_ONCE: tl.constexpr = False):
    """Loads COUNT neighbouring elements of SIZE bytes at pointers [4, 8, B, ROWS / 8, 1]. Triton 3.6 distributes the
    first axes over the threads of a warp, later versions the last ones before COUNT. READ_ONCE: L1 evicts the loaded
    cache lines first."""
    EVICT: tl.constexpr = "evict_first" if READ_ONCE else ""
    SHAPE: tl.constexpr = (4, 8, at.shape[2], at.shape[3], COUNT)
    ALL: tl.constexpr = COUNT * SIZE
    at = tl.broadcast_to(at, SHAPE) + tl.arange(0, COUNT)
    if not IS_TRITON_3_6:
        at = tl.trans(at, 3, 2, 1, 0, 4)
    at = tl.max_contiguous(tl.multiple_of(at, (ALL, ALL, ALL, ALL, ALL)), (1, 1, 1, 1, COUNT))
    if mask is None:
        v = tl.load(at, eviction_policy=EVICT)
    elif IS_TRITON_3_6:
        v = tl.load(at, mask=tl.broadcast_to(mask, SHAPE), other=0, eviction_policy=EVICT)
    else:
        mask = tl.trans(tl.broadcast_to(mask, SHAPE), 3, 2, 1, 0, 4)
        v = tl.load(at, mask=mask, other=0, eviction_policy=EVICT)
    if not IS_TRITON_3_6:
        v = tl.trans(v, 3, 2, 1, 0, 4)
    return v


@jit
def by_lane(rows, SPLITS: tl.constexpr, ROW_WARPS: tl.constexpr, COUNT: tl.constexpr):
    """Arranges COUNT values, one per row, by lane // 4 and warp: [1, 8, warps, COUNT / ROW_WARPS / 8, 1]."""
    EIGHTS: tl.constexpr = COUNT // ROW_WARPS // 8
    v = tl.broadcast_to(tl.reshape(rows, (1, ROW_WARPS, EIGHTS, 8)), (SPLITS, ROW_WARPS, EIGHTS, 8))
    return tl.trans(tl.reshape(v, (SPLITS * ROW_WARPS, EIGHTS, 8)), 2, 0, 1)[None, :, :, :, None]


# Scales.


@jit
def load_group_value(
    source, column, rows, inside, COLUMNS: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Loads for each column in float32 the value of its group of COLUMNS columns, of which PARTS are neighbours. They
    are the values from FIRST on of the COUNT neighbours that a row has in `source`."""
    STEP: tl.constexpr = COLUMNS * PARTS
    at = ((column // STEP).to(tl.int64) * FORMAT.rows + rows) * COUNT + FIRST + column % STEP // COLUMNS
    return tl.load(source + at, mask=inside, other=0).to(tl.float32)


@jit
def _load_scales(
    source, default, column, rows, COLUMNS: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, RAGGED: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Loads the COUNT values of the COLUMNS columns from `column` on: [4, 8, B, rows / 8, COUNT]; as 32-bit words
    [..., words] if they have 32 bits or more together, or 8 bits each. Returns `default` if `source` is None.

    Fewer than 4 bytes lie in the low bytes of their word: if they were loaded as bytes, the compiler would give the
    dots another order of columns than `_ordered` and move numbers between threads."""
    if source is None:
        return default
    else:
        WIDTH: tl.constexpr = source.dtype.element_ty.primitive_bitwidth
        BITS: tl.constexpr = COUNT * WIDTH
        group = (column // COLUMNS).to(tl.int64) * FORMAT.rows + rows
        mask = None
        if RAGGED:
            mask = column < K
        if BITS >= 32:
            WORDS: tl.constexpr = BITS // 32
            return load_lanes(source.to(tl.pointer_type(tl.int32), bitcast=True) + group * WORDS, mask, WORDS, 4)
        elif WIDTH == 8:
            # The aligned word around the bytes lies in the same allocation, or in its padding.
            byte = group * COUNT
            word = load_lanes(source.to(tl.pointer_type(tl.int32), bitcast=True) + byte // 4, mask, 1, 4)
            return word >> (byte % 4 * 8).to(tl.int32)
        else:
            return load_lanes(source + group * COUNT, mask, COUNT, WIDTH // 8)


@jit
def load_all_scales(weight, column, rows, K: tl.constexpr, RAGGED: tl.constexpr, FORMAT: tl.constexpr):
    """Loads scales and minimums, zeros, and super scales and super minimums of a step."""
    STEP: tl.constexpr = FORMAT.group * FORMAT.parts
    VALUES_PER_GROUP: tl.constexpr = 2 if FORMAT.has_minimum else 1
    scale = _load_scales(weight[1], None, column, rows, STEP, FORMAT.parts * VALUES_PER_GROUP, K, RAGGED, FORMAT)
    return (
        scale,
        _load_scales(weight[3], scale, column, rows, STEP, FORMAT.parts, K, RAGGED, FORMAT),
        _load_scales(weight[2], scale, column, rows, FORMAT.super_columns, VALUES_PER_GROUP, K, RAGGED, FORMAT),
    )


@jit
def _element(v, J: tl.constexpr, COUNT: tl.constexpr):
    """Returns element J of the last axis, which has COUNT elements."""
    if COUNT == 1:
        return tl.reshape(v, (v.shape[0], v.shape[1], v.shape[2], v.shape[3]))
    else:
        HALF: tl.constexpr = COUNT // 2
        pairs = tl.trans(tl.reshape(v, (v.shape[0], v.shape[1], v.shape[2], v.shape[3], 2, HALF)), 0, 1, 2, 3, 5, 4)
        first, second = tl.split(pairs)
        if J < HALF:
            return _element(first, J, HALF)
        else:
            return _element(second, J - HALF, HALF)


@jit
def _bits_of(v, J: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Returns value J of the COUNT values of WIDTH bits that `_load_scales` loaded as words, in the lowest bits of
    integers; bits above are of other values."""
    if COUNT * WIDTH < 32:
        return _element(v, 0, 1) >> (J * WIDTH)
    else:
        PER_WORD: tl.constexpr = 32 // WIDTH
        return _element(v, J // PER_WORD, COUNT // PER_WORD) >> (J % PER_WORD * WIDTH)


@jit
def _float_of_byte(v, J: tl.constexpr, COUNT: tl.constexpr):
    """Returns 2 ** 23 + byte J of the COUNT bytes that `_load_scales` loaded, in float32."""
    return ((_bits_of(v, J, COUNT, 8) & 255) | 0x4B000000).to(tl.float32, bitcast=True)


@jit
def _value(v, TYPE: tl.constexpr, J: tl.constexpr, COUNT: tl.constexpr):
    """Returns in float32 value J of the COUNT values of a type that `_load_scales` loaded."""
    WIDTH: tl.constexpr = TYPE.primitive_bitwidth
    if WIDTH > 8 and COUNT * WIDTH < 32:
        return _element(v, J, COUNT).to(tl.float32)
    elif WIDTH == 32:
        return _element(v, J, COUNT).to(tl.float32, bitcast=True)
    elif tl.bfloat16 == TYPE:
        return (_bits_of(v, J, COUNT, 16) << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == TYPE:
        return _bits_of(v, J, COUNT, 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif tl.int8 == TYPE:  # 2 ** 23 + 128 + value, exactly; faster than a conversion
        byte = (_bits_of(v, J, COUNT, 8) & 255) ^ 0x4B000080
        return byte.to(tl.float32, bitcast=True) - 8388736.0
    else:
        return _float_of_byte(v, J, COUNT) - 8388608.0


@jit
def _scale(scales, weight, IS_MINIMUM: tl.constexpr, J: tl.constexpr, FACTOR: tl.constexpr, FORMAT: tl.constexpr):
    """Returns in float32 the scale of group J of a step, or its minimum if IS_MINIMUM is 1, times FACTOR, a power of
    2."""
    VALUES_PER_GROUP: tl.constexpr = 2 if FORMAT.has_minimum else 1
    TYPE: tl.constexpr = weight[1].dtype.element_ty
    AT: tl.constexpr = IS_MINIMUM * FORMAT.parts + J
    COUNT: tl.constexpr = VALUES_PER_GROUP * FORMAT.parts
    if weight[2] is None:
        return _value(scales[0], TYPE, AT, COUNT) * FACTOR
    else:
        super_scale = _value(scales[2], weight[2].dtype.element_ty, IS_MINIMUM, VALUES_PER_GROUP) * FACTOR
        if tl.uint8 == TYPE:  # rounded once, like a product: 2 ** 23 * super_scale is exact
            return tl.fma(_float_of_byte(scales[0], AT, COUNT), super_scale, super_scale * -8388608.0)
        else:
            return _value(scales[0], TYPE, AT, COUNT) * super_scale


@jit
def _as_pair(v, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Rounds float32 values to DTYPE: for PTX as pairs of equal numbers in integers, else as float32."""
    if FORMAT.convert.low is None:
        return v.to(DTYPE).to(tl.float32)
    elif tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1
        )


@jit
def _select_group_of_16(even, odd, PARTS: tl.constexpr):
    """Groups of 16 columns: threads with lane % 4 < 2 take `even`, the others `odd`. Larger groups: `even`."""
    if PARTS == 8:
        return tl.where((tl.arange(0, 4) < 2)[:, None, None, None], even, odd)
    else:
        return even


@jit
def scaling_of(scales, weight, QUARTER: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Returns, for the columns of a quarter of a step that a thread holds, scale, negative offset and zero: [4, 8, B,
    rows / 8], in float32 or, for PTX, as pairs. The offset is minimum + zero * scale for 4-bit weights; for others the
    minimum or, for bfloat16 from int8 without zeros and minimums, 128 * scale."""
    PARTS: tl.constexpr = FORMAT.parts
    FIRST: tl.constexpr = QUARTER * PARTS // 4
    LAST: tl.constexpr = FIRST + (1 if PARTS == 8 else 0)
    MINUS: tl.constexpr = -FORMAT.convert.offset_factor
    SCALES_ZERO: tl.constexpr = FORMAT.kind == "int4" and FORMAT.has_zeros  # zeros of groups are part of the offset
    CONSTANT: tl.constexpr = FORMAT.zero + FORMAT.convert.folded_zero
    IN_OFFSET: tl.constexpr = SCALES_ZERO or CONSTANT != 0
    # Where the offset needs the plain scale, the factor comes last: offset_factor / scale_factor is subnormal.
    FACTOR: tl.constexpr = 1.0 if IN_OFFSET else FORMAT.convert.scale_factor
    scale = _select_group_of_16(
        _scale(scales, weight, 0, FIRST, FACTOR, FORMAT), _scale(scales, weight, 0, LAST, FACTOR, FORMAT), PARTS
    )
    zero = tl.full(scale.shape, CONSTANT, tl.float32)
    if FORMAT.has_zeros:
        ZERO: tl.constexpr = weight[3].dtype.element_ty
        zero = _select_group_of_16(_value(scales[1], ZERO, FIRST, PARTS), _value(scales[1], ZERO, LAST, PARTS), PARTS)
    minus_offset = tl.full(scale.shape, -0.0, tl.float32)
    if FORMAT.has_minimum:
        minus_offset = _select_group_of_16(
            _scale(scales, weight, 1, FIRST, MINUS, FORMAT), _scale(scales, weight, 1, LAST, MINUS, FORMAT), PARTS
        )
    if IN_OFFSET:
        in_offset = scale * MINUS * zero
        minus_offset = minus_offset + in_offset if FORMAT.has_minimum else in_offset
        scale *= FORMAT.convert.scale_factor
        zero = tl.zeros(scale.shape, tl.float32)
    if FORMAT.convert.low is not None:
        zero = tl.full(scale.shape, FORMAT.convert.minus_zero + 128 * 0x10001, tl.int32)
        if FORMAT.has_zeros and FORMAT.kind == "int8":
            bits = _select_group_of_16(_bits_of(scales[1], FIRST, PARTS, 8), _bits_of(scales[1], LAST, PARTS, 8), PARTS)
            zero = ((bits & 255) ^ 128) * 0x10001 + FORMAT.convert.minus_zero
    return _as_pair(scale, FORMAT, DTYPE), _as_pair(minus_offset, FORMAT, DTYPE), zero
