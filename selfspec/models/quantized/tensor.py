"""QuantizedTensor: the values of a quantized weight without the layout of the file that it comes from.

`pack` makes a QuantizedWeight of it, as the model holds it and the kernels read it.

Every reader of this package returns one. Values are exact: `dequantize` gives the reference library's float32 values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd
from typing import Any

import torch

from selfspec.kernels.quantized_weight import TILE_ROWS, QuantizedWeight, common_dtype

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_COLUMNS = 16  # columns and groups are packed in multiples of these


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight [N, K] of small numbers q with a scale for each group of `group` columns of a row:

    w = scale * (q - zero) - minimum

    Where `super_scale` is given, `scale` holds int8 or uint8 and scale * super_scale is the group's scale; likewise
    `minimum`.
    """

    q: torch.Tensor  # [N, K]: uint8 of 0..15 (4 bits), int8 or float8_e4m3fn (8 bits)
    bits: int
    scale: torch.Tensor  # [N, K / group]
    group: int  # K: one scale per row
    zero: torch.Tensor | int = 0  # one for all weights, or [N, K / group] of q's dtype
    super_scale: torch.Tensor | None = None  # [N, K / 256] float16
    minimum: torch.Tensor | None = None  # [N, K / group]
    super_minimum: torch.Tensor | None = None  # [N, K / 256] float16

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1]

    def scales(self) -> torch.Tensor:
        """Returns the scale of each group in float32, which holds scale * super_scale exactly: [N, K / group]."""
        return _product(self.scale, self.super_scale)

    def minimums(self) -> torch.Tensor | None:
        """Returns the minimum of each group in float32, exactly: [N, K / group]; None if all are 0."""
        return None if self.minimum is None else _product(self.minimum, self.super_minimum)

    def dequantize(self) -> torch.Tensor:
        """Returns the weight in float32: [N, K]."""
        zero = self.zero.float()[..., None] if isinstance(self.zero, torch.Tensor) else self.zero
        weight = (self.q.float().unflatten(1, (-1, self.group)) - zero) * self.scales()[..., None]
        minimums = self.minimums()
        if minimums is not None:
            weight -= minimums[..., None]
        return weight.flatten(1)

    def regrouped(self, group: int) -> QuantizedTensor:
        """Returns the same weight in smaller groups, whose size divides the group's."""
        repeats = self.group // group
        if repeats == 1:
            return self
        changed: dict[str, Any] = {
            name: tensor.repeat_interleave(repeats, 1)
            for name, tensor in self._tensors().items()
            if name in ("scale", "zero", "minimum")
        }
        return replace(self, group=group, **changed)

    def check_values(self, name: str) -> QuantizedTensor:
        """Returns itself; raises ValueError, which names the tensor, for a value that is not finite."""
        for field, tensor in self._tensors().items():
            if tensor.dtype == torch.float8_e4m3fn:  # its only non-finite values are the NaNs 0x7f and 0xff
                finite = not ((tensor.view(torch.uint8) & 0x7F) == 0x7F).any()
            else:
                finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
            if not finite:
                raise ValueError(
                    f"{name} is damaged: its {field} holds a value that is not finite; download the file again"
                )
        return self

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Returns one weight with the rows of all parts; no value changes.

    Parts may differ in format: the result has 8 bits if one part has, the smallest common group, and float32 scales
    where no narrower dtype holds all of them. float8 parts go only with float8 parts.
    """
    group = reduce(gcd, (part.group for part in parts))
    parts = [part.regrouped(group) for part in parts]
    q = torch.cat([part.q.to(common_dtype([part.q for part in parts])) for part in parts])
    bits = max(part.bits for part in parts)
    has_super = all(part.super_scale is not None for part in parts)
    scale, super_scale = _join([(part.scale, part.super_scale) for part in parts], has_super)
    minimum, super_minimum = None, None
    if any(part.minimum is not None for part in parts):
        minimum, super_minimum = _join(_minimum_pairs(parts), has_super)
    return QuantizedTensor(q, bits, scale, group, _join_zeros(parts, q.dtype), super_scale, minimum, super_minimum)


def _join(
    pairs: list[tuple[torch.Tensor, torch.Tensor | None]], has_super: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Concatenates scales, or minimums, with their super values; multiplies them out unless all parts have them."""
    supers = [above for _, above in pairs if above is not None]
    fine = [values if has_super or above is None else _product(values, above) for values, above in pairs]
    return torch.cat([values.to(common_dtype(fine)) for values in fine]), torch.cat(supers) if has_super else None


def _minimum_pairs(parts: Sequence[QuantizedTensor]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Returns minimum and super_minimum of each part; zeros, of another part's dtypes, where a part has none."""
    minimum, above = next((part.minimum, part.super_minimum) for part in parts if part.minimum is not None)

    def zeros(like: torch.Tensor, part: QuantizedTensor) -> torch.Tensor:
        return like.new_zeros(part.shape[0], like.shape[1])

    return [
        (part.minimum, part.super_minimum)
        if part.minimum is not None
        else (zeros(minimum, part), None if above is None else zeros(above, part))
        for part in parts
    ]


def _join_zeros(parts: Sequence[QuantizedTensor], dtype: torch.dtype) -> torch.Tensor | int:
    first = parts[0].zero
    if isinstance(first, int) and all(isinstance(part.zero, int) and part.zero == first for part in parts):
        return first
    return torch.cat(
        [
            part.zero.to(dtype)
            if isinstance(part.zero, torch.Tensor)
            else torch.full(part.scale.shape, part.zero, dtype=dtype, device=part.q.device)
            for part in parts
        ]
    )


def _product(fine: torch.Tensor, coarse: torch.Tensor | None) -> torch.Tensor:
    if coarse is None:
        return fine.float()
    return fine.float() * coarse.float().repeat_interleave(fine.shape[1] // coarse.shape[1], 1)


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
    return QuantizedWeight.pack(**vars(parts[0] if len(parts) == 1 else concatenate(parts)))


def join(parts: Iterable[QuantizedWeight], rows: int) -> QuantizedWeight:
    """Returns one weight of so many rows with those of packed parts, which all have one format. Copies each part before
    it takes the next one, so that no two are in memory beside the result."""
    fields: dict[str, Any] = {}
    start = 0
    for part in parts:
        if part.shape[0] == rows:
            return part
        tensors = part.tensors()
        packed = tensors.pop("packed")
        stop = start + part.shape[0]
        if not start:
            fields["packed"] = packed.new_zeros(-(-rows // TILE_ROWS), *packed.shape[1:])
            fields |= {name: tensor.new_empty(len(tensor), rows, *tensor.shape[2:]) for name, tensor in tensors.items()}
        part.write_rows(fields["packed"], start)
        for name, tensor in tensors.items():
            fields[name][:, start:stop].copy_(tensor)
        start = stop
    return replace(part, **fields)
