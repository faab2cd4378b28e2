"""Products of a few rows with a weight matrix, with everything around them in the same launch.

`linear` adds bias and residual and writes the sums of squares the next norm needs; `gated_linear` applies the MLP's
activation; `qkv_linear` norms heads, rotates them and stores keys and values into the paged cache. All of them can norm
their input on the way. Weights [N, K] are taken as they lie. Norms by themselves are in `norm`; attention, embedding
and head are elsewhere.

A row's result has the same bits in any company: one program sums over the whole of K in an order fixed by the layer's
shape, and only the height of a tile follows the number of rows, which changes no sum. Kernels are compiled without
fusing multiplications and additions, because what gets fused may differ from one tile height to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from selfspec.kernels.norm import (
    Norm,
    block_width,
    check_squares,
    power_of_two,
    scale_reference,
    sum_neighbours,
    sum_rows,
    tiles,
)
from selfspec.kernels.triton_or_none import jit, tl, use_pdl

PAGE_SIZE = 64
MAX_ROW_TILE = 64
SHARED_BYTES = 96 * 1024  # what the stages of a program may take of shared memory; sm_86 has 99 KB

# ---------------------------------------------------------------------------------------------------------------------
# References


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def _project_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None
) -> torch.Tensor:
    """bias + norm(x) @ weight^T, not yet rounded: at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if norm is not None:
        mean_square = norm.squares.to(wide).sum(-1, keepdim=True) / x.shape[1]
        x = scale_reference(x, mean_square, norm.weight, norm.eps, norm.offset)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + bias + norm(x) @ weight^T, [R, N], rounded once."""
    product = _project_reference(x, weight, bias, norm)
    return (product if residual is None else residual + product).to(x.dtype)


def gated_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: str,
) -> torch.Tensor:
    """act(gate) * up, [R, I], where weight [2I, K] holds the rows of gate, then those of up."""
    gate, up = _project_reference(x, weight, bias, norm).to(x.dtype).chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def qkv_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries [R, Hq * D]; keys and values go to their slots in [pages, 64, Hkv, D], in place."""
    head_dim, kv_heads = keys.shape[3], keys.shape[2]
    heads = _project_reference(x, weight, bias, norm).to(x.dtype).unflatten(1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)

    def finish(part: torch.Tensor, part_norm: torch.Tensor | None) -> torch.Tensor:
        if part_norm is not None:
            mean_square = part.to(wide).square().mean(-1, keepdim=True)
            part = scale_reference(part, mean_square, part_norm, norm.eps, norm.offset)
        first, second = part.to(wide).chunk(2, dim=-1)
        c, s = cos[:, None].to(wide), sin[:, None].to(wide)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)

    kept = slots >= 0
    pages, offsets = slots[kept] // PAGE_SIZE, slots[kept] % PAGE_SIZE
    keys[pages, offsets] = finish(k, k_norm)[kept]
    values[pages, offsets] = v[kept]
    return finish(q, q_norm).flatten(1)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@jit
