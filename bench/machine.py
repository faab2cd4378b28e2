"""The conditions of a measurement: machine, versions, commit, model, and the ceiling that memory bandwidth sets.

The ceiling of plain decoding is one token of a sequence per read of all weights, at the bandwidth measured here; reads
of the KV cache are not counted.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from selfspec import Engine
from selfspec.commands import serve
from selfspec.memory import free_device_bytes, memory_limit

_REPLAYS = 7  # of a timed graph
_READERS = 2**15  # partial sums of a long read on a GPU
_CPU_READ = 2**26  # numbers of 4 bytes: 256 MiB, more than any cache holds


def freeze_objects(engine: Engine) -> None:
    """On a GPU, keeps all present objects out of later garbage collections, as `selfspec serve` does: a full collection
    stalls all sequences for about 0.25 s."""
    if engine.model.device.type == "cuda":
        serve.freeze_objects()


def describe(engine: Engine, model: str, synthetic: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything a figure needs beside it, JSON-ready. `synthetic` describes weights that were drawn at random."""
    device = engine.model.device
    is_gpu, allowed = device.type == "cuda", memory_limit(device)
    bandwidth = gpu_bandwidth() if is_gpu else cpu_bandwidth()
    trained = engine.profile.exits_file.layers() if engine.profile else []
    return {
        "model": model,
        "device": torch.cuda.get_device_name(device) if is_gpu else f"{device.type} {platform.machine()}",
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "kernels": engine.has_kernels,
        "threads": torch.get_num_threads(),
        "exits": f"exits trained after {', '.join(map(str, trained))} layers" if trained else "exits untrained",
        "synthetic": synthetic,
        "memory_gb": None if allowed is None else round(allowed / 1e9, 2),
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "ceiling_tokens_per_s": round(bandwidth / bytes_per_step(engine), 1),
        "commit": commit(),
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
    }


_PACKAGES = ("torch", "triton", "transformers")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


_RESULTS = (":(top,exclude)bench/results.json", ":(top,exclude)bench/RESULTS.md")  # which `bench.all` writes


def commit() -> str:
    """The checkout's commit; "+ changes" if tracked files but the results differ from it; "unknown" outside a
    checkout."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *_RESULTS).strip()
        return git("rev-parse", "--short=10", "HEAD").strip() + (" + changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def bytes_per_step(engine: Engine) -> int:
    """Bytes of weights that a plain step reads: an embedding that is not also the LM head is read one row at a time
    and not counted."""
    embedding = engine.model.embedding
    unread = 0 if engine.model.head is embedding else embedding.nbytes
    return engine.model.nbytes - unread


def cpu_bandwidth() -> float:
    """Bytes per second of a read that no cache holds, best of eight."""
    data, times = torch.ones(_CPU_READ), []
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * data.element_size() / min(times)


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of a replay on the device: the median of all but the first."""
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[1:])


def gpu_bandwidth() -> float:
    """Bytes per second of a read of up to 4 GiB, mean of five."""
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


def read_count(free_bytes: int) -> int:
    """Numbers of 4 bytes to read: a power of two, 4 GiB of them or at most half of the free memory."""
    return min(2**30, max(_READERS, 1 << max(0, (free_bytes // 8).bit_length() - 1)))
