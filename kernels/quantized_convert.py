"""Inline PTX that turns words of quantized weights into exact numbers of the activations' 16-bit dtype.

Each text takes two words of a row ($4, $5) and gives 4 pairs of neighbouring columns ($0 to $3), two of each word; it
runs on sm_80 and newer. The columns of a pair are 16 bits apart (see `quantized_weight`), so that one instruction takes
both out of the word and puts them into a constant: a number below 128 in the lower bits of 128.0 (bfloat16) or 1024.0
(float16) is 128 + number, or 1024 + number. A fused multiply-add subtracts the constant and the zero, because bfloat16
has no plain addition before sm_90. All results are exact.
"""

from __future__ import annotations

import torch

_ONE = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
_BASE = {torch.bfloat16: (0x4300, 128), torch.float16: (0x6400, 1024)}  # bits and value of the number that is filled
_AND_OR, _AND_XOR = 0xEA, 0x6A  # truth tables of lop3: (a & b) | c, (a & b) ^ c


def conversions(kind: str, dtype: torch.dtype, zero: int | None) -> tuple[str, str] | None:
    """PTX for 4 bits: for the low and for the high 4 bits, less `zero`; None: less what `minus_base` and the zero give,
    in $6. For 8 bits the same text twice. None for float32."""
    if dtype not in _ONE:
        return None
    if kind == "int4":
        return _int4(dtype, zero, 0), _int4(dtype, zero, 4)
    text = _fp8(dtype) if kind == "fp8" else _int8_bfloat16() if dtype == torch.bfloat16 else _int8_float16()
    return text, text


def minus_base(dtype: torch.dtype) -> int:
    """The bits of -base, twice, as a signed number: adding `zero` to both halves gives -(base + zero)."""
    return _twice(0x8000 | _BASE.get(dtype, (0, 0))[0]) - 2**32


def ones(dtype: torch.dtype) -> str | None:
    """PTX that gives 4 pairs of ones for two words. None for float32."""
    return _block("", *(f"mov.b32 ${i}, {_twice(_ONE[dtype]):#x};" for i in range(4))) if dtype in _ONE else None


def _twice(bits: int) -> int:
    return bits * 0x10001


def _bits(value: float, dtype: torch.dtype) -> int:
    """Two copies of a number in one register."""
    return _twice(int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF)


def _lop3(result: str, source: str, mask: int, constant: int, table: int = _AND_OR) -> str:
    return f"lop3.b32 {result}, {source}, {_twice(mask):#x}, {_twice(constant):#x}, {table:#x};"


def _multiply_add(result: str, a: str, b: str, c: str, dtype: torch.dtype) -> str:
    return f"fma.rn.{'bf16x2' if dtype == torch.bfloat16 else 'f16x2'} {result}, {a}, {b}, {c};"


def _block(registers: str, *instructions: str) -> str:
    return "{ " + (f".reg .b32 {registers}; " if registers else "") + " ".join(instructions) + " }"


def _int4(dtype: torch.dtype, zero: int | None, shift: int) -> str:
    bits, base = _BASE[dtype]
    text = [f"mov.b32 o, {_twice(_ONE[dtype]):#x};"]
    text.append("mov.b32 z, $6;" if zero is None else f"mov.b32 z, {_bits(-base - zero, dtype):#x};")
    for word in range(2):
        for pair in range(2):
            text += [f"shr.b32 t, ${4 + word}, {8 * pair + shift};", _lop3("t", "t", 0xF, bits)]
            text.append(_multiply_add(f"${2 * word + pair}", "t", "o", "z", dtype))
    return _block("t, o, z", *text)


def _int8_bfloat16() -> str:
    """(128 + lower 7 bits) - (128, or 256 where the sign bit is set)."""
    dtype = torch.bfloat16
    text = [f"mov.b32 m, {_bits(-1, dtype):#x};"]
    for word in range(2):
        for pair in range(2):
            text += [
                f"shr.b32 t, ${4 + word}, {8 * pair};",
                _lop3("a", "t", 0x7F, 0x4300),
                _lop3("s", "t", 0x80, 0x4300),
            ]
            text.append(_multiply_add(f"${2 * word + pair}", "s", "m", "a", dtype))
    return _block("t, a, s, m", *text)


def _int8_float16() -> str:
    """(1024 + q + 128) - 1152: the sign bit is inverted."""
    dtype = torch.float16
    text = [f"mov.b32 o, {_twice(_ONE[dtype]):#x}; mov.b32 z, {_bits(-1152, dtype):#x};"]
    for word in range(2):
        for pair in range(2):
            text += [f"shr.b32 t, ${4 + word}, {8 * pair};", _lop3("t", "t", 0xFF, 0x6480, _AND_XOR)]
            text.append(_multiply_add(f"${2 * word + pair}", "t", "o", "z", dtype))
    return _block("t, o, z", *text)


def _fp8(dtype: torch.dtype) -> str:
    """e4m3: its exponent and fraction at their place in a 16-bit number, times the ratio of the exponents' offsets. A
    NaN would become 480 or -480; readers of checkpoints refuse NaNs."""
    shift, mask, ratio = (4, 0x07F0, 2.0**120) if dtype == torch.bfloat16 else (1, 0x3F80, 2.0**8)
    text = [f"mov.b32 m, {_bits(ratio, dtype):#x}; mov.b32 z, 0x80008000;"]
    for word in range(2):
        for pair in range(2):
            text.append(f"shl.b32 t, ${4 + word}, {8 - 8 * pair}; and.b32 s, t, 0x80008000; shr.b32 t, t, {shift};")
            text.append(f"and.b32 t, t, {_twice(mask):#x}; or.b32 t, s, t;")
            text.append(_multiply_add(f"${2 * word + pair}", "t", "m", "z", dtype))
    return _block("t, s, m, z", *text)
