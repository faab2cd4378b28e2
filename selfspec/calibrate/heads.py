"""The trimmed head: which rows of the head a draft looks at, by how often the model uses their tokens."""

from __future__ import annotations

import torch

from selfspec.calibrate.corpus import Corpus

_WHOLE_BELOW = 2048  # a vocabulary this small is not worth trimming
_PROMPT_ROWS = 512  # left for the tokens of a request's own prompt
_ELSEWHERE = 0.1  # what a token's use in other domains counts for in this one


def largest_head(vocabulary: int) -> int:
    """The most rows a trimmed head has: with a prompt's own tokens, a third of the vocabulary."""
    return vocabulary if vocabulary < _WHOLE_BELOW else vocabulary // 3 - _PROMPT_ROWS


def token_uses(corpus: Corpus, domains: int, vocabulary: int) -> torch.Tensor:
    """How often the model itself wrote each token in each domain: [domains, vocabulary] float64."""
    written = corpus.predicts[:, :-1]
    tokens, numbers = corpus.tokens[:, 1:][written], corpus.domains[:, :-1][written]
    uses = torch.bincount(numbers * vocabulary + tokens, minlength=domains * vocabulary)
    return uses.view(domains, vocabulary).double()


def ordered_rows(uses: torch.Tensor) -> torch.Tensor:
    """For each domain, tokens by use there, then elsewhere; of unused ones the lower ids first: tokenizers give them to
    what is frequent. [domains, vocabulary]"""
    elsewhere = _ELSEWHERE * uses.sum(0, keepdim=True)
    never = -torch.arange(uses.shape[1], dtype=torch.float64) / (uses.shape[1] * 1e3)
    return (uses + elsewhere + never).argsort(dim=1, descending=True, stable=True)


def head_of(order: torch.Tensor, size: int) -> torch.Tensor:
    """The first tokens of an order as the rows of a head: ascending ids."""
    return order[:size].sort().values
