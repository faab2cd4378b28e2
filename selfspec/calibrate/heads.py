"""The trimmed LM head of drafts: the rows of the tokens that the model uses most."""

from __future__ import annotations

import torch

from selfspec.calibrate.corpus import Corpus

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
