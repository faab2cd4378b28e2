"""Fills the exit block's KV for plainly decoded tokens in batches, and scores its drafts.

The states come from plain steps, which compute them anyway. What follows from the scores is decided by the governor.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from selfspec.cache.kv_cache import Cache, KVPages
from selfspec.cache.layout import Rows
from selfspec.kernels.philox import gumbel, uniform
from selfspec.sampling import TARGET, NoiseKey, SamplingParams
from selfspec.speculation.exit import Exit

OFFERED = 8  # best draft tokens that are looked at: a token beyond them is a miss
PROMPT_END = 32  # positions at the end of a prompt that tell whether it is a familiar kind of text
FEW = 8  # positions of it, or at first of what waits, that are looked at where every row costs; fewer tell nothing
_NOISY = 256  # best draft tokens whose noise is looked up


class Waiting:
    """States of one sequence's newest positions, which the exit's cache does not have yet. They are copied: to keep
    what every step has just made would leave holes all over the memory that the next steps work in."""

    def __init__(self) -> None:
        self._count = 0
        # Of each position the hidden state after layer N, and [2 * hidden] what was known one position before.
        self._states: list[torch.Tensor] = []

    def __len__(self) -> int:
        return self._count

    @property
    def states(self) -> list[torch.Tensor]:
        return [states[: self._count] for states in self._states]

    def add(self, *states: torch.Tensor) -> None:
        if not self._states or self._count == len(self._states[0]):
            grown = [state.new_empty(max(32, 2 * self._count), len(state)) for state in states]
            for new, old in zip(grown, self._states, strict=False):
                new[: self._count] = old
            self._states = grown
        for kept, state in zip(self._states, states, strict=True):
            kept[self._count] = state
        self._count += 1

    def clear(self) -> None:
        self._count = 0


@dataclass(frozen=True)
class Caught:
    """What waited, taken for the exit's cache: of the newest positions [B, T, ...] of some sequences."""

    sequences: Seq[KVPages]
    hidden: torch.Tensor
    previous: torch.Tensor

    @classmethod
    def of(cls, sequences: Seq[KVPages], waiting: Seq[Waiting]) -> Caught:
        """The same number of positions of every sequence; nothing waits any more."""
        states = zip(*(of_row.states for of_row in waiting), strict=True)
        hidden, previous = (torch.stack(of_rows) for of_rows in states)
        for of_row in waiting:
            of_row.clear()
        return cls(sequences, hidden, previous)

    @property
    def count(self) -> int:
        return self.hidden.shape[1]

    @torch.inference_mode()
    def fill(self, exit: Exit, cache: Cache) -> None:
        """Stores the exit's keys and values of all of them."""
        exit.fill(self.hidden, self.previous, newest(self.sequences, self.count, exit.model.device), cache)

    @torch.inference_mode()
    def read(self, exit: Exit, cache: Cache, start: int, stop: int) -> torch.Tensor:
        """What the exit's head reads at some of them [B, M, hidden]; their keys and values are stored too."""
        at = newest(self.sequences, stop - start, exit.model.device, after=self.count - stop)
        return exit.read(self.hidden[:, start:stop], self.previous[:, start:stop], at, cache)


def newest(sequences: Seq[KVPages], count: int, device: torch.device, after: int = 0) -> Rows:
    """The rows of the last `count` committed positions, but for some after them."""
    before = [KVPages(sequence.pages, sequence.length - after - count) for sequence in sequences]
    return Rows.causal(before, count, device)


@torch.inference_mode()
def ranks(
    exit: Exit, read: torch.Tensor, tokens: torch.Tensor, params: Seq[SamplingParams], key: NoiseKey
) -> torch.Tensor:
    """Which rank each of these tokens [B, M] would have had among the drafts there; OFFERED for a miss. `params` are
    those of each sequence, `key` is the noise of each token."""
    logits = exit.logits(read).flatten(0, 1)  # [R, vocabulary]
    samples = any(of.do_sample for of in params)
    values, columns = logits.topk(min(_NOISY if samples else OFFERED, logits.shape[-1]), dim=-1)
    drafted = exit.to_token_ids(columns)
    if samples:
        heat = torch.tensor([of.temperature if of.do_sample else 1.0 for of in params], device=logits.device)
        sampled = torch.tensor([of.do_sample for of in params], device=logits.device)
        heat, sampled = (of.repeat_interleave(tokens.shape[1])[:, None] for of in (heat, sampled))
        noise = gumbel(uniform(key.seeds, key.sample_indices, key.positions, drafted, TARGET))
        values = values / heat + torch.where(sampled, noise, 0.0)
        drafted = drafted.gather(1, values.topk(min(OFFERED, values.shape[-1]), dim=-1).indices)
    found = drafted == tokens.flatten()[:, None]
    rank = torch.where(found.any(1), found.int().argmax(1), OFFERED)
    return rank.view(tokens.shape)


@torch.inference_mode()
def prompt_agreement(
    exit: Exit, cache: Cache, sequences: Seq[KVPages], hidden: torch.Tensor, previous: torch.Tensor, read: torch.Tensor
) -> list[float]:
    """The share of the last positions of each prompt at which the exit's best token is the model's own; `read` is what
    the model's head read there [B, M, hidden]."""
    model = exit.model
    drafted = exit.read(hidden, previous, newest(sequences, hidden.shape[1], model.device), cache)
    guesses = exit.to_token_ids(exit.logits(drafted).argmax(-1))
    return (guesses == model.project(read, model.head).argmax(-1)).float().mean(1).tolist()
