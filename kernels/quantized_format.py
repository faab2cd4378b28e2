"""Format: how kernels read and multiply a QuantizedWeight. Host side of `quantized_tile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from selfspec.kernels.quantized_convert import Conversion, conversion
from selfspec.kernels.quantized_weight import HALF, STEP, SUPER_COLUMNS, TILE_ROWS, QuantizedWeight
from selfspec.kernels.triton_compat import INTERPRETED


@dataclass(frozen=True)
class Format:
    """Constexpr argument of kernels: how a QuantizedWeight is stored, and how it is multiplied."""

    kind: str  # int4, int8 or fp8
    group: int  # columns that share a scale
    by_row: bool  # one scale per row
    parts: int  # scales of a step: 1, 2, 4 or 8
    has_minimum: bool  # groups have minimums, which follow the scales of a step
    zero: int  # subtracted from all of the weight's numbers
    has_zeros: bool  # groups have zeros of their own
    half: int  # columns of half a unit
    step: int  # columns of a step of the loop
    tile_rows: int  # rows whose bytes of a unit, or of half a unit, are neighbours
    super_columns: int  # columns that share a super scale
    rows: int  # of the weight
    splits: int  # into which K is divided; each is summed by its own warps
    rows_ahead: int  # of x: up to so many are loaded two steps ahead, more would take too many registers
    convert: Conversion  # words to weights of x's dtype


def format_of(weight: QuantizedWeight, dtype: torch.dtype, splits: int) -> Format:
    """The format of a weight that is multiplied with states of `dtype`."""
    has_zeros = isinstance(weight.zero, torch.Tensor)
    zero = weight.zero if isinstance(weight.zero, int) else 0
    return Format(
        weight.kind, weight.group, weight.is_by_row, weight.parts, weight.has_minimum, zero, has_zeros,
        HALF, STEP, TILE_ROWS, SUPER_COLUMNS, weight.shape[0], splits, 8 if weight.has_many_scales else 16,
        conversion(weight.kind, torch.float32 if INTERPRETED else dtype, weight.subtracts_zeros),
    )  # fmt: skip


def weight_tensors(weight: QuantizedWeight) -> tuple[Any, ...]:
    """The tensors of a weight: a kernel argument. The numbers go as words of 32 bits."""
    packed = weight.packed.view(torch.int32)
    zeros = weight.zero if isinstance(weight.zero, torch.Tensor) else None
    return packed, weight.scale, weight.super_scale, zeros
