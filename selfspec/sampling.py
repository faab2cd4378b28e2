"""Drawing tokens: logits processing, the target's choice, a draft's ranked children, and classical rejection.

The choice at a position is argmax(processed logits + Gumbel noise), the noise a pure function of (seed, copy,
position, token): whoever computes the logits, and in whatever tree, gets the same token. Greedy is the same without
noise. Ties go to the lower token id, everywhere. Works on rows of logits; trees and caches are unknown here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.kernels.philox import gumbel, uniform, uniform_vocabulary

# Noise streams: coupled drafts share the target's; rejection sampling must keep its three uses apart.
TARGET, CHILDREN, ACCEPT = 0, 1, 2

_LIMITS: dict[str, tuple[type, Callable[[float], bool], str]] = {
    "temperature": (float, lambda x: x > 0, "a number above 0; for greedy decoding pass do_sample=False"),
    "top_k": (int, lambda x: x >= 0, "an integer of at least 0; 0 switches it off"),
    "top_p": (float, lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "min_p": (float, lambda x: 0 <= x <= 1, "a number between 0 and 1"),
    "repetition_penalty": (float, lambda x: x > 0, "a number above 0; 1 switches it off"),
    "min_new_tokens": (int, lambda x: x >= 0, "an integer of at least 0"),
}


@dataclass(frozen=True)
class Sampling:
    """How a request wants its tokens drawn; checked when built."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, (kind, fits, wanted) in _LIMITS.items():
            value: Any = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or (kind is int and not isinstance(value, int)) or not fits(value):
                raise ValueError(f"{name}={value!r} is not possible: it must be {wanted}")


@dataclass(frozen=True)
class NoiseKey:
    """Which noise each of R rows draws with. Positions count real tokens; a row's place in the batch never enters."""

    seeds: torch.Tensor  # [R] int64
    copies: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64: the position of the token being drawn

    def at(self, rows: torch.Tensor) -> NoiseKey:
        return NoiseKey(self.seeds[rows], self.copies[rows], self.positions[rows])


def penalise(
    logits: torch.Tensor,  # [R, V]
    sampling: Sampling,
    seen: torch.Tensor | None,  # [R, V] bool: tokens already in the row's text; None where no penalty asks for it
    new_tokens: Sequence[int],  # per row, tokens generated so far
    token_ids: torch.Tensor | None = None,  # [V] where the columns are not simply the whole vocabulary
) -> torch.Tensor:
    """Repetition penalty, then no end token before `min_new_tokens`."""
    if sampling.repetition_penalty != 1 and seen is not None:
        factor = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)
    early = [row for row, count in enumerate(new_tokens) if count < sampling.min_new_tokens]
    if early and sampling.eos_token_ids:
        ends = torch.tensor(sampling.eos_token_ids, device=logits.device)
        ids = torch.arange(logits.shape[-1], device=logits.device) if token_ids is None else token_ids
        columns = torch.isin(ids, ends).nonzero().squeeze(1)  # an end id outside the vocabulary is none
        logits = logits.clone()
        logits[torch.tensor(early, device=logits.device)[:, None], columns] = -math.inf
    return logits


def warp(logits: torch.Tensor, sampling: Sampling, cut: bool = True) -> torch.Tensor:
    """Temperature and, if `cut`, top-k, top-p and min-p: removed tokens become -inf. Identity when greedy."""
    if not sampling.do_sample:
        return logits
    values = logits / sampling.temperature
    if not cut:
        return values
    if sampling.top_k or sampling.top_p < 1:
        values = _keep_top(values, sampling.top_k or values.shape[-1], sampling.top_p)
    if sampling.min_p > 0:
        values = values.masked_fill(values < values.amax(-1, keepdim=True) + math.log(sampling.min_p), -math.inf)
    return values


def _keep_top(values: torch.Tensor, k: int, top_p: float) -> torch.Tensor:
    order = ranked(values, min(k, values.shape[-1]))  # [R, k]
    best = values.gather(-1, order)
    if top_p < 1:
        probabilities = best.softmax(-1)
        better = probabilities.cumsum(-1) - probabilities  # mass of the tokens ranked above
        better[..., 0] = 0  # whatever rounding says, the best token stays
        best = best.masked_fill(better >= top_p, -math.inf)
    return torch.full_like(values, -math.inf).scatter(-1, order, best)


def ranked(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest values of each row, largest first, ties by lower index: [..., k]."""
    bits = (values.float() + 0.0).view(torch.int32)  # adding zero makes -0.0 and 0.0 equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as signed integers, in the order of the floats
    last = values.shape[-1] - 1
    columns = torch.arange(values.shape[-1], device=values.device)
    keys = (ordered.long() << 32) | (last - columns)
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def perturbed(
    values: torch.Tensor, key: NoiseKey, stream: int = TARGET, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Values [R, V] plus Gumbel noise; columns are tokens 0..V-1 unless `token_ids` [V] says otherwise."""
    kept_rows, kept_columns = (values > -math.inf).nonzero(as_tuple=True)
    if token_ids is None and 4 * len(kept_rows) > values.numel():
        return values + gumbel(uniform_vocabulary(key.seeds, key.copies, key.positions, values.shape[-1], stream))
    tokens = kept_columns if token_ids is None else token_ids[kept_columns]
    at = key.at(kept_rows)
    noise = gumbel(uniform(at.seeds, at.copies, at.positions, tokens[:, None], stream)).squeeze(1)
    noisy = torch.full_like(values, -math.inf)
    noisy[kept_rows, kept_columns] = values[kept_rows, kept_columns] + noise
    return noisy


def choose(values: torch.Tensor, sampling: Sampling, key: NoiseKey) -> torch.Tensor:
    """The target's choice for each row of processed logits [R, V]: token ids [R]."""
    noisy = perturbed(values, key) if sampling.do_sample else values
    return noisy.argmax(-1)


def reject_or_accept(
    p: torch.Tensor,  # [R, V] the target's probabilities
    draft: torch.Tensor,  # [R, V] the draft's processed logits, -inf for what it cannot draft
    ranked_tokens: torch.Tensor,  # [R, K] drawn from the draft one after the other, none twice
    offered: Sequence[bool],  # K: which of them are nodes of the tree
    key: NoiseKey,
) -> torch.Tensor:  # [R] tokens
    """The classical rule: try the offered tokens in turn, else draw from what is left of p."""
    chosen = torch.full_like(ranked_tokens[:, 0], -1)
    for is_node, tokens in zip(offered, ranked_tokens.T[..., None], strict=True):  # tokens [R, 1]
        if is_node:
            # From logits anew for every rank: probabilities of an overconfident draft underflow to zero. Where the
            # draft has run out of tokens, what ranks from here on was not drawn from it and is not tried.
            drawn = draft.gather(1, tokens) > -math.inf
            q = draft.masked_fill(~drawn, 0).softmax(-1)
            u = uniform(key.seeds, key.copies, key.positions, tokens, ACCEPT)
            open_rows = drawn & (chosen < 0)[:, None]
            accepted = open_rows & (u * q.gather(1, tokens) < p.gather(1, tokens))
            chosen = torch.where(accepted, tokens, chosen[:, None])[:, 0]
            left = (p - q).clamp(min=0)
            total = left.sum(-1, keepdim=True)  # zero only after a refusal that rounding alone allowed
            p = torch.where(open_rows & ~accepted & (total > 0), left / total, p)
        draft = draft.scatter(1, tokens, -math.inf)
    return torch.where(chosen < 0, perturbed(p.log(), key, TARGET).argmax(-1), chosen)
