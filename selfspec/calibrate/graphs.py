"""Captures a computation of fixed shapes as a CUDA graph, since launching small kernels from Python dominates."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns a function that replays the computation on the same tensors in one launch; without a GPU, the computation
    itself. It must have run before; capturing does not run it."""
    if device.type != "cuda":
        return compute
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        compute()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay
