"""Sampling: SamplingParams, logits processing, Gumbel noise, the model's choice, and rejection sampling.

The choice at a position is argmax(processed logits + Gumbel noise), the noise a pure function of (seed, sample index,
position, token id), so the same logits give the same token in any tree and any batch. Greedy is the same without noise.
Ties go to the lower token id. Works on rows of logits [R, V], each with its own parameters; knows no tree and no cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as shortened
from typing import Any

import numpy as np
import torch

from selfspec.kernels.philox import gumbel, uniform, uniform_vocabulary

# Independent streams of noise. The model's choice and coupled drafts share CHOICE. Rejection sampling draws children
# with CHILDREN, accepts them with ACCEPT, and draws from the residual with CHOICE.
CHOICE, CHILDREN, ACCEPT = 0, 1, 2

MAX_STOPS = 32  # stop tokens that a minimum length can ban: a slot on the device holds this many

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
    """Returns the Python number of a numpy scalar or of an array or tensor without dimensions; else `value` itself."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Returns the token ids given as one integer, a list, tuple, set or range, an array or a tensor; () for None.
    Accepts ids that no vocabulary has, such as -1 for none, but raises ValueError for those beyond 64 bits, which no
    tensor holds."""
    if value is None:
        return ()
    value = as_scalar(value)
    entries = value.flatten().tolist() if hasattr(value, "flatten") else value
    ids = tuple(entries) if isinstance(entries, list | tuple | set | frozenset | range) else (entries,)
    if ids and set(map(type, ids)) == {int}:
        checked: Sequence[Any] = (min(ids), max(ids))  # a list may name half of a vocabulary
    else:
        checked = ids = tuple(map(as_scalar, ids))
    for entry in checked:
        if not is_int(entry) or not -(2**63) <= entry < 2**63:
            wanted = f"it must be a token id or a list of them, and {entry!r} is none"
            raise ValueError(f"{name}={shortened(value)} is not possible: {wanted}")
    return ids


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one sequence; checked when built, hashable."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on tokens of prompt and new tokens: divides logits above 0, multiplies the others
    presence_penalty: float = 0.0  # subtracted from the logit of each token among the new tokens
    frequency_penalty: float = 0.0  # subtracted as many times as the token is among the new tokens
    min_new_tokens: int = 0  # stop tokens are banned while the sequence has fewer new tokens
    min_length: int = 0  # stop tokens are banned while prompt and new tokens together are fewer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    stop_token_ids: tuple[int, ...] = ()  # end the sequence; only a minimum length uses them here

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
                raise ValueError("allowed_token_ids is empty: pass at least one token id, or None to allow all tokens")

    @cached_property
    def changes_logits(self) -> bool:
        """True if `process_logits` may change a logit."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        minimum = bool(self.stop_token_ids) and self._has_minimum
        restricted = bool(self.banned_token_ids) or self.allowed_token_ids is not None
        return penalties or minimum or restricted or bool(self.logit_bias)

    @cached_property
    def allowed_array(self) -> np.ndarray | None:
        """The allowed token ids as int64."""
        return None if self.allowed_token_ids is None else np.array(self.allowed_token_ids, dtype=np.int64)

    @property
    def _has_minimum(self) -> bool:
        return self.min_new_tokens > 0 or self.min_length > 0

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _unique(self, name: str) -> tuple[int, ...]:
        ids = read_token_ids(name, getattr(self, name))
        if ids and min(ids) < 0:
            value = shortened(getattr(self, name))
            raise ValueError(f"{name}={value} is not possible: it must be token ids of at least 0, not {min(ids)}")
        return tuple(sorted(set(ids)))


def _is_number(value: Any, kind: type) -> bool:
    """True for an int (`kind` int), or a finite int or float (`kind` float)."""
    if kind is int:
        return is_int(value)
    # False for an integer that is too large for a float: isfinite() would raise OverflowError.
    return (isinstance(value, float) or (is_int(value) and abs(value) < 2**1023)) and math.isfinite(value)


