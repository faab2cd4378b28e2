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
OPS = ["gemm", "tree_attention", "lm_head_topk", "sample"]
STACK_LIMIT = 32  # bytes: what a few registers or the cosine of a large angle take; arrays that spill take more
SHARED_LIMITS = {80: 163, 86: 99, 90: 227, 120: 99}  # KB that a program may have


@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_and_fit_the_smallest_gpus(op: str) -> None:
    check(compile_op(op, 86))


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_whole_steps_compile_and_fit(arch: int) -> None:
    """Drafting and plain, with and without sampling, cuts and processing; more sizes are run by the tests that need a
    GPU."""
    check(compile_op("step", arch))


def test_attention_of_many_rows_compiles_and_fits() -> None:
    check(compile_op("tree_attention", 90, "many rows"))


def check(compiled: list[Compiled]) -> None:
    assert compiled
    assert not [kernel for kernel in compiled if kernel.shared > 1024 * SHARED_LIMITS[kernel.arch]]
    assert not [kernel for kernel in compiled if kernel.stack > STACK_LIMIT]
