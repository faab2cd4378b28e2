"""Linear: a weight and its bias, whatever format the weight is stored in. Also serves as embedding table and LM head.

The decoder and the exits compute with weights through `apply` and `rows` alone; the CUDA backend gives `weight` and
`bias` to its kernels. PyTorch's operations expand a quantized weight in each call, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from selfspec.kernels.quantized_weight import TILE_ROWS, QuantizedWeight

Weight: TypeAlias = torch.Tensor | QuantizedWeight

EXPANDED_TOGETHER = 4 * 2**20  # weights expanded at a time
EXPANDING_NBYTES = 12  # bytes that expanding a weight takes at most: three float32 numbers


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x @ weight.T + bias."""

    weight: Weight  # [N, K]
    bias: torch.Tensor | None = None  # [N]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def dense(self) -> torch.Tensor:
        """The weight, to be changed in place or compared by address; raises TypeError if it is quantized."""
        if not isinstance(self.weight, torch.Tensor):
            raise TypeError(f"the weight is quantized ({self.weight.bits} bits); use a model in 16 or 32 bits")
        return self.weight

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N], in the dtype of x."""
        if isinstance(self.weight, torch.Tensor):
            return F.linear(x, self.weight, self.bias)
        outputs = []
        for rows in _row_ranges(self.weight):
            bias = None if self.bias is None else self.bias[rows]
            outputs.append(F.linear(x, _expand_rows(self.weight, rows, x.dtype), bias))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def rows(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight's rows that `index` [...] selects, dense: [..., K]."""
        if isinstance(self.weight, torch.Tensor):
            return F.embedding(index, self.weight).to(dtype)
        return self.weight.rows(index.flatten()).dequantize().to(dtype).unflatten(0, index.shape)

    def part(self, rows: slice) -> Linear:
        """Returns a range of output rows, without the bias, in the same format."""
        return Linear(self.weight[rows] if isinstance(self.weight, torch.Tensor) else self.weight.rows(rows))


def expand(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Returns a weight as a tensor of this dtype; the weight itself if it is one."""
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    dense = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for rows in _row_ranges(weight):
        dense[rows] = _expand_rows(weight, rows, dtype)
    return dense


def _expand_rows(weight: QuantizedWeight, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """Returns a range of rows of `_row_ranges`, dense."""
    if not _has_kernel(weight):
        return weight.rows(rows).dequantize().to(dtype)
    from selfspec.kernels.dequantize import dequantize  # imports Triton

    dense = torch.empty(rows.stop - rows.start, weight.columns, dtype=dtype, device=weight.device)
    dequantize(weight, rows, dense)
    return dense


def _has_kernel(weight: QuantizedWeight) -> bool:
    if weight.device.type != "cuda" or torch.version.hip is not None:
        return False
    from selfspec.kernels.triton_compat import can_launch, triton  # imports Triton

    return triton is not None and can_launch()


def _row_ranges(weight: QuantizedWeight) -> Iterator[slice]:
    """Yields ranges of rows that are expanded together."""
    n, k = weight.shape
    # A kernel takes no more than the result, of at most 4 bytes.
    together = EXPANDED_TOGETHER * (EXPANDING_NBYTES // 4 if _has_kernel(weight) else 1)
    step = max(1, together // k // TILE_ROWS) * TILE_ROWS
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
