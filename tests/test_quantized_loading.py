"""Folders of quantized checkpoints give the weights and tokens of their expanded weights, and faults are refused."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec import Engine
from selfspec.models import shards
from selfspec.models.decoder import LINEARS, Decoder, model_parts
from selfspec.models.linear import expand
from selfspec.models.loading import fingerprint, load_folder, resolve, same_fingerprint
from selfspec.models.quantized import rounding
from tests.test_quantized_checkpoint import BUILDERS, Stored
from tests.tiny import VOCABULARY, tiny_model

CPU = torch.device("cpu")
PACKED: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
CHANNELS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}


def of_groups(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


def of_gptq(bits: int, group: int, sym: bool) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "checkpoint_format": "gptq"}


# By the builder of a module's tensors: the checkpoint's quantization_config.
CONFIGS = {
    "packed 4 bit asymmetric 32": of_groups("pack-quantized", PACKED),
    "packed 8 bit symmetric -1": of_groups("pack-quantized", CHANNELS),
    "gptq 4 bit symmetric 64": of_gptq(4, 64, True),
    "gptq 8 bit asymmetric 32": of_gptq(8, 32, False),
    "awq False 32": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "float-quantized ['channel']": of_groups("float-quantized", FP8),
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [32, 64]},
}


@dataclass(frozen=True)
class Folder:
    """A checkpoint, and the weights of its modules by the reference of their format."""

    path: Path
    weights: dict[str, torch.Tensor]

    def dense(self) -> Decoder:
        tensors = {**load_file(self.path / "model.safetensors"), **self.weights}
        config = load_folder(self.path, CPU).config
        groups = model_parts(config)
        return Decoder(
            config, {name: torch.cat([tensors[part.name].double() for part in parts]) for name, parts in groups.items()}
        )

    def edit(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(self.path / "model.safetensors")
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.path / "model.safetensors")


def write(path: Path, build: Callable[[int, int, torch.dtype], Stored], config: dict[str, Any]) -> Folder:
    """A tiny model whose projections have the tensors of a builder, at the scale of the model's own weights."""
    torch.manual_seed(0)
    model = tiny_model("llama", torch.float32, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model.save_pretrained(path)
    tensors, weights = load_file(path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        stored = build(*tensors.pop(name).shape, torch.float32)
        factor = 2.0 ** round(math.log2(0.1 / float(stored.weight.std())))  # rounds no weight
        scaled = {last: t * factor if "scale" in last else t for last, t in stored.tensors.items()}
        tensors |= {f"{module}.{last}": tensor.contiguous() for last, tensor in scaled.items()}
        weights[name] = stored.weight.double() * factor
    save_file(tensors, path / "model.safetensors")
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, "quantization_config": config}))
    return Folder(path, weights)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_has_the_weights_and_tokens_of_the_expanded_model(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, BUILDERS[name], CONFIGS[name])
    quantized, dense = load_folder(tmp_path, CPU, torch.float64), folder.dense()
    for ours, theirs in zip(quantized.layers, dense.layers, strict=True):
        for field, weight in theirs.tensors().items():
            assert torch.equal(expand(ours.tensors()[field], torch.float64), weight), field
            assert isinstance(ours.tensors()[field], torch.Tensor) == (weight.ndim == 1), field
    tokens = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    engine = Engine(quantized)
    plain = engine.generate(tokens, speculative_decoding=False, **options)
    assert torch.equal(plain, Engine(dense).generate(tokens, speculative_decoding=False, **options))
    drafting = {"speculative_decoding": "force", "exit_layer": 1, "plan": "chain:3"}
    assert torch.equal(plain, engine.generate(tokens, **drafting, **options))
    sizes = load_file(tmp_path / "model.safetensors")
    others = sum(8 * t.numel() for name, t in sizes.items() if not re.search("_proj", name))
    packed = engine.memory()["weights"] - others
    elements = sum(weight.numel() for weight in folder.weights.values())
    bits = 4 if "4 bit" in name or "awq" in name else 8
    # Scales of float32 for groups of 32, and zero points, of whole steps of 128 columns; some rows have 64.
    assert bits <= 8 * packed / elements <= bits + 2.6


def test_an_engine_loads_a_folder_by_its_config(tmp_path: Path) -> None:
    folder = write(tmp_path, BUILDERS["packed 4 bit asymmetric 32"], CONFIGS["packed 4 bit asymmetric 32"])
    engine = Engine.from_pretrained(tmp_path, device="cpu", dtype="bfloat16")
    assert engine.model.is_quantized and engine.dtype == torch.bfloat16
    assert same_fingerprint(fingerprint(engine.model), fingerprint(folder.dense()))
    with pytest.raises(ValueError, match="dtype='native' keeps the quantized weights of a GGUF file"):
        Engine.from_pretrained(tmp_path, device="cpu", dtype="native")


