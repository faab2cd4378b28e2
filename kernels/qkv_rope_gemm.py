"""QKV projection: matmul, head norms (families that have them), rotary embedding and KV cache write in one launch.

x [R, K] is a scaled stream (see `norm`), weight [(Hq + 2 Hkv) * D, K]. Writes rotated queries to q_out [R, Hq * D], and
rotated keys and values to the rows' slots in one layer of the paged cache, [pages, 64, Hkv, D] each. The sum over K
runs in one program in fixed blocks (see `gemm_common`); head norms sum squares as a balanced tree over the head.
"""

from __future__ import annotations

import torch

from selfspec.kernels.constants import PAGE_SIZE
from selfspec.kernels.gemm_common import TileConfig, check_matmul, matmul_reference, norm_squares
from selfspec.kernels.noise import check_tensor
from selfspec.kernels.norm import Norm, apply_norm_reference, tree_sum
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.quantized_launch import Weight, choose_weight_tile, weight_arguments, weight_settings
from selfspec.kernels.quantized_tile import prefetch_tile, weight_tile
from selfspec.kernels.triton_compat import jit, tl, triton


def qkv_linear_reference(
    x: torch.Tensor,
    weight: Weight,
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
    """Rotated queries [R, Hq * D]; writes keys and values to their slots in [pages, 64, Hkv, D]."""
    head_dim, kv_heads = keys.shape[3], keys.shape[2]
    heads = matmul_reference(x, weight, bias, norm).to(x.dtype).unflatten(1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)

    def norm_and_rotate(part: torch.Tensor, part_norm: torch.Tensor | None) -> torch.Tensor:
        if part_norm is not None:
            mean_square = part.to(wide).square().mean(-1, keepdim=True)
            part = apply_norm_reference(part, mean_square, part_norm, norm.eps, head_offset)
        first, second = part.to(wide).chunk(2, dim=-1)
        c, s = cos[:, None].to(wide), sin[:, None].to(wide)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)

    stored = slots >= 0
    pages, offsets = slots[stored] // PAGE_SIZE, slots[stored] % PAGE_SIZE
    keys[pages, offsets] = norm_and_rotate(k, k_norm)[stored]
    values[pages, offsets] = v[stored]
    return norm_and_rotate(q, q_norm).flatten(1)


