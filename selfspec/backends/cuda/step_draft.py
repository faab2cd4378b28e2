"""The draft of one step as kernels: runs the root and the nodes, level by level, through the layers below the exit.

`step.py` verifies the states that the draft saves. `decoder.py` runs the layers, `exit.py` ranks draft tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Residual, Tree, empty_metadata
from selfspec.backends.cuda.exit import FusedExit, HeadInput, PreviousFeatures, SlotExit
from selfspec.backends.cuda.slots import Slots, StepOptions
from selfspec.backends.cuda.step_masks import StepMasks
from selfspec.kernels.beam import BeamLevel, choose_nodes
from selfspec.kernels.copy_draft import copy_draft, tiles_of
from selfspec.kernels.embed_rope import RowMetadata, embed_rope
from selfspec.kernels.logits_processing import Processing
from selfspec.kernels.noise import Noise, Truncation
from selfspec.kernels.topk import MAX_SCAN_WIDTH, Ranking, topk_tokens
from selfspec.sampling import CHOICE


class SlotSampling:
    """The sampling parameters of B slots as kernels take them. None replaces parameters that `options` exclude."""

    def __init__(self, slots: Slots, options: StepOptions, tree: Tree) -> None:
        self.slots, self.options, self.tree = slots, options, tree

    @property
    def truncation(self) -> Truncation | None:
        if not self.options.samples:
            return None
        slots = self.slots
        return Truncation(slots.top_k, slots.top_p, slots.min_p, small_top_k=not self.options.processes)

    def noise(self, rows: RowMetadata) -> Noise | None:
        """The noise of the tokens that follow these rows."""
        slots = self.slots
        keys = slots.seeds, slots.sample_indices, rows.next_positions, slots.temperature
        return Noise(*keys, CHOICE) if self.options.samples else None

    def processing(self, rows: RowMetadata, all_rows: RowMetadata, first_node: int) -> Processing | None:
        """The processing of the logits at `rows`, which are the nodes from `first_node` on. `all_rows` has the tokens
        of all nodes: penalties count those on a node's path."""
        if not self.options.processes:
            return None
        slots, store, count = self.slots, self.slots.store, self.slots.count
        return Processing(
            slots.repetition, slots.presence, slots.frequency, store.bias[:count], store.counts[:count],
            slots.min_length, slots.stops, rows.next_positions, self.tree.paths, self.tree.depths, all_rows.tokens,
            first_node,
        )  # fmt: skip


