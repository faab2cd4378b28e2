"""A whole cycle on the device: draft, verify, choose, accept and commit for B seats, with nothing left to the host.

The host says which sequences sit where (`Seats`) and reads the report. On CUDA a cycle is captured once as a graph and
replayed. Which plan a cycle follows, and what its tokens mean, is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Seats, Stream, Tree, empty_places
from selfspec.backends.cuda.exit import Drafter, FusedExit, Past, Reads
from selfspec.kernels.accept import TOKENS, accept
from selfspec.kernels.embed_rope import Places, enter
from selfspec.kernels.kv_compaction import settle
from selfspec.kernels.lm_head_topk import head_logits, head_top
from selfspec.kernels.noise import Noise
from selfspec.kernels.sample import Cuts, Workspace, choose_scored
from selfspec.kernels.topk import FEW, MOST, Ranking, Scores, top_merge
from selfspec.sampling import TARGET, Sampling
from selfspec.speculation.plan import Plan


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn, as far as it decides which kernels run; the numbers themselves are with the seats."""

    sampled: bool = False
    top_k: int | None = None  # the kernels' bound on it, or 0 for one without; None: off
    top_p: bool = False
    min_p: bool = False

    @classmethod
    def of(cls, sampling: Sampling) -> Drawing:
        if not sampling.do_sample:
            return cls()
        bound = next((bound for bound in (64, MOST) if sampling.top_k <= bound), 0)
        return cls(True, bound if sampling.top_k else None, sampling.top_p < 1, sampling.min_p > 0)

    def cuts(self, seats: Seats) -> Cuts | None:
        if self.top_k is None and not self.top_p and not self.min_p:
            return None
        return Cuts(
            None if self.top_k is None else seats.top_k,
            seats.top_p if self.top_p else None,
            seats.min_p if self.min_p else None,
            self.top_k or None,
        )

    def noise(self, seats: Seats, places: Places) -> Noise | None:
        """That of the tokens after rows that stand at these places."""
        keys = seats.seeds, seats.copies, places.following, seats.temperature
        return Noise(*keys, TARGET) if self.sampled else None


