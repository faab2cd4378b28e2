"""Gives the sequences of a batch slots, reserves their pages ahead, and writes both to the device.

`slots.py` holds the device's tensors. `backend.py` launches steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress

import torch

from selfspec.backends.base import Step
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.readback import StepTimes
from selfspec.backends.cuda.slots import IDLE_VALUES, SlotBuffers, StepOptions, bucket, slot_values
from selfspec.cache.kv_cache import PAGE_SIZE, Cache, CacheFull
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_NODES, Plan

# Positions after a step whose pages are reserved together with the step's, so that page tables are seldom written.
RESERVED_POSITIONS = 256


class PagesAhead:
    """Reserves pages before steps need them, and records which page tables on the device are out of date."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._owned: set[Sequence] = set()  # sequences that are the only ones to use their partly filled page
        self.changed: set[Sequence] = set()  # sequences whose page table on the device is out of date

    def reserve(self, sequences: Seq[Sequence], plan: Plan, in_flight: Step | None) -> None:
        """Reserves pages for the next step and, if enough are free, for RESERVED_POSITIONS positions after it. Raises
        CacheFull if too few are free for the step."""
        # Positions: those of root and nodes, and the longest paths that this step and the one in flight commit.
        needed = plan.depth + len(plan) + 2 + (0 if in_flight is None else in_flight.record.plan.depth + 1)
        short = [
            sequence
            for sequence in sequences
            if sequence.kv.length + needed > len(sequence.kv.pages) * PAGE_SIZE or sequence not in self._owned
        ]
        for sequence in short:
            self._cache.reserve(sequence.kv, sequence.kv.length + needed)
            self._owned.add(sequence)
            self.changed.add(sequence)
        for sequence in short:
            ahead = min(sequence.kv.length + needed + RESERVED_POSITIONS, sequence.max_length + MAX_NODES)
            with suppress(CacheFull):
                self._cache.reserve(sequence.kv, max(ahead, sequence.kv.length + needed))

    def release(self, sequence: Sequence) -> None:
        self._owned.discard(sequence)
        self.changed.discard(sequence)


