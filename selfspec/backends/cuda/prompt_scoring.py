"""Scores the exit on prompts: the share of a prompt's last 32 positions at which exit and model have the same best
token.

Prefill passes keep the states of these positions; one pass over all slots compares exit and model there. The governor
reads the shares.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes
from selfspec.backends.cuda.exit import FusedExit, PreviousFeatures
from selfspec.backends.cuda.readback import Readback, Readbacks
from selfspec.backends.cuda.slots import Slots, host_tensor
from selfspec.kernels.lm_head_topk import lm_head_scores
from selfspec.kernels.topk import Scores, topk_tokens
from selfspec.sequence import Sequence
from selfspec.speculation.exit import FEATURE_STATES, Exit
from selfspec.speculation.exit_scoring import PROMPT_END


class PromptScore:
    """The pass over the last PROMPT_END positions of the prompts of B slots. Writes no KV: prefill has written it."""

    def __init__(self, decoder: FusedDecoder, slots: Slots, exit: Exit, prompt_end: torch.Tensor) -> None:
        model = decoder.model
        self.slots, self.exit, self.prompt_end = slots, exit, prompt_end  # see `exit.prompt_end_buffer`
        self.count, self.page_table = slots.count, slots.page_table
        self.prompt_lengths = torch.zeros_like(slots.lengths)  # positions of each slot's prompt; 0: not scored
        self.counts = torch.zeros_like(slots.lengths)  # scored positions of each slot
        self._no_rows = torch.zeros_like(slots.lengths)  # rows of each slot whose KV is written: none
        self.lengths = torch.zeros_like(slots.lengths)  # positions before the scored ones
        self.agreement = torch.zeros(slots.count, device=model.device)  # share of the scored positions, by slot
        self.decoder = decoder.with_contexts(self)
        self.nodes = Nodes.chain(model, len(prompt_end), slots.count)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that belong to this pass alone."""
        own = self.prompt_lengths, self.counts, self._no_rows, self.lengths, self.agreement
        return [*own, *vars(self.nodes.metadata).values()]

    def load(self, slots: Seq[int], states: Seq[torch.Tensor], lengths: Seq[int]) -> None:
        """Copies the inputs of the next launch to the device: for each of these slots the states at its prompt's last
        positions [PROMPT_END, 4 * hidden], and the number of its prompt's positions in the cache."""
        host = host_tensor(self.prompt_lengths, self.prompt_lengths.device)
        all_lengths = host.numpy()
        all_lengths[:] = 0
        all_lengths[slots] = lengths
        self.prompt_lengths.copy_(host, non_blocking=True)
        for slot, prompt_end in zip(slots, states, strict=True):
            self.prompt_end[:, slot].copy_(prompt_end)

    def launch(self) -> None:
        decoder, hidden = self.decoder, self.decoder.model.config.hidden_size
        torch.clamp(self.prompt_lengths, max=len(self.prompt_end), out=self.counts)
        torch.sub(self.prompt_lengths, self.counts, out=self.lengths)
        sizes = (hidden, FEATURE_STATES * hidden, hidden)
        # Each [PROMPT_END * B, ...]: the states after N layers, the previous features, the model's final states.
        states, previous, final_states = self.prompt_end.flatten(0, 1).split(sizes, dim=1)
        exit, rows = FusedExit(decoder, self.exit), len(states)
        exit.fill_metadata(self.nodes, self.slots.newest_tokens, self._no_rows)
        head_inputs = decoder.scratch.take("prompt end inputs", 2 * rows, hidden, dtype=decoder.model.dtype)
        exit_states = exit.run_block(states, PreviousFeatures(previous, None), self.nodes, exit.head_input(rows))
        decoder.rms_norm(exit_states, self.exit.norm, head_inputs[:rows])
        head_inputs[rows:].copy_(final_states)
        drafted, chosen = self._best_tokens(head_inputs).view(2, -1, self.count)
        agreed = (drafted == chosen) & (self.nodes.depths[:, None] < self.counts)
        torch.div(agreed.sum(0), self.counts.clamp(min=1), out=self.agreement)

    def _best_tokens(self, head_inputs: torch.Tensor) -> torch.Tensor:
        """Returns the best token of the whole LM head at each row [rows, 1]. Does not use the draft head, whose rows
        may change between prefill and this pass."""
        model, scratch = self.decoder.model, self.decoder.scratch
        scores = scratch.take_like(Scores.empty(len(head_inputs), model.config.vocab_size, 1, "meta"))
        best = scratch.take("prompt end tokens", len(head_inputs), 1, dtype=torch.int32)
        lm_head_scores(head_inputs, model.head.weight, scores, softcap=model.config.logit_softcap)
        topk_tokens(scores, best)
        return best


class PromptScoresInFlight:
    """The scores of one pass over prompt ends, until they are read."""

    def __init__(self, readbacks: Readbacks) -> None:
        self._readbacks = readbacks
        # The scored sequences, their slots, and the readback of the shares; None: nothing to read.
        self.in_flight: tuple[list[Sequence], list[int], Readback] | None = None

    def send(self, score: PromptScore, sequences: list[Sequence], slots: list[int]) -> None:
        """Launches the copy of the shares of these sequences' slots to the host."""
        readback = self._readbacks.take(score.agreement)
        readback.send(score.agreement)
        self.in_flight = sequences, slots, readback

    def read(self) -> dict[Sequence, tuple[float, int]]:
        """Returns by sequence the share of the scored positions at which exit and model agree, and the number of scored
        positions; nothing until the shares have arrived."""
        if self.in_flight is None or not self.in_flight[2].is_done:
            return {}
        (sequences, slots, readback), self.in_flight = self.in_flight, None
        shares = readback.read()
        self._readbacks.give_back(readback)
        scored = zip(sequences, slots, strict=True)
        return {sequence: (shares[slot], min(len(sequence.prompt) - 1, PROMPT_END)) for sequence, slot in scored}