class StepDraft:
    """The draft of a step of B slots: R = B * (n + 1) rows for the root and n nodes, node-major."""

    def __init__(
        self, decoder: FusedDecoder, sampling: SlotSampling, exit: SlotExit | None, masks: StepMasks | None
    ) -> None:
        self.decoder, self.sampling, self.exit, self.masks = decoder, sampling, exit, masks
        self.slots, model, tree = sampling.slots, decoder.model, sampling.tree
        plan, batch = tree.plan, sampling.slots.count
        rows = batch * (len(plan) + 1)
        self.states = Residual.empty(rows, model)  # after the layers below the exit
        self.metadata = empty_metadata(model, rows)
        self.head_input = HeadInput.empty(rows, model)  # of the exit's head
        levels = plan.levels
        if masks is not None and plan.uses_exit:  # the root runs before forced tokens are computed
            levels = (range(1), range(1, levels[1].stop), *levels[2:])
        self._levels = [_Level(tree, level) for level in levels]
        # Tokens of roots and copied nodes, node-major; unused where nothing is copied.
        self._first_tokens = torch.zeros(batch * (plan.copied + 1), dtype=torch.int32, device=model.device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that belong to this step alone."""
        parts = self.head_input, self.states, self.metadata
        return [self._first_tokens, *(tensor for part in parts for tensor in vars(part).values())]

    @property
    def exit_layer(self) -> int:
        """N: layers below it draft, layers from it on verify; 0 without an exit."""
        return 0 if self.exit is None else self.exit.exit.layer

    def nodes(self, nodes: range) -> Nodes:
        """The arguments of a pass over these nodes."""
        at, tree = slice(nodes.start, nodes.stop), self.sampling.tree
        return Nodes(self.metadata.rows(*tree.rows(nodes)), tree.paths[:, at], tree.depths[at])

    def run(self) -> None:
        """Runs all levels."""
        self.run_first_level()
        self.run_other_levels()

    def run_first_level(self) -> None:
        """Runs the first level: the root and the copied nodes. With masks and an exit, copied nodes run with the
        second level, once the host has written forced tokens."""
        self._run_level(self._levels[0], None)

    def run_other_levels(self) -> None:
        """Runs the other levels: ranks the children of the level above, then runs them."""
        for above, level in pairwise(self._levels):
            assert self.exit is not None
            self._run_level(level, self._rank_children(self.exit, above))

    def _run_level(self, level: _Level, ranked: torch.Tensor | Ranking | BeamLevel | None) -> None:
        """Runs a level's nodes through the layers below the exit and, if they have children to rank, through the
        exit's block. `ranked`: the draft tokens after the level above; None for the first level."""
        if level.given:
            copies, first = level.given.stop > 1, level.given.start * self.slots.count
            self._embed(level.given, given_tokens=self._copy()[first:] if copies else self.slots.newest_tokens)
        if isinstance(ranked, BeamLevel):
            self._embed(level.drafted, given_tokens=self._choose_nodes(level.drafted, ranked), begins=True)
        elif ranked is not None:
            self._embed(level.drafted, ranked=ranked, parents=level.parents, ranks=level.ranks)
        states, nodes = self.states.rows(*level.rows), self.nodes(level.nodes)
        self.decoder.run(range(self.exit_layer), states, states, nodes)
        if self.exit is not None and level.width:
            self._run_exit_block(self.exit, level)

    def _embed(self, nodes: range, **tokens: Any) -> None:
        """Embeds the tokens of some nodes of a level; `tokens` are the arguments of `embed_rope` that give them."""
        decoder, slots, passed = self.decoder, self.slots, self.nodes(nodes)
        model, states = decoder.model, self.states.rows(*self.sampling.tree.rows(nodes))
        embed_rope(
            passed.metadata, states.states, decoder.next_norm(model.layers[0].attention_norm, states),
            model.embedding.weight, model.embedding_scale, slots.lengths, slots.page_table, passed.depths,
            decoder.inv_freq, decoder.rope_scaling, nodes.start, **tokens,
        )  # fmt: skip

    def _choose_nodes(self, nodes: range, candidates: BeamLevel) -> torch.Tensor:
        """Adds the nodes of one depth of a beam to the slots' trees. Returns their tokens [len(nodes) * B]."""
        tokens = self.decoder.scratch.take("beam tokens", len(nodes) * self.slots.count, dtype=torch.int32)
        choose_nodes(candidates, tokens, nodes.start)
        return tokens

    def _copy(self) -> torch.Tensor:
        """Returns the tokens of roots and copied nodes [(copied + 1) * B]: the slots' newest tokens and the tokens
        copied from their texts. Forced tokens of a grammar replace copied ones."""
        slots, tiles = self.slots, tiles_of(self.decoder.max_context)
        keys = self.decoder.scratch.take("copy keys", slots.count, tiles, dtype=torch.int64)
        forced = None if self.masks is None else self.masks.forced
        copy_draft(slots.texts, slots.lengths, slots.newest_tokens, self._first_tokens, keys, forced)
        return self._first_tokens

    def _run_exit_block(self, slot_exit: SlotExit, level: _Level) -> None:
        """Runs the exit's block over the level's expanded nodes and writes the input of its head to `head_input`."""
        start, stop = level.expanded_rows
        states, nodes = self.states.rows(start, stop), self.nodes(level.expanded)
        previous = PreviousFeatures(self.head_input.values, level.parent_rows, self.head_input.squares)
        if level.parent_rows is None and slot_exit.features is not None:
            previous = PreviousFeatures(slot_exit.features[: self.slots.count], None)
        exit = FusedExit(self.decoder, slot_exit.exit)
        exit.run_block(states.states, previous, nodes, self.head_input.rows(start, stop))

    def _rank_children(self, slot_exit: SlotExit, level: _Level) -> torch.Tensor | Ranking | BeamLevel:
        """Ranks the best `level.width` draft tokens after each expanded row of a level.

        Returns for a beam the tokens with their log probabilities. Else, up to MAX_SCAN_WIDTH tokens, the ranking, from
        which the kernel that embeds the next level takes the tokens; for more the tokens [rows, width]. The root's mask
        bans some of its children; masks of other nodes are computed later.
        """
        (start, stop), metadata, sampling = level.expanded_rows, self.nodes(level.expanded).metadata, self.sampling
        exit, head_input = FusedExit(self.decoder, slot_exit.exit), self.head_input.rows(start, stop)
        processing = sampling.processing(metadata, self.metadata, level.expanded.start)
        masks = None if start or self.masks is None else self.masks.first(stop)
        ranking = exit.rank(slot_exit.head, head_input, level.width, sampling.noise(metadata), processing, masks)
        beam, size = sampling.tree.beam, (stop - start, level.width)
        if beam is None and level.width <= MAX_SCAN_WIDTH:
            return ranking
        ranked = self.decoder.scratch.take("ranked", *size, dtype=torch.int32)
        log_probs = None if beam is None else self.decoder.scratch.take("log probs", *size, dtype=torch.float32)
        topk_tokens(ranking.scores, ranked, token_ids=ranking.token_ids, log_probs_out=log_probs)
        if beam is None or log_probs is None:
            return ranked
        return BeamLevel(ranked, log_probs, level.expanded.start, beam)


class _Level:
    """The nodes that run through the layers below the exit together."""

    def __init__(self, tree: Tree, nodes: range) -> None:
        first = tree.plan.copied + 1  # of the nodes that the exit drafts
        self.nodes, self.rows = nodes, tree.rows(nodes)
        self.given = range(nodes.start, min(nodes.stop, first))  # root and copied nodes
        self.drafted = range(max(nodes.start, first), nodes.stop)  # drafted by the exit
        self.expanded = self.drafted or range(1)  # nodes whose children the exit ranks: copied nodes have none
        self.width, self.expanded_rows = tree.plan.width(self.expanded), tree.rows(self.expanded)
        # Of drafted nodes: parents and ranks (None in a beam), and their parents' rows in `head_input`.
        self.parents = self.ranks = self.parent_rows = None
        if self.drafted and tree.beam is not None:
            self.parent_rows = tree.beam.parent_rows[slice(*self.expanded_rows)]
        elif self.drafted:
            self.parents, self.ranks = tree.parents_in_level(self.drafted), tree.ranks(self.drafted)
            self.parent_rows = tree.parent_rows(self.drafted, 0)