class Cycle:
    """One cycle of all seats with one plan. One that drafts nothing leaves what its exit does not see waiting."""

    def __init__(
        self, fused: FusedDecoder, seats: Seats, plan: Plan, drafter: Drafter | None, drawing: Drawing
    ) -> None:
        self.fused, self.seats, self.plan, self.drafter, self.drawing = fused, seats, plan, drafter, drawing
        self.model, self.scratch = fused.model, fused.scratch
        device, batch = self.model.device, seats.count
        self.split = drafter.exit.layer if drafter is not None else 0
        self.tree = Tree(plan, batch, device)
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
        self._known_rows = self.tree.parent_rows(range(len(plan) + 1))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What only this cycle holds."""
        own = [self.chosen, self.paths, self.report]
        return own + [tensor for part in (self.reads, self.stream, self.places) for tensor in vars(part).values()]

    def launch(self) -> None:
        self.draft()
        self.verify()
        self.choose()
        self.accept()

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
        fused, seats = self.fused, self.seats
        first_norm = fused.next_norm(self.model.layers[0].attention_norm, stream)
        source: dict[str, Any] = {"pending": seats.pending}
        if ranked is not None and level.parents is not None and level.ranks is not None:
            source = {"ranked": ranked, "parents": level.parents, "ranks": level.ranks}
        enter(
            nodes.places, stream.states, first_norm, self.model.embedding, self.model._embedding_scale,
            seats.lengths, seats.page_table, nodes.depths, fused.inv_freq, fused.rope_scaling, level.nodes.start,
            **source,
        )  # fmt: skip

    def _leave(self, drafter: Drafter, level: _Level, stream: Stream, nodes: Nodes) -> torch.Tensor | Ranking:
        """Takes the exit at one level: the best draft tokens of its rows, [R, width]; a few are left to be found where
        they are needed."""
        start, stop = level.rows
        past = Past(self.reads.values, level.parent_rows, self.reads.squares)  # what the exit read at the parents
        if level.parent_rows is None and drafter.known is not None:
            past = Past(drafter.known[: self.seats.count], None)
        exit, reads = FusedExit(self.fused, drafter.exit), self.reads.rows(start, stop)
        exit.read(stream.states, past, nodes, reads)
        ranking = exit.rank(drafter.head, reads, level.width, self.drawing.noise(self.seats, nodes.places))
        if level.width <= FEW:
            return ranking
        ranked = self.scratch.take("ranked", stop - start, level.width, dtype=torch.int32)
        top_merge(ranking.scores, ranked, rows=ranking.rows)
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
            self.fused.know(last, self.reads.values, hidden=hidden, waiting=waiting)
            return
        exit = FusedExit(self.fused, drafter.exit)
        later = exit.stream("later", self.rows)
        exit.know(self.stream, self.late, self.everyone, self.known, later, waiting)
        if len(self.plan):
            exit.fill(self.stream.states, Past(drafter.known, self._known_rows), self.everyone)

    @property
    def known(self) -> torch.Tensor:
        """What is known at every row once verified, [R, ...], for an exit to recall, first what the model's head reads.
        Which nodes will be recalled shows later; a root alone is, so there it takes the place of what was before."""
        if self.drafter is None or self.drafter.known is None:
            return self.reads.values
        return self.drafter.known[self.seats.count if len(self.plan) else 0 :][: self.rows]

    @property
    def read(self) -> torch.Tensor:
        """What the model's head reads at every row [R, hidden], once verified."""
        return self.known[:, : self.model.config.hidden_size]

    def logits(self) -> torch.Tensor:
        """The model's logits at every row [R, V], float32; for hosts that choose themselves."""
        out = self.scratch.take("logits", self.rows, self.model.config.vocab_size, dtype=torch.float32)
        head_logits(self.read, self.model.head, out, softcap=self.model.config.logit_softcap)
        return out

    def choose(self) -> None:
        """The target's own next token at every row."""
        vocabulary, cap = self.model.config.vocab_size, self.model.config.logit_softcap
        noise, cuts = self.drawing.noise(self.seats, self.places), self.drawing.cuts(self.seats)
        if cuts is None:
            scores = self.scratch.take_like(Scores.empty(self.rows, vocabulary, 1, "meta"))
            head_top(self.read, self.model.head, scores, softcap=cap, noise=noise)
            top_merge(scores, self.chosen)
            return
        assert noise is not None
        work = self.scratch.take_like(Workspace.empty(self.rows, vocabulary, "meta", cuts.most or MOST))
        head_top(self.read, self.model.head, work.scores, softcap=cap, noise=noise, noisy=False)
        choose_scored(vocabulary, self.chosen.view(-1), work, noise=noise, cuts=cuts)

    def accept(self) -> None:
        """Walks down the trees; lengths, pending tokens, and the accepted paths' keys and values move."""
        seats, cache = self.seats, self.fused.cache
        accept(
            self.chosen.view(-1), self.places.tokens, self.tree.children, seats.active, seats.lengths, seats.bases,
            seats.pending, self.paths, self.report,
        )  # fmt: skip
        if len(self.plan):
            known = None if self.drafter is None else self.drafter.known
            settle(cache.keys, cache.values, seats.page_table, seats.bases, self.report[:, 0], self.paths, known)

    def _nodes(self, nodes: range) -> Nodes:
        at = slice(nodes.start, nodes.stop)
        return Nodes(self.places.rows(*self.tree.rows(nodes)), self.tree.paths[at], self.tree.depths[at])


class _Level:
    """One depth of a tree on the device."""

    def __init__(self, tree: Tree, nodes: range) -> None:
        self.nodes, self.rows, self.width = nodes, tree.rows(nodes), tree.plan.width(nodes)
        self.parents = tree.parents(nodes) if nodes.start else None
        self.ranks = tree.ranks(nodes) if nodes.start else None
        self.parent_rows = tree.parent_rows(nodes) - tree.sequences if nodes.start else None
