"""Format: how kernels read and sum a QuantizedWeight. Host side of `quantized_tile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from selfspec.kernels.norm import next_power_of_two
from selfspec.kernels.quantized_convert import bias, conversions, ones
from selfspec.kernels.quantized_weight import HALF, SUPER_COLUMNS, TILE_ROWS, QuantizedWeight
from selfspec.kernels.triton_compat import INTERPRETED


@dataclass(frozen=True)
class Format:
    """Constexpr argument of kernels: how a QuantizedWeight is stored, and how it is summed."""

    kind: str  # int4, int8 or fp8
    group: int  # columns that share a scale
    by_row: bool  # one scale per row
    parts: int  # scales of a unit: 1, 2 or 4
    zero: int  # subtracted from all of the weight's numbers
    bias: int  # added to them in products, and subtracted with the offsets
    has_offsets: bool  # groups have zeros or minimums of their own
    half: int  # columns of half a unit
    tile_rows: int  # rows whose bytes of a unit, or of half a unit, are neighbours
    groups: int  # scales of a row
    groups_power: int  # the next power of two
    super_columns: int  # columns that share a super scale
    super_groups: int  # super scales of a row, at least 1
    super_groups_power: int
    rows: int  # of the weight
    splits: int  # warps that divide K among them
    low: str | None  # PTX that converts bytes to columns of a unit's first half; None: converted by Triton
    high: str | None
    ones: str | None  # PTX that gives 1 for every byte


def format_of(weight: QuantizedWeight, dtype: torch.dtype, splits: int) -> Format:
    """The format of a weight that is multiplied with states of `dtype`."""
    zero = weight.zero if isinstance(weight.zero, int) else 0
    has_offsets = isinstance(weight.zero, torch.Tensor) or weight.minimum is not None
    added = bias(weight.kind, has_offsets)
    low, high = (None if INTERPRETED else conversions(weight.kind, dtype, zero - added)) or (None, None)
    groups, supers = weight.scale.shape[0], max(1, weight.columns // SUPER_COLUMNS)
    return Format(
        weight.kind, weight.group, weight.is_by_row, weight.parts, zero, added, has_offsets, HALF, TILE_ROWS,
        groups, next_power_of_two(groups), SUPER_COLUMNS, supers, next_power_of_two(supers),
        weight.shape[0], splits, low, high, None if INTERPRETED else ones(dtype),
    )  # fmt: skip


def weight_tensors(weight: QuantizedWeight) -> tuple[Any, ...]:
    """The tensors of a weight: a kernel argument. float8 goes as bytes, because sm_80 has no float8."""
    packed = weight.packed.view(torch.uint8) if weight.kind == "fp8" else weight.packed
    zeros = weight.zero if isinstance(weight.zero, torch.Tensor) else None
    return packed, weight.scale, weight.super_scale, zeros, weight.minimum, weight.super_minimum
