"""The CUDA backend: a batch's steps as captured graphs of Triton kernels, one step in flight.

The host keeps which sequence is in which slot, takes pages ahead, replays graphs, and reads the report of the step
before. On a CPU with interpreted kernels the same code runs step by step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from selfspec.backends.base import ExitScores, Step
from selfspec.backends.cuda.decoder import Launch
from selfspec.backends.cuda.exit_scoring import OFFERED, scored_places
from selfspec.backends.cuda.graphs import Graphs, bucket
from selfspec.backends.cuda.readback import Readback
from selfspec.backends.cuda.short_prefill import MOST_STRETCHES, stretches
from selfspec.backends.cuda.slots import Features, ProcessingState, SlotState, to_device
from selfspec.backends.cuda.step import DeviceStep
from selfspec.backends.torch_backend import PREFILL_CHUNK, TorchBackend, callback_seconds
from selfspec.cache.kv_cache import PAGE_SIZE, CacheFull
from selfspec.governor.governor import MEASURING
from selfspec.kernels.accept import COUNT, LAST, TOKENS
from selfspec.kernels.final_norm import unfilled_capacity
from selfspec.sampling import process_logits
from selfspec.sequence import Sequence, StepRecord
from selfspec.speculation.exit import Exit
from selfspec.speculation.exit_scoring import PROMPT_END
from selfspec.speculation.plan import MAX_NODES, Plan

AHEAD = 256  # positions whose pages are taken at once, so that page tables seldom change
LONGEST_CAPTURED_PROMPT = 8192  # positions; beyond, a chunk keeps the device busy for long enough to hide the host


@dataclass(eq=False)
class DeviceStepInFlight(Step):
    """A step whose report is on its way."""

    slots: list[int] = field(default_factory=list)  # of its sequences
    readback: Readback | None = None
    before: Readback | None = None  # of the step launched right before
    callback_s: float = 0.0  # seconds of it in callables
    walked: dict[Sequence, int] = field(default_factory=dict)  # last nodes of sequences whose tokens the host chose


@dataclass(frozen=True)
class _ScoresInFlight:
    sequences: list[Sequence]
    slots: list[int]
    counts: list[int]  # unfilled positions of each sequence
    ends: list[int]  # tokens that each sequence has where they end
    size: int  # slots of the pass
    readback: Readback


class CudaBackend:
    """Executes the steps of one batch."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.cache, self.model = graphs, graphs.cache, graphs.model
        self.overlaps = self.model.device.type == "cuda"
        self._table = graphs.take_table()
        self._torch = TorchBackend(self.model, self.cache)
        self._slot_of: dict[Sequence, int] = {}
        self._free_slots = list(reversed(range(graphs.capacity)))
        self._size = 0  # slots of the newest step
        self._left: list[int] = []  # slots whose sequences have left since the newest step
        self._moved_pages: set[Sequence] = set()  # their rows of the page table are out of date
        self._owned: set[Sequence] = set()  # sequences that share no page they write to
        self._unfilled: dict[Sequence, int] = {}  # plainly decoded tokens that the exit's cache lacks
        self._prompt_ends: dict[Sequence, torch.Tensor] = {}
        self._prompt_scores: tuple[list[tuple[Sequence, int]], Readback] | None = None
        self._scores: list[_ScoresInFlight] = []
        self._features = Features()
        self._head_exit: Exit | None = None  # whose head rows are in the table
        self._placed: list[Sequence] = []  # the sequences of the newest step
        self._drafting: dict[Sequence, bool] = {}  # as written to the slots
        self._has_written = False  # to slots, since the newest step
        self._newest: Readback | None = None  # of the step launched last, if nothing was launched since
        self._last_read: Readback | None = None

    def close(self) -> None:
        self.graphs.give_back(self._table)

    @property
    def most_unfilled(self) -> int:
        return unfilled_capacity(max(self._size, 1))

    def slots_for(self, sequences: int) -> int:
        return bucket(sequences)

    # Prefill

    def prefill(self, sequences: Seq[Sequence], exit: Exit | None) -> list[Sequence]:
        """Short prompts share a pass of the kernels that decode, a longer one is alone, chunk by chunk. Which way a
        prompt goes follows from its own length, so its KV depends on nothing else."""
        self._newest, self._has_written = None, True  # no step's time, from here to its report, is its plan's
        first, most = sequences[0], self.graphs.short_prompt + 1
        if len(first.prompt) == 1:
            return [first]
        if len(first.prompt) > most:
            return self._prefill_chunk(first, exit)
        group, taken = [], 0
        for sequence in sequences:
            size = stretches(len(sequence.prompt) - 1)
            if not 1 < len(sequence.prompt) <= most or taken + size > MOST_STRETCHES:
                break
            group.append(sequence)
            taken += size
        self._prefill_together(group, exit)
        return group

    def _prefill_together(self, sequences: list[Sequence], exit: Exit | None) -> None:
        contexts, kvs = [sequence.prompt[:-1] for sequence in sequences], [sequence.kv for sequence in sequences]
        lengths = list(map(len, contexts))
        for kv, length in zip(kvs, lengths, strict=True):
            self.cache.reserve(kv, length)
        prompts, replay = self.graphs.prompts(exit, lengths)
        prompts.load([(context, kv.pages) for context, kv in zip(contexts, kvs, strict=True)])
        replay()
        if exit is not None:
            known, ends = prompts.known[: len(sequences)].clone(), prompts.judged[: len(sequences)].clone()
            for sequence, state, end in zip(sequences, known, ends, strict=True):
                sequence.previous_feature = sequence.prompt_feature = state
                self._prompt_ends[sequence] = end
        for kv, length in zip(kvs, lengths, strict=True):
            self.cache.extend(kv, length)

    def _prefill_chunk(self, sequence: Sequence, exit: Exit | None) -> list[Sequence]:
        """A chunk of one prompt as PyTorch operations, captured up to a length."""
        kv, context = sequence.kv, sequence.prompt[:-1]
        chunk = context[kv.length : kv.length + PREFILL_CHUNK]
        if kv.length + len(chunk) > LONGEST_CAPTURED_PROMPT or not self.overlaps:
            ready = self._torch.prefill([sequence], exit)
            for backend in (self, self._torch):  # prompts this long are not scored
                backend._prompt_ends.pop(sequence, None)
            return ready
        self.cache.reserve(kv, kv.length + len(chunk))
        prefill, replay = self.graphs.prefill(exit, len(chunk), kv.length + len(chunk))
        prefill.load(chunk, kv.length, kv.pages)
        if exit is not None:
            prefill.remember(sequence.previous_feature, self._prompt_ends.get(sequence) if kv.length else None)
        replay()
        if exit is not None:
            sequence.previous_feature = sequence.prompt_feature = prefill.known[0, 0].clone()
            self._prompt_ends[sequence] = prefill.judged.clone()
        self.cache.extend(kv, len(chunk))
        return [sequence] if kv.length == len(context) else []

    def score_prompts(self, sequences: Seq[Sequence], exit: Exit) -> None:
        """In one pass over all slots; the shares come back with the next step."""
        scored = [sequence for sequence in sequences if sequence in self._prompt_ends]
        if not scored or self._prompt_scores is not None:
            return
        self._place(list(self._slot_of) + [of for of in scored if of not in self._slot_of], exit, None)
        table, slots = self._table, [self._slot_of[sequence] for sequence in scored]
        score, replay = self.graphs.prompt_score(table, self._size, exit, self._longest(scored))
        for sequence, slot in zip(scored, slots, strict=True):
            table.ends(self._size)[:, slot].copy_(self._prompt_ends.pop(sequence))
        replay()
        readback = self.graphs.readbacks.take(score.agreement)
        readback.send(score.agreement)
        self._prompt_scores = list(zip(scored, slots, strict=True)), readback

    def prompt_scores(self, wait: bool = False) -> dict[Sequence, tuple[float, int]]:
        if self._prompt_scores is None or not (wait or self._prompt_scores[1].is_done):
            return {}
        (scored, readback), self._prompt_scores = self._prompt_scores, None
        shares = readback.read()
        self.graphs.readbacks.give_back(readback)
        return {of: (shares[slot], min(len(of.prompt) - 1, PROMPT_END)) for of, slot in scored}

    # Steps

    def launch(self, sequences: Seq[Sequence], record: StepRecord, exit: Exit | None, before: Step | None) -> Step:
        """Replays the step's graph; its report is read later."""
        self._reserve(sequences, record.plan, before)
        self._place(sequences, exit, before)
        slots = [self._slot_of[sequence] for sequence in sequences]
        step = DeviceStepInFlight(list(sequences), record, slots=slots)
        if any(sequence.request.processors for sequence in sequences):
            self._launch_with_callables(step, exit)
        else:
            self._launch_captured(step, exit, before)
        if exit is not None and not len(record.plan):
            for sequence in sequences:
                self._unfilled[sequence] = self._unfilled.get(sequence, 0) + 1
        return step

    def _launch_captured(self, step: DeviceStepInFlight, exit: Exit | None, before: Step | None) -> None:
        made, replay = self._graph(step, exit)
        readback = self.graphs.readbacks.take(made.report)
        previous = before.readback if isinstance(before, DeviceStepInFlight) else None
        step.is_late = previous is not None and previous.is_done and self.overlaps
        follows = previous is not None and previous is self._newest and not step.is_late
        step.is_typical = self._is_typical(step.record, previous)
        readback.start(previous if follows else None)
        replay()
        readback.send(made.report)
        step.readback, step.before, self._newest = readback, previous, readback

    def _is_typical(self, record: StepRecord, previous: Readback | None) -> bool:
        """A step tells what its plan costs if it was launched behind another one and no slot was written in between;
        filling the exit's KV is part of what drafting costs, not of a plain step. The first plain steps of a kind are
        better than nothing."""
        written, self._has_written = self._has_written, False
        if not self.overlaps or record.reason == MEASURING:
            return True
        return previous is not None and not written and (len(record.plan) > 0 or previous is self._newest)

    def _graph(self, step: DeviceStepInFlight, exit: Exit | None) -> tuple[DeviceStep, Launch]:
        longest = self._longest(step.sequences)
        return self.graphs.step(self._table, self._size, step.record.plan, exit, self._features, longest)

    def _launch_with_callables(self, step: DeviceStepInFlight, exit: Exit | None) -> None:
        """The passes and the choice are captured; between them the host calls the processors of the nodes that are
        reached, depth by depth."""
        plan, longest = step.record.plan, self._longest(step.sequences)
        callbacks = callback_seconds(step.sequences)
        made, passes, choose, commit = self.graphs.parts(
            self._table, self._size, plan, exit, self._features, longest
        )  # fmt: skip
        readback = self.graphs.readbacks.take(made.report)
        readback.start()
        passes()
        drafted = made.places.tokens.tolist() if len(plan) else []
        walking = {of: (slot, 0) for of, slot in zip(step.sequences, step.slots, strict=True) if of.request.processors}
        while walking:
            for sequence, (slot, node) in walking.items():
                self._process(sequence, made.logits[node * self._size + slot][None])
            choose()
            chosen = made.chosen.view(-1).tolist()
            walking = {
                sequence: (slot, child)
                for sequence, (slot, node) in walking.items()
                if (child := self._walk(step, sequence, slot, node, chosen, drafted)) is not None
            }
        if not step.walked:
            choose()
        commit()
        readback.send(made.report)
        step.readback, self._newest, step.is_typical = readback, None, True
        step.callback_s = callback_seconds(step.sequences) - callbacks

    @staticmethod
    def _process(sequence: Sequence, logits: torch.Tensor) -> None:
        """Built-in processing, then the request's callables, in place on logits [1, V]."""
        values = process_logits(logits, [sequence.params], [sequence.tokens], [len(sequence.prompt)])
        logits.copy_(sequence.process(values))

    def _walk(
        self, step: DeviceStepInFlight, sequence: Sequence, slot: int, node: int, chosen: list[int], drafted: list[int]
    ) -> int | None:
        """Appends the choice at a node; returns the child that carries it, if the text goes on there."""
        plan, size = step.record.plan, self._size
        token = chosen[node * size + slot]
        children = plan.children[node] if sequence.drafts else ()
        child = next((of for of in children if drafted[of * size + slot] == token), None)
        step.walked[sequence] = node
        sequence.append(token, drafted=child is not None)
        return None if sequence.is_finished else child

    def read(self, step: Step) -> None:
        """Appends the tokens at once where none of them can end the text, else one by one. Drops those of sequences
        that have ended since the step was launched."""
        assert isinstance(step, DeviceStepInFlight) and step.readback is not None
        reports, plan = step.readback.read(), step.record.plan
        kept, lasts = [], []
        launched = len(step.sequences)
        for sequence, slot in zip(step.sequences, step.slots, strict=True):
            walked = step.walked.get(sequence)
            if sequence.is_finished and walked is None:
                continue
            report = reports[slot]
            count, last = report[COUNT], report[LAST]
            sequence.kv.length += count
            if walked is None:
                last = _append(sequence, report[TOKENS : TOKENS + count], plan, last)
            kept.append(sequence)
            lasts.append(last if walked is None else walked)
        step.sequences, step.lasts = kept, lasts
        step.seconds = max(0.0, step.readback.seconds - step.callback_s)
        follows = step.before is not None and step.before is self._last_read
        step.wall_seconds = step.readback.seconds_since(step.before) if follows and step.before else step.seconds
        step.is_typical = step.is_typical and len(kept) == launched
        self.graphs.readbacks.give_back(self._last_read)
        self._last_read = step.readback

    # Slots

    def _longest(self, sequences: Seq[Sequence]) -> int:
        return max(sequence.max_length for sequence in sequences)

    def _reserve(self, sequences: Seq[Sequence], plan: Plan, before: Step | None) -> None:
        """Takes pages enough for a step and the one before it, and some ahead where there are."""
        more = plan.depth + len(plan) + 2 + (0 if before is None else before.record.plan.depth + 1)
        short = [of for of in sequences if of.kv.length + more > len(of.kv.pages) * PAGE_SIZE or of not in self._owned]
        for sequence in short:
            self.cache.reserve(sequence.kv, sequence.kv.length + more)
            self._owned.add(sequence)
            self._moved_pages.add(sequence)
        for sequence in short:
            ahead = min(sequence.kv.length + more + AHEAD, sequence.max_length + MAX_NODES)
            with suppress(CacheFull):
                self.cache.reserve(sequence.kv, max(ahead, sequence.kv.length + more))

    def _place(self, sequences: Seq[Sequence], exit: Exit | None, before: Step | None) -> None:
        """Gives every sequence a slot among the first of the table, and writes what the device does not know yet."""
        if sequences == self._placed and exit is self._head_exit and not self._moved_pages:
            return
        self._placed = list(sequences)
        size = bucket(len(sequences))
        if size != self._size and self._unfilled and exit is not None and self._size:
            self.fill_exit(list(self._unfilled), exit, False, before)  # its buffers are laid out by size
        joined = [sequence for sequence in sequences if sequence not in self._slot_of]
        idle = dict.fromkeys(self._left)
        self._left = []
        for sequence in joined:
            self._slot_of[sequence] = slot = self._free_slots.pop()
            idle.pop(slot, None)
        self._write(joined, [slot for slot in idle if slot < self._table.slots.capacity])
        self._compact(size)
        self._size = size
        if joined:  # features are recomputed only on joins, so a leave needs no new graph
            self._features = Features.of([of.params for of in sequences])
            if exit is not None:
                self._write_states(joined)
        if exit is not self._head_exit or joined:
            self._fill_head(exit)
        changed = [of for of in sequences if self._drafting.get(of) != of.drafts]
        if changed:
            self._drafting.update({of: of.drafts for of in changed})
            told = [of for of in changed if of not in joined]
            if told:
                self._table.slots.write_drafting([self._slot_of[of] for of in told], [of.drafts for of in told])
        moved = sorted(of for of in (self._slot_of[s] for s in self._moved_pages if s in self._slot_of))
        if moved:
            at = {slot: sequence for sequence, slot in self._slot_of.items()}
            self._table.slots.write_pages(moved, [at[slot].kv.pages for slot in moved])
        self._moved_pages.clear()

    def _write(self, joined: list[Sequence], idle: list[int]) -> None:
        """Slots of sequences that join, and slots that have become idle."""
        if not joined and not idle:
            return
        self._newest, self._has_written = None, True
        slots = [*(self._slot_of[of] for of in joined), *idle]
        states = [*map(_slot_state, joined), *(None for _ in idle)]
        pages = [*(of.kv.pages for of in joined), *([self.graphs.idle_page] for _ in idle)]
        self._table.slots.write(slots, states, [*(of.seed for of in joined), *(0 for _ in idle)], pages)
        for sequence in joined:
            self._moved_pages.discard(sequence)
            if sequence.params.changes_logits and not sequence.request.processors:
                self._table.slots.write_processing(self._slot_of[sequence], _processing_state(sequence))
            else:
                self._table.slots.clear_processing(self._slot_of[sequence])

    def _write_states(self, joined: list[Sequence]) -> None:
        """What the exit reads at the first position of sequences that join."""
        known, slots = self._table.known, [self._slot_of[of] for of in joined]
        rows = [known.new_zeros(known.shape[1]) if of.previous_feature is None else of.previous_feature for of in joined]
        known.index_copy_(0, to_device(torch.tensor(slots), known.device), torch.stack(rows))

    def _compact(self, size: int) -> None:
        """Moves sequences from slots past the first `size` to free ones among them."""
        beyond = [sequence for sequence, slot in self._slot_of.items() if slot >= size]
        if not beyond:
            return
        self._newest, self._has_written = None, True
        free = sorted((slot for slot in self._free_slots if slot < size), reverse=True)
        sources, targets = [self._slot_of[of] for of in beyond], [free.pop() for _ in beyond]
        self._table.slots.move(sources, targets, self._table.known)
        for sequence, target in zip(beyond, targets, strict=True):
            self._slot_of[sequence] = target
        self._free_slots = sorted({*self._free_slots, *sources} - {*targets}, reverse=True)

    def _fill_head(self, exit: Exit | None) -> None:
        """The rows of the head that drafts look at."""
        self._head_exit = exit
        drafter = self.graphs.drafter(self._table, self._size, exit)
        if drafter is not None and drafter.head is not None:
            assert drafter.exit.head_rows is not None
            drafter.head.fill(drafter.exit.head_rows)

    def release(self, sequence: Sequence) -> None:
        slot = self._slot_of.pop(sequence, None)
        if slot is not None:
            self._left.append(slot)
            self._free_slots = sorted([*self._free_slots, slot], reverse=True)
        for held in (self._unfilled, self._prompt_ends, self._drafting):
            held.pop(sequence, None)
        self._owned.discard(sequence)
        self._moved_pages.discard(sequence)

    def suspend(self, sequence: Sequence) -> None:
        slot = self._slot_of.get(sequence)
        if slot is None:
            return
        if self._unfilled and self._head_exit is not None:
            self.fill_exit(list(self._unfilled), self._head_exit, False, None)
        sequence.previous_feature = self._table.known[slot].clone()

    # The exit while nothing is drafted

    def fill_exit(self, sequences: Seq[Sequence], exit: Exit, score: bool, before: Step | None) -> None:
        placed = [sequence for sequence in sequences if sequence in self._slot_of]
        if not placed:
            return
        self._write([], self._left)  # the pages of sequences that have left may be another's by now
        self._newest = None
        features, longest = self._features, self._longest(placed)
        fill, replay = self.graphs.exit_fill(self._table, self._size, exit, features, longest, score)
        replay()
        counts = [self._unfilled.get(sequence, 0) for sequence in placed]
        self._unfilled.clear()
        if score:
            readback = self.graphs.readbacks.take(fill.report)
            readback.send(fill.report)
            in_flight = 0 if before is None else 1  # a plain step, or nothing would be unfilled
            ends = [
                len(sequence.tokens) + (in_flight if before and sequence in before.sequences else 0)
                for sequence in placed
            ]
            slots = [self._slot_of[sequence] for sequence in placed]
            self._scores.append(_ScoresInFlight(placed, slots, counts, ends, self._size, readback))

    def exit_scores(self) -> list[ExitScores]:
        """Of the oldest unfilled positions: rank 0 where the draft was the token that was decoded, else a miss."""
        arrived = []
        while self._scores and self._scores[0].readback.is_done and self._are_known(self._scores[0]):
            scores = self._scores.pop(0)
            drafted = scores.readback.read()
            self.graphs.readbacks.give_back(scores.readback)
            sequences, ranks = [], []
            for sequence, slot, count, end in zip(
                scores.sequences, scores.slots, scores.counts, scores.ends, strict=True
            ):
                places = min(count, scored_places(scores.size))
                tokens = sequence.tokens[end - count : end - count + places]
                drafts = drafted[slot :: scores.size][:places]
                if places and not sequence.is_finished:
                    sequences.append(sequence)
                    ranks.append([int(token != draft) for token, (draft,) in zip(tokens, drafts, strict=True)])
            if sequences:
                arrived.append(ExitScores(sequences, ranks, OFFERED))
        return arrived

    @staticmethod
    def _are_known(scores: _ScoresInFlight) -> bool:
        """Whether the tokens that drafts are compared with have been read."""
        return all(
            of.is_finished or len(of.tokens) >= end for of, end in zip(scores.sequences, scores.ends, strict=True)
        )


def _append(sequence: Sequence, tokens: list[int], plan: Plan, last: int) -> int:
    """A sequence takes a step's tokens; returns the last node of its text, which may end before them."""
    can_end = sequence.request.criteria or len(sequence.tokens) + len(tokens) >= sequence.max_length
    if not can_end and sequence.stop_tokens.isdisjoint(tokens) and min(tokens) >= 0:
        sequence.tokens += tokens
        return last
    for place, token in enumerate(tokens):
        sequence.append(token, drafted=place < len(tokens) - 1)
        if sequence.is_finished:
            return plan.path(last)[place]
    return last


def _slot_state(sequence: Sequence) -> SlotState:
    processed = not sequence.request.processors
    return SlotState.of(
        sequence.params, sequence.kv.length, sequence.tokens[-1], sequence.sample_index, len(sequence.prompt),
        sequence.drafts, processed,
    )  # fmt: skip


def _processing_state(sequence: Sequence) -> ProcessingState:
    params, prompt = sequence.params, len(sequence.prompt)
    text = sequence.tokens[:prompt], sequence.tokens[prompt:]
    return ProcessingState(params.logit_bias, params.banned_token_ids, params.allowed_token_ids, text)
