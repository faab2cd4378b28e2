"""GGUF blocks as QuantizedTensor, without loss. Bits per weight in memory, beside those in the file:

| type | file | memory | q | groups |
|---|---|---|---|---|
| Q4_0 | 4.5 | 4.5 | 4 bits | 32, float16 scale |
| Q4_1 | 5.0 | 5.0 | 4 bits | 32, float16 scale and minimum |
| Q5_0 | 5.5 | 8.5 | 8 bits | 32, float16 scale |
| Q5_1 | 6.0 | 9.0 | 8 bits | 32, float16 scale and minimum |
| Q4_K | 4.5 | 4.625 | 4 bits | 32, uint8 scale and minimum with two float16 per 256 |
| Q5_K | 5.5 | 8.625 | 8 bits | 32, uint8 scale and minimum with two float16 per 256 |
| Q6_K | 6.5625 | 8.5625 | 8 bits | 16, int8 scale with one float16 per 256 |
| Q8_0 | 8.5 | 8.5 | 8 bits | 32, float16 scale |
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from selfspec.models.quantized.tensor import QuantizedTensor


def is_native(kind: GGMLQuantizationType) -> bool:
    """True for a type that `read_blocks` reads; tensors of another type have to be expanded to 16 bit."""
    return kind in _READERS


def read_blocks(name: str, data: np.ndarray, kind: GGMLQuantizationType) -> QuantizedTensor:
    """Returns the weight [N, K] whose blocks, of a native type, are the bytes [N, bytes of a row]; rows are those of
    the file.

    Takes several times the weight's 8 bit size; to take less, read some rows at a time.
    """
    blocks = torch.from_numpy(np.array(data)).view(len(data), -1, GGML_QUANT_SIZES[kind][1])  # copies the mapped file
    return _READERS[kind](blocks).check_values(name)


def unread_blocks(kind: GGMLQuantizationType, shape: tuple[int, int]) -> QuantizedTensor:
    """Returns the weight [N, K] that `read_blocks` will read, on PyTorch's meta device."""
    columns, size = GGML_QUANT_SIZES[kind]
    return _READERS[kind](torch.empty(shape[0], shape[1] // columns, size, dtype=torch.uint8, device="meta"))


def _q4_0(blocks: torch.Tensor) -> QuantizedTensor:
    scale, q = blocks.split([2, 16], -1)
    return QuantizedTensor(_nibbles(q, 16), 4, _halves(scale), 32, zero=8)


def _q4_1(blocks: torch.Tensor) -> QuantizedTensor:
    scale, offset, q = blocks.split([2, 2, 16], -1)
    return QuantizedTensor(_nibbles(q, 16), 4, _halves(scale), 32, minimum=-_halves(offset))


def _q5_0(blocks: torch.Tensor) -> QuantizedTensor:
    scale, high, low = blocks.split([2, 4, 16], -1)
    return QuantizedTensor(_five_bits(high, low) - 16, 8, _halves(scale), 32)


def _q5_1(blocks: torch.Tensor) -> QuantizedTensor:
    scale, offset, high, low = blocks.split([2, 2, 4, 16], -1)
    return QuantizedTensor(_five_bits(high, low), 8, _halves(scale), 32, minimum=-_halves(offset))


def _q8_0(blocks: torch.Tensor) -> QuantizedTensor:
    scale, q = blocks.split([2, 32], -1)
    return QuantizedTensor(q.flatten(1).view(torch.int8), 8, _halves(scale), 32)


def _q4_k(blocks: torch.Tensor) -> QuantizedTensor:
    above, packed, q = blocks.split([4, 12, 128], -1)
    return _with_minimums(_nibbles(q, 32), 4, above, packed)


def _q5_k(blocks: torch.Tensor) -> QuantizedTensor:
    above, packed, high, low = blocks.split([4, 12, 32, 128], -1)
    q = _nibbles(low, 32) | _fields(high, 32, bits=1) << 4
    return _with_minimums(q.view(torch.int8), 8, above, packed)


def _q6_k(blocks: torch.Tensor) -> QuantizedTensor:
    low, high, scale, above = blocks.split([128, 64, 16, 2], -1)
    q = _nibbles(low, 64) | _fields(high, 32, bits=2) << 4
    scale = scale.flatten(1).view(torch.int8)
    return QuantizedTensor(q.view(torch.int8) - 32, 8, scale, 16, super_scale=_halves(above))


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Returns 5-bit integers [N, columns]: bit j of the 4 bytes `high` is the upper bit of a block's column j."""
    upper = _fields(high, 1, bits=1)  # one byte holds the upper bits of 8 columns in a row
    return (_nibbles(low, 16) | upper << 4).view(torch.int8)


def _with_minimums(q: torch.Tensor, bits: int, above: torch.Tensor, packed: torch.Tensor) -> QuantizedTensor:
    """Returns a Q4_K or Q5_K weight: 8 scales and 8 minimums of 6 bits lie in 12 bytes.

    Bytes 0..3 hold scales 0..3, bytes 4..7 minimums 0..3; their upper 2 bits are the upper bits of scales and minimums
    4..7, whose lower 4 bits are the nibbles of bytes 8..11.
    """
    scales, minimums, lower = packed.split(4, -1)
    scale = torch.cat((scales & 63, lower & 15 | (scales >> 6) << 4), -1)
    minimum = torch.cat((minimums & 63, lower >> 4 | (minimums >> 6) << 4), -1)
    return QuantizedTensor(
        q,
        bits,
        scale.flatten(1),
        32,
        super_scale=_halves(above[..., :2]),
        minimum=minimum.flatten(1),
        super_minimum=_halves(above[..., 2:]),
    )


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """Returns the float16 numbers of byte pairs: [N, blocks, 2] becomes [N, blocks]."""
    return pairs.contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor, width: int) -> torch.Tensor:
    return _fields(packed, width, bits=4)


def _fields(packed: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """Returns the integers of 1, 2 or 4 bits in [N, blocks, bytes] as [N, columns]: each run of `width` bytes holds as
    many columns in the lowest bits, then as many in the next ones, and so on."""
    runs = packed.unflatten(-1, (-1, width))
    parts = [runs >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, -2).flatten(1)


_READERS: dict[GGMLQuantizationType, Callable[[torch.Tensor], QuantizedTensor]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.Q8_0: _q8_0,
}
