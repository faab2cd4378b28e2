"""The decoding loop: prefill, then cycles of draft, verify, accept and commit for a batch of rows.

A Session owns the rows of one request and their share of the cache. Plain decoding is a cycle whose plan has no nodes;
there is no second path. Prompts and settings arrive checked; text, tokenizers and arguments belong to the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import deepcopy
from functools import cached_property

import torch

from selfspec.cache.kv_cache import Cache, Rows
from selfspec.governor.costs import Costs, Setting
from selfspec.governor.governor import Governor
from selfspec.governor.rules import Policy, Rules
from selfspec.metrics import Metrics
from selfspec.models.decoder import Decoder
from selfspec.sampling import (
    CHILDREN,
    TARGET,
    NoiseKey,
    Sampling,
    choose,
    penalise,
    perturbed,
    ranked,
    reject_or_accept,
    warp,
)
from selfspec.sequence import Row, Turn
from selfspec.speculation import exit_scoring as shadow
from selfspec.speculation.draft_tree import Draft, Shape
from selfspec.speculation.exit import RECALLED, Exit, recalled
from selfspec.speculation.plan import Plan

AT_ONCE = 16  # positions that the exit's cache is filled for together, at first, while nothing is drafted
SELDOM = 32  # tokens after which the exit is scored again, once a look at fewer has not led to drafting
ENDING = 32  # tokens before their end at which it matters to texts what a cycle in flight will bring
PREFILL_CHUNK = 512  # fixed, so that a prompt's keys and values never depend on what else is in memory

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (prefix [1, t], logits [1, V]) -> logits [1, V]
Stop = Callable[[torch.Tensor], bool]  # prefix [1, t] -> whether the text ends here


class Session:
    """One request in progress. Closing it, at any moment, returns every page."""

    ease = 2  # times as seldom are exits scored whose passes are the host's own work

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        rows: list[Row],
        sampling: Sampling,
        policy: Policy,
        exit: Exit | None = None,
        processors: Sequence[Processor] = (),
        stops: Sequence[Stop] = (),
        rejection: bool = False,
        on_token: Callable[[Row, int], None] | None = None,
        prefill_rows: int = 1,
        governor: Governor | None = None,
        costs: Costs | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.rows = rows
        self.sampling = sampling
        self.policy = policy
        self.exit = exit
        self.processors = processors
        self.stops = stops
        self.rejection = rejection and sampling.do_sample
        self.on_token = on_token
        self.prefill_rows = prefill_rows  # prompts of equal length that may share a pass
        self.governor = governor  # None: the policy's own plans
        self.costs = costs or Costs()
        self.metrics = metrics or Metrics()
        self.split = exit.layer if exit is not None else 0  # N: layers below it draft, layers from it on verify
        self._shapes: dict[tuple[Plan, int, int], Shape] = {}
        self._elapsed_s = 0.0  # in prefill and cycles; what a consumer does between them is not ours
        self._prompt_end: list[torch.Tensor] = []
        self._plan: Plan | None = None  # the one in use
        self._scoring = self.ease * governor.rules.scored_after(len(rows)) if governor is not None else 0
        self._at_once = self._patience = self._scoring or AT_ONCE
        self._rows_cost = model.device.type == "cpu"  # so that as little as can be is looked at
        self._looked_at = shadow.FEW if self._rows_cost else shadow.PROMPT_END

    @property
    def active(self) -> list[Row]:
        return [row for row in self.rows if row.finish_reason is None]

    def close(self) -> None:
        for row in self.rows:
            row.waiting.clear()
            self.cache.close(row.sequence)

    def tell(self) -> None:
        """Whoever keeps count of cycles knows of all that are over; by itself that may be one cycle later."""

    def run(self) -> Generator[None, None, None]:
        """Runs to the end, pausing after every cycle; the cache is freed however it ends."""
        self.metrics.request()
        try:
            self._timed(self.prefill)
            while self.active:
                self._timed(self.cycle)
                yield
        finally:
            self.close()
            for row in self.rows:
                self.metrics.accepted(row.accepted_by_depth, row.reached_by_depth)

    def _timed(self, step: Callable[[], None]) -> None:
        started, rows = time.perf_counter(), self.active
        step()
        self._elapsed_s += time.perf_counter() - started
        for row in rows:
            row.elapsed_s = self._elapsed_s

    @torch.inference_mode()
    def prefill(self) -> None:
        """Runs all but the last token of every prompt; copies of a prompt share its full pages."""
        self._prefill_prompts([row for index, row in enumerate(self.rows) if not row.copy or not index])
        for first, row in self._copies():
            row.sequence, row.known = self.cache.fork(first.sequence), first.known
        self._expect()

    def _copies(self) -> Iterator[tuple[Row, Row]]:
        """Rows that continue the prompt of another one, after that one."""
        first = self.rows[0]
        for row in self.rows[1:]:
            if row.copy:
                yield first, row
            else:
                first = row

    def _expect(self) -> None:
        """All prompts are read: copies expect of their text what the first of them does."""
        for first, row in self._copies():
            row.watch = deepcopy(first.watch)

    def _prefill_prompts(self, firsts: list[Row]) -> None:
        for rows in self._prefilled_together(firsts):
            contexts = [row.prompt[:-1] for row in rows]
            for start in range(0, len(contexts[0]), PREFILL_CHUNK):
                self._prefill_chunk(rows, [context[start : start + PREFILL_CHUNK] for context in contexts])
            self._judge_prompts(rows)

    def _prefilled_together(self, rows: list[Row]) -> list[list[Row]]:
        """Batches of prompts of one length. By default a prompt is alone, so that no other can change its rounding."""
        by_length = sorted(rows, key=lambda row: len(row.prompt)) if self.prefill_rows > 1 else rows
        batches: list[list[Row]] = []
        for row in by_length:
            fits = batches and len(batches[-1]) < self.prefill_rows
            if fits and len(batches[-1][0].prompt) == len(row.prompt):
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _prefill_chunk(self, rows: list[Row], tokens: list[list[int]]) -> None:
        """A chunk of each prompt, through all layers, into the cache."""
        count, sequences = len(tokens[0]), [row.sequence for row in rows]
        for sequence in sequences:
            self.cache.reserve(sequence, sequence.length + count)
        at = Rows.causal(sequences, count, self.model.device)
        hidden = self._run_draft_partition(self.model.embed(torch.tensor(tokens, device=self.model.device)), at)
        known = self._run_verify_partition(hidden, at)
        if self.exit is not None:
            previous = torch.cat((self._last_known(rows), known[:, :-1]), dim=1)
            self.exit.fill(hidden, previous, at, self.cache)
            self._keep_prompt_end(hidden, previous, known)
        self._remember(rows, known, [-1] * len(rows))
        self.cache.commit(sequences, [range(count)] * len(rows))

    @property
    def _usual_agreement(self) -> tuple[float, float] | None:
        """What prompts are judged against; None: they are not judged, for want of anything to judge by or to decide.
        Those of batches too large for trees are not: what so many texts show in their first cycles comes cheaper."""
        governor, rows = self.governor, len(self.rows)
        if governor is None or self.policy.reason(rows) is not None or rows > governor.rules.max_tree_batch:
            return None
        return governor.usual_agreement

    def _keep_prompt_end(self, *states: torch.Tensor) -> None:
        """The states of the newest positions [B, T, ...], for judging the prompts by."""
        if self._usual_agreement is not None:
            before = self._prompt_end or [state[:, :0] for state in states]
            joined = [torch.cat(pair, dim=1) for pair in zip(before, states, strict=True)]
            self._prompt_end = [state[:, -self._looked_at :] for state in joined]

    def _judge_prompts(self, rows: list[Row]) -> None:
        """How well the exit agrees with the model at the prompts' ends tells what to expect of it. Where that takes
        long, only those are judged for whom something would be drafted at once: others show in a while what they are
        like, with tokens that are there anyway."""
        end, self._prompt_end = self._prompt_end, []
        if self._usual_agreement is None or not end or (self._rows_cost and not self._would_draft):
            return
        assert self.exit is not None
        hidden, previous, known = end
        reads = known[..., : self.model.config.hidden_size]
        sequences = [row.sequence for row in rows]
        shares = shadow.prompt_agreement(self.exit, self.cache, sequences, hidden, previous, reads)
        for row, share in zip(rows, shares, strict=True):
            row.watch.learn_prompt(share, hidden.shape[1], *self._usual_agreement)

    @property
    def _would_draft(self) -> bool:
        """As far as the governor knows by now."""
        rows = self.active
        context = max(len(row.tokens) for row in rows)
        return self.governor is not None and self.governor.would_draft([row.watch for row in rows], context)

    @torch.inference_mode()
    def cycle(self) -> None:
        """Every active row advances by at least one token."""
        rows = self.active
        if len(rows[0].waiting) >= self._patience:
            self._look(rows)
        chosen, reason = self.choose_plan(rows)
        plan = chosen.truncated(max(row.max_length - len(row.tokens) for row in rows) - 1)
        sequences = [row.sequence for row in rows]
        if len(plan):
            self.catch_up(rows, score=self._scoring > 0)
            self._be_patient(looked=False)
        started = time.perf_counter()
        for sequence in sequences:
            self.cache.reserve(sequence, sequence.length + len(plan) + 1)
        try:
            draft = self.draft(rows, plan)
            known = self.verify(rows, draft)
            paths = self.accept(rows, draft, self._logits(known))
        except BaseException:
            self.cache.abort(sequences)
            raise
        self.commit(rows, draft, known, paths)
        lasts = [path[-1] for path in paths]
        seconds = time.perf_counter() - started
        self._account(rows, Turn.of(plan, chosen, reason), lasts, seconds, seconds)

    def _look(self, rows: list[Row]) -> None:
        """At what waits, before the next plan is chosen, if it is for the governor to choose it: at the newest few and,
        if these would make it draft, as many before them, since to draft in vain takes longer."""
        looks = self._scoring > 0 and self.policy.reason(len(rows)) is None
        caught = self.catch_up(rows, score=looks)
        self._be_patient(looked=looks)
        if looks and caught is not None and self._would_draft:
            seen = max(0, caught.count - self._looked_at)
            self._score(rows, caught, max(0, seen - self._looked_at), seen)

    def _be_patient(self, looked: bool) -> None:
        """With what waits, once a look at it has not led to drafting."""
        least = self._at_once
        self._patience = more_patient(self._patience, least, self._most_patience) if looked else least

    @property
    def _most_patience(self) -> int:
        return self.ease * SELDOM

    def choose_plan(
        self, rows: list[Row], in_flight: tuple[Plan, str | None] | None = None, is_over: bool = False
    ) -> tuple[Plan, str | None]:
        """The governor's, where there is one and the rules allow any; with `none`, the reason. `in_flight` was chosen
        for the cycle before, if that is not over yet, or if it is and the governor was not told."""
        plan, reason = self.policy.choose(len(rows))
        if self.governor is None or reason is not None:
            return plan, reason
        left = [row.max_length - len(row.tokens) for row in rows]
        if in_flight is not None and not is_over and max(left) < ENDING:
            left = [max(1, n - round(row.usual_tokens(in_flight[0]))) for n, row in zip(left, rows, strict=True)]
        return self.governor.choose([row.watch for row in rows], max(len(row.tokens) for row in rows), in_flight, left)

    def draft(self, rows: list[Row], plan: Plan) -> Draft:
        """Depth by depth: run the nodes of a depth through the draft partition, exit, rank each node's children."""
        device = self.model.device
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=device)  # [B, 1]: the pending token
        draft = Draft(plan, tokens, hidden=tokens.new_empty(0))
        hidden: list[torch.Tensor] = []
        for depth, level in enumerate(plan.levels):
            if depth:
                draft.tokens = torch.cat((draft.tokens, self._children(draft, level)), dim=1)
            draft.rows = at = self._rows_at(rows, plan, level)
            states = self.model.embed(draft.tokens[:, level.start : level.stop])
            hidden.append(self._run_draft_partition(states, at))
            if self.exit is not None and depth < plan.depth:
                self._leave(rows, draft, level, hidden[-1], at)
        draft.hidden = torch.cat(hidden, dim=1) if len(plan) else hidden[0]
        return draft

    def _leave(self, rows: list[Row], draft: Draft, level: range, hidden: torch.Tensor, at: Rows) -> None:
        """Takes the exit at one level: ranks the children of its nodes."""
        assert self.exit is not None
        width = draft.plan.width(level)
        previous = draft.reads[-1][:, self._shape(draft.plan, level).parents] if draft.reads else self._last_known(rows)
        read = self.exit.read(hidden, previous, at, self.cache)
        draft.reads.append(read)
        logits = self.exit.logits(read).flatten(0, 1)  # [B * M, V]
        ids = self.exit.head_rows
        seen = self._seen_at(rows, draft, level)
        seen = seen if seen is None or ids is None else seen[:, ids]
        depth = draft.plan.depths[level.start]
        new_tokens = [row.new_tokens + depth for row in rows for _ in level]
        values = penalise(logits, self.sampling, seen, new_tokens, ids)
        values = warp(values, self.sampling, cut=draft.plan.is_chain)
        noisy = values
        if self.sampling.do_sample:
            key = self._noise_key(rows, [len(row.tokens) + depth for row in rows], repeat=len(level))
            noisy = perturbed(values, key, CHILDREN if self.rejection else TARGET, ids)
        draft.ranked.append(self.exit.to_token_ids(ranked(noisy, width)).view(len(rows), len(level), width))
        if self.rejection:
            draft.logits.append(self.exit.over_vocabulary(values).view(len(rows), len(level), -1))

    def verify(self, rows: list[Row], draft: Draft) -> torch.Tensor:
        """The saved states of root and nodes through the rest of the model, in one pass: what is then known at each of
        them, [B, n+1, ...]. The exit's own keys and values are written anew from it."""
        everyone = range(len(draft.plan) + 1)
        at = (
            draft.rows
            if draft.rows is not None and draft.rows.nodes == everyone
            else self._rows_at(rows, draft.plan, everyone)
        )
        known = self._run_verify_partition(draft.hidden, at)
        if self.exit is not None and len(draft.plan):
            of_parents = known[:, self._shape(draft.plan, everyone).parents]
            self.exit.fill(draft.hidden, torch.cat((self._last_known(rows), of_parents), dim=1), at, self.cache)
        return known

    def commit(self, rows: list[Row], draft: Draft, known: torch.Tensor, paths: list[list[int]]) -> None:
        """The accepted paths become part of the texts. What the exit's cache lacks of plain steps waits until there is
        much of it, or until it is needed."""
        self.cache.commit([row.sequence for row in rows], paths)
        if not len(draft.plan):
            self._let_wait(rows, draft)
        self._remember(rows, known, [path[-1] for path in paths])

    def _let_wait(self, rows: list[Row], draft: Draft) -> None:
        if self.exit is not None:
            for row, hidden in zip(rows, draft.hidden[:, 0].unbind(), strict=True):
                row.waiting.add(hidden, self._nothing_known if row.known is None else row.known)

    def catch_up(self, rows: list[Row], score: bool = True) -> shadow.Caught | None:
        """Fills the exit's cache for what is waiting, and returns it; the governor learns what would have been drafted
        at the newest few of these positions."""
        if self.exit is None or not len(rows[0].waiting):
            return None
        caught = shadow.Caught.of([row.sequence for row in rows], [row.waiting for row in rows])
        scored = min(caught.count, self._looked_at) if score and self.governor is not None else 0
        if scored < caught.count:
            caught.fill(self.exit, self.cache)
        self._score(rows, caught, caught.count - scored, caught.count)
        return caught

    def _score(self, rows: list[Row], caught: shadow.Caught, start: int, stop: int) -> None:
        """The governor learns which ranks the tokens after some positions would have had in drafts. To read a position
        fills the exit's cache there."""
        if start == stop:
            return
        assert self.exit is not None and self.governor is not None
        first, count, device = start - caught.count, stop - start, self.model.device
        tokens = torch.tensor([row.tokens[first:][:count] for row in rows], device=device)
        key = None
        if self.sampling.do_sample:
            firsts = self._noise_key(rows, [len(row.tokens) + first for row in rows], repeat=count)
            key = NoiseKey(
                firsts.seeds, firsts.copies, firsts.positions + torch.arange(count, device=device).repeat(len(rows))
            )
        read = caught.read(self.exit, self.cache, start, stop)
        ranks = shadow.ranks(self.exit, read, tokens, self.sampling, key).tolist()
        self.governor.scored([row.watch for row in rows], ranks, shadow.OFFERED)

    def _logits(self, known: torch.Tensor) -> torch.Tensor:
        """The model's logits; what its head reads comes first in what is known."""
        return self.model.project(known[..., : self.model.config.hidden_size], self.model.head)

    def _remember(self, rows: list[Row], known: torch.Tensor, nodes: list[int]) -> None:
        """Keeps what is known at each row's newest committed node, for the exit to recall."""
        if self.exit is None:
            return
        newest = known[range(len(rows)), nodes] if any(nodes) else known[:, 0].clone()  # whose buffer may be shared
        for row, of_row in zip(rows, newest.unbind(), strict=True):
            row.known = of_row

    def _last_known(self, rows: list[Row]) -> torch.Tensor:
        """What was known just before each row's newest position, [B, 1, 2 * hidden]; zeros where a text begins."""
        return torch.stack([self._nothing_known if row.known is None else row.known for row in rows])[:, None]

    @cached_property
    def _nothing_known(self) -> torch.Tensor:
        return self.model.norm.new_zeros(RECALLED * self.model.config.hidden_size)

    def accept(self, rows: list[Row], draft: Draft, logits: torch.Tensor) -> list[list[int]]:
        """Walks down from the root: the target draws each next token, and a child that carries it is the next node.

        Tokens are emitted, and ends of text noticed, one by one as plain decoding would. Returns the accepted path of
        each row, root first.
        """
        plan, drafted = draft.plan, draft.tokens.tolist()
        best = logits.argmax(-1).tolist() if self._takes_the_best else None  # for all nodes at once
        paths: list[list[int]] = [[0] for _ in rows]
        walking = list(range(len(rows)))
        while walking:
            nodes = [paths[index][-1] for index in walking]
            if best is not None:
                chosen = [best[index][node] for index, node in zip(walking, nodes, strict=True)]
            else:
                chosen = self._draw([rows[index] for index in walking], walking, nodes, draft, logits)
            still_walking = []
            for index, node, token in zip(walking, nodes, chosen, strict=True):
                row = rows[index]
                child = next((c for c in plan.children[node] if drafted[index][c] == token), None)
                self._emit(row, token, child is not None)
                if child is not None and row.finish_reason is None:
                    paths[index].append(child)
                    still_walking.append(index)
            walking = still_walking
        return paths

    @property
    def _takes_the_best(self) -> bool:
        """Whether the target's choice is simply its best token, whatever came before."""
        sampling = self.sampling
        changed = sampling.do_sample or sampling.repetition_penalty != 1 or sampling.min_new_tokens > 0
        return not changed and not self.processors

    def _draw(
        self, rows: list[Row], indices: list[int], nodes: list[int], draft: Draft, logits: torch.Tensor
    ) -> list[int]:
        """The target's own next token for each row, standing at its node."""
        values = logits[indices, nodes]  # [R, V]
        values = penalise(values, self.sampling, self._seen(rows), [row.new_tokens for row in rows])
        if self.processors:
            values = torch.cat([self._process(row, values[i : i + 1]) for i, row in enumerate(rows)])
        values = warp(values, self.sampling)
        key = self._noise_key(rows, [len(row.tokens) for row in rows])
        chosen = choose(values, self.sampling, key)
        for node in set(nodes) if self.rejection else ():
            children = draft.plan.children[node]
            if children:
                at = torch.tensor([i for i, other in enumerate(nodes) if other == node], device=values.device)
                of = torch.tensor(indices, device=values.device)[at]
                depth, place = draft.at(node)
                ranks = {draft.plan.ranks[child - 1] for child in children}
                offered = [rank in ranks for rank in range(draft.ranked[depth].shape[2])]
                p = values[at].softmax(-1)
                guess, drawn = draft.logits[depth][of, place], draft.ranked[depth][of, place]
                chosen[at] = reject_or_accept(p, guess, drawn, offered, key.at(at))
        return chosen.tolist()

    def _emit(self, row: Row, token: int, drafted: bool) -> None:
        row.tokens.append(token)
        if self.on_token is not None:
            self.on_token(row, token)
        stopped = bool(self.stops) and self._stopped(row)
        if stopped or token in self.sampling.eos_token_ids:
            row.finish_reason = "stop"
        elif len(row.tokens) >= row.max_length:
            row.finish_reason = "length"
        if drafted and row.finish_reason is not None:
            row.cut = row.cycles

    def _stopped(self, row: Row) -> bool:
        prefix = torch.tensor([row.tokens], device=self.model.device)
        return max(stop(prefix) for stop in self.stops)  # not any(): every criterion sees every token

    def _process(self, row: Row, values: torch.Tensor) -> torch.Tensor:
        prefix = torch.tensor([row.tokens], device=self.model.device)
        for processor in self.processors:
            values = processor(prefix, values)
        return values

    def _account(
        self,
        rows: list[Row],
        turn: Turn,
        lasts: list[int],
        seconds: float,
        passed: float | None,
        hurry: bool = False,
    ) -> None:
        """A cycle that took some seconds is over: tells everybody who keeps count. Plans are judged by the time that
        passed until it was, if such cycles usually take it; in a hurry the governor learns only what it cost."""
        plan, depths = turn.plan, turn.plan.depths
        context, left = 0, []  # how long the longest text was before, and how many tokens each may still get
        ends: list[int | None] = list(lasts)  # None where a text has ended
        for place, row in enumerate(rows):
            row.turns.append(turn)
            row.lasts.append(lasts[place])
            length = len(row.tokens)
            context = max(context, length - depths[lasts[place]] - 1)
            left.append(row.max_length - length)
            if row.finish_reason is not None:
                ends[place], left[place] = None, 0
                row.waiting.clear()
                self.cache.close(row.sequence)
        if self.governor is not None:
            watches = [row.watch for row in rows]
            if hurry:
                self.governor.overlook(watches, plan, ends, context, left)
            else:
                self.governor.observe(watches, plan, ends, passed, context, turn.reason, left)
        elif not len(plan) and passed is not None:
            self.costs.observe(Setting.of(0, self.costs.size(len(rows)), context), plan, passed)
        if turn.chosen != self._plan:
            self.metrics.change(turn.reason)
            self._plan = turn.chosen
        emitted = [depths[last] + 1 for last in lasts]
        self.metrics.cycle(plan, seconds, emitted, self.costs.plain(len(rows), context))

    def _run_draft_partition(self, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        hidden = self.model.run(hidden, 0, self.split, rows, self.cache)
        for sequence in rows.sequences:
            sequence.drafted = rows.nodes.stop
        return hidden

    def _run_verify_partition(self, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        """What is known at each row: what the head reads there and, with an exit, more for it to recall."""
        layers = self.model.config.num_layers
        middle = self.split if self.exit is None else self.exit.recalled_layer
        hidden = self.model.run(hidden, self.split, middle, rows, self.cache)
        last = self.model.run(hidden, middle, layers, rows, self.cache)
        for sequence in rows.sequences:
            sequence.verified = rows.nodes.stop
        return self.model.read(last) if self.exit is None else recalled(self.model, hidden, last)

    def _rows_at(self, rows: list[Row], plan: Plan, nodes: range) -> Rows:
        shape = self._shape(plan, nodes)
        return Rows([row.sequence for row in rows], nodes, shape.depths, shape.ancestors, self.model.device, shape.all)

    def _shape(self, plan: Plan, nodes: range) -> Shape:
        """What passes of these nodes need to know of the plan, on the device; the same in every cycle."""
        key = (plan, nodes.start, nodes.stop)
        if key not in self._shapes:
            self._shapes[key] = Shape.of(plan, nodes, self.model.device)
        return self._shapes[key]

    def _children(self, draft: Draft, level: range) -> torch.Tensor:
        """Tokens [B, M] of a level's nodes: each is its parent's ranked draft token of the node's rank."""
        shape = self._shape(draft.plan, level)
        return draft.ranked[-1][:, shape.parents, shape.ranks]

    def _noise_key(self, rows: list[Row], positions: list[int], repeat: int = 1) -> NoiseKey:
        columns = [[row.seed for row in rows], [row.copy for row in rows], positions]
        key = torch.tensor(columns, device=self.model.device).repeat_interleave(repeat, dim=1)
        return NoiseKey(key[0], key[1], key[2])

    def _seen(self, rows: list[Row]) -> torch.Tensor | None:
        """[R, V] bool: tokens of each row's text so far; None where no penalty asks for it."""
        if self.sampling.repetition_penalty == 1:
            return None
        seen = torch.zeros(len(rows), self.model.config.vocab_size, dtype=torch.bool, device=self.model.device)
        for index, row in enumerate(rows):
            seen[index, row.tokens] = True
        return seen

    def _seen_at(self, rows: list[Row], draft: Draft, level: range) -> torch.Tensor | None:
        """`_seen` for every node of a level, its path included: [B * M, V]."""
        seen = self._seen(rows)
        if seen is None:
            return None
        at_nodes = seen[:, None].repeat(1, len(level), 1)
        for index, node in enumerate(level):
            path = draft.plan.ancestors[node, : draft.tokens.shape[1]].nonzero().squeeze(1)
            at_nodes[:, index].scatter_(1, draft.tokens[:, path.to(draft.tokens.device)], True)
        return at_nodes.flatten(0, 1)


def more_patient(patience: int, first: int, most: int) -> int:
    """Tokens before the exit is scored again, after a look that has not led to drafting; `first` before the first."""
    return max(first, min(2 * patience, most))


def most_patience(rows: int, rules: Rules) -> int:
    """The most of them, on a device: to look at many rows keeps it, and the host, for a while."""
    return SELDOM if rows <= rules.max_tree_batch else 2 * SELDOM
