"""Root-mean-square norms that cost no launch: who writes a residual stream also writes what its next norm reads.

A stream [R, width] has two companions. `squares` [R, tiles(width)], float32: entry t of a row is the sum of the squares
of its columns [t * block_width(width), (t + 1) * block_width(width)), of the values as stored. `scaled` [R, width]: the
same values times the next norm's weights, in the model's dtype; in float16 also times 1/64, lest they overflow. A
product reads `scaled` and multiplies its sums by the row's factor, which the squares give. `normalise` is the norm as a
kernel of its own, for families that norm what attention and MLP give, and for what a head reads. The products are in
`linear`, `gated` and `qkv`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, tl, use_pdl


def block_width(width: int) -> int:
    """Columns of a stream of this width that share one entry of `squares`."""
    if width <= 2048:
        return 16
    return 32 if width <= 4096 else 64


def tiles(width: int) -> int:
    """Entries per row of the `squares` of a stream of this width."""
    return -(-width // block_width(width))


def shrink(dtype: torch.dtype) -> float:
    """The factor by which `scaled` values are kept smaller; a power of two, so it costs no precision."""
    return 1 / 64 if dtype == torch.float16 else 1.0


@dataclass(frozen=True)
class Norm:
    """What is left to do of a norm where a kernel's input is `scaled`: rsqrt(mean square + eps), a factor per row."""

    eps: float
    squares: torch.Tensor  # [R, tiles(K)]


@dataclass(frozen=True)
class NextNorm:
    """The norm that reads a stream next, and where the writer of the stream leaves what that norm needs."""

    weight: torch.Tensor  # [width]
    offset: float  # added to the weights
    squares: torch.Tensor  # [R, tiles(width)]
    scaled: torch.Tensor  # [R, width]

    def check(self, out: torch.Tensor) -> None:
        rows, width = out.shape
        check_weight(self.weight, width)
        check_squares(self.squares, rows, width)
        if self.scaled.shape != out.shape or self.scaled.dtype != out.dtype or self.scaled.stride(1) != 1:
            raise ValueError(f"scaled must be {out.dtype} {tuple(out.shape)} with contiguous rows")


def next_tensors(norm: NextNorm | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Weight, squares and scaled, as kernels take them."""
    return (None, None, None) if norm is None else (norm.weight, norm.squares, norm.scaled)


def next_strides(norm: NextNorm | None) -> tuple[int, int]:
    """From row to row of squares and of scaled."""
    return (0, 0) if norm is None else (norm.squares.stride(0), norm.scaled.stride(0))


def check_weight(weight: torch.Tensor, width: int) -> None:
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"a norm of {width} columns needs as many weights, got {tuple(weight.shape)}")


def check_squares(squares: torch.Tensor, rows: int, width: int) -> None:
    wanted = (rows, tiles(width))
    if squares.shape != wanted or squares.dtype != torch.float32 or squares.stride(-1) != 1:
        raise ValueError(
            f"squares of {rows} rows of {width} columns must be float32 {wanted} with contiguous rows, "
            f"got {squares.dtype} {tuple(squares.shape)}"
        )


def squares_reference(x: torch.Tensor) -> torch.Tensor:
    """The companion of a stream x [R, width]: [R, tiles(width)], in at least float32."""
    width = x.shape[1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, tiles(width) * block_width(width) - width))
    return padded.square().unflatten(1, (tiles(width), -1)).sum(-1)


def scaled_reference(x: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    """The other companion: x times the norm's weights, rounded to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * ((offset + weight.to(wide)) * shrink(x.dtype))).to(x.dtype)


def scale_reference(
    x: torch.Tensor, mean_square: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> torch.Tensor:
    """x with the norm applied, rounded to x's dtype; mean_square broadcasts against x."""
    wide = x.to(mean_square.dtype) * torch.rsqrt(mean_square + eps)
    return (wide if weight is None else wide * (offset + weight.to(wide.dtype))).to(x.dtype)


def normalise_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + norm(x) of rows [R, K], rounded once; without a weight the plain norm."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = scale_reference(wide, wide.square().mean(-1, keepdim=True), weight, eps, offset)
    return (normed if residual is None else residual + normed).to(x.dtype)


@jit
def sum_neighbours(x, ROWS: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr):
    """[ROWS, COUNT] to [ROWS, GROUPS]: each group of neighbours summed as a balanced tree.

    A sum of two has only one result, so the tree fixes every rounding: the bits cannot depend on how the compiler
    spreads x over threads and warps, which does depend on the number of rows in a tile.
    """
    for level in tl.static_range(12):
        if (COUNT >> level) > GROUPS:
            x = tl.sum(tl.reshape(x, (ROWS, COUNT >> (level + 1), 2)), axis=2)
    return x


@jit
def sum_rows(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """[ROWS, COUNT] to [ROWS], in the same tree; COUNT is at least 2."""
    return tl.sum(sum_neighbours(x, ROWS, COUNT, 2), axis=1)


@jit
def row_factor(values, K: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """rsqrt(mean square + eps) of a row [BLOCKS, WIDTH] in float32, as [1, 1]; in the same tree whoever asks."""
    squares = sum_rows(values * values, BLOCKS, WIDTH)
    total = sum_rows(tl.reshape(squares, (1, BLOCKS)), 1, BLOCKS)
    return tl.rsqrt(total / K + EPS)[:, None]


@jit
def next_scale(weight, column, inside, OFFSET: tl.constexpr, SHRINK: tl.constexpr):
    """What the stored values of some columns are multiplied with to be `scaled`, in float32."""
    return (OFFSET + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)) * SHRINK


@jit
def _normalise_kernel(
    x, weight, out, residual, next_weight, squares_out, scaled_out,
    x_stride, out_stride, residual_stride, squares_stride, scaled_stride,
    K: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, NEXT_OFFSET: tl.constexpr, SHRINK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    columns = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [BLOCKS, WIDTH], one row of x
    inside = columns < K
    if weight is not None:
        scale = OFFSET + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if next_weight is not None:
        next_scales = next_scale(next_weight, columns, inside, NEXT_OFFSET, SHRINK)
    wait(PDL)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    values = values * row_factor(values, K, BLOCKS, WIDTH, EPS)
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
        tl.store(squares_out + row * squares_stride + block, sum_rows(stored * stored, BLOCKS, WIDTH), mask=block < T)


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    next_norm: NextNorm | None = None,
) -> None:
    """out = residual + norm(x), row by row, and its companions; `residual` and `x` may be `out` itself."""
    rows, width = x.shape
    for name, tensor in {"x": x, "out": out, "residual": residual}.items():
        if tensor is not None and (tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.stride(1) != 1):
            raise ValueError(f"{name} must be {x.dtype} {tuple(x.shape)} with contiguous rows")
    if weight is not None:
        check_weight(weight, width)
    if next_norm is not None:
        next_norm.check(out)
    pdl = use_pdl(x)
    count = tiles(width)
    _normalise_kernel[(rows,)](
        x, weight, out, residual, *next_tensors(next_norm),
        x.stride(0), out.stride(0), residual.stride(0) if residual is not None else 0, *next_strides(next_norm),
        K=width, BLOCKS=power_of_two(count), WIDTH=block_width(width), T=count,
        EPS=eps, OFFSET=offset, NEXT_OFFSET=float(next_norm.offset) if next_norm else 0.0, SHRINK=shrink(x.dtype),
        PDL=pdl, num_warps=4, enable_fp_fusion=False,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def power_of_two(value: int) -> int:
    """The least power of two that is not below value."""
    return 1 << (value - 1).bit_length()
