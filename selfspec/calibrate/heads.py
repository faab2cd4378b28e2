"""Trained exits, and the trimmed LM head of their drafts: the rows of the tokens that the model uses most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.calibrate.corpus import Corpus
from selfspec.models.decoder import Decoder
from selfspec.profiles.profile import Profile
from selfspec.speculation.exit import Exit

_WHOLE_BELOW = 2048  # tokens: a smaller vocabulary is not trimmed
_PROMPT_ROWS = 512  # left for the tokens of a request's prompt
_OTHER_DOMAINS = 0.1  # weight of a token's use in all domains, beside its use in the domain itself


def largest_head(vocabulary: int) -> int:
    """The most rows of a trimmed head: with the tokens of a prompt, a third of the vocabulary."""
    return vocabulary if vocabulary < _WHOLE_BELOW else vocabulary // 3 - _PROMPT_ROWS


def head_sizes(vocabulary: int) -> list[int]:
    """The sizes that are compared, in rows, largest first."""
    largest = largest_head(vocabulary)
    return [largest] if largest == vocabulary else [largest, largest // 2, largest // 4]


def token_uses(corpus: Corpus, domains: int, vocabulary: int) -> torch.Tensor:
    """How often the model chose each token in each domain: [domains, vocabulary] float64."""
    written = corpus.predicts[:, :-1]
    tokens, numbers = corpus.tokens[:, 1:][written], corpus.domains[:, :-1][written]
    uses = torch.bincount(numbers * vocabulary + tokens, minlength=domains * vocabulary)
    return uses.view(domains, vocabulary).double()


def ordered_rows(uses: torch.Tensor) -> torch.Tensor:
    """Orders the tokens of each domain by use, [domains, vocabulary]: in the domain first, then in all domains. Of
    unused tokens the lower ids come first, since tokenizers give them to frequent tokens."""
    elsewhere = _OTHER_DOMAINS * uses.sum(0, keepdim=True)
    never = -torch.arange(uses.shape[1], dtype=torch.float64) / (uses.shape[1] * 1e3)
    return (uses + elsewhere + never).argsort(dim=1, descending=True, stable=True)


def head_of(order: torch.Tensor, size: int) -> torch.Tensor:
    """The first `size` tokens of an order, as ascending ids."""
    return order[:size].sort().values


@dataclass(frozen=True)
class Trained:
    """The exits of a calibration, trained in this run or before."""

    exits: list[Exit]
    order: torch.Tensor  # [domains, vocabulary] token ids, the most used first
    amounts: dict[str, float]  # tokens and steps of their training

    @classmethod
    def from_profile(cls, profile: Profile, model: Decoder, layers: list[int], domains: list[str]) -> Trained:
        """A profile's exits. A domain that the profile lacks gets the head rows of all its domains together."""
        rows = {name: profile.exits_file.head_rows(model, name) for name in profile.domains}
        uses = torch.zeros(len(domains), model.config.vocab_size, dtype=torch.float64)
        for index, domain in enumerate(domains):
            for own in [rows[domain]] if domain in rows else rows.values():
                uses[index, slice(None) if own is None else own.cpu()] += 1
        amounts = {name: value for name, value in profile.trained.items() if name in ("tokens", "steps")}
        return cls([profile.exits_file.exit(model, layer) for layer in layers], ordered_rows(uses), amounts)

    def head_rows(self, domain: int, size: int) -> torch.Tensor | None:
        """The `size` most used rows of a domain, ascending; None: all rows."""
        if size >= self.order.shape[1]:
            return None
        return head_of(self.order[domain], size).to(self.exits[0].model.device)
