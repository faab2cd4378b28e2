"""Free memory of a device and of the host, and a limit on the GPU memory that this process may allocate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch


def free_device_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on the device; host memory for any device but CUDA's."""
    if device.type != "cuda":
        return free_host_bytes()
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = memory_limit(device) or total
    return max(0, min(free, allowed - torch.cuda.memory_allocated(device)))


def limit_memory(gigabytes: float, device: torch.device) -> None:
    """Limits the GPU memory that torch allocates in this process to so many gigabytes (10^9 bytes). CUDA's context and
    loaded kernels take some hundred megabytes more."""
    if not 0 < gigabytes < float("inf"):
        raise ValueError(f"a limit of {gigabytes:g} GB of GPU memory is not possible: it must be above 0")
    if device.type != "cuda":
        raise ValueError(
            f"a limit of {gigabytes:g} GB of GPU memory needs a CUDA device, and this runs on {device.type}: leave the "
            "limit out, or run where torch sees a GPU"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total), device)


def memory_limit(device: torch.device) -> int | None:
    """The limit set by `limit_memory`, in bytes; None: no limit."""
    if device.type != "cuda":
        return None
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return int(fraction * torch.cuda.mem_get_info(device)[1]) if fraction < 1 else None


def free_host_bytes(system: Path = Path("/")) -> int:
    """Bytes of host memory that this process can still use: the smallest of the system's available memory and the
    remainders of the limits of its cgroups. `system` is the folder that holds proc and sys."""
    return max(0, min([_available(system), *_left_in_cgroups(system)]))


def _available(system: Path) -> int:
    """MemAvailable of /proc/meminfo; without it (macOS) half of the physical memory."""
    try:
        lines = dict(line.split(":", 1) for line in (system / "proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**20
        return pages * 4096 // 2


def _left_in_cgroups(system: Path) -> Iterator[int]:
    """Yields the bytes left in each cgroup with a limit: the process's own and those above it, cgroups v1 and v2."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # v2
            mount, limit, usage, prefix = system / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):  # v1
            mount, prefix = system / "sys/fs/cgroup/memory", "total_"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents[: len(own.parts) - len(mount.parts)]):
            try:
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # The kernel frees cached files on demand.
                cached = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
                used = int((folder / usage).read_text()) - cached
                yield int((folder / limit).read_text()) - used
            except (OSError, KeyError, ValueError):  # ValueError: the limit is "max", which means none
                continue
