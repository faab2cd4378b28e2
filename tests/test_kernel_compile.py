"""Every kernel compiles for the GPUs it is meant for, and fits the shared memory of the smallest of them."""

from __future__ import annotations

import importlib.util

import pytest

from tests.compiling import compile_op

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# Each has a file tests/launches_<op>.py with `launches()`: pairs of a name and a call of a launcher.
OPS = ["linear", "path_attention", "head", "choose"]
STACK_LIMIT = 16  # LLVM reserves a few bytes at times and leaves them unused; spilled registers take more
SHARED_LIMIT = 99 * 1024  # what a program may have on sm_86 and sm_89


@pytest.mark.parametrize("arch", [86, 90])
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_and_fit(op: str, arch: int) -> None:
    compiled = compile_op(op, arch)
    assert compiled
    too_large = [kernel for kernel in compiled if kernel.shared > SHARED_LIMIT]
    assert not too_large
    spilling = [kernel for kernel in compiled if kernel.stack > STACK_LIMIT]
    assert not spilling
