"""The PTX that converts words of quantized weights, executed on the CPU for every byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from selfspec.kernels.quantized_convert import conversion

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
BYTES = torch.arange(256, dtype=torch.uint8)


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Bit by bit the value of the truth table, whose index has the bits of a, b and c."""
    bits = (table >> (a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1) & 1 for i in range(32))
    return sum(bit << i for i, bit in enumerate(bits))


def multiply_add(dtype: torch.dtype, a: int, b: int, c: int) -> int:
    """Of two numbers in each register; rounded once, since float64 holds the exact result here."""
    x, y, z = (torch.tensor([v & 0xFFFF, v >> 16]).to(torch.uint16).view(dtype).double() for v in (a, b, c))
    low, high = (x * y + z).to(dtype).view(torch.int16).tolist()
    return (high & 0xFFFF) << 16 | low & 0xFFFF


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.b32": lambda a, b: a >> b,
    "lop3.b32": lop3,
    "fma.rn.bf16x2": partial(multiply_add, BFLOAT16),
    "fma.rn.f16x2": partial(multiply_add, FLOAT16),
}


def execute(ptx: str, values: torch.Tensor, dtype: torch.dtype, *pairs: int) -> torch.Tensor:
    """What the text gives for bytes, 8 at a time; the second and third of 4 numbers stand for the third and second
    byte. pairs: the registers after the words, each of which is there twice."""
    operands = {f"${6 + index}": pairs[index // 2] & 0xFFFFFFFF for index in range(2 * len(pairs))}
    found = []
    for first, second in values.view(torch.int32).view(-1, 2).tolist():
        registers = operands | {"$4": first & 0xFFFFFFFF, "$5": second & 0xFFFFFFFF}
        for operation, arguments in re.findall(r"([a-z][\w.]+)\s+([^;]+);", re.sub(r"\.reg[^;]*;|[{}]", "", ptx)):
            target, *sources = (name.strip() for name in arguments.split(","))
            taken = [registers[name] if name in registers else int(name, 0) for name in sources]
            registers[target] = INSTRUCTIONS[operation](*taken)
        found += [half for i in range(4) for half in (registers[f"${i}"] & 0xFFFF, registers[f"${i}"] >> 16)]
    return torch.tensor(found).to(torch.uint16).view(dtype).view(-1, 2, 2).transpose(1, 2).flatten()


def pair(value: float, dtype: torch.dtype) -> int:
    """Two copies of a number, rounded to dtype, in one register."""
    return (int(torch.tensor(float(value), dtype=torch.float64).to(dtype).view(torch.int16)) & 0xFFFF) * 0x10001


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (0.0123, 0.0), (-0.00371, 0.0456), (0.0301, -0.21)])
def test_every_byte_becomes_its_weight_rounded_once(dtype: torch.dtype, scale: float, offset: float) -> None:
    def check(kind: str, numbers: torch.Tensor, is_high: bool, zero: int | None = None) -> None:
        convert = conversion(kind, dtype, subtracts=zero is not None)
        ptx = (convert.high if is_high else convert.low) or ""
        folded = convert.folded_zero * rounded
        factors = pair(scale * convert.scale_factor, dtype), pair(-(offset + folded) * convert.offset_factor, dtype)
        minus_zero = 0 if zero is None else (zero + 128) * 0x10001 + convert.minus_zero
        weights = execute(ptx, BYTES, dtype, *factors, minus_zero).double() * convert.sum_factor
        expected = (numbers - (zero or 0)) * rounded - torch.tensor(float(offset + folded)).to(dtype).double() + folded
        valid = numbers.isfinite()
        assert torch.equal(weights[valid].to(dtype), expected[valid].to(dtype)), (kind, is_high, zero)

    rounded = torch.tensor(scale, dtype=torch.float64).to(dtype).double()
    check("int4", (BYTES & 15).double(), False)
    check("int4", (BYTES >> 4).double(), True)
    if offset == 0:  # int8 with an offset subtracts zeros
        check("int8", BYTES.view(torch.int8).double(), False)
    for zero in (-128, -3, 0, 127):
        check("int8", BYTES.view(torch.int8).double(), False, zero)
    check("fp8", BYTES.view(torch.float8_e4m3fn).double(), False)


def test_float32_states_need_no_ptx() -> None:
    assert conversion("int4", torch.float32, False).low is None
