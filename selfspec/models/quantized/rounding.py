"""Quantizes 16-bit weights by rounding to the nearest integer, with the scale of least squared error for each group.

8 bits are symmetric; 4 bits have a zero point per group. docs/lab-notes.md has the errors by group size.
"""

from __future__ import annotations

import torch

from selfspec.models.quantized.tensor import QuantizedTensor

_RANGES = {4: (0, 15), 8: (-128, 127)}  # of q, by bits
_CHUNK_VALUES = 4 * 2**20  # weights quantized at a time: 16 MB in float32, about five times that with intermediate ones

# Tried parts of the scale at which the largest weight of a group is not cut off. The best ones lie between 0.6 (groups
# of whole rows) and 1.05 (groups of 32); finer steps lower the error by at most 2%.
_FACTORS = [0.6 + 0.025 * index for index in range(19)]


def quantize(weight: torch.Tensor, bits: int, group: int | None = None) -> QuantizedTensor:
    """Returns a weight [N, K] in 4 or 8 bits with bfloat16 scales for groups of columns; None: for whole rows.

    Beside the result it takes about 90 MB, whatever the weight's size.
    """
    n, k = weight.shape
    group = k if group is None else group
    q = torch.empty(n, k, dtype=torch.uint8 if bits == 4 else torch.int8, device=weight.device)
    scale = torch.empty(n, k // group, dtype=torch.bfloat16, device=weight.device)
    zero = torch.zeros(n, k // group, dtype=q.dtype, device=weight.device)
    step = max(1, _CHUNK_VALUES // k)
    for start in range(0, 0 if weight.is_meta else n, step):  # the meta device holds no values
        rows = slice(start, start + step)
        values = weight[rows].float().unflatten(1, (-1, group))  # [rows, K / group, group]
        if not bool(values.isfinite().all()):
            raise ValueError(f"rows from {start} on hold a value that is not finite; use an undamaged checkpoint")
        scales, zeros = _search(values, bits)
        q[rows] = _round(values, scales, zeros, bits).flatten(1)
        scale[rows], zero[rows] = scales[..., 0], zeros[..., 0]
    return QuantizedTensor(q, bits, scale, group, zero if bits == 4 else 0)


def _search(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scale, rounded to bfloat16, and the zero point of least squared error for each group: [..., 1]."""
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    full = high / 15 - low / 15 if bits == 4 else torch.maximum(high, -low) / 127
    full = torch.where(full < torch.finfo(torch.bfloat16).tiny, 1.0, full)  # then q is 0, or the zero point
    best = scale = zero = torch.full_like(full, torch.inf)
    for factor in _FACTORS:
        tried = (full * factor).bfloat16().float()  # before q is chosen, so that rounding it costs no precision
        zeros = (-low * factor / tried).round().clamp(0, 15) if bits == 4 else torch.zeros_like(tried)
        fitted = (_round(values, tried, zeros, bits) - zeros) * tried
        error = ((values - fitted) / full).square().sum(-1, keepdim=True)  # in units whose squares are in range
        better = error < best
        best, scale, zero = (
            torch.where(better, now, kept) for now, kept in ((error, best), (tried, scale), (zeros, zero))
        )
    return scale, zero


def _round(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (values / scale).round().add_(zero).clamp_(*_RANGES[bits])
