"""ModelConfig: the sizes and options of a decoder, read from a transformers config and checked.

Reads config fields and rope parameters; reads no weights and uses no device and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from selfspec.kernels.constants import ACTIVATIONS

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")

# The largest accepted sizes, several times those of any published model: a damaged number must be refused before lists
# of that length are built.
_LARGEST = {
    "num_hidden_layers": 2**10,
    "head_dim": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**28,
}


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: inverse frequencies (radians per token) and the factor on its cosines and sines."""

    inv_freq: tuple[float, ...]
    scaling: float


@dataclass(frozen=True)
class LayerConfig:
    """The settings that may differ from layer to layer."""

    window: int | None  # a query at position t attends to positions above t - window; None: to all
    rope: int  # index into ModelConfig.ropes


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer of one of the supported families."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    context: int  # most tokens of a sequence, prompt and new tokens together
    tied_head: bool
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0  # added to norm weights: gemma stores them minus 1
    sandwich_norms: bool = False  # norms the output of attention and MLP as well as their input (gemma)
    embedding_scale: float | None = None  # factor on embeddings; None: 1
    logit_softcap: float | None = None  # logits become cap * tanh(logits / cap); None: unchanged

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads evenly: "
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embeddings need an even number of at least 2")
        _check_finite("rms_norm_eps", self.norm_eps)
        _check_finite("the attention scale", self.attention_scale)
        if self.logit_softcap is not None:
            _check_finite("final_logit_softcapping", self.logit_softcap)
        if self.activation not in ACTIVATIONS:
            supported = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation {self.activation!r} is not supported; selfspec supports {supported}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_hf(cls, hf: Any) -> ModelConfig:
        """Reads a transformers config; raises ValueError for a model that the decoder does not support."""
        check_supported(hf)
        kind = hf.model_type
        gemma = kind == "gemma3_text"
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        layers, ropes = _layers_and_ropes(hf)
        attention_bias = kind != "mistral" and bool(getattr(hf, "attention_bias", False))
        return cls(
            model_type=kind,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_heads=hf.num_attention_heads,
            num_kv_heads=getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads,
            head_dim=head_dim,
            norm_eps=hf.rms_norm_eps,
            activation=hf.hidden_activation if gemma else hf.hidden_act,
            context=hf.max_position_embeddings,
            tied_head=bool(hf.tie_word_embeddings),
            layers=layers,
            ropes=ropes,
            attention_scale=(hf.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
            qkv_bias=kind == "qwen2" or attention_bias,
            out_bias=kind != "qwen2" and attention_bias,
            mlp_bias=kind == "llama" and bool(getattr(hf, "mlp_bias", False)),
            qk_norm=kind in ("qwen3", "gemma3_text"),
            norm_offset=1.0 if gemma else 0.0,
            sandwich_norms=gemma,
            embedding_scale=hf.hidden_size**0.5 if gemma else None,
            # transformers ignores the entry for llama, mistral, qwen2 and qwen3.
            logit_softcap=hf.final_logit_softcapping if gemma else None,
        )


def check_supported(hf: Any) -> None:
    """Raises ValueError for an unsupported model type, quantized weights, bidirectional attention or a bad size.

    `hf` is a transformers config, or a namespace of the entries of config.json.
    """
    if hf.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model type {hf.model_type!r} is not supported; selfspec decodes {', '.join(SUPPORTED_MODEL_TYPES)}. "
            "Use a checkpoint of one of these families."
        )
    quantization = getattr(hf, "quantization_config", None)
    if quantization:
        as_dict = quantization if isinstance(quantization, dict) else vars(quantization)
        method = as_dict.get("quant_method", "unknown method")
        raise ValueError(
            f"this model is quantized ({getattr(method, 'value', method)}); a live model must have plain 16- or 32-bit "
            "weights. Load its folder with Engine.from_pretrained, or use the unquantized checkpoint."
        )
    if getattr(hf, "use_bidirectional_attention", False):
        raise ValueError("this checkpoint attends in both directions and cannot generate; use a causal checkpoint")
    for name, largest in _LARGEST.items():
        size = getattr(hf, name, None)
        if size is not None and (type(size) is not int or not 1 <= size <= largest):
            raise ValueError(f"{name} is {str(size)[:40]}; it must be an integer from 1 to {largest}")


def _check_finite(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"{name} is {value}; it must be a finite number above 0")


def _layers_and_ropes(hf: Any) -> tuple[tuple[LayerConfig, ...], tuple[Rope, ...]]:
    """Returns one LayerConfig per layer, and the rotary embeddings that they refer to by index."""
    window = getattr(hf, "sliding_window", None)
    if hf.model_type == "llama":
        types = ["full_attention"] * hf.num_hidden_layers
    elif hf.model_type == "mistral":
        types = ["sliding_attention" if window else "full_attention"] * hf.num_hidden_layers
    else:
        types = list(hf.layer_types)
    longest = _LARGEST["max_position_embeddings"]
    if "sliding_attention" in types and (type(window) is not int or not 1 <= window <= longest):
        raise ValueError(f"sliding_window is {window}; it must be a number of tokens from 1 to {longest}")
    if unknown := {*types} - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer type {unknown.pop()!r} is not supported; use full_attention or sliding_attention")
    if len(types) != hf.num_hidden_layers:
        raise ValueError(f"layer_types has {len(types)} entries; it must have {hf.num_hidden_layers}, one per layer")
    per_type_rope = "full_attention" in hf.rope_parameters or "sliding_attention" in hf.rope_parameters
    rope_keys: list[str | None] = sorted(set(types)) if per_type_rope else [None]  # type: ignore[assignment]
    ropes = tuple(_rope(hf, key) for key in rope_keys)
    layers = tuple(
        LayerConfig(
            window=window if kind == "sliding_attention" else None,
            rope=rope_keys.index(kind) if per_type_rope else 0,
        )
        for kind in types
    )
    return layers, ropes


def _rope(hf: Any, layer_type: str | None) -> Rope:
    """Returns the rotary embedding of one type of layer; None: of all layers."""
    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; selfspec supports {', '.join(SUPPORTED_ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            "a partial_rotary_factor other than 1 is not supported: use a checkpoint that rotates whole heads"
        )
    if kind == "default":
        dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
        inv_freq, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        # "dynamic" scales only past the original context, and ModelConfig.context is at most that.
        where = {} if layer_type is None else {"layer_type": layer_type}
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), **where)
    if not all(0 <= value < inf for value in (*inv_freq.tolist(), float(scaling))):
        raise ValueError(f"the rope parameters {parameters} do not give finite frequencies; use the original config")
    return Rope(tuple(inv_freq.tolist()), float(scaling))
