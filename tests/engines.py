"""Prompts, statistics and profiles for tests of engines on the tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec import Engine, Stats
from selfspec.speculation.exit import Exit
from tests.profiles import choice_of, profile_of, random_exit

PROMPT = torch.tensor([[1, 5, 9, 33]])
SAMPLE = {"do_sample": True, "seed": 1}


def prompts(rows: int, length: int = 3) -> torch.Tensor:
    return torch.arange(3, 3 + rows * length).view(rows, length) % 97


def stats_of(engine: Engine, ids: torch.Tensor = PROMPT, **kwargs: Any) -> list[Stats]:
    return engine.generate(ids, **{"max_new_tokens": 4, "return_dict_in_generate": True, **kwargs}).stats


def save_profile(
    model: PreTrainedModel,
    folder: Path,
    block: bool = False,
    plan: str | dict[str, str] = "chain:3",
    rows: torch.Tensor | None = None,
    **entries: Any,
) -> Path:
    """A profile of two domains, 'chat' with an exit after 2 layers and 'code' with one after 3 layers."""
    decoder = Engine.from_model(model).model
    exits = [random_exit(decoder, 2) if block else Exit(decoder, 2), Exit(decoder, 3)]
    domains = {"chat": choice_of(2, plan), "code": choice_of(3, "tree:2,1")}
    profile_of(decoder, domains, **entries).save(folder, exits, {} if rows is None else {"chat": rows})
    return folder
