"""RMSNorm, mostly fused into the kernels around it.

A norm costs no launch of its own: the kernel that writes a residual stream x [R, width] also writes what the norm that
reads it next needs (`NextNorm`), and the matmul that reads it finishes the norm (`Norm`):

- `squares` [R, squares_per_row(width)] float32: entry t of a row is the sum of the squares of the stored values in
  columns [t * w, (t + 1) * w), w = columns_per_square(width).
- `scaled` [R, width], in the model's dtype: x times the norm's weights; in float16 also times 1/64 against overflow.

The matmul multiplies `scaled` with its weight and the result with one factor per row, rsqrt(mean square + eps), from
`squares`. The matmuls are in `gemm`, `gate_up_gemm`, `qkv_rope_gemm` and `lm_head_topk`. `rms_norm` is the norm as a
kernel of its own, for families that norm the output of attention and MLP, and for the input of a head.

All sums are balanced binary trees over fixed blocks of columns, so a row's bits do not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.noise import check_tensor
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton


def columns_per_square(width: int) -> int:
    """Columns of a stream of this width that are summed into one entry of `squares`.

    16 is the narrowest tile of a matmul that writes a stream; wider streams get wider blocks, so that the matmul that
    reads them sums at most 128 entries up to a width of 8192.
    """
    if width <= 2048:
        return 16
    return 32 if width <= 4096 else 64


def squares_per_row(width: int) -> int:
    """Entries per row of the `squares` of a stream of this width."""
    return -(-width // columns_per_square(width))


def shrink(dtype: torch.dtype) -> float:
    """The factor that keeps `scaled` values of float16 below overflow; a power of two, so it costs no precision."""
    return 1 / 64 if dtype == torch.float16 else 1.0


@dataclass(frozen=True)
class Norm:
    """The norm of a matmul's input, where that input is a `scaled` stream."""

    eps: float
    squares: torch.Tensor  # [R, squares_per_row(K)]


@dataclass(frozen=True)
class NextNorm:
    """The norm that reads a stream next: its weights, and the buffers that the kernel which writes the stream fills."""

    weight: torch.Tensor  # [width]
    offset: float  # added to the weights: 1 for families that store them minus 1
    squares: torch.Tensor  # [R, squares_per_row(width)]
    scaled: torch.Tensor  # [R, width]

    def check(self, out: torch.Tensor) -> None:
        rows, width = out.shape
        check_weight(self.weight, width)
        check_squares(self.squares, rows, width, out.device)
        check_tensor(self.scaled, "scaled", (rows, width), (out.dtype,), out.device)


