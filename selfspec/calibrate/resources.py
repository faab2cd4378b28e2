"""How much fits in memory: rows written and trained at once, and where the teacher's states are kept."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from selfspec.calibrate.training import Recipe
from selfspec.memory import free_device_bytes, free_host_bytes
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import FEATURE_STATES

_MOST_WRITTEN, _MOST_TRAINED = 2048, 32  # rows at once; more gain nothing
_HOST_SHARE = 0.4  # of the free host memory that the teacher's states may take


@dataclass(frozen=True)
class Resources:
    """Sizes that fit this machine."""

    room: int  # bytes free on the device beside the weights
    writing_rows: int
    training_rows: int
    exits_together: int
    states_on: str  # where the teacher's states are kept: "cuda" or "cpu"
    most_tokens: int  # of training text

    def describe(self) -> str:
        place = "on the device" if self.states_on != "cpu" else "in host memory"
        return (
            f"{self.room / 1e9:.1f} GB free: writes {self.writing_rows} rows at once, trains "
            f"{f'{self.exits_together} exits together' if self.exits_together > 1 else 'one exit'} on "
            f"{self.training_rows} rows a step, keeps the "
            f"model's states {place} (at most {self.most_tokens / 1e6:.1f} M tokens)"
        )


def fit(model: Decoder, exits: int, recipe: Recipe, head_rows: int) -> Resources:
    """Sizes for training `exits` exits of this model; ValueError where not even the smallest fit."""
    room = free_device_bytes(model.device)
    most = _MOST_WRITTEN if model.device.type == "cuda" else 64
    writing = min(most, int(0.6 * room) // _written_row_bytes(model, recipe))
    per_token = FEATURE_STATES * model.config.hidden_size * model.dtype.itemsize
    together, rows = _training_fit(model, exits, recipe, head_rows, room)
    if writing < 8 or not rows:
        raise ValueError(
            f"only {room / 1e9:.2f} GB are free on {model.device}, too little to calibrate a model of this size: free "
            "some memory, or use a smaller model"
        )
    spare = room - together * _trained_bytes(model, recipe, head_rows, rows)
    on_device = model.device.type == "cpu" or spare > 0.5 * room
    tokens = (0.6 * spare if on_device else _HOST_SHARE * free_host_bytes()) / per_token
    return Resources(
        room,
        writing - writing % 8,
        rows,
        together,
        model.device.type if on_device else "cpu",
        max(int(tokens), recipe.length * rows),
    )


def _training_fit(model: Decoder, exits: int, recipe: Recipe, head_rows: int, room: int) -> tuple[int, int]:
    """How many exits can be trained together, and on how many rows: fewer rows before fewer exits."""
    for together in range(exits, 0, -1):
        rows = min(_MOST_TRAINED, recipe.rows)
        while rows >= 4:
            if together * _trained_bytes(model, recipe, head_rows, rows) <= 0.6 * room:
                return ceil(exits / ceil(exits / together)), rows
            rows //= 2
    return 0, 0


def _written_row_bytes(model: Decoder, recipe: Recipe) -> int:
    config = model.config
    kept = 2 * config.num_layers * recipe.length * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    return kept + 14 * 4 * config.vocab_size  # and logits: a pass holds several copies, and so does its graph


def _trained_bytes(model: Decoder, recipe: Recipe, head_rows: int, rows: int) -> int:
    """About what one exit needs in training: its optimizer, a step's activations, and logits in passing."""
    config = model.config
    parameters = sum(tensor.numel() for tensor in vars(model.layers[0]).values() if tensor is not None)
    parameters += 3 * config.hidden_size**2
    text = rows * recipe.length * (12 * config.hidden_size + 4 * config.num_kv_heads * config.head_dim)
    wide = 24 * config.hidden_size + 8 * config.intermediate_size
    drafts = rows * recipe.roots * recipe.depths * wide
    attention = rows * recipe.roots * recipe.depths * config.num_heads * (recipe.length + 3 * recipe.roots)
    logits = 4 * rows * recipe.roots * head_rows  # float32, in passing
    return 24 * parameters + (text + drafts + attention) * model.dtype.itemsize + 4 * logits
