"""How much memory is free."""

from __future__ import annotations

import os

import torch


def device_room(device: torch.device) -> int:
    """Bytes this process may still allocate on the device."""
    if device.type != "cuda":
        return host_room()
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, allowed - torch.cuda.memory_allocated(device)))


def host_room() -> int:
    """Bytes of host memory that are free, as far as the system tells."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**20
        return pages * 4096 // 2
