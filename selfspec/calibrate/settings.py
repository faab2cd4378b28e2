"""The settings of a calibration, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OBJECTIVES = {"throughput": "the most tokens per second", "accept": "the highest accept rate"}
DEFAULT_MINUTES = 7.0
# Shares of --minutes; the rest is for loading, reading, measuring and timing.
WRITING_SHARE, TRAINING_SHARE, TRYING_SHARE = 0.2, 0.52, 0.1


@dataclass(frozen=True)
class CalibrationSettings:
    """The settings of a calibration, as the command line gives them."""

    model: str = "demo"
    domains: tuple[str, ...] = ()  # NAME=PROMPTS.jsonl; (): the shipped ones
    out: Path | None = None  # None: the folder that profile="auto" searches
    exits: tuple[int, ...] = ()  # number of layers below each; (): one exit, after the first layer
    minutes: float = DEFAULT_MINUTES
    objective: str = "throughput"
    train: bool = True
    resume: bool = False  # continue the stopped run in the profile's folder
    restart: bool = False  # drop the stopped run in the profile's folder
    text: tuple[Path, ...] = ()  # files to train on besides
    tokens: int | None = None  # of text to write; None: a share of `minutes`
    steps: int | None = None  # of training; None: a share of `minutes`
    memory_gb: float | None = None  # of the GPU, 10^9 bytes; None: all that is free
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None  # "int8" or "int4": of Engine.from_pretrained
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("minutes", "tokens", "steps", "memory_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if self.resume and self.restart:
            raise ValueError("--resume continues a stopped run and --restart drops it: pass one of them")
        if not 0 <= self.seed < 2**62:  # measuring adds to it, and seeds of requests have 63 bits
            raise ValueError(f"--seed must be from 0 to 2**62 - 1, got {self.seed}")
        for path in self.text:
            if not path.is_file():
                raise ValueError(f"--text {path}: there is no such file; correct the path")
            try:
                path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--text {path} cannot be read as UTF-8 text ({error}); convert it first") from error

    @property
    def loading(self) -> str:
        """Arguments of Engine.from_pretrained, besides the model, that give the weights of this run; "" for none."""
        native = ', dtype="native"' if self.dtype == "native" else ""
        return native + (f', quantize="{self.quantize}"' if self.quantize else "")

    def exit_layers(self, num_layers: int) -> list[int]:
        """Numbers of layers below the exits to train, in ascending order."""
        highest = num_layers // 2
        if not highest:
            raise ValueError("this model has 1 layer, and an exit needs one below it and one above: use a deeper model")
        for layer in self.exits:
            if not 0 <= layer <= highest:
                raise ValueError(
                    f"--exits {layer} is not possible: this model has {num_layers} layers, and exits are trained in "
                    f"its lower half, after 0 (the embedding) to {highest} layers"
                )
        return sorted(set(self.exits)) or [1]
