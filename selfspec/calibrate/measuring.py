"""Measures exits: drafts along the model's answers to the measuring prompts, and ranks the answers' tokens.

Drafts use the noise that an answer was drawn with. Noise is drawn here from its distribution given the answer, so that
answers from any sampler can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from selfspec.calibrate.choice import MISSED
from selfspec.calibrate.corpus import Corpus, hidden_states, text_features
from selfspec.calibrate.drafting import draft_head_inputs, text_ranks
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import Exit
from selfspec.speculation.exit_scoring import PROMPT_END
from selfspec.speculation.plan import DEEPEST_PLAN as DEPTHS

_MEASURED_TOGETHER = 8  # answers; bounds the memory of their states and noise


@dataclass(frozen=True)
class Measurement:
    """The drafts of one exit along some answers."""

    ranks: np.ndarray  # [W, DEPTHS] rank paths: the ranks of the next tokens, with the largest head
    tokens: np.ndarray  # [W, DEPTHS] these tokens
    allowed: np.ndarray  # [W, DEPTHS] bool: the token is in the prompt, so every head has its row
    prompt_agreement: list[float]  # share of each prompt's last positions where the exit's best token is the model's
    text_agreement: list[float]  # the same of each answer's positions

    def paths(self, head_rows: torch.Tensor | None) -> np.ndarray:
        """The rank paths with a smaller head. Tokens without a row are MISSED; the other ranks are upper bounds."""
        if head_rows is None:
            return self.ranks
        offered = np.isin(self.tokens, head_rows.cpu().numpy()) | self.allowed
        return np.where(offered, self.ranks, MISSED)


@torch.no_grad()
def measure(
    model: Decoder,
    exits: list[Exit],
    head_rows: torch.Tensor | None,
    answers: Corpus,  # to one domain's measuring prompts, one document a row
    temperature: float,  # at which the answers were drawn; 0: greedy
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Measurement]:
    """Measures every exit; answers of at most DEPTHS tokens are left out."""
    parts: list[list[Measurement]] = [[] for _ in exits]
    random = torch.Generator(device=model.device).manual_seed(seed)
    long_enough = (answers.predicts.sum(1) > DEPTHS).nonzero()[:, 0]
    for rows in long_enough.split(_MEASURED_TOGETHER) if len(long_enough) else ():
        some = answers.rows(rows)
        longest = int((some.documents == 1).sum(1).max())
        some = Corpus(*(tensor[:, :longest] for tensor in vars(some).values()))
        for found in _measure_rows(model, exits, head_rows, some, temperature, random):
            for of_exit, measured in zip(parts, found, strict=True):
                of_exit.append(measured)
        progress(len(rows))
    progress(len(answers) - len(long_enough))
    return [_joined(of_exit) for of_exit in parts]


def _measure_rows(
    model: Decoder,
    exits: list[Exit],
    head_rows: torch.Tensor | None,
    some: Corpus,
    temperature: float,
    random: torch.Generator,
) -> Iterator[list[Measurement]]:
    """Yields, for every answer, a measurement of every exit. All answers pass the layers together."""
    batch = some.to(model.device)
    features = text_features(model, some, len(some), model.device)
    states = hidden_states(model, batch)
    below = [next(states) for _ in range(max(exit.layer for exit in exits) + 1)]
    # The first root of every answer, and the end of its roots: DEPTHS tokens follow each of them.
    firsts: list[int] = some.predicts.int().argmax(1).tolist()
    lasts: list[int] = ((some.documents == 1).sum(1) - DEPTHS).tolist()
    longest = max(last - first for first, last in zip(firsts, lasts, strict=True))
    steps = torch.arange(longest, device=model.device)
    # [rows, longest] roots from each answer's first prediction on; shorter answers repeat their last one, unused.
    roots = torch.stack([(first + steps).clamp(max=last - 1) for first, last in zip(firsts, lasts, strict=True)])
    ends = torch.stack([(first - 1 - torch.arange(PROMPT_END, device=model.device)).clamp(min=0) for first in firsts])
    drafts = [draft_head_inputs(e, below[e.layer], features, batch, roots, DEPTHS) for e in exits]
    at_ends = [draft_head_inputs(e, below[e.layer], features, batch, ends, 1)[0] for e in exits]
    for row, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        final_states = features[row, :, : model.config.hidden_size]
        tokens, noise = batch.tokens[row, : last + DEPTHS], None
        if temperature:
            logits = model.project(final_states[first : len(tokens) - 1], model.head) / temperature
            noise = noise_behind(logits, tokens[first + 1 :], random)
        answer = _Answer(tokens, first, last, temperature, noise, final_states)
        yield [
            answer.measured(
                exit.with_head_rows(head_rows, [answer.prompt]),
                [head_input[row, : last - first] for head_input in drafted],
                end[row, : min(first, PROMPT_END)],
            )
            for exit, drafted, end in zip(exits, drafts, at_ends, strict=True)
        ]


@dataclass(frozen=True)
class _Answer:
    """One answer, and the model's normed final states along it."""

    tokens: torch.Tensor  # [T] prompt and answer
    first: int  # the first root
    last: int  # the end of the roots
    temperature: float
    noise: torch.Tensor | None  # [T - 1 - first, V] from the first root on; None: greedy
    final_states: torch.Tensor  # [.., hidden]

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.first + 1].tolist()

    def measured(self, exit: Exit, drafted: list[torch.Tensor], at_end: torch.Tensor) -> Measurement:
        roots = torch.arange(self.first, self.last, device=self.tokens.device)
        ranks = []
        for depth, head_input in enumerate(drafted):
            at = roots + depth
            noise = None if self.noise is None else self.noise[at - self.first]
            ranks.append(text_ranks(exit, head_input, self.tokens[at + 1], noise, self.temperature or 1.0))
        following = roots[:, None] + torch.arange(1, DEPTHS + 1, device=roots.device)
        tokens = self.tokens[following].cpu().numpy()
        ends = self.first - 1 - torch.arange(len(at_end), device=roots.device)
        agreements = [self._agreement(exit, at_end, ends), self._agreement(exit, drafted[0], roots)]
        return Measurement(
            np.stack(ranks, axis=1), tokens, np.isin(tokens, self.prompt), [agreements[0]], [agreements[1]]
        )

    def _agreement(self, exit: Exit, head_input: torch.Tensor, places: torch.Tensor) -> float:
        """The share of positions where the exit's best token is the model's."""
        if not len(places):
            return 0.0
        best = exit.model.project(self.final_states[places], exit.model.head).argmax(-1)
        return float((exit.to_token_ids(exit.logits(head_input).argmax(-1)) == best).float().mean())


def noise_behind(logits: torch.Tensor, chosen: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Draws Gumbel noise [W, V] under the condition that it makes `chosen` [W] the argmax of logits [W, V] + noise."""
    noise = torch.empty_like(logits).exponential_(generator=random).log_().neg_()
    top = noise.new_empty(len(logits), 1).exponential_(generator=random).log_().neg_()
    top += logits.logsumexp(-1, keepdim=True)  # the maximum; its distribution does not depend on its index
    below = -torch.logaddexp(-top, -(logits + noise))  # the others, under the condition that they are smaller
    return below.scatter_(1, chosen[:, None], top) - logits


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
