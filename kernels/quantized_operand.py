"""Parts of `quantized_tile`: loads words, scales and x, converts them to operands of tensor cores, applies scales."""

from __future__ import annotations

from selfspec.kernels.triton_compat import IS_TRITON_3_6, jit, tl


@jit
def fp8_value(byte):
    """Returns the float32 values of e4m3 bytes, given as integers."""
    size = (byte & 127).to(tl.int32)
    value = ((size & 7) << 20 | (size >> 3) << 23).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where(byte > 127, -value, value)


# Operands of the tensor cores. Of 32 columns of a row a thread has 8: two words [..., 2] become 4 tensors of pairs
# [..., 2], whose last axis is the two neighbouring columns of a pair.


@jit
def _run_ptx(PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, words, dtype: tl.constexpr):
    """Runs PTX on `words`: a list of words and, for some formats, zeros to subtract. Returns 4 tensors of pairs. Triton
    takes no constexpr tuple of dtypes, so both calls are written out."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, words, dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, words, dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
        )


@jit
def _number(word, SHIFT: tl.constexpr, zeros, FORMAT: tl.constexpr):
    """Returns in float32 the number that begins at bit SHIFT of each word; of a 4-bit number subtracts its zero."""
    if FORMAT.kind == "int4":
        return (word >> SHIFT & 15).to(tl.float32) - zeros
    elif FORMAT.kind == "fp8":
        return fp8_value(word >> SHIFT & 255)
    else:
        return ((word << (24 - SHIFT)) >> 24).to(tl.float32)


@jit
def _pair(word, SHIFT: tl.constexpr, zeros, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    first, second = _number(word, SHIFT, zeros, FORMAT), _number(word, SHIFT + 16, zeros, FORMAT)
    return tl.join(first, second).to(DTYPE)


@jit
def number_pairs(words, zeros, HIGH: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Converts two words [..., 2] to 4 tensors of pairs: two of the first word, two of the second. HIGH: takes the high
    4 bits of each byte."""
    PTX: tl.constexpr = FORMAT.high if HIGH else FORMAT.low
    if PTX is None:
        SHIFT: tl.constexpr = 4 if HIGH and FORMAT.kind == "int4" else 0
        first, second = tl.split(words)
        if FORMAT.has_zeros:
            minus, _ = tl.split(tl.broadcast_to(zeros.to(tl.float32)[:, :, :, :, None], words.shape))
        else:
            minus = FORMAT.zero
        return (
            _pair(first, SHIFT, minus, FORMAT, DTYPE), _pair(first, SHIFT + 8, minus, FORMAT, DTYPE),
            _pair(second, SHIFT, minus, FORMAT, DTYPE), _pair(second, SHIFT + 8, minus, FORMAT, DTYPE),
        )  # fmt: skip
    elif FORMAT.has_zeros:
        minus = tl.broadcast_to((zeros * 0x10001 + FORMAT.minus_base)[:, :, :, :, None], words.shape)
        return _run_ptx(PTX, "=r,=r,=r,=r,r,r,r,r", [words, minus], DTYPE)
    else:
        return _run_ptx(PTX, "=r,=r,=r,=r,r,r", [words], DTYPE)


