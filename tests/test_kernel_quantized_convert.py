"""The PTX that converts words of quantized weights, executed on the CPU for every byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from selfspec.kernels.quantized_convert import conversions, minus_base, ones

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


def execute(ptx: str, values: torch.Tensor, dtype: torch.dtype, less: int = 0) -> torch.Tensor:
    """What the text gives for bytes, 8 at a time; the second and third of 4 numbers stand for the third and second
    byte. less: the third register."""
    found = []
    for first, second in values.view(torch.int32).view(-1, 2).tolist():
        registers = {"$4": first & 0xFFFFFFFF, "$5": second & 0xFFFFFFFF, "$6": less & 0xFFFFFFFF}
        for operation, operands in re.findall(r"([a-z][\w.]+)\s+([^;]+);", re.sub(r"\.reg[^;]*;|[{}]", "", ptx)):
            target, *sources = (name.strip() for name in operands.split(","))
            arguments = [registers[name] if name in registers else int(name, 0) for name in sources]
            registers[target] = INSTRUCTIONS[operation](*arguments)
        found += [half for i in range(4) for half in (registers[f"${i}"] & 0xFFFF, registers[f"${i}"] >> 16)]
    return torch.tensor(found).to(torch.uint16).view(dtype).view(-1, 2, 2).transpose(1, 2).flatten()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_every_byte_becomes_its_exact_number(dtype: torch.dtype) -> None:
    for zero in (0, 7, 8, 15):
        for given, less in ((zero, 0), (None, zero * 0x10001 + minus_base(dtype))):
            low, high = conversions("int4", dtype, given) or ("", "")
            assert torch.equal(execute(low, BYTES, dtype, less).double(), (BYTES & 15).double() - zero)
            assert torch.equal(execute(high, BYTES, dtype, less).double(), (BYTES >> 4).double() - zero)
    for ptx in conversions("int8", dtype, 0) or ():
        assert torch.equal(execute(ptx, BYTES, dtype).double(), BYTES.view(torch.int8).double())
    numbers = BYTES.view(torch.float8_e4m3fn).double()
    for ptx in conversions("fp8", dtype, 0) or ():
        assert torch.equal(execute(ptx, BYTES, dtype).double()[~numbers.isnan()], numbers[~numbers.isnan()])
    assert (execute(ones(dtype) or "", BYTES, dtype) == 1).all()


def test_float32_states_need_no_ptx() -> None:
    assert conversions("int4", torch.float32, 8) is None and ones(torch.float32) is None
