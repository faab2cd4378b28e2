"""Drawing tokens: logits processing, the target's choice, a draft's ranked children, and classical rejection.

The choice at a position is argmax(processed logits + Gumbel noise), the noise a pure function of (seed, sample index,
position, token), so the same logits give the same token in any tree and any batch. Greedy is the same without noise.
Ties go to the lower token id, everywhere. Works on rows of logits, each with its own parameters; trees and caches are
unknown here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from selfspec.kernels.philox import gumbel, uniform, uniform_vocabulary

# Noise streams: coupled drafts share the target's; rejection sampling must keep its three uses apart.
TARGET, CHILDREN, ACCEPT = 0, 1, 2

MAX_STOPS = 32  # stop tokens that a minimum length can ban: the device keeps so many of each sequence

_LIMITS: dict[str, tuple[type, Callable[[float], bool], str]] = {
    "temperature": (float, lambda x: x > 0, "a number above 0; for greedy decoding pass do_sample=False"),
    "top_k": (int, lambda x: x >= 0, "an integer of at least 0; 0 switches it off"),
    "top_p": (float, lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "min_p": (float, lambda x: 0 <= x <= 1, "a number between 0 and 1"),
    "repetition_penalty": (float, lambda x: x > 0, "a number above 0; 1 switches it off"),
    "presence_penalty": (float, lambda x: True, "a finite number; 0 switches it off"),
    "frequency_penalty": (float, lambda x: True, "a finite number; 0 switches it off"),
    "min_new_tokens": (int, lambda x: x >= 0, "an integer of at least 0"),
    "min_length": (int, lambda x: x >= 0, "an integer of at least 0"),
}


def as_scalar(value: Any) -> Any:
    """The Python number of a numpy scalar or of an array or tensor without dimensions; all else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids given as one integer, a sequence, an array or a tensor; None gives none."""
    if value is None:
        return ()
    value = as_scalar(value)
    entries = value.flatten().tolist() if hasattr(value, "flatten") else value
    entries = tuple(entries) if isinstance(entries, list | tuple | set | frozenset | range) else (entries,)
    ids = tuple(as_scalar(entry) for entry in entries)
    if not all(is_int(entry) for entry in ids):
        raise ValueError(f"{name}={value!r} is not possible: it must be a token id or a list of them")
    return ids


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence's tokens are drawn; checked when built. Equal parameters compare and hash equal."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on tokens of the prompt and of the generated text
    presence_penalty: float = 0.0  # subtracted once from each token that was generated; the prompt does not count
    frequency_penalty: float = 0.0  # subtracted once for every time a token was generated
    min_new_tokens: int = 0  # no stop token before
    min_length: int = 0  # the same, prompt and new tokens together
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._set("do_sample", bool(as_scalar(self.do_sample)))
        for name, (kind, fits, wanted) in _LIMITS.items():
            value: Any = as_scalar(getattr(self, name))
            if not _is_number(value, kind) or not fits(value):
                raise ValueError(f"{name}={getattr(self, name)!r} is not possible: it must be {wanted}")
            self._set(name, kind(value))
        self._set("logit_bias", _read_bias(self.logit_bias))
        self._set("stop_token_ids", read_token_ids("stop_token_ids", self.stop_token_ids))
        if len(self.stop_token_ids) > MAX_STOPS and self._has_minimum:
            raise ValueError(
                f"{len(self.stop_token_ids)} stop tokens are not possible with a minimum length, which bans at most "
                f"{MAX_STOPS} of them: pass fewer, or min_new_tokens=0 and min_length=0"
            )
        self._set("banned_token_ids", self._unique("banned_token_ids"))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", self._unique("allowed_token_ids"))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty: it must name a token at least; None allows all of them")

    @cached_property
    def changes_logits(self) -> bool:
        """Whether `process_logits` may change anything."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        minimum = bool(self.stop_token_ids) and self._has_minimum
        restricted = bool(self.banned_token_ids) or self.allowed_token_ids is not None
        return penalties or minimum or restricted or bool(self.logit_bias)

    @property
    def _has_minimum(self) -> bool:
        return self.min_new_tokens > 0 or self.min_length > 0

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _unique(self, name: str) -> tuple[int, ...]:
        ids = read_token_ids(name, getattr(self, name))
        if any(token < 0 for token in ids):
            raise ValueError(f"{name}={getattr(self, name)!r} is not possible: it must be token ids of at least 0")
        return tuple(sorted(set(ids)))


def _is_number(value: Any, kind: type) -> bool:
    if kind is int:
        return is_int(value)
    # An integer too large for a float is no number here: isfinite() would raise OverflowError.
    return (isinstance(value, float) or (is_int(value) and abs(value) < 2**1023)) and math.isfinite(value)


