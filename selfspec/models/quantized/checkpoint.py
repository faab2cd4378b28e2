"""Checks and reads the tensors of one module of a quantized safetensors checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from selfspec.models.quantized.awq import expected_awq, read_awq
from selfspec.models.quantized.compressed_tensors import expected_packed, expected_plain, read_packed, read_plain
from selfspec.models.quantized.gptq import expected_gptq, read_gptq
from selfspec.models.quantized.scheme import Expected, Scheme, check_tensors
from selfspec.models.quantized.tensor import QuantizedTensor

_READERS = {
    "pack-quantized": (expected_packed, read_packed),
    "int-quantized": (expected_plain, read_plain),
    "float-quantized": (expected_plain, read_plain),
    "fp8": (expected_plain, read_plain),
    "gptq": (expected_gptq, read_gptq),
    "gptq_v2": (expected_gptq, read_gptq),
    "awq": (expected_awq, read_awq),
}


def expected_tensors(module: str, scheme: Scheme, shape: tuple[int, int]) -> dict[str, Expected]:
    """Returns the tensors that a weight of this shape [N, K] needs, by the last part of their names.

    Raises ValueError for a shape that the scheme's groups or words do not divide.
    """
    n, k = shape
    per_word, group = 32 // scheme.bits, scheme.group(k)
    packed = scheme.layout in ("pack-quantized", "gptq", "gptq_v2", "awq")
    if packed and (k % group or k % per_word or (scheme.layout != "pack-quantized" and n % per_word)):
        raise ValueError(
            f"{module} is {list(shape)}, which cannot be stored as {scheme.layout} in groups of {group} columns and "
            f"words of {per_word}; use the config.json and weights of one and the same checkpoint"
        )
    return _READERS[scheme.layout][0](scheme, n, k)


def check_weight(module: str, scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError unless names, shapes and dtypes of a module's tensors, which may be on the meta device, fit."""
    check_tensors(module, expected_tensors(module, scheme, shape), tensors)


def read_weight(
    module: str, scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]
) -> QuantizedTensor:
    """Returns the weight [N, K] of a module from its tensors, by the last part of their names ("qweight", "bias").

    Raises ValueError, which names the tensor, for tensors that do not fit the scheme and for values that are damaged.
    For tensors on the meta device returns a weight there.
    """
    check_weight(module, scheme, shape, tensors)
    if any(tensor.is_meta for tensor in tensors.values()):
        return _unread_weight(module, scheme, shape, tensors)
    return _READERS[scheme.layout][1](module, scheme, *shape, tensors).check_values(f"{module}.weight")


def _unread_weight(
    module: str, scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]
) -> QuantizedTensor:
    """Returns a weight on the meta device; zero points of an asymmetric scheme are taken to differ."""
    n, k = shape
    if "weight" in tensors:
        return read_plain(module, scheme, n, k, tensors)
    group = scheme.group(k)
    q = torch.empty(n, k, dtype=torch.uint8 if scheme.bits == 4 else torch.int8, device="meta")
    stored = next(tensor for last, tensor in tensors.items() if last in ("weight_scale", "scales"))
    scale = torch.empty(n, k // group, dtype=stored.dtype, device="meta")
    zero = 0 if scheme.symmetric else torch.empty_like(scale, dtype=q.dtype)
    return QuantizedTensor(q, scheme.bits, scale, group, zero)
