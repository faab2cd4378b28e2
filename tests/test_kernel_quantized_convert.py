"""The PTX that converts words of quantized weights, executed on the CPU for every byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from selfspec.kernels.quantized_convert import conversion
from tests.ptx_interpreter import execute

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
BYTES = torch.arange(256, dtype=torch.uint8)


def converted(ptx: str, values: torch.Tensor, dtype: torch.dtype, *pairs: int) -> torch.Tensor:
    """What the text gives for bytes, 8 at a time; the second and third of 4 numbers stand for the third and second
    byte. pairs: the registers after the words, each of which is there twice."""
    words = values.view(torch.int32).numpy().view(np.uint32).reshape(-1, 2)
    registers = {"$4": words[:, 0], "$5": words[:, 1]}
    for index, bits in enumerate(pairs):
        value = np.full(len(words), bits & 0xFFFFFFFF, np.uint32)
        registers |= {f"${6 + 2 * index}": value, f"${7 + 2 * index}": value}
    execute(ptx, registers)
    found = np.stack([registers[f"${index}"] for index in range(4)], 1)  # [groups of 8 bytes, pairs]
    halves = torch.from_numpy(found.astype(np.uint32).view(np.int16).copy()).view(dtype)
    return halves.view(-1, 2, 2).transpose(1, 2).flatten()


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
        weights = converted(ptx, BYTES, dtype, *factors, minus_zero).double() * convert.sum_factor
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