def next_tensors(norm: NextNorm | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Weight, squares and scaled: kernel arguments."""
    return (None, None, None) if norm is None else (norm.weight, norm.squares, norm.scaled)


def next_strides(norm: NextNorm | None) -> tuple[int, int]:
    """Row strides of squares and scaled: kernel arguments."""
    return (0, 0) if norm is None else (norm.squares.stride(0), norm.scaled.stride(0))


def check_weight(weight: torch.Tensor, width: int) -> None:
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"a norm of {width} columns needs as many weights, got {tuple(weight.shape)}")


def check_squares(squares: torch.Tensor, rows: int, width: int, device: torch.device) -> None:
    check_tensor(squares, "squares", (rows, squares_per_row(width)), (torch.float32,), device)


def squares_reference(x: torch.Tensor) -> torch.Tensor:
    """`squares` of a stream x [R, width]: [R, squares_per_row(width)], in at least float32."""
    width = x.shape[1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, squares_per_row(width) * columns_per_square(width) - width))
    return padded.square().unflatten(1, (squares_per_row(width), -1)).sum(-1)


def scaled_reference(x: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    """`scaled` of a stream x [R, width]: x times the norm's weights, rounded to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * ((offset + weight.to(wide)) * shrink(x.dtype))).to(x.dtype)


def apply_norm_reference(
    x: torch.Tensor, mean_square: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> torch.Tensor:
    """The norm of x, rounded to x's dtype; mean_square broadcasts against x."""
    wide = x.to(mean_square.dtype) * torch.rsqrt(mean_square + eps)
    return (wide if weight is None else wide * (offset + weight.to(wide.dtype))).to(x.dtype)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + norm(x) of rows [R, K], rounded once; without a weight the norm is not scaled."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = apply_norm_reference(wide, wide.square().mean(-1, keepdim=True), weight, eps, offset)
    return (normed if residual is None else residual + normed).to(x.dtype)


# Parts that several kernels share.


@jit
def tree_sum_groups(x, ROWS: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr):
    """[ROWS, COUNT] to [ROWS, GROUPS]: sums each group of consecutive columns as a balanced binary tree.

    Each addition has two operands, so the tree fixes every rounding: the bits cannot depend on how the compiler
    distributes x over threads and warps, which does depend on the number of rows in a tile.
    """
    for level in tl.static_range(12):
        if (COUNT >> level) > GROUPS:
            x = tl.sum(tl.reshape(x, (ROWS, COUNT >> (level + 1), 2)), axis=2)
    return x


@jit
def tree_sum(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """[ROWS, COUNT] to [ROWS], by the same tree; COUNT is at least 2."""
    return tl.sum(tree_sum_groups(x, ROWS, COUNT, 2), axis=1)


@jit
def rms_factor(values, K: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """rsqrt(mean square + eps) of one row of K columns, given as [BLOCKS, WIDTH] float32: [1, 1]."""
    squares = tree_sum(values * values, BLOCKS, WIDTH)
    total = tree_sum(tl.reshape(squares, (1, BLOCKS)), 1, BLOCKS)
    return tl.rsqrt(total / K + EPS)[:, None]


@jit
def next_scale(weight, column, inside, OFFSET: tl.constexpr, SHRINK: tl.constexpr):
    """The float32 factors of some columns that turn stored values into `scaled` ones."""
    return (OFFSET + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)) * SHRINK


# The norm as a kernel of its own.


@jit
def _rms_norm_kernel(
    x, weight, out, residual, next_weight, squares_out, scaled_out,
    x_stride, out_stride, residual_stride, squares_stride, scaled_stride,
    K: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, SQUARES: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, NEXT_OFFSET: tl.constexpr, SHRINK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row. SQUARES entries of `squares`, padded to BLOCKS, each over WIDTH columns."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    columns = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [BLOCKS, WIDTH]: one row of x
    inside = columns < K
    if weight is not None:
        scale = OFFSET + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if next_weight is not None:
        next_scales = next_scale(next_weight, columns, inside, NEXT_OFFSET, SHRINK)
    wait(PDL)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    values = values * rms_factor(values, K, BLOCKS, WIDTH, EPS)
    if weight is not None:
        values = values * scale
    if residual is not None:
        values += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = values.to(out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, result, mask=inside)
    if next_weight is not None:
        stored = result.to(tl.float32)
        tl.store(
            scaled_out + row * scaled_stride + columns,
            (stored * next_scales).to(scaled_out.dtype.element_ty),
            mask=inside,
        )
        tl.store(
            squares_out + row * squares_stride + block, tree_sum(stored * stored, BLOCKS, WIDTH), mask=block < SQUARES
        )


def rms_norm(
    x: torch.Tensor,  # [R, K]
    weight: torch.Tensor | None,  # [K]
    eps: float,
    offset: float,  # added to the weights
    out: torch.Tensor,  # [R, K]
    *,
    residual: torch.Tensor | None = None,  # [R, K]
    next_norm: NextNorm | None = None,
) -> None:
    """out = residual + norm(x), and what the next norm reads; `residual` and `x` may be `out` itself."""
    rows, width = x.shape
    for name, tensor in {"x": x, "out": out, "residual": residual}.items():
        if tensor is not None:
            check_tensor(tensor, name, (rows, width), (x.dtype,), x.device)
    if weight is not None:
        check_weight(weight, width)
    if next_norm is not None:
        next_norm.check(out)
    count = squares_per_row(width)
    _rms_norm_kernel[(rows,)](
        x, weight, out, residual, *next_tensors(next_norm),
        x.stride(0), out.stride(0), residual.stride(0) if residual is not None else 0, *next_strides(next_norm),
        K=width, BLOCKS=triton.next_power_of_2(count), WIDTH=columns_per_square(width), SQUARES=count,
        EPS=eps, OFFSET=offset, NEXT_OFFSET=float(next_norm.offset) if next_norm else 0.0, SHRINK=shrink(x.dtype),
        num_warps=4, enable_fp_fusion=False, **pdl_options(x),
    )  # fmt: skip
