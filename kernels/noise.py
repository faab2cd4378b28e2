"""Sampling parameters, Gumbel noise and sortable keys: the parts that all kernels which score logits share.

A token is drawn as argmax(logits / temperature + gumbel); the noise is a pure function of (seed, sample index,
position, token id, stream), the same as `selfspec.kernels.philox`. Every kernel that draws tokens takes its noise
from here. All roundings are explicit (multiply-adds as `fma`, divisions as `div_rn`), so that the compiler cannot
contract them differently and two kernels give the same bits.

Parameters have one entry per sequence of the batch, [B]. Rows are node-major: row = node * B + sequence. A row's result
depends on its own logits and its own sequence's parameters alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.philox import gumbel as gumbel_reference
from selfspec.kernels.philox import uniform
from selfspec.kernels.triton_compat import jit, tl


@dataclass(frozen=True)
class Noise:
    """Seeds, positions and temperatures with which R rows draw."""

    seeds: torch.Tensor  # [B] int64
    sample_indices: torch.Tensor  # [B] int32 or int64
    positions: torch.Tensor  # [R] int32 or int64: the position of the token being drawn
    temperature: torch.Tensor  # [B] float32; 0: greedy, the sequence's logits stay as they are
    stream: int = 0

    def check(self, rows: int, device: torch.device) -> None:
        sequences = self.seeds.shape[0]
        check_rows(rows, sequences)
        for name, length, dtypes in (
            ("seeds", sequences, (torch.int64,)),
            ("sample_indices", sequences, (torch.int32, torch.int64)),
            ("positions", rows, (torch.int32, torch.int64)),
            ("temperature", sequences, (torch.float32,)),
        ):
            check_tensor(getattr(self, name), f"the noise's {name}", (length,), dtypes, device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The kernels' argument `noise`."""
        return self.seeds, self.sample_indices, self.positions, self.temperature


