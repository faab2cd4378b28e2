"""Profiles for tests: exits that look trained, heads that are trimmed, and what goes into a profile's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import Profile
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.models.decoder import Decoder, Layer
from selfspec.profiles.profile import DomainChoice, ModelIdentity, PlanChoice
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock
from tests.tiny import VOCABULARY


def random_exit(model: Decoder, layer: int, seed: int = 3, scale: float = 0.05) -> Exit:
    """An exit whose block is the model's next layer plus noise, with random affine map, recall and norm."""
    generator, hidden = torch.Generator().manual_seed(seed), model.config.hidden_size

    def noise(*shape: int) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64).to(model.device, model.dtype)

    weights = model.layers[layer].tensors()
    copied = Layer.of({name: tensor + noise(*tensor.shape) for name, tensor in weights.items()})
    recall = noise(hidden, FEATURE_STATES * hidden)
    block = ExitBlock(copied, noise(hidden, hidden), noise(hidden), recall)
    return Exit(model, layer, model.norm * 1.1, block)


def random_rows(count: int, seed: int = 0) -> torch.Tensor:
    """Token ids of a trimmed head."""
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def choice_of(exit_layer: int, plans: str | dict[str, str], **entries: Any) -> DomainChoice:
    """A domain with one plan for all batches, or plans by batch; equal at every temperature."""
    by_batch = plans if isinstance(plans, dict) else dict.fromkeys(BATCHES, plans)
    of_batch = {batch: PlanChoice(plan=plan) for batch, plan in by_batch.items()}
    choice = DomainChoice(exit_layer=exit_layer, plans=dict.fromkeys(TEMPERATURES, of_batch))
    return choice.model_copy(update=entries)


def profile_of(model: Decoder, domains: dict[str, DomainChoice], **entries: Any) -> Profile:
    return Profile(model=ModelIdentity.of(model), domains=domains, **entries)


def edit_profile(folder: Path, /, **entries: Any) -> None:
    """Replaces entries of a saved profile.json."""
    path = folder / "profile.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def watch_vocabularies(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Records the head rows of every later draft."""
    seen: set[int] = set()
    logits = Exit.logits

    def remember(self: Exit, read: torch.Tensor) -> torch.Tensor:
        values = logits(self, read)
        seen.add(values.shape[-1])
        return values

    monkeypatch.setattr(Exit, "logits", remember)
    return seen
