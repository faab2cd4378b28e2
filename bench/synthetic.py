"""Models of a named shape with random weights: they measure speed where real weights are not at hand.

Layers from the exit on can be damped, so that the exit agrees with the whole model at a chosen rate, as a trained one
would. Tokens are nonsense; times, bytes and exactness are not.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from selfspec.config import ModelConfig
from selfspec.model import Decoder, model_parts

SHAPES = {
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    },
    "llama-1.5b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 32768,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def config_of(shape: str) -> ModelConfig:
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} is not known: there are {', '.join(SHAPES)}")
    return ModelConfig.from_hf(LlamaConfig(**SHAPES[shape]))  # type: ignore[arg-type]


@torch.no_grad()
def synthetic(
    shape: str, device: str, dtype: torch.dtype, exit_layer: int | None = None, damping: float = 1.0, seed: int = 0
) -> Decoder:
    """A model of this shape; what its layers from `exit_layer` on add is multiplied by `damping`."""
    config = config_of(shape)
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, parts in model_parts(config).items():
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1:]
        if not columns:
            tensors[name] = torch.ones(rows, device=device, dtype=dtype)
            continue
        weight = torch.empty(rows, *columns, device=device, dtype=dtype)
        weight.normal_(0, _std(name, columns[0]), generator=generator)
        if exit_layer is not None and name.endswith((".out", ".down")) and int(name.split(".")[1]) >= exit_layer:
            weight *= damping
        tensors[name] = weight
    return Decoder(config, tensors)


def _std(name: str, inputs: int) -> float:
    """States of about unit size after the first layers, logits spread widely enough to have one best token."""
    if name in ("embedding", "head"):
        return 0.05 if name == "head" else 1.0
    return inputs**-0.5
