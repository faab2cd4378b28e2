"""Parts that the fused matmuls share: the loop over K, the choice of tiles, launch settings and checks.

`linear` (gemm), `gated_linear` (gate_up_gemm) and `qkv_linear` (qkv_rope_gemm) multiply x [R, K] with a weight [N, K]
in its stored layout; the same kernel adds the residual, applies the gate, or applies RoPE and stores KV. If x is the
`scaled` copy of a residual stream, each row's sums are multiplied by its norm's factor at the end (see `norm`).

A row's result has the same bits whatever other rows are in the batch: one program sums over all of K, in blocks of BK
columns, and BK depends on weight shape and dtype alone. Each tensor-core instruction waits for the previous sum, which
for long K takes longer than reading weights: K is then summed in four slices, each a quarter of every block, which are
added at the end. The rest of the tile (rows, weight rows, warps, stages, whether slices run together or in turn) may
depend on the number of rows: it changes no sum. Kernels are compiled without fusing multiplications and additions
(`enable_fp_fusion=False`): the compiler's choice could differ between tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from selfspec.kernels.norm import Norm, check_squares, columns_per_square, shrink, squares_per_row, tree_sum
from selfspec.kernels.quantized_weight import QuantizedWeight
from selfspec.kernels.triton_compat import jit, pdl_options, shared_bytes, tl, triton

MAX_ROW_TILE = 64  # rows of a tile, up to this number of rows in a pass; 128 beyond it
LEAST_SHARED_BYTES = 96 * 1024  # shared memory for the pipeline stages of a program that every supported GPU has
# Elements of a weight: a matmul with fewer than the first leaves most of an H200's 132 SMs idle, with fewer than the
# second some of them. Not measured on other GPUs.
_TINY_WEIGHT, _SMALL_WEIGHT = 1 << 21, 1 << 23
_SLICED_COLUMNS = 256  # columns of a block that four slices divide, 16-bit weights
_ELEMENTS_PER_WARP = 2048  # float32 sums of a tile that the registers of a warp can hold
_MAX_TILE_WIDTH_BYTES = 256  # BN * bytes of an element: wider float32 tiles would leave too little memory for BK


def matmul_reference(
    x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, norm: Norm | None
) -> torch.Tensor:
    """bias + x @ weight^T [R, N] before rounding, in at least float32. With a norm x is the scaled stream."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = weight.rounded(x.dtype) if isinstance(weight, QuantizedWeight) else weight
    sums = F.linear(x.to(wide), weight.to(wide))
    if norm is not None:
        mean_square = norm.squares.to(wide).sum(-1, keepdim=True) / x.shape[1]
        sums = sums * (torch.rsqrt(mean_square + norm.eps) / shrink(x.dtype))
    return sums if bias is None else sums + bias.to(wide)


# The loop over K, inside a kernel.


