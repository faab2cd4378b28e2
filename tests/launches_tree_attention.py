"""Launches of tree attention at real sizes, to be compiled."""

from __future__ import annotations

from functools import partial

import torch

from selfspec.kernels.tree_attention import counters_size, ranges_for, tree_attention, workspace_size
from tests.compiling import Launches

# Query heads, key-value heads, head size, numbers of nodes that take different kernels.
SHAPES = {
    "8b": (32, 8, 128, (1,)),
    "phi": (32, 32, 96, (64,)),
    "gemma": (4, 1, 256, (64,)),
}


def launches() -> Launches:
    for shape, (heads, kv_heads, dim, row_counts) in SHAPES.items():
        window = 512 if shape == "gemma" else None
        for rows in row_counts:
            yield f"{shape} M={rows}", partial(launch, heads, kv_heads, dim, rows, window)
    yield "smollm2 in float32", partial(launch, 9, 3, 64, 1, None, torch.float32)
    # On sm_90 the first takes two launches; in both, nodes share programs.
    for shape, heads, kv_heads, dim, batch in (("8b", 32, 8, 128, 4), ("smollm2", 9, 3, 64, 16)):
        yield f"many rows of {shape}", partial(launch, heads, kv_heads, dim, 64, None, batch=batch)


def launch(
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    window: int | None,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
) -> None:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    ranges = ranges_for(32768)
    tree_attention(
        empty(batch * rows, heads * dim),
        empty(512, 64, kv_heads, dim),
        empty(512, 64, kv_heads, dim),
        empty(batch, 512, dtype=torch.int32),
        empty(batch, dtype=torch.int32),
        empty(batch, rows, 8, dtype=torch.int32),
        empty(rows, dtype=torch.int32),
        empty(batch * rows, heads * dim),
        empty(workspace_size(batch, rows, heads, dim, ranges), dtype=torch.float32),
        empty(counters_size(batch, rows, kv_heads), dtype=torch.int32),
        ranges=ranges,
        window=window,
        scale=dim**-0.5,
        per_unit=ranges if batch == 1 else None,  # several sequences: programs that sum several ranges
    )
