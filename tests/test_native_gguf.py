"""GGUF files loaded as they are stored give the weights, logits and tokens of the same files expanded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize

from selfspec import Engine
from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.kernels.quantized_weight import QuantizedWeight
from selfspec.models.decoder import Decoder
from selfspec.models.gguf.model import GgufModel
from selfspec.models.gguf.native import load_native
from selfspec.models.linear import Weight, expand
from selfspec.models.loading import fingerprint, load_folder, resolve, same_fingerprint
from selfspec.profiles.paths import models_dir
from tests.test_convert import VOCABULARY as TOKENS
from tests.test_convert import write_gguf
from tests.test_quantized_gguf import NATIVE
from tests.tiny import tiny_model

Kind = GGMLQuantizationType
CPU = torch.device("cpu")
# K types have blocks of 256 columns.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 64, "num_hidden_layers": 3, "vocab_size": TOKENS}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("demo") is None:
        monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))


def stored(name: str, values: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
    """The values in a type that the library writes; of K types, which it only reads, random blocks of their size."""
    if kind not in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return quantize(values, kind), kind
    columns, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(len(name) + values.shape[0])
    blocks = rng.integers(0, 256, (values.shape[0], values.shape[1] // columns, size), dtype=np.uint8)
    for at in NATIVE[kind][1]:  # scales at which weights are about as large as 1 / sqrt(columns)
        numbers = rng.uniform(0.5, 1.0, blocks.shape[:2]) * (2e-5 if kind == Kind.Q6_K else 1e-4)
        blocks[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(values.shape[0], -1), kind


def like_q4_k_m(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
    """Half of the values and down projections, and the embedding, have more bits."""
    more = name == "token_embd.weight" or ("blk.1" in name and ("attn_v" in name or "ffn_down" in name))
    return stored(name, values, Kind.Q6_K if more else Kind.Q4_K)


ENCODINGS: dict[str, Callable[[str, np.ndarray], tuple[np.ndarray, Kind]]] = {
    **{kind.name: partial(stored, kind=kind) for kind in NATIVE},
    "like Q4_K_M": like_q4_k_m,
}


def written(folder: Path, encode: Callable[[str, np.ndarray], tuple[np.ndarray, Kind]], **changes: object) -> Path:
    model = tiny_model("llama", torch.float32, **{**SIZES, "tie_word_embeddings": True, **changes})
    return write_gguf(folder / "tiny.gguf", model, encode=encode)


def expanded(source: GgufModel) -> Decoder:
    """The file's weights by the gguf library, in float64."""
    tensors = {
        name: torch.cat([source.expand(part, torch.float32) for part in parts]).double()
        for name, parts in source.parts().items()
    }
    return Decoder(source.config, tensors)


def weights_of(model: Decoder) -> dict[str, Weight]:
    named: dict[str, Weight] = {"embedding": model.embedding.weight, "head": model.head.weight}
    for index, layer in enumerate(model.layers):
        named |= {f"{index}.{name}": weight for name, weight in layer.tensors().items()}
    return named


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    cache = Cache(model.config, model.device, model.dtype, 8)
    sequence = cache.open()
    cache.reserve(sequence, tokens.shape[1])
    rows = Rows.causal([sequence], tokens.shape[1], model.device)
    return model.logits(model.run(model.embed(tokens), 0, model.config.num_layers, rows, cache))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_file_has_the_weights_and_tokens_of_the_expanded_model(encoding: str, tmp_path: Path) -> None:
    source = GgufModel(written(tmp_path, ENCODINGS[encoding]))
    native, dense = load_native(source, CPU, torch.float64), expanded(source)
    assert native.is_quantized and not dense.is_quantized
    for name, weight in weights_of(dense).items():
        assert torch.equal(expand(weights_of(native)[name], torch.float64), weight), name
    tokens = torch.randint(1, TOKENS, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logits(native, tokens[:1]), logits(dense, tokens[:1]), rtol=1e-5, atol=1e-6)
    ours, theirs = Engine(native), Engine(dense)
    options = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    plain = ours.generate(tokens, speculative_decoding=False, **options)
    assert torch.equal(plain, theirs.generate(tokens, speculative_decoding=False, **options))
    drafting = {"speculative_decoding": "force", "exit_layer": 1, "plan": "tree:2,1"}
    assert torch.equal(plain, ours.generate(tokens, **drafting, **options))


