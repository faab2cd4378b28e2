"""The reference backend: prefill and steps as PyTorch operations, on any device.

Executes one step at a time: when `launch` returns, the step has run. A plain step is a step whose plan has no nodes and
runs the same code. The caller decides which sequences decode, and with which plan.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import product
from weakref import ReferenceType, ref

import torch

from selfspec.backends.base import Step
from selfspec.backends.torch_accept import accept, noise_key
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.cache.layout import Rows
from selfspec.cache.prefixes import PrefillKind
from selfspec.history import StepRecord
from selfspec.kernels.copy_draft import copy_reference
from selfspec.logprobs import TokenLogprob, pack_logprobs, prompt_logprobs
from selfspec.models.decoder import Decoder
from selfspec.sampling import CHILDREN, CHOICE, NoiseKey, perturbed, process_logits, ranked, warp_logits
from selfspec.sequence import Sequence
from selfspec.speculation import exit_scoring
from selfspec.speculation.draft_tree import BeamTree, Draft, Shape
from selfspec.speculation.exit import FEATURE_STATES, Exit, position_features
from selfspec.speculation.plan import Plan

PREFILL_CHUNK = 512  # tokens: fixed, so that a prompt's KV depends on the prompt alone
MAX_SHAPES = 1024  # plans come from users: bounds the memory of shapes kept for them


class TorchBackend:
    """Executes steps as PyTorch operations."""

    overlaps = False
    max_unfilled = sys.maxsize  # unfilled states are kept in buffers that grow

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self._shapes: dict[tuple[Plan, int, int], Shape] = {}
        self._prompt_ends: dict[Sequence, list[torch.Tensor]] = {}
        self._prompt_scores: dict[Sequence, tuple[float, int]] = {}
        self._scores: list[tuple[Sequence, list[bool]]] = []
        self._exit: ReferenceType[Exit] | None = None  # of the newest step; its batch keeps it alive
        # On a CPU every row of a pass costs; on a GPU a pass over 32 rows takes about as long as one over 8.
        self._scored_positions = (
            exit_scoring.CPU_SCORED_POSITIONS if model.device.type == "cpu" else exit_scoring.PROMPT_END
        )

    def slots_for(self, sequences: int) -> int:
        return sequences

    def step_options(self, sequences: Seq[Sequence]) -> Hashable:
        params = [sequence.params for sequence in sequences]
        return any(of.do_sample for of in params), any(of.changes_logits for of in params)

    # Prefill

    def prefill_kind(self, tokens: int) -> PrefillKind:
        """In float32 and above, KV is reusable in whole pages; in 16 bits only in whole chunks, since rounding depends
        on the pass."""
        if self.model.dtype.itemsize < 4:
            return PrefillKind("torch chunks", PREFILL_CHUNK, decode_writes_same_bits=False)
        return PrefillKind("torch", PAGE_SIZE, decode_writes_same_bits=True)

    def prefill(self, sequences: Seq[Sequence], exit: Exit | None) -> list[Sequence]:
        """Runs one chunk of the first sequence's prompt. A prompt is alone in its pass, so that no other changes its
        rounding."""
        sequence, length = sequences[0], sequences[0].kv.length
        context = sequence.prompt[:-1]
        if length < len(context):
            self._prefill_chunk(sequence, context[length : length + PREFILL_CHUNK], exit)
        return [sequence] if sequence.kv.length == len(context) else []

    def _prefill_chunk(self, sequence: Sequence, tokens: list[int], exit: Exit | None) -> None:
        """Runs a chunk of a prompt through all layers, with an exit also through its block, and extends the KV."""
        count = len(tokens)
        self.cache.reserve(sequence.kv, sequence.kv.length + count)
        at = Rows.causal([sequence.kv], count, self.model.device)
        hidden = self.model.embed(torch.tensor([tokens], device=self.model.device))
        hidden = self.model.run(hidden, 0, _split(exit), at, self.cache)
        features = self._run_verify_partition(hidden, at, exit)
        if not bool(torch.isfinite(features).all()):
            raise ValueError("the model's states for this prompt are not finite: its weights or embeddings overflow")
        logprobs: list[TokenLogprob] = []
        if (top := sequence.request.prompt_logprobs) is not None:
            after = sequence.prompt[sequence.kv.length + 1 :][:count]
            (logprobs,) = prompt_logprobs(features[0], [after], [top], self._logits)
        if exit is not None:
            previous = torch.cat((self._previous_features([sequence]), features[:, :-1]), dim=1)
            exit.fill(hidden, previous, at, self.cache)
            self._keep_prompt_end(sequence, hidden, previous, features)
            sequence.previous_feature = sequence.prompt_feature = features[0, -1]
        sequence.kv.length += count
        sequence.prompt_logprobs += logprobs  # last: a chunk that failed before runs again

    def _keep_prompt_end(self, sequence: Sequence, *states: torch.Tensor) -> None:
        """Keeps the states [1, T, ...] of the prompt's last positions, by which the exit is scored."""
        before = self._prompt_ends.get(sequence) or [state[:, :0] for state in states]
        joined = [torch.cat(pair, dim=1) for pair in zip(before, states, strict=True)]
        self._prompt_ends[sequence] = [state[:, -self._scored_positions :] for state in joined]

    def score_prompts(self, sequences: Seq[Sequence], exit: Exit) -> bool:
        for sequence in sequences:
            if (end := self._prompt_ends.pop(sequence, None)) is not None:
                hidden, previous, features = end
                final = features[..., : self.model.config.hidden_size]
                (share,) = exit_scoring.prompt_agreement(exit, self.cache, [sequence.kv], hidden, previous, final)
                self._prompt_scores[sequence] = share, hidden.shape[1]
        return bool(self._prompt_scores)

    def note_other_work(self) -> None: ...

    def prompt_scores(self) -> dict[Sequence, tuple[float, int]]:
        scores, self._prompt_scores = self._prompt_scores, {}
        return scores

    # The step

    def capture_s(self, sequences: Seq[Sequence], plan: Plan, exit: Exit | None) -> float:
        return 0.0

    def launch(self, sequences: Seq[Sequence], record: StepRecord, exit: Exit | None, in_flight: Step | None) -> Step:
        """Runs the step. Every sequence advances by at least one token."""
        started, callbacks = time.perf_counter(), callback_seconds(sequences)
        sequences, plan = list(sequences), record.plan
        self._exit = None if exit is None else ref(exit)
        for sequence in sequences:
            self.cache.reserve(sequence.kv, sequence.kv.length + len(plan) + 1)
        draft = self.draft(sequences, plan, exit)
        features = self.verify(sequences, draft, exit)
        logits = self._logits(features)
        paths, exit_nodes = accept(sequences, draft, logits)
        self.commit(sequences, draft, features, paths, exit)
        _add_logprobs(sequences, paths, logits)
        seconds = time.perf_counter() - started - (callback_seconds(sequences) - callbacks)
        return Step(sequences, record, [path[-1] for path in paths], seconds, exit_nodes=exit_nodes)

    def read(self, step: Step) -> None:
        """Does nothing: `launch` has run the step."""

    def draft(self, sequences: list[Sequence], plan: Plan, exit: Exit | None) -> Draft:
        """Level by level: runs its nodes through the layers below the exit, then ranks each node's children. The first
        level holds the copied nodes; of that level, only the root has children drafted by the exit."""
        tokens = torch.tensor([[sequence.tokens[-1]] for sequence in sequences], device=self.model.device)  # [B, 1]
        forced = [sequence.forced(plan.copied) for sequence in sequences]
        if plan.copied:
            tokens = torch.cat((tokens, self._copied(sequences, forced, plan.copied)), dim=1)
        beam = BeamTree(plan, len(sequences), self.model.device) if plan.beam else None
        draft = Draft(plan, tokens, hidden=tokens.new_empty(0), beam=beam)
        hidden: list[torch.Tensor] = []
        for depth, level in enumerate(plan.levels):
            if depth:
                draft.tokens = torch.cat((draft.tokens, self._children(draft, level)), dim=1)
            draft.rows = at = self._rows_at(sequences, draft, level)
            states = self.model.embed(draft.tokens[:, level.start : level.stop].clamp(min=0))
            hidden.append(self.model.run(states, 0, _split(exit), at, self.cache))
            if exit is not None and plan.width(level):
                ranked = level if depth else range(1)
                at = at if ranked == level else self._rows_at(sequences, draft, ranked)
                self._rank_children(sequences, draft, ranked, hidden[-1][:, : len(ranked)], at, exit)
        draft.hidden = torch.cat(hidden, dim=1) if len(hidden) > 1 else hidden[0]
        return draft

    def _copied(self, sequences: list[Sequence], forced: list[list[int]], count: int) -> torch.Tensor:
        """The tokens of `count` copied nodes [B, count]: those that grammars force, else copied ones; -1 where there
        is neither."""
        copied = [copy_reference(torch.tensor(sequence.tokens), count).tolist() for sequence in sequences]
        padded = [[*tokens, *[-1] * (count - len(tokens))] for tokens in forced]
        tokens = [first if first[0] >= 0 else second for first, second in zip(padded, copied, strict=True)]
        return torch.tensor(tokens, device=self.model.device)

    def _rank_children(
        self, sequences: list[Sequence], draft: Draft, level: range, hidden: torch.Tensor, at: Rows, exit: Exit
    ) -> None:
        """Runs the exit at the nodes of one level and ranks their children."""
        depth, width = draft.plan.depths[level.start], draft.plan.width(level)
        previous = self._previous_features(sequences)
        if draft.head_inputs:
            previous = _of_parents(draft.head_inputs[-1], self._shape(draft, level).parents)
        draft.head_inputs.append(exit.head_input(hidden, previous, at, self.cache))
        logits, ids = exit.logits(draft.head_inputs[-1]).flatten(0, 1), exit.head_rows  # [B * M, V]
        params = [sequence.params for sequence in sequences for _ in level]
        if any(param.changes_logits for param in params):
            prompts = [len(sequence.prompt) for sequence in sequences for _ in level]
            logits = process_logits(logits, params, self._texts(sequences, draft, level), prompts, ids)
        if any(sequence.grammar is not None for sequence in sequences):
            self._ban(sequences, draft, level, logits, ids)
        values = warp_logits(logits, params, cut=draft.plan.without_copy.is_chain)
        rejection = sequences[0].request.rejection
        key = noise_key(sequences, self.model.device, depth, repeat=len(level))
        sampled = [row for row, param in enumerate(params) if param.do_sample]
        if sampled:
            at_rows = torch.tensor(sampled, device=values.device)
            noisy = values.clone()
            noisy[at_rows] = perturbed(values[at_rows], key.at(at_rows), CHILDREN if rejection else CHOICE, ids)
        else:
            noisy = values
        columns = ranked(noisy, width)
        draft.ranked.append(exit.to_token_ids(columns).view(len(sequences), len(level), width))
        if draft.beam is not None:
            log_probs = noisy.gather(1, columns) - noisy.logsumexp(1, keepdim=True)
            draft.log_probs = log_probs.view(draft.ranked[-1].shape)
        if rejection:
            draft.logits.append(exit.over_vocabulary(values).view(len(sequences), len(level), -1))

    @staticmethod
    def _ban(
        sequences: list[Sequence], draft: Draft, level: range, logits: torch.Tensor, ids: torch.Tensor | None
    ) -> None:
        """Bans draft tokens that grammars forbid, in place, where the exit has another one to draft."""
        drafted, trees = draft.tokens.tolist(), [draft.tree(index) for index in range(len(sequences))]
        for row, (index, node) in enumerate(product(range(len(sequences)), level)):
            sequence = sequences[index]
            if sequence.grammar is None:
                continue
            with sequence.request.callback():
                path = [drafted[index][passed] for passed in trees[index].path(node)[1:]]
                allowed = sequence.grammar.apply(logits[row][None], sequence.tokens, path, ids)[0]
                if bool(allowed.isfinite().any()):
                    logits[row] = allowed

    def _texts(self, sequences: list[Sequence], draft: Draft, level: range) -> list[list[int]]:
        """For every node of a level, the tokens of its sequence and of the nodes on its path."""
        drafted, trees = draft.tokens.tolist(), [draft.tree(index) for index in range(len(sequences))]
        return [
            sequence.tokens + [drafted[index][passed] for passed in trees[index].path(node)[1:]]
            for index, sequence in enumerate(sequences)
            for node in level
        ]

    def verify(self, sequences: list[Sequence], draft: Draft, exit: Exit | None) -> torch.Tensor:
        """Runs the saved states of root and nodes through layers N..L-1 in one pass. Returns their features
        [B, n + 1, 2 * hidden], without an exit only the normed final states [B, n + 1, hidden]."""
        all_nodes = range(len(draft.plan) + 1)
        at = draft.rows
        if at is None or at.nodes != all_nodes:
            at = self._rows_at(sequences, draft, all_nodes)
        features = self._run_verify_partition(draft.hidden, at, exit)
        if exit is not None and len(draft.plan):
            of_parents = _of_parents(features, self._shape(draft, all_nodes).parents)
            previous = torch.cat((self._previous_features(sequences), of_parents), dim=1)
            exit.fill(draft.hidden, previous, at, self.cache)
        return features

    def commit(
        self, sequences: list[Sequence], draft: Draft, features: torch.Tensor, paths: list[list[int]], exit: Exit | None
    ) -> None:
        """Makes the KV of the accepted paths contiguous and keeps the feature of each last node; after a plain step
        also the states from which `fill_exit` fills the exit's KV."""
        self.cache.commit([sequence.kv for sequence in sequences], paths)
        if exit is None:
            return
        if not len(draft.plan):
            for sequence, hidden in zip(sequences, draft.hidden[:, 0].unbind(), strict=True):
                previous = sequence.previous_feature
                sequence.unfilled.add(hidden, self._no_feature if previous is None else previous)
        nodes = [path[-1] for path in paths]
        # Cloned: the next pass may overwrite the buffer.
        newest = features[range(len(sequences)), nodes] if any(nodes) else features[:, 0].clone()
        for sequence, feature in zip(sequences, newest.unbind(), strict=True):
            sequence.previous_feature = feature

    # The exit's KV while nothing is drafted

    def fill_exit(self, sequences: Seq[Sequence], exit: Exit, score: bool, in_flight: Step | None) -> None:
        """Runs one pass for all sequences with the same number of unfilled tokens."""
        by_count: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            by_count.setdefault(len(sequence.unfilled), []).append(sequence)
        for count, alike in by_count.items():
            if count:
                self._fill_exit(alike, exit, min(count, self._scored_positions) if score else 0)

    def _fill_exit(self, sequences: list[Sequence], exit: Exit, scored: int) -> None:
        """Fills all unfilled positions and scores the newest `scored` of them."""
        kvs, unfilled = [sequence.kv for sequence in sequences], [sequence.unfilled for sequence in sequences]
        head_input = exit_scoring.fill(exit, self.cache, kvs, unfilled, scored)
        if head_input is None:
            return
        tokens = torch.tensor([sequence.tokens[-scored:] for sequence in sequences], device=self.model.device)
        firsts = noise_key(sequences, self.model.device, -scored, repeat=scored)
        steps = torch.arange(scored, device=self.model.device).repeat(len(sequences))
        key = NoiseKey(firsts.seeds, firsts.sample_indices, firsts.positions + steps)
        params = [sequence.params for sequence in sequences]
        right = exit_scoring.is_drafted(exit, head_input, tokens, params, key).tolist()
        self._scores += zip(sequences, right, strict=True)

    def unfilled(self, sequence: Sequence) -> int:
        return len(sequence.unfilled)

    def exit_scores(self) -> list[tuple[Sequence, list[bool]]]:
        scores, self._scores = self._scores, []
        return scores

    def release(self, sequence: Sequence) -> None:
        sequence.unfilled.clear()
        self._prompt_ends.pop(sequence, None)

    def suspend(self, sequence: Sequence) -> None:
        """Fills the exit's KV of the sequence, which has the rest of its state."""
        exit = None if self._exit is None else self._exit()
        if exit is not None and len(sequence.unfilled):
            self._fill_exit([sequence], exit, 0)

    def close(self) -> None:
        """Does nothing: a batch has no buffers of its own."""

    # Parts of passes

    def _logits(self, features: torch.Tensor) -> torch.Tensor:
        """The model's logits; the normed final states are the first columns of the features."""
        return self.model.project(features[..., : self.model.config.hidden_size], self.model.head)

    def _previous_features(self, sequences: list[Sequence]) -> torch.Tensor:
        """Features before each sequence's newest token, [B, 1, 2 * hidden]; zeros before the first position."""
        features = [sequence.previous_feature for sequence in sequences]
        return torch.stack([self._no_feature if feature is None else feature for feature in features])[:, None]

    @cached_property
    def _no_feature(self) -> torch.Tensor:
        return self.model.norm.new_zeros(FEATURE_STATES * self.model.config.hidden_size)

    def _run_verify_partition(self, hidden: torch.Tensor, rows: Rows, exit: Exit | None) -> torch.Tensor:
        layers, split = self.model.config.num_layers, _split(exit)
        middle = split if exit is None else exit.feature_layer
        hidden = self.model.run(hidden, split, middle, rows, self.cache)
        last = self.model.run(hidden, middle, layers, rows, self.cache)
        return self.model.head_input(last) if exit is None else position_features(self.model, hidden, last)

    def _rows_at(self, sequences: list[Sequence], draft: Draft, nodes: range) -> Rows:
        shape, kvs = self._shape(draft, nodes), [sequence.kv for sequence in sequences]
        return Rows(kvs, nodes, shape.depths, shape.ancestors, self.model.device, shape.all)

    def _shape(self, draft: Draft, nodes: range) -> Shape:
        """Some nodes of a draft as tensors on the device; those of a plan without a beam are kept for later steps."""
        if draft.beam is not None:
            return draft.beam.shape(nodes)
        plan, key = draft.plan, (draft.plan, nodes.start, nodes.stop)
        if key not in self._shapes:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = Shape.of(plan, nodes, self.model.device)
        return self._shapes[key]

    def _children(self, draft: Draft, level: range) -> torch.Tensor:
        """Tokens [B, M] of a level's nodes: of each node's parent the draft token of the node's rank; in a beam, those
        with the highest sums of log probabilities along their paths."""
        if draft.beam is not None:
            above = draft.plan.levels[draft.plan.depths[level.start] - 1]
            parents, ranks = draft.beam.grow(draft.log_probs, len(level), above.start)
            return draft.ranked[-1][torch.arange(len(parents), device=parents.device)[:, None], parents, ranks]
        shape = self._shape(draft, level)
        return draft.ranked[-1][:, shape.parents, shape.ranks]


def _of_parents(values: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Values [B, P, ...] at the parents [M] or [B, M]: [B, M, ...]."""
    return values[torch.arange(len(values), device=parents.device)[:, None], parents]


def _split(exit: Exit | None) -> int:
    """N: layers below it draft, layers from it on verify."""
    return 0 if exit is None else exit.layer


def _add_logprobs(sequences: list[Sequence], paths: list[list[int]], logits: torch.Tensor) -> None:
    """Computes the log probabilities of a step's tokens, from the logits [B, n + 1, V] of the nodes before them."""
    for sequence, path, values in zip(sequences, paths, logits, strict=True):
        if (top := sequence.request.logprobs) is not None:
            tokens = torch.tensor(sequence.tokens[-len(path) :], device=logits.device)
            sequence.add_logprobs(pack_logprobs(values[path], tokens, top).tolist())


def callback_seconds(sequences: Seq[Sequence]) -> float:
    """Seconds that the requests of these sequences have spent in callables so far."""
    requests = {id(sequence.request): sequence.request for sequence in sequences}
    return sum(request.callback_s for request in requests.values())