def _read_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, from a dict or from pairs; minus infinity bans a token."""
    try:
        pairs = [(as_scalar(token), as_scalar(value)) for token, value in getattr(bias, "items", lambda: bias)()]
        distinct = len({token for token, _ in pairs}) == len(pairs)
    except (TypeError, ValueError):
        pairs, distinct = [(None, None)], True
    numbers = all(_is_number(value, float) or value == -math.inf for _, value in pairs)
    if not numbers or not distinct or not all(is_int(token) and token >= 0 for token, _ in pairs):
        raise ValueError(
            f"logit_bias={bias!r} is not possible: it must be a dict of token ids, each once, to finite numbers or -inf"
        )
    return tuple(sorted((token, float(value)) for token, value in pairs))


@dataclass(frozen=True)
class NoiseKey:
    """Which noise each of R rows draws with. Positions count real tokens; a row's place in the batch never enters."""

    seeds: torch.Tensor  # [R] int64
    sample_indices: torch.Tensor  # [R] int64: index among the returned sequences of one prompt
    positions: torch.Tensor  # [R] int64: the position of the token being drawn

    def at(self, rows: torch.Tensor) -> NoiseKey:
        return NoiseKey(self.seeds[rows], self.sample_indices[rows], self.positions[rows])


@dataclass(frozen=True)
class _Columns:
    """Which token each column of a row of logits stands for."""

    count: int
    token_ids: torch.Tensor | None  # [count]; None: tokens 0 to count - 1
    device: torch.device

    @cached_property
    def size(self) -> int:
        """One more than the largest token id that has a column."""
        return self.count if self.token_ids is None else int(self.token_ids.max()) + 1

    def mask(self, ids: Sequence[int]) -> torch.Tensor:
        """[count] bool: columns of these tokens; tokens without a column are skipped."""
        columns = torch.arange(self.count, device=self.device) if self.token_ids is None else self.token_ids
        return torch.isin(columns, torch.tensor(ids, dtype=torch.long, device=self.device))

    def bias(self, pairs: Sequence[tuple[int, float]], dtype: torch.dtype) -> torch.Tensor:
        """[count]: what is added to each column."""
        kept = [(token, value) for token, value in pairs if token < self.size]
        bias = torch.zeros(self.size, dtype=dtype, device=self.device)
        tokens = torch.tensor([token for token, _ in kept], dtype=torch.long, device=self.device)
        bias[tokens] = torch.tensor([value for _, value in kept], dtype=dtype, device=self.device)
        return self._pick(bias)

    def counts(self, texts: Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        """[R, count]: how often each column's token is in each text."""
        longest = max((len(text) for text in texts), default=0)
        padded = [[*text, *([self.size] * (longest - len(text)))] for text in texts]  # one extra column for padding
        ids = torch.tensor(padded, dtype=torch.long, device=self.device).clamp(max=self.size)  # and for larger ids
        counts = torch.zeros(len(texts), self.size + 1, dtype=dtype, device=self.device)
        return self._pick(counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=dtype))[:, : self.size])

    def _pick(self, by_token: torch.Tensor) -> torch.Tensor:
        return by_token if self.token_ids is None else by_token[..., self.token_ids]


def process_logits(
    logits: torch.Tensor,  # [R, V]
    params: Sequence[SamplingParams],  # R
    texts: Sequence[Sequence[int]],  # R: all tokens so far; for a node of a tree its own path included
    prompt_lengths: Sequence[int],  # R: how many tokens of each text are the prompt's
    token_ids: torch.Tensor | None = None,  # [V] where the columns are not simply the whole vocabulary
) -> torch.Tensor:
    """Logit bias, repetition, presence and frequency penalty, banned and allowed tokens, minimum length: in the order
    of transformers, for every row by its own parameters. The logits given are left as they are."""
    columns = _Columns(logits.shape[-1], token_ids, logits.device)

    def process(values: torch.Tensor, of: SamplingParams, rows: Sequence[int]) -> torch.Tensor:
        if not of.changes_logits:
            return values
        own_texts, lengths = [texts[row] for row in rows], [prompt_lengths[row] for row in rows]
        values = _penalise(values, of, own_texts, lengths, columns)
        return _ban(values, of, own_texts, lengths, columns)

    return _by_params(logits, params, process)


def _by_params(
    values: torch.Tensor,
    params: Sequence[SamplingParams],
    change: Callable[[torch.Tensor, SamplingParams, Sequence[int]], torch.Tensor],
) -> torch.Tensor:
    """Applies change(values [G, V], parameters, rows) to every group of rows with equal parameters."""
    if all(other is params[0] for other in params):
        return change(values, params[0], range(len(params))) if params else values
    groups: dict[SamplingParams, list[int]] = {}
    for row, of in enumerate(params):
        groups.setdefault(of, []).append(row)
    changed = values.clone()
    for of, rows in groups.items():
        at = torch.tensor(rows, device=values.device)
        changed[at] = change(values[at], of, rows)
    return changed