@jit
def _norm_heads(
    both, weight, dimension, D: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The norm of whole heads [BM, BN], which are 0 past their D dimensions; squares are summed as a tree over BN."""
    inverse = tl.rsqrt(tree_sum(both * both, BM, BN) / D + EPS)
    scale = OFFSET + tl.load(weight + dimension).to(tl.float32)
    return (both * inverse[:, None] * scale[None, :]).to(DTYPE).to(tl.float32)


@jit
def _finite(value, dtype: tl.constexpr):
    """Rounds to `dtype` and replaces values that are not finite by 0: a weight of 0 would not cancel them when a later
    sequence attends over a page with masked slots."""
    rounded = value.to(dtype)
    return tl.where(tl.abs(rounded.to(tl.float32)) < float("inf"), rounded, 0.0)


@jit
def _store_halves(at, pair, first, second, inside, HALF: tl.constexpr):
    """Stores both halves of a head to rows that begin at `at`, in two stores of neighbouring elements each."""
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
    SLICING: tl.constexpr, FORMAT: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row tile, part of a head): BN dimensions of one head; with head norms a whole head.

    The dimensions d and d + HALF that are rotated together alternate in the tile, so that both are in one thread. Heads
    before SKIP have no programs.
    """
    PAIRS: tl.constexpr = BN // 2
    PARTS: tl.constexpr = (HALF + PAIRS - 1) // PAIRS  # programs per head
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    head = SKIP + tl.program_id(1) // PARTS
    base = (tl.program_id(1) % PARTS) * PAIRS
    pair = base + tl.arange(0, PAIRS)
    index = tl.arange(0, BN)
    source = tl.minimum(row, row_count - 1).to(tl.int64)
    dimension = tl.minimum(base + index // 2, HALF - 1) + (index % 2) * HALF  # [BN]: d, d + HALF, d + 1, ...
    weight_rows = head * (2 * HALF) + dimension
    weight_offsets = weight_rows.to(tl.int64) * weight_stride
    release(PDL)  # early: attention reads lengths, pages and the tree before it waits
    prefetch_tile(weight, weight_rows, weight_offsets, weight_stride, BN, PREFETCH, PDL, FORMAT)
    wait(PDL)
    valid = (pair < HALF)[None, :]
    slot = tl.load(slots + source)
    angle = source[:, None] * rotation_stride + pair[None, :]
    c = tl.load(cos + angle, mask=valid, other=0.0)
    s = tl.load(sin + angle, mask=valid, other=0.0)
    both = weight_tile(
        x, weight, squares, row < row_count, source * x_stride, weight_rows, weight_offsets,
        source * squares_stride, weight_stride, K, T, CHUNKS, EPS, SHRINK, BM, BN, BK, SLICING, FORMAT,
    )  # fmt: skip
    if bias is not None:
        both += tl.load(bias + head * (2 * HALF) + dimension).to(tl.float32)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    both = both.to(dtype).to(tl.float32)
    if q_norm is not None:
        both = tl.where((base + index // 2 < HALF)[None, :], both, 0.0)
        if head < Q_HEADS:
            both = _norm_heads(both, q_norm, dimension, 2 * HALF, EPS, OFFSET, BM, BN, dtype)
        elif head < Q_HEADS + KV_HEADS:
            both = _norm_heads(both, k_norm, dimension, 2 * HALF, EPS, OFFSET, BM, BN, dtype)
    first, second = tl.split(tl.reshape(both, (BM, PAIRS, 2)))
    if head < Q_HEADS + KV_HEADS:
        cosine, sine = c.to(tl.float32), s.to(tl.float32)
        first, second = first * cosine - second * sine, second * cosine + first * sine
    inside = (row < row_count)[:, None] & valid
    stored = inside & (slot >= 0)[:, None]
    page, offset = slot // PAGE, slot % PAGE
    if head < Q_HEADS:
        _store_halves(q_out + row.to(tl.int64) * q_stride + head * (2 * HALF), pair, first, second, inside, HALF)
    elif head < Q_HEADS + KV_HEADS:
        at = keys + page * key_page_stride + offset * key_slot_stride + (head - Q_HEADS) * key_head_stride
        _store_halves(at, pair, _finite(first, dtype), _finite(second, dtype), stored, HALF)
    else:
        at = values + page * value_page_stride + offset * value_slot_stride
        at += (head - Q_HEADS - KV_HEADS) * value_head_stride
        _store_halves(at, pair, _finite(first, dtype), _finite(second, dtype), stored, HALF)


def qkv_linear(
    x: torch.Tensor,  # [R, K], the scaled stream
    weight: Weight,  # [(Hq + 2 Hkv) * D, K]
    q_out: torch.Tensor | None,  # [R, Hq * D]; None: only keys and values are computed
    keys: torch.Tensor,  # [pages, 64, Hkv, D], one layer of the cache
    values: torch.Tensor,  # [pages, 64, Hkv, D]
    *,
    bias: torch.Tensor | None = None,  # [(Hq + 2 Hkv) * D]
    norm: Norm,  # its eps is also that of the head norms
    q_norm: torch.Tensor | None = None,  # [D]
    k_norm: torch.Tensor | None = None,  # [D]
    head_offset: float = 0.0,  # added to the weights of the head norms
    cos: torch.Tensor,  # [R, D / 2]
    sin: torch.Tensor,  # [R, D / 2]
    slots: torch.Tensor,  # [R] int64: where the row's keys and values are stored; negative: nowhere
    config: TileConfig | None = None,
) -> None:
    """Projects x to heads, norms queries and keys if the family does, rotates both; writes q_out, keys and values."""
    rows, kv_heads, head_dim = x.shape[0], keys.shape[2], keys.shape[3]
    check_matmul(x, weight, bias, norm)
    q_heads = weight.shape[0] // head_dim - 2 * kv_heads
    if q_heads < 1 or weight.shape[0] % head_dim:
        raise ValueError(f"weight has {weight.shape[0]} rows, which are not heads of {head_dim} with {kv_heads} for k")
    if q_out is not None:
        check_tensor(q_out, "q_out", (rows, q_heads * head_dim), (x.dtype,), x.device)
    _check_heads(x, keys, values, q_norm, k_norm, cos, sin, slots)
    whole_heads = q_norm is not None
    config = config or choose_weight_tile("qkv_norm" if whole_heads else "qkv", weight, rows)
    half = head_dim // 2
    # Equal parts of a head.
    pairs = triton.next_power_of_2(half) if whole_heads else min(config.block_n // 2, half & -half)
    settings = weight_settings(x, weight, norm, config, block_n=2 * pairs)
    squares, squares_stride = norm_squares(norm)
    tensors, weight_stride = weight_arguments(weight)
    skip = q_heads if q_out is None else 0
    target = keys if q_out is None else q_out  # without queries nothing is stored there: any tensor will do
    programs = (q_heads + 2 * kv_heads - skip) * -(-half // pairs)
    _qkv_kernel[(-(-rows // settings["BM"]), programs)](
        x, tensors, target, keys, values, bias, squares, q_norm, k_norm, cos, sin, slots, rows,
        x.stride(0), weight_stride, target.stride(0), squares_stride, cos.stride(0),
        *keys.stride()[:3], *values.stride()[:3],
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HALF=half, SKIP=skip, PAGE=PAGE_SIZE,
        OFFSET=float(head_offset), **settings,
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
        raise ValueError(f"cos and sin must both be {wanted}, with equal strides and contiguous rows")
    check_tensor(slots, "slots", (x.shape[0],), (torch.int64,), x.device)
