"""What kernels that choose tokens share: noise on the device, and floats as integers of the same order.

The functions here are parts of kernels; `selfspec.kernels.philox` and `selfspec.sampling.ranked` are what they compute.
Every kernel that draws for the target must take its noise from here. All roundings are spelled out (multiply-adds as
`fma`, exact divisions), so that the compiler has nothing to contract and two kernels give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.triton_compat import jit, tl


@dataclass(frozen=True)
class Noise:
    """Which noise R rows draw with. Rows are node-major: row = node * B + sequence."""

    seeds: torch.Tensor  # [B] int64
    copies: torch.Tensor  # [B] int32 or int64
    positions: torch.Tensor  # [R] int32 or int64: the position of the token being drawn
    temperature: torch.Tensor | float = 1.0  # float32 with one element: a captured graph then serves all temperatures
    stream: int = 0

    def check(self, rows: int, device: torch.device) -> None:
        sequences = self.seeds.shape[0]
        if sequences == 0 or rows % sequences:
            raise ValueError(f"{rows} rows cannot belong to {sequences} sequences of equally many rows each")
        for name, length, kinds in (
            ("seeds", sequences, (torch.int64,)),
            ("copies", sequences, (torch.int32, torch.int64)),
            ("positions", rows, (torch.int32, torch.int64)),
        ):
            check_tensor(getattr(self, name), f"the noise's {name}", (length,), kinds, device)
        if isinstance(self.temperature, torch.Tensor):
            check_scalar(self.temperature, "the temperature", (torch.float32,), device)


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
def read_scalar(scalar, IS_POINTER: tl.constexpr):
    """A kernel's argument that is a number, or a pointer to one."""
    if IS_POINTER:
        return tl.load(scalar)
    else:
        return scalar


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
def philox_words(seeds, copies, positions, blocks, STREAM: tl.constexpr):
    """The four words of each Philox block; the arguments broadcast."""
    zero = (blocks * 0 + positions * 0).to(tl.int32)
    c0, c1 = (zero + blocks).to(tl.int32), (zero + positions).to(tl.int32)
    c2, c3 = (zero + copies).to(tl.int32), zero + STREAM
    return tl.philox(seeds + zero.to(tl.int64), c0, c1, c2, c3)


@jit
def gumbel_of(seeds, copies, positions, tokens, STREAM: tl.constexpr):
    """Noise of any tokens; the arguments broadcast."""
    w0, w1, w2, w3 = philox_words(seeds, copies, positions, tokens >> 2, STREAM)
    place = tokens & 3
    return gumbel(tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3)))


@jit
def gumbel_run(seeds, copies, positions, first, BN: tl.constexpr, STREAM: tl.constexpr):
    """Noise [R, BN] of the tokens first, first + 1, ...: at a quarter of the cost, as `first` is a multiple of 4."""
    blocks = first // 4 + tl.arange(0, BN // 4)
    w0, w1, w2, w3 = philox_words(seeds, copies, positions, blocks[None, :], STREAM)
    return gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@jit
def to_levels(values):
    """Float32 values as integers of the same order. The two zeros are equal; no number becomes the least integer."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