def _penalise(
    values: torch.Tensor,
    of: SamplingParams,
    texts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    columns: _Columns,
) -> torch.Tensor:
    if of.logit_bias:
        values = values + columns.bias(of.logit_bias, values.dtype)
    if of.repetition_penalty != 1:
        seen, factor = columns.counts(texts, values.dtype) > 0, of.repetition_penalty
        values = torch.where(seen, torch.where(values < 0, values * factor, values / factor), values)
    if of.presence_penalty or of.frequency_penalty:
        generated = [text[length:] for text, length in zip(texts, prompt_lengths, strict=True)]
        counts = columns.counts(generated, values.dtype)
        values = values - of.presence_penalty * (counts > 0) - of.frequency_penalty * counts
    return values


def _ban(
    values: torch.Tensor,
    of: SamplingParams,
    texts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    columns: _Columns,
) -> torch.Tensor:
    if of.banned_token_ids:
        values = values.masked_fill(columns.mask(of.banned_token_ids), -math.inf)
    if of.allowed_token_ids is not None:
        values = values.masked_fill(~columns.mask(of.allowed_token_ids), -math.inf)
    early = [
        len(text) < max(of.min_length, length + of.min_new_tokens)
        for text, length in zip(texts, prompt_lengths, strict=True)
    ]
    if any(early) and of.stop_token_ids:
        stops = columns.mask(of.stop_token_ids)
        values = values.masked_fill(torch.tensor(early, device=values.device)[:, None] & stops, -math.inf)
    return values


def warp_logits(values: torch.Tensor, params: Sequence[SamplingParams], cut: bool = True) -> torch.Tensor:
    """Temperature and, if `cut`, top-k, top-p and min-p, for every row by its own parameters: removed tokens become
    -inf. Greedy rows stay as they are."""
    return _by_params(values, params, lambda group, of, rows: _warp(group, of, cut))


def _warp(logits: torch.Tensor, of: SamplingParams, cut: bool) -> torch.Tensor:
    if not of.do_sample:
        return logits
    values = logits / of.temperature
    if not cut:
        return values
    if of.top_k or of.top_p < 1:
        values = _keep_top(values, of.top_k or values.shape[-1], of.top_p)
    if of.min_p > 0:
        values = values.masked_fill(values < values.amax(-1, keepdim=True) + math.log(of.min_p), -math.inf)
    return values


def _keep_top(values: torch.Tensor, k: int, top_p: float) -> torch.Tensor:
    order = ranked(values, min(k, values.shape[-1]))  # [R, k]
    best = values.gather(-1, order)
    if top_p < 1:
        probabilities = best.softmax(-1)
        better = probabilities.cumsum(-1) - probabilities  # mass of the tokens ranked above
        better[..., 0] = 0  # whatever rounding says, the best token stays
        best = best.masked_fill(better >= top_p, -math.inf)
    kept = torch.full_like(values, -math.inf).scatter(-1, order, best)
    top = values.amax(-1, keepdim=True)
    return torch.where(top.isnan(), top, kept)  # a NaN may rank last: `choose` must see it


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
        noise = uniform_vocabulary(key.seeds, key.sample_indices, key.positions, values.shape[-1], stream)
        return values + gumbel(noise)
    tokens = kept_columns if token_ids is None else token_ids[kept_columns]
    at = key.at(kept_rows)
    noise = gumbel(uniform(at.seeds, at.sample_indices, at.positions, tokens[:, None], stream)).squeeze(1)
    noisy = torch.full_like(values, -math.inf)
    noisy[kept_rows, kept_columns] = values[kept_rows, kept_columns] + noise
    return noisy


def choose(values: torch.Tensor, params: Sequence[SamplingParams], key: NoiseKey) -> torch.Tensor:
    """The target's choice for each row of processed logits [R, V]: token ids [R]. Raises ValueError where the largest
    value of a row is not finite, for nothing could be drawn by it."""
    largest = values.amax(-1)
    finite = largest.isfinite()
    if not finite.all():
        row = int(finite.int().argmin())
        raise ValueError(
            f"row {row}: the model's logits are not finite: the largest after processing is {largest[row].item()}. "
            "-inf means that every token is banned, inf that the temperature is too close to 0 or a bias too large, "
            "nan that the weights or a logits processor are at fault"
        )
    chosen = values.argmax(-1)
    sampled = [row for row, of in enumerate(params) if of.do_sample]
    if sampled:
        at = torch.tensor(sampled, device=values.device)
        chosen[at] = perturbed(values[at], key.at(at)).argmax(-1)
    return chosen


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
            u = uniform(key.seeds, key.sample_indices, key.positions, tokens, ACCEPT)
            open_rows = drawn & (chosen < 0)[:, None]
            accepted = open_rows & (u * q.gather(1, tokens) < p.gather(1, tokens))
            chosen = torch.where(accepted, tokens, chosen[:, None])[:, 0]
            left = (p - q).clamp(min=0)
            total = left.sum(-1, keepdim=True)  # zero only after a refusal that rounding alone allowed
            p = torch.where(open_rows & ~accepted & (total > 0), left / total, p)
        draft = draft.scatter(1, tokens, -math.inf)
    return torch.where(chosen < 0, perturbed(p.log(), key, TARGET).argmax(-1), chosen)
