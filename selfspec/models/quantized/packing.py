"""Small integers packed into int32 words, lowest bits first."""

from __future__ import annotations

import torch


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the integers of int32 words along the last dimension: [..., W] becomes uint8 [..., W * 32 / bits].

    Reads the words' bytes in the order of a little-endian machine.
    """
    # Flat first: torch calls a single column contiguous whatever its stride, and then cannot view it as bytes.
    values = words.contiguous().flatten().view(torch.uint8).view(*words.shape[:-1], -1)
    return values if bits == 8 else torch.stack((values & 15, values >> 4), -1).flatten(-2)


def from_offset(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns unsigned integers in the dtype of QuantizedTensor.q: of 4 bits as they are; of 8 bits less 128, as int8.

    A zero point goes through the same function, so that q - zero does not change.
    """
    return values if bits == 4 else (values ^ 128).view(torch.int8)  # flipping the top bit subtracts 128


def one_or_all(zeros: torch.Tensor) -> torch.Tensor | int:
    """Returns zero points as one integer if all are equal, otherwise as they are."""
    first = zeros.flatten()[0]
    return int(first) if bool((zeros == first).all()) else zeros.contiguous()
