"""Free memory of a device and of the host, and a bound on the GPU memory that this process allocates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch


def device_room(device: torch.device) -> int:
    """Bytes this process may still allocate on the device."""
    if device.type != "cuda":
        return host_room()
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = memory_bound(device) or total
    return max(0, min(free, allowed - torch.cuda.memory_allocated(device)))


def bound_memory(gigabytes: float, device: torch.device) -> None:
    """Lets this process allocate no more than so many gigabytes (10^9 bytes) of a GPU's memory from now on. CUDA's own
    share of it, some hundred megabytes for the context and loaded kernels, comes on top."""
    if not 0 < gigabytes < float("inf"):
        raise ValueError(f"a bound of {gigabytes:g} GB of GPU memory is not possible: it must be above 0")
    if device.type != "cuda":
        raise ValueError(
            f"a bound of {gigabytes:g} GB of GPU memory needs a CUDA device, and this runs on {device.type}: leave the "
            "bound out, or run where torch sees a GPU"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total), device)


def memory_bound(device: torch.device) -> int | None:
    """Bytes that this process may allocate on the device at most; None: whatever is there."""
    if device.type != "cuda":
        return None
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return int(fraction * torch.cuda.mem_get_info(device)[1]) if fraction < 1 else None


def host_room(system: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still use: what the system has available, or what the process's
    cgroup leaves of its limit, whichever is less. `system` is the folder that holds /proc and /sys."""
    return max(0, min([_available(system), *_left_in_cgroups(system)]))


def _available(system: Path) -> int:
    try:
        lines = dict(line.split(":", 1) for line in (system / "proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**20
        return pages * 4096 // 2


def _left_in_cgroups(system: Path) -> Iterator[int]:
    """Bytes left in each cgroup with a limit: the process's own and those above it, of cgroups v1 and v2."""
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
                files = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = sum(
                    int(files[f"{prefix}{kind}_file"]) for kind in ("active", "inactive")
                )  # given up on demand
                used = int((folder / usage).read_text()) - cached
                yield int((folder / limit).read_text()) - used  # "max" is no number: there is no limit
            except (OSError, KeyError, ValueError):
                continue
