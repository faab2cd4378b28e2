"""GgufModel: the config, generation config and tensors of a GGUF file in Hugging Face's names and layouts.

The gguf library reads metadata and quantized blocks; this module translates llama.cpp's names and layouts, and raises
ValueError for metadata that describes no supported model. `tokenizer` rebuilds the tokenizer, `convert` writes folders.
"""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from struct import unpack_from
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFReader, GGUFValueType, dequantize, get_tensor_name_map
from transformers import AutoConfig, PreTrainedConfig

from selfspec.models.checkpoint import check_parts
from selfspec.models.config import ModelConfig, check_supported
from selfspec.models.decoder import Part, model_parts
from selfspec.models.quantized.gguf import read_blocks
from selfspec.models.quantized.tensor import QuantizedTensor

# Hugging Face's model type by llama.cpp's architecture. Mistral's and SmolLM2's is llama.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

# Tokens that end a turn in the chat templates of the supported families, and tokens that end a text.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")

_CHUNK_VALUES = 16 * 2**20  # weights expanded at a time: 64 MB as float32


class GgufModel:
    """An opened GGUF file of a supported architecture; tensor data is mapped, not read.

    Raises ValueError, which names file and key, for metadata that is missing, of the wrong type or out of range.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields, tensors = _open(path)
        self._values: dict[str, Any] = {}
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.architecture = str(self.get("general.architecture"))
        self._check()
        settings = self._settings()
        try:
            kind = ARCHITECTURES[self.architecture]
            check_supported(SimpleNamespace(model_type=kind, **settings))  # first: transformers builds lists by size
            self.hf_config: PreTrainedConfig = AutoConfig.for_model(kind, **settings)
            self.config = ModelConfig.from_hf(self.hf_config)
        except Exception as error:  # transformers raises its own errors for values that it does not accept
            raise ValueError(f"{self.path} describes no model that selfspec decodes: {error}") from error
        self._check_rope_factors()
        arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._names = get_tensor_name_map(arch, self.config.num_layers)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a metadata value, unchecked; `{arch}` in a key is replaced by the file's architecture."""
        key = self._key(key)
        if key not in self._fields:
            return default
        if key not in self._values:
            try:
                self._values[key] = self._fields[key].contents()
            except Exception as error:  # text that is not UTF-8, or a type that the library does not support
                raise self._bad(key, f"cannot be read ({error})") from error
        return self._values[key]

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Returns an integer of at least `least`."""
        value = self.get(key, default)
        if type(value) is not int or value < least:
            raise self._bad(key, f"is {_shown(value)}; it must be an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number above 0, rounded to the 6 digits that a 32-bit number holds."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < inf:
            raise self._bad(key, f"is {_shown(value)}; it must be a finite number above 0")
        return float(f"{value:.6g}")  # a 32-bit 1e-05 reads as 9.999999747378752e-06

    def text(self, key: str, default: str = "") -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._bad(key, f"is {_shown(value)}; it must be text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, f"is {_shown(value)}; it must be true or false")
        return value

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        """Returns a list whose entries have the type `kind`, of `length` entries if that is given."""
        value = self.get(key)
        if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
            raise self._bad(key, f"is {_shown(value)}; it must be a list of {kind.__name__}")
        if length is not None and len(value) != length:
            raise self._bad(key, f"has {len(value)} entries instead of {length}")
        return value

    def token_id(self, name: str) -> int | None:
        """Returns the id of a special token ("bos", "eos", ...); None if the file has none."""
        key = f"tokenizer.ggml.{name}_token_id"
        if self.get(key) is None:
            return None
        index = self.integer(key, least=0)
        if index >= len(self.tokens):
            raise self._bad(key, f"is {index}, and there are {len(self.tokens)} tokens")
        return index

    def _key(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key

    def _bad(self, key: str, fault: str) -> ValueError:
        return ValueError(f"{self.path} is damaged or not supported: {self._key(key)} {fault}. Use another file.")

    def gguf_name(self, part: Part) -> str:
        """Returns llama.cpp's name of a Hugging Face tensor."""
        stem, suffix = part.name.rsplit(".", 1)
        return f"{self._names.get_name(stem)}.{suffix}"

    def parts(self) -> dict[str, tuple[Part, ...]]:
        """Returns the decoder's tensors as `model_parts`; raises ValueError if one is missing or misshapen."""
        groups = model_parts(self.config)
        parts = [part for of_group in groups.values() for part in of_group]
        found = {part.name: self.tensors.get(self.gguf_name(part)) for part in parts}
        # Hugging Face names the dimensions in the reverse order.
        shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in found.items() if tensor is not None}
        check_parts(parts, shapes, f"{self.path} does not hold the model its metadata describes")
        return groups

    def kind(self, part: Part) -> GGMLQuantizationType:
        """Returns the type in which the file stores a tensor."""
        return self.tensors[self.gguf_name(part)].tensor_type

    def read_quantized(self, part: Part, rows: slice | None = None) -> QuantizedTensor:
        """Returns a weight, or a range of its rows, as it is stored, in Hugging Face's layout."""
        source, heads, rows = self.tensors[self.gguf_name(part)], self._interleaved_heads(part), rows or slice(None)
        data = source.data[rows] if heads is None else source.data[_halves(torch.arange(part.shape[0]), heads)[rows]]
        return read_blocks(f"{source.name} of {self.path}", data, source.tensor_type)

    def expand(self, part: Part, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Returns a tensor in a 16- or 32-bit dtype and in Hugging Face's layout."""
        source = self.tensors[self.gguf_name(part)]
        # llama.cpp adds 1 to gemma's norm weights; subtracted before rounding, it costs no precision.
        offset = 1.0 if self.architecture == "gemma3" and part.name.endswith("norm.weight") else 0.0
        result = torch.empty(part.shape, dtype=dtype)
        step = max(1, _CHUNK_VALUES * part.shape[0] // result.numel())
        for start in range(0, part.shape[0], step):
            try:
                values = dequantize(source.data[start : start + step], source.tensor_type)
            except NotImplementedError as error:
                raise ValueError(
                    f"{self.path} stores {source.name} as {source.tensor_type.name}, which cannot be expanded; use a "
                    "file of another quantization, such as Q4_K_M, Q8_0 or F16"
                ) from error
            result[start : start + step] = torch.from_numpy(np.require(values, requirements="W")) - offset
        heads = self._interleaved_heads(part)
        return result if heads is None else _halves(result, heads)

    def generation_config(self) -> dict[str, Any]:
        """Returns the begin, end and padding tokens, as entries of generation_config.json."""
        tokens, template = self.tokens, self.text("tokenizer.chat_template")
        pad = self.token_id("padding")
        ends: list[int | None] = [self.token_id(kind) for kind in ("eos", "eot", "eom")]
        # A chat model's file may name only the token that ends a text; its template contains the one that ends a turn.
        ends += [tokens.index(token) for token in _END_OF_TURN if token in template and token in tokens]
        if pad is not None and tokens[pad] in _END_OF_TEXT:
            ends.append(pad)
        unique = list(dict.fromkeys(end for end in ends if end is not None))
        found = {
            "bos_token_id": self.token_id("bos"),
            "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
            "pad_token_id": pad if pad is not None else next(iter(unique), None),
        }
        return {key: value for key, value in found.items() if value is not None}

    def _check(self) -> None:
        """Raises ValueError for a file that is no whole dense model of a supported architecture and tokenizer."""
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{self.path} holds a model of architecture {self.architecture!r}; selfspec converts "
                f"{', '.join(ARCHITECTURES)} (llama covers Mistral and SmolLM2). Use a file of one of these."
            )
        self.tokens: list[str] = self.array("tokenizer.ggml.tokens", str)
        if self.integer("split.count", 0, least=0) > 1:
            raise ValueError(
                f"{self.path} is one part of a split model; merge the parts first (llama-gguf-split --merge)"
            )
        if self.integer("{arch}.expert_count", 0, least=0):
            raise ValueError(f"{self.path} holds a mixture of experts, which is not supported; use a dense model")
        if self.get("tokenizer.ggml.model") not in ("gpt2", "llama") or not self.tokens:
            raise ValueError(
                f"{self.path} holds no tokenizer that selfspec rebuilds (gpt2, llama); use the model's own file"
            )
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError(
                f"{self.path} holds no token embedding, so it is not a whole model; use the model's own file"
            )
        if len(self.tokens) > int(embedding.shape[1]):
            raise ValueError(
                f"{self.path} has {len(self.tokens)} tokens and an embedding for {embedding.shape[1]}; use another file"
            )

    def _settings(self) -> dict[str, Any]:
        """Returns the entries of config.json."""
        kind, integer = ARCHITECTURES[self.architecture], self.integer
        hidden, heads = integer("{arch}.embedding_length"), integer("{arch}.attention.head_count")
        head_dim = integer("{arch}.attention.key_length", integer("{arch}.rope.dimension_count", hidden // heads))
        settings: dict[str, Any] = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_hidden_layers": integer("{arch}.block_count"),
            "head_dim": head_dim,
            "intermediate_size": integer("{arch}.feed_forward_length"),
            "num_key_value_heads": integer("{arch}.attention.head_count_kv", heads),
            "rms_norm_eps": self.number("{arch}.attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": integer("{arch}.context_length"),
        }
        for key in ("{arch}.rope.dimension_count", "{arch}.attention.value_length"):
            if integer(key, head_dim) != head_dim:
                raise self._bad(key, f"is not the size of a head, {head_dim}, which is not supported")
        if settings["num_hidden_layers"] > len(self.tensors):  # before lists of that length are built
            raise self._bad("{arch}.block_count", f"is more than the file's {len(self.tensors)} tensors")
        settings |= dict(
            vocab_size=int(self.tensors["token_embd.weight"].shape[1]),
            tie_word_embeddings="output.weight" not in self.tensors,
            rope_parameters=self._rope(),
            dtype="bfloat16",
            architectures=["Gemma3ForCausalLM" if kind == "gemma3_text" else f"{kind.capitalize()}ForCausalLM"],
            **self.generation_config(),
        )
        if kind == "llama":
            settings |= {
                "attention_bias": "blk.0.attn_q.bias" in self.tensors,
                "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            }
        if kind == "gemma3_text":
            settings |= self._gemma_settings(settings)
        return settings

    def _rope(self) -> dict[str, Any]:
        """Returns the rotary embedding's parameters, as an entry of config.json."""
        rope = {"rope_type": "default", "rope_theta": self.number("{arch}.rope.freq_base", 10000.0)}
        factors = self.tensors.get("rope_freqs.weight")
        scaling = self.text("{arch}.rope.scaling.type", "none")
        factor = self.number("{arch}.rope.scaling.factor", 1.0) if scaling in ("linear", "yarn") else 1.0
        original = "{arch}.rope.scaling.original_context_length"
        if factors is not None:
            # llama.cpp stores the factors of Llama 3's scaling; in published models only the largest differs.
            rope |= {
                "rope_type": "llama3",
                "factor": float(np.max(factors.data)),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": self.integer(original, 8192),
            }
        elif scaling == "linear" and factor != 1.0:
            rope |= {"rope_type": "linear", "factor": factor}
        elif scaling == "yarn" and factor != 1.0:
            rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": self.integer(original)}
        elif scaling not in ("none", "linear", "yarn"):
            raise ValueError(
                f"{self.path} scales its rotary embedding by {scaling!r}; selfspec converts linear and yarn"
            )
        return rope

    def _check_rope_factors(self) -> None:
        """Raises ValueError unless the stored factors are those of the config's Llama 3 scaling."""
        factors = self.tensors.get("rope_freqs.weight")
        if factors is None:
            return
        dim, stored = self.config.head_dim, np.asarray(factors.data, dtype=np.float64)
        theta = self.number("{arch}.rope.freq_base", 10000.0)
        comparable = len(self.config.ropes) == 1 and stored.shape == (dim // 2,)
        with np.errstate(all="ignore"):  # factors that are 0 or not finite compare as unequal
            expected = theta ** (-np.arange(0, dim, 2) / dim) / stored if comparable else np.nan
        if not comparable or not np.allclose(self.config.ropes[0].inv_freq, expected, rtol=1e-3):
            raise ValueError(
                f"{self.path} scales its rotary embedding (rope_freqs) in a way that selfspec does not support; use "
                "another file"
            )

    def _gemma_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns the entries of config.json that only gemma has."""
        layers, scale = settings["num_hidden_layers"], settings["head_dim"]
        if layers == 62:  # the 27B model alone scales its queries by hidden size per head; the file has no key for it
            scale = settings["hidden_size"] // settings["num_attention_heads"]
        local = {"rope_type": "default", "rope_theta": self.number("{arch}.rope.freq_base_swa", 10000.0)}
        key = "{arch}.attention.sliding_window_pattern"
        settings = {
            "query_pre_attn_scalar": scale,
            "sliding_window": self.integer("{arch}.attention.sliding_window"),
            "rope_parameters": {"full_attention": settings["rope_parameters"], "sliding_attention": local},
        }
        if isinstance(self.get(key), list):
            local_layers = self.array(key, bool, length=layers)
        else:  # every `period`-th layer attends to all positions
            period = self.integer(key, 6)
            local_layers = [(index + 1) % period != 0 for index in range(layers)]
        types = ["sliding_attention" if is_local else "full_attention" for is_local in local_layers]
        return settings | {"layer_types": types}

    def _interleaved_heads(self, part: Part) -> int | None:
        """Returns the number of heads of a tensor whose rows llama.cpp interleaves for rotary embedding, else None."""
        match = re.search(r"\.([qk])_proj\.", part.name)
        if self.architecture != "llama" or match is None:
            return None
        return self.config.num_heads if match[1] == "q" else self.config.num_kv_heads


class _Reader(GGUFReader):
    """Raises ValueError for lengths that exceed the file, and reads arrays of numbers and texts in one loop: for a
    damaged length the library would read entries past the file's end, one by one, until memory is full, and for
    50,000 tokens with as many merges it takes 4 s instead of 0.1 s."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *options: Any, **named: Any) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError("it ends before what its header describes")
        return super()._get(offset, dtype, count, *options, **named)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        entries, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind = GGUFValueType(entries[0])
        if kind == GGUFValueType.STRING and self.byte_order == "I":
            return self._texts(orig_offs, [entries, length])
        if kind not in self.gguf_scalar_to_np:
            self._get(orig_offs + 12, np.uint64, length[0])  # checks the length: a text takes at least 8 bytes
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(orig_offs + 12, self.gguf_scalar_to_np[kind], length[0])
        return 12 + values.nbytes, [entries, length, values], [2], [GGUFValueType.ARRAY, kind]

    def _texts(self, start: int, parts: list[Any]) -> Any:
        """Returns an array of texts, each after its length of 8 bytes, as `_get_field_parts` does."""
        data, at, kinds = self.data.data, int(start) + 12, [GGUFValueType.ARRAY, GGUFValueType.STRING]
        for _ in range(int(parts[1][0])):
            (size,) = unpack_from("<Q", data, at)
            at += 8 + size
            if at > len(data):
                raise ValueError("it ends before what its header describes")
            parts.append(data[at - size : at])
        return at - int(start), parts, list(range(2, len(parts))), kinds


def _open(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Returns the metadata fields by key, and the tensors; raises ValueError for a header that cannot be read."""
    again = "Download it again."
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r}. {again}")
    try:
        reader = _Reader(path)
    except Exception as error:  # mostly numpy's errors about sizes: the library expects a whole file
        raise ValueError(f"{path} is truncated or damaged ({path.stat().st_size} bytes): {error}. {again}") from error
    return dict(reader.fields), reader.tensors


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders each head's rows: llama.cpp puts the two rows of a rotary pair side by side, Hugging Face half a head
    apart."""
    pairs = rows.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def _shown(value: Any) -> str:
    """Returns a metadata value for an error message, at most 40 characters."""
    return "missing" if value is None else repr(value)[:40]
