"""The operations `python -m bench.kernels` measures, one module each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class Case:
    """One operation at one shape."""

    name: str
    run: Callable[[], object]  # launches once, without allocating, so that a graph can capture it
    bytes: int  # the fewest bytes that must be read from and written to device memory
    reference: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None  # (result, float64 reference)
    library: Callable[[], object] | None = None  # the closest operation of PyTorch or cuBLAS
