"""Loads a GGUF file as it is stored: weights of the types that `quantized.gguf` lists stay in 4 or 8 bits.

Reads the mapped file one tensor of the decoder at a time and writes no folder. Tensors of other quantized types are
expanded to the model's dtype, which is logged.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from gguf import GGMLQuantizationType

from selfspec.models.decoder import Decoder, Part
from selfspec.models.gguf.model import GgufModel
from selfspec.models.linear import Weight
from selfspec.models.loading import pick_dtype
from selfspec.models.quantized.gguf import is_native, unread_blocks
from selfspec.models.quantized.tensor import join, pack
from selfspec.models.shards import byte_progress

_log = logging.getLogger(__name__)

_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F64)
_PACKED_TOGETHER = 16 * 2**20  # weights of a tensor that are unpacked to 8 bits and packed at a time


def load_native(source: GgufModel, device: torch.device, dtype: torch.dtype | str = "auto") -> Decoder:
    """Loads the weights onto a device; `dtype` is that of the activations and of weights that are not quantized.

    For PyTorch's meta device reads no weights.
    """
    groups = source.parts()
    dtype = pick_dtype(dtype, device, torch.bfloat16)
    tensors: dict[str, Weight] = {}
    expanded: list[str] = []
    with torch.inference_mode(False), byte_progress() as progress:
        task = progress.add_task("Loading weights", total=sum(_nbytes(source, parts) for parts in groups.values()))
        for name, parts in groups.items():
            try:
                tensors[name] = _load(source, parts, device, dtype, expanded)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"{device} has too little free memory for the weights of {source.path}; free some, use a smaller "
                    "model or a file with fewer bits per weight, or device='cpu'"
                ) from error
            progress.advance(task, _nbytes(source, parts))
    if expanded:
        _log.warning("%s: %d tensors are expanded to %s: %s", source.path, len(expanded), dtype, ", ".join(expanded))
    return Decoder(source.config, tensors)


def _load(
    source: GgufModel, parts: tuple[Part, ...], device: torch.device, dtype: torch.dtype, expanded: list[str]
) -> Weight:
    """Returns one tensor of the decoder; adds the quantized ones that it expands to `expanded`."""
    kinds = {source.gguf_name(part): source.kind(part) for part in parts}
    if len(parts[0].shape) == 2 and all(is_native(kind) for kind in kinds.values()):
        if device.type == "meta":
            return _unread(tuple((source.kind(part), part.shape) for part in parts))
        if len(set(kinds.values())) == 1:
            return _load_by_rows(source, parts, device)
        return pack([source.read_quantized(part) for part in parts]).to(device)
    if device.type == "meta":
        return torch.empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=dtype, device=device)
    expanded += [f"{name} ({kind.name})" for name, kind in kinds.items() if kind not in _FLOATS]
    dense = [source.expand(part, dtype) for part in parts]
    return (dense[0] if len(dense) == 1 else torch.cat(dense)).to(device)


@cache
def _unread(parts: tuple[tuple[GGMLQuantizationType, tuple[int, int]], ...]) -> Weight:
    """Returns a fused weight of parts of these types and shapes on the meta device. Layers have few different ones, and
    making one takes 20 ms."""
    return pack([unread_blocks(kind, shape) for kind, shape in parts])


def _load_by_rows(source: GgufModel, parts: tuple[Part, ...], device: torch.device) -> Weight:
    """Packs some rows of parts of one type at a time: unpacked and packed values together take several times the
    memory of the packed ones."""
    step = max(1, _PACKED_TOGETHER // parts[0].shape[1])
    ranges = ((part, slice(start, start + step)) for part in parts for start in range(0, part.shape[0], step))
    packed = (pack([source.read_quantized(part, rows)]).to(device) for part, rows in ranges)
    return join(packed, sum(part.shape[0] for part in parts))


def _nbytes(source: GgufModel, parts: tuple[Part, ...]) -> int:
    return sum(source.tensors[source.gguf_name(part)].data.nbytes for part in parts)
