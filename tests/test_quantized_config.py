"""quantization_config decides the layout of each module's weight, or is refused by the name of the field."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AwqConfig, GPTQConfig
from transformers.utils.quantization_config import FineGrainedFP8Config

from selfspec.models.quantized.config import QuantizationFormat, Scheme, read_quantization_config

UP, HEAD = "model.layers.3.mlp.up_proj", "lm_head"
MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 3, 10)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
] + ["lm_head"]


def compressed(layout: str = "pack-quantized", ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 128, "strategy": "group"} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "group_size": None, "strategy": "channel", "dynamic": False}
GPTQ = GPTQConfig(bits=4, group_size=128, desc_act=False).to_dict()
AWQ = AwqConfig(bits=4, group_size=64, zero_point=True, modules_to_not_convert=["mlp.down_proj"]).to_dict()
FP8 = FineGrainedFP8Config(weight_block_size=(128, 128), modules_to_not_convert=["model.layers.1"]).to_dict()

CONFIGS: dict[str, tuple[dict, Scheme]] = {
    "W4A16": (compressed(), Scheme("pack-quantized", 4, (1, 128))),
    "W4A16 asymmetric": (
        compressed(symmetric=False, group_size=32),
        Scheme("pack-quantized", 4, (1, 32), symmetric=False),
    ),
    "W8A16": (
        compressed(num_bits=8, group_size=None, strategy="channel"),
        Scheme("pack-quantized", 8, (1, 0)),
    ),
    "FP8": (compressed("float-quantized", **FP8_WEIGHTS), Scheme("float-quantized", 8, (1, 0))),
    "FP8 tensor": (
        compressed("float-quantized", **FP8_WEIGHTS | {"strategy": "tensor"}),
        Scheme("float-quantized", 8, (0, 0)),
    ),
    "FP8 block": (
        compressed("float-quantized", **FP8_WEIGHTS | {"strategy": "block", "block_structure": [128, 64]}),
        Scheme("float-quantized", 8, (128, 64)),
    ),
    "FP8 without activations": (compressed("naive-quantized", **FP8_WEIGHTS), Scheme("float-quantized", 8, (1, 0))),
    "W8A8": (
        compressed("int-quantized", num_bits=8, group_size=None, strategy="channel"),
        Scheme("int-quantized", 8, (1, 0)),
    ),
    "GPTQ": (GPTQ, Scheme("gptq", 4, (1, 128))),
    "GPTQ 8": (GPTQ | {"bits": 8, "group_size": -1, "sym": False}, Scheme("gptq", 8, (1, 0), symmetric=False)),
    "GPTQ v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, Scheme("gptq_v2", 4, (1, 128))),
    "AWQ": (AWQ, Scheme("awq", 4, (1, 64), symmetric=False)),
    "AWQ other names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": False},
        Scheme("awq", 4, (1, 32)),
    ),
    "FP8 of its own": (FP8, Scheme("fp8", 8, (128, 128))),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_scheme_of_a_linear_module(name):
    config, scheme = CONFIGS[name]
    found = read_quantization_config(config)
    assert found.scheme(UP) == scheme
    assert found.scheme(HEAD) is None  # stays in 16 bit
    assert found.scheme("model.embed_tokens") is None and found.scheme("model.layers.3.input_layernorm") is None


@settings(max_examples=100)
@given(
    groups=st.lists(
        st.lists(
            st.sampled_from(["Linear", "re:.*q_proj$", "re:model.layers.1", r"re:.*layers\.3\..*", *MODULES]),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    ),
    ignore=st.lists(st.sampled_from(["lm_head", "re:.*self_attn", "re:.*layers.10", "Linear", *MODULES]), max_size=2),
)
def test_targets_and_ignored_modules_are_those_of_compressed_tensors(groups, ignore):
    config = compressed(ignore=tuple(ignore))
    config["config_groups"] = {
        f"group_{index}": {"targets": targets, "weights": {"num_bits": 4, "group_size": 32 * (index + 1)}}
        for index, targets in enumerate(groups)
    }
    reference, ours = QuantizationConfig(**config), read_quantization_config(config)
    linear = torch.nn.Linear(1, 1)
    for module in MODULES:
        matching = [
            group.weights.group_size
            for group in reference.config_groups.values()
            if is_match(module, linear, group.targets, reference.ignore)
        ]
        scheme = ours.scheme(module)
        assert (scheme is None) == (not matching)
        assert scheme is None or scheme.shared[1] in matching


def test_a_name_comes_before_an_expression_and_both_before_all_linear_modules():
    config = compressed()
    groups = {"a": ["Linear"], "b": ["re:.*up_proj"], "c": [UP]}
    config["config_groups"] = {
        name: {"targets": targets, "weights": {"num_bits": 4, "group_size": 32 * index}}
        for index, (name, targets) in enumerate(groups.items(), start=1)
    }
    found = read_quantization_config(config)
    modules = {"model.layers.3.mlp.gate_proj": 32, "model.layers.4.mlp.up_proj": 64, UP: 96}
    assert {name: found.scheme(name).shared[1] for name in modules} == modules


def left_out(format: QuantizationFormat) -> set[str]:
    return {module for module in MODULES if format.scheme(module) is None}


def test_modules_that_are_not_converted_are_whole_parts_of_names():
    ends = {module for module in MODULES if module.endswith("mlp.down_proj")}
    assert left_out(read_quantization_config(AWQ)) == {HEAD} | ends
    in_layer = {module for module in MODULES if module.startswith("model.layers.10.")}
    for part in ("model.layers.1", "attn.q_proj", "up"):
        assert left_out(read_quantization_config(AWQ | {"modules_to_not_convert": [part]})) == {HEAD}
    assert left_out(read_quantization_config(AWQ | {"modules_to_not_convert": ["layers.10"]})) == {HEAD} | in_layer


def test_gptq_leaves_out_what_its_rules_exclude():
    assert left_out(read_quantization_config(GPTQ | {"lm_head": True})) == set()
    first = {module for module in MODULES if "layers.0." in module}
    rules = {"dynamic": {r"-:model\.layers\.0\.": {}}}
    assert left_out(read_quantization_config(GPTQ | rules)) == {HEAD} | first
    rules = {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    kept = {module for module in MODULES if module.endswith(("q_proj", "up_proj"))}
    assert left_out(read_quantization_config(GPTQ | rules)) == set(MODULES) - kept


@pytest.mark.parametrize("method", ["bitsandbytes", "exl2", "made up"])
def test_other_methods_are_refused_by_name_with_what_to_use(method):
    with pytest.raises(ValueError, match=f"quant_method is '{method}'.*Use .*GPTQ or AWQ.*GGUF"):
        read_quantization_config({"quant_method": method, "bits": 4})


WEIGHTS = "config_groups.group_0.weights."
REFUSED = [
    (compressed(num_bits=3), f"{WEIGHTS}num_bits is '3'"),
    (compressed(num_bits=2), f"{WEIGHTS}num_bits is '2'"),
    (compressed(type="float"), f"{WEIGHTS}type is 'float'"),
    (compressed(actorder="group"), f"{WEIGHTS}actorder is 'group'"),
    (compressed(dynamic=True), f"{WEIGHTS}dynamic"),
    (compressed(strategy="tensor"), f"{WEIGHTS}strategy is 'tensor'"),
    (compressed(strategy="channel"), f"{WEIGHTS}group_size is '128'"),
    (compressed("int-quantized", num_bits=8, symmetric=False), f"{WEIGHTS}symmetric"),
    (compressed("float-quantized", num_bits=4, type="float"), f"{WEIGHTS}num_bits is '4'"),
    (compressed("nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
    (compressed("marlin-24"), "format is 'marlin-24'"),
    (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (compressed() | {"transform_config": {"config_groups": {"a": 1}}}, "transform_config"),
    (compressed(ignore=("re:(",)), "regular expression"),
    (GPTQ | {"bits": 3}, "bits is '3'"),
    (GPTQ | {"bits": 2}, "bits is '2'"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    (GPTQ | {"is_marlin_format": True}, "checkpoint_format"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
    (AWQ | {"version": "gemv"}, "version is 'gemv'"),
    (AWQ | {"bits": 8}, "bits is '8'"),
    (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
    (FP8 | {"weight_block_size": None}, "weight_block_size"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_an_unsupported_combination_is_refused_by_the_name_of_its_field(config, message):
    with pytest.raises(ValueError, match=f"quantization_config.*{message}.*Use a checkpoint"):
        read_quantization_config(config)


def fields(config: Any, at: tuple = ()) -> list[tuple]:
    """The paths of all entries of nested objects and lists."""
    if not isinstance(config, dict | list):
        return []
    entries = config.items() if isinstance(config, dict) else enumerate(config)
    return [path for key, value in entries for path in [(*at, key), *fields(value, (*at, key))]]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from(list(CONFIGS)), value=VALUES)
def test_a_mutated_field_gives_a_format_or_an_error_that_names_a_field(data, name, value):
    config = copy.deepcopy(CONFIGS[name][0])
    path = data.draw(st.sampled_from(fields(config)))
    target: Any = config
    for key in path[:-1]:
        target = target[key]
    if isinstance(target, dict) and data.draw(st.booleans()):
        del target[path[-1]]
    else:
        target[path[-1]] = value
    try:
        found = read_quantization_config(config)
    except ValueError as error:
        assert str(error).startswith("quantization_config.")
    else:
        for scheme in filter(None, map(found.scheme, MODULES)):
            rows, columns = scheme.shared
            assert scheme.bits in (4, 8) and rows >= 0 and columns >= 0 and type(scheme.symmetric) is bool
