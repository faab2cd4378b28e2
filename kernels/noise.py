"""How tokens are drawn: each sequence's temperature, noise and cuts, and floats as integers of the same order.

The functions here are parts of kernels; `selfspec.kernels.philox` and `selfspec.sampling.ranked` are what they compute.
Every kernel that draws for the target must take its noise from here. All roundings are spelled out (multiply-adds as
`fma`, exact divisions), so that the compiler has nothing to contract and two kernels give the same bits.

Parameters are one entry for each of the B sequences of a batch, and rows are node-major: row = node * B + sequence.
What a row becomes depends on its own logits and its own sequence's parameters alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.philox import gumbel as gumbel_reference
from selfspec.kernels.philox import uniform
from selfspec.kernels.triton_compat import jit, tl


@dataclass(frozen=True)
class Noise:
    """Which noise R rows draw with, and at which temperature."""

    seeds: torch.Tensor  # [B] int64
    sample_indices: torch.Tensor  # [B] int32 or int64
    positions: torch.Tensor  # [R] int32 or int64: the position of the token being drawn
    temperature: torch.Tensor  # [B] float32; 0: greedy, the sequence's logits stay as they are
    stream: int = 0

    def check(self, rows: int, device: torch.device) -> None:
        sequences = self.seeds.shape[0]
        check_rows(rows, sequences)
        for name, length, kinds in (
            ("seeds", sequences, (torch.int64,)),
            ("sample_indices", sequences, (torch.int32, torch.int64)),
            ("positions", rows, (torch.int32, torch.int64)),
            ("temperature", sequences, (torch.float32,)),
        ):
            check_tensor(getattr(self, name), f"the noise's {name}", (length,), kinds, device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What kernels take as `noise`."""
        return self.seeds, self.sample_indices, self.positions, self.temperature


