"""One step of B slots as kernels: draft, verify, choose, accept, commit.

The host writes sequences into slots before the step and reads the step's report after it. On a GPU `graphs.py` captures
a step once and replays it. With callables or grammars the host works between parts of the step, each of which is
captured on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Tree, head_logits
from selfspec.backends.cuda.exit import FusedExit, PreviousFeatures, SlotExit
from selfspec.backends.cuda.slots import Slots, StepOptions
from selfspec.backends.cuda.step_draft import SlotSampling, StepDraft
from selfspec.backends.cuda.step_masks import StepMasks
from selfspec.kernels.accept import COUNT, TOKENS, accept
from selfspec.kernels.embed_rope import RowMetadata
from selfspec.kernels.kv_compaction import compact_kv
from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_scores
from selfspec.kernels.sample import SampleWorkspace, sample_scored
from selfspec.kernels.score_logits import score_logits
from selfspec.kernels.topk import Scores, topk_tokens
from selfspec.logprobs import state_logprobs
from selfspec.speculation.plan import Plan


class DeviceStep:
    """One step of B slots with one plan: R = B * (n + 1) rows for the root and n nodes, node-major.

    A plain step does not run the exit: it keeps the states from which `exit_scoring.py` fills the exit's KV later.
    """

    PARTS = "run_passes_and_head", "choose_processed", "accept_and_commit"  # callables process logits between them

    @staticmethod
    def masked_parts(plan: Plan) -> tuple[str, ...]:
        """Names of the methods that together are a step with grammars. The host writes masks and forced tokens before
        `draft_masked`, and masks before `choose_masked`."""
        if not len(plan):
            return "run_passes", "choose_masked"
        return (*(["draft_root"] if plan.uses_exit else []), "draft_masked", "verify", "choose_masked")

    def __init__(
        self, decoder: FusedDecoder, slots: Slots, plan: Plan, exit: SlotExit | None, options: StepOptions
    ) -> None:
        self.decoder, self.model, self.slots, self.plan, self.exit = decoder, decoder.model, slots, plan, exit
        device, batch = self.model.device, slots.count
        rows = batch * (len(plan) + 1)
        tree = Tree(plan, batch, device, 0 if exit is None else exit.first_node_row)
        self.sampling = SlotSampling(slots, options, tree)
        self.masks = StepMasks(tree, self.model.config.vocab_size, decoder.scratch) if options.grammar_masks else None
        self.draft = StepDraft(decoder, self.sampling, exit, self.masks)
        # Output of layers N..L-1. Without an exit verify overwrites its input, the draft's states.
        self._verify_states = self.draft.states if exit is None else FusedExit(decoder, exit.exit).block_residual(rows)
        self.chosen = torch.zeros(rows, 1, dtype=torch.int32, device=device)  # the model's token after each row
        self.paths = torch.zeros(batch, plan.depth + 1, dtype=torch.int32, device=device)  # accepted nodes, root first
        # Read by the host. Columns (see `kernels.accept`): number of tokens, last node, last node of the exit, tokens.
        self.report = torch.zeros(batch, TOKENS + plan.depth + 1, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that belong to this step alone."""
        return [self.chosen, self.paths, self.report, *self.draft.tensors]

    @property
    def metadata(self) -> RowMetadata:
        """Token, position, cache slot and rotation of each of the R rows."""
        return self.draft.metadata

    @property
    def rows(self) -> int:
        return len(self.chosen)

    @property
    def parents(self) -> torch.Tensor:
        """The parents of the nodes of every slot's tree [B, n + 1]; the root's is 0."""
        return self.sampling.tree.tensors.parents

    def launch(self) -> None:
        self.draft.run()
        self.verify()
        self.choose()
        self.accept()
        self.commit()

    def run_passes_and_head(self) -> None:
        """Drafts and verifies, then writes `logits` for callables to process."""
        self.run_passes()
        lm_head_logits(self.final_states, self.model.head.weight, self.logits, softcap=self.model.config.logit_softcap)

    def run_passes(self) -> None:
        """Drafts and verifies."""
        self.draft.run()
        self.verify()

    def accept_and_commit(self) -> None:
        self.accept()
        self.commit()

    def choose_masked(self) -> None:
        """Copies the masks of all rows to the device, then chooses, accepts and commits."""
        assert self.masks is not None
        self.masks.load(self.rows)
        self.choose()
        self.accept_and_commit()

    @cached_property
    def logits(self) -> torch.Tensor:
        """The model's logits at every row [R, V], float32, in scratch that the next `run_passes_and_head` of any step
        overwrites. Taken once: captured launches hold the address."""
        return self.decoder.scratch.take("logits", self.rows, self.model.config.vocab_size, dtype=torch.float32)

    # Draft

    def draft_root(self) -> None:
        """Drafts the first level: the root, and copied nodes unless they wait for forced tokens."""
        self.draft.run_first_level()

    def draft_masked(self) -> None:
        """Copies masks and forced tokens to the device, drafts the levels that wait for them, and copies the nodes'
        tokens, and a beam's parents, to the host."""
        assert self.masks is not None
        self.masks.load(self.slots.count)
        if self.plan.uses_exit:
            self.draft.run_other_levels()
        else:
            self.draft.run_first_level()
        self.masks.send(self.metadata.tokens, self.parents)

    # Verify

    def verify(self) -> None:
        """Runs the saved states of all rows through layers N..L-1 and writes `final_states`. In a step that drafted,
        also writes the exit block's keys and values again, now from the features that verify computed."""
        slot_exit, all_nodes = self.exit, self.draft.nodes(range(len(self.plan) + 1))
        unfilled = None if slot_exit is None or len(self.plan) else slot_exit.unfilled
        if slot_exit is None or slot_exit.features is None:
            layers = range(self.draft.exit_layer, self.model.config.num_layers)
            last = self.decoder.run(layers, self.draft.states, self._verify_states, all_nodes)
            kept = None if unfilled is None else self.draft.states.states
            self.decoder.final_norm(last, self._verified, hidden=kept, unfilled=unfilled)
            return
        exit = FusedExit(self.decoder, slot_exit.exit)
        last = exit.scratch_residual("last", self.rows)
        exit.verify(self.draft.states, self._verify_states, all_nodes, self._verified, last, unfilled)
        if len(self.plan):
            previous = PreviousFeatures(slot_exit.features, self.sampling.tree.previous_rows)
            exit.fill(self.draft.states.states, previous, all_nodes)

    @property
    def _verified(self) -> torch.Tensor:
        """The output of `verify`: the features of all rows [R, 2 * hidden], or without an exit block their normed final
        states [R, hidden]. A plain step writes to the slots' own rows of `SlotExit.features`. A step that drafts writes
        to the nodes' rows; `commit` then copies the row of the last accepted node to the slot's."""
        if self.exit is None or self.exit.features is None:
            return self.draft.head_input.values
        return self.exit.features[self.exit.first_node_row if len(self.plan) else 0 :][: self.rows]

    @property
    def final_states(self) -> torch.Tensor:
        """The model's normed final states of all rows [R, hidden] after `verify`: the input of its LM head."""
        return self._verified[:, : self.model.config.hidden_size]

    # Choose and accept

    def choose(self) -> None:
        """Chooses the model's next token after every row; -1 where its logits are not finite."""
        softcap, head = self.model.config.logit_softcap, self.model.head.weight
        states, masks = self.final_states, None if self.masks is None else self.masks.first(self.rows)
        self._choose(partial(lm_head_scores, states, head, softcap=softcap, masks=masks))

    def choose_processed(self) -> None:
        """Chooses from `logits`, after callables have processed those of some rows; see `choose`."""
        self._choose(partial(score_logits, self.logits))

    def _choose(self, score_all: Callable[..., None]) -> None:
        """Writes `chosen` from the scores that `score_all(scores, noise=, truncation=, processing=)` writes."""
        vocabulary, sampling, scratch = self.model.config.vocab_size, self.sampling, self.decoder.scratch
        noise, truncation = sampling.noise(self.metadata), sampling.truncation
        processing = sampling.processing(self.metadata, self.metadata, 0)
        options = {"noise": noise, "truncation": truncation, "processing": processing}
        if truncation is None or noise is None:
            scores = scratch.take_like(Scores.empty(self.rows, vocabulary, 1, "meta"))
            score_all(scores, **options)
            topk_tokens(scores, self.chosen, finite=True)
            return
        work = scratch.take_like(SampleWorkspace.empty(self.rows, vocabulary, "meta", truncation.small_top_k))
        score_all(work.scores, **options)
        sample_scored(vocabulary, self.chosen.view(-1), work, noise=noise, truncation=truncation)

    def logprobs(self, top: int) -> torch.Tensor:
        """Returns log probabilities of the tokens that the step emitted and of the `top` likeliest tokens in their
        place, packed as in `pack_logprobs`: [B, depth + 1, 1 + 2 * top]. Entries past a slot's accepted length are
        undefined."""
        count = self.slots.count
        rows = self.paths.long() * count + torch.arange(count, device=self.paths.device)[:, None]
        states, tokens = self.final_states.index_select(0, rows.flatten()), self.report[:, TOKENS:].flatten()
        return state_logprobs(states, tokens, top, partial(head_logits, self.model)).unflatten(0, self.paths.shape)

    def accept(self) -> None:
        """Walks down the trees along the chosen tokens; writes `paths` and `report`; updates the slots' lengths, newest
        tokens, texts and token counts."""
        slots = self.slots
        counts = slots.store.counts[: slots.count] if self.sampling.options.processes else None
        accept(
            self.chosen.view(-1), self.metadata.tokens, self.sampling.tree.tensors, slots.active, slots.lengths,
            slots.lengths_before, slots.newest_tokens, self.paths, self.report, slots.texts, counts=counts,
            stops=slots.stops,
        )  # fmt: skip

    # Commit

    def commit(self) -> None:
        """Makes the KV of the accepted paths contiguous, and copies the feature of each path's last node to its slot's
        row. A plain step has nothing to move."""
        if not len(self.plan):
            return
        slots, cache = self.slots, self.decoder.cache
        features, first = (None, 0) if self.exit is None else (self.exit.features, self.exit.first_node_row)
        compact_kv(
            cache.keys, cache.values, slots.page_table, slots.lengths_before, self.report[:, COUNT], self.paths,
            features, first,
        )  # fmt: skip
