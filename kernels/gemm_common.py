"""What the fused products share: the loop over K, the tile of a program, and the checks of a launch.

`linear`, `gated` and `qkv` multiply a few rows x [R, K] with a weight [N, K], taken as it lies. Where x is the `scaled`
companion of a stream (see `norm`), the sums are multiplied by the row's factor at the end.

A row's result has the same bits in any company: one program sums over the whole of K in an order fixed by the layer's
shape, and what follows the number of rows (height and width of a tile, warps, stages) changes no sum. Kernels are
compiled without fusing multiplications and additions, because what gets fused may differ from one tile to another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from selfspec.kernels.norm import Norm, block_width, check_squares, power_of_two, shrink, sum_rows, tiles
from selfspec.kernels.triton_compat import jit, shared_bytes, tl, use_pdl

MAX_ROW_TILE = 64
_TINY, _SMALL = 1 << 21, 1 << 23  # weights of products that fill few SMs, and of those that leave some free
_TILE = 2048  # sums of a tile to a warp, at most
_WIDEST = 256  # bytes, a tile's width: those of float32 would have no room for the steps that narrow ones take
LEAST_SHARED_BYTES = 96 * 1024  # of shared memory for the stages of a program on any GPU


def product_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None
) -> torch.Tensor:
    """bias + x @ weight^T, not yet rounded: at least float32. With a norm x is the scaled stream."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = F.linear(x.to(wide), weight.to(wide))
    if norm is not None:
        mean_square = norm.squares.to(wide).sum(-1, keepdim=True) / x.shape[1]
        sums = sums * (torch.rsqrt(mean_square + norm.eps) / shrink(x.dtype))
    return sums if bias is None else sums + bias.to(wide)