def _prefetch(weight, row_offsets, K: tl.constexpr, COLUMNS: tl.constexpr, LINE: tl.constexpr):
    """Asks for the first COLUMNS columns of some weight rows in L2; weights may be read before earlier kernels end."""
    lines = tl.minimum(tl.arange(0, COLUMNS // LINE) * LINE, K - 1)
    addresses = (weight + row_offsets[:, None] + lines[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def _begin(weight, weight_rows, K: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr):
    """What a program may do before earlier kernels have ended; reads and writes of activations come after it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH > 0:
        _prefetch(weight, weight_rows, K, PREFETCH, LINE)
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def _product(
    x, weight, norm_weight, squares, x_rows, weight_rows, squares_rows,
    K: tl.constexpr, T: tl.constexpr, T_PADDED: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """norm(x) @ weight^T of BM rows and BN weight rows, given by their offsets: [BM, BN] float32.

    The norm's factor of a row is applied to the sums, so that nothing waits for it; the weights of the norm are applied
    to x, which is then rounded. In float16 that product is kept 64 times smaller, lest it overflow. WIDE loads the
    norm's weights once per row: a load of less than 4 bytes per thread is not pipelined and would stall every step.
    """
    SHRINK: tl.constexpr = 0.015625 if x.dtype.element_ty == tl.float16 else 1.0
    columns = tl.arange(0, BK)
    x_at = x + x_rows[:, None] + columns[None, :]
    weight_at = weight + weight_rows[:, None] + columns[None, :]
    t = tl.arange(0, T_PADDED)
    EARLY: tl.constexpr = BM * T_PADDED <= 4096  # many entries would hold too many registers throughout the loop
    if norm_weight is not None and EARLY:
        entries = tl.load(squares + squares_rows[:, None] + t[None, :], mask=(t < T)[None, :], other=0.0)
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            rows = tl.load(x_at + start)
            matrix = tl.load(weight_at + start)
        else:
            inside = (columns < K - start)[None, :]
            rows = tl.load(x_at + start, mask=inside, other=0.0)
            matrix = tl.load(weight_at + start, mask=inside, other=0.0)
        if norm_weight is not None:
            scale_at = norm_weight + start + columns
            if WIDE:
                scale_at = tl.broadcast_to(scale_at[None, :], (BM, BK))
                scale = tl.load(scale_at) if K % BK == 0 else tl.load(scale_at, mask=inside, other=0.0)
            elif K % BK == 0:
                scale = tl.load(scale_at)[None, :]
            else:
                scale = tl.load(scale_at, mask=columns < K - start, other=0.0)[None, :]
            rows = (rows.to(tl.float32) * ((OFFSET + scale.to(tl.float32)) * SHRINK)).to(x.dtype.element_ty)
        sums = tl.dot(rows, tl.trans(matrix), sums, input_precision="ieee")
    if norm_weight is not None:
        if not EARLY:
            entries = tl.load(squares + squares_rows[:, None] + t[None, :], mask=(t < T)[None, :], other=0.0)
        sums *= (tl.rsqrt(sum_rows(entries, BM, T_PADDED) / K + EPS) / SHRINK)[:, None]
    return sums


@jit(do_not_specialize=["row_count"])
def _linear_kernel(
    x, weight, out, bias, residual, squares_out, norm_weight, squares, row_count,
    x_stride, weight_stride, out_stride, residual_stride, squares_out_stride, squares_stride,
    N: tl.constexpr, K: tl.constexpr, T: tl.constexpr, T_PADDED: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, OFFSET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDE: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    source = tl.minimum(row, row_count - 1).to(tl.int64)  # rows past the end repeat the last one and store nothing
    weight_rows = tl.minimum(column, N - 1).to(tl.int64) * weight_stride
    inside = (row < row_count)[:, None] & (column < N)[None, :]
    _begin(weight, weight_rows, K, PREFETCH, LINE, PDL)
    if residual is not None:  # asked for early, needed late; each program reads only what it will overwrite itself
        kept = tl.load(residual + source[:, None] * residual_stride + column[None, :], mask=inside, other=0.0)
    result = _product(
        x, weight, norm_weight, squares, source * x_stride, weight_rows, source * squares_stride,
        K, T, T_PADDED, EPS, OFFSET, BM, BN, BK, WIDE,
    )  # fmt: skip
    if bias is not None:
        result += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        result += kept.to(tl.float32)
    stored = result.to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + column[None, :], stored, mask=inside)
    if squares_out is not None:
        rounded = tl.where(inside, stored.to(tl.float32), 0.0)
        sums = sum_neighbours(rounded * rounded, BM, BN, BN // WIDTH)
        tile = tl.program_id(1) * (BN // WIDTH) + tl.arange(0, BN // WIDTH)
        tl.store(
            squares_out + row.to(tl.int64)[:, None] * squares_out_stride + tile[None, :],
            sums,
            mask=(row < row_count)[:, None] & (tile * WIDTH < N)[None, :],
        )


@jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))  # 0.5 (1 + tanh(u)) without a tanh


@jit(do_not_specialize=["row_count"])
def _gated_kernel(
    x, weight, out, bias, norm_weight, squares, row_count,
    x_stride, weight_stride, out_stride, squares_stride,
    N: tl.constexpr, K: tl.constexpr, T: tl.constexpr, T_PADDED: tl.constexpr, ACTIVATION: tl.constexpr,
    EPS: tl.constexpr, OFFSET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDE: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N counts outputs. Gate and up rows alternate in the tile, so both values of an output meet in one thread."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * (BN // 2)
    column = first + tl.arange(0, BN // 2)
    turn = tl.arange(0, BN)
    source = tl.minimum(row, row_count - 1).to(tl.int64)
    weight_rows = (tl.minimum(first + turn // 2, N - 1) + (turn % 2) * N).to(tl.int64) * weight_stride
    _begin(weight, weight_rows, K, PREFETCH, LINE, PDL)
    both = _product(
        x, weight, norm_weight, squares, source * x_stride, weight_rows, source * squares_stride,
        K, T, T_PADDED, EPS, OFFSET, BM, BN, BK, WIDE,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(both, (BM, BN // 2, 2)))
    if bias is not None:
        gate += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    active = _activate(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    tl.store(
        out + row.to(tl.int64)[:, None] * out_stride + column[None, :],
        (active * up.to(dtype).to(tl.float32)).to(dtype),
        mask=(row < row_count)[:, None] & (column < N)[None, :],
    )


@jit
def _norm_heads(
    both, weight, dimension, D: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The norm of whole heads [BM, BN], zero where there is no dimension; their sums of squares are trees over BN."""
    inverse = tl.rsqrt(sum_rows(both * both, BM, BN) / D + EPS)
    scale = OFFSET + tl.load(weight + dimension).to(tl.float32)
    return (both * inverse[:, None] * scale[None, :]).to(DTYPE).to(tl.float32)


@jit(do_not_specialize=["row_count"])
def _qkv_kernel(
    x, weight, q_out, keys, values, bias, norm_weight, squares, q_norm, k_norm, cos, sin, slots, row_count,
    x_stride, weight_stride, q_stride, squares_stride, rotation_stride,
    key_page_stride, key_slot_stride, key_head_stride, value_page_stride, value_slot_stride, value_head_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, SKIP: tl.constexpr, PAGE: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr, T_PADDED: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDE: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head, or a part of it, whose pairs (d, d + HALF) alternate in the tile and so meet in one thread. The first
    SKIP heads have no programs."""
    PAIRS: tl.constexpr = BN // 2
    PARTS: tl.constexpr = (HALF + PAIRS - 1) // PAIRS  # programs per head
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    head = SKIP + tl.program_id(1) // PARTS
    base = (tl.program_id(1) % PARTS) * PAIRS
    pair = base + tl.arange(0, PAIRS)
    turn = tl.arange(0, BN)
    source = tl.minimum(row, row_count - 1).to(tl.int64)
    dimension = tl.minimum(base + turn // 2, HALF - 1) + (turn % 2) * HALF
    weight_rows = (head * (2 * HALF) + dimension).to(tl.int64) * weight_stride
    _begin(weight, weight_rows, K, PREFETCH, LINE, PDL)
    valid = (pair < HALF)[None, :]
    slot = tl.load(slots + source)
    angle = source[:, None] * rotation_stride + pair[None, :]
    c = tl.load(cos + angle, mask=valid, other=0.0)
    s = tl.load(sin + angle, mask=valid, other=0.0)
    both = _product(
        x, weight, norm_weight, squares, source * x_stride, weight_rows, source * squares_stride,
        K, T, T_PADDED, EPS, OFFSET, BM, BN, BK, WIDE,
    )  # fmt: skip
    if bias is not None:
        both += tl.load(bias + head * (2 * HALF) + dimension).to(tl.float32)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    both = both.to(dtype).to(tl.float32)
    if q_norm is not None:
        both = tl.where((base + turn // 2 < HALF)[None, :], both, 0.0)
        if head < Q_HEADS:
            both = _norm_heads(both, q_norm, dimension, 2 * HALF, EPS, OFFSET, BM, BN, dtype)
        elif head < Q_HEADS + KV_HEADS:
            both = _norm_heads(both, k_norm, dimension, 2 * HALF, EPS, OFFSET, BM, BN, dtype)
    first, second = tl.split(tl.reshape(both, (BM, PAIRS, 2)))
    if head < Q_HEADS + KV_HEADS:
        cosine, sine = c.to(tl.float32), s.to(tl.float32)
        first, second = first * cosine - second * sine, second * cosine + first * sine
    inside = (row < row_count)[:, None] & valid
    page, offset = slot // PAGE, slot % PAGE
    if head < Q_HEADS:
        at = q_out + row.to(tl.int64) * q_stride + head * (2 * HALF)
    elif head < Q_HEADS + KV_HEADS:
        at = keys + page * key_page_stride + offset * key_slot_stride + (head - Q_HEADS) * key_head_stride
        inside = inside & (slot >= 0)[:, None]
    else:
        at = values + page * value_page_stride + offset * value_slot_stride
        at += (head - Q_HEADS - KV_HEADS) * value_head_stride
        inside = inside & (slot >= 0)[:, None]
    target = at[:, None] + pair[None, :]
    tl.store(target, first.to(dtype), mask=inside)
    tl.store(target + HALF, second.to(dtype), mask=inside)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


@dataclass(frozen=True)
class Config:
    """The tile of a program. All but `block_m` must follow from the layer's shape alone."""

    block_n: int  # rows of the weight
    block_k: int
    stages: int
    warps: int
    prefetch: int = 0  # leading columns of a weight row asked for while earlier kernels still run
    block_m: int | None = None  # rows of x; None: by their number


def choose(kind: str, n: int, k: int) -> Config:
    """The tile for a weight [n, k] of a "linear", "gated" or "qkv" product, or of "heads", qkv with a norm of heads:
    those take a whole head per program, whatever `block_n` says.

    Two warps keep Hopper on the same tensor core instruction for every height of a tile, and with 128 columns of 16
    bits a norm's weights can be pipelined.
    """
    if kind == "heads":
        return Config(block_n=0, block_k=64, stages=4, warps=4)
    small = k <= 2048 and n <= 8192  # bound by latency: many programs, much in flight
    if kind == "linear":
        return Config(block_width(n), block_k=128, stages=5 if small else 6, warps=2, prefetch=512 if small else 0)
    if small:
        return Config(block_n=16, block_k=128, stages=5, warps=2, prefetch=512)
    if n > 8192:  # few stages, so that all programs of a large layer run at once
        return Config(block_n=64, block_k=128, stages=3, warps=2)
    return Config(block_n=32, block_k=128, stages=5, warps=2)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    squares_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """out [R, N] = residual + bias + norm(x [R, K]) @ weight [N, K]^T; `residual` may be `out` itself."""
    rows, n = x.shape[0], weight.shape[0]
    _check_product(x, weight, bias, norm)
    _check_rows("out", out, x, n)
    if residual is not None:
        _check_rows("residual", residual, x, n)
    config = config or choose("linear", n, x.shape[1])
    width = block_width(n)
    if squares_out is not None:
        check_squares(squares_out, rows, n)
        if config.block_n % width:
            raise ValueError(f"tiles of {config.block_n} columns cannot sum squares over {width}")
    shape, options = _launch(x, norm, config)
    _linear_kernel[(-(-rows // shape["BM"]), -(-n // config.block_n))](
        x, weight, out, bias, residual, squares_out, *_norm_tensors(norm), rows,
        x.stride(0), weight.stride(0), out.stride(0), _stride(residual), _stride(squares_out), _norm_stride(norm),
        N=n, WIDTH=width, **shape, **options,
    )  # fmt: skip


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: str,
    config: Config | None = None,
) -> None:
    """out [R, I] = act(gate) * up, with gate and up the halves of bias + norm(x [R, K]) @ weight [2I, K]^T."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; there are {', '.join(_ACTIVATIONS)}")
    _check_product(x, weight, bias, norm)
    if weight.shape[0] % 2:
        raise ValueError(f"weight must hold as many rows for gate as for up, got {weight.shape[0]} in all")
    n = weight.shape[0] // 2
    _check_rows("out", out, x, n)
    config = config or choose("gated", 2 * n, x.shape[1])
    shape, options = _launch(x, norm, config)
    _gated_kernel[(-(-x.shape[0] // shape["BM"]), -(-n // (config.block_n // 2)))](
        x, weight, out, bias, *_norm_tensors(norm), x.shape[0],
        x.stride(0), weight.stride(0), out.stride(0), _norm_stride(norm),
        N=n, ACTIVATION=activation, **shape, **options,
    )  # fmt: skip


def qkv_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    q_out: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    config: Config | None = None,
) -> None:
    """Heads of norm(x [R, K]) @ weight [(Hq + 2 Hkv) * D, K]^T + bias: queries and keys normed with `norm`'s eps and
    offset where the family does that, and rotated; q into q_out [R, Hq * D], k and v into the slots of one layer of the
    cache, [pages, 64, Hkv, D]. Rows with a negative slot store no keys and values. Without q_out only keys and values
    are computed."""
    rows, kv_heads, head_dim = x.shape[0], keys.shape[2], keys.shape[3]
    _check_product(x, weight, bias, norm)
    q_heads = weight.shape[0] // head_dim - 2 * kv_heads
    if q_heads < 1 or weight.shape[0] % head_dim:
        raise ValueError(f"weight has {weight.shape[0]} rows, which are not heads of {head_dim} with {kv_heads} for k")
    if q_out is not None:
        _check_rows("q_out", q_out, x, q_heads * head_dim)
    _check_heads(x, keys, values, q_norm, k_norm, cos, sin, slots)
    whole = q_norm is not None
    config = config or choose("heads" if whole else "qkv", weight.shape[0], x.shape[1])
    half = head_dim // 2
    pairs = power_of_two(half) if whole else min(config.block_n // 2, half & -half)  # whole heads, or parts alike
    shape, options = _launch(x, norm, config, block_n=2 * pairs)
    skip = q_heads if q_out is None else 0
    target = keys if q_out is None else q_out  # with nothing to store there, any tensor will do
    programs = (q_heads + 2 * kv_heads - skip) * -(-half // pairs)
    _qkv_kernel[(-(-rows // shape["BM"]), programs)](
        x, weight, target, keys, values, bias, *_norm_tensors(norm), q_norm, k_norm, cos, sin, slots, rows,
        x.stride(0), weight.stride(0), target.stride(0), _norm_stride(norm), cos.stride(0),
        *keys.stride()[:3], *values.stride()[:3],
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HALF=half, SKIP=skip, PAGE=PAGE_SIZE, **shape, **options,
    )  # fmt: skip


def row_tile(rows: int) -> int:
    """The height of a tile; dot products along K do not depend on it."""
    return 16 if rows <= 16 else 32 if rows <= 32 else MAX_ROW_TILE


def _launch(
    x: torch.Tensor, norm: Norm | None, config: Config, block_n: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants all kernels share, and the options of the launch."""
    k, size = x.shape[1], x.element_size()
    block_n = block_n or config.block_n
    # A wide and high tile does not fit the registers.
    highest = 16 if block_n > 128 else 32 if block_n == 128 else MAX_ROW_TILE
    block_m = config.block_m or min(row_tile(x.shape[0]), highest)
    block_k = min(config.block_k * 2 // size, power_of_two(k))  # float32: half the columns
    while 3 * (MAX_ROW_TILE + block_n) * block_k * size > SHARED_BYTES:  # for all heights alike
        block_k //= 2
    wide = norm is not None and block_k * size < 128 * config.warps
    stage = ((1 + wide) * block_m + block_n) * block_k * size
    # With fewer than four warps the tensor cores read registers, and one stage less lies in shared memory.
    stages = min(config.stages, SHARED_BYTES // stage + (config.warps < 4))
    pdl = use_pdl(x)
    shape = {
        "K": k,
        "T": tiles(k),
        "T_PADDED": power_of_two(max(2, tiles(k))),
        "EPS": norm.eps if norm else 0.0,
        "OFFSET": float(norm.offset) if norm else 0.0,
        "BM": block_m,
        "BN": block_n,
        "BK": block_k,
        "WIDE": wide,
        "PREFETCH": config.prefetch if pdl else 0,
        "LINE": 128 // size,
        "PDL": pdl,
    }
    options: dict[str, Any] = {
        "num_warps": config.warps,
        "num_stages": stages,
        "enable_fp_fusion": False,
    }
    return shape, options | ({"launch_pdl": True} if pdl else {})


def _norm_tensors(norm: Norm | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.squares)


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _norm_stride(norm: Norm | None) -> int:
    return 0 if norm is None else norm.squares.stride(0)


def _check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None) -> None:
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
        norm.check(x)


def _check_rows(name: str, tensor: torch.Tensor, x: torch.Tensor, width: int) -> None:
    if tensor.shape != (x.shape[0], width) or tensor.dtype != x.dtype or tensor.stride(1) != 1:
        raise ValueError(
            f"{name} must be {x.dtype} [{x.shape[0]}, {width}] with contiguous rows, "
            f"got {tensor.dtype} {tuple(tensor.shape)}"
        )


def _check_heads(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    head_dim = keys.shape[3]
    for name, cached in {"keys": keys, "values": values}.items():
        if cached.shape != keys.shape or cached.shape[1] != PAGE_SIZE or cached.stride(3) != 1:
            raise ValueError(f"{name} must be [pages, {PAGE_SIZE}, heads, head size], got {tuple(cached.shape)}")
        if cached.dtype != x.dtype:
            raise ValueError(f"{name} are {cached.dtype}, x is {x.dtype}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together")
    for weight in (q_norm, k_norm):
        if weight is not None and (weight.shape != (head_dim,) or weight.stride(0) != 1):
            raise ValueError(f"norms of heads must be contiguous [{head_dim}], got {tuple(weight.shape)}")
    wanted = (x.shape[0], head_dim // 2)
    if cos.shape != wanted or sin.shape != wanted or cos.stride() != sin.stride() or cos.stride(1) != 1:
        raise ValueError(f"cos and sin must both be {wanted}, laid out alike, with contiguous rows")
    if slots.shape != x.shape[:1] or slots.dtype != torch.int64 or slots.stride(0) != 1:
        raise ValueError(f"slots must be contiguous int64 [{x.shape[0]}], got {slots.dtype} {tuple(slots.shape)}")
