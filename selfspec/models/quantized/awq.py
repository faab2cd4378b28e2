"""AWQ in the GEMM layout: 4 bit integers packed along N into int32 words [K, N / 8], zero points likewise."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from selfspec.models.quantized.packing import one_or_all, unpack
from selfspec.models.quantized.scheme import Expected, Scheme
from selfspec.models.quantized.tensor import FLOATS, QuantizedTensor

_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]  # of 8 columns of N, the place of each in its word, from the lowest bits on


def expected_awq(scheme: Scheme, n: int, k: int) -> dict[str, Expected]:
    groups = k // scheme.group(k)
    tensors = {
        "qweight": Expected((k, n // 8), (torch.int32,)),
        "scales": Expected((groups, n), FLOATS),
        "qzeros": Expected((groups, n // 8), (torch.int32,), optional=scheme.symmetric),
    }
    return tensors


def read_awq(module: str, scheme: Scheme, n: int, k: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    zero = one_or_all(_columns(tensors["qzeros"])) if "qzeros" in tensors else 8
    if scheme.symmetric and not (isinstance(zero, int) and zero == 8):
        raise ValueError(
            f"{module}.qzeros holds zero points other than 8, but zero_point is false in quantization_config; correct "
            "zero_point"
        )
    scale = tensors["scales"].T.contiguous()
    return QuantizedTensor(_columns(tensors["qweight"]), 4, scale, scheme.group(k), zero)


def _columns(words: torch.Tensor) -> torch.Tensor:
    """Returns the integers of words, transposed: [X, N / 8] becomes uint8 [N, X]."""
    return unpack(words, 4).unflatten(-1, (-1, 8))[..., _POSITIONS].flatten(-2).T.contiguous()
