"""`python -m bench.kernels`: every operation of the decode path on this GPU: time, share of bandwidth, error.

Each operation is captured several times in a CUDA graph, with the L2 cache emptied before each, and the time of that
is taken off: weights come from memory, as they do in decoding, and launches cost what they cost in a graph.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.ops import Case
from selfspec.memory import free_device_bytes

OPS = ("gemm", "tree_attention", "lm_head_topk")
_IN_A_GRAPH, _REPLAYS = 10, 7
_READERS = 2**15  # parts of a long read


class Timer:
    """Times launches on the device."""

    def __init__(self) -> None:
        self._flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
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
        times = []
        for _ in range(_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / _IN_A_GRAPH)
        return median(times[1:])


def read_bandwidth() -> float:
    """Bytes per second of a long read, the ceiling of everything below."""
    count = read_count(free_device_bytes(torch.device("cuda", torch.cuda.current_device())))
    data = torch.randn(count, device="cuda", dtype=torch.float32).view(_READERS, -1)
    out = torch.empty(_READERS, device="cuda")
    for _ in range(3):
        torch.sum(data, dim=1, out=out)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        torch.sum(data, dim=1, out=out)
    end.record()
    end.synchronize()
    return 5 * data.numel() * 4 / (start.elapsed_time(end) / 1e3)


def read_count(room: int) -> int:
    """How many numbers of 4 bytes are read: 4 GiB of them or, where half of the room is less, fewer; a power of two."""
    return min(2**30, max(_READERS, 1 << max(0, (room // 8).bit_length() - 1)))


def measure(case: Case, timer: Timer, bandwidth: float) -> dict:
    result: dict = {"name": case.name, "us": timer.seconds(case.run) * 1e6}
    result["share"] = case.bytes / bandwidth / (result["us"] / 1e6) if result["us"] else None
    if case.library is not None:
        result["library_us"] = timer.seconds(case.library) * 1e6
    if case.reference is not None:
        ours, truth = case.reference()
        result["error"] = float((ours.double() - truth).norm() / truth.norm())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--op", choices=OPS, nargs="*", default=OPS)
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    torch.manual_seed(0)
    bandwidth, timer = read_bandwidth(), Timer()
    cases = [case for op in args.op for case in importlib.import_module(f"bench.ops.{op}").cases("cuda")]
    chosen = [case for case in cases if args.match in case.name]
    results = [measure(case, timer, bandwidth) for case in track(chosen, description="measuring")]
    show(results, bandwidth)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "bandwidth": bandwidth, "results": results}))


def show(results: list[dict], bandwidth: float) -> None:
    title = f"{torch.cuda.get_device_name()}: reads {bandwidth / 1e12:.2f} TB/s"
    table = Table(title=title, title_justify="left")
    for heading in ("operation", "us", "of bandwidth", "PyTorch us", "error"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for result in results:
        share, library, error = (result.get(name) for name in ("share", "library_us", "error"))
        table.add_row(
            result["name"],
            f"{result['us']:.1f}",
            "-" if share is None else f"{share:.0%}",
            "-" if library is None else f"{library:.1f}",
            "-" if error is None else f"{error:.1e}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
