"""Linear layer that can end in a residual stream: out = residual + bias + x @ weight^T, rounded once.

x [R, K], weight [N, K], out [R, N]. With a norm, x is a scaled stream (see `norm`). If a norm reads `out` next, the
same launch writes what that norm needs. Used for attention output, down projection, and the exit's linear layers. The
sum over K runs in one program in fixed blocks (see `gemm_common`).
"""

from __future__ import annotations

import torch

from selfspec.kernels.gemm_common import TileConfig, check_matmul, matmul_reference, norm_squares
from selfspec.kernels.noise import check_tensor
from selfspec.kernels.norm import (
    NextNorm,
    Norm,
    check_squares,
    columns_per_square,
    next_scale,
    next_strides,
    next_tensors,
    tree_sum_groups,
)
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.quantized_launch import Weight, choose_weight_tile, weight_arguments, weight_settings
from selfspec.kernels.quantized_tile import prefetch_tile, weight_tile
from selfspec.kernels.triton_compat import jit, tl


def linear_reference(
    x: torch.Tensor,
    weight: Weight,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gather: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + bias + x @ weight^T, [R, N], rounded once. With a norm x is the scaled stream; with `gather` [R] row r
    of the input is x[gather[r]]."""
    if gather is not None:
        x, norm = x[gather], None if norm is None else Norm(norm.eps, norm.squares[gather])
    product = matmul_reference(x, weight, bias, norm)
    return (product if residual is None else residual + product).to(x.dtype)


@jit(do_not_specialize=["row_count"])
def _linear_kernel(
    x, gather, weight, out, bias, residual, next_weight, squares_out, scaled_out, squares, row_count,
    x_stride, weight_stride, out_stride, residual_stride, squares_out_stride, scaled_stride, squares_stride,
    N: tl.constexpr, K: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, SHRINK: tl.constexpr, NEXT_OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICING: tl.constexpr, FORMAT: tl.constexpr,
    PREFETCH: tl.constexpr, RELEASE_EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row tile, column tile): out [BM, BN]. WIDTH: columns per entry of `squares_out`."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    source = tl.minimum(row, row_count - 1).to(tl.int64)  # rows past the end repeat the last one and are not stored
    x_row = source
    if gather is not None:  # read before `wait`: no kernel of the pass writes it
        x_row = tl.load(gather + source)
    weight_rows = tl.minimum(column, N - 1)
    weight_offsets = weight_rows.to(tl.int64) * weight_stride
    inside = (row < row_count)[:, None] & (column < N)[None, :]
    if next_weight is not None:
        scale = next_scale(next_weight, column, column < N, NEXT_OFFSET, SHRINK)
    prefetch_tile(weight, weight_rows, weight_offsets, weight_stride, BN, PREFETCH, PDL, FORMAT)
    wait(PDL)
    if RELEASE_EARLY:
        release(PDL)
    if residual is not None:  # loaded early, needed late; may be `out`: a program reads only what it overwrites itself
        kept = tl.load(residual + source[:, None] * residual_stride + column[None, :], mask=inside, other=0.0)
    result = weight_tile(
        x, weight, squares, row < row_count, x_row * x_stride, weight_rows, weight_offsets,
        x_row * squares_stride, weight_stride, K, T, CHUNKS, EPS, SHRINK, BM, BN, BK, SLICING, FORMAT,
    )  # fmt: skip
    if not RELEASE_EARLY:
        release(PDL)
    if bias is not None:
        result += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        result += kept.to(tl.float32)
    stored = result.to(out.dtype.element_ty)
    to = row.to(tl.int64)[:, None]
    tl.store(out + to * out_stride + column[None, :], stored, mask=inside)
    if next_weight is not None:
        rounded = tl.where(inside, stored.to(tl.float32), 0.0)
        scaled = (rounded * scale[None, :]).to(out.dtype.element_ty)
        tl.store(scaled_out + to * scaled_stride + column[None, :], scaled, mask=inside)
        sums = tree_sum_groups(rounded * rounded, BM, BN, BN // WIDTH)
        entry = tl.program_id(1) * (BN // WIDTH) + tl.arange(0, BN // WIDTH)
        tl.store(
            squares_out + to * squares_out_stride + entry[None, :],
            sums,
            mask=(row < row_count)[:, None] & (entry * WIDTH < N)[None, :],
        )


def linear(
    x: torch.Tensor,  # [R, K], or any rows that `gather` takes from
    weight: Weight,  # [N, K]
    out: torch.Tensor,  # [R, N]
    *,
    bias: torch.Tensor | None = None,  # [N]
    norm: Norm | None = None,  # x is the scaled stream
    residual: torch.Tensor | None = None,  # [R, N]; may be `out` itself
    next_norm: NextNorm | None = None,  # the norm that reads `out` next
    gather: torch.Tensor | None = None,  # [R] int64: row r of the input is x[gather[r]]
    config: TileConfig | None = None,
) -> None:
    """out = residual + bias + x @ weight^T, and what the next norm reads."""
    taken = x if gather is None else x[:1].expand(gather.shape[0], -1)
    rows, n = taken.shape[0], weight.shape[0]
    check_matmul(taken, weight, bias, None)
    if norm is not None:
        check_squares(norm.squares, *x.shape, x.device)
    check_tensor(out, "out", (rows, n), (x.dtype,), x.device)
    if residual is not None:
        check_tensor(residual, "residual", (rows, n), (x.dtype,), x.device)
    if gather is not None and (gather.dtype != torch.int64 or gather.stride() != (1,)):
        raise ValueError("gathered rows must be given as contiguous int64")
    if next_norm is not None:
        next_norm.check(out)
    config = config or choose_weight_tile("linear", weight, rows)
    settings = weight_settings(x, weight, norm, config)
    width = columns_per_square(n)
    if next_norm is not None and settings["BN"] % width:
        raise ValueError(f"tiles of {settings['BN']} columns cannot sum squares over {width}")
    squares, squares_stride = norm_squares(norm)
    tensors, weight_stride = weight_arguments(weight)
    _linear_kernel[(-(-rows // settings["BM"]), -(-n // settings["BN"]))](
        x, gather, tensors, out, bias, residual, *next_tensors(next_norm), squares, rows,
        x.stride(0), weight_stride, out.stride(0), residual.stride(0) if residual is not None else 0,
        *next_strides(next_norm), squares_stride,
        N=n, WIDTH=width, NEXT_OFFSET=float(next_norm.offset) if next_norm else 0.0,
        RELEASE_EARLY=config.release_early, **settings,
    )  # fmt: skip
