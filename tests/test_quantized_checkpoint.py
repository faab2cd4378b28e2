"""Tensors of compressed-tensors, GPTQ, AWQ and fp8 checkpoints have the values that their libraries give them, and
tensors that do not fit are refused by name.

compressed-tensors is its own reference, and AWQ's, whose files it converts. GPTQ's is a slow reader and writer of the
layout that AutoGPTQ published, one weight at a time: the libraries need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.models.quantized.config import Scheme, read_quantization_config
from selfspec.models.quantized.layouts import check_weight, read_weight
from selfspec.models.quantized.tensor import can_pack, concatenate

MODULE = "model.layers.3.mlp.up_proj"
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A module's tensors, their scheme, and the weight by the reference, in the dtype of the scales."""

    scheme: Scheme
    shape: tuple[int, int]
    tensors: Tensors
    weight: torch.Tensor


def scheme_of(config: dict) -> Scheme:
    scheme = read_quantization_config(config).scheme(MODULE)
    assert scheme is not None
    return scheme


def compressed(layout: str, n: int, k: int, dtype: torch.dtype, **weights) -> Stored:
    """Random integers or float8 values, stored and read by compressed-tensors."""
    args = QuantizationArgs(**weights)
    reference = QuantizationScheme(targets=["Linear"], weights=args)
    shapes = {"tensor": (1,), "channel": (n, 1), "group": (n, k // max(1, args.group_size or 0))}
    if args.strategy == "block":
        shapes["block"] = tuple(-(-size // block) for size, block in zip((n, k), args.block_structure, strict=True))
    scale = torch.rand(shapes[args.strategy]).to(dtype) + 0.1
    tensors = {"weight": torch.randn(n, k, dtype=dtype) * 10, "weight_scale": scale}
    if not args.symmetric:
        limit = 2 ** (args.num_bits - 1)
        tensors["weight_zero_point"] = torch.randint(-limit, limit, scale.shape, dtype=torch.int8)
    compressor = BaseCompressor.load_from_registry(layout)
    stored = compressor.compress(tensors, reference)
    config = {"quant_method": "compressed-tensors", "format": layout}
    config |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    return Stored(scheme_of(config), (n, k), stored, compressor.decompress(stored, reference)["weight"])


def pack(values: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """Packs the last dimension into int32 words, one by one: place i of a word holds the value order[i] of its run."""
    words = torch.zeros(values.shape[0], values.shape[1] * bits // 32, dtype=torch.int64)
    for row in range(values.shape[0]):
        for column in range(words.shape[1]):
            run = values[row, column * len(order) : (column + 1) * len(order)].tolist()
            words[row, column] = sum(run[value] << (bits * place) for place, value in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq(n: int, k: int, dtype: torch.dtype, bits: int, group: int, symmetric: bool, version: str) -> Stored:
    width, order = k if group == -1 else group, list(range(32 // bits))
    least = 1 if version == "gptq" else 0  # version 1 stores zero points less 1
    q = torch.randint(0, 2**bits, (n, k))
    zeros = torch.randint(least, 2**bits, (n, k // width))
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    scale = torch.rand(n, k // width).to(dtype)
    tensors = {
        "qweight": pack(q, bits, order).T.contiguous(),
        "qzeros": pack(zeros.T - least, bits, order),
        "scales": scale.T.contiguous(),
        "g_idx": torch.tensor([column // width for column in range(k)], dtype=torch.int32),
    }
    weight = torch.stack(
        [(q[:, column] - zeros[:, column // width]).to(dtype) * scale[:, column // width] for column in range(k)], 1
    )
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "checkpoint_format": version}
    return Stored(scheme_of(config), (n, k), tensors, weight)


def awq(n: int, k: int, dtype: torch.dtype, group: int, symmetric: bool) -> Stored:
    width, order = k if group == -1 else group, [0, 2, 4, 6, 1, 3, 5, 7]
    q, zeros = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (k // width, n))
    tensors = {"qweight": pack(q, 4, order), "scales": torch.rand(k // width, n).to(dtype)}
    if not symmetric:
        tensors["qzeros"] = pack(zeros, 4, order)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": not symmetric, "version": "gemm"}
    converter = AutoAWQConverter.from_autoawq_config(config | {"group_size": width})
    converted = {
        name.removeprefix("m."): tensor
        for name, tensor in converter.process({f"m.{name}": tensor for name, tensor in tensors.items()}).items()
    }
    reference = converter._build_quant_config().config_groups["config_group_0"]
    weight = BaseCompressor.load_from_registry("pack-quantized").decompress(converted, reference)["weight"]
    return Stored(scheme_of(config), (n, k), tensors, weight)


def fp8(n: int, k: int, dtype: torch.dtype, block: tuple[int, int]) -> Stored:
    """The layout of float-quantized blocks; only the scale's name differs."""
    stored = compressed(
        "float-quantized", n, k, dtype, num_bits=8, type="float", strategy="block", block_structure=list(block)
    )
    tensors = {name.replace("weight_scale", "weight_scale_inv"): tensor for name, tensor in stored.tensors.items()}
    scheme = scheme_of({"quant_method": "fp8", "weight_block_size": list(block)})
    return replace(stored, scheme=scheme, tensors=tensors)


BUILDERS: dict[str, Callable[[int, int, torch.dtype], Stored]] = {}
for _bits in (4, 8):
    for _sym in (True, False):
        _name = f"{_bits} bit {'symmetric' if _sym else 'asymmetric'}"
        for _group in (32, 64, -1):
            BUILDERS[f"packed {_name} {_group}"] = lambda n, k, dtype, bits=_bits, sym=_sym, group=_group: compressed(
                "pack-quantized", n, k, dtype, num_bits=bits, type="int", symmetric=sym, group_size=group,
                strategy="channel" if group == -1 else "group",
            )  # fmt: skip
            for _version in ("gptq", "gptq_v2"):
                BUILDERS[f"{_version} {_name} {_group}"] = (
                    lambda n, k, dtype, bits=_bits, sym=_sym, group=_group, version=_version: gptq(
                        n, k, dtype, bits, group, sym, version
                    )
                )
for _sym in (True, False):
    for _group in (32, 64, -1):
        BUILDERS[f"awq {_sym} {_group}"] = lambda n, k, dtype, sym=_sym, group=_group: awq(n, k, dtype, group, sym)
for _kind, _layout in (("float", "float-quantized"), ("int", "int-quantized")):
    for _more in (
        {"strategy": "tensor"},
        {"strategy": "channel"},
        {"strategy": "group", "group_size": 64},
        {"strategy": "block", "block_structure": [16, 64]},
        {"strategy": "block", "block_structure": [128, 48]},
    ):
        BUILDERS[f"{_layout} {list(_more.values())}"] = lambda n, k, dtype, kind=_kind, layout=_layout, more=_more: (
            compressed(layout, n, k, dtype, num_bits=8, type=kind, **more)
        )
BUILDERS["fp8 blocks"] = lambda n, k, dtype: fp8(n, k, dtype, (32, 64))

SIZES = {"n": st.sampled_from([16, 24, 40]), "k": st.sampled_from([64, 128, 192]), "dtype": st.sampled_from(FLOATS)}


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32), **SIZES)
def test_the_weight_has_the_values_of_the_reference(name, n, k, dtype, seed):
    torch.manual_seed(seed)
    stored = BUILDERS[name](n, k, dtype)
    tensor = read_weight(MODULE, stored.scheme, stored.shape, stored.tensors)
    ours = tensor.dequantize()
    assert ours.shape == stored.shape and ours.dtype == torch.float32
    assert torch.equal(ours.to(dtype), stored.weight)  # the reference rounds each product to the scales' dtype


@pytest.mark.parametrize("n", [3, 8, 13])
def test_any_number_of_packed_rows_is_read(n):
    """compressed-tensors itself cannot read zero points of 8 rows or fewer, so rows of a taller weight are taken."""
    torch.manual_seed(0)
    stored = compressed("pack-quantized", 16, 64, torch.float32, num_bits=4, symmetric=False, group_size=32)
    tensors = stored.tensors | {"weight_shape": torch.tensor([n, 64])}
    for name, rows in (("weight_packed", n), ("weight_scale", n), ("weight_zero_point", -(-n // 8))):
        tensors[name] = tensors[name][:rows]
    ours = read_weight(MODULE, stored.scheme, (n, 64), tensors)
    assert torch.equal(ours.dequantize(), stored.weight[:n])


@settings(max_examples=60)
@given(names=st.lists(st.sampled_from(list(BUILDERS)), min_size=2, max_size=3), seed=st.integers(0, 2**32), **SIZES)
def test_weights_of_different_formats_are_concatenated_without_loss(names, n, k, dtype, seed):
    torch.manual_seed(seed)
    parts = []
    for name in names:
        stored = BUILDERS[name](n, k, dtype)
        parts.append(read_weight(MODULE, stored.scheme, stored.shape, stored.tensors))
    if len({part.q.dtype == torch.float8_e4m3fn for part in parts}) == 2:
        assert not can_pack(parts)
    else:
        whole = concatenate(parts)
        assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
        assert whole.scale.dtype == dtype


def mutations(tensor: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The tensor with another shape, with dtypes that no layout has, or with a value that is not finite; or without it.

    float8 values that are not finite have a test of their own.
    """
    changed: dict[str, torch.Tensor | None] = {
        "missing": None,
        "flat": tensor.reshape(-1) if tensor.ndim > 1 else tensor[None],
        "short": tensor[:-1],
        "double": torch.cat([tensor, tensor]),
        "transposed": tensor.T if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1] else tensor[..., None],
    }
    for dtype in (torch.float64, torch.int16, torch.uint8, torch.float8_e5m2):
        changed[str(dtype)] = torch.zeros(tensor.shape, dtype=dtype)
    if tensor.dtype in FLOATS:
        changed["infinite"] = tensor.clone().index_fill_(0, torch.tensor([0]), torch.inf)
    return changed


@settings(max_examples=80)
@given(data=st.data(), name=st.sampled_from(list(BUILDERS)))
def test_a_tensor_that_does_not_fit_is_refused_by_name(name, data):
    stored = BUILDERS[name](24, 192, torch.float16)
    suffix = data.draw(st.sampled_from(sorted(stored.tensors)))
    changes = mutations(stored.tensors[suffix])
    kind = data.draw(st.sampled_from(sorted(changes)))
    tensors = {key: tensor for key, tensor in (stored.tensors | {suffix: changes[kind]}).items() if tensor is not None}
    with pytest.raises(ValueError, match=MODULE):
        read_weight(MODULE, stored.scheme, stored.shape, tensors)
    if kind != "infinite":  # seen without reading values
        with pytest.raises(ValueError, match=MODULE):
            meta = {key: tensor.to("meta") for key, tensor in tensors.items()}
            check_weight(MODULE, stored.scheme, stored.shape, meta)


def test_a_tensor_that_changes_the_weight_in_an_unknown_way_is_refused():
    for name in BUILDERS:
        stored = BUILDERS[name](24, 192, torch.float16)
        refused(stored, f"{MODULE}.weight_g_idx", weight_g_idx=torch.zeros(192))


def test_the_tensors_of_another_layout_are_refused():
    every = {name: build(64, 64, torch.float16) for name, build in BUILDERS.items()}
    for (name, stored), (other, theirs) in product(every.items(), every.items()):
        if theirs.scheme.layout.removesuffix("_v2") != stored.scheme.layout.removesuffix("_v2"):
            with pytest.raises(ValueError, match=MODULE):
                read_weight(MODULE, theirs.scheme, theirs.shape, stored.tensors)
                pytest.fail(f"{name} was read as {other}")


def test_tensors_that_say_nothing_about_the_weight_are_allowed():
    stored = BUILDERS["float-quantized ['channel']"](8, 64, torch.bfloat16)
    more = {"bias": torch.zeros(8), "input_scale": torch.ones(1), "k_scale": torch.ones(1)}
    assert read_weight(MODULE, stored.scheme, stored.shape, stored.tensors | more).bits == 8


def test_columns_that_groups_do_not_divide_are_refused_with_the_group_size():
    for name in ("awq False 64", "gptq 4 bit symmetric 64"):
        stored = BUILDERS[name](24, 64, torch.float16)
        with pytest.raises(ValueError, match=rf"{MODULE} has 96 columns, which group_size=64 .* such as 32 or -1"):
            read_weight(MODULE, stored.scheme, (24, 96), stored.tensors)


def test_a_shape_that_words_do_not_divide_is_refused():
    for name, shape in (("gptq 4 bit symmetric 64", (20, 64)), ("awq True -1", (24, 60))):
        stored = BUILDERS[name](24, 64, torch.float16)
        with pytest.raises(ValueError, match=rf"{MODULE} is \[{shape[0]}, {shape[1]}\], which cannot be stored"):
            read_weight(MODULE, stored.scheme, shape, stored.tensors)


def refused(stored: Stored, match: str, **changed: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=match):
        read_weight(MODULE, stored.scheme, stored.shape, stored.tensors | changed)


@pytest.mark.parametrize("bits", [4, 8])
def test_act_order_is_refused_by_name(bits):
    stored = gptq(8, 64, torch.float16, bits, 32, True, "gptq")
    refused(stored, f"{MODULE}.g_idx.*act-order.*desc_act=False", g_idx=stored.tensors["g_idx"].flip(0))


@pytest.mark.parametrize(("said", "written"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_the_other_version_are_refused(bits, said, written):
    stored = gptq(8, 64, torch.float16, bits, 32, True, written)
    refused(replace(stored, scheme=replace(stored.scheme, layout=said)), f"{MODULE}.qzeros.*checkpoint_format")


def test_a_zero_point_that_readers_disagree_about_is_refused():
    stored = gptq(8, 64, torch.float16, 4, 32, False, "gptq")
    zeros = stored.tensors["qzeros"].clone()
    zeros[1, 0] |= 0xF0
    refused(stored, f"{MODULE}.qzeros holds 15.*gptq_v2", qzeros=zeros)


def test_awq_zero_points_that_the_config_denies_are_refused():
    stored = awq(16, 64, torch.float16, 32, symmetric=False)
    refused(replace(stored, scheme=replace(stored.scheme, symmetric=True)), f"{MODULE}.qzeros.*zero_point")


def test_the_stored_shape_must_be_the_shape_of_the_model():
    stored = BUILDERS["packed 4 bit symmetric 32"](8, 64, torch.float16)
    refused(stored, rf"{MODULE}.weight_shape is \[64, 8\]", weight_shape=torch.tensor([64, 8]))


def test_a_float8_weight_that_is_not_a_number_is_refused():
    stored = BUILDERS["float-quantized ['tensor']"](8, 64, torch.float16)
    weight = stored.tensors["weight"].clone()
    weight.view(torch.uint8)[3, 5] = 0xFF
    refused(stored, f"{MODULE}.weight is damaged", weight=weight)
