"""Launch settings of the fused matmuls for weights in any format: tiles, stages and kernel arguments.

For dense weights these are the functions of `gemm_common`. A program of a quantized weight keeps all sums of its tile
in the registers of each of its warps, which divide K among them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from selfspec.kernels.gemm_common import TileConfig, choose_tile, launch_settings, norm_constants
from selfspec.kernels.norm import Norm, columns_per_square
from selfspec.kernels.quantized_format import format_of, weight_tensors
from selfspec.kernels.quantized_weight import HALF, TILE_ROWS, QuantizedWeight
from selfspec.kernels.triton_compat import processors, shared_bytes, use_pdl

Weight: TypeAlias = torch.Tensor | QuantizedWeight

_EXCHANGE_BYTES = 12 * 1024  # shared memory in which a program exchanges scales and sums between threads
_PREFETCH_BYTES = 512  # of each weight row, while a launch waits for the one before it


def choose_weight_tile(kind: str, weight: Weight, rows: int) -> TileConfig:
    """The tile for `rows` rows and a weight; kind as of `choose_tile`, or "head" for the LM head."""
    n, k = weight.shape
    if not isinstance(weight, QuantizedWeight):
        return choose_tile(kind, n, k, rows)
    return TileConfig(
        block_n=_choose_width(kind, n),
        block_k=0,
        stages=3,  # more did not pay on an H200: several programs share an SM and its memory
        warps=choose_splits(kind, n, k),
        block_m=8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64,
        prefetch=_PREFETCH_BYTES,
    )


def choose_splits(kind: str, n: int, k: int) -> int:
    """Warps that divide K among them. Sums depend on it: it must depend on nothing but the weight's shape and use."""
    return 8 if n <= 8192 and k >= 4096 and kind in ("linear", "qkv", "gate_up") else 4


def _choose_width(kind: str, n: int) -> int:
    """Weight rows of a tile: few enough that each of 132 SMs gets a program."""
    least = columns_per_square(n) if kind == "linear" else 16
    return max(least, 64 if n >= 8192 else 32 if n >= 2048 else 16)


def _most_sums(weight: QuantizedWeight) -> int:
    """Sums of a tile that fit the registers, 32 or 64 per thread, beside as many of a group and the group's scales."""
    has_offsets = weight.minimum is not None or isinstance(weight.zero, torch.Tensor)
    return 2048 if weight.is_by_row or (weight.parts == 1 and not has_offsets) else 1024


def weight_settings(
    x: torch.Tensor, weight: Weight, norm: Norm | None, config: TileConfig, block_n: int | None = None
) -> dict[str, Any]:
    """Constexpr arguments and launch options of a matmul; block_n: instead of the config's."""
    if not isinstance(weight, QuantizedWeight):
        return launch_settings(x, weight, norm, config, block_n) | {"FORMAT": None}
    width = block_n or config.block_n
    block_m, stages = fit_stages(x, weight, config, width)
    pdl = use_pdl(x)
    return {
        "K": weight.columns,
        **norm_constants(weight.columns, x.dtype, norm),
        "BM": block_m,
        "BN": width,
        "BK": 0,
        "SLICING": None,
        "FORMAT": format_of(weight, x.dtype, config.warps),
        "PREFETCH": config.prefetch if config.prefetch * TILE_ROWS <= weight.packed.stride(0) else 0,
        "PDL": pdl,
        "num_warps": config.warps,
        "num_stages": stages,
        "enable_fp_fusion": False,
        **({"launch_pdl": True} if pdl else {}),
    }


def fit_stages(x: torch.Tensor, weight: QuantizedWeight, config: TileConfig, block_n: int) -> tuple[int, int]:
    """Rows of a tile, and pipeline stages. Tiles are lower where two stages would not fit the shared memory, or the
    sums of block_n weight rows the registers. Programs that can run at the same time share the memory of an SM."""
    block_m = max(8, min(config.block_m, _most_sums(weight) // block_n))
    weight_bytes = config.warps * block_n * HALF * (1 if weight.bits == 4 else 2)
    # Float32 products need as much memory again, to exchange operands.
    available = (shared_bytes(x) - _EXCHANGE_BYTES) * 2 // x.element_size()

    def stage_bytes(height: int) -> int:
        return weight_bytes + config.warps * height * 2 * HALF * x.element_size()

    while block_m > 8 and available // stage_bytes(block_m) < 2:
        block_m //= 2
    programs = -(-x.shape[0] // block_m) * -(-weight.shape[0] // block_n)
    together = min(-(-programs // processors(x)), 16 // config.warps)
    buffers = max(available // together, 2 * stage_bytes(block_m)) // stage_bytes(block_m)
    return block_m, max(1, min(config.stages, buffers + 1))  # one stage is in registers


def weight_arguments(weight: Weight) -> tuple[Any, int]:
    """The kernel argument `weight`, and the stride of its rows, or of a quantized weight's tiles of 16 rows."""
    if isinstance(weight, QuantizedWeight):
        return weight_tensors(weight), weight.packed.stride(0)
    return weight, weight.stride(0)
