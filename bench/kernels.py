"""`python -m bench.kernels`: microseconds, share of the memory bandwidth and error of every decoding kernel on a GPU.

Each runs in a CUDA graph with an empty L2 cache, beside the PyTorch operation that is nearest to it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench import tables
from bench.machine import gpu_bandwidth, replay_seconds
from bench.ops import Case

OPS = ("gemm", "tree_attention", "lm_head_topk")
_IN_A_GRAPH = 10  # launches, so that the graph's own launch time does not count
_FLUSH_BYTES = 256 * 2**20  # written before each launch: more than an L2 cache holds


class Timer:
    """Times launches on the device; subtracts the time of emptying the L2 cache."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._flushing = self._graph_seconds(lambda: None)

    def seconds(self, launch: Callable[[], object]) -> float:
        launch()
        return max(self._graph_seconds(launch) - self._flushing, 0.0)

    def _graph_seconds(self, launch: Callable[[], object]) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_IN_A_GRAPH):
                self._flush.zero_()
                launch()
        return replay_seconds(graph) / _IN_A_GRAPH


def measure(case: Case, timer: Timer, bandwidth: float) -> dict[str, Any]:
    seconds = timer.seconds(case.run)
    result: dict[str, Any] = {"name": case.name, "us": seconds * 1e6, "ceiling_us": case.bytes / bandwidth * 1e6}
    if case.library is not None:
        result["library_us"] = timer.seconds(case.library) * 1e6
    if case.reference is not None:
        ours, truth = case.reference()
        result["error"] = float((ours.double() - truth).norm() / truth.norm())
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--op", choices=OPS, nargs="*", default=OPS, help=f"(default: {' '.join(OPS)})")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: run it on a machine with an NVIDIA GPU")
    torch.manual_seed(0)
    bandwidth, timer = gpu_bandwidth(), Timer()
    cases = [case for op in args.op for case in importlib.import_module(f"bench.ops.{op}").cases("cuda")]
    results = [measure(case, timer, bandwidth) for case in cases if args.match in case.name]
    print(f"{torch.cuda.get_device_name()}: reads {bandwidth / 1e12:.2f} TB/s\n")
    print(*show(results), sep="\n")
    gpu = torch.cuda.get_device_name()
    print(json.dumps({"benchmark": "kernels", "gpu": gpu, "bandwidth": bandwidth, "results": results}))
    return 0


def show(results: list[dict[str, Any]]) -> list[str]:
    headings = ("operation", "ceiling, us", "PyTorch, us", "us", "of bandwidth", "relative error")
    lines = [
        (
            result["name"],
            f"{result['ceiling_us']:.1f}",
            f"{result['library_us']:.1f}" if "library_us" in result else None,
            f"{result['us']:.1f}",
            f"{result['ceiling_us'] / result['us']:.0%}" if result["us"] else None,
            f"{result['error']:.1e}" if "error" in result else None,
        )
        for result in results
    ]
    return tables.table(headings, lines)


if __name__ == "__main__":
    sys.exit(main())
