"""Kernels compile, fit the shared memory, spill no registers and pass neighbouring elements to inline PTX: single
operations for sm_120, whole steps for sm_90, one whole step each for sm_80 and sm_120, and matmuls with quantized
weights for sm_80, sm_86, sm_89 and sm_90."""

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
STACK_LIMIT = 32  # bytes per thread: a few registers, or the cosine of a large angle; arrays that spill take more
SHARED_LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # KB that a program may have


@pytest.mark.parametrize("op", OPS)
def test_kernels_of_large_models_compile_and_fit_the_least_shared_memory(op: str) -> None:
    """For sm_120, which has it, and launches that overlap (see `kernels/pdl.py`)."""
    check(compile_op(op, 120))


@pytest.mark.parametrize(("arch", "match"), [(80, "everything"), (90, ""), (120, "few copied nodes")])
def test_whole_steps_compile_and_fit(arch: int, match: str) -> None:
    """For sm_90 drafting and plain steps, with and without sampling, truncation and processing; for sm_80 the steps
    with the most of these, for sm_120 a greedy one without an exit. GPU tests run more sizes."""
    check(compile_op("step", arch, match))


def test_attention_of_many_rows_compiles_and_fits_where_it_pipelines_deepest() -> None:
    """On sm_90 only, prefix programs in a launch of their own use more than 99 KB of shared memory."""
    check(compile_op("tree_attention", 90, "many rows of 8b"))


@pytest.mark.parametrize(
    ("arch", "match"),
    [
        (80, "head q6_k"),
        (86, "gated q4_k rows 64"),
        (89, "fp8"),
        (90, "gated int4 128 rows 64"),
        (90, "embedding"),
    ],
)
def test_kernels_with_quantized_weights_compile_and_fit(arch: int, match: str) -> None:
    """On each architecture some of the formats; the largest tiles need most registers."""
    check(compile_op("quantized", arch, match))


def check(compiled: list[Compiled], stack: int = STACK_LIMIT) -> None:
    assert compiled
    assert not [kernel for kernel in compiled if kernel.shared > 1024 * SHARED_LIMITS[kernel.arch]]
    assert not [kernel for kernel in compiled if kernel.stack > stack]
    assert all(kernel.packs_neighbours for kernel in compiled)