@jit
def one_pairs(words, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Returns pairs of ones, made from words so that the compiler gives x the same layout in both of its dots."""
    PTX: tl.constexpr = FORMAT.ones
    if PTX is None:
        one = tl.full(words.shape, 1.0, DTYPE)
        return one, one, one, one
    else:
        return _run_ptx(PTX, "=r,=r,=r,=r,r,r", [words], DTYPE)


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
        if tl.bfloat16 == DTYPE:
            first, second = tl.inline_asm_elementwise(
                "mov.b32 $0, $2; mov.b32 $1, $3;",
                "=r,=r,r,r",
                [v],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            first, second = tl.inline_asm_elementwise(
                "mov.b32 $0, $2; mov.b32 $1, $3;",
                "=r,=r,r,r",
                [v],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
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


@jit
def _to_sums(v, B: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr):
    """Broadcasts values of weight rows [4, 8, B, ROWS / 8], equal along the first axis, to the sums' [B, ROWS, BM]."""
    v = tl.reshape(tl.trans(v, 2, 3, 1, 0), (B, ROWS, 1, 4, 1))
    return tl.reshape(tl.broadcast_to(v, (B, ROWS, BM // 8, 4, 2)), (B, ROWS, BM))


# Scales.


@jit
def load_group_values(source, column, rows, inside, COLUMNS: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr):
    """Loads for each column the value of its group of COLUMNS columns; 0 if `source` is None. Of each row PARTS
    consecutive groups are neighbours in `source`."""
    if source is None:
        return tl.zeros(inside.shape, tl.int8)
    else:
        STEP: tl.constexpr = COLUMNS * PARTS
        at = ((column // STEP).to(tl.int64) * FORMAT.rows + rows) * PARTS + column % STEP // COLUMNS
        return tl.load(source + at, mask=inside, other=0)


@jit
def _load_scales(
    source, default, column, rows, COLUMNS: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, RAGGED: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Loads the values of the PARTS groups of the step from `column` on: [4, 8, B, rows / 8, PARTS] or, if they have 32
    bits or more together, as 32-bit words [..., words]. Returns `default` if `source` is None."""
    if source is None:
        return default
    else:
        BITS: tl.constexpr = PARTS * source.dtype.element_ty.primitive_bitwidth
        COUNT: tl.constexpr = BITS // 32 if BITS >= 32 else PARTS
        at = ((column // (COLUMNS * PARTS)).to(tl.int64) * FORMAT.rows + rows) * COUNT
        at = source.to(tl.pointer_type(tl.int32), bitcast=True) + at if BITS >= 32 else source + at
        if RAGGED:
            return load_lanes(at, column < K, COUNT, BITS // 8 // COUNT)
        else:
            return load_lanes(at, None, COUNT, BITS // 8 // COUNT)


@jit
def _load_zeros(source, default, column, rows, K: tl.constexpr, RAGGED: tl.constexpr, FORMAT: tl.constexpr):
    """Loads the zeros of a step as `_load_scales`. Fewer than 4 zeros of 4-bit groups come in the low bytes of a word
    [..., 1]: if they were loaded as bytes, the compiler would give the dots another order of columns than `_ordered`
    and move numbers between threads."""
    PARTS: tl.constexpr = FORMAT.parts
    if FORMAT.has_zeros and PARTS < 4:
        # The aligned word around the bytes lies in the same allocation, or in its padding.
        byte = ((column // (FORMAT.group * PARTS)).to(tl.int64) * FORMAT.rows + rows) * PARTS
        at = source.to(tl.pointer_type(tl.int32), bitcast=True) + byte // 4
        if RAGGED:
            return load_lanes(at, column < K, 1, 4) >> (byte % 4 * 8).to(tl.int32)
        else:
            return load_lanes(at, None, 1, 4) >> (byte % 4 * 8).to(tl.int32)
    else:
        return _load_scales(source, default, column, rows, FORMAT.group, PARTS, K, RAGGED, FORMAT)


@jit
def _pick(v, J: tl.constexpr, COUNT: tl.constexpr):
    """Returns element J of the last axis, which has COUNT elements."""
    if COUNT == 1:
        return tl.reshape(v, (v.shape[0], v.shape[1], v.shape[2], v.shape[3]))
    else:
        HALF: tl.constexpr = COUNT // 2
        pairs = tl.trans(tl.reshape(v, (v.shape[0], v.shape[1], v.shape[2], v.shape[3], 2, HALF)), 0, 1, 2, 3, 5, 4)
        first, second = tl.split(pairs)
        if J < HALF:
            return _pick(first, J, HALF)
        else:
            return _pick(second, J - HALF, HALF)


@jit
def zero_of(v, J: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the zero of 4-bit group J of a step [4, 8, B, rows / 8] from what `_load_zeros` loaded."""
    if FORMAT.parts < 4:
        return _pick(v, 0, 1) >> (8 * J) & 15
    else:
        return bits_of(v, J, FORMAT.parts, 8) & 15


@jit
def bits_of(v, J: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns value J of PARTS values of WIDTH bits, in the lowest bits of integers; bits above are of other values."""
    if PARTS * WIDTH < 32:
        return _pick(v, J, PARTS).to(tl.int32)
    else:
        PER_WORD: tl.constexpr = 32 // WIDTH
        return _pick(v, J // PER_WORD, PARTS // PER_WORD) >> (J % PER_WORD * WIDTH)


@jit
def _value(v, source, J: tl.constexpr, PARTS: tl.constexpr):
    """Returns in float32 value J of the PARTS values that were loaded from `source`."""
    TYPE: tl.constexpr = source.dtype.element_ty
    WIDTH: tl.constexpr = TYPE.primitive_bitwidth
    if PARTS * WIDTH < 32:
        return _pick(v, J, PARTS).to(tl.float32)
    elif WIDTH == 32:
        return _pick(v, J, PARTS).to(tl.float32, bitcast=True)
    elif tl.bfloat16 == TYPE:
        return (bits_of(v, J, PARTS, 16) << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == TYPE:
        return bits_of(v, J, PARTS, 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif tl.int8 == TYPE:  # 2 ** 23 + 128 + value, exactly; faster than a conversion
        byte = (bits_of(v, J, PARTS, 8) & 255) ^ 0x4B000080
        return byte.to(tl.float32, bitcast=True) - 8388736.0
    else:
        return (bits_of(v, J, PARTS, 8) & 255).to(tl.float32)


@jit
def load_all_scales(weight, column, rows, K: tl.constexpr, RAGGED: tl.constexpr, FORMAT: tl.constexpr):
    """Loads scales, zeros, minimums, super scales and super minimums of a step."""
    GROUP: tl.constexpr = FORMAT.group
    PARTS: tl.constexpr = FORMAT.parts
    SUPER: tl.constexpr = FORMAT.super_columns
    scale = _load_scales(weight[1], None, column, rows, GROUP, PARTS, K, RAGGED, FORMAT)
    return (
        scale,
        _load_zeros(weight[3], scale, column, rows, K, RAGGED, FORMAT),
        _load_scales(weight[4], scale, column, rows, GROUP, PARTS, K, RAGGED, FORMAT),
        _load_scales(weight[2], scale, column, rows, SUPER, 1, K, RAGGED, FORMAT),
        _load_scales(weight[5], scale, column, rows, SUPER, 1, K, RAGGED, FORMAT),
    )


@jit
def add_scaled(sums, part, x_sums, scales, J: tl.constexpr, weight, FORMAT: tl.constexpr):
    """Returns sums + scale * part - (scale * zero + minimum) * x_sums, for group J of a step. Multiply-adds are fused
    explicitly, so that every compilation rounds alike."""
    PARTS: tl.constexpr = FORMAT.parts
    B: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    BM: tl.constexpr = sums.shape[2]
    scale = _value(scales[0], weight[1], J, PARTS)
    if weight[2] is not None:
        scale = scale * _value(scales[3], weight[2], 0, 1)
    sums = tl.fma(part, _to_sums(scale, B, ROWS, BM), sums)
    if FORMAT.has_offsets:
        offset = tl.zeros(scale.shape, tl.float32)
        if weight[4] is not None:
            offset = -_value(scales[2], weight[4], J, PARTS)
            if weight[5] is not None:
                offset = offset * _value(scales[4], weight[5], 0, 1)
        if weight[3] is not None and not FORMAT.has_zeros:
            offset = tl.fma(-scale, _value(scales[1], weight[3], J, PARTS), offset)
        sums = tl.fma(x_sums, _to_sums(offset, B, ROWS, BM), sums)
    return sums
