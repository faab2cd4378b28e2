"""A whole step on the device: draft, verify, choose, accept and commit for B slots, with nothing left to the host.

The host writes which sequences are in which slots and reads the report. On CUDA a step is captured once as a graph and
replayed; where a Python callable takes part in the choice, its passes, its choice and its commit are captured apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Stream, Tree, empty_places
from selfspec.backends.cuda.exit import Drafter, FusedExit, Past, Reads
from selfspec.backends.cuda.slots import Features, Slots
from selfspec.kernels.accept import TOKENS, accept
from selfspec.kernels.embed_rope import RowMetadata, embed_rope
from selfspec.kernels.kv_compaction import compact_kv
from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_scores
from selfspec.kernels.logits_processing import Processing
from selfspec.kernels.noise import Noise, Truncation
from selfspec.kernels.sample import SampleWorkspace, sample_scored
from selfspec.kernels.score_logits import score_logits
from selfspec.kernels.topk import MAX_SCAN_WIDTH, Ranking, Scores, topk_tokens
from selfspec.sampling import TARGET
from selfspec.speculation.plan import Plan


class Drawing:
    """How the tokens of all slots are drawn: the features decide which kernels run, the slots hold the numbers."""

    def __init__(self, slots: Slots, features: Features, tree: Tree) -> None:
        self.slots, self.features, self.tree = slots, features, tree

    @property
    def cuts(self) -> Truncation | None:
        if not self.features.cuts:
            return None
        return Truncation(self.slots.top_k, self.slots.top_p, self.slots.min_p, small_top_k=self.features.few)

    def noise(self, places: RowMetadata) -> Noise | None:
        """That of the tokens after rows that stand at these places."""
        slots = self.slots
        keys = slots.seeds, slots.sample_indices, places.next_positions, slots.temperature
        return Noise(*keys, TARGET) if self.features.samples else None

    def processing(self, places: RowMetadata, everything: RowMetadata, first_node: int) -> Processing | None:
        """For rows of the nodes from `first_node` on; the tokens of their paths are in `everything`."""
        if not self.features.processes:
            return None
        slots, table, count = self.slots, self.slots.table, self.slots.count
        return Processing(
            slots.repetition, slots.presence, slots.frequency, table.bias[:count], table.counts[:count],
            slots.min_length, slots.stops, places.next_positions, self.tree.paths, self.tree.depths, everything.tokens,
            first_node,
        )  # fmt: skip


class DeviceStep:
    """One step of all slots with one plan. A plain step leaves the exit's KV of its tokens unfilled."""

    def __init__(
        self, fused: FusedDecoder, slots: Slots, plan: Plan, drafter: Drafter | None, features: Features
    ) -> None:
        self.fused, self.slots, self.plan, self.drafter = fused, slots, plan, drafter
        self.model, self.scratch = fused.model, fused.scratch
        device, batch = self.model.device, slots.count
        self.split = drafter.exit.layer if drafter is not None else 0
        self.tree = Tree(plan, batch, device)
        self.drawing = Drawing(slots, features, self.tree)
        self.rows = batch * (len(plan) + 1)
        self.stream = Stream.empty(self.rows, self.model)  # states of all rows after the draft partition
        self.late = self.stream if drafter is None else FusedExit(fused, drafter.exit).own(self.rows)
        self.places = empty_places(self.model, self.rows)
        self.everyone = self._nodes(range(len(plan) + 1))
        self._levels = [_Level(self.tree, level) for level in plan.levels]
        self.reads = Reads.empty(self.rows, self.model)
        self.chosen = torch.zeros(self.rows, 1, dtype=torch.int32, device=device)
        self.paths = torch.zeros(batch, plan.depth + 1, dtype=torch.int32, device=device)
        self.report = torch.zeros(batch, TOKENS + plan.depth + 1, dtype=torch.int32, device=device)
        first = 0 if drafter is None else drafter.first_node
        self._previous_rows = self.tree.parent_rows(range(len(plan) + 1), first)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What only this step holds."""
        own = [self.chosen, self.paths, self.report]
        return own + [tensor for part in (self.reads, self.stream, self.places) for tensor in vars(part).values()]

    def launch(self) -> None:
        self.draft()
        self.verify()
        self.choose()
        self.commit()

    def launch_passes(self) -> None:
        """Everything before the choice; the logits of all rows are in `logits`."""
        self.draft()
        self.verify()
        lm_head_logits(self.read, self.model.head, self.logits, softcap=self.model.config.logit_softcap)

    @cached_property
    def logits(self) -> torch.Tensor:
        """The model's logits at every row [R, V], float32, for callables to process; kept until the next passes. Taken
        once: captured launches know its address."""
        return self.scratch.take("logits", self.rows, self.model.config.vocab_size, dtype=torch.float32)

    def draft(self) -> None:
        """Depth by depth: the nodes of a level through the draft partition, then the exit ranks their children."""
        ranked: torch.Tensor | Ranking | None = None
        for level in self._levels:
            start, stop = level.rows
            stream, nodes = self.stream.rows(start, stop), self._nodes(level.nodes)
            self._enter(level, stream, nodes, ranked)
            self.fused.run(range(self.split), stream, stream, nodes)
            if self.drafter is not None and level.width:
                ranked = self._leave(self.drafter, level, stream, nodes)

    def _enter(self, level: _Level, stream: Stream, nodes: Nodes, ranked: torch.Tensor | Ranking | None) -> None:
        fused, slots = self.fused, self.slots
        first_norm = fused.next_norm(self.model.layers[0].attention_norm, stream)
        source: dict[str, Any] = {"pending": slots.pending}
        if ranked is not None and level.parents is not None and level.ranks is not None:
            source = {"ranked": ranked, "parents": level.parents, "ranks": level.ranks}
        embed_rope(
            nodes.places, stream.states, first_norm, self.model.embedding, self.model._embedding_scale,
            slots.lengths, slots.page_table, nodes.depths, fused.inv_freq, fused.rope_scaling, level.nodes.start,
            **source,
        )  # fmt: skip

    def _leave(self, drafter: Drafter, level: _Level, stream: Stream, nodes: Nodes) -> torch.Tensor | Ranking:
        """Takes the exit at one level: the best draft tokens of its rows, [R, width]; a few are left to be found where
        they are needed."""
        start, stop = level.rows
        past = Past(self.reads.values, level.parent_rows, self.reads.squares)  # what the exit read at the parents
        if level.parent_rows is None and drafter.known is not None:
            past = Past(drafter.known[: self.slots.count], None)
        exit, reads = FusedExit(self.fused, drafter.exit), self.reads.rows(start, stop)
        exit.read(stream.states, past, nodes, reads)
        drawing = self.drawing
        processing = drawing.processing(nodes.places, self.places, level.nodes.start)
        ranking = exit.rank(drafter.head, reads, level.width, drawing.noise(nodes.places), processing)
        if level.width <= MAX_SCAN_WIDTH:
            return ranking
        ranked = self.scratch.take("ranked", stop - start, level.width, dtype=torch.int32)
        topk_tokens(ranking.scores, ranked, token_ids=ranking.token_ids)
        return ranked

    def verify(self) -> None:
        """The saved states of all rows through the rest of the model; what its head reads is then in `read`. The exit's
        keys and values of a tree's rows are written anew, from what is now known before each of them; those of a plain
        step wait."""
        drafter = self.drafter
        waiting = None if drafter is None or len(self.plan) else drafter.waiting
        if drafter is None or drafter.known is None:
            layers = range(self.split, self.model.config.num_layers)
            last = self.fused.run(layers, self.stream, self.late, self.everyone)
            hidden = None if waiting is None else self.stream.states
            self.fused.know(last, self.reads.values, hidden=hidden, unfilled=waiting)
            return
        exit = FusedExit(self.fused, drafter.exit)
        later = exit.stream("later", self.rows)
        exit.know(self.stream, self.late, self.everyone, self.known, later, waiting)
        if len(self.plan):
            exit.fill(self.stream.states, Past(drafter.known, self._previous_rows), self.everyone)

    @property
    def known(self) -> torch.Tensor:
        """What the head reads at every row and what the exit reads at the next position, once verified: [R, ...]. That
        of a lone root replaces its slot's; which node of a tree does shows when a path is accepted."""
        if self.drafter is None or self.drafter.known is None:
            return self.reads.values
        return self.drafter.known[self.drafter.first_node if len(self.plan) else 0 :][: self.rows]

    @property
    def read(self) -> torch.Tensor:
        """What the model's head reads at every row [R, hidden], once verified."""
        return self.known[:, : self.model.config.hidden_size]

    def choose(self) -> None:
        """The target's own next token at every row, -1 where its logits are not finite."""
        softcap = self.model.config.logit_softcap
        self._choose(lambda scores, **how: lm_head_scores(self.read, self.model.head, scores, softcap=softcap, **how))

    def choose_processed(self) -> None:
        """The same from `logits`, which the host has processed for some rows."""
        self._choose(lambda scores, **how: score_logits(self.logits, scores, **how))

    def _choose(self, score_all: Callable[..., None]) -> None:
        vocabulary, drawing = self.model.config.vocab_size, self.drawing
        noise, cuts = drawing.noise(self.places), drawing.cuts
        how = {"noise": noise, "truncation": cuts, "processing": drawing.processing(self.places, self.places, 0)}
        if cuts is None or noise is None:
            scores = self.scratch.take_like(Scores.empty(self.rows, vocabulary, 1, "meta"))
            score_all(scores, **how)
            topk_tokens(scores, self.chosen, finite=True)
            return
        work = self.scratch.take_like(SampleWorkspace.empty(self.rows, vocabulary, "meta", cuts.small_top_k))
        score_all(work.scores, **how)
        sample_scored(vocabulary, self.chosen.view(-1), work, noise=noise, truncation=cuts)

    def commit(self) -> None:
        """Walks down the trees; lengths, pending tokens, and the accepted paths' keys and values move."""
        slots, cache = self.slots, self.fused.cache
        counts = slots.table.counts[: slots.count] if self.drawing.features.processes else None
        accept(
            self.chosen.view(-1), self.places.tokens, self.tree.children, slots.active, slots.lengths, slots.bases,
            slots.pending, self.paths, self.report, counts=counts, stops=slots.stops,
        )  # fmt: skip
        if len(self.plan):
            known, first = (None, 0) if self.drafter is None else (self.drafter.known, self.drafter.first_node)
            compact_kv(
                cache.keys, cache.values, slots.page_table, slots.bases, self.report[:, 0], self.paths, known, first
            )

    def _nodes(self, nodes: range) -> Nodes:
        at = slice(nodes.start, nodes.stop)
        return Nodes(self.places.rows(*self.tree.rows(nodes)), self.tree.paths[at], self.tree.depths[at])


class _Level:
    """One depth of a tree on the device."""

    def __init__(self, tree: Tree, nodes: range) -> None:
        self.nodes, self.rows, self.width = nodes, tree.rows(nodes), tree.plan.width(nodes)
        self.parents = tree.parents(nodes) if nodes.start else None
        self.ranks = tree.ranks(nodes) if nodes.start else None
        self.parent_rows = tree.parent_rows(nodes, 0) if nodes.start else None
