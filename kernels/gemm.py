"""A product that ends in a residual stream, or anywhere else: bias and residual are added, and what the stream's next
norm reads is written in the same launch. The loop itself is in `product`."""

from __future__ import annotations

import torch

from selfspec.kernels.gemm_common import (
    Config,
    check_product,
    check_rows,
    choose,
    launch_settings,
    norm_squares,
    product,
    product_reference,
)
from selfspec.kernels.norm import (
    NextNorm,
    Norm,
    block_width,
    check_squares,
    next_scale,
    next_strides,
    next_tensors,
    sum_neighbours,
)
from selfspec.kernels.pdl import fetch, release, wait
from selfspec.kernels.triton_compat import jit, tl


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gather: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + bias + x @ weight^T, [R, N], rounded once; with a norm x is the scaled stream, with `gather` [R] row r
    is row gather[r] of it."""
    if gather is not None:
        x, norm = x[gather], None if norm is None else Norm(norm.eps, norm.squares[gather])
    product = product_reference(x, weight, bias, norm)
    return (product if residual is None else residual + product).to(x.dtype)


@jit(do_not_specialize=["row_count"])
def _linear_kernel(
    x, gather, weight, out, bias, residual, next_weight, squares_out, scaled_out, squares, row_count,
    x_stride, weight_stride, out_stride, residual_stride, squares_out_stride, scaled_stride, squares_stride,
    N: tl.constexpr, K: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, SHRINK: tl.constexpr, NEXT_OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    source = tl.minimum(row, row_count - 1).to(tl.int64)  # rows past the end repeat the last one and store nothing
    x_row = source
    if gather is not None:  # written before the pass began, if at all
        x_row = tl.load(gather + source)
    weight_rows = tl.minimum(column, N - 1).to(tl.int64) * weight_stride
    inside = (row < row_count)[:, None] & (column < N)[None, :]
    if next_weight is not None:  # like all weights, it may be read before earlier kernels end
        scale = next_scale(next_weight, column, column < N, NEXT_OFFSET, SHRINK)
    fetch(weight, weight_rows, BN, AHEAD, PDL)
    wait(PDL)
    if EARLY:
        release(PDL)
    if residual is not None:  # asked for early, needed late; each program reads only what it will overwrite itself
        kept = tl.load(residual + source[:, None] * residual_stride + column[None, :], mask=inside, other=0.0)
    result = product(
        x, weight, squares, row < row_count, x_row * x_stride, weight_rows, x_row * squares_stride,
        K, T, CHUNKS, EPS, SHRINK, BM, BN, BK,
    )  # fmt: skip
    if not EARLY:
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
        sums = sum_neighbours(rounded * rounded, BM, BN, BN // WIDTH)
        tile = tl.program_id(1) * (BN // WIDTH) + tl.arange(0, BN // WIDTH)
        tl.store(
            squares_out + to * squares_out_stride + tile[None, :],
            sums,
            mask=(row < row_count)[:, None] & (tile * WIDTH < N)[None, :],
        )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    next_norm: NextNorm | None = None,
    gather: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """out [R, N] = residual + bias + x [R, K] @ weight [N, K]^T, and its companions for the next norm; `residual` may
    be `out` itself. With a norm x is the scaled stream; with `gather` [R] int64 row r is row gather[r] of any x."""
    taken = x if gather is None else x[:1].expand(gather.shape[0], -1)
    rows, n = taken.shape[0], weight.shape[0]
    check_product(taken, weight, bias, None)
    if norm is not None:
        check_squares(norm.squares, *x.shape)
    check_rows("out", out, taken, n)
    if residual is not None:
        check_rows("residual", residual, taken, n)
    if gather is not None and (gather.dtype != torch.int64 or gather.stride() != (1,)):
        raise ValueError("gathered rows must be given as contiguous int64")
    config = config or choose("linear", n, x.shape[1], rows)
    width = block_width(n)
    if next_norm is not None:
        next_norm.check(out)
    squares, squares_stride = norm_squares(norm)
    shape, options = launch_settings(taken, weight, norm, config)
    if next_norm is not None and shape["BN"] % width:
        raise ValueError(f"tiles of {shape['BN']} columns cannot sum squares over {width}")
    _linear_kernel[(-(-rows // shape["BM"]), -(-n // shape["BN"]))](
        x, gather, weight, out, bias, residual, *next_tensors(next_norm), squares, rows,
        x.stride(0), weight.stride(0), out.stride(0), residual.stride(0) if residual is not None else 0,
        *next_strides(next_norm), squares_stride,
        N=n, WIDTH=width, NEXT_OFFSET=float(next_norm.offset) if next_norm else 0.0,
        EARLY=config.early, **shape, **options,
    )  # fmt: skip
