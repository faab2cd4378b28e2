"""Weights of a folder in 4 or 8 bits: as they are stored, or rounded while they are loaded (`quantize=`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.kernels.quantized_weight import QuantizedWeight
from selfspec.models.decoder import Part
from selfspec.models.quantized.layouts import read_weight
from selfspec.models.quantized.rounding import quantize
from selfspec.models.quantized.tensor import QuantizedTensor, can_pack, join, pack
from selfspec.models.shards import Shards

BITS = {"int4": 4, "int8": 8}  # by values of `quantize=`
_GROUPS = (128, 64, 32)  # columns that share a scale when weights are rounded: the first that divides a row


def read_quantized(part: Part, shards: Shards) -> QuantizedTensor:
    """Reads a weight that the checkpoint stores quantized."""
    module = shards.checkpoint.quantized[part.name]
    tensors = {last: shards.tensor(f"{module.name}.{last}", stored.file) for last, stored in module.tensors.items()}
    return read_weight(module.name, module.scheme, (part.shape[0], part.shape[1]), tensors)


def load_packed(parts: Sequence[Part], shards: Shards, device: torch.device) -> QuantizedWeight | None:
    """Returns the parts as one quantized weight; None if one of them is not quantized, or they cannot be packed."""
    if any(part.name not in shards.checkpoint.quantized for part in parts):
        return None
    read = [read_quantized(part, shards) for part in parts]
    return pack(read).to(device) if can_pack(read) else None


def load_rounded(parts: Sequence[Part], shards: Shards, device: torch.device, bits: int) -> QuantizedWeight | None:
    """Returns the parts rounded to 4 or 8 bits; None for vectors, and for rows that no group size divides.

    Rounds and packs some rows at a time, on the device.
    """
    shape = parts[0].shape
    group = next((group for group in _GROUPS if shape[-1] % group == 0), None)
    if len(shape) != 2 or group is None:
        return None
    chunks = (rows for part in parts for rows, _ in shards.chunks(part))
    rounded = (pack([quantize(rows.to(device), bits, group)]) for rows in chunks)
    return join(rounded, sum(part.shape[0] for part in parts))


def rounded_bits(name: str, quantize: str) -> int:
    """Returns the bits of a tensor of the decoder: LM head and embedding have 8 with int4, too, because their errors
    reach the logits directly."""
    return 8 if name in ("embedding", "head") else BITS[quantize]
