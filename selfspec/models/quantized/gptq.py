"""GPTQ: integers of 4 or 8 bits packed along K into int32 words [K / per word, N], zero points packed along N.

Version 1 ("gptq") stores zero points less 1, version 2 ("gptq_v2") as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from selfspec.models.quantized.packing import from_offset, one_or_all, unpack
from selfspec.models.quantized.scheme import Expected, Scheme
from selfspec.models.quantized.tensor import FLOATS, QuantizedTensor


def expected_gptq(scheme: Scheme, n: int, k: int) -> dict[str, Expected]:
    per_word, groups = 32 // scheme.bits, k // scheme.group(k)
    return {
        "qweight": Expected((k // per_word, n), (torch.int32,)),
        "qzeros": Expected((groups, n // per_word), (torch.int32,)),
        "scales": Expected((groups, n), FLOATS),
        "g_idx": Expected((k,), (torch.int32, torch.int64)),
    }


def read_gptq(module: str, scheme: Scheme, n: int, k: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    bits, group = scheme.bits, scheme.group(k)
    _check_order(module, tensors["g_idx"], group)
    zeros = _zeros(module, scheme, unpack(tensors["qzeros"], bits).T)
    q = unpack(tensors["qweight"].T, bits)
    scale = tensors["scales"].T.contiguous()
    return QuantizedTensor(from_offset(q, bits), bits, scale, group, one_or_all(from_offset(zeros, bits)))


def _check_order(module: str, g_idx: torch.Tensor, group: int) -> None:
    if not torch.equal(g_idx.long(), torch.arange(g_idx.numel(), device=g_idx.device) // group):
        raise ValueError(
            f"{module}.g_idx assigns columns to groups out of order (desc_act, act-order), which selfspec does not "
            "support; use a checkpoint that was quantized with desc_act=False, or an AWQ or compressed-tensors one"
        )


def _zeros(module: str, scheme: Scheme, stored: torch.Tensor) -> torch.Tensor:
    """Returns the zero points, unsigned, [N, groups]; raises ValueError for those that have no one meaning."""
    largest, middle = 2**scheme.bits - 1, 2 ** (scheme.bits - 1)
    if scheme.layout == "gptq" and bool((stored == largest).any()):
        # A zero point of 0, less 1: libraries wrap it, carry it into the next zero point or read it as largest + 1.
        raise ValueError(
            f"{module}.qzeros holds {largest}, which programs read differently in checkpoint_format gptq; save the "
            "checkpoint as gptq_v2"
        )
    zeros = stored + 1 if scheme.layout == "gptq" else stored
    if scheme.symmetric and bool((zeros != middle).any()):
        raise ValueError(
            f"{module}.qzeros means zero points from {int(zeros.min())} to {int(zeros.max())}, but with sym=true all "
            f"are {middle}; correct sym or checkpoint_format (gptq, gptq_v2) in quantization_config"
        )
    return zeros