def test_a_fused_weight_with_a_part_in_16_bit_is_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**CONFIGS["packed 4 bit asymmetric 32"], "ignore": ["lm_head", "model.layers.0.self_attn.k_proj"]}
    folder = write(tmp_path, BUILDERS["packed 4 bit asymmetric 32"], config)
    module = "model.layers.0.self_attn.k_proj"
    weight = folder.weights.pop(f"{module}.weight")

    def expand_keys(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(module)]:
            del tensors[name]
        tensors[f"{module}.weight"] = weight.float()

    folder.edit(expand_keys)
    with caplog.at_level(logging.WARNING):
        model = load_folder(tmp_path, CPU, torch.float64)
    assert ["q_proj" in message or "v_proj" in message for message in caplog.messages] == [True, True]
    assert not isinstance(model.layers[0].out.weight, torch.Tensor)
    assert torch.equal(model.layers[0].qkv.dense, folder.dense().layers[0].qkv.dense)


def test_damaged_folders_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    module = "model.layers.1.mlp.up_proj"
    faults: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "has no tensor weight_scale": lambda tensors: tensors.pop(f"{module}.weight_scale"),
        "is packed in another way": lambda tensors: tensors.update({f"{module}.weight_packed": torch.zeros(8, 8)}),
        "is a tensor that the layout": lambda tensors: tensors.update({f"{module}.g_idx": torch.zeros(8)}),
    }
    for index, (message, change) in enumerate(faults.items()):
        path = tmp_path / str(index)
        folder = write(path, BUILDERS["packed 4 bit asymmetric 32"], CONFIGS["packed 4 bit asymmetric 32"])
        folder.edit(change)
        with pytest.raises(ValueError, match=rf"(?s){module}.*{message}") as raised:
            resolve(path)
        assert str(path) in str(raised.value)
    content = json.loads((path / "config.json").read_text())
    refused = {"hqq": {"quant_method": "hqq"}, "bits": {"quant_method": "gptq", "bits": 3}, "must be an object": "int4"}
    for message, config in refused.items():
        (path / "config.json").write_text(json.dumps({**content, "quantization_config": config}))
        with pytest.raises(ValueError, match=message):
            resolve(path)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 300}
    tiny_model("qwen2", torch.float32, tie_word_embeddings=False, **sizes).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_16_bit_folder_is_rounded_while_it_is_loaded(
    quantize: str, plain_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight is the one that rounding the whole matrix gives, however many rows are read together."""
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 8 * 64 * 13)
    model = load_folder(plain_folder, CPU, torch.float64, quantize)
    original = load_folder(plain_folder, CPU, torch.float64)
    pairs = [(model.embedding.weight, original.embedding.dense, 8), (model.head.weight, original.head.dense, 8)]
    for layer, of_original in zip(model.layers, original.layers, strict=True):
        assert torch.equal(layer.attention_norm, of_original.attention_norm) and layer.qkv.bias is not None
        for name in LINEARS:
            pairs.append((getattr(layer, name).weight, getattr(of_original, name).dense, int(quantize[-1])))
    for weight, dense, bits in pairs:
        assert weight.bits == bits and weight.group == (32 if dense.shape[1] == 160 else 64)
        assert torch.equal(weight.dequantize(), rounding.quantize(dense, bits, weight.group).dequantize())
    assert not same_fingerprint(fingerprint(model), fingerprint(original))
    tokens = torch.randint(3, 300, (2, 7), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    engine = Engine(model)
    drafting = {"speculative_decoding": "force", "exit_layer": 1, "plan": "chain:3"}
    plain = engine.generate(tokens, speculative_decoding=False, **options)
    assert torch.equal(plain, engine.generate(tokens, **drafting, **options))


def test_quantize_is_refused_for_unknown_values_and_quantized_folders(plain_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantize='int3' is not supported; use 'int4'"):
        Engine.from_pretrained(plain_folder, device="cpu", quantize="int3")
    with pytest.raises(ValueError, match="dtype='native' keeps"):
        Engine.from_pretrained(plain_folder, device="cpu", dtype="native", quantize="int8")
    write(tmp_path, BUILDERS["packed 4 bit asymmetric 32"], CONFIGS["packed 4 bit asymmetric 32"])
    with pytest.raises(ValueError, match="is quantized already; leave out quantize='int8'"):
        Engine.from_pretrained(tmp_path, device="cpu", quantize="int8")


def test_rows_that_no_group_divides_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_model("llama", torch.float32).save_pretrained(tmp_path)  # 32 and 48 columns
    with caplog.at_level(logging.WARNING):
        model = load_folder(tmp_path, CPU, "auto", "int8")
    assert isinstance(model.layers[0].down.weight, torch.Tensor) and not isinstance(model.head.weight, torch.Tensor)
    assert len(caplog.messages) == 4 and "layers.0.down stays in torch.float32" in caplog.messages[0]
