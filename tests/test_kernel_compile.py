"""Every kernel compiles for the GPUs it is meant for, and fits the shared memory of the smallest of them."""

from __future__ import annotations

import importlib.util

import pytest

from tests.compiling import Compiled, compile_op

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.xdist_group("compiling"),
]

# Each has a file tests/launches_<op>.py with `launches()`: pairs of a name and a call of a launcher.
OPS = ["linear", "path_attention", "head", "choose"]
STACK_LIMIT = 16  # LLVM reserves a few bytes at times and leaves them unused; spilled registers take more
SHARED_LIMITS = {80: 163, 86: 99, 89: 99, 90: 227}  # KB that a program may have


@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_and_fit_the_smallest_gpus(op: str) -> None:
    check(compile_op(op, 86))


@pytest.mark.parametrize("arch", [80, 86, 89])
def test_whole_cycles_compile_and_fit(arch: int) -> None:
    """With every kernel of decoding; more of their variants are run by the tests that need a GPU."""
    check(compile_op("cycle", arch))


def test_attention_of_many_rows_compiles_and_fits() -> None:
    check(compile_op("path_attention", 90, "many rows"))


def check(compiled: list[Compiled]) -> None:
    assert compiled
    too_large = [kernel for kernel in compiled if kernel.shared > 1024 * SHARED_LIMITS[kernel.arch]]
    assert not too_large
    # Cosines of large angles are computed with an array of their own.
    spilling = [kernel for kernel in compiled if kernel.stack > STACK_LIMIT and kernel.kernel != "_enter"]
    assert not spilling