class SlotPlacement:
    """Gives sequences slots. Remembers what it wrote to each slot last, and writes only what has changed."""

    def __init__(self, graphs: Graphs, buffers: SlotBuffers, times: StepTimes) -> None:
        self._buffers, self._times = buffers, times
        self.pages = PagesAhead(graphs.cache)
        self.slot_of: dict[Sequence, int] = {}
        self.size = 0  # slots of the newest step: a power of two
        self.options = StepOptions()  # of the newest step; kept while no sequence joins
        self.head_exit: Exit | None = None  # the exit whose head rows are in the buffers
        self._free = list(reversed(range(graphs.capacity)))  # free slots, the lowest last: it is taken first
        self._vacated: list[int] = []  # slots whose sequences have left since the newest step
        self._placed: list[Sequence] = []  # sequences of the newest step
        self._drafting: dict[Sequence, bool] = {}  # whether the sequence accepts drafts, as written to its slot
        self._texts: set[Sequence] = set()  # sequences whose text is written to their slot

    def slots(self, sequences: Seq[Sequence]) -> list[int]:
        return [self.slot_of[sequence] for sequence in sequences]

    def is_current(self, sequences: Seq[Sequence], exit: Exit | None) -> bool:
        """Whether a step of these sequences can be launched without writing slots."""
        return sequences == self._placed and exit is self.head_exit and not self.pages.changed

    def options_of(self, sequences: Seq[Sequence]) -> StepOptions:
        """Returns the options of a step of these sequences. While none joins they stay as they are, also if sequences
        leave, so that no step is captured for fewer options."""
        if all(sequence in self.slot_of for sequence in sequences):
            return self.options
        return StepOptions.of([sequence.params for sequence in sequences])

    def place(self, sequences: Seq[Sequence], exit: Exit | None) -> None:
        """Gives every sequence one of the first `size` slots, and writes to the device what has changed since the
        newest step."""
        self._placed, options = list(sequences), self.options_of(sequences)
        joined = [sequence for sequence in sequences if sequence not in self.slot_of]
        idle = dict.fromkeys(self._vacated)
        self._vacated = []
        for sequence in joined:
            self.slot_of[sequence] = slot = self._free.pop()
            idle.pop(slot, None)
        self._write(joined, list(idle), exit)
        self.size = bucket(len(sequences))
        self._compact()
        self.options = options
        if exit is not self.head_exit:
            self._fill_head(exit)
        self._write_drafting(sequences, joined)
        self._write_changed_pages()

    def idle_vacated_slots(self) -> None:
        """Makes idle the slots whose sequences have left: a pass would write to their pages, which other sequences may
        have taken."""
        self._write([], self._vacated, None)
        self._vacated = []

    def release(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that has left the batch."""
        slot = self.slot_of.pop(sequence, None)
        if slot is not None:
            self._vacated.append(slot)
            self._free = sorted([*self._free, slot], reverse=True)
        if not self.slot_of:
            self._placed = []
        self._drafting.pop(sequence, None)
        self._texts.discard(sequence)
        self.pages.release(sequence)

    def write_texts(self, sequences: Seq[Sequence]) -> None:
        """Writes the text of each sequence to its slot, once, before the first step that copies from it."""
        for sequence in sequences:
            if sequence not in self._texts:
                self._times.exclude_next_step()
                self._buffers.slots.write_text(self.slot_of[sequence], sequence.tokens)
                self._texts.add(sequence)

    def _write(self, joined: list[Sequence], idle: list[int], exit: Exit | None) -> None:
        """Writes the slots of sequences that join, with their features for the exit, and slots that become idle."""
        if not joined and not idle:
            return
        self._times.exclude_next_step()
        store, slots = self._buffers.slots, [*self.slots(joined), *idle]
        values = [*map(slot_values, joined), *(IDLE_VALUES for _ in idle)]
        pages = [*(sequence.kv.pages for sequence in joined), *([store.idle_page] for _ in idle)]
        written = store.write(slots, values, [*(sequence.seed for sequence in joined), *(0 for _ in idle)], pages)
        for sequence in joined:
            self.pages.changed.discard(sequence)
            if sequence.params.changes_logits and not sequence.request.processors:
                generated = sequence.tokens[len(sequence.prompt) :]
                store.write_processing(self.slot_of[sequence], sequence.params, sequence.prompt, generated)
            else:
                store.clear_processing(self.slot_of[sequence])
        if joined and exit is not None:
            self._write_features(joined, written[: len(joined)])

    def _compact(self) -> None:
        """Moves sequences from slots beyond the first `size` to free slots below."""
        beyond = [sequence for sequence, slot in self.slot_of.items() if slot >= self.size]
        if not beyond:
            return
        self._times.exclude_next_step()
        free = sorted((slot for slot in self._free if slot < self.size), reverse=True)
        sources, targets = self.slots(beyond), [free.pop() for _ in beyond]
        self._buffers.slots.move(sources, targets, self._buffers.features)
        for sequence, target in zip(beyond, targets, strict=True):
            self.slot_of[sequence] = target
        self._free = sorted({*self._free, *sources} - {*targets}, reverse=True)

    def _write_features(self, joined: list[Sequence], slots: torch.Tensor) -> None:
        """Writes the features that the exit reads in the first step of sequences that join; zeros for a sequence
        without one. `slots` [joined]: their slots, on the device."""
        features, rows = self._buffers.features, []
        for sequence in joined:
            feature = sequence.previous_feature
            rows.append(features.new_zeros(features.shape[1]) if feature is None else feature)
        features.index_copy_(0, slots, torch.stack(rows))

    def _fill_head(self, exit: Exit | None) -> None:
        """Writes the token ids of the head rows that the exit drafts from."""
        self.head_exit = exit
        if exit is not None and exit.head_rows is not None:
            head = self._buffers.exit(exit, self.size).head
            assert head is not None
            head.fill(exit.head_rows)

    def _write_drafting(self, sequences: Seq[Sequence], joined: list[Sequence]) -> None:
        """Writes whether sequences accept drafts, where that has changed; `_write` does so for those that join."""
        changed = [sequence for sequence in sequences if self._drafting.get(sequence) != sequence.drafts]
        self._drafting.update({sequence: sequence.drafts for sequence in changed})
        changed = [sequence for sequence in changed if sequence not in joined]
        if changed:
            self._buffers.slots.write_drafting(self.slots(changed), [sequence.drafts for sequence in changed])

    def _write_changed_pages(self) -> None:
        placed = (sequence for sequence in self.pages.changed if sequence in self.slot_of)
        changed = {self.slot_of[sequence]: sequence.kv.pages for sequence in placed}
        slots = sorted(changed)
        if slots:
            self._buffers.slots.write_pages(slots, [changed[slot] for slot in slots])
        self.pages.changed.clear()
