"""How much memory is free, and a bound on what this process takes of a GPU's."""

from __future__ import annotations

import os

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


def host_room() -> int:
    """Bytes of host memory that are free, as far as the system tells."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**20
        return pages * 4096 // 2
