"""Weights are loaded once and unchanged from every source; folders and models that cannot be decoded are refused."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import Phi3Config

from selfspec.models import loading as weights
from selfspec.models import shards
from selfspec.models.decoder import Decoder, Part, model_parts
from tests.calibrated import chat_tokenizer
from tests.tiny import FAMILIES, tiny_model

CPU = torch.device("cpu")
BAD_VALUES: dict[str, Any] = {
    "negative": -1,
    "zero": 0,
    "huge": 10**7 + 1,
    "2^63": 2**63,
    "text": "x",
    "list": [1],
    "object": {"a": 1},
    "boolean": True,
    "nan": float("nan"),
    "infinite": float("inf"),
}
NEEDED = ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"]
NEEDED += ["vocab_size", "model_type", "hidden_act", "hidden_activation"]


def tensors_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The decoder's tensors by the names of `model_parts`."""
    named = {"embedding": decoder.embedding.weight, "norm": decoder.norm}
    if not decoder.config.tied_head:
        named["head"] = decoder.head.weight
    for index, layer in enumerate(decoder.layers):
        named |= {f"layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
    return named


def pieces_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The decoder's tensors split into Hugging Face's."""
    named = tensors_of(decoder)
    groups = model_parts(decoder.config)
    assert named.keys() == groups.keys()
    pieces: dict[str, torch.Tensor] = {}
    for name, parts in groups.items():
        cut = named[name].split([part.shape[0] for part in parts])
        pieces |= {part.name: piece for part, piece in zip(parts, cut, strict=True)}
    return pieces


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete llama folder for a test to damage."""
    return save(tiny_model("llama", torch.float32), tmp_path / "model")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Asserts that `resolve` and `load_folder` refuse a folder before a weight is allocated or read."""

    def loading(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a weight was touched")

    def check(path: Path, *words: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shards, "safe_open", loading)
            patch.setattr(torch, "empty", loading)
            with pytest.raises(ValueError) as found:
                weights.resolve(path)
            with pytest.raises(ValueError) as loaded:
                weights.load_folder(path, CPU)
        assert str(found.value) == str(loaded.value)
        for word in words:
            assert word in str(found.value)

    return check


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestLoadFolder:
    @pytest.mark.parametrize(
        ("family", "dtype"),
        [
            ("llama", torch.float64),
            ("mistral", torch.float32),
            ("qwen2", torch.bfloat16),
            ("qwen3", torch.float16),
            ("gemma3_text", torch.bfloat16),
        ],
        ids=FAMILIES,
    )
    def test_every_family_and_dtype(self, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
        model = tiny_model(family, dtype)
        decoder = weights.load_folder(weights.resolve(save(model, tmp_path)), CPU, dtype)
        state = model.state_dict()
        for name, piece in pieces_of(decoder).items():
            assert piece.dtype == dtype and torch.equal(piece, state[name]), name

    @pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("gemma3_text", False)])
    def test_each_weight_exists_once(self, family: str, tied: bool, tmp_path: Path) -> None:
        model = tiny_model(family, torch.float32, tie_word_embeddings=tied)
        decoder = weights.load_folder(save(model, tmp_path), CPU, torch.float32)
        assert (decoder.head is decoder.embedding) == tied
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors_of(decoder).values())
        assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
        payload = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
        assert decoder.nbytes == payload == sum(stop - start for start, stop in spans)
        for tensor in tensors_of(decoder).values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes

    def test_biases(self, tmp_path: Path) -> None:
        model = tiny_model("llama", torch.float32, attention_bias=True, mlp_bias=True)
        state = model.state_dict()
        pieces = pieces_of(weights.load_folder(save(model, tmp_path), CPU))
        assert pieces.keys() == state.keys()
        assert all(torch.equal(piece, state[name]) for name, piece in pieces.items())

    def test_shards(self, tmp_path: Path) -> None:
        model = tiny_model("qwen3", torch.float32)
        save(model, tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 3
        pieces = pieces_of(weights.load_folder(weights.resolve(tmp_path), CPU))
        assert all(torch.equal(piece, model.state_dict()[name]) for name, piece in pieces.items())

    def test_copies_in_bounded_chunks(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = pieces_of(weights.load_folder(folder, CPU))
        monkeypatch.setattr(shards, "_CHUNK_BYTES", 1024)
        sizes: list[int] = []
        original = shards.Shards.chunks

        def recorded(self: shards.Shards, part: Part) -> Any:
            for chunk, rows in original(self, part):
                sizes.append(chunk.nbytes)
                yield chunk, rows

        monkeypatch.setattr(shards.Shards, "chunks", recorded)
        pieces = pieces_of(weights.load_folder(folder, CPU))
        assert max(sizes) <= 1024
        assert all(torch.equal(piece, whole[name]) for name, piece in pieces.items())

    @pytest.mark.parametrize("allocation", [0, 7])
    def test_running_out_of_memory_says_what_is_needed_and_holds_nothing(
        self, folder: Path, allocation: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[weakref.ref[torch.Tensor]] = []
        empty = torch.empty

        def limited(*args: Any, **options: Any) -> torch.Tensor:
            if str(options.get("device")) == "meta":  # takes no memory
                return empty(*args, **options)
            if len(made) == allocation:
                raise torch.OutOfMemoryError("simulated")
            tensor = empty(*args, **options)
            made.append(weakref.ref(tensor))
            return tensor

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", limited)
            with pytest.raises(torch.OutOfMemoryError, match=r"weights need \d+\.\d GB.*torch.float32.*device='cpu'"):
                weights.load_folder(folder, CPU)
        gc.collect()
        assert not any(reference() is not None for reference in made)
        assert weights.load_folder(folder, CPU).nbytes > 0

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_device_memory_holds_one_copy(self, tmp_path: Path) -> None:
        shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32000}
        save(tiny_model("llama", torch.float32, **shape), tmp_path)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        decoder = weights.load_folder(tmp_path, weights.pick_device("cuda"))
        assert decoder.dtype == torch.bfloat16
        assert torch.cuda.max_memory_allocated() - before < 1.2 * decoder.nbytes

    def test_superfluous_tensors_are_ignored(self, tmp_path: Path) -> None:
        save(tiny_model("qwen2", torch.float32), tmp_path)
        stored = load_file(tmp_path / "model.safetensors")
        extra = {
            "lm_head.weight": torch.zeros_like(stored["model.embed_tokens.weight"]),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(4),
        }
        save_file(stored | extra, tmp_path / "model.safetensors")
        decoder = weights.load_folder(weights.resolve(tmp_path), CPU)
        assert decoder.head is decoder.embedding and decoder.embedding.weight.any()

    def test_tensors_are_ordinary_even_in_inference_mode(self, folder: Path) -> None:
        with torch.inference_mode():
            decoder = weights.load_folder(folder, CPU)
        assert not any(tensor.is_inference() for tensor in tensors_of(decoder).values())

    def test_auto_dtype(self) -> None:
        cuda, mps = torch.device("cuda"), torch.device("mps")
        assert weights.pick_dtype("auto", CPU, torch.bfloat16) == torch.float32
        assert weights.pick_dtype("auto", mps, torch.bfloat16) == torch.float16
        assert weights.pick_dtype("auto", cuda, torch.float16) == torch.float16
        assert weights.pick_dtype("auto", cuda, torch.float32) == torch.bfloat16
        assert weights.pick_dtype("float32", cuda, torch.float16) == torch.float32

    @pytest.mark.parametrize("dtype", ["int8", "no dtype", torch.float8_e4m3fn], ids=str)
    def test_bad_dtype(self, dtype: Any, folder: Path) -> None:
        with pytest.raises(ValueError, match="is not supported; use 'auto'"):
            weights.load_folder(folder, CPU, dtype)


class TestRefusals:
    def test_missing_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "here").mkdir()
        for path in (
            tmp_path / "none",
            str(tmp_path / "none"),
            "./none",
            "~/none/such",
            "none.gguf",
            "a\\b",
            "here/none",
        ):
            with pytest.raises(ValueError, match="does not exist"):
                weights.resolve(path)

    @pytest.mark.parametrize("name", ["", " ", None, 3])
    def test_no_name(self, name: Any) -> None:
        with pytest.raises(ValueError, match="names no model"):
            weights.resolve(name)

    def test_file_that_is_no_model(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="give the folder"):
            weights.resolve(folder / "model.safetensors")

    def test_no_config(self, folder: Path, refused: Callable[..., None]) -> None:
        (folder / "config.json").unlink()
        refused(folder, "no config.json")

    def test_folder_of_gguf_files(self, tmp_path: Path, refused: Callable[..., None]) -> None:
        (tmp_path / "some.gguf").touch()
        refused(tmp_path, "give the file itself", "some.gguf")

    @pytest.mark.parametrize("text", ["{", "[]", "\xff"])
    def test_unreadable_config(self, text: str, folder: Path, refused: Callable[..., None]) -> None:
        (folder / "config.json").write_bytes(text.encode("latin-1"))
        refused(folder, "config.json", "JSON")

    def test_no_model_type(self, folder: Path, refused: Callable[..., None]) -> None:
        edit_config(folder, model_type=None)
        refused(folder, "model_type")

    @pytest.mark.parametrize("kind", ["mixtral", "unknown-to-transformers"])
    def test_unsupported_type(self, kind: str, folder: Path, refused: Callable[..., None]) -> None:
        edit_config(folder, model_type=kind)
        refused(folder, kind, "llama, mistral, qwen2, qwen3, gemma3_text")

    def test_remote_code(self, folder: Path, refused: Callable[..., None]) -> None:
        edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
        refused(folder, "auto_map", "code")

    def test_bad_config_value(self, folder: Path, refused: Callable[..., None]) -> None:
        edit_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0})
        refused(folder, "config.json", "longrope")

    @pytest.mark.parametrize("family", ["llama", "gemma3_text"])
    def test_every_entry_mutated(self, family: str, tmp_path: Path) -> None:
        """An impossible value of a needed entry is refused with a ValueError; of any other entry refused or ignored."""
        file = save(tiny_model(family, torch.float32), tmp_path) / "config.json"
        config = json.loads(file.read_text())
        for entry, (kind, value) in product(config, BAD_VALUES.items()):
            file.write_text(json.dumps(config | {entry: value}))
            try:
                weights.load_folder(tmp_path, CPU)
            except ValueError as error:
                assert str(file) in str(error) or str(tmp_path) in str(error), f"{entry} {kind}: {error}"
            else:
                assert entry not in NEEDED, f"{entry} was accepted though {kind}"

    def test_more_layers_than_the_weights_have(self, folder: Path, refused: Callable[..., None]) -> None:
        edit_config(folder, num_hidden_layers=7)
        refused(folder, "missing", "model.layers.4.input_layernorm.weight")

    @pytest.mark.parametrize("entry", ["quantization_config", "compression_config"])
    def test_quantized_in_a_way_that_is_not_supported(
        self, entry: str, folder: Path, refused: Callable[..., None]
    ) -> None:
        edit_config(folder, **{entry: {"quant_method": "gptq", "bits": 3}})
        refused(folder, "quantization_config.bits", "'3'", "4 and 8 bit")

    @pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "weights.pth"])
    def test_pickled(self, name: str, folder: Path, refused: Callable[..., None]) -> None:
        (folder / "model.safetensors").rename(folder / name)
        refused(folder, "pickled", name, "save_pretrained")

    @pytest.mark.parametrize("with_config", [True, False])
    def test_adapter(self, with_config: bool, folder: Path, refused: Callable[..., None]) -> None:
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")
        if not with_config:
            (folder / "config.json").unlink()
        refused(folder, "adapter", "merge")

    def test_no_weights(self, folder: Path, refused: Callable[..., None]) -> None:
        (folder / "model.safetensors").unlink()
        refused(folder, "no weights", "model.safetensors")

    def test_missing_shard(self, tmp_path: Path, refused: Callable[..., None]) -> None:
        save(tiny_model("llama", torch.float32), tmp_path, max_shard_size="20KB")
        shard = sorted(tmp_path.glob("*.safetensors"))[1]
        shard.unlink()
        refused(tmp_path, "lacks", shard.name)

    @pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": "../elsewhere.safetensors"}}'])
    def test_bad_index(self, index: str, folder: Path, refused: Callable[..., None]) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(index)
        refused(folder, "model.safetensors.index.json")

    def test_truncated(self, folder: Path, refused: Callable[..., None]) -> None:
        file = folder / "model.safetensors"
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.truncate(size - 100)
        refused(folder, "truncated", "model.safetensors", str(size - 100), "again")

    @pytest.mark.parametrize(
        "content",
        [
            b"short",
            b"version https://git-lfs",
            (10**6).to_bytes(8, "little") + b"{}",
            b"\2" + b"\0" * 7 + b"{]",
            b"\2" + b"\0" * 7 + b"[]",
        ],
        ids=["short", "lfs", "cut header", "bad json", "no object"],
    )
    def test_corrupt(self, content: bytes, folder: Path, refused: Callable[..., None]) -> None:
        (folder / "model.safetensors").write_bytes(content)
        refused(folder, "model.safetensors", "again")

    def test_missing_tensor(self, folder: Path, refused: Callable[..., None]) -> None:
        stored = load_file(folder / "model.safetensors")
        del stored["model.layers.1.mlp.up_proj.weight"], stored["model.norm.weight"]
        save_file(stored, folder / "model.safetensors")
        refused(folder, "missing", "model.norm.weight", "model.layers.1.mlp.up_proj.weight")

    def test_headless_model(self, tmp_path: Path, refused: Callable[..., None]) -> None:
        save(tiny_model("llama", torch.float32).model, tmp_path)
        refused(tmp_path, "missing", "causal LM")

    def test_wrong_shape(self, folder: Path, refused: Callable[..., None]) -> None:
        edit_config(folder, vocab_size=99)
        refused(folder, "model.embed_tokens.weight", "[101, 32]", "[99, 32]")

    def test_integer_weights(self, folder: Path, refused: Callable[..., None]) -> None:
        stored = load_file(folder / "model.safetensors")
        stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.int8)
        save_file(stored, folder / "model.safetensors")
        refused(folder, "model.norm.weight", "I8")


class TestHub:
    def test_unreachable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(*args: Any, **kwargs: Any) -> None:
            raise ConnectionError("no route.")

        monkeypatch.setattr(weights, "snapshot_download", offline)
        with pytest.raises(OSError, match=r"'some/model'.*no route\. Check the name and.*path of a model folder"):
            weights.resolve("some/model")

    def test_impossible_name(self) -> None:
        with pytest.raises(ValueError, match="neither a folder here nor a model on the hub"):
            weights.resolve("no such name!")

    @pytest.fixture
    def hub(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A repository on the hub; its files are downloaded into the folder `cache` next to it."""
        repository = folder.rename(tmp_path / "repository")
        for name in ("consolidated.safetensors", "model.fp16.safetensors", "consolidated.00.pth", "model.gguf"):
            (repository / name).write_bytes(b"large")
        (repository / "original").mkdir()
        (repository / "original" / "consolidated.safetensors").write_bytes(b"large")
        (repository / "original" / "params.json").write_text("{}")
        chat_tokenizer().save_pretrained(repository)

        def download(name: str, allow_patterns: list[str], ignore_patterns: list[str] | None = None) -> str:
            files = [str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()]
            for file in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
                (tmp_path / "cache" / file).parent.mkdir(exist_ok=True, parents=True)
                shutil.copy(repository / file, tmp_path / "cache" / file)
            return str(tmp_path / "cache")

        monkeypatch.setattr(weights, "snapshot_download", download)
        return repository

    def downloaded(self, hub: Path) -> set[str]:
        return {path.name for path in (hub.parent / "cache").rglob("*")}

    def test_copies_of_the_weights_are_not_downloaded(self, hub: Path) -> None:
        weights.load_folder(weights.resolve("some/model"), CPU)
        expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        assert self.downloaded(hub) - {"tokenizer_config.json", "chat_template.jinja"} == expected

    def test_every_shard_is_downloaded_whatever_its_name(self, hub: Path) -> None:
        (hub / "model.safetensors").rename(hub / "part-1.safetensors")
        stored = load_file(hub / "part-1.safetensors")
        index = {"weight_map": dict.fromkeys(stored, "part-1.safetensors")}
        (hub / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.load_folder(weights.resolve("some/model"), CPU)
        assert {name for name in self.downloaded(hub) if name.endswith(".safetensors")} == {"part-1.safetensors"}

    @pytest.mark.parametrize(
        ("file", "entries"),
        [("config.json", {"model_type": "mixtral"}), ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": "a.B"}})],
        ids=["type", "code"],
    )
    def test_a_model_is_refused_before_its_weights_are_downloaded(
        self, hub: Path, file: str, entries: dict[str, Any]
    ) -> None:
        path = hub / file
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
        with pytest.raises(ValueError, match=next(iter(entries.values())) if file == "config.json" else "auto_map"):
            weights.resolve("some/model")
        assert not any(name.endswith(".safetensors") for name in self.downloaded(hub))


class TestAdopt:
    @pytest.mark.parametrize(
        ("family", "tied"), [("llama", False), ("qwen2", True), ("gemma3_text", True), ("gemma3_text", False)]
    )
    def test_shares_storage_and_does_not_change_the_model(self, family: str, tied: bool) -> None:
        model = tiny_model(family, torch.float32, tie_word_embeddings=tied)
        ids = torch.arange(20)[None]
        before, pointers = model(ids).logits, {n: p.data_ptr() for n, p in model.named_parameters()}
        decoder = weights.adopt(model)
        live = dict(model.named_parameters())
        for name, piece in pieces_of(decoder).items():
            assert piece.data_ptr() == live[name].data_ptr() and torch.equal(piece, live[name]), name
        for parts in model_parts(decoder.config).values():
            if len(parts) == 1:
                assert live[parts[0].name].data_ptr() == pointers[parts[0].name]
        assert (decoder.head is decoder.embedding) == tied
        assert torch.equal(model(ids).logits, before)

    def test_twice(self) -> None:
        model = tiny_model("gemma3_text", torch.float32)
        first, second = tensors_of(weights.adopt(model)), tensors_of(weights.adopt(model))
        assert all(first[name].data_ptr() == tensor.data_ptr() for name, tensor in second.items())
        assert all(
            first[name].shape == tensor.shape and torch.equal(first[name], tensor) for name, tensor in second.items()
        )

    def test_training_the_model_shows_in_the_decoder(self) -> None:
        model = tiny_model("qwen2", torch.float32)
        decoder = weights.adopt(model)
        before = decoder.layers[0].qkv.weight.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.arange(8)[None]).logits.sum().backward()
        optimizer.step()
        assert not torch.equal(decoder.layers[0].qkv.weight, before)
        assert not any(tensor.requires_grad for tensor in tensors_of(decoder).values())

    def test_adopted_model_saves_and_loads(self, tmp_path: Path) -> None:
        model = tiny_model("llama", torch.float32)
        decoder = weights.adopt(model)
        loaded = pieces_of(weights.load_folder(save(model, tmp_path), CPU))
        assert all(torch.equal(piece, loaded[name]) for name, piece in pieces_of(decoder).items())

    def test_a_head_untied_after_loading_is_not_tied(self) -> None:
        model = tiny_model("llama", torch.float32, tie_word_embeddings=True)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        decoder = weights.adopt(model)
        assert decoder.head.weight.data_ptr() == model.lm_head.weight.data_ptr() != decoder.embedding.weight.data_ptr()

    def test_non_contiguous_parameter(self) -> None:
        model = tiny_model("llama", torch.float32)
        weight = model.model.layers[0].mlp.down_proj.weight
        weight.data = weight.data.t().contiguous().t()
        values = weight.detach().clone()
        down = weights.adopt(model).layers[0].down.weight
        assert down.is_contiguous() and torch.equal(down, values) and down.data_ptr() == weight.data_ptr()

    def test_model_read_from_gguf_by_transformers(self) -> None:
        model = tiny_model("llama", torch.float32)
        model.config.quantization_config = type("Gguf", (), {"quant_method": "gguf", "to_dict": lambda self: {}})()
        weights.adopt(model)
        assert model.config.quantization_config is not None

    def assert_refused(self, model: Any, *words: str) -> None:
        pointers = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(ValueError) as error:
            weights.adopt(model)
        assert all(word in str(error.value) for word in words), str(error.value)
        assert [p.data_ptr() for p in model.parameters()] == pointers

    def test_other_type(self) -> None:
        model = tiny_model("llama", torch.float32)
        model.config = Phi3Config(num_hidden_layers=1)
        self.assert_refused(model, "phi3", "llama")

    def test_not_a_model(self) -> None:
        self.assert_refused(torch.nn.Linear(2, 2), "transformers causal LM", "Linear")

    def test_headless(self) -> None:
        self.assert_refused(tiny_model("llama", torch.float32).model, "no LM head", "AutoModelForCausalLM")

    def test_quantized(self) -> None:
        model = tiny_model("llama", torch.float32)
        model.config.quantization_config = {"quant_method": "gptq"}
        self.assert_refused(model, "quantized", "gptq")

    def test_meta(self) -> None:
        model = tiny_model("llama", torch.float32)
        model.model.layers[2].to("meta")
        self.assert_refused(model, "model.layers.2", "meta", "one device")

    def test_several_dtypes(self) -> None:
        model = tiny_model("llama", torch.float32)
        model.model.norm.to(torch.bfloat16)
        self.assert_refused(model, "dtype", "model.norm.weight", "bfloat16")

    def test_not_floating(self) -> None:
        model = tiny_model("llama", torch.float32)
        weight = model.model.layers[0].mlp.up_proj
        weight.weight = torch.nn.Parameter(weight.weight.detach().to(torch.int8), requires_grad=False)
        self.assert_refused(model, "model.layers.0.mlp.up_proj.weight", "int8")

    def test_adapter_inside(self) -> None:
        model = tiny_model("llama", torch.float32)
        attention = model.model.layers[0].self_attn
        attention.q_proj = torch.nn.ModuleDict({"base_layer": attention.q_proj})
        self.assert_refused(model, "missing", "q_proj.weight", "adapters")

    def test_inference_tensors(self) -> None:
        with torch.inference_mode():
            model = tiny_model("llama", torch.float32)
        self.assert_refused(model, "inference_mode")

    def test_a_live_model_that_cannot_be_fused_stays_usable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model("llama", torch.float32)
        ids = torch.tensor([[5, 6, 7]])
        expected, empty, made = model(ids).logits, torch.empty, []

        def limited(*args: Any, **options: Any) -> torch.Tensor:
            if options["device"] == CPU:
                made.append(args)
                if len(made) == 4:
                    raise torch.OutOfMemoryError("simulated")
            return empty(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", limited)
            with pytest.raises(
                torch.OutOfMemoryError, match=r"fusing model\.layers\.1\.mlp.*needs 0\.0 MB.*free on cpu"
            ):
                weights.adopt(model)
        assert torch.equal(model(ids).logits, expected)
        assert weights.adopt(model).nbytes > 0


class TestPickDevice:
    def test_auto_and_cpu(self) -> None:
        assert weights.pick_device("cpu") == weights.pick_device(torch.device("cpu")) == CPU
        assert weights.pick_device("auto").type in ("cpu", "cuda", "mps")

    @pytest.mark.parametrize("device", ["no device", "cuda:99", "meta"])
    def test_bad(self, device: str) -> None:
        with pytest.raises(ValueError, match="device="):
            weights.pick_device(device)


class TestFingerprint:
    @pytest.mark.parametrize("family", ["llama", "gemma3_text"])
    def test_same_weights_in_any_dtype_from_any_source(self, family: str, tmp_path: Path) -> None:
        exact = weights.fingerprint(weights.adopt(tiny_model(family, torch.float64)))
        assert len(exact) == 60
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            folder = save(tiny_model(family, dtype), tmp_path / str(dtype))
            loaded = weights.fingerprint(weights.load_folder(folder, CPU, torch.float32))
            assert weights.same_fingerprint(exact, loaded)
            assert weights.same_fingerprint(
                loaded, weights.fingerprint(weights.load_folder(folder, CPU, torch.float16))
            )
            shutil.rmtree(folder)

    def test_other_weights(self) -> None:
        one, other = (weights.fingerprint(weights.adopt(tiny_model("llama", seed=seed))) for seed in (0, 1))
        assert not weights.same_fingerprint(one, other)
        assert not weights.same_fingerprint(one, one[:-1])

    @pytest.mark.parametrize("changed", ["q_proj", "lm_head"])
    def test_a_light_fine_tune_of_some_tensors(self, changed: str) -> None:
        model = tiny_model("llama")
        before = weights.fingerprint(weights.adopt(model))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if changed in name:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                    parameter.add_(0.02 * parameter.std() * noise)
        assert not weights.same_fingerprint(before, weights.fingerprint(weights.adopt(model)))
