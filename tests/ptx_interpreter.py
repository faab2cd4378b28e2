"""Executes inline PTX and products of bfloat16 in Triton's interpreter, bit by bit, so that kernels run on a CPU with
the instructions that a GPU executes."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

Words = np.ndarray  # uint32: registers of all threads


def halves_of(words: Words, is_bfloat16: bool) -> np.ndarray:
    """The numbers in both halves of registers, in float64: [..., 2]."""
    halves = np.stack([words & 0xFFFF, words >> 16], -1)
    if is_bfloat16:
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return halves.astype(np.uint16).view(np.float16).astype(np.float64)


def packed(halves: np.ndarray, is_bfloat16: bool) -> Words:
    """Rounds numbers [..., 2] to the nearest 16-bit ones and packs them into registers."""
    dtype = torch.bfloat16 if is_bfloat16 else torch.float16
    bits = torch.from_numpy(np.ascontiguousarray(halves)).to(dtype).view(torch.int16).numpy().astype(np.uint16)
    return bits[..., 0].astype(np.uint32) | bits[..., 1].astype(np.uint32) << np.uint32(16)


def multiply_add(is_bfloat16: bool) -> Callable[..., Words]:
    """Rounded once: float64 holds a product of two 16-bit numbers, and here the sum, exactly."""

    def fma(*registers: Words) -> Words:
        a, b, c = (halves_of(words, is_bfloat16) for words in registers)
        return packed(a * b + c, is_bfloat16)

    return fma


def converted(is_bfloat16: bool) -> Callable[..., Words]:
    return lambda high, low: packed(np.stack([low.view(np.float32), high.view(np.float32)], -1), is_bfloat16)


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    result = np.zeros_like(a)
    for index in range(8):
        if int(table.flat[0]) >> index & 1:
            result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "lop3.b32": lop3,
    "fma.rn.bf16x2": multiply_add(True),
    "fma.rn.f16x2": multiply_add(False),
    "cvt.rn.bf16x2.f32": converted(True),
    "cvt.rn.f16x2.f32": converted(False),
}


def execute(ptx: str, registers: dict[str, Words]) -> None:
    """Executes the instructions on `registers`, and adds the registers that they write."""
    like = next(iter(registers.values()))
    for operation, operands in re.findall(r"([a-z][\w.]+)\s+([^;]+);", re.sub(r"\.reg[^;]*;|[{}]", "", ptx)):
        target, *sources = (name.strip() for name in operands.split(","))
        values = [registers[name] if name in registers else np.full_like(like, int(name, 0)) for name in sources]
        with np.errstate(all="ignore"):
            registers[target] = INSTRUCTIONS[operation](*values)


def patch_interpreter_to_run_ptx(patch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def inline_asm(_: Any, ptx: str, constraints: str, args: Any, types: Any, __: bool, pack: int) -> Any:
        results = constraints.count("=r")
        names = (f"${index}" for index in range(results, constraints.count("r")))
        words = [np.ascontiguousarray(arg.data).view(np.uint32).reshape(-1, pack) for arg in args]
        registers = {next(names): column for of_arg in words for column in of_arg.T.copy()}
        execute(ptx, registers)
        found = []
        for index, of_result in enumerate(types):
            scalar = getattr(of_result, "scalar", of_result)
            data = np.ascontiguousarray(registers[f"${index}"])
            width = {16: np.uint16, 32: np.int32}[scalar.primitive_bitwidth]
            data = data.view(width).reshape(args[0].data.shape)
            found.append(handle(data.view(np.float16) if scalar.name == "fp16" else data, scalar))
        return SimpleNamespace(get_result=found.__getitem__)

    def exact(operand: Any) -> np.ndarray:
        if operand.dtype.scalar.name == "bf16":  # stored as bits
            return (operand.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return operand.data.astype(np.float64)

    def dot(_: Any, a: Any, b: Any, sums: Any, *__: Any) -> Any:
        return handle((exact(a) @ exact(b) + sums.data).astype(np.float32), sums.dtype.scalar)

    def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
        return handle((a.data.astype(np.float64) * b.data + c.data).astype(np.float32), a.dtype)

    patch.setattr(builder, "create_inline_asm", inline_asm, raising=False)
    patch.setattr(builder, "create_dot", dot)
    patch.setattr(builder, "create_fma", fma)
