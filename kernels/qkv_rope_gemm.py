"""The product before attention: heads are normed where the family does that, rotated, and keys and values stored into
the paged cache, all in one launch. The loop itself is in `product`."""

from __future__ import annotations

import torch

from selfspec.kernels.constants import PAGE_SIZE
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
from selfspec.kernels.norm import Norm, power_of_two, scale_reference, sum_rows
from selfspec.kernels.pdl import fetch, release, wait
from selfspec.kernels.triton_compat import jit, tl


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
    head_offset: float = 0.0,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries [R, Hq * D]; keys and values go to their slots in [pages, 64, Hkv, D], in place."""
    head_dim, kv_heads = keys.shape[3], keys.shape[2]
    heads = product_reference(x, weight, bias, norm).to(x.dtype).unflatten(1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)

    def finish(part: torch.Tensor, part_norm: torch.Tensor | None) -> torch.Tensor:
        if part_norm is not None:
            mean_square = part.to(wide).square().mean(-1, keepdim=True)
            part = scale_reference(part, mean_square, part_norm, norm.eps, head_offset)
        first, second = part.to(wide).chunk(2, dim=-1)
        c, s = cos[:, None].to(wide), sin[:, None].to(wide)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)

    kept = slots >= 0
    pages, offsets = slots[kept] // PAGE_SIZE, slots[kept] % PAGE_SIZE
    keys[pages, offsets] = finish(k, k_norm)[kept]
    values[pages, offsets] = v[kept]
    return finish(q, q_norm).flatten(1)


@jit
def _norm_heads(
    both, weight, dimension, D: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The norm of whole heads [BM, BN], zero where there is no dimension; their sums of squares are trees over BN."""
    inverse = tl.rsqrt(sum_rows(both * both, BM, BN) / D + EPS)
    scale = OFFSET + tl.load(weight + dimension).to(tl.float32)
    return (both * inverse[:, None] * scale[None, :]).to(DTYPE).to(tl.float32)


@jit
def _store_halves(at, pair, first, second, inside, HALF: tl.constexpr):
    """A head's halves, from rows' places on: each by itself, so that neighbours in memory are stored together."""
    dtype: tl.constexpr = at.dtype.element_ty
    tl.store(at[:, None] + pair[None, :], first.to(dtype), mask=inside)
    tl.store(at[:, None] + (HALF + pair)[None, :], second.to(dtype), mask=inside)


@jit(do_not_specialize=["row_count"])
def _qkv_kernel(
    x, weight, q_out, keys, values, bias, squares, q_norm, k_norm, cos, sin, slots, row_count,
    x_stride, weight_stride, q_stride, squares_stride, rotation_stride,
    key_page_stride, key_slot_stride, key_head_stride, value_page_stride, value_slot_stride, value_head_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, SKIP: tl.constexpr, PAGE: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr, EPS: tl.constexpr, SHRINK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OFFSET: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
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
    release(PDL)  # attention has much to look up
    fetch(weight, weight_rows, BN, AHEAD, PDL)
    wait(PDL)
    valid = (pair < HALF)[None, :]
    slot = tl.load(slots + source)
    angle = source[:, None] * rotation_stride + pair[None, :]
    c = tl.load(cos + angle, mask=valid, other=0.0)
    s = tl.load(sin + angle, mask=valid, other=0.0)
    both = product(
        x, weight, squares, row < row_count, source * x_stride, weight_rows, source * squares_stride,
        K, T, CHUNKS, EPS, SHRINK, BM, BN, BK,
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
    kept = inside & (slot >= 0)[:, None]
    page, offset = slot // PAGE, slot % PAGE
    if head < Q_HEADS:
        _store_halves(q_out + row.to(tl.int64) * q_stride + head * (2 * HALF), pair, first, second, inside, HALF)
    elif head < Q_HEADS + KV_HEADS:
        at = keys + page * key_page_stride + offset * key_slot_stride + (head - Q_HEADS) * key_head_stride
        _store_halves(at, pair, first, second, kept, HALF)
    else:
        at = values + page * value_page_stride + offset * value_slot_stride
        _store_halves(at + (head - Q_HEADS - KV_HEADS) * value_head_stride, pair, first, second, kept, HALF)


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
    head_offset: float = 0.0,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    config: Config | None = None,
) -> None:
    """Heads of x [R, K] @ weight [(Hq + 2 Hkv) * D, K]^T + bias, x being a scaled stream: queries and keys normed with
    `norm`'s eps where the family does that, and rotated; q into q_out [R, Hq * D], k and v into the slots of one layer
    of the cache, [pages, 64, Hkv, D]. Rows with a negative slot store no keys and values. Without q_out only keys and
    values are computed."""
    rows, kv_heads, head_dim = x.shape[0], keys.shape[2], keys.shape[3]
    check_product(x, weight, bias, norm)
    q_heads = weight.shape[0] // head_dim - 2 * kv_heads
    if q_heads < 1 or weight.shape[0] % head_dim:
        raise ValueError(f"weight has {weight.shape[0]} rows, which are not heads of {head_dim} with {kv_heads} for k")
    if q_out is not None:
        check_rows("q_out", q_out, x, q_heads * head_dim)
    _check_heads(x, keys, values, q_norm, k_norm, cos, sin, slots)
    whole = q_norm is not None
    config = config or choose("heads" if whole else "qkv", weight.shape[0], x.shape[1], rows)
    half = head_dim // 2
    pairs = power_of_two(half) if whole else min(config.block_n // 2, half & -half)  # whole heads, or parts alike
    squares, squares_stride = norm_squares(norm)
    shape, options = launch_settings(x, weight, norm, config, block_n=2 * pairs)
    skip = q_heads if q_out is None else 0
    target = keys if q_out is None else q_out  # with nothing to store there, any tensor will do
    programs = (q_heads + 2 * kv_heads - skip) * -(-half // pairs)
    _qkv_kernel[(-(-rows // shape["BM"]), programs)](
        x, weight, target, keys, values, bias, squares, q_norm, k_norm, cos, sin, slots, rows,
        x.stride(0), weight.stride(0), target.stride(0), squares_stride, cos.stride(0),
        *keys.stride()[:3], *values.stride()[:3],
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HALF=half, SKIP=skip, PAGE=PAGE_SIZE,
        OFFSET=float(head_offset), **shape, **options,
    )  # fmt: skip


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
