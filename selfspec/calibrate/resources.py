"""Sizes that fit in memory: rows of a training step, and where the model's hidden states are kept."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from selfspec.calibrate.training import Recipe
from selfspec.memory import free_device_bytes, free_host_bytes
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import FEATURE_STATES

_LEAST_ROWS = 4  # of a training step
_TRAINING_SHARE = 0.6  # of the free device memory may be used by training; the rest is left for the allocator
_HOST_SHARE = 0.4  # of the free host memory may hold hidden states


@dataclass(frozen=True)
class Resources:
    """Sizes that fit this machine."""

    free_bytes: int  # on the device, beside the weights and the KV cache
    training_rows: int  # of a training step
    states_on: str  # device that keeps the model's hidden states: "cuda" or "cpu"
    most_tokens: int  # of training text, padding included: as many as there is memory for their hidden states

    def describe(self) -> str:
        place = "on the device" if self.states_on != "cpu" else "in host memory"
        return (
            f"{self.free_bytes / 1e9:.1f} GB free: trains on {self.training_rows} rows a step, keeps the model's "
            f"hidden states {place} (at most {self.most_tokens / 1e6:.1f} M tokens)"
        )


def fit(model: Decoder, recipe: Recipe, head_rows: int) -> Resources:
    """Sizes for training an exit of this model. Raises ValueError where not even the smallest fit."""
    free, rows = free_device_bytes(model.device), recipe.rows
    while rows >= _LEAST_ROWS and _training_bytes(model, recipe, head_rows, rows) > _TRAINING_SHARE * free:
        rows //= 2
    if rows < _LEAST_ROWS:
        raise ValueError(
            f"{model.device} has {free / 1e9:.2f} GB of free memory, too little to train exits of this model: free "
            "some memory, or use a smaller model"
        )
    spare = free - _training_bytes(model, recipe, head_rows, rows)
    on_device = model.device.type == "cpu" or spare > 0.5 * free
    for_states = _TRAINING_SHARE * spare if on_device else _HOST_SHARE * free_host_bytes()
    tokens = for_states / (FEATURE_STATES * model.config.hidden_size * model.dtype.itemsize)
    return Resources(free, rows, model.device.type if on_device else "cpu", max(int(tokens), recipe.length * rows))


def _training_bytes(model: Decoder, recipe: Recipe, head_rows: int, rows: int) -> int:
    """About what an exit needs in training: its optimizer, a step's activations, and its logits."""
    config = model.config
    parameters = sum(prod(tensor.shape) for tensor in model.layers[0].tensors().values())
    parameters += 3 * config.hidden_size**2
    text = rows * recipe.length * (12 * config.hidden_size + 4 * config.num_kv_heads * config.head_dim)
    wide = 24 * config.hidden_size + 8 * config.intermediate_size
    drafts = rows * recipe.roots * recipe.depths * wide
    attention = rows * recipe.roots * recipe.depths * config.num_heads * (recipe.length + 3 * recipe.roots)
    logits = 4 * rows * recipe.roots * head_rows  # float32
    return 24 * parameters + (text + drafts + attention) * model.dtype.itemsize + 4 * logits
