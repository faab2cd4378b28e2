"""Weights in the layouts of compressed-tensors, and fp8 weights of quant_method "fp8".

pack-quantized: integers of 4 or 8 bits, less their minimum, packed along K into int32; zero points, if there are any,
packed along N. int-quantized, float-quantized, fp8: int8 or float8 values as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, gcd

import torch

from selfspec.models.quantized.packing import from_offset, one_or_all, unpack
from selfspec.models.quantized.scheme import Expected, Scheme
from selfspec.models.quantized.tensor import FLOATS, QuantizedTensor


def expected_packed(scheme: Scheme, n: int, k: int) -> dict[str, Expected]:
    per_word, groups = 32 // scheme.bits, k // scheme.group(k)
    tensors = {
        "weight_packed": Expected((n, ceil(k / per_word)), (torch.int32,)),
        "weight_scale": Expected((n, groups), FLOATS),
        "weight_shape": Expected((2,), (torch.int64, torch.int32)),
    }
    if not scheme.symmetric:
        tensors["weight_zero_point"] = Expected((ceil(n / per_word), groups), (torch.int32,))
    return tensors


def read_packed(module: str, scheme: Scheme, n: int, k: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    stored = tensors["weight_shape"].tolist()
    if stored != [n, k]:
        raise ValueError(
            f"{module}.weight_shape is {stored} instead of {[n, k]}. Use the config.json and weights of one and the "
            "same checkpoint."
        )
    bits = scheme.bits
    q = from_offset(unpack(tensors["weight_packed"], bits)[:, :k].contiguous(), bits)
    zero: torch.Tensor | int = 8 if bits == 4 else 0
    if not scheme.symmetric:
        zero = one_or_all(from_offset(unpack(tensors["weight_zero_point"].T, bits).T[:n], bits))
    return QuantizedTensor(q, bits, tensors["weight_scale"], scheme.group(k), zero)


def expected_plain(scheme: Scheme, n: int, k: int) -> dict[str, Expected]:
    rows, columns = scheme.shared
    dtype = torch.int8 if scheme.layout == "int-quantized" else torch.float8_e4m3fn
    shape = (ceil(n / (rows or n)), ceil(k / (columns or k))) if rows else (1,)
    return {"weight": Expected((n, k), (dtype,)), _scale_name(scheme): Expected(shape, FLOATS)}


def read_plain(module: str, scheme: Scheme, n: int, k: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    rows, columns = scheme.shared
    scale = tensors[_scale_name(scheme)].reshape(-1, 1) if not rows else tensors[_scale_name(scheme)]
    scale = scale.repeat_interleave(rows or n, 0)[:n]
    group = gcd(columns, k)  # of blocks that are cut off at the last column, too; gcd(0, k) is k
    scale = scale.repeat_interleave((columns or k) // group, 1)[:, : k // group].contiguous()
    return QuantizedTensor(tensors["weight"], 8, scale, group)


def _scale_name(scheme: Scheme) -> str:
    return "weight_scale_inv" if scheme.layout == "fp8" else "weight_scale"
