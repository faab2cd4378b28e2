"""A GGUF file seen as a Hugging Face checkpoint: its config, its generation config and its tensors, expanded.

Metadata and quantized blocks are read by the gguf library; here is what llama.cpp's names and layouts mean. The
tokenizer is left to `gguf_tokenizer`, files and caching to `convert`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, dequantize, get_tensor_name_map
from transformers import AutoConfig, PreTrainedConfig

from selfspec.models.config import ModelConfig
from selfspec.models.decoder import Part

# llama.cpp's architecture: the Hugging Face model type. Mistral's files, and SmolLM2's, say llama.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

# Tokens that end a turn in the chat templates of the supported families, and those that end a text.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")

_CHUNK_VALUES = 16 * 2**20  # expanded at a time


class GgufModel:
    """An opened GGUF file of a supported architecture; tensor data is mapped, not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields, tensors = _open(path)
        self._values: dict[str, Any] = {}
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.architecture = str(self.get("general.architecture"))
        self._check()
        self.hf_config = self._hf_config()
        self.config = ModelConfig.from_hf(self.hf_config)
        self._check_rope_factors()
        arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._names = get_tensor_name_map(arch, self.config.num_layers)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` stands for the file's architecture."""
        if "{arch}" in key:
            key = key.format(arch=self.architecture)
        if key not in self._fields:
            return default
        if key not in self._values:
            self._values[key] = self._fields[key].contents()
        return self._values[key]

    def gguf_name(self, part: Part) -> str:
        """llama.cpp's name of a Hugging Face tensor."""
        stem, suffix = part.name.rsplit(".", 1)
        return f"{self._names.get_name(stem)}.{suffix}"

    def shape(self, part: Part) -> tuple[int, ...] | None:
        tensor = self.tensors.get(self.gguf_name(part))
        return None if tensor is None else tuple(int(size) for size in reversed(tensor.shape))

    def expand(self, part: Part) -> torch.Tensor:
        """A tensor in bfloat16 and in Hugging Face's layout."""
        source = self.tensors[self.gguf_name(part)]
        # llama.cpp stores gemma's norms as they are multiplied; undone before rounding, near one, costs no precision.
        offset = 1.0 if self.architecture == "gemma3" and part.name.endswith("norm.weight") else 0.0
        result = torch.empty(part.shape, dtype=torch.bfloat16)
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
        """What ends a text and pads a batch, as generation_config.json says it."""
        tokens = self.get("tokenizer.ggml.tokens", [])
        template = self.get("tokenizer.chat_template", "")
        pad = self.get("tokenizer.ggml.padding_token_id")
        ends = [self.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        # A chat model's file may name the end of text as its only end; its template shows how it ends a turn.
        ends += [tokens.index(token) for token in _END_OF_TURN if token in template and token in tokens]
        if pad is not None and tokens[pad] in _END_OF_TEXT:
            ends.append(pad)
        unique = list(dict.fromkeys(end for end in ends if end is not None))
        found = {
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
            "pad_token_id": pad if pad is not None else (unique or [None])[0],
        }
        return {key: value for key, value in found.items() if value is not None}

    def _check(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{self.path} holds a model of architecture {self.architecture!r}; selfspec converts "
                f"{', '.join(ARCHITECTURES)} (llama covers Mistral and SmolLM2). Use a file of one of these."
            )
        if self.get("split.count", 0) > 1:
            raise ValueError(
                f"{self.path} is one part of a split model; merge the parts first (llama-gguf-split --merge)"
            )
        if self.get("{arch}.expert_count", 0):
            raise ValueError(f"{self.path} holds a mixture of experts, which is not supported; use a dense model")
        if self.get("tokenizer.ggml.model") not in ("gpt2", "llama") or not self.get("tokenizer.ggml.tokens"):
            raise ValueError(
                f"{self.path} holds no tokenizer of a kind selfspec rebuilds (gpt2, llama); use the model's own file"
            )
        if "token_embd.weight" not in self.tensors:
            raise ValueError(
                f"{self.path} holds no token embedding, so it is not a whole model; use the model's own file"
            )

    def _hf_config(self) -> PreTrainedConfig:
        kind, get = ARCHITECTURES[self.architecture], self.get
        try:
            hidden, heads, layers = (
                int(get(f"{{arch}}.{key}")) for key in ("embedding_length", "attention.head_count", "block_count")
            )
            head_dim = get("{arch}.attention.key_length") or get("{arch}.rope.dimension_count") or hidden // heads
            settings: dict[str, Any] = {
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "num_hidden_layers": layers,
                "head_dim": head_dim,
                "intermediate_size": int(get("{arch}.feed_forward_length")),
                "num_key_value_heads": int(get("{arch}.attention.head_count_kv", heads)),
                "rms_norm_eps": _decimal(get("{arch}.attention.layer_norm_rms_epsilon")),
                "max_position_embeddings": int(get("{arch}.context_length")),
            }
        except TypeError as error:
            raise ValueError(f"{self.path} lacks a number that describes the model, or gives one per layer") from error
        if (
            get("{arch}.rope.dimension_count", head_dim) != head_dim
            or get("{arch}.attention.value_length", head_dim) != head_dim
        ):
            raise ValueError(
                f"{self.path} rotates part of a head, or has values of another size; this is not supported"
            )
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
        return AutoConfig.for_model(kind, **settings)

    def _rope(self) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": _decimal(self.get("{arch}.rope.freq_base", 10000.0))}
        factors = self.tensors.get("rope_freqs.weight")
        scaling = self.get("{arch}.rope.scaling.type", "none")
        factor = self.get("{arch}.rope.scaling.factor", 1.0)
        if factors is not None:
            # Llama 3's scaling comes as the factors it results in; all published models differ in the largest alone.
            rope |= {
                "rope_type": "llama3",
                "factor": float(np.max(factors.data)),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
            rope["original_max_position_embeddings"] = self.get("{arch}.rope.scaling.original_context_length", 8192)
        elif scaling == "linear" and factor != 1.0:
            rope |= {"rope_type": "linear", "factor": _decimal(factor)}
        elif scaling == "yarn" and factor != 1.0:
            rope |= {"rope_type": "yarn", "factor": _decimal(factor)}
            rope["original_max_position_embeddings"] = self.get("{arch}.rope.scaling.original_context_length")
        elif scaling not in ("none", "linear", "yarn"):
            raise ValueError(
                f"{self.path} scales its rotary embedding by {scaling!r}; selfspec converts linear and yarn"
            )
        return rope

    def _check_rope_factors(self) -> None:
        factors = self.tensors.get("rope_freqs.weight")
        if factors is None:
            return
        (rope,) = self.config.ropes
        theta, dim = self.hf_config.rope_parameters["rope_theta"], self.config.head_dim
        expected = theta ** (-np.arange(0, dim, 2) / dim) / np.asarray(factors.data, dtype=np.float64)
        if not np.allclose(rope.inv_freq, expected, rtol=1e-3):
            raise ValueError(f"{self.path} scales its rotary embedding in a way selfspec does not know (rope_freqs)")

    def _gemma_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        layers, scale = settings["num_hidden_layers"], settings["head_dim"]
        if layers == 62:  # 27B alone scales its queries by the width per head; no key says so
            scale = settings["hidden_size"] // settings["num_attention_heads"]
        pattern = self.get("{arch}.attention.sliding_window_pattern", 6)
        if isinstance(pattern, int):  # every so many layers a global one; otherwise a list says which are local
            pattern = [(index + 1) % pattern != 0 for index in range(layers)]
        local = {"rope_type": "default", "rope_theta": _decimal(self.get("{arch}.rope.freq_base_swa", 10000.0))}
        return {
            "query_pre_attn_scalar": scale,
            "sliding_window": self.get("{arch}.attention.sliding_window"),
            "layer_types": ["sliding_attention" if local_layer else "full_attention" for local_layer in pattern],
            "rope_parameters": {"full_attention": settings["rope_parameters"], "sliding_attention": local},
        }

    def _interleaved_heads(self, part: Part) -> int | None:
        """How many heads of the tensor's rows llama.cpp interleaved for its rotary embedding, if it did."""
        match = re.search(r"\.([qk])_proj\.", part.name)
        if self.architecture != "llama" or match is None:
            return None
        return self.config.num_heads if match[1] == "q" else self.config.num_kv_heads


def _open(path: Path) -> tuple[dict[str, Any], list[Any]]:
    again = "Download it again."
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r}. {again}")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # numpy's errors about sizes, mostly: the library expects a whole file
        raise ValueError(f"{path} is truncated or damaged ({path.stat().st_size} bytes): {error}. {again}") from error
    return dict(reader.fields), reader.tensors


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """From llama.cpp's order of a head's rows, the two coordinates of a rotary pair side by side, to two halves."""
    pairs = rows.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def _decimal(value: float) -> float:
    """The short decimal a 32-bit number was written from: 1e-05 rather than 9.999999747378752e-06."""
    return float(f"{value:.6g}")
