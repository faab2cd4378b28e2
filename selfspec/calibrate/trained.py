"""Trained exits, and the rows of the LM head that their drafts are chosen from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.calibrate import heads
from selfspec.models.decoder import Decoder
from selfspec.profiles.profile import Profile
from selfspec.speculation.exit import Exit


@dataclass(frozen=True)
class Trained:
    """The exits of a calibration, trained in this run or before."""

    exits: list[Exit]
    order: torch.Tensor  # [domains, vocabulary] token ids, the most used first
    amounts: dict[str, float]  # tokens and steps of their training

    @classmethod
    def from_profile(cls, profile: Profile, model: Decoder, layers: list[int], domains: list[str]) -> Trained:
        """A profile's exits. A domain that the profile lacks gets the head rows of all its domains together."""
        rows = {name: profile.head_rows(model, name) for name in profile.domains}
        uses = torch.zeros(len(domains), model.config.vocab_size, dtype=torch.float64)
        for index, domain in enumerate(domains):
            for own in [rows[domain]] if domain in rows else rows.values():
                uses[index, slice(None) if own is None else own.cpu()] += 1
        amounts = {name: value for name, value in profile.trained.items() if name in ("tokens", "steps")}
        return cls([profile.exit(model, layer) for layer in layers], heads.ordered_rows(uses), amounts)

    def head_rows(self, domain: int, size: int) -> torch.Tensor | None:
        """The `size` most used rows of a domain, ascending; None: all rows."""
        if size >= self.order.shape[1]:
            return None
        return heads.head_of(self.order[domain], size).to(self.exits[0].model.device)