def _read_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Returns (token id, bias) sorted by token id, from a dict or from pairs; a bias of -inf bans the token."""
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
    """The arguments of the noise of R rows. They do not depend on the batch, the slot or the node of a row."""

    seeds: torch.Tensor  # [R] int64
    sample_indices: torch.Tensor  # [R] int64: index among the num_return_sequences sequences of one prompt
    positions: torch.Tensor  # [R] int64: position of the token to draw, padding not counted

    def at(self, rows: torch.Tensor) -> NoiseKey:
        """The key of these rows (int64 indices)."""
        return NoiseKey(self.seeds[rows], self.sample_indices[rows], self.positions[rows])


_Texts = Sequence[tuple[Sequence[int], int]]  # tokens of each row's text, and how many of them are the prompt's


@dataclass(frozen=True)
class _Columns:
    """The token ids of the columns of logits [R, count]."""

    count: int
    token_ids: torch.Tensor | None  # [count]; None: column i is token i
    device: torch.device

    @cached_property
    def size(self) -> int:
        """One more than the largest token id that has a column."""
        return self.count if self.token_ids is None else int(self.token_ids.max()) + 1

    def mask(self, ids: Sequence[int]) -> torch.Tensor:
        """[count] bool: true for the columns of these tokens; tokens without a column are skipped."""
        columns = torch.arange(self.count, device=self.device) if self.token_ids is None else self.token_ids
        return torch.isin(columns, torch.tensor(ids, dtype=torch.long, device=self.device))

    def bias(self, pairs: Sequence[tuple[int, float]], dtype: torch.dtype) -> torch.Tensor:
        """[count]: the bias of each column, 0 for tokens that are not in `pairs`."""
        kept = [(token, value) for token, value in pairs if token < self.size]
        bias = torch.zeros(self.size, dtype=dtype, device=self.device)
        tokens = torch.tensor([token for token, _ in kept], dtype=torch.long, device=self.device)
        bias[tokens] = torch.tensor([value for _, value in kept], dtype=dtype, device=self.device)
        return self._pick(bias)

    def counts(self, texts: Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        """[R, count]: how many times each column's token occurs in each text."""
        longest = max((len(text) for text in texts), default=0)
        padded = [[*text, *([self.size] * (longest - len(text)))] for text in texts]
        # Padding and ids without a column are counted in one extra column.
        ids = torch.tensor(padded, dtype=torch.long, device=self.device).clamp(max=self.size)
        counts = torch.zeros(len(texts), self.size + 1, dtype=dtype, device=self.device)
        return self._pick(counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=dtype))[:, : self.size])

    def _pick(self, by_token: torch.Tensor) -> torch.Tensor:
        """Values by token id [..., size] to values by column [..., count]."""
        return by_token if self.token_ids is None else by_token[..., self.token_ids]


def process_logits(
    logits: torch.Tensor,  # [R, V]
    params: Sequence[SamplingParams],  # R
    texts: Sequence[Sequence[int]],  # R: prompt and new tokens; for a node of a tree also the tokens of its path
    prompt_lengths: Sequence[int],  # R: number of prompt tokens with which each text begins
    token_ids: torch.Tensor | None = None,  # [V] token ids of the columns; None: column i is token i
) -> torch.Tensor:
    """Applies logit bias, repetition, presence and frequency penalty, banned and allowed tokens and minimum length to
    each row by its parameters, in transformers' order. Returns [R, V]; does not change `logits`."""
    columns = _Columns(logits.shape[-1], token_ids, logits.device)

    def process(values: torch.Tensor, row_params: SamplingParams, rows: Sequence[int]) -> torch.Tensor:
        if not row_params.changes_logits:
            return values
        own = [(texts[row], prompt_lengths[row]) for row in rows]
        return _ban(_penalise(values, row_params, own, columns), row_params, own, columns)

    return _by_params(logits, params, process)


def _by_params(
    values: torch.Tensor,
    params: Sequence[SamplingParams],
    change: Callable[[torch.Tensor, SamplingParams, Sequence[int]], torch.Tensor],
) -> torch.Tensor:
    """Applies change(values [G, V], parameters, row indices) to each group of G rows with equal parameters."""
    if all(other is params[0] for other in params):
        return change(values, params[0], range(len(params))) if params else values
    groups: dict[SamplingParams, list[int]] = {}
    for row, row_params in enumerate(params):
        groups.setdefault(row_params, []).append(row)
    changed = values.clone()
    for row_params, rows in groups.items():
        at = torch.tensor(rows, device=values.device)
        changed[at] = change(values[at], row_params, rows)
    return changed


def _penalise(values: torch.Tensor, params: SamplingParams, texts: _Texts, columns: _Columns) -> torch.Tensor:
    """Adds the logit bias, then applies the repetition penalty, then presence and frequency penalty."""
    if params.logit_bias:
        values = values + columns.bias(params.logit_bias, values.dtype)
    if params.repetition_penalty != 1:
        seen, factor = columns.counts([text for text, _ in texts], values.dtype) > 0, params.repetition_penalty
        values = torch.where(seen, torch.where(values < 0, values * factor, values / factor), values)
    if params.presence_penalty or params.frequency_penalty:
        counts = columns.counts([text[prompt:] for text, prompt in texts], values.dtype)
        values = values - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
    return values


def _ban(values: torch.Tensor, params: SamplingParams, texts: _Texts, columns: _Columns) -> torch.Tensor:
    """Sets to -inf: banned tokens, all but allowed tokens, and stop tokens of texts below the minimum length."""
    if params.banned_token_ids:
        values = values.masked_fill(columns.mask(params.banned_token_ids), -math.inf)
    if params.allowed_token_ids is not None:
        values = values.masked_fill(~columns.mask(params.allowed_token_ids), -math.inf)
    too_short = [len(text) < max(params.min_length, prompt + params.min_new_tokens) for text, prompt in texts]
    if any(too_short) and params.stop_token_ids:
        stops = columns.mask(params.stop_token_ids)
        values = values.masked_fill(torch.tensor(too_short, device=values.device)[:, None] & stops, -math.inf)
    return values