@jit
def _add_chunks(squares, rows, T: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT chunks of the entries of some rows, added as a balanced tree: [BM, CHUNK]. There are T entries."""
    if COUNT == 1:
        t = FIRST * CHUNK + tl.arange(0, CHUNK)
        if FIRST * CHUNK + CHUNK <= T:
            return tl.load(squares + rows[:, None] + t[None, :])
        else:
            return tl.load(squares + rows[:, None] + t[None, :], mask=(t < T)[None, :], other=0.0)
    elif (FIRST + COUNT // 2) * CHUNK >= T:
        return _add_chunks(squares, rows, T, CHUNK, FIRST, COUNT // 2)
    else:
        left = _add_chunks(squares, rows, T, CHUNK, FIRST, COUNT // 2)
        return left + _add_chunks(squares, rows, T, CHUNK, FIRST + COUNT // 2, COUNT // 2)


@jit
def row_squares(squares, rows, T: tl.constexpr, CHUNKS: tl.constexpr):
    """The T squares of some rows, added 16 wide, where every addition has its place, before what little is left goes
    from thread to thread (`squares_factor`)."""
    return _add_chunks(squares, rows, T, 16, 0, CHUNKS)


@jit
def squares_factor(entries, K: tl.constexpr, EPS: tl.constexpr, SHRINK: tl.constexpr, BM: tl.constexpr):
    """What the sums over K of some scaled rows are multiplied with to be those of normed ones: [BM]."""
    return tl.rsqrt(sum_rows(entries, BM, 16) / K + EPS) / SHRINK


@jit
def product(
    x, weight, squares, real, x_rows, weight_rows, squares_rows,
    K: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr, EPS: tl.constexpr, SHRINK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x @ weight^T of BM rows and BN weight rows, given by their offsets, times the rows' factors: [BM, BN] float32.

    Rows that are not `real` are not read: every program would ask for the same few lines again and again.
    The squares are asked for before the loop and needed after it, so that nothing waits for them.
    """
    columns = tl.arange(0, BK)
    x_at = x + x_rows[:, None] + columns[None, :]
    weight_at = weight + weight_rows[:, None] + columns[None, :]
    if squares is not None:
        entries = row_squares(squares, squares_rows, T, CHUNKS)
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            rows = tl.load(x_at + start, mask=real[:, None], other=0.0)
            matrix = tl.load(weight_at + start)
        else:
            inside = (columns < K - start)[None, :]
            rows = tl.load(x_at + start, mask=inside & real[:, None], other=0.0)
            matrix = tl.load(weight_at + start, mask=inside, other=0.0)
        sums = tl.dot(rows, tl.trans(matrix), sums, input_precision="ieee")
    if squares is not None:
        sums *= squares_factor(entries, K, EPS, SHRINK, BM)[:, None]
    return sums


@dataclass(frozen=True)
class Config:
    """The tile of a program. `block_k` must follow from the layer's shape alone; the rest changes no sum, as long as
    `block_n` leaves room for those steps."""

    block_n: int  # rows of the weight
    block_k: int
    stages: int
    warps: int
    block_m: int = 16  # rows of x
    ahead: int = 0  # columns of the weight that are asked for before earlier launches have ended
    early: bool = False  # not of qkv: the next launch is let in as soon as those have, to ask for its own


def choose(kind: str, n: int, k: int, rows: int) -> Config:
    """The tile for some rows and a weight [n, k] of a "linear", "gated" or "qkv" product, or of "heads", qkv with a
    norm of heads: those take a whole head per program, whatever `block_n` says."""
    height = 16 if rows <= 16 else 32 if rows <= 32 else MAX_ROW_TILE
    if kind == "heads":
        return Config(block_n=0, block_k=64, stages=4, warps=4, block_m=height)
    if _is_small(kind, n, k):
        return (_choose_small if rows <= MAX_ROW_TILE else _choose_many_of_small)(kind, n, k, rows)
    if rows > MAX_ROW_TILE:
        return _choose_many_of_large(kind, n, rows)
    if kind == "linear":
        return _choose_long(n, k, rows)
    if kind == "qkv":
        return Config(block_n=64, block_k=128, stages=5, warps=4, block_m=height)
    block_n, stages = (128, 4) if height == 16 else (64, 3)  # all programs at once, with room for the launch after them
    return Config(block_n, block_k=64, stages=stages, warps=4, block_m=height)


def _is_small(kind: str, n: int, k: int) -> bool:
    return k <= 2048 and (kind == "linear" or n <= 8192)


def _choose_small(kind: str, n: int, k: int, rows: int) -> Config:
    """Bound by latency: low and narrow tiles for as many programs as there are SMs, as long as these have room for
    them; the shortest sums by few warps."""
    width = block_width(n) if kind == "linear" else 16 if n <= 2048 else 32
    is_short = k <= 1024 and width == 16
    wider = max(width, 32)
    most_in_low_tiles = 16 if not is_short else 48 if kind == "qkv" else 32
    if rows <= most_in_low_tiles:
        block_m, block_n = 16, width
    elif rows <= 32:
        block_m, block_n = 16 if width == 16 else MAX_ROW_TILE, wider
    elif n * k <= _TINY:
        block_m, block_n = 32 if kind == "qkv" or k > 1024 else MAX_ROW_TILE, wider
    else:
        block_m, block_n = MAX_ROW_TILE, width
    warps = 2 if is_short and rows <= most_in_low_tiles else 4
    stages = 5 if kind == "linear" and k > 1024 and 16 < rows <= 32 else 8  # fewer leave room for the launch after it
    return Config(block_n, block_k=64, stages=stages, warps=warps, block_m=block_m, ahead=_ahead(k), early=True)


def _ahead(k: int) -> int:
    """As many columns as can be asked for in equal parts, each of them aligned."""
    return k // 512 * 512


def _choose_many_of_small(kind: str, n: int, k: int, rows: int) -> Config:
    """Rows of prompts, most of all: there are programs enough, so that large tiles, which read less, are better."""
    few = rows <= 4 * MAX_ROW_TILE
    block_n = max(32 if kind == "linear" and few else 64, block_width(n))
    if kind == "gated" and not few:
        block_m, stages, warps = 2 * MAX_ROW_TILE, 3, 8
    else:
        block_m, stages, warps = MAX_ROW_TILE, 4 if few else 6, 4
    return Config(block_n, block_k=64, stages=stages, warps=warps, block_m=block_m, ahead=_ahead(k), early=True)


def _choose_many_of_large(kind: str, n: int, rows: int) -> Config:
    """The same where sums are long or there are many: the highest tiles, unless too few programs would be left."""
    if kind == "gated":
        return Config(block_n=128, block_k=64, stages=4, warps=8, block_m=2 * MAX_ROW_TILE)
    if kind == "qkv":
        return Config(block_n=64, block_k=128, stages=4, warps=8, block_m=2 * MAX_ROW_TILE)
    if n <= 2048:
        block_n = 32 if rows <= 4 * MAX_ROW_TILE else 64
        return Config(block_n, block_k=128, stages=3, warps=4, block_m=MAX_ROW_TILE, ahead=512)
    block_m, warps = (MAX_ROW_TILE, 4) if rows <= 2 * MAX_ROW_TILE else (2 * MAX_ROW_TILE, 8)
    return Config(block_n=64, block_k=128, stages=4, warps=warps, block_m=block_m, ahead=512)


def _choose_long(n: int, k: int, rows: int) -> Config:
    """Sums over much of K. Of large ones, and more than 16 rows, the highest tiles are faster than half as high ones;
    small ones leave SMs free as long as tiles are low."""
    is_small = n <= 2048 and n * k <= _SMALL
    low = rows <= (32 if is_small else 16)
    width = 32 if is_small and low else block_width(n)
    block_m = 16 if low else MAX_ROW_TILE
    return Config(width, block_k=128, stages=8, warps=4, block_m=block_m, ahead=512, early=is_small)


def launch_settings(
    x: torch.Tensor, weight: torch.Tensor, norm: Norm | None, config: Config, block_n: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants all kernels share, and the options of the launch; `block_n` where it is heads, or parts of them."""
    k, size = x.shape[1], x.element_size()
    # A wide and high tile does not fit the registers, least of all where heads are normed in it.
    largest = (_TILE if block_n is None else _TILE // 2) * config.warps
    block_n = block_n or min(config.block_n, _WIDEST // size)
    block_m = min(config.block_m, max(16, largest // block_n))
    block_k = min(config.block_k, power_of_two(k))
    while 3 * (MAX_ROW_TILE + block_n) * block_k * size > LEAST_SHARED_BYTES:  # for all heights alike
        block_k //= 2
    stages = min(config.stages, shared_bytes(x) // ((block_m + block_n) * block_k * size))
    pdl = use_pdl(x)
    aligned = weight.stride(0) * size % 16 == 0 and weight.data_ptr() % 16 == 0
    shape = {
        "K": k,
        **norm_constants(k, x.dtype, norm),
        "BM": block_m,
        "BN": block_n,
        "BK": block_k,
        "AHEAD": config.ahead if aligned and config.ahead <= k else 0,
        "PDL": pdl,
    }
    options: dict[str, Any] = {
        "num_warps": config.warps,
        "num_stages": stages,
        "enable_fp_fusion": False,
    }
    return shape, options | ({"launch_pdl": True} if pdl else {})


def norm_constants(k: int, dtype: torch.dtype, norm: Norm | None) -> dict[str, Any]:
    """What kernels are compiled for that read streams of k columns."""
    chunks = power_of_two(-(-tiles(k) // 16))
    return {"T": tiles(k), "CHUNKS": chunks, "EPS": norm.eps if norm else 0.0, "SHRINK": shrink(dtype)}


def norm_squares(norm: Norm | None) -> tuple[torch.Tensor | None, int]:
    """The squares and their stride, as kernels take them."""
    return (None, 0) if norm is None else (norm.squares, norm.squares.stride(0))


def check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [R, K] and [N, K]")
    if x.shape[0] < 1 or x.shape[1] % 16:
        raise ValueError(f"x {tuple(x.shape)} needs at least one row, and columns in multiples of 16")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or weight.dtype != x.dtype:
        raise ValueError(f"x and weight must be of one dtype of 16 or 32 bits, got {x.dtype} and {weight.dtype}")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("the rows of x and weight must be contiguous")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.stride(0) != 1):
        raise ValueError(f"bias must be contiguous [{weight.shape[0]}], got {tuple(bias.shape)}")
    if norm is not None:
        check_squares(norm.squares, *x.shape)


def check_rows(name: str, tensor: torch.Tensor, x: torch.Tensor, width: int) -> None:
    if tensor.shape != (x.shape[0], width) or tensor.dtype != x.dtype or tensor.stride(1) != 1:
        raise ValueError(
            f"{name} must be {x.dtype} [{x.shape[0]}, {width}] with contiguous rows, "
            f"got {tensor.dtype} {tuple(tensor.shape)}"
        )
