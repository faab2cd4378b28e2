"""The fused matmuls on a CUDA device: accuracy at real sizes, and rows whose bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from selfspec.kernels import norm as norms
from selfspec.kernels.gate_up_gemm import gated_linear, gated_linear_reference
from selfspec.kernels.gemm import linear, linear_reference
from selfspec.kernels.gemm_common import TileConfig
from selfspec.kernels.qkv_rope_gemm import qkv_linear, qkv_linear_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# hidden, intermediate, query heads, key heads, head size, norms of heads
MODELS = {
    "smollm2": (576, 1536, 9, 3, 64, False),
    "llama-8b": (4096, 14336, 32, 8, 128, False),
    "gemma3-1b": (1152, 6912, 4, 1, 256, True),
    "phi-mini": (3072, 8192, 32, 32, 96, False),
}
ROWS = 600
PAGES = 10
COUNTS = [1, 2, 3, 7, 16, 17, 31, 33, 48, 64, 65, 96, 128, 129, 200, 256, 257]
Inputs = dict[str, torch.Tensor]
Op = Callable[[Inputs, TileConfig | None], Inputs]


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def operations(model: str, dtype: torch.dtype) -> Iterator[tuple[str, Inputs, Op, Callable[[Inputs], torch.Tensor]]]:
    """Name, inputs by rows, the op, and its truth in float64 (of `out`)."""
    hidden, inner, heads, kv_heads, dim, head_norms = MODELS[model]
    stream = randn(ROWS, hidden, dtype=dtype, scale=2.0)
    norm_weight = randn(hidden, dtype=dtype, scale=0.3) + 1

    def norm(inputs: Inputs) -> norms.Norm:
        return norms.Norm(1e-5, inputs["squares"])

    def exactly(inputs: Inputs) -> dict[str, Any]:
        """x and norm of a product in float64."""
        states = inputs["states"].double()
        x = norms.scaled_reference(states, norm_weight.double(), 0.0)
        return {"x": x, "norm": norms.Norm(1e-5, norms.squares_reference(states))}

    def scaled(states: torch.Tensor) -> torch.Tensor:
        return norms.scaled_reference(states, norm_weight, 0.0)

    def next_norm(out: torch.Tensor) -> norms.NextNorm:
        return norms.NextNorm(
            norm_weight, 0.0, nan(len(out), norms.squares_per_row(hidden)), torch.full_like(out, torch.nan)
        )

    down = randn(hidden, inner, dtype=dtype, scale=inner**-0.5)

    def run_down(inputs: Inputs, config: TileConfig | None) -> Inputs:
        out = inputs["residual"].clone()
        following = next_norm(out)
        linear(inputs["x"], down, out, residual=out, next_norm=following, config=config)
        return {"out": out, "squares": following.squares, "scaled": following.scaled, "expected": scaled(out)}

    yield (
        "down",
        {"x": randn(ROWS, inner, dtype=dtype), "residual": stream},
        run_down,
        lambda inputs: linear_reference(inputs["x"].double(), down.double(), residual=inputs["residual"].double()),
    )

    gate_up = randn(2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)

    def run_gated(inputs: Inputs, config: TileConfig | None) -> Inputs:
        out = nan(len(inputs["x"]), inner, dtype=dtype)
        gated_linear(inputs["x"], gate_up, out, norm=norm(inputs), activation="silu", config=config)
        return {"out": out}

    normed = {
        "x": scaled(stream),
        "squares": norms.squares_reference(stream),
        "states": stream,
    }
    yield (
        "gated",
        normed,
        run_gated,
        lambda inputs: gated_linear_reference(weight=gate_up.double(), **exactly(inputs), activation="silu"),
    )

    qkv = randn((heads + 2 * kv_heads) * dim, hidden, dtype=dtype, scale=hidden**-0.5)
    head_norm = randn(dim, dtype=dtype) if head_norms else None

    def run_qkv(inputs: Inputs, config: TileConfig | None) -> Inputs:
        rows = len(inputs["x"])
        q = nan(rows, heads * dim, dtype=dtype)
        keys, values = nan(PAGES, 64, kv_heads, dim, dtype=dtype), nan(PAGES, 64, kv_heads, dim, dtype=dtype)
        qkv_linear(
            inputs["x"], qkv, q, keys, values, norm=norm(inputs), q_norm=head_norm, k_norm=head_norm,
            cos=inputs["cos"], sin=inputs["sin"], slots=inputs["slots"], config=config,
        )  # fmt: skip
        stored = [cached.view(-1, kv_heads * dim)[inputs["slots"]] for cached in (keys, values)]
        return {"out": torch.cat((q, *stored), dim=1)}

    def true_qkv(inputs: Inputs) -> torch.Tensor:
        keys, values = (torch.zeros(PAGES, 64, kv_heads, dim, device="cuda", dtype=torch.float64) for _ in range(2))
        exact_head = None if head_norm is None else head_norm.double()
        q = qkv_linear_reference(
            weight=qkv.double(), keys=keys, values=values, **exactly(inputs), q_norm=exact_head,
            k_norm=exact_head, cos=inputs["cos"].double(), sin=inputs["sin"].double(), slots=inputs["slots"],
        )  # fmt: skip
        stored = [cached.view(-1, kv_heads * dim)[inputs["slots"]] for cached in (keys, values)]
        return torch.cat((q, *stored), dim=1)

    angles = randn(ROWS, dim // 2, scale=10.0)
    slots = torch.randperm(PAGES * 64, device="cuda")[:ROWS]
    yield "qkv", normed | {"cos": angles.cos(), "sin": angles.sin(), "slots": slots}, run_qkv, true_qkv

    def run_norm(inputs: Inputs, config: TileConfig | None) -> Inputs:
        out = nan(len(inputs["x"]), hidden, dtype=dtype)
        following, residual = next_norm(out), inputs["x"].flip(1).contiguous()
        norms.rms_norm(inputs["x"], norm_weight, 1e-5, 1.0, out, residual=residual, next_norm=following)
        return {"out": out, "squares": following.squares, "scaled": following.scaled, "expected": scaled(out)}

    yield (
        "normalise",
        {"x": stream},
        run_norm,
        lambda inputs: norms.rms_norm_reference(
            inputs["x"].double(), norm_weight.double(), 1e-5, 1.0, inputs["x"].flip(1).double()
        ),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_results_are_accurate_and_rows_have_the_same_bits_among_any_others(model: str, dtype: torch.dtype) -> None:
    for name, inputs, op, truth_of in operations(model, dtype):
        whole = op(inputs, None)
        truth = truth_of(inputs)
        error = ((whole["out"].double() - truth).norm() / truth.norm()).item()
        assert error < (8e-3 if dtype == torch.bfloat16 else 1e-3), (name, error)
        if "squares" in whole:
            torch.testing.assert_close(whole["squares"], norms.squares_reference(whole["out"]), rtol=1e-5, atol=1e-5)
            assert torch.equal(whole["scaled"], whole["expected"])
        for count in COUNTS:
            start = (ROWS - count) // 2
            some = {key: value[start : start + count] for key, value in inputs.items()}
            for key, value in op(some, None).items():
                assert torch.equal(value, whole[key][start : start + count]), (name, key, count)


@pytest.mark.parametrize("warps", [2, 4, 8])
@pytest.mark.parametrize("model", ["smollm2", "llama-8b"])
def test_the_height_of_a_tile_changes_no_bit(model: str, warps: int) -> None:
    for name, inputs, op, _ in operations(model, torch.bfloat16):
        config = TileConfig(block_n=32, block_k=128, stages=3, warps=warps)
        results = [op(inputs, replace(config, block_m=height)) for height in (16, 32, 64, 128)]
        for other in results[1:]:
            for key in other:
                assert torch.equal(results[0][key], other[key]), (name, key)


def test_a_graph_gives_the_same_bits() -> None:
    for name, inputs, op, _ in operations("smollm2", torch.bfloat16):
        some = {key: value[:7].clone() for key, value in inputs.items()}
        expected = op(some, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [op(some, None) for _ in range(3)]
        graph.replay()
        for result in results:
            for key, value in result.items():
                assert torch.equal(value, expected[key]), (name, key)


def test_a_chain_of_launches_reads_what_the_launch_before_it_wrote() -> None:
    hidden, inner = 576, 1536
    weights = [
        (
            randn(2 * inner, hidden, dtype=torch.bfloat16, scale=hidden**-0.5),
            randn(hidden, inner, dtype=torch.bfloat16, scale=inner**-0.5),
        )
        for _ in range(30)
    ]
    start, norm_weight = randn(5, hidden, dtype=torch.bfloat16), randn(hidden, dtype=torch.bfloat16)
    stream, squares, inside = start.clone(), norms.squares_reference(start), nan(5, inner, dtype=torch.bfloat16)
    scaled = torch.empty_like(stream)
    norm, next_norm = norms.Norm(1e-5, squares), norms.NextNorm(norm_weight, 0.0, squares, scaled)

    def layers(synchronise: bool) -> torch.Tensor:
        stream.copy_(start)
        squares.copy_(norms.squares_reference(start))
        scaled.copy_(norms.scaled_reference(start, norm_weight, 0.0))
        inside.fill_(float("nan"))
        for gate_up, down in weights:
            gated_linear(scaled, gate_up, inside, norm=norm, activation="silu")
            if synchronise:
                torch.cuda.synchronize()
            linear(inside, down, stream, residual=stream, next_norm=next_norm)
            if synchronise:
                torch.cuda.synchronize()
        return stream.clone()

    expected = layers(synchronise=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers(synchronise=False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(captured, expected)
    assert torch.equal(layers(synchronise=False), expected)