def warp_logits(values: torch.Tensor, params: Sequence[SamplingParams], cut: bool = True) -> torch.Tensor:
    """Divides each row by its temperature and, if `cut`, sets tokens outside its top-k, top-p and min-p to -inf.
    Returns greedy rows unchanged."""
    return _by_params(values, params, lambda group, params, rows: _warp(group, params, cut))


def _warp(logits: torch.Tensor, params: SamplingParams, cut: bool) -> torch.Tensor:
    if not params.do_sample:
        return logits
    values = logits / params.temperature
    if not cut:
        return values
    if params.top_k or params.top_p < 1:
        values = _keep_top(values, params.top_k or values.shape[-1], params.top_p)
    if params.min_p > 0:
        values = values.masked_fill(values < values.amax(-1, keepdim=True) + math.log(params.min_p), -math.inf)
    return values


def _keep_top(values: torch.Tensor, k: int, top_p: float) -> torch.Tensor:
    """Keeps the k best tokens and of these the fewest whose probabilities sum to `top_p`; sets the others to -inf."""
    order = ranked(values, min(k, values.shape[-1]))  # [R, k]
    best = values.gather(-1, order)
    if top_p < 1:
        probabilities = best.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # sum over the tokens of lower rank
        before[..., 0] = 0  # rounding could give the best token a sum above 0 and remove it
        best = best.masked_fill(before >= top_p, -math.inf)
    kept = torch.full_like(values, -math.inf).scatter(-1, order, best)
    top = values.amax(-1, keepdim=True)
    return torch.where(top.isnan(), top, kept)  # a NaN may rank last and be cut; `choose` refuses rows with a NaN


def ranked(values: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the indices [..., k] of the k largest values of each row, largest first, ties by lower index."""
    bits = (values.float() + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the floats
    last = values.shape[-1] - 1
    columns = torch.arange(values.shape[-1], device=values.device)
    keys = (ordered.long() << 32) | (last - columns)
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def perturbed(
    values: torch.Tensor, key: NoiseKey, stream: int = CHOICE, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns values [R, V] plus Gumbel noise; `token_ids` [V] are the token ids of the columns (None: 0 to V - 1)."""
    kept_rows, kept_columns = (values > -math.inf).nonzero(as_tuple=True)
    # One Philox call makes the noise of 4 neighbouring tokens: cheaper for all tokens than for more than a quarter.
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
    """Returns the model's choice for each row of processed logits [R, V]: token ids [R]. Raises ValueError if the
    largest value of a row is not finite."""
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
    sampled = [row for row, row_params in enumerate(params) if row_params.do_sample]
    if sampled:
        at = torch.tensor(sampled, device=values.device)
        chosen[at] = perturbed(values[at], key.at(at)).argmax(-1)
    return chosen


def reject_or_accept(
    p: torch.Tensor,  # [R, V] the model's probabilities
    draft: torch.Tensor,  # [R, V] the draft's processed logits, -inf for tokens that it cannot draft
    ranked_tokens: torch.Tensor,  # [R, K] drawn from the draft without replacement
    offered: Sequence[bool],  # K: true for the ranks that are nodes of the tree
    key: NoiseKey,
) -> torch.Tensor:  # [R] token ids
    """Classical rejection sampling: tries the offered tokens in order of rank; if all are rejected, draws from the
    residual of p."""
    chosen = torch.full_like(ranked_tokens[:, 0], -1)
    for is_node, tokens in zip(offered, ranked_tokens.T[..., None], strict=True):  # tokens [R, 1]
        if is_node:
            # Softmax of the remaining logits for every rank: renormalised probabilities of an overconfident draft would
            # underflow to 0. A token whose draft logit is -inf was not drawn from the draft and is not tried.
            drawn = draft.gather(1, tokens) > -math.inf
            q = draft.masked_fill(~drawn, 0).softmax(-1)
            u = uniform(key.seeds, key.sample_indices, key.positions, tokens, ACCEPT)
            open_rows = drawn & (chosen < 0)[:, None]
            accepted = open_rows & (u * q.gather(1, tokens) < p.gather(1, tokens))
            chosen = torch.where(accepted, tokens, chosen[:, None])[:, 0]
            left = (p - q).clamp(min=0)
            total = left.sum(-1, keepdim=True)  # 0 only if p equals q and rounding rejected the token
            p = torch.where(open_rows & ~accepted & (total > 0), left / total, p)
        draft = draft.scatter(1, tokens, -math.inf)
    return torch.where(chosen < 0, perturbed(p.log(), key, CHOICE).argmax(-1), chosen)
