"""Parts of `tree_attention_kernel`: how positions are divided into ranges, and the running softmax.

Ranges and bundles (see `tree_attention`) are functions of the position alone, so every batch and plan sums the same
keys together. The running softmax of a row is the triple of the flash-attention literature: m_i, the largest logit;
l_i, the sum of weights exp2((logit - m_i) * scale); acc, the sum of values times these weights. A row that has seen no
key has m_i = -inf, and leaves whatever it is merged with unchanged.
"""

from __future__ import annotations

from selfspec.kernels.triton_compat import jit, tl

# Positions to ranges. Plain integer arithmetic: the launcher calls these functions, kernels call their compiled twins.


def split_point(position: int) -> int:
    """First position of a query's tail; below 0 if it has no prefix.

    The last whole page that is at least MAX_NODES positions behind the query: 64 * floor((position - 63) / 64), for
    positions from -1 on.
    """
    return (position + 1) // 64 * 64 - 64


def range_of(position: int) -> int:
    """The range in which a position lies: 128 positions each, 512 from position 2048 on, 1024 from 8192 on. Short
    ranges use more programs; long ones give fewer partials."""
    return min(position, 2048) // 128 + max(min(position, 8192) - 2048, 0) // 512 + max(position - 8192, 0) // 1024


def range_start(index: int) -> int:
    """The first position of a range."""
    return min(index, 16) * 128 + max(min(index, 28) - 16, 0) * 512 + max(index - 28, 0) * 1024


def bundle_of(index: int) -> int:
    """The bundle of a range: four ranges each, two from range 28 (position 8192) on."""
    return min(index, 28) // 4 + max(index - 28, 0) // 2


def bundle_start(index: int) -> int:
    """The first range of a bundle."""
    return min(index, 7) * 4 + max(index - 7, 0) * 2


split_point_jit = jit(split_point)
range_of_jit = jit(range_of)
range_start_jit = jit(range_start)
bundle_of_jit = jit(bundle_of)
bundle_start_jit = jit(bundle_start)


@jit
def ranges_between(begin, end):
    """The ranges that hold the positions from begin to end - 1: the first, and one past the last."""
    low = range_of_jit(begin)
    return low, tl.where(end > begin, range_of_jit(tl.maximum(end, 1) - 1) + 1, low)


@jit
def partials_of(low, high, SEPARATE: tl.constexpr):
    """The partial results stored for ranges low to high - 1: one per range, or with SEPARATE launches one per bundle.
    Returns the first, and one past the last."""
    if SEPARATE:
        return bundle_of_jit(low), tl.where(high > low, bundle_of_jit(tl.maximum(high, 1) - 1) + 1, bundle_of_jit(low))
    else:
        return low, high


@jit
def prefix_of_tile(depths, length, first, count, WINDOW: tl.constexpr, ROW_TILE: tl.constexpr):
    """The prefix that any of `count` nodes from `first` on sees: begin and end positions, first range, one past the
    last range."""
    node = tl.arange(0, ROW_TILE)
    depth = tl.load(depths + first + node, mask=node < count, other=0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length + tl.min(tl.where(node < count, depth, 64)) - WINDOW + 1, 0)
    end = split_point_jit(length + tl.max(depth))
    low, high = ranges_between(begin, end)
    return begin, end, low, high


@jit
def softmax_step(m_i, l_i, acc, q, k, v, visible, scale):
    """Adds a tile of keys and values to running softmaxes: q [M, D], k and v [N, D], visible [M or 1, N].

    A row that sees none of the keys keeps its bits. Weights are summed by a dot product with ones, whose order does not
    depend on the tile's height, as that of tl.sum would; all columns of l_i [M, C] are equal. A maximum has no order.
    """
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    logits = tl.where(visible, logits, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(logits, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet: avoids -inf minus -inf
    weights = tl.exp2(tl.math.fma(logits, tl.full(logits.shape, scale, tl.float32), (-shift * scale)[:, None]))
    weights = weights.to(v.dtype)
    kept = tl.exp2((m_i - shift) * scale)
    ones = tl.full((v.shape[0], l_i.shape[1]), 1.0, v.dtype)
    l_i = tl.dot(weights, ones, l_i * kept[:, None], input_precision="ieee")
    acc = tl.dot(weights, v, acc * kept[:, None], input_precision="ieee")
    return m_new, l_i, acc


@jit
def softmax_merge(m_i, l_i, acc, m_j, l_j, acc_j, scale):
    """Merges two running softmaxes. Multiply-adds are explicit, so that the compiler chooses no rounding."""
    m_new = tl.maximum(m_i, m_j)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    kept, kept_j = tl.exp2((m_i - shift) * scale), tl.exp2((m_j - shift) * scale)
    l_i = tl.math.fma(l_i, kept, l_j * kept_j)
    acc = tl.math.fma(acc, tl.broadcast_to(kept[:, None], acc.shape), acc_j * kept_j[:, None])
    return m_new, l_i, acc


@jit
def load_columns(pointers, column, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Rows of keys or values, [N, DIM_PAD]; unmasked if the head size is a power of two."""
    if DIM == DIM_PAD:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(column < DIM)[None, :], other=0.0)
