"""Reads the tensors of one module of a quantized safetensors checkpoint, by its Scheme.

pack-quantized (compressed-tensors): integers of 4 or 8 bits, less their minimum, packed along K into int32; zero
points, if there are any, packed along N. int-quantized, float-quantized, fp8: int8 or float8 values as they are.

gptq, gptq_v2: integers of 4 or 8 bits packed along K into int32 words [K / per word, N], zero points packed along N;
version 1 stores zero points less 1, version 2 as they are.

awq, in the GEMM layout: 4 bit integers packed along N into int32 words [K, N / 8], zero points likewise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, gcd

import torch

from selfspec.models.quantized.config import Scheme
from selfspec.models.quantized.tensor import FLOATS, QuantizedTensor

_AGAIN = "use the config.json and weights of one and the same checkpoint"

# Tensors beside a weight that do not change it: activations and the KV cache are not quantized by selfspec.
_UNUSED = re.compile(r"bias|(input|output|[qkv])_(scale|zero_point|global_scale)")
_AWQ_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]  # of 8 columns of N, the place of each in its word, from the lowest bits on


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a layout needs."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False


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


def expected_packed(scheme: Scheme, n: int, k: int) -> dict[str, ExpectedTensor]:
    per_word, groups = 32 // scheme.bits, k // scheme.group(k)
    tensors = {
        "weight_packed": ExpectedTensor((n, ceil(k / per_word)), (torch.int32,)),
        "weight_scale": ExpectedTensor((n, groups), FLOATS),
        "weight_shape": ExpectedTensor((2,), (torch.int64, torch.int32)),
    }
    if not scheme.symmetric:
        tensors["weight_zero_point"] = ExpectedTensor((ceil(n / per_word), groups), (torch.int32,))
    return tensors


def read_packed(module: str, scheme: Scheme, n: int, k: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    stored = tensors["weight_shape"].tolist()
    if stored != [n, k]:
        raise ValueError(f"{module}.weight_shape is {stored} instead of {[n, k]}; {_AGAIN}")
    bits = scheme.bits
    q = from_offset(unpack(tensors["weight_packed"], bits)[:, :k].contiguous(), bits)
    zero: torch.Tensor | int = 8 if bits == 4 else 0
    if not scheme.symmetric:
        zero = one_or_all(from_offset(unpack(tensors["weight_zero_point"].T, bits).T[:n], bits))
    return QuantizedTensor(q, bits, tensors["weight_scale"], scheme.group(k), zero)


def expected_plain(scheme: Scheme, n: int, k: int) -> dict[str, ExpectedTensor]:
    rows, columns = scheme.shared
    dtype = torch.int8 if scheme.layout == "int-quantized" else torch.float8_e4m3fn
    shape = (ceil(n / (rows or n)), ceil(k / (columns or k))) if rows else (1,)
    return {"weight": ExpectedTensor((n, k), (dtype,)), _scale_name(scheme): ExpectedTensor(shape, FLOATS)}


def read_plain(module: str, scheme: Scheme, n: int, k: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    rows, columns = scheme.shared
    scale = tensors[_scale_name(scheme)].reshape(-1, 1) if not rows else tensors[_scale_name(scheme)]
    scale = scale.repeat_interleave(rows or n, 0)[:n]
    group = gcd(columns, k)  # of blocks that are cut off at the last column, too; gcd(0, k) is k
    scale = scale.repeat_interleave((columns or k) // group, 1)[:, : k // group].contiguous()
    return QuantizedTensor(tensors["weight"], 8, scale, group)


def _scale_name(scheme: Scheme) -> str:
    return "weight_scale_inv" if scheme.layout == "fp8" else "weight_scale"


def expected_gptq(scheme: Scheme, n: int, k: int) -> dict[str, ExpectedTensor]:
    per_word, groups = 32 // scheme.bits, k // scheme.group(k)
    return {
        "qweight": ExpectedTensor((k // per_word, n), (torch.int32,)),
        "qzeros": ExpectedTensor((groups, n // per_word), (torch.int32,)),
        "scales": ExpectedTensor((groups, n), FLOATS),
        "g_idx": ExpectedTensor((k,), (torch.int32, torch.int64)),
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


def expected_awq(scheme: Scheme, n: int, k: int) -> dict[str, ExpectedTensor]:
    groups = k // scheme.group(k)
    return {
        "qweight": ExpectedTensor((k, n // 8), (torch.int32,)),
        "scales": ExpectedTensor((groups, n), FLOATS),
        "qzeros": ExpectedTensor((groups, n // 8), (torch.int32,), optional=scheme.symmetric),
    }


def read_awq(module: str, scheme: Scheme, n: int, k: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    zero = one_or_all(_awq_columns(tensors["qzeros"])) if "qzeros" in tensors else 8
    if scheme.symmetric and not (isinstance(zero, int) and zero == 8):
        raise ValueError(
            f"{module}.qzeros holds zero points other than 8, but zero_point is false in quantization_config; correct "
            "zero_point"
        )
    scale = tensors["scales"].T.contiguous()
    return QuantizedTensor(_awq_columns(tensors["qweight"]), 4, scale, scheme.group(k), zero)


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    """Returns the integers of words, transposed: [X, N / 8] becomes uint8 [N, X]."""
    return unpack(words, 4).unflatten(-1, (-1, 8))[..., _AWQ_POSITIONS].flatten(-2).T.contiguous()


_READERS = {
    "pack-quantized": (expected_packed, read_packed),
    "int-quantized": (expected_plain, read_plain),
    "float-quantized": (expected_plain, read_plain),
    "fp8": (expected_plain, read_plain),
    "gptq": (expected_gptq, read_gptq),
    "gptq_v2": (expected_gptq, read_gptq),
    "awq": (expected_awq, read_awq),
}


def check_weight(module: str, scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError unless a module's tensors, by the last part of their names, are those that a weight of this
    shape [N, K] needs. Reads no values: tensors may be on the meta device."""
    n, k = shape
    per_word, group = 32 // scheme.bits, scheme.group(k)
    packed = scheme.layout in ("pack-quantized", "gptq", "gptq_v2", "awq")
    if packed and k % group:
        raise ValueError(
            f"{module} has {k} columns, which group_size={group} in quantization_config does not divide; use a "
            f"checkpoint that was quantized with one that does, such as {gcd(k, group)} or -1 (one group per row), and "
            "its own config.json"
        )
    if packed and (k % per_word or (scheme.layout != "pack-quantized" and n % per_word)):
        raise ValueError(
            f"{module} is {list(shape)}, which cannot be stored as {scheme.layout} in words of {per_word}; {_AGAIN}"
        )
    expected = _READERS[scheme.layout][0](scheme, n, k)
    for suffix, wanted in expected.items():
        found = tensors.get(suffix)
        if found is None and not wanted.optional:
            have = ", ".join(sorted(tensors)) or "nothing"
            raise ValueError(f"{module} has no tensor {suffix} but {have}; {_AGAIN}")
        if found is not None and (tuple(found.shape) != wanted.shape or found.dtype not in wanted.dtypes):
            dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted.dtypes)
            raise ValueError(
                f"{module}.{suffix} is {list(found.shape)} {str(found.dtype).removeprefix('torch.')} instead of "
                f"{list(wanted.shape)} {dtypes}: it is packed in another way than quantization_config says; {_AGAIN}"
            )
    for suffix in tensors:
        if suffix not in expected and not _UNUSED.fullmatch(suffix):
            raise ValueError(
                f"{module}.{suffix} is a tensor that the layout in quantization_config does not have, so the weight "
                f"would be read wrongly; {_AGAIN}"
            )


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
