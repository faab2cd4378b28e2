"""Fills the exit block's KV of plainly decoded tokens, many positions at a time, and scores the exit at them.

A plain step computes the states that the exit needs but does not run the exit. This module keeps these states, runs the
exit over them later, and compares each decoded token with the one that the exit would have drafted. The governor
decides by these scores; nothing here drafts or changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from selfspec.cache.kv_cache import Cache, KVPages
from selfspec.cache.layout import Rows
from selfspec.kernels.philox import gumbel, uniform
from selfspec.sampling import CHOICE, NoiseKey, SamplingParams
from selfspec.speculation.exit import Exit

PROMPT_END = 32  # positions at the end of a prompt at which the exit is compared with the model
CPU_SCORED_POSITIONS = 8  # positions of a score on a CPU, where a pass takes longer with every row
_NOISY = 256  # best draft tokens that get noise when sampling: later ones are hardly ever the best


class SequenceUnfilled:
    """States of one sequence's unfilled positions: its newest ones, for which the exit block has no keys and values.

    Copies states into one growing buffer: keeping the tensors of every step would fragment the memory.
    """

    def __init__(self) -> None:
        self._count = 0
        # Of each position: the hidden state after N layers [hidden], and the feature of the previous one [2 * hidden].
        self._states: list[torch.Tensor] = []

    def __len__(self) -> int:
        return self._count

    @property
    def states(self) -> list[torch.Tensor]:
        """Hidden states [T, hidden] and features of the previous positions [T, 2 * hidden] of the T positions."""
        return [states[: self._count] for states in self._states]

    def add(self, *states: torch.Tensor) -> None:
        """Appends the states of one position, each a vector."""
        if not self._states or self._count == len(self._states[0]):
            grown = [state.new_empty(max(32, 2 * self._count), len(state)) for state in states]
            for larger, kept in zip(grown, self._states, strict=False):
                larger[: self._count] = kept
            self._states = grown
        for kept, state in zip(self._states, states, strict=True):
            kept[self._count] = state
        self._count += 1

    def clear(self) -> None:
        self._count = 0


@torch.inference_mode()
def fill(
    exit: Exit, cache: Cache, kvs: Seq[KVPages], unfilled: Seq[SequenceUnfilled], scored: int
) -> torch.Tensor | None:
    """Stores the exit block's keys and values at all unfilled positions of sequences that have the same number of them,
    and clears their states. Returns the exit's normed states at the newest `scored` of these positions
    [B, scored, hidden]; None for 0."""
    states = zip(*(of_sequence.states for of_sequence in unfilled), strict=True)
    hidden, previous = (torch.stack(of_sequences) for of_sequences in states)  # [B, T, hidden], [B, T, 2 * hidden]
    for of_sequence in unfilled:
        of_sequence.clear()
    count, device = hidden.shape[1], exit.model.device
    if scored < count:
        exit.fill(hidden, previous, newest(kvs, count, device), cache)
    if not scored:
        return None
    return exit.head_input(hidden[:, -scored:], previous[:, -scored:], newest(kvs, scored, device), cache)


def newest(kvs: Seq[KVPages], count: int, device: torch.device) -> Rows:
    """The layout of the last `count` committed positions of each sequence."""
    return Rows.causal([KVPages(kv.pages, kv.length - count) for kv in kvs], count, device)


@torch.inference_mode()
def is_drafted(
    exit: Exit, head_input: torch.Tensor, tokens: torch.Tensor, params: Seq[SamplingParams], key: NoiseKey
) -> torch.Tensor:
    """Returns whether each decoded token [B, M] is the exit's best draft token at its position. `head_input` are the
    exit's normed states, `params` the B sequences', `key` has B * M entries."""
    logits = exit.logits(head_input).flatten(0, 1)  # [R, vocabulary]
    samples = any(each.do_sample for each in params)
    values, columns = logits.topk(min(_NOISY if samples else 1, logits.shape[-1]), dim=-1)
    drafted = exit.to_token_ids(columns)
    if samples:
        temperature = torch.tensor(
            [each.temperature if each.do_sample else 1.0 for each in params], device=logits.device
        )
        sampled = torch.tensor([each.do_sample for each in params], device=logits.device)
        temperature, sampled = (values.repeat_interleave(tokens.shape[1])[:, None] for values in (temperature, sampled))
        noise = gumbel(uniform(key.seeds, key.sample_indices, key.positions, drafted, CHOICE))
        values = values / temperature + torch.where(sampled, noise, 0.0)
        drafted = drafted.gather(1, values.argmax(-1, keepdim=True))
    return drafted.view(tokens.shape) == tokens


@torch.inference_mode()
def prompt_agreement(
    exit: Exit, cache: Cache, kvs: Seq[KVPages], hidden: torch.Tensor, previous: torch.Tensor, final: torch.Tensor
) -> list[float]:
    """Returns for each prompt the share of its last M positions at which the exit's best token is the model's;
    `final` are the model's normed final states there [B, M, hidden]."""
    model = exit.model
    head_input = exit.head_input(hidden, previous, newest(kvs, hidden.shape[1], model.device), cache)
    drafted = exit.to_token_ids(exit.logits(head_input).argmax(-1))
    return (drafted == model.project(final, model.head).argmax(-1)).float().mean(1).tolist()
