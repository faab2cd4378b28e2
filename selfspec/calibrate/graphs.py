"""Replays a computation of fixed shapes as one CUDA graph: many small kernels, and Python would set the pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(compute: Callable[[], None], device: torch.device, pool: Any = None) -> Callable[[], None]:
    """The same computation on the same tensors as one launch; elsewhere than on a GPU, itself. It must have run before,
    and is not run by this. Graphs that never run at the same time may share a pool of memory."""
    if device.type != "cuda":
        return compute
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream):
        compute()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay


def shared_pool(device: torch.device) -> Any:
    """Memory for several graphs to share; None where there are no graphs."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
