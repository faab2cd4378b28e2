"""Scores prompts: the share of their last 32 positions at which exit and model agree, in one pass over all slots.

Prefill passes keep the states of these positions. What follows from the shares is decided by the governor.
"""

from __future__ import annotations

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Scratch
from selfspec.backends.cuda.exit import FusedExit, Past
from selfspec.backends.cuda.slots import Slots
from selfspec.cache.kv_cache import Cache
from selfspec.kernels.lm_head_topk import lm_head_scores
from selfspec.kernels.topk import Scores, topk_tokens
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import FEATURE_STATES, Exit
from selfspec.speculation.exit_scoring import PROMPT_END


def ends_buffer(model: Decoder, texts: int) -> torch.Tensor:
    """Room for what is known of the last positions of so many texts, [PROMPT_END, texts, ...]: of each the state after
    layer N, what was known one position before, and what the model's head reads."""
    width = (2 + FEATURE_STATES) * model.config.hidden_size
    return torch.zeros(PROMPT_END, texts, width, dtype=model.dtype, device=model.device)


class PromptScore:
    """A pass over the ends of the prompts at all slots. Nothing is stored: the exit's cache has these positions."""

    def __init__(
        self, model: Decoder, cache: Cache, scratch: Scratch, slots: Slots, reach: int, exit: Exit, ends: torch.Tensor
    ) -> None:
        self.model, self.slots, self.exit, self.ends = model, slots, exit, ends
        self.count, self.page_table = slots.count, slots.page_table
        self.counts, self._stored = torch.zeros_like(slots.lengths), torch.zeros_like(slots.lengths)
        self.lengths = torch.zeros_like(slots.lengths)  # of the texts before what is judged
        self.agreement = torch.zeros(slots.count, device=model.device)  # the share of them, by slot
        self.fused = FusedDecoder(model, cache, scratch, self, reach)
        self.nodes = Nodes.chain(model, len(ends), slots.count)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return [self.counts, self._stored, self.lengths, self.agreement, *vars(self.nodes.places).values()]

    def launch(self) -> None:
        hidden, fused = self.model.config.hidden_size, self.fused
        torch.clamp(self.slots.lengths, max=len(self.ends), out=self.counts)  # 0 for idle slots
        torch.sub(self.slots.lengths, self.counts, out=self.lengths)
        states, previous, own = self.ends.flatten(0, 1).split((hidden, FEATURE_STATES * hidden, hidden), dim=1)
        exit, rows = FusedExit(fused, self.exit), len(states)
        exit.stand(self.nodes, self.slots.pending, self._stored)
        reads = fused.scratch.take("judged reads", 2 * rows, hidden, dtype=self.model.dtype)
        left = exit.read(states, Past(previous, None), self.nodes, exit.reads(rows))
        fused.normalise(left, self.exit.norm, reads[:rows])
        reads[rows:].copy_(own)
        guesses, truth = self._best(reads).view(2, -1, self.count)
        agreed = (guesses == truth) & (self.nodes.depths[:, None] < self.counts)
        torch.div(agreed.sum(0), self.counts.clamp(min=1), out=self.agreement)

    def _best(self, reads: torch.Tensor) -> torch.Tensor:
        """Over the whole head, since what is captured cannot know a request's own."""
        vocabulary, scratch = self.model.config.vocab_size, self.fused.scratch
        scores = scratch.take_like(Scores.empty(len(reads), vocabulary, 1, "meta"))
        chosen = scratch.take("judged", len(reads), 1, dtype=torch.int32)
        lm_head_scores(reads, self.model.head, scores, softcap=self.model.config.logit_softcap)
        topk_tokens(scores, chosen)
        return chosen
