"""What a calibration is asked to do, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OBJECTIVES = ("throughput", "accept")
DEFAULT_MINUTES = 7.0
# Shares of the time; the rest is for loading, measuring and choosing.
WRITING_SHARE, TRAINING_SHARE, TRYING_SHARE = 0.2, 0.52, 0.1


@dataclass(frozen=True)
class Settings:
    """A calibration as the user wants it."""

    model: str = "demo"
    domains: tuple[str, ...] = ()  # NAME=PROMPTS.jsonl; none: the shipped ones
    out: Path | None = None  # None: where profile="auto" looks
    exits: tuple[int, ...] = ()  # none: three shallow layers
    minutes: float = DEFAULT_MINUTES
    objective: str = "throughput"
    train: bool = True
    resume: bool = False  # continue the stopped run in the folder
    restart: bool = False  # drop it
    text: tuple[Path, ...] = ()
    tokens: int | None = None  # exact amounts instead of minutes
    steps: int | None = None
    memory_gb: float | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective {self.objective!r} is unknown; choose from {', '.join(OBJECTIVES)}")
        for name in ("minutes", "tokens", "steps", "memory_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.resume and self.restart:
            raise ValueError("--resume continues a stopped run and --restart drops it: pass one of them")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or above, got {self.seed}")
        for path in self.text:
            if not path.is_file():
                raise ValueError(f"--text {path}: there is no such file")

    def exit_layers(self, num_layers: int) -> list[int]:
        """The layers after which exits are trained: those asked for, else three in a row, the deepest about L/8."""
        highest = num_layers // 2
        if not highest:
            raise ValueError("this model has 1 layer: an exit needs at least one below it and one above")
        if not self.exits:
            deepest = min(highest, max(3, num_layers // 8))
            return list(range(max(1, deepest - 2), deepest + 1))
        for layer in self.exits:
            if not 1 <= layer <= highest:
                raise ValueError(
                    f"an exit after layer {layer} cannot be trained: this model has {num_layers} layers, and exits are "
                    f"trained in its lower half, after layer 1 to {highest}"
                )
        return sorted(set(self.exits))
