"""Matmuls with quantized weights on a CUDA device: accuracy at real sizes, and the same bits among any other rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.quantized import HIDDEN, INNER, random_weight
from selfspec.kernels.dequantize import dequantize, dequantize_reference
from selfspec.kernels.gemm import linear
from selfspec.kernels.lm_head_topk import lm_head_logits
from selfspec.kernels.quantized_launch import choose_weight_tile
from selfspec.kernels.quantized_weight import QuantizedWeight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMATS = ["int8_rows", "int8", "int8 32", "int8 zeros", "fp8", "int4_symmetric", "int4 zeros", "q4_k", "q5_1", "q6_k"]
SHAPES = [(HIDDEN, INNER), (28672, HIDDEN), (576, 576), (640, 1536)]  # Llama-8B's and smaller ones
COUNTS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 129]
ROWS = 200


def weight_of(n: int, k: int, name: str) -> QuantizedWeight:
    rand = partial(torch.randint, device="cuda")
    torch.manual_seed(n + k)
    halves = partial(torch.rand, device="cuda", dtype=torch.float16)
    if name == "fp8":
        return QuantizedWeight.pack(torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn), halves(n, 1), k, bits=8)
    if name == "int8 32":
        return QuantizedWeight.pack(rand(-128, 128, (n, k), dtype=torch.int8), halves(n, k // 32), 32, bits=8)
    if name == "int8 zeros":
        q, zeros = (rand(-128, 128, (n, width), dtype=torch.int8) for width in (k, k // 64))
        return QuantizedWeight.pack(q, halves(n, k // 64), 64, bits=8, zero=zeros)
    if name == "q5_1":
        q = rand(0, 32, (n, k), dtype=torch.int8)
        return QuantizedWeight.pack(q, halves(n, k // 32), 32, bits=8, minimum=halves(n, k // 32) * 16)
    if name == "q6_k":
        q, scale = (rand(-32, 32, (n, width), dtype=torch.int8) for width in (k, k // 16))
        if k % 256:
            return QuantizedWeight.pack(q, scale.half(), 16, bits=8)
        return QuantizedWeight.pack(q, scale, 16, bits=8, super_scale=halves(n, k // 256))
    if name == "int4 zeros" or (k % 256 and name != "int8_rows"):
        q, zeros = (rand(0, 16, (n, width), dtype=torch.uint8) for width in (k, k // 64))
        return QuantizedWeight.pack(q, halves(n, k // 64), 64, bits=4, zero=zeros)
    found = random_weight(n, k, name, "cuda")
    assert isinstance(found, QuantizedWeight)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_results_are_accurate_and_rows_have_the_same_bits_among_any_others(name: str, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        weight = weight_of(n, k, name)
        x = torch.randn(ROWS, k, device="cuda").div(64).to(dtype)
        whole = torch.full((ROWS, n), torch.nan, device="cuda", dtype=dtype)
        linear(x, weight, whole)
        truth = x.double() @ weight.rounded(dtype).double().T
        error = ((whole.double() - truth).norm() / truth.norm()).item()
        assert error < (3e-3 if dtype == torch.bfloat16 else 4e-4), (n, k, error)
        for count in COUNTS:
            start = (ROWS - count) // 2
            out = torch.full((count, n), torch.nan, device="cuda", dtype=dtype)
            linear(x[start : start + count], weight, out)
            assert torch.equal(out, whole[start : start + count]), (n, k, count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_that_kernels_multiply_with_are_exactly_the_rounded_ones(name: str, dtype: torch.dtype) -> None:
    """A row of x that is 1 at one column gives that column of the weight, in float32."""
    weight, columns = weight_of(640, HIDDEN, name), torch.randperm(HIDDEN, device="cuda")[:64]
    x = torch.zeros(64, HIDDEN, device="cuda", dtype=dtype)
    x[torch.arange(64, device="cuda"), columns] = 1
    logits = torch.full((64, 640), torch.nan, device="cuda")
    lm_head_logits(x, weight, logits)
    assert torch.equal(logits, weight.rounded(dtype)[:, columns].T.float())


@pytest.mark.parametrize("name", FORMATS)
def test_neither_height_nor_width_of_a_tile_changes_a_bit(name: str) -> None:
    """Nor the number of rows the float32 sums that the head writes."""
    n, k = 4096, HIDDEN
    weight, x = weight_of(n, k, name), torch.randn(64, k, device="cuda").to(torch.bfloat16)
    config = choose_weight_tile("linear", weight, 1)
    results = []
    for block_m, block_n in ((8, 16), (8, 32), (8, 64), (16, 32), (32, 32), (32, 16), (16, 64), (64, 32)):
        out = torch.empty(64, n, device="cuda", dtype=torch.bfloat16)
        linear(x, weight, out, config=replace(config, block_m=block_m, block_n=block_n))
        results.append(out)
    assert all(torch.equal(results[0], other) for other in results[1:])
    logits = torch.empty(64, n, device="cuda")
    lm_head_logits(x, weight, logits)
    for count in (1, 8, 9, 17, 33):
        some = torch.empty(count, n, device="cuda")
        lm_head_logits(x[:count], weight, some)
        assert torch.equal(some, logits[:count])


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_dequantized_as_the_reference_rounds_them(name: str) -> None:
    weight = weight_of(640, HIDDEN, name)
    rows = slice(32, 601)
    out = torch.full((569, HIDDEN), torch.nan, device="cuda", dtype=torch.bfloat16)
    dequantize(weight, rows, out)
    assert torch.equal(out, dequantize_reference(weight, rows, torch.bfloat16))
