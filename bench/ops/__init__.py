"""The operations `python -m bench.kernels` measures, one module each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class Case:
    """One operation at one shape."""

    name: str
    run: Callable[[], object]  # launches once; no allocation, so that it can be captured in a graph
    bytes: int  # the least that must move through device memory
    reference: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None  # (ours, float64 truth)
    library: Callable[[], object] | None = None  # the nearest thing PyTorch or cuBLAS does
