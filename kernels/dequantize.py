"""Dequantizes rows of a QuantizedWeight, for products with many rows that PyTorch's matmul computes.

A program reads whole tiles of 16 rows. Values are those of `QuantizedWeight.dequantize`, rounded to the dtype of `out`.
"""

from __future__ import annotations

import torch

from selfspec.kernels.quantized_format import format_of
from selfspec.kernels.quantized_launch import weight_arguments
from selfspec.kernels.quantized_tile import dequantize_row
from selfspec.kernels.quantized_weight import TILE_ROWS, QuantizedWeight
from selfspec.kernels.triton_compat import jit, tl

_COLUMNS = 256  # of a program: 8 KB in 16 bits


def dequantize_reference(weight: QuantizedWeight, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """The rows in `dtype`, [rows, K]."""
    return weight.rows(rows).dequantize().to(dtype)


@jit(do_not_specialize=["first", "stop"])
def _dequantize_kernel(
    weight, out, first, stop,
    K: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Program (row tile, column block): out [ROWS, COLUMNS]; rows from `first` to `stop`."""
    row = (first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < stop) & (column < K)
    values = dequantize_row(weight, row, column, inside, STRIDE, FORMAT)
    tl.store(out + (row - first) * K + column, values.to(out.dtype.element_ty), mask=inside)


def dequantize(weight: QuantizedWeight, rows: slice, out: torch.Tensor) -> None:
    """Writes a range of rows, which begins at a multiple of 16, to `out` [rows, K]."""
    start, stop, _ = rows.indices(weight.shape[0])
    if start % TILE_ROWS or out.shape != (stop - start, weight.columns) or not out.is_contiguous():
        raise ValueError(
            f"rows {start} to {stop} of {list(weight.shape)} do not begin at a multiple of {TILE_ROWS}, or do not fit "
            f"into a contiguous tensor {list(out.shape)}"
        )
    tensors, stride = weight_arguments(weight)
    grid = (-(-(stop - start) // TILE_ROWS), -(-weight.columns // _COLUMNS))
    _dequantize_kernel[grid](
        tensors, out, start, stop, K=weight.columns, STRIDE=stride, ROWS=TILE_ROWS, COLUMNS=_COLUMNS,
        FORMAT=format_of(weight, out.dtype, 1), num_warps=4,
    )  # fmt: skip