@jit
def _add_chunks(squares, rows, T: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Adds COUNT chunks of CHUNK entries of some rows, from chunk FIRST on, as a balanced tree: [BM, CHUNK]. Entries
    from T on are 0."""
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
def load_squares(squares, rows, T: tl.constexpr, CHUNKS: tl.constexpr):
    """The T entries of `squares` of some rows, given by their offsets, added to [BM, 16] without exchange between
    threads; `rms_factor_of_squares` adds the rest."""
    return _add_chunks(squares, rows, T, 16, 0, CHUNKS)


@jit
def rms_factor_of_squares(entries, K: tl.constexpr, EPS: tl.constexpr, SHRINK: tl.constexpr, BM: tl.constexpr):
    """The factor [BM] that turns sums over K of scaled rows into those of normed rows; entries as of `load_squares`."""
    return tl.rsqrt(tree_sum(entries, BM, 16) / K + EPS) / SHRINK


@jit
def _sum_slice(
    x_at, weight_at, columns, real, FIRST: tl.constexpr, STEP: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """x @ weight^T over the blocks of columns that begin at FIRST, FIRST + STEP, ...: [BM, BN] float32."""
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(FIRST, K, STEP):
        if K % STEP == 0:
            x_part, weight_part = tl.load(x_at + start, mask=real, other=0.0), tl.load(weight_at + start)
        else:
            inside = columns < K - start
            x_part = tl.load(x_at + start, mask=inside & real, other=0.0)
            weight_part = tl.load(weight_at + start, mask=inside, other=0.0)
        sums = tl.dot(x_part, tl.trans(weight_part), sums, input_precision="ieee")
    return sums


@jit
def _add_part(sums, x_at, weight_at, real, start):
    """sums + x @ weight^T over some columns from `start` on."""
    x_part, weight_part = tl.load(x_at + start, mask=real, other=0.0), tl.load(weight_at + start)
    return tl.dot(x_part, tl.trans(weight_part), sums, input_precision="ieee")


@jit
def _sum_slices_in_one_loop(
    x_at, weight_at, real, STEP: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """x @ weight^T as the sum of four slices: [BM, BN] float32."""
    PART: tl.constexpr = STEP // 4
    first = tl.zeros((BM, BN), tl.float32)
    second, third, fourth = first, first, first
    for start in range(0, K, STEP):
        first = _add_part(first, x_at, weight_at, real, start)
        second = _add_part(second, x_at, weight_at, real, start + PART)
        third = _add_part(third, x_at, weight_at, real, start + 2 * PART)
        fourth = _add_part(fourth, x_at, weight_at, real, start + 3 * PART)
    return ((first + second) + third) + fourth


@jit
def _sum_slices_by_warp(
    x, weight, real, x_rows, weight_rows, STEP: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The same by dots of three dimensions [slice, row, column]; the compiler gives each slice to one warp."""
    columns = tl.arange(0, 4)[:, None, None] * (STEP // 4) + tl.arange(0, STEP // 4)[None, None, :]
    x_at = x + x_rows[None, :, None] + columns  # [4, BM, STEP / 4]
    weight_at = weight + weight_rows[None, :, None] + columns  # [4, BN, STEP / 4]
    sums = tl.zeros((4, BM, BN), tl.float32)
    for start in range(0, K, STEP):
        x_part, weight_part = tl.load(x_at + start, mask=real[None, :, None], other=0.0), tl.load(weight_at + start)
        sums = tl.dot(x_part, tl.trans(weight_part, (0, 2, 1)), sums, input_precision="ieee")
    even, odd = tl.split(tl.reshape(tl.permute(sums, (1, 2, 0)), (BM, BN, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return ((first + second) + third) + fourth


@jit
def matmul_tile(
    x, weight, squares, real, x_rows, weight_rows, squares_rows,
    K: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr, EPS: tl.constexpr, SHRINK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICING: tl.constexpr,
):  # fmt: skip
    """x @ weight^T of BM rows and BN weight rows, given by their offsets, times the norm's factors: [BM, BN] float32.

    SLICING: how the sums over the four slices of K are computed: at once by one warp each ("warps"), at once by all
    warps ("loop"), or one after the other where the registers cannot hold four ("passes"); None: there are no slices.

    Does not load rows that are not `real` [BM]. Loads `squares` before the loop and uses them after it, so that nothing
    waits for them.
    """
    SLICES: tl.constexpr = 1 if SLICING is None else 4
    PART: tl.constexpr = BK // SLICES
    columns = tl.arange(0, PART)[None, :]
    x_at, weight_at = x + x_rows[:, None] + columns, weight + weight_rows[:, None] + columns  # [BM, PART], [BN, PART]
    if squares is not None:
        entries = load_squares(squares, squares_rows, T, CHUNKS)
    if SLICING == "warps":
        sums = _sum_slices_by_warp(x, weight, real, x_rows, weight_rows, BK, K, BM, BN)
    elif SLICING == "loop":
        sums = _sum_slices_in_one_loop(x_at, weight_at, real[:, None], BK, K, BM, BN)
    else:
        sums = _sum_slice(x_at, weight_at, columns, real[:, None], 0, BK, K, BM, BN)
        for index in tl.static_range(1, SLICES):
            sums += _sum_slice(x_at, weight_at, columns, real[:, None], index * PART, BK, K, BM, BN)
    if squares is not None:
        sums *= rms_factor_of_squares(entries, K, EPS, SHRINK, BM)[:, None]
    return sums


# The choice of tiles: the fastest on an H200 at the shapes of SmolLM2-135M and Llama-8B; not measured on other GPUs.


@dataclass(frozen=True)
class TileConfig:
    """The tile of a program. `block_k` must depend on the weight's shape alone; the rest changes no sum, as long as
    `block_n` leaves enough shared memory for `block_k` columns."""

    block_n: int  # weight rows
    block_k: int  # columns of one block of the loop over K
    stages: int  # blocks that are loaded ahead
    warps: int
    block_m: int = 16  # rows of x
    prefetch: int = 0  # columns of the weight that are prefetched into L2 while the previous launch still runs
    release_early: bool = False  # let the next launch start right after `wait` (see `pdl`); qkv_linear always does
    sliced: bool = False  # K is summed in four slices; must depend on the weight's shape alone


def choose_tile(kind: str, n: int, k: int, rows: int) -> TileConfig:
    """The tile for `rows` rows and a weight [n, k]. kind: "linear", "gate_up", "qkv", or "qkv_norm" for a qkv matmul
    that norms heads: it takes a whole head per program and ignores `block_n`."""
    tile = _choose_tile(kind, n, k, rows)
    if kind != "linear" or k <= 1024 or k % _SLICED_COLUMNS:
        return tile
    stages = 2 * tile.stages if _has_many_rows(n, k, rows) else 6 if k > 2048 else 4
    return replace(tile, block_k=_SLICED_COLUMNS, stages=stages, sliced=True)


def _choose_tile(kind: str, n: int, k: int, rows: int) -> TileConfig:
    """The tile without slices."""
    height = 16 if rows <= 16 else 32 if rows <= 32 else MAX_ROW_TILE
    if kind == "qkv_norm":
        return TileConfig(block_n=0, block_k=64, stages=4, warps=4, block_m=height)
    if _is_small(kind, n, k):
        return (_choose_small_many_rows if _has_many_rows(n, k, rows) else _choose_small)(kind, n, k, rows)
    if rows > MAX_ROW_TILE:
        return _choose_large_many_rows(kind, n, rows)
    if kind == "linear":
        return _choose_large_linear(n, k, rows)
    if kind == "qkv":
        return TileConfig(block_n=64, block_k=128, stages=5, warps=4, block_m=height)
    # gate_up: all programs run at once, beside the first ones of the next launch.
    block_n, stages = (128, 4) if height == 16 else (64, 3)
    return TileConfig(block_n, block_k=64, stages=stages, warps=4, block_m=height)


def _is_small(kind: str, n: int, k: int) -> bool:
    """Whether latency rather than bandwidth bounds the matmul."""
    return k <= 2048 and (kind == "linear" or n <= 8192)


def _has_many_rows(n: int, k: int, rows: int) -> bool:
    """Whether there are more than 64 rows, or more than 128 for a tiny weight: larger tiles, which read less, are then
    faster."""
    return rows > (2 * MAX_ROW_TILE if n * k <= _TINY_WEIGHT else MAX_ROW_TILE)


def _choose_small(kind: str, n: int, k: int, rows: int) -> TileConfig:
    """Small weight, not many rows: low and narrow tiles, so that every SM gets a program, as long as all of them run at
    once; two warps for the shortest sums."""
    width = columns_per_square(n) if kind == "linear" else 16 if n <= 2048 else 32
    is_short = k <= 1024 and width == 16
    wider = max(width, 32)
    most_in_low_tiles = 16 if not is_short else 48 if kind == "qkv" else 32
    if rows <= most_in_low_tiles:
        block_m, block_n = 16, width
    elif rows <= 32:
        block_m, block_n = 16 if width == 16 else MAX_ROW_TILE, wider
    else:
        # Sums of more than 1024 columns are sliced, and narrow tiles sum slices fastest. Otherwise wide tiles, which
        # read less, are faster once every SM has a program: gate and up have the most columns.
        block_m, block_n = MAX_ROW_TILE, width if k > 1024 or n * k > _TINY_WEIGHT else wider
        block_n = 64 if kind == "gate_up" and rows > MAX_ROW_TILE else block_n
    warps = 2 if is_short and rows <= most_in_low_tiles else 4
    stages = 5 if kind == "linear" and k > 1024 and 16 < rows <= 32 else 8  # with 5 the next launch fits beside it
    return TileConfig(
        block_n, block_k=64, stages=stages, warps=warps, block_m=block_m, prefetch=_prefetched(k), release_early=True
    )


def _prefetched(k: int) -> int:
    """Columns to prefetch: the largest multiple of 512, which `prefetch_weight` divides in equal, aligned parts."""
    return k // 512 * 512


def _choose_small_many_rows(kind: str, n: int, k: int, rows: int) -> TileConfig:
    """Small weight, many rows (usually a prompt's): fewer, larger tiles, which read less."""
    up_to_256 = rows <= 4 * MAX_ROW_TILE
    block_n = max(32 if kind == "linear" and up_to_256 else 64, columns_per_square(n))
    if kind == "gate_up" and not up_to_256:
        block_m, stages, warps = 2 * MAX_ROW_TILE, 3, 8
    else:
        block_m, stages, warps = MAX_ROW_TILE, 4 if up_to_256 else 6, 4
    return TileConfig(
        block_n, block_k=64, stages=stages, warps=warps, block_m=block_m, prefetch=_prefetched(k), release_early=True
    )


def _choose_large_many_rows(kind: str, n: int, rows: int) -> TileConfig:
    """Large weight, more than 64 rows: the highest tiles, unless that leaves too few programs."""
    if kind == "gate_up":
        return TileConfig(block_n=128, block_k=64, stages=4, warps=8, block_m=2 * MAX_ROW_TILE)
    if kind == "qkv":
        return TileConfig(block_n=64, block_k=128, stages=4, warps=8, block_m=2 * MAX_ROW_TILE)
    if n <= 2048:
        block_n = 32 if rows <= 4 * MAX_ROW_TILE else 64
        return TileConfig(block_n, block_k=128, stages=3, warps=4, block_m=MAX_ROW_TILE, prefetch=512)
    block_m, warps = (MAX_ROW_TILE, 4) if rows <= 2 * MAX_ROW_TILE else (2 * MAX_ROW_TILE, 8)
    return TileConfig(block_n=64, block_k=128, stages=4, warps=warps, block_m=block_m, prefetch=512)


def _choose_large_linear(n: int, k: int, rows: int) -> TileConfig:
    """Long sums, up to 64 rows: tiles of 16 rows as long as one is enough (two for smaller weights, which leave SMs
    idle otherwise), then tiles of 64 rows, which are faster than two of 32."""
    is_small = n <= 2048 and n * k <= _SMALL_WEIGHT
    low = rows <= (32 if is_small else 16)
    width = 32 if is_small and low else columns_per_square(n)
    block_m = 16 if low else MAX_ROW_TILE
    return TileConfig(width, block_k=128, stages=8, warps=4, block_m=block_m, prefetch=512, release_early=is_small)


# Launching.


def launch_settings(
    x: torch.Tensor, weight: torch.Tensor, norm: Norm | None, config: TileConfig, block_n: int | None = None
) -> dict[str, Any]:
    """Constexpr arguments and launch options that all three kernels share. block_n: the width of heads or their parts,
    instead of the config's."""
    k, size = x.shape[1], x.element_size()
    # Tiles must fit the registers; norming heads needs twice as many.
    max_elements = (_ELEMENTS_PER_WARP if block_n is None else _ELEMENTS_PER_WARP // 2) * config.warps
    block_n = block_n or min(config.block_n, _MAX_TILE_WIDTH_BYTES // size)
    block_m = min(config.block_m, max(16, max_elements // block_n))
    block_k, slicing = min(config.block_k, triton.next_power_of_2(k)), None
    if config.sliced:
        block_k = 2 * block_k // size  # as many bytes in every dtype
        slicing = "warps" if block_m * block_n <= 512 else "loop" if block_m * block_n <= 2048 else "passes"
    else:
        while 3 * (MAX_ROW_TILE + block_n) * block_k * size > LEAST_SHARED_BYTES:  # the same for every block_m
            block_k //= 2
    stage_columns = block_k // 4 if slicing == "passes" else block_k
    aligned = weight.stride(0) * size % 16 == 0 and weight.data_ptr() % 16 == 0
    return {
        "K": k,
        **norm_constants(k, x.dtype, norm),
        "BM": block_m,
        "BN": block_n,
        "BK": block_k,
        "SLICING": slicing,
        "PREFETCH": config.prefetch if aligned and config.prefetch <= k else 0,
        "num_warps": config.warps,
        "num_stages": min(config.stages, shared_bytes(x) // ((block_m + block_n) * stage_columns * size)),
        "enable_fp_fusion": False,
        **pdl_options(x),
    }


def norm_constants(k: int, dtype: torch.dtype, norm: Norm | None) -> dict[str, Any]:
    """Constexpr arguments of kernels that read a scaled stream of k columns."""
    count = squares_per_row(k)
    return {
        "T": count,
        "CHUNKS": triton.next_power_of_2(-(-count // 16)),
        "EPS": norm.eps if norm else 0.0,
        "SHRINK": shrink(dtype),
    }


def norm_squares(norm: Norm | None) -> tuple[torch.Tensor | None, int]:
    """The squares and their row stride: kernel arguments."""
    return (None, 0) if norm is None else (norm.squares, norm.squares.stride(0))


def check_matmul(
    x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, norm: Norm | None
) -> None:
    if x.dim() != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [R, K] and [N, K]")
    if x.shape[0] < 1 or x.shape[1] % 16:
        raise ValueError(f"x {tuple(x.shape)} needs at least one row, and columns in multiples of 16")
    dtype = x.dtype if isinstance(weight, QuantizedWeight) else weight.dtype
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or dtype != x.dtype:
        raise ValueError(f"x and weight must be of one dtype of 16 or 32 bits, got {x.dtype} and {dtype}")
    if x.stride(1) != 1 or (isinstance(weight, torch.Tensor) and weight.stride(1) != 1):
        raise ValueError("the rows of x and weight must be contiguous")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.stride(0) != 1):
        raise ValueError(f"bias must be contiguous [{weight.shape[0]}], got {tuple(bias.shape)}")
    if norm is not None:
        check_squares(norm.squares, *x.shape, x.device)
