"""Measures exits on the measuring prompts: the model answers them, and drafts are rehearsed along its answers.

Ranks at a temperature need the noise an answer was drawn with. The writer's is its own, so noise is drawn anew from
what is left to chance once the tokens are known: it makes exactly these tokens the model's choice, and is otherwise as
random as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from selfspec.calibrate.choice import MISSED
from selfspec.calibrate.corpus import Corpus, hidden_states, recalled_states
from selfspec.calibrate.rehearsal import drafted_reads, text_ranks
from selfspec.exits import Exit
from selfspec.model import Decoder

DEPTHS = 5  # how deep plans may be
_PROMPT_END = 32  # positions at the end of a prompt that tell whether it is a familiar kind of text


@dataclass(frozen=True)
class Answers:
    """The model's answers to one domain's measuring prompts at one temperature: one document a row."""

    domain: int
    temperature: float
    corpus: Corpus


@dataclass(frozen=True)
class Measurement:
    """What one exit did on some answers."""

    ranks: np.ndarray  # [W, DEPTHS] paths: ranks of the next tokens, over the largest head
    tokens: np.ndarray  # [W, DEPTHS] those tokens
    allowed: np.ndarray  # [W, DEPTHS] bool: the token occurs in the prompt, so that any head offers it
    prompt_agreement: list[float]  # of each answer: the exit's best token is the model's
    text_agreement: list[float]

    def paths(self, head_rows: torch.Tensor | None) -> np.ndarray:
        """The ranks with a smaller head: a token it lacks is missed. Others can only rank better than this says."""
        if head_rows is None:
            return self.ranks
        offered = np.isin(self.tokens, head_rows.cpu().numpy()) | self.allowed
        return np.where(offered, self.ranks, MISSED)


@torch.no_grad()
def measure(
    model: Decoder,
    exits: list[Exit],
    head_rows: torch.Tensor | None,
    answers: Answers,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Measurement]:
    """A measurement of every exit."""
    parts: list[list[Measurement]] = [[] for _ in exits]
    random = torch.Generator(device=model.device).manual_seed(seed)
    for row in range(len(answers.corpus)):
        one = _cut(answers.corpus.rows(slice(row, row + 1)))
        if int(one.predicts.sum()) > DEPTHS:
            for index, measured in enumerate(_measure_row(model, exits, head_rows, one, answers.temperature, random)):
                parts[index].append(measured)
        progress(1)
    return [_joined(of_exit) for of_exit in parts]


def _cut(one: Corpus) -> Corpus:
    """Only as long as the document."""
    length = int((one.documents[0] == 1).sum())
    return Corpus(*(tensor[:, :length] for tensor in vars(one).values()))


def _measure_row(
    model: Decoder,
    exits: list[Exit],
    head_rows: torch.Tensor | None,
    one: Corpus,
    temperature: float,
    random: torch.Generator,
) -> list[Measurement]:
    batch = one.to(model.device)
    written = batch.predicts[0].nonzero()[:, 0]
    first = int(written[0])
    roots = torch.arange(first, batch.length - DEPTHS, device=model.device)[None]  # every token of a path is known
    prompt = batch.tokens[0, : first + 1].tolist()
    recalled = recalled_states(model, one, 1, model.device)
    reads = recalled[0, :, : model.config.hidden_size]
    best = model.project(reads, model.head).argmax(-1)
    noise = None
    if temperature:
        logits = model.project(reads[first:-1], model.head) / temperature
        noise = noise_behind(logits, batch.tokens[0, first + 1 :], random)  # [W, V]
    states = hidden_states(model, batch)
    below = [next(states) for _ in range(max(exit.layer for exit in exits) + 1)]
    ends = torch.arange(max(0, first - _PROMPT_END), first, device=model.device)[None]
    following = roots[0, :, None] + torch.arange(1, DEPTHS + 1, device=model.device)
    tokens = batch.tokens[0][following].cpu().numpy()  # [W, DEPTHS]
    found = []
    for exit in exits:
        offered = exit.offering(head_rows, [prompt])
        drafted = drafted_reads(offered, below[exit.layer], recalled, batch, roots, DEPTHS)
        ranks = []
        for depth, read in enumerate(drafted):
            at = roots[0] + depth
            of_place = None if noise is None else noise[at - first]
            ranks.append(text_ranks(offered, read[0], batch.tokens[0, at + 1], of_place, temperature or 1.0))
        (at_ends,) = drafted_reads(offered, below[exit.layer], recalled, batch, ends, 1)
        found.append(
            Measurement(
                np.stack(ranks, axis=1),
                tokens,
                np.isin(tokens, prompt),
                [_agreement(offered, at_ends[0], best[ends[0]])],
                [_agreement(offered, drafted[0][0], best[roots[0]])],
            )
        )
    return found


def noise_behind(logits: torch.Tensor, chosen: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Gumbel noise [W, V], given that adding it to these logits [W, V] made each row's choice its largest entry."""
    noise = torch.empty_like(logits).exponential_(generator=random).log_().neg_()
    top = noise.new_empty(len(logits), 1).exponential_(generator=random).log_().neg_()
    top += logits.logsumexp(-1, keepdim=True)  # the largest of all, whichever entry it is
    below = -torch.logaddexp(-top, -(logits + noise))  # the others, given that they stay below it
    return below.scatter_(1, chosen[:, None], top) - logits


def _agreement(exit: Exit, read: torch.Tensor, best: torch.Tensor) -> float:
    if not len(best):
        return 0.0
    return float((exit.to_token_ids(exit.logits(read).argmax(-1)) == best).float().mean())


def _joined(parts: list[Measurement]) -> Measurement:
    if not parts:
        nothing = np.zeros((0, DEPTHS), dtype=np.int64)
        return Measurement(nothing, nothing, nothing.astype(bool), [], [])
    ranks, tokens, allowed = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("ranks", "tokens", "allowed")
    )
    of_prompts = [share for part in parts for share in part.prompt_agreement]
    of_texts = [share for part in parts for share in part.text_agreement]
    return Measurement(ranks, tokens, allowed, of_prompts, of_texts)
