"""Tiny random Hugging Face models of every supported family, for tests.

Weights are so large that a wrong mask, position or norm changes the largest logit, norms and biases are random, and
sliding windows are shorter than the prompts of the tests.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]
VOCABULARY = 101  # prime, so that no code can rely on a multiple of a tile size

_CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},  # head_dim * heads differs from the hidden size
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """A config of the family with 4 layers, hidden size 32 and a vocabulary of 101; `overrides` are config fields."""
    settings = {**_SHARED, **_OF_FAMILY[family], **overrides}
    layers = settings["num_hidden_layers"]
    if "layer_types" in settings and "layer_types" not in overrides:
        settings["layer_types"] = (settings["layer_types"] * layers)[:layers]
    return _CLASSES[family][0](**settings)


def tiny_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in eval mode; the same arguments give the same weights."""
    config = tiny_config(family, **overrides)
    model: Any = _CLASSES[family][1](config)
    model.to(torch.float64)
    generator = torch.Generator().manual_seed(seed)
    offset = 1.0 if family == "gemma3_text" else 0.0  # gemma stores its norm weights minus 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name == "model.norm.weight":
                # Random signs: with a tied head the input token would otherwise get the largest logit.
                parameter.copy_(noise.sign() + 0.2 * noise - offset)
            elif name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise - offset)
            else:
                parameter.copy_(noise * _std(name, parameter))
    return model.to(dtype).eval()


def _std(name: str, parameter: torch.Tensor) -> float:
    if name.endswith("bias"):
        return 0.3
    if "embed_tokens" in name or "lm_head" in name:
        return 0.5
    return 1.3 * parameter.shape[-1] ** -0.5
