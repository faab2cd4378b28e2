"""`python -m bench.quantized`: time of the matmuls of a Llama-8B step with 16-bit, 8-bit and 4-bit weights on a GPU.

Each matmul runs 20 times in a CUDA graph, over copies of the weight that together exceed the L2 cache. A step has 32
layers and one head. The head has 8 bits where the layers have 4. The ceilings are the times that reading the weights
takes at the bandwidth measured here, and on cards of 1 TB/s and 0.36 TB/s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from bench import tables
from bench.machine import gpu_bandwidth, replay_seconds
from selfspec.kernels.gate_up_gemm import gated_linear
from selfspec.kernels.gemm import linear
from selfspec.kernels.gemm_common import TileConfig
from selfspec.kernels.lm_head_topk import lm_head_scores
from selfspec.kernels.norm import NextNorm, Norm, squares_per_row
from selfspec.kernels.qkv_rope_gemm import qkv_linear
from selfspec.kernels.quantized_launch import Weight, choose_weight_tile
from selfspec.kernels.quantized_weight import QuantizedWeight
from selfspec.kernels.topk import Scores

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 4096, 14336, 32, 8, 128, 128256
SHAPES = {  # rows and columns of the weights
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "out": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCABULARY, HIDDEN),
}
FORMATS = ("bf16", "int8", "int8_rows", "int4", "int4_symmetric", "q4_k")
SMALLER_CARDS = {"1 TB/s": 1e12, "0.36 TB/s": 0.36e12}
_COPIES_BYTES = 256 * 2**20  # weights that one graph reads: several times an L2 cache of 50 MB
_LAUNCHES = 20  # in a graph, so that its own launch time does not count
DTYPE = torch.bfloat16

Launch = Callable[[Weight, TileConfig | None], None]


def random_weight(n: int, k: int, name: str, device: str) -> Weight:
    """bf16; int8 and int4 as `quantize=` rounds them: groups of 128 columns, int4 with zeros; int8_rows: one scale
    per row; int4_symmetric: one zero for all; q4_k: groups of 32 with super scales and minimums."""
    if name == "bf16":
        return torch.randn(n, k, device=device, dtype=DTYPE) * k**-0.5
    if name.startswith("int8"):
        q = torch.randint(-128, 128, (n, k), device=device, dtype=torch.int8)
        group = k if name == "int8_rows" else 128
        return QuantizedWeight.pack(q, _floats(n, k // group, device), group, bits=8)
    q = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
    if name == "int4_symmetric":
        return QuantizedWeight.pack(q, _floats(n, k // 128, device), 128, bits=4, zero=8)
    if name == "int4":
        zero = torch.randint(0, 16, (n, k // 128), device=device, dtype=torch.uint8)
        return QuantizedWeight.pack(q, _floats(n, k // 128, device), 128, bits=4, zero=zero)
    scale, minimum = torch.randint(0, 64, (2, n, k // 32), device=device, dtype=torch.uint8)
    above, below = (_floats(n, k // 256, device).half() for _ in range(2))
    return QuantizedWeight.pack(q, scale, 32, bits=4, super_scale=above, minimum=minimum, super_minimum=below)


def _floats(n: int, k: int, device: str) -> torch.Tensor:
    return torch.rand(n, k, device=device).mul_(0.01).to(DTYPE)


def launches(rows: int, device: str) -> dict[str, Launch]:
    """Calls of the launchers, as a step makes them."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=DTYPE)

    scaled = torch.randn(rows, HIDDEN, device=device).to(DTYPE)
    squares = torch.ones(rows, squares_per_row(HIDDEN), device=device)
    norm, stream = Norm(1e-5, squares), zeros(rows, HIDDEN)
    next_norm = NextNorm(torch.ones(HIDDEN, device=device, dtype=DTYPE), 0.0, squares.clone(), zeros(rows, HIDDEN))
    queries, inner = zeros(rows, HEADS * HEAD_DIM), torch.randn(rows, INNER, device=device).to(DTYPE)
    keys, values = zeros(2, 64, KV_HEADS, HEAD_DIM), zeros(2, 64, KV_HEADS, HEAD_DIM)
    angles, slots = zeros(rows, HEAD_DIM // 2), torch.arange(rows, device=device)
    scores = Scores.empty(rows, VOCABULARY, 1, device)

    def run_qkv(weight: Weight, config: TileConfig | None) -> None:
        qkv_linear(scaled, weight, queries, keys, values, norm=norm, cos=angles, sin=angles, slots=slots, config=config)

    def project(x: torch.Tensor) -> Launch:
        return lambda weight, config: linear(x, weight, stream, residual=stream, next_norm=next_norm, config=config)

    return {
        "qkv": run_qkv,
        "out": project(queries),
        "gate_up": lambda weight, config: gated_linear(
            scaled, weight, inner, norm=norm, activation="silu", config=config
        ),
        "down": project(inner),
        "head": lambda weight, _: lm_head_scores(scaled, weight, scores, norm=norm),
    }


def seconds_per_launch(launch: Launch, weights: list[Weight], config: TileConfig | None = None) -> float:
    launch(weights[0], config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(_LAUNCHES):
            launch(weights[index % len(weights)], config)
    return replay_seconds(graph) / _LAUNCHES


def head_format(name: str) -> str:
    """The format of LM head and embedding beside layers of a format: never 4 bits."""
    return name if name == "bf16" else "int8"


def measure(name: str, matmul: str, row_counts: list[int], bandwidth: float) -> list[dict[str, Any]]:
    """One result for each number of rows; the weights are made once."""
    kept = head_format(name) if matmul == "head" else name
    n, k = SHAPES[matmul]
    first = random_weight(n, k, kept, "cuda")
    copies = min(_LAUNCHES, -(-_COPIES_BYTES // first.nbytes) + 1)
    weights = [first, *(random_weight(n, k, kept, "cuda") for _ in range(copies - 1))]
    results = []
    for rows in row_counts:
        seconds = seconds_per_launch(launches(rows, "cuda")[matmul], weights)
        share = first.nbytes / seconds / bandwidth
        found = {"format": name, "matmul": matmul, "rows": rows, "us": seconds * 1e6, "bytes": first.nbytes}
        results.append(found | {"gb_s": first.nbytes / seconds / 1e9, "share": share})
    return results


def sweep(name: str, matmul: str, rows: int, bandwidth: float) -> list[dict[str, Any]]:
    """Times of other tiles than the chosen one, fastest first. Splits change the sums: they may depend on the weight's
    shape alone, so one number must serve all numbers of rows."""
    n, k = SHAPES[matmul]
    weights = [random_weight(n, k, name, "cuda") for _ in range(_LAUNCHES)]
    chosen = choose_weight_tile(matmul if matmul in ("qkv", "gate_up") else "linear", weights[0], rows)
    found = []
    for splits, block_n, block_m in product((2, 4, 8), (16, 32, 64), (8, 16, 32)):
        config = replace(chosen, warps=splits, block_n=block_n, block_m=block_m)
        try:
            seconds = seconds_per_launch(launches(rows, "cuda")[matmul], weights, config)
        except (ValueError, RuntimeError) as error:  # sums of squares over wider blocks, or too little shared memory
            print(f"{matmul} {name}, {rows} rows, {splits} splits, {block_n} weight rows, tiles of {block_m}: {error}")
            continue
        tile = {"splits": splits, "block_n": block_n, "block_m": block_m, "is_chosen": config == chosen}
        size = {"format": name, "matmul": matmul, "rows": rows, "us": seconds * 1e6}
        found.append(size | tile | {"share": weights[0].nbytes / seconds / bandwidth})
    return sorted(found, key=lambda tile: tile["us"])


def steps(results: list[dict[str, Any]], bandwidth: float) -> list[dict[str, Any]]:
    """The sums over a step, for each format and number of rows."""
    found = []
    for name, rows in dict.fromkeys((result["format"], result["rows"]) for result in results):
        parts = [result for result in results if (result["format"], result["rows"]) == (name, rows)]
        counts = [1 if part["matmul"] == "head" else LAYERS for part in parts]
        size = sum(count * part["bytes"] for count, part in zip(counts, parts, strict=True))
        time = sum(count * part["us"] for count, part in zip(counts, parts, strict=True)) / 1e3
        ceilings = {"measured": bandwidth} | SMALLER_CARDS
        found.append(
            {
                "format": name,
                "rows": rows,
                "ms": time,
                "gb": size / 1e9,
                "share": size / bandwidth * 1e3 / time,
                "ceilings_ms": {card: size / speed * 1e3 for card, speed in ceilings.items()},
            }
        )
    return found


def show(results: list[dict[str, Any]]) -> list[str]:
    headings = ("matmul", "rows", "us", "GB/s", "of bandwidth")
    lines = [
        (
            f"{result['matmul']} {result['format']}",
            result["rows"],
            f"{result['us']:.1f}",
            f"{result['gb_s']:.0f}",
            f"{result['share']:.0%}",
        )
        for result in results
    ]
    return tables.table(headings, lines)


def show_steps(found: list[dict[str, Any]]) -> list[str]:
    headings = ("step", "rows", "ms", "against 1 row", "GB", "of bandwidth", *(f"ms at {at}" for at in SMALLER_CARDS))
    one_row = {result["format"]: result["ms"] for result in found if result["rows"] == 1}
    lines = [
        (
            result["format"],
            result["rows"],
            f"{result['ms']:.3f}",
            tables.times(result["ms"] / one_row[result["format"]]) if result["format"] in one_row else None,
            f"{result['gb']:.2f}",
            f"{result['share']:.0%}",
            *(f"{result['ceilings_ms'][card]:.1f}" for card in SMALLER_CARDS),
        )
        for result in found
    ]
    return tables.table(headings, lines)


def show_sweep(args: argparse.Namespace, gpu: str, bandwidth: float) -> int:
    names = [name for name in args.format if name != "bf16"]
    matmuls = [matmul for matmul in args.matmul if matmul != "head"]
    tiles = [
        tile
        for name, matmul, rows in product(names, matmuls, args.rows)
        for tile in sweep(name, matmul, rows, bandwidth)
    ]
    headings = ("matmul", "rows", "splits", "weight rows", "rows of a tile", "us", "of bandwidth", "chosen")
    lines = [
        (
            f"{tile['matmul']} {tile['format']}", tile["rows"], tile["splits"], tile["block_n"], tile["block_m"],
            f"{tile['us']:.1f}", f"{tile['share']:.0%}", "yes" if tile["is_chosen"] else None,
        )
        for tile in tiles
    ]  # fmt: skip
    print(*tables.table(headings, lines), sep="\n")
    print(json.dumps({"benchmark": "quantized tiles", "gpu": gpu, "bandwidth": bandwidth, "tiles": tiles}))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quantized", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 64], help="(default: 1 4 16 64)")
    parser.add_argument("--format", choices=FORMATS, nargs="*", default=FORMATS, help="(default: all)")
    parser.add_argument("--matmul", choices=SHAPES, nargs="*", default=list(SHAPES), help="(default: all)")
    parser.add_argument("--sweep", action="store_true", help="time other tiles of the 8-bit and 4-bit matmuls instead")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: run it on a machine with an NVIDIA GPU")
    torch.manual_seed(0)
    bandwidth = gpu_bandwidth()
    gpu = torch.cuda.get_device_name()
    if args.sweep:
        return show_sweep(args, gpu, bandwidth)
    results = [
        result
        for name in args.format
        for matmul in args.matmul
        for result in measure(name, matmul, args.rows, bandwidth)
    ]
    totals = steps(results, bandwidth)
    print(f"{gpu}: reads {bandwidth / 1e12:.2f} TB/s\n")
    print(*show(results), "", *show_steps(totals), sep="\n")
    summary = {"benchmark": "quantized", "gpu": gpu, "bandwidth": bandwidth, "results": results, "steps": totals}
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
