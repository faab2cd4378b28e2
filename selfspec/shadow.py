"""Exits in the shadow: while nothing is drafted an exit's own keys and values wait, and are filled in many at a time.

The same pass tells what the exit would have drafted, so that whoever decides can see when drafting would pay again. The
states that it takes are those plain decoding computed anyway. What follows from the scores is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from selfspec.cache import Cache, Rows, Sequence
from selfspec.exits import Exit
from selfspec.kernels.noise import gumbel, uniform
from selfspec.sampling import TARGET, NoiseKey, Sampling

OFFERED = 8  # best draft tokens that are looked at: a token beyond them is a miss
PROMPT_END = 32  # positions at the end of a prompt that tell whether it is a familiar kind of text
_NOISY = 256  # best draft tokens whose noise is looked up


@dataclass
class Waiting:
    """States of one sequence's newest positions, which the exit's cache does not have yet."""

    hidden: list[torch.Tensor] = field(default_factory=list)  # [hidden] after layer N
    previous: list[torch.Tensor] = field(default_factory=list)  # [2 * hidden] what was known one position before

    def __len__(self) -> int:
        return len(self.hidden)

    def add(self, hidden: torch.Tensor, previous: torch.Tensor) -> None:
        self.hidden.append(hidden)
        self.previous.append(previous)

    def clear(self) -> None:
        self.hidden.clear()
        self.previous.clear()


@torch.inference_mode()
def catch_up(
    exit: Exit, cache: Cache, sequences: Seq[Sequence], waiting: Seq[Waiting], read: bool
) -> torch.Tensor | None:
    """Fills the exit's cache for what is waiting, the same number of positions in every sequence; if asked to, returns
    what its head reads at them [B, M, hidden]."""
    hidden = torch.stack([torch.stack(of_row.hidden) for of_row in waiting])
    previous = torch.stack([torch.stack(of_row.previous) for of_row in waiting])
    for of_row in waiting:
        of_row.clear()
    at = newest(sequences, hidden.shape[1], exit.model.device)
    if read:
        return exit.read(hidden, previous, at, cache)
    exit.fill(hidden, previous, at, cache)
    return None


def newest(sequences: Seq[Sequence], count: int, device: torch.device) -> Rows:
    """The rows of the last `count` committed positions."""
    before = [Sequence(sequence.pages, sequence.length - count) for sequence in sequences]
    return Rows.causal(before, count, device)


@torch.inference_mode()
def ranks(
    exit: Exit, read: torch.Tensor, tokens: torch.Tensor, sampling: Sampling, key: NoiseKey | None
) -> torch.Tensor:
    """Which rank each of these tokens [B, M] would have had in the drafts of what the exit read; OFFERED for a miss.
    `key` is the noise that they were drawn with, row by row."""
    logits = exit.logits(read).flatten(0, 1)  # [R, vocabulary]
    values, columns = logits.topk(min(_NOISY if key is not None else OFFERED, logits.shape[-1]), dim=-1)
    drafted = exit.to_token_ids(columns)
    if key is not None:
        noise = uniform(key.seeds, key.copies, key.positions, drafted, TARGET)
        values = values / sampling.temperature + gumbel(noise)
        drafted = drafted.gather(1, values.topk(min(OFFERED, values.shape[-1]), dim=-1).indices)
    found = drafted == tokens.flatten()[:, None]
    rank = torch.where(found.any(1), found.int().argmax(1), OFFERED)
    return rank.view(tokens.shape)


@torch.inference_mode()
def prompt_agreement(
    exit: Exit, cache: Cache, sequences: Seq[Sequence], hidden: torch.Tensor, previous: torch.Tensor, read: torch.Tensor
) -> list[float]:
    """The share of the last positions of each prompt at which the exit's best token is the model's own; `read` is what
    the model's head read there [B, M, hidden]."""
    model = exit.model
    drafted = exit.read(hidden, previous, newest(sequences, hidden.shape[1], model.device), cache)
    guesses = exit.to_token_ids(exit.logits(drafted).argmax(-1))
    return (guesses == model.project(read, model.head).argmax(-1)).float().mean(1).tolist()
