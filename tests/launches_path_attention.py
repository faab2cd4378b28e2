"""What `tests/test_kernel_compile.py` compiles of path attention."""

from __future__ import annotations

import torch

from selfspec.kernels.path_attention import counters_size, path_attention, ranges_for, workspace_size
from tests.compiling import Launches

SHAPES = {"8b": (32, 8, 128), "smollm2": (9, 3, 64), "phi": (32, 32, 96), "gemma": (4, 1, 256)}


def launches() -> Launches:
    for shape, (heads, kv_heads, dim) in SHAPES.items():
        for rows in (1, 16, 64):
            window = 512 if shape == "gemma" else None
            yield f"{shape} M={rows}", lambda s=(heads, kv_heads, dim), m=rows, w=window: launch(*s, m, w)
    yield "8b M=16 in two", lambda: launch(32, 8, 128, 16, None, launches=2)
    yield "float32", lambda: launch(9, 3, 64, 1, None, torch.float32)


def launch(
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    window: int | None,
    dtype: torch.dtype = torch.bfloat16,
    launches: int = 1,
) -> None:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    ranges = ranges_for(32768)
    path_attention(
        empty(rows, heads * dim),
        empty(512, 64, kv_heads, dim),
        empty(512, 64, kv_heads, dim),
        empty(1, 512, dtype=torch.int32),
        empty(1, dtype=torch.int32),
        empty(rows, 8, dtype=torch.int32),
        empty(rows, dtype=torch.int32),
        empty(rows, heads * dim),
        empty(workspace_size(1, rows, heads, dim, ranges), dtype=torch.float32),
        empty(counters_size(1, rows, kv_heads), dtype=torch.int32),
        ranges=ranges,
        window=window,
        scale=dim**-0.5,
        launches=launches,
    )
