"""Folders that compressed-tensors wrote: config and tensors give the weights that transformers loads from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from selfspec.models.quantized.config import read_quantization_config
from selfspec.models.quantized.layouts import read_weight
from tests.tiny import tiny_model

TOKENS = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
SCHEMES: dict[str, tuple[str, dict[str, Any], QuantizationArgs | None]] = {
    "W4A16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, None),
    "W8A16": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "FP8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, TOKENS),
    "FP8 without activations": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, None),
}


def write(folder: Path, layout: str, weights: dict[str, Any], activations: QuantizationArgs | None) -> None:
    """Quantizes a tiny model symmetrically and saves it as compressed-tensors does."""
    model = tiny_model("llama", dtype=torch.float32, hidden_size=64, intermediate_size=128)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format=layout, quantization_status="frozen"
    )
    apply_quantization_config(model, config)
    largest = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            shape = module.weight_scale.shape
            groups = module.weight.data.reshape(*shape, -1) if len(shape) == 2 else module.weight.data.reshape(1, -1)
            module.weight_scale.data.copy_(groups.abs().amax(-1) / largest)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=layout)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_weights_of_a_folder_are_those_that_transformers_loads(name, tmp_path):
    write(tmp_path, *SCHEMES[name])
    decompress = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=decompress, dtype=torch.float32)
    found = read_quantization_config(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    tensors = load_file(tmp_path / "model.safetensors")
    read = 0
    for path, module in model.named_modules():
        scheme = found.scheme(path)
        if scheme is not None:
            own = {key.removeprefix(f"{path}."): value for key, value in tensors.items() if key.startswith(f"{path}.")}
            weight = read_weight(path, scheme, tuple(module.weight.shape), own).dequantize()
            assert torch.equal(weight, module.weight.data)
            read += 1
    assert read == 7 * model.config.num_hidden_layers