@dataclass(frozen=True)
class Truncation:
    """Top-k, top-p and min-p of each of B sequences; without effect where the temperature is 0."""

    top_k: torch.Tensor  # [B] int32; below 1: off
    top_p: torch.Tensor  # [B] float32; 1 or more: off
    min_p: torch.Tensor  # [B] float32; 0 or less: off
    small_top_k: bool = False  # every sequence with any of the three on has a top_k from 1 to 64: one kernel suffices

    def check(self, sequences: int, device: torch.device) -> None:
        for name, dtype in (("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32)):
            check_tensor(getattr(self, name), name, (sequences,), (dtype,), device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The kernels' argument `truncation`."""
        return self.top_k, self.top_p, self.min_p

    @property
    def on(self) -> torch.Tensor:
        """[B] bool: whether a sequence has top-k, top-p or min-p on."""
        return (self.top_k >= 1) | (self.top_p < 1) | (self.min_p > 0)


def perturbed_reference(
    logits: torch.Tensor, tokens: torch.Tensor, noise: Noise, truncation: Truncation | None = None
) -> torch.Tensor:
    """Logits [R, N] of `tokens` [N], divided by temperature, plus noise.

    Rows of a truncated sequence get no noise (it is added after truncation), and greedy rows stay as they are.
    """
    each = logits.shape[0] // noise.seeds.shape[0]
    seeds, indices = (part.long().repeat(each) for part in (noise.seeds, noise.sample_indices))
    numbers = uniform(seeds, indices, noise.positions.long(), tokens.long().expand(logits.shape), noise.stream)
    temperature = noise.temperature.repeat(each)[:, None]
    sampled = temperature > 0
    noisy = sampled if truncation is None else sampled & ~truncation.on.repeat(each)[:, None]
    values = torch.where(sampled, logits / temperature, logits)
    return torch.where(noisy, values + gumbel_reference(numbers), values)


# Checks that launchers share.


def check_rows(rows: int, sequences: int) -> None:
    if sequences == 0 or rows % sequences:
        raise ValueError(f"{rows} rows cannot belong to {sequences} sequences of equally many rows each")


def check_tensor(
    tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Checks shape, dtype and device, and that the last dimension is contiguous; rows may be further apart."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, not {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, not on {tensor.device}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have its last dimension contiguous (strides {tensor.stride()})")


# Gumbel noise.


@jit
def log1p_series(m):
    """log(1 + m) for m from -1/4 to 1/2, relative error below 1.2 * 2^-24: m + m^2 * a minimax polynomial."""
    q = tl.full(m.shape, -0.04490961879491806, tl.float32)
    q = tl.math.fma(q, m, tl.full(m.shape, 0.10448332875967026, tl.float32))
    q = tl.math.fma(q, m, tl.full(m.shape, -0.1316223293542862, tl.float32))
    q = tl.math.fma(q, m, tl.full(m.shape, 0.14482061564922333, tl.float32))
    q = tl.math.fma(q, m, tl.full(m.shape, -0.16647766530513763, tl.float32))
    q = tl.math.fma(q, m, tl.full(m.shape, 0.19990606606006622, tl.float32))
    q = tl.math.fma(q, m, tl.full(m.shape, -0.250000536441803, tl.float32))
    q = tl.math.fma(q, m, tl.full(m.shape, 0.3333345353603363, tl.float32))
    q = tl.math.fma(q, m, tl.full(m.shape, -0.5, tl.float32))
    return tl.math.fma(q, m * m, m)


@jit
def add_exponent(series, exponent):
    """series + log(2) * exponent; the exponent comes in place, shifted left by a float's 23 mantissa bits."""
    # 8.26e-08 = log(2) / 2^23
    return tl.math.fma(exponent.to(tl.float32), tl.full(series.shape, 8.262958294867817e-08, tl.float32), series)


@jit
def log(y):
    """Natural logarithm of normal positive numbers. Its relative error is small near 1 too; the hardware's is not."""
    bits = y.to(tl.int32, bitcast=True)
    exponent = ((bits - 0x3F400000) >> 23) << 23  # 0x3F400000 is 3/4: the mantissa that is left lies in [3/4, 3/2)
    m = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    return add_exponent(log1p_series(m), exponent)


@jit
def gumbel(words):
    """Standard Gumbel noise of 32-bit random words: -log(-log1p(-u)), u strictly inside (0, 1)."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)  # 2^-32 and 1 - 2^-24
    exponent = (((1.0 - u).to(tl.int32, bitcast=True) - 0x3F400000) >> 23) << 23
    scale = (0x3F800000 - exponent).to(tl.float32, bitcast=True)  # 1 - u = (1 + m) / scale
    m = tl.math.fma(-u, scale, scale - 1.0)
    return -log(-add_exponent(log1p_series(m), exponent))


@jit
def philox_words(seeds, sample_indices, positions, blocks, STREAM: tl.constexpr):
    """The four 32-bit words of each Philox block, for tokens 4 * block to 4 * block + 3; the arguments broadcast."""
    zero = (blocks * 0 + positions * 0).to(tl.int32)
    c0, c1 = (zero + blocks).to(tl.int32), (zero + positions).to(tl.int32)
    c2, c3 = (zero + sample_indices).to(tl.int32), zero + STREAM
    return tl.philox(seeds + zero.to(tl.int64), c0, c1, c2, c3)


@jit
def gumbel_of(seeds, sample_indices, positions, tokens, STREAM: tl.constexpr):
    """Noise of any tokens; the arguments broadcast."""
    w0, w1, w2, w3 = philox_words(seeds, sample_indices, positions, tokens >> 2, STREAM)
    place = tokens & 3
    return gumbel(tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3)))


@jit
def gumbel_consecutive(seeds, sample_indices, positions, first, BN: tl.constexpr, STREAM: tl.constexpr):
    """Noise [R, BN] of the tokens first to first + BN - 1, a quarter of the cost; `first` is a multiple of 4."""
    blocks = first // 4 + tl.arange(0, BN // 4)
    w0, w1, w2, w3 = philox_words(seeds, sample_indices, positions, blocks[None, :], STREAM)
    return gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


# Temperature and noise of rows of logits.


@jit
def load_sampling(noise, truncation, sequence):
    """Temperature, top-k, top-p and min-p of each row's sequence; without truncation all four are the temperature.

    Only loads, so that a kernel can ask for them long before it needs them.
    """
    temperature = tl.load(noise[3] + sequence)
    if truncation is None:
        return temperature, temperature, temperature, temperature
    else:
        top_k, top_p, min_p = truncation
        return temperature, tl.load(top_k + sequence), tl.load(top_p + sequence), tl.load(min_p + sequence)


@jit
def is_truncated(top_k, top_p, min_p):
    return (top_k >= 1) | (top_p < 1) | (min_p > 0)


@jit
def perturb(
    values, sampling, noise, truncation, row, sequence, tokens, first, CONSECUTIVE: tl.constexpr, STREAM: tl.constexpr
):
    """Values [R, N] over temperature, plus noise where a row's sequence is not truncated; greedy rows keep their bits.

    `sampling` is the result of `load_sampling`. CONSECUTIVE: the N tokens are first, first + 1, ...; otherwise they are
    `tokens` [N]. A program computes no noise if none of its rows needs it.
    """
    seeds, sample_indices, positions, _ = noise
    temperature, top_k, top_p, min_p = sampling
    sampled = temperature > 0
    noisy = sampled
    if truncation is not None:
        noisy = sampled & (is_truncated(top_k, top_p, min_p) == 0)
    if tl.max(sampled.to(tl.int32), 0) > 0:
        values = tl.math.div_rn(values, tl.broadcast_to(tl.where(sampled, temperature, 1.0)[:, None], values.shape))
    if tl.max(noisy.to(tl.int32), 0) > 0:
        seed, position = tl.load(seeds + sequence)[:, None], tl.load(positions + row)[:, None]
        index = tl.load(sample_indices + sequence)[:, None]
        if CONSECUTIVE:
            numbers = gumbel_consecutive(seed, index, position, first, values.shape[1], STREAM)
        else:
            numbers = gumbel_of(seed, index, position, tokens[None, :], STREAM)
        values = tl.where(noisy[:, None], values + numbers, values)
    return values


@jit
def mul_rounded(a, b):
    """a * b, rounded: the compiler may not fuse it with a following addition. A zero result is positive."""
    return tl.math.fma(a, b, tl.zeros(a.shape, tl.float32))


# Scores as integers, and keys of (score, token).


@jit
def to_int_scores(values):
    """Float32 values as int32 of the same order. Both zeros are equal, NaN is the largest integer; the least integer,
    which stands for a column that does not exist, is never returned."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@jit
def from_int_scores(scores):
    """The float32 values again."""
    return (scores ^ ((scores >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def is_finite(scores):
    """Whether these are the int scores of finite numbers: not of an infinity, NaN, or a column that does not exist."""
    return (scores > -0x7F800001) & (scores < 0x7F800000)


@jit
def pack_keys(scores, tokens):
    """Int64 keys whose order is: larger int score first, then lower token id. The least key stands for no token."""
    keys = (scores.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)
    return tl.where(scores == -0x80000000, -0x8000000000000000, keys)


@jit
def unpack_tokens(keys):
    """The token of each key, -1 for the key of no token."""
    return tl.where(keys == -0x8000000000000000, -1, 0x7FFFFFFF - (keys & 0xFFFFFFFF)).to(tl.int32)


@jit
def unpack_finite_tokens(keys):
    """The token of each key, -1 where its score is not finite."""
    return tl.where(is_finite((keys >> 32).to(tl.int32)), unpack_tokens(keys), -1)
