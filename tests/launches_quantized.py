"""Launches of the fused matmuls, the LM head and the embedding with quantized weights, to be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from selfspec.kernels.dequantize import dequantize
from selfspec.kernels.embed_rope import RowMetadata, embed_rope
from selfspec.kernels.gate_up_gemm import gated_linear
from selfspec.kernels.gemm import linear
from selfspec.kernels.lm_head_topk import lm_head_scores
from selfspec.kernels.qkv_rope_gemm import qkv_linear
from selfspec.kernels.quantized_weight import QuantizedWeight
from selfspec.kernels.topk import Scores
from tests.compiling import Launches
from tests.launches_gemm import empty, next_norm, norm

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 128256  # Llama-8B
FORMATS = ["int8", "int8 32", "int8 zeros", "fp8", "int4 128", "int4 zeros", "q4_k", "q5_1", "q6_k"]


def weight_of(n: int, k: int, name: str) -> QuantizedWeight:
    """int8 and fp8: one scale per row; q4_k: groups of 32 with super scales and minimums; q5_1: groups of 32 in 8 bits
    with minimums; q6_k: groups of 16 in 8 bits with super scales."""
    dtype = {"int4": torch.uint8, "q4_k": torch.uint8, "fp8": torch.float8_e4m3fn}.get(name.split()[0], torch.int8)
    group = {"int8": k, "fp8": k, "int8 32": 32, "q4_k": 32, "q5_1": 32, "q6_k": 16}.get(name, 128)
    small = partial(empty, n, k // group, dtype=torch.uint8 if name == "q4_k" else torch.int8)
    halves = partial(empty, n, k // 256, dtype=torch.float16)
    is_super = name in ("q4_k", "q6_k")
    return QuantizedWeight.pack(
        empty(n, k, dtype=dtype),
        small() if is_super else empty(n, k // group),
        group,
        bits=4 if dtype == torch.uint8 else 8,
        zero=8 if name == "int4 128" else empty(n, k // group, dtype=dtype) if name.endswith("zeros") else 0,
        super_scale=halves() if is_super else None,
        minimum=small() if name == "q4_k" else empty(n, k // group) if name == "q5_1" else None,
        super_minimum=halves() if name == "q4_k" else None,
    )


def down(rows: int, name: str) -> None:
    stream = empty(rows, HIDDEN)
    weight = weight_of(HIDDEN, INNER, name)
    linear(empty(rows, INNER), weight, stream, residual=stream, next_norm=next_norm(rows, HIDDEN))


def plain(rows: int, name: str, dtype: torch.dtype) -> None:
    linear(empty(rows, 576, dtype=dtype), weight_of(576, 576, name), empty(rows, 576, dtype=dtype))


def gated(rows: int, name: str) -> None:
    weight = weight_of(2 * INNER, HIDDEN, name)
    gated_linear(empty(rows, HIDDEN), weight, empty(rows, INNER), norm=norm(rows, HIDDEN), activation="silu")


def qkv(rows: int, name: str, hidden: int, heads: int, kv_heads: int, head_dim: int, head_norms: bool) -> None:
    cache, head_norm = empty(8, 64, kv_heads, head_dim), empty(head_dim) if head_norms else None
    angles = empty(rows, head_dim // 2)
    qkv_linear(
        empty(rows, hidden), weight_of((heads + 2 * kv_heads) * head_dim, hidden, name), empty(rows, heads * head_dim),
        cache, cache, norm=norm(rows, hidden), q_norm=head_norm, k_norm=head_norm, cos=angles, sin=angles,
        slots=empty(rows, dtype=torch.int64),
    )  # fmt: skip


def head(rows: int, name: str, trimmed: bool) -> None:
    ids = empty(15872, dtype=torch.int32) if trimmed else None
    count = empty(1, dtype=torch.int32) if trimmed else None
    scores = Scores.empty(rows, 15872 if trimmed else VOCABULARY, 1, "meta")
    lm_head_scores(
        empty(rows, HIDDEN), weight_of(VOCABULARY, HIDDEN, name), scores, token_ids=ids, gather=trimmed, count=count
    )


def embed(name: str) -> None:
    ints = partial(empty, dtype=torch.int32)
    metadata = RowMetadata.empty(4, 1, 64, torch.bfloat16, "meta")
    embed_rope(
        metadata, empty(4, HIDDEN), next_norm(4, HIDDEN), weight_of(VOCABULARY, HIDDEN, name), None, ints(4),
        ints(4, 8), ints(1), empty(1, 64, dtype=torch.float32), empty(1, dtype=torch.float32), 0,
        given_tokens=empty(4, dtype=torch.int64),
    )  # fmt: skip


def rows_of(name: str) -> None:
    dequantize(weight_of(HIDDEN, INNER, name), slice(16, 64), empty(48, INNER))


def launches() -> Launches:
    """Every format; every height of tiles for the format that needs most registers."""
    yield from _all_formats()
    for rows in (16, 32, 64):
        yield f"down q4_k rows {rows}", partial(down, rows, "q4_k")
        yield f"gated q4_k rows {rows}", partial(gated, rows, "q4_k")
    yield "gated int4 128 rows 64", partial(gated, 64, "int4 128")
    yield "qkv with head norms q4_k rows 16", partial(qkv, 16, "q4_k", 2048, 16, 8, 128, True)
    yield "qkv int4 rows 64", partial(qkv, 64, "int4 128", HIDDEN, HEADS, KV_HEADS, HEAD_DIM, False)
    yield "head q6_k rows 16", partial(head, 16, "q6_k", False)
    yield "trimmed head int8 rows 64", partial(head, 64, "int8", True)
    for name in ("int8 32", "q4_k", "q6_k"):
        yield f"embedding {name}", partial(embed, name)
    yield "dequantize q4_k", partial(rows_of, "q4_k")
    yield "float16", partial(plain, 3, "int8 32", torch.float16)
    yield "float32", partial(plain, 3, "int8 32", torch.float32)


def _all_formats() -> Iterator[tuple[str, partial[None]]]:
    for name in FORMATS:
        yield f"down {name} rows 1", partial(down, 1, name)
