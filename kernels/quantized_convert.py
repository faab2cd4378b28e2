"""Inline PTX that turns words of quantized weights into weights of the activations' 16-bit dtype, rounded once.

Each PTX text takes two words of a row ($4, $5) and gives 4 pairs of neighbouring columns ($0 to $3), two of each word;
it runs on sm_80 and newer. The columns of a pair are 16 bits apart (see `quantized_weight`), so that one instruction
takes both out of a word. Further operands are pairs of two equal numbers: a scale ($6), the negative offset ($8) and,
for some 8-bit weights, a negative zero ($10); $7, $9 and $11 repeat them:

    weight = (number + $10) * $6 + $8

bfloat16: an integer below 256 in the lowest 8 bits of a bfloat16 is the number integer * 2 ** -133, since those bits
are its fraction and the lowest bit of its exponent. A number that is 4 bits further up is 16 times as large. So one
fused multiply-add makes a weight of it. $6 would be scale * 2 ** 133, above the largest bfloat16 for scales from 1/32
on. It is divided by 2 ** 64, so weights are 2 ** 64 too small, and `quantized_sums` multiplies the sums by it.

float16: an integer below 1024 in the lower bits of 1024.0 is 1024 + integer, from which 1024 is subtracted first; of
int8, whose sign bit is inverted, 1152.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SIGN = 0x8000  # of one number
_DIVIDED = 2.0**64  # by which bfloat16 weights are divided
_AND_OR, _AND_XOR = 0xEA, 0x6A  # truth tables of lop3: (a & b) | c, (a & b) ^ c


@dataclass(frozen=True)
class Conversion:
    """PTX for one kind of weights and one dtype of activations, and the factors of scale, offset and sums."""

    low: str | None  # first half of a unit: the low 4 bits of each byte. None: Triton converts, all factors are 1
    high: str | None  # second half of a unit
    scale_factor: float  # $6 is scale * scale_factor
    offset_factor: float  # $8 is -offset * offset_factor
    sum_factor: float  # by which the sums are multiplied
    folded_zero: int  # 128 if the PTX reads int8 as number + 128, and $8 must also subtract 128 * scale; else 0
    minus_zero: int  # $10 for the zero -128, in both halves; for another zero add (zero + 128) * 0x10001


def conversion(kind: str, dtype: torch.dtype, subtracts: bool) -> Conversion:
    """kind: int4, int8 or fp8. subtracts (int8 only): $10 is added to the numbers before they are scaled; otherwise
    zeros are part of the offset."""
    if dtype == torch.bfloat16:
        low, high = (_bfloat16(kind, subtracts, is_high) for is_high in (False, True))
        factor = 2.0**120 if kind == "fp8" else 2.0**133
        zero = 128 if kind == "int8" and not subtracts else 0
        return Conversion(low, high, factor / _DIVIDED, 1 / _DIVIDED, _DIVIDED, zero, _twice(_SIGN) - 2**32)
    if dtype == torch.float16:
        low, high = (_float16(kind, subtracts, shift) for shift in (0, 4))
        minus_zero = _twice(_SIGN | 0x6400) - 2**32
        return Conversion(low, high, 2.0**8 if kind == "fp8" else 1.0, 1.0, 1.0, 0, minus_zero)
    return Conversion(None, None, 1.0, 1.0, 1.0, 0, 0)


def _twice(bits: int) -> int:
    return bits * 0x10001


def _bits(value: float, dtype: torch.dtype) -> int:
    """Two copies of a number in one register."""
    return _twice(int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF)


def _lop3(result: str, source: str, mask: int, constant: int, table: int) -> str:
    return f"lop3.b32 {result}, {source}, {_twice(mask):#x}, {_twice(constant):#x}, {table:#x};"


def _multiply_add(result: str, a: str, b: str, c: str, dtype: torch.dtype) -> str:
    return f"fma.rn.{'bf16x2' if dtype == torch.bfloat16 else 'f16x2'} {result}, {a}, {b}, {c};"


def _block(registers: str, instructions: list[str]) -> str:
    return "{ " + f".reg .b32 {registers}; " + " ".join(instructions) + " }"


def _bfloat16(kind: str, subtracts: bool, is_high: bool) -> str:
    dtype, scale = torch.bfloat16, "$6"
    text = [f"mov.b32 o, {_bits(1.0, dtype):#x};"]
    if kind == "int4" and is_high:
        scale = "m"
        text.append(f"mov.b32 n, {_bits(-0.0, dtype):#x}; mov.b32 m, {_bits(1 / 16, dtype):#x};")
        text.append(_multiply_add("m", "$6", "m", "n", dtype))
    for word in range(2):
        for pair in range(2):
            source = f"${4 + word}"
            if pair and kind != "fp8":
                text.append(f"shr.b32 u, {source}, 8;")
                source = "u"
            if kind == "fp8":
                text.append(_fp8(source, pair, 4, 0x07F0))
            elif kind == "int4":
                text.append(f"and.b32 t, {source}, {_twice(0xF0 if is_high else 0xF):#x};")
            else:
                text.append(_lop3("t", source, 0xFF, 0x80, _AND_XOR))
            if subtracts:
                text.append(_multiply_add("t", "t", "o", "$10", dtype))
            text.append(_multiply_add(f"${2 * word + pair}", "t", scale, "$8", dtype))
    return _block("o, m, n, t, u, s", text)


def _float16(kind: str, subtracts: bool, shift: int) -> str:
    dtype, zero = torch.float16, 1024 if kind == "int4" else 1152
    text = [f"mov.b32 o, {_bits(1.0, dtype):#x};"]
    text.append("mov.b32 z, $10;" if subtracts else f"mov.b32 z, {_bits(-zero, dtype):#x};")
    for word in range(2):
        for pair in range(2):
            source = f"${4 + word}"
            if kind == "fp8":
                text.append(_fp8(source, pair, 1, 0x3F80))
            else:
                text.append(f"shr.b32 t, {source}, {8 * pair + (shift if kind == 'int4' else 0)};")
                mask, constant, table = (0xF, 0x6400, _AND_OR) if kind == "int4" else (0xFF, 0x6480, _AND_XOR)
                text += [_lop3("t", "t", mask, constant, table), _multiply_add("t", "t", "o", "z", dtype)]
            text.append(_multiply_add(f"${2 * word + pair}", "t", "$6", "$8", dtype))
    return _block("o, s, t, z", text)


def _fp8(source: str, pair: int, shift: int, mask: int) -> str:
    """e4m3: its exponent and fraction at their place in a 16-bit number. The ratio of the exponents' offsets is part of
    the scale. A NaN would become 480 or -480; readers of checkpoints refuse NaNs."""
    return (
        f"shl.b32 t, {source}, {8 - 8 * pair}; and.b32 s, t, {_twice(_SIGN):#x}; shr.b32 t, t, {shift}; "
        f"and.b32 t, t, {_twice(mask):#x}; or.b32 t, s, t;"
    )
