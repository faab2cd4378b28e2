"""Launch settings of the fused matmuls for weights in any format: tiles, stages and kernel arguments.

For dense weights these are the functions of `gemm_common`. In a program of a quantized weight each warp keeps the sums
of 16 or 32 weight rows over a part of K in its registers. Tiles and splits were chosen by sweeps on an H200 at the
shapes of Llama-8B in int4, int8 and Q4_K (`python -m bench.quantized --sweep`), and by the registers that sm_86 spills;
no other GPU was measured.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from selfspec.kernels.gemm_common import TileConfig, choose_tile, launch_settings, norm_constants
from selfspec.kernels.norm import Norm, columns_per_square
from selfspec.kernels.quantized_format import format_of, weight_tensors
from selfspec.kernels.quantized_weight import TILE_ROWS, QuantizedWeight
from selfspec.kernels.topk import TILE as HEAD_TILE
from selfspec.kernels.triton_compat import pdl_options

Weight: TypeAlias = torch.Tensor | QuantizedWeight

_MIN_WARPS, _MAX_WARPS = 4, 16  # of a program: one per scheduler of an SM; more leave a thread under 128 registers
_FEW_WEIGHT_ROWS = 4096  # up to so many weight rows, more warps with shorter sums are faster (H200, 132 SMs)
_PREFETCH_WORDS = 128  # 32-bit words per weight row, prefetched into L2 while a launch waits for the one before it


def choose_weight_tile(kind: str, weight: Weight, rows: int) -> TileConfig:
    """The tile for `rows` rows of x and a weight; `kind`: as in `choose_tile`, or "head" for the LM head."""
    n, k = weight.shape
    if not isinstance(weight, QuantizedWeight):
        return choose_tile(kind, n, k, rows)
    splits = choose_splits(kind, n, k)
    block_m = 8 if rows <= 8 else 16 if rows <= 16 else 32
    width = rows_of_warp(weight, block_m) * max(1, _MIN_WARPS // splits)
    width = max(width, columns_per_square(n) if kind == "linear" else HEAD_TILE if kind == "head" else TILE_ROWS)
    return TileConfig(width, block_k=0, stages=1, warps=splits, block_m=block_m, prefetch=_PREFETCH_WORDS)


def rows_of_warp(weight: QuantizedWeight, block_m: int) -> int:
    """Returns the weight rows of a warp, 16 or 32, in a tile of `block_m` rows of x. With 32 a warp loads x half as
    often; with 16 there are more warps, which few rows of x and few weight rows need."""
    is_wide = block_m > 16 or (block_m == 16 and weight.shape[0] > 2 * _FEW_WEIGHT_ROWS)
    return 2 * TILE_ROWS if is_wide else TILE_ROWS


def choose_splits(kind: str, n: int, k: int) -> int:
    """Returns the number of splits of K, each of which is summed by its own warps. It decides the order of summation,
    so it depends on nothing but the weight's shape and use. Few weight rows need many splits to occupy the GPU; with
    many rows, few splits let each warp sum more columns."""
    if kind in ("head", "qkv_norm") or n > 2 * _FEW_WEIGHT_ROWS:
        return 2
    return 8 if n <= _FEW_WEIGHT_ROWS < k and kind == "linear" else 4


def weight_settings(
    x: torch.Tensor, weight: Weight, norm: Norm | None, config: TileConfig, block_n: int | None = None
) -> dict[str, Any]:
    """Constexpr arguments and launch options of a matmul; `block_n` replaces the config's."""
    if not isinstance(weight, QuantizedWeight):
        return launch_settings(x, weight, norm, config, block_n) | {"FORMAT": None}
    return {
        "K": weight.columns,
        **norm_constants(weight.columns, x.dtype, norm),
        "SLICING": None,
        **quantized_settings(x, weight, config, block_n or config.block_n),
        "PREFETCH": config.prefetch if 4 * config.prefetch * TILE_ROWS <= weight.packed.stride(0) else 0,
        "enable_fp_fusion": False,
        **pdl_options(x),
    }


def quantized_settings(x: torch.Tensor, weight: QuantizedWeight, config: TileConfig, block_n: int) -> dict[str, Any]:
    """The tile, the weight's format and the warps of a matmul or the LM head; config.warps are its splits."""
    if x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        raise ValueError("the rows of x must begin at multiples of 16 bytes; copy x to a tensor of its own")
    row_warps = min(max(1, block_n // rows_of_warp(weight, config.block_m)), _MAX_WARPS // config.warps)
    return {
        "BM": config.block_m,
        "BN": block_n,
        "BK": row_warps,
        "FORMAT": format_of(weight, x.dtype, config.warps),
        "num_warps": config.warps * row_warps,
        "num_stages": 1,
    }


def weight_arguments(weight: Weight) -> tuple[Any, int]:
    """The kernel argument `weight`, and the stride of its rows, or in words that of a quantized weight's 16 rows."""
    if isinstance(weight, QuantizedWeight):
        return weight_tensors(weight), weight.packed.stride(0) // 4
    return weight, weight.stride(0)
