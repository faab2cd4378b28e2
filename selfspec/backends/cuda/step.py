"""One step of B slots as kernels: draft, verify, choose, accept, commit.

The host writes sequences into slots before the step and reads its report after it. On CUDA `graphs.py` captures a step
once and replays it. With callables or grammars, the parts between which the host works are captured separately.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Residual, Tree, empty_metadata, head_logits
from selfspec.backends.cuda.exit import FusedExit, HeadInput, PreviousFeatures, SlotExit
from selfspec.backends.cuda.slots import Slots, StepOptions
from selfspec.backends.cuda.step_masks import StepMasks
from selfspec.kernels.accept import COUNT, TOKENS, accept
from selfspec.kernels.beam import BeamLevel, choose_nodes
from selfspec.kernels.copy_draft import copy_draft, tiles_of
from selfspec.kernels.embed_rope import RowMetadata, embed_rope
from selfspec.kernels.kv_compaction import compact_kv
from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_scores
from selfspec.kernels.logits_processing import Processing
from selfspec.kernels.noise import Noise, Truncation
from selfspec.kernels.sample import SampleWorkspace, sample_scored
from selfspec.kernels.score_logits import score_logits
from selfspec.kernels.topk import MAX_SCAN_WIDTH, Ranking, Scores, topk_tokens
from selfspec.logprobs import state_logprobs
from selfspec.sampling import TARGET
from selfspec.speculation.plan import Plan


class SlotSampling:
    """The slots' sampling parameters as kernels take them. Parameters that `options` exclude are not passed."""

    def __init__(self, slots: Slots, options: StepOptions, tree: Tree) -> None:
        self.slots, self.options, self.tree = slots, options, tree

    @property
    def truncation(self) -> Truncation | None:
        if not self.options.truncates:
            return None
        slots = self.slots
        return Truncation(slots.top_k, slots.top_p, slots.min_p, small_top_k=self.options.small_top_k)

    def noise(self, rows: RowMetadata) -> Noise | None:
        """The noise of the tokens that follow these rows."""
        slots = self.slots
        keys = slots.seeds, slots.sample_indices, rows.next_positions, slots.temperature
        return Noise(*keys, TARGET) if self.options.samples else None

    def processing(self, rows: RowMetadata, all_rows: RowMetadata, first_node: int) -> Processing | None:
        """Processing of the logits at `rows`, which are the nodes from `first_node` on. `all_rows` has the tokens of
        all nodes, which penalties count along a node's path."""
        if not self.options.processes:
            return None
        slots, store, count = self.slots, self.slots.store, self.slots.count
        return Processing(
            slots.repetition, slots.presence, slots.frequency, store.bias[:count], store.counts[:count],
            slots.min_length, slots.stops, rows.next_positions, self.tree.paths, self.tree.depths, all_rows.tokens,
            first_node,
        )  # fmt: skip