@pytest.mark.parametrize("kind", NATIVE)
def test_memory_is_the_types_bits_per_weight(kind: Kind, tmp_path: Path) -> None:
    model = load_native(GgufModel(written(tmp_path, ENCODINGS[kind.name])), CPU)
    matrices = sum(weight.shape[0] * weight.shape[1] for weight in weights_of(model).values() if len(weight.shape) == 2)
    matrices -= model.head.shape[0] * model.head.shape[1]  # tied
    norms = 4 * 256 * (2 * 3 + 1)
    embedding = model.embedding.weight
    assert isinstance(embedding, QuantizedWeight)
    unused = -TOKENS % 16 * 256 * embedding.bits / 8  # rows are stored 16 at a time
    assert Engine(model).memory()["weights"] == matrices * NATIVE[kind][0] / 8 + norms + unused


def test_an_engine_reads_the_file_itself_and_writes_no_folder(tmp_path: Path) -> None:
    path = written(tmp_path, ENCODINGS["Q4_1"])
    engine = Engine.from_pretrained(path, device="cpu", dtype="native")
    assert engine.dtype == torch.float32 and engine.model.is_quantized and not models_dir().exists()
    folder = resolve(path)
    converted = Engine.from_pretrained(path, device="cpu", dtype="bfloat16")
    text = "hello world <|im_end|>"
    assert engine.tokenizer.encode(text) == converted.tokenizer.encode(text)
    assert engine.tokenizer.chat_template == converted.tokenizer.chat_template
    assert engine.generation_config.eos_token_id == converted.generation_config.eos_token_id
    identity = fingerprint(engine.model)
    assert same_fingerprint(identity, fingerprint(load_folder(folder, CPU)))  # bfloat16 rounds it
    other = written(tmp_path, ENCODINGS["Q8_0"])
    assert not same_fingerprint(identity, fingerprint(load_native(GgufModel(other), CPU)))


def test_tensors_of_other_types_are_expanded_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        if name == "token_embd.weight":
            return values, Kind.F32
        other = name in ("blk.0.ffn_down.weight", "blk.1.attn_k.weight")
        return stored(name, values, Kind.TQ2_0 if other else Kind.Q8_0)

    source = GgufModel(written(tmp_path, encode))
    with caplog.at_level(logging.WARNING):
        model = load_native(source, CPU)
    dense = {
        name for name, weight in weights_of(model).items() if isinstance(weight, torch.Tensor) and weight.ndim == 2
    }
    assert dense == {"embedding", "head", "0.down", "1.qkv"}  # a fused weight has one format
    (message,) = caplog.messages
    assert "blk.0.ffn_down.weight (TQ2_0)" in message and "blk.1.attn_k.weight (TQ2_0)" in message
    assert "token_embd" not in message


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_biases_and_norms_keep_the_precision_of_the_file(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, torch.float32, **SIZES)
    path = write_gguf(tmp_path / "tiny.gguf", model, kind=Kind.Q8_0)
    source = GgufModel(path)
    native, dense = load_native(source, CPU), expanded(source)
    for name, weight in weights_of(dense).items():
        assert torch.equal(expand(weights_of(native)[name], torch.float64), weight), name
    assert torch.equal(native.norm.double(), dense.norm)


def test_files_that_are_damaged_or_not_gguf_are_refused(tmp_path: Path) -> None:
    def load(path: Path) -> Engine:
        return Engine.from_pretrained(path, device="cpu", dtype="native")

    path = written(tmp_path, ENCODINGS["Q4_0"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load(path)
    source = GgufModel(written(tmp_path, ENCODINGS["Q4_0"])).tensors["blk.2.ffn_up.weight"]
    at = int(source.data_offset)
    path.write_bytes(whole[:at] + b"\x00\x7e" + whole[at + 2 :])  # NaN as the first scale
    with pytest.raises(ValueError, match="blk.2.ffn_up.weight .*not finite"):
        load(path)
    with pytest.raises(ValueError, match="does not exist"):
        load(tmp_path / "other.gguf")
    with pytest.raises(ValueError, match="dtype='native' keeps the quantized weights of a GGUF file"):
        load(tmp_path)