@dataclass(frozen=True)
class Cuts:
    """Which tokens each of B sequences may draw; of no effect where its temperature is 0."""

    top_k: torch.Tensor  # [B] int32; below 1: off
    top_p: torch.Tensor  # [B] float32; from 1 on: off
    min_p: torch.Tensor  # [B] float32; up to 0: off
    few: bool = False  # every sequence that has a cut has a top_k from 1 to 64: one kernel then decides all rows

    def check(self, sequences: int, device: torch.device) -> None:
        for name, kind in (("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32)):
            check_tensor(getattr(self, name), name, (sequences,), (kind,), device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What kernels take as `cuts`."""
        return self.top_k, self.top_p, self.min_p

    @property
    def on(self) -> torch.Tensor:
        """[B] bool: whether a sequence has any cut."""
        return (self.top_k >= 1) | (self.top_p < 1) | (self.min_p > 0)


def perturbed_reference(
    logits: torch.Tensor, tokens: torch.Tensor, noise: Noise, cuts: Cuts | None = None
) -> torch.Tensor:
    """Logits [R, N] of `tokens` [N], over temperature and with noise; without noise where a sequence has a cut, and as
    they are where it is greedy."""
    each = logits.shape[0] // noise.seeds.shape[0]
    seeds, indices = (part.long().repeat(each) for part in (noise.seeds, noise.sample_indices))
    numbers = uniform(seeds, indices, noise.positions.long(), tokens.long().expand(logits.shape), noise.stream)
    temperature = noise.temperature.repeat(each)[:, None]
    sampled = temperature > 0
    noisy = sampled if cuts is None else sampled & ~cuts.on.repeat(each)[:, None]
    values = torch.where(sampled, logits / temperature, logits)
    return torch.where(noisy, values + gumbel_reference(numbers), values)


def check_rows(rows: int, sequences: int) -> None:
    if sequences == 0 or rows % sequences:
        raise ValueError(f"{rows} rows cannot belong to {sequences} sequences of equally many rows each")


def check_tensor(
    tensor: torch.Tensor, name: str, shape: tuple[int, ...], kinds: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """The shape must fit, rows may be further apart than their width, elements of a row are neighbours."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
    if tensor.dtype not in kinds:
        raise ValueError(f"{name} must be {' or '.join(map(str, kinds))}, not {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, not on {tensor.device}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have its last dimension contiguous (strides {tensor.stride()})")


def check_scalar(tensor: torch.Tensor, name: str, kinds: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tensor.numel() != 1 or tensor.dtype not in kinds or tensor.device != device:
        wanted = " or ".join(map(str, kinds))
        raise ValueError(
            f"{name} must be one {wanted} on {device}, not {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )


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
def with_exponent(series, exponent):
    """`series` plus log(2) times the exponent, which comes shifted to its place in a float's bits."""
    return tl.math.fma(exponent.to(tl.float32), tl.full(series.shape, 8.262958294867817e-08, tl.float32), series)


@jit
def log(y):
    """Natural logarithm of normal positive numbers. The hardware's own is absolute, not relative, near 1."""
    bits = y.to(tl.int32, bitcast=True)
    exponent = ((bits - 0x3F400000) >> 23) << 23  # the rest lies in [3/4, 3/2)
    m = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    return with_exponent(log1p_series(m), exponent)


@jit
def gumbel(words):
    """Standard Gumbel noise of 32-bit random words: -log(-log1p(-u)), u strictly inside (0, 1)."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    exponent = (((1.0 - u).to(tl.int32, bitcast=True) - 0x3F400000) >> 23) << 23
    scale = (0x3F800000 - exponent).to(tl.float32, bitcast=True)  # 1 - u = (1 + m) / scale
    m = tl.math.fma(-u, scale, scale - 1.0)
    return -log(-with_exponent(log1p_series(m), exponent))


@jit
def philox_words(seeds, sample_indices, positions, blocks, STREAM: tl.constexpr):
    """The four words of each Philox block; the arguments broadcast."""
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
def gumbel_run(seeds, sample_indices, positions, first, BN: tl.constexpr, STREAM: tl.constexpr):
    """Noise [R, BN] of the tokens first, first + 1, ...: at a quarter of the cost, as `first` is a multiple of 4."""
    blocks = first // 4 + tl.arange(0, BN // 4)
    w0, w1, w2, w3 = philox_words(seeds, sample_indices, positions, blocks[None, :], STREAM)
    return gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@jit
def load_drawing(noise, cuts, sequence):
    """The temperatures of some rows' sequences, and their cuts, where there are any. Only loads: their use may come
    much later."""
    heat = tl.load(noise[3] + sequence)
    if cuts is None:
        return heat, heat, heat, heat
    else:
        return heat, tl.load(cuts[0] + sequence), tl.load(cuts[1] + sequence), tl.load(cuts[2] + sequence)


@jit
def is_cut(top_k, top_p, min_p):
    return (top_k >= 1) | (top_p < 1) | (min_p > 0)


@jit
def perturb(values, drawing, noise, cuts, row, sequence, tokens, first, RUN: tl.constexpr, STREAM: tl.constexpr):
    """Values [R, N] over the temperatures that `load_drawing` gave, plus noise where a row has no cut. A greedy row
    keeps its bits. Noise is computed only where a row of this program needs it. RUN: the N tokens are first, first + 1,
    ...; otherwise `tokens` [N] are any."""
    seeds, sample_indices, positions, _ = noise
    heat, top_k, top_p, min_p = drawing
    sampled = heat > 0
    noisy = sampled
    if cuts is not None:
        noisy = sampled & (is_cut(top_k, top_p, min_p) == 0)
    if tl.max(sampled.to(tl.int32), 0) > 0:
        values = tl.math.div_rn(values, tl.broadcast_to(tl.where(sampled, heat, 1.0)[:, None], values.shape))
    if tl.max(noisy.to(tl.int32), 0) > 0:
        seed, position = tl.load(seeds + sequence)[:, None], tl.load(positions + row)[:, None]
        index = tl.load(sample_indices + sequence)[:, None]
        if RUN:
            numbers = gumbel_run(seed, index, position, first, values.shape[1], STREAM)
        else:
            numbers = gumbel_of(seed, index, position, tokens[None, :], STREAM)
        values = tl.where(noisy[:, None], values + numbers, values)
    return values


@jit
def product(a, b):
    """a * b, rounded: a compiler may not fuse it with a sum that follows. A zero is positive."""
    return tl.math.fma(a, b, tl.zeros(a.shape, tl.float32))


@jit
def to_levels(values):
    """Float32 values as integers of the same order. The two zeros are equal; what is no number becomes the largest
    integer, and nothing becomes the least."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@jit
def from_levels(levels):
    return (levels ^ ((levels >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def pack(levels, tokens):
    """Sortable keys: the larger level first, then the lower token. The least key of all stands for no token."""
    keys = (levels.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)
    return tl.where(levels == -0x80000000, -0x8000000000000000, keys)


@jit
def token_of(keys):
    """The token of each key, -1 where there is none."""
    return tl.where(keys == -0x8000000000000000, -1, 0x7FFFFFFF - (keys & 0xFFFFFFFF)).to(tl.int32)


@jit
def is_finite(levels):
    """Whether these are levels of finite numbers: neither of an infinity, nor of what is no number, nor none."""
    return (levels > -0x7F800001) & (levels < 0x7F800000)


@jit
def finite_token_of(keys):
    """The token of each key, -1 where its level is not that of a finite number."""
    return tl.where(is_finite((keys >> 32).to(tl.int32)), token_of(keys), -1)
