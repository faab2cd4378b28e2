"""Packs QuantizedTensor, as readers return it, into QuantizedWeight, as the model holds it and the kernels read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from selfspec.kernels.quantized_weight import TILE_ROWS, QuantizedWeight
from selfspec.models.quantized.tensor import QuantizedTensor, concatenate

_COLUMNS = 16  # columns and groups are packed in multiples of these


def can_pack(parts: Sequence[QuantizedTensor]) -> bool:
    """True if `pack` can make one weight of these."""
    columns = {part.shape[1] for part in parts}
    groups = {part.group for part in parts}
    kinds = {part.q.dtype.is_floating_point for part in parts}
    whole_rows = groups == columns
    return (
        len(columns) == len(kinds) == 1
        and not any(count % _COLUMNS for count in columns)
        and (whole_rows or not any(group % _COLUMNS for group in groups))
    )


def pack(parts: Sequence[QuantizedTensor]) -> QuantizedWeight:
    """Returns one weight with the rows of all parts; no value changes."""
    whole = parts[0] if len(parts) == 1 else concatenate(parts)
    return QuantizedWeight.pack(
        whole.q,
        whole.scale,
        whole.group,
        bits=whole.bits,
        zero=whole.zero,
        super_scale=whole.super_scale,
        minimum=whole.minimum,
        super_minimum=whole.super_minimum,
    )


def join(parts: Iterable[QuantizedWeight], rows: int) -> QuantizedWeight:
    """Returns one weight of so many rows with those of packed parts, which all have one format. Copies each part before
    it takes the next one, so that no two are in memory beside the result."""
    fields: dict[str, Any] = {}
    start = 0
    for part in parts:
        if part.shape[0] == rows:
            return part
        tensors = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        packed = tensors.pop("packed")
        stop = start + part.shape[0]
        if not start:
            fields["packed"] = packed.new_zeros(-(-rows // TILE_ROWS), *packed.shape[1:])
            fields |= {name: tensor.new_empty(len(tensor), rows) for name, tensor in tensors.items()}
        part.write_rows(fields["packed"], start)
        for name, tensor in tensors.items():
            fields[name][:, start:stop].copy_(tensor)
        start = stop
    return replace(part, **fields)