class DeviceStep:
    """One step of B slots with one plan: R = B * (n + 1) rows for the root and n nodes, node-major.

    A plain step does not run the exit: it keeps the states from which `exit_scoring.py` fills the exit's KV later.
    """

    PARTS = "launch_passes", "choose_processed", "accept_and_commit"  # between which callables process logits

    @staticmethod
    def masked_parts(plan: Plan) -> tuple[str, ...]:
        """The parts of a step with grammars: the host writes masks and forced tokens before `draft_masked`, and masks
        before `choose_masked`."""
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
        self.draft_states = Residual.empty(rows, self.model)  # after the layers below the exit
        # After the layers from the exit on; a step without an exit overwrites its draft states.
        self._verify_states = self.draft_states if exit is None else FusedExit(decoder, exit.exit).block_residual(rows)
        self.metadata = empty_metadata(self.model, rows)
        self.head_input = HeadInput.empty(rows, self.model)  # of the exit; without an exit block also of the model
        self.chosen = torch.zeros(rows, 1, dtype=torch.int32, device=device)  # the target's token after each row
        self.paths = torch.zeros(batch, plan.depth + 1, dtype=torch.int32, device=device)  # accepted nodes
        # For the host: see `kernels.accept`.
        self.report = torch.zeros(batch, TOKENS + plan.depth + 1, dtype=torch.int32, device=device)
        levels = plan.levels
        if options.grammar_masks and plan.uses_exit:  # the root runs before forced tokens are known
            levels = (range(1), range(1, levels[1].stop), *levels[2:])
        self._levels = [_Level(tree, level) for level in levels]
        # Of roots and copied nodes, node-major; unused where nothing is copied.
        self._first_tokens = torch.zeros(batch * (plan.copied + 1), dtype=torch.int32, device=device)
        self.masks = StepMasks(tree, self.model.config.vocab_size, decoder.scratch) if options.grammar_masks else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that belong to this step alone."""
        own = [self.chosen, self.paths, self.report, self._first_tokens]
        return own + [
            tensor for part in (self.head_input, self.draft_states, self.metadata) for tensor in vars(part).values()
        ]

    @property
    def rows(self) -> int:
        return len(self.chosen)

    @property
    def parents(self) -> torch.Tensor:
        """The parents of the nodes of every slot's tree [B, n + 1], the root's being 0."""
        return self.sampling.tree.tensors.parents

    def launch(self) -> None:
        self.run_passes()
        self.choose()
        self.accept()
        self.commit()

    def launch_passes(self) -> None:
        """Draft and verify, then all logits, for callables to process."""
        self.run_passes()
        lm_head_logits(self.final_states, self.model.head.weight, self.logits, softcap=self.model.config.logit_softcap)

    def run_passes(self) -> None:
        self.draft()
        self.verify()

    def accept_and_commit(self) -> None:
        self.accept()
        self.commit()

    def draft_masked(self) -> None:
        """Runs the levels below the root; in a plan that only copies, all levels. The root's children respect its mask,
        and forced tokens replace copied ones. Copies the nodes' tokens, and a beam's parents, to the host."""
        assert self.masks is not None
        self.masks.load(self.slots.count)
        if self.plan.uses_exit:
            self.draft_children()
        else:
            self.draft_root()
        self.masks.send(self.metadata.tokens, self.parents)

    def choose_masked(self) -> None:
        assert self.masks is not None
        self.masks.load(self.rows)
        self.choose()
        self.accept_and_commit()

    @cached_property
    def logits(self) -> torch.Tensor:
        """The model's logits at every row [R, V], float32; overwritten by the next `launch_passes` of any step. Taken
        from scratch once, because captured launches hold the address."""
        return self.decoder.scratch.take("logits", self.rows, self.model.config.vocab_size, dtype=torch.float32)

    # Draft

    def draft(self) -> None:
        """Level by level: ranks the children of the level above and runs them through the layers below the exit."""
        self.draft_root()
        self.draft_children()

    def draft_root(self) -> None:
        """The first level: the root and copied nodes; with grammars, copied nodes only in a plan that only copies."""
        self._draft_level(self._levels[0], None)

    def draft_children(self) -> None:
        for above, level in pairwise(self._levels):
            assert self.exit is not None
            self._draft_level(level, self._rank_children(self.exit, above))

    def _draft_level(self, level: _Level, ranked: torch.Tensor | Ranking | BeamLevel | None) -> None:
        """Runs a level's nodes through the layers below the exit and, where they have children, through the exit."""
        if level.unranked:
            copies, first = level.unranked.stop > 1, level.unranked.start * self.slots.count
            self._embed(level.unranked, given_tokens=self._copy()[first:] if copies else self.slots.newest_tokens)
        if isinstance(ranked, BeamLevel):
            self._embed(level.drafted, given_tokens=self._choose_nodes(level.drafted, ranked), begins=True)
        elif ranked is not None:
            self._embed(level.drafted, ranked=ranked, parents=level.parents, ranks=level.ranks)
        states, nodes = self.draft_states.rows(*level.rows), self._nodes(level.nodes)
        self.decoder.run(range(self._exit_layer), states, states, nodes)
        if self.exit is not None and level.width:
            self._read_exit(self.exit, level)

    def _embed(self, nodes: range, **tokens: Any) -> None:
        """Embeds the tokens of some nodes of a level; see `embed_rope` for where they come from."""
        decoder, slots, passed = self.decoder, self.slots, self._nodes(nodes)
        states = self.draft_states.rows(*self.sampling.tree.rows(nodes))
        embed_rope(
            passed.metadata, states.states, decoder.next_norm(self.model.layers[0].attention_norm, states),
            self.model.embedding.weight, self.model.embedding_scale, slots.lengths, slots.page_table, passed.depths,
            decoder.inv_freq, decoder.rope_scaling, nodes.start, **tokens,
        )  # fmt: skip

    def _choose_nodes(self, nodes: range, candidates: BeamLevel) -> torch.Tensor:
        """Adds the nodes of one depth of a beam to the slots' trees; returns their tokens."""
        tokens = self.decoder.scratch.take("beam tokens", len(nodes) * self.slots.count, dtype=torch.int32)
        choose_nodes(candidates, tokens, nodes.start)
        return tokens

    def _copy(self) -> torch.Tensor:
        """The tokens of roots and copied nodes, node-major: the slots' newest tokens and the copied ones; where a
        grammar forces tokens, these replace the copied ones."""
        slots, tiles = self.slots, tiles_of(self.decoder.max_context)
        keys = self.decoder.scratch.take("copy keys", slots.count, tiles, dtype=torch.int64)
        forced = None if self.masks is None else self.masks.forced
        copy_draft(slots.texts, slots.lengths, slots.newest_tokens, self._first_tokens, keys, forced)
        return self._first_tokens

    def _read_exit(self, slot_exit: SlotExit, level: _Level) -> None:
        """Runs the exit's block at one level and writes the input of its head to `head_input`."""
        start, stop = level.ranked_rows
        states, nodes = self.draft_states.rows(start, stop), self._nodes(level.ranked)
        previous = PreviousFeatures(self.head_input.values, level.parent_rows, self.head_input.squares)
        if level.parent_rows is None and slot_exit.features is not None:
            previous = PreviousFeatures(slot_exit.features[: self.slots.count], None)
        exit = FusedExit(self.decoder, slot_exit.exit)
        exit.read(states.states, previous, nodes, self.head_input.rows(start, stop))

    def _rank_children(self, slot_exit: SlotExit, level: _Level) -> torch.Tensor | Ranking | BeamLevel:
        """Returns the best draft tokens after a level's rows [rows, width], for a beam with their log probabilities; up
        to MAX_SCAN_WIDTH as a ranking, in which the next level's embedding finds them. Only the root has a mask."""
        (start, stop), metadata, sampling = level.ranked_rows, self._nodes(level.ranked).metadata, self.sampling
        exit, head_input = FusedExit(self.decoder, slot_exit.exit), self.head_input.rows(start, stop)
        processing = sampling.processing(metadata, self.metadata, level.ranked.start)
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
        return BeamLevel(ranked, log_probs, level.ranked.start, beam)

    # Verify

    @property
    def _exit_layer(self) -> int:
        """N: layers below it draft, layers from it on verify."""
        return 0 if self.exit is None else self.exit.exit.layer

    def verify(self) -> None:
        """Runs the saved states of all rows through layers N..L-1 and writes `final_states`. In a step that drafted,
        also writes the exit block's keys and values again, now from exact features."""
        slot_exit, all_nodes = self.exit, self._nodes(range(len(self.plan) + 1))
        unfilled = None if slot_exit is None or len(self.plan) else slot_exit.unfilled
        if slot_exit is None or slot_exit.features is None:
            layers = range(self._exit_layer, self.model.config.num_layers)
            last = self.decoder.run(layers, self.draft_states, self._verify_states, all_nodes)
            kept = None if unfilled is None else self.draft_states.states
            self.decoder.final_norm(last, self._verified, hidden=kept, unfilled=unfilled)
            return
        exit = FusedExit(self.decoder, slot_exit.exit)
        last = exit.scratch_residual("last", self.rows)
        exit.verify(self.draft_states, self._verify_states, all_nodes, self._verified, last, unfilled)
        if len(self.plan):
            previous = PreviousFeatures(slot_exit.features, self.sampling.tree.previous_rows)
            exit.fill(self.draft_states.states, previous, all_nodes)

    @property
    def _verified(self) -> torch.Tensor:
        """The output of `verify`: the features of all rows [R, 2 * hidden], without an exit block only their normed
        final states [R, hidden]. A plain step replaces the slots' own features; of a tree's features, `commit` copies
        that of the last node."""
        if self.exit is None or self.exit.features is None:
            return self.head_input.values
        return self.exit.features[self.exit.first_node_row if len(self.plan) else 0 :][: self.rows]

    @property
    def final_states(self) -> torch.Tensor:
        """The model's normed final states of all rows [R, hidden], after `verify`: the input of its LM head."""
        return self._verified[:, : self.model.config.hidden_size]

    # Choose and accept

    def choose(self) -> None:
        """Chooses the target's next token after every row; -1 where its logits are not finite."""
        softcap, head = self.model.config.logit_softcap, self.model.head.weight
        states, masks = self.final_states, None if self.masks is None else self.masks.first(self.rows)
        self._choose(partial(lm_head_scores, states, head, softcap=softcap, masks=masks))

    def choose_processed(self) -> None:
        """Chooses from `logits`, after callables have processed those of some rows; see `choose`."""
        self._choose(partial(score_logits, self.logits))

    def _choose(self, score_all: Callable[..., None]) -> None:
        """`score_all(scores, **options)` fills the scores that the choice is made from."""
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
        """Log probabilities of the tokens that the step emitted, from the final states of the nodes that they follow;
        see `pack_logprobs`. [B, depth + 1, 1 + 2 * top]; entries past a slot's accepted length are undefined."""
        count = self.slots.count
        rows = self.paths.long() * count + torch.arange(count, device=self.paths.device)[:, None]
        states, tokens = self.final_states.index_select(0, rows.flatten()), self.report[:, TOKENS:].flatten()
        return state_logprobs(states, tokens, top, partial(head_logits, self.model)).unflatten(0, self.paths.shape)

    def accept(self) -> None:
        """Walks down the trees along the chosen tokens; fills `paths` and `report`; advances the slots' lengths, newest
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
        """Makes the KV of the accepted paths contiguous, and copies the feature of each last node to its slot's row."""
        if not len(self.plan):
            return
        slots, cache = self.slots, self.decoder.cache
        features, first = (None, 0) if self.exit is None else (self.exit.features, self.exit.first_node_row)
        compact_kv(
            cache.keys,
            cache.values,
            slots.page_table,
            slots.lengths_before,
            self.report[:, COUNT],
            self.paths,
            features,
            first,
        )

    def _nodes(self, nodes: range) -> Nodes:
        at, tree = slice(nodes.start, nodes.stop), self.sampling.tree
        return Nodes(self.metadata.rows(*tree.rows(nodes)), tree.paths[:, at], tree.depths[at])


class _Level:
    """The nodes that pass the layers below the exit together: root and copied nodes first, then those that the exit
    drafts, with their parents and ranks."""

    def __init__(self, tree: Tree, nodes: range) -> None:
        first = tree.plan.copied + 1  # of the nodes that the exit drafts
        self.nodes, self.rows = nodes, tree.rows(nodes)
        self.unranked = range(nodes.start, min(nodes.stop, first))
        self.drafted = range(max(nodes.start, first), nodes.stop)
        self.ranked = self.drafted or range(1)  # nodes whose children the exit drafts
        self.width, self.ranked_rows = tree.plan.width(self.ranked), tree.rows(self.ranked)
        self.parents = self.ranks = self.parent_rows = None
        if self.drafted and tree.beam is not None:
            self.parent_rows = tree.beam.parent_rows[slice(*self.ranked_rows)]
        elif self.drafted:
            self.parents, self.ranks = tree.parents(self.drafted), tree.ranks(self.drafted)
            self.parent_rows = tree.parent_rows(self.drafted, 0)
