"""Launches of the fused matmuls at the layers of two models, and at other head sizes, to be compiled."""

from __future__ import annotations

from functools import partial

import torch

from selfspec.kernels.gate_up_gemm import gated_linear
from selfspec.kernels.gemm import linear
from selfspec.kernels.norm import NextNorm, Norm, rms_norm, squares_per_row
from selfspec.kernels.qkv_rope_gemm import qkv_linear
from tests.compiling import Launches

# hidden, intermediate, query heads, key heads, head size
MODELS = {"smollm2": (576, 1536, 9, 3, 64), "llama-8b": (4096, 14336, 32, 8, 128)}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def norm(rows: int, width: int) -> Norm:
    return Norm(1e-5, empty(rows, squares_per_row(width), dtype=torch.float32))


def next_norm(rows: int, width: int) -> NextNorm:
    return NextNorm(empty(width), 0.0, norm(rows, width).squares, empty(rows, width))


def qkv(rows: int, hidden: int, heads: int, kv_heads: int, head_dim: int, head_norms: bool, queries: bool) -> None:
    cache = empty(8, 64, kv_heads, head_dim)
    head_norm = empty(head_dim) if head_norms else None
    qkv_linear(
        empty(rows, hidden),
        empty((heads + 2 * kv_heads) * head_dim, hidden),
        empty(rows, heads * head_dim) if queries else None,
        cache,
        cache,
        norm=norm(rows, hidden),
        q_norm=head_norm,
        k_norm=head_norm,
        cos=empty(rows, head_dim // 2),
        sin=empty(rows, head_dim // 2),
        slots=empty(rows, dtype=torch.int64),
    )


def project(rows: int, n: int, k: int) -> None:
    stream = empty(rows, n)
    linear(empty(rows, k), empty(n, k), stream, residual=stream, next_norm=next_norm(rows, n))


def gated(rows: int, inner: int, hidden: int) -> None:
    gated_linear(
        empty(rows, hidden), empty(2 * inner, hidden), empty(rows, inner), norm=norm(rows, hidden), activation="silu"
    )


def norm_rows(rows: int, width: int) -> None:
    stream = empty(rows, width)
    rms_norm(stream, empty(width), 1e-6, 1.0, stream, residual=empty(rows, width), next_norm=next_norm(rows, width))


def launches() -> Launches:
    """One launch for each way in which `choose_tile` chooses, and for each kind of head; `launches_step` has the tiles
    for few rows of a small model."""
    hidden, inner, heads, kv_heads, head_dim = MODELS["llama-8b"]
    yield "qkv llama-8b rows 64", partial(qkv, 64, hidden, heads, kv_heads, head_dim, False, True)
    yield "qkv llama-8b rows 1024", partial(qkv, 1024, hidden, heads, kv_heads, head_dim, False, True)
    yield "gated llama-8b rows 64", partial(gated, 64, inner, hidden)
    yield "gated llama-8b rows 1024", partial(gated, 1024, inner, hidden)
    yield "out llama-8b rows 16", partial(project, 16, hidden, hidden)
    yield "down llama-8b rows 64", partial(project, 64, hidden, inner)
    yield "down llama-8b rows 1024", partial(project, 1024, hidden, inner)
    hidden, inner, heads, kv_heads, head_dim = MODELS["smollm2"]
    yield "qkv smollm2 rows 64", partial(qkv, 64, hidden, heads, kv_heads, head_dim, False, True)
    yield "gated smollm2 rows 1024", partial(gated, 1024, inner, hidden)
    yield "out smollm2 rows 1024", partial(project, 1024, hidden, hidden)
    yield "qkv gemma3 rows 64", partial(qkv, 64, 1152, 4, 1, 256, True, True)
    yield "qkv phi rows 1", partial(qkv, 1, 3072, 32, 32, 96, False, True)
    yield "rms_norm", partial(norm_rows, 3, 1152)
