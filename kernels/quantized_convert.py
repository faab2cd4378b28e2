"""Inline PTX that turns the stored bytes of quantized weights into exact numbers of the activations' 16-bit dtype.

Each text takes one register of 4 bytes ($2) and gives two registers of two numbers each ($0, $1), in order, and runs on
sm_80 and newer. A byte below 128 in the lower byte of a number with the right upper byte is 128 + byte in bfloat16
(0x43) and 1024 + byte in float16 (0x64); subtracting the constant gives the byte's value. The fused multiply-add
subtracts, because bfloat16 has no plain addition before sm_90. All results are exact.
"""

from __future__ import annotations

import torch

_ONES = {torch.bfloat16: 0x3F803F80, torch.float16: 0x3C003C00}
_BIAS = 16
_UPPER_BYTES = {torch.bfloat16: 0x43434343, torch.float16: 0x64646464}


def conversions(kind: str, dtype: torch.dtype, zero: int) -> tuple[str, str] | None:
    """PTX for the bytes of a weight: for 4 bits a text for the low and one for the high 4 bits, less `zero`; for 8 bits
    the same text twice. None for float32."""
    if dtype not in _ONES:
        return None
    if kind == "int4" and dtype == torch.bfloat16 and zero == -_BIAS:
        return _biased_int4("shl.b32 t, $2, 3;"), _biased_int4("shr.b32 t, $2, 1;")
    if kind == "int4":
        return _int4("mov.b32 t, $2;", dtype, zero), _int4("shr.b32 t, $2, 4;", dtype, zero)
    text = _fp8(dtype) if kind == "fp8" else _int8_bfloat16() if dtype == torch.bfloat16 else _int8_float16()
    return text, text


def bias(kind: str, has_offsets: bool) -> int:
    """A number to add to all numbers of a weight whose groups have offsets, which then hold it: 16 + q needs no
    subtraction in bfloat16. The sums stay precise, because 16 is of the size of q."""
    return _BIAS if kind == "int4" and has_offsets else 0


def ones(dtype: torch.dtype) -> str | None:
    """PTX that gives 1 for every byte. None for float32."""
    return f"mov.b32 $0, {_ONES[dtype]:#x}; mov.b32 $1, {_ONES[dtype]:#x};" if dtype in _ONES else None


def _bits(value: float, dtype: torch.dtype) -> int:
    """Two copies of a number in one register."""
    return (int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF) * 0x10001


def _widen(source: str, low: str, high: str, dtype: torch.dtype) -> str:
    """Puts the dtype's upper byte above each byte of `source`."""
    upper = _UPPER_BYTES[dtype]
    return f"prmt.b32 {low}, {source}, {upper:#x}, 0x4140; prmt.b32 {high}, {source}, {upper:#x}, 0x4342;"


def _multiply_add(result: str, a: str, b: str, c: str, dtype: torch.dtype) -> str:
    return f"fma.rn.{'bf16x2' if dtype == torch.bfloat16 else 'f16x2'} {result}, {a}, {b}, {c};"


def _block(registers: str, *instructions: str) -> str:
    return "{ .reg .b32 " + registers + "; " + " ".join(instructions) + " }"


def _int4(shift: str, dtype: torch.dtype, zero: int) -> str:
    offset = 128 if dtype == torch.bfloat16 else 1024
    return _block(
        "t, a, b, o, z",
        f"{shift} and.b32 t, t, 0x0f0f0f0f;",
        _widen("t", "a", "b", dtype),
        f"mov.b32 o, {_ONES[dtype]:#x}; mov.b32 z, {_bits(-offset - zero, dtype):#x};",
        _multiply_add("$0", "a", "o", "z", dtype),
        _multiply_add("$1", "b", "o", "z", dtype),
    )


def _biased_int4(shift: str) -> str:
    """16 + q in bfloat16: q is bits 3 to 6 of the lower byte 0x80, below the upper byte 0x41."""
    return _block(
        "t",
        f"{shift} and.b32 t, t, 0x78787878; or.b32 t, t, 0x80808080;",
        "prmt.b32 $0, t, 0x41414141, 0x4140; prmt.b32 $1, t, 0x41414141, 0x4342;",
    )


def _int8_bfloat16() -> str:
    """(128 + lower 7 bits) - (128, or 256 where the sign bit is set)."""
    dtype = torch.bfloat16
    return _block(
        "l, s, a, b, c, d, m",
        "and.b32 l, $2, 0x7f7f7f7f; and.b32 s, $2, 0x80808080;",
        _widen("l", "a", "b", dtype),
        _widen("s", "c", "d", dtype),
        f"mov.b32 m, {_bits(-1, dtype):#x};",
        _multiply_add("$0", "c", "m", "a", dtype),
        _multiply_add("$1", "d", "m", "b", dtype),
    )


def _int8_float16() -> str:
    """(1024 + q + 128) - 1152."""
    dtype = torch.float16
    return _block(
        "t, a, b, o, z",
        "xor.b32 t, $2, 0x80808080;",
        _widen("t", "a", "b", dtype),
        f"mov.b32 o, {_ONES[dtype]:#x}; mov.b32 z, {_bits(-1152, dtype):#x};",
        _multiply_add("$0", "a", "o", "z", dtype),
        _multiply_add("$1", "b", "o", "z", dtype),
    )


def _fp8(dtype: torch.dtype) -> str:
    """e4m3: its exponent and fraction at their place in a 16-bit number, times the ratio of the exponents' offsets. A
    NaN would become 480 or -480; readers of checkpoints refuse NaNs."""
    shift, mask, ratio = (4, 0x07F007F0, 2.0**120) if dtype == torch.bfloat16 else (1, 0x3F803F80, 2.0**8)
    return _block(
        "a, b, s, t, m, z",
        "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;",
        f"and.b32 s, a, 0x80008000; shr.b32 t, a, {shift}; and.b32 t, t, {mask:#x}; or.b32 a, s, t;",
        f"and.b32 s, b, 0x80008000; shr.b32 t, b, {shift}; and.b32 t, t, {mask:#x}; or.b32 b, s, t;",
        f"mov.b32 m, {_bits(ratio, dtype):#x}; mov.b32 z, 0x80008000;",
        _multiply_add("$0", "a", "m", "z", dtype),
        _multiply_add("$1", "b", "m", "z", dtype),
    )
