"""The CUDA backend of one batch: launches steps as captured graphs of Triton kernels, and reads their reports.

One step is in flight: the host launches the next step before it reads this one. `placement.py` knows which sequence is
in which slot, `graphs.py` captures, `step.py` is the step itself. On a CPU the same code runs with interpreted kernels,
one step at a time. The caller decides which sequences decode, and with which plan.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace

import torch

from selfspec.backends.base import Step
from selfspec.backends.cuda.callables import run_with_callables
from selfspec.backends.cuda.exit_scoring import ExitScoresInFlight
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.masking import MaskedStep, Masking
from selfspec.backends.cuda.placement import SlotPlacement
from selfspec.backends.cuda.prompt_scoring import PromptScoresInFlight
from selfspec.backends.cuda.prompts import PromptPrefill
from selfspec.backends.cuda.readback import StepInFlight, StepTimes
from selfspec.backends.cuda.slots import bucket
from selfspec.backends.cuda.step import DeviceStep
from selfspec.cache.kv_cache import CacheFull
from selfspec.cache.prefixes import PrefillKind
from selfspec.history import StepRecord
from selfspec.kernels.accept import COUNT, EXIT_LAST, LAST, TOKENS
from selfspec.kernels.final_norm import unfilled_capacity
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import NONE, Plan


class CudaBackend:
    """Executes the steps of one batch; see `Backend` for its methods."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.cache, self.model = graphs, graphs.cache, graphs.model
        self.overlaps = self.model.device.type == "cuda"
        self._buffers = graphs.take_buffers()
        self._times = StepTimes(graphs.readbacks)
        self._placement = SlotPlacement(graphs, self._buffers, self._times)
        self._prompts = PromptPrefill(graphs)
        self._prompt_scores = PromptScoresInFlight(graphs.readbacks)
        self._exit_scores = ExitScoresInFlight(graphs.readbacks)
        self._masking = Masking(on_gpu=self.overlaps)
        self._masked_step: MaskedStep | None = None  # has grammars; its choice is not launched yet
        self._unfilled: dict[Sequence, int] = {}  # unfilled positions
        self._top: int | None = None  # likeliest tokens that log probabilities list; None: no sequence wants any

    def slots_for(self, sequences: int) -> int:
        return bucket(sequences)

    # Steps

    def launch(self, sequences: Seq[Sequence], record: StepRecord, exit: Exit | None, in_flight: Step | None) -> Step:
        """Launches a step and the copy of its report to the host. Waits for neither, unless callables process
        logits."""
        self._complete()
        placement, plan = self._placement, record.plan
        placement.pages.reserve(sequences, plan, in_flight)
        self._place(sequences, exit, in_flight)
        if plan.copied:
            placement.write_texts(sequences)
        step = StepInFlight(list(sequences), record, slots=placement.slots(sequences))
        if not any(sequence.request.uses_host for sequence in sequences):
            self._launch_captured(step, exit, in_flight)
        elif any(sequence.request.processors for sequence in sequences):
            self._launch_with_callables(step, exit)
        else:
            self._launch_masked(step, exit, in_flight)
        if exit is not None and not len(plan):
            for sequence in sequences:
                self._unfilled[sequence] = self._unfilled.get(sequence, 0) + 1
        return step

    def _launch_captured(self, step: StepInFlight, exit: Exit | None, in_flight: Step | None) -> None:
        device_step, replay = self._captured_step(step.sequences, step.record.plan, exit)
        readback = self.graphs.readbacks.take(device_step.report)
        self._times.start(step, readback, in_flight, self.overlaps)
        replay()
        self._send_logprobs(step, device_step)
        readback.send(device_step.report)

    def _captured_step(
        self, sequences: Seq[Sequence], plan: Plan, exit: Exit | None, *parts: str, grammar_masks: bool = False
    ) -> tuple:
        """Returns the step of these sequences and its launch, or those of `parts`; captures it on first use."""
        size, captures = self._placement.size, self.graphs.captured.captures
        options = replace(self._placement.options, grammar_masks=grammar_masks)
        found = self.graphs.step(self._buffers, size, plan, exit, options, _max_length(sequences), *parts)
        if self.graphs.captured.captures > captures:
            self._times.note_slot_writes()
        return found

    def _launch_with_callables(self, step: StepInFlight, exit: Exit | None) -> None:
        parts = self._captured_step(step.sequences, step.record.plan, exit, *DeviceStep.PARTS)
        self._times.note_other_work()
        run_with_callables(step, parts, self.graphs.readbacks.take(parts[0].report))
        self._send_logprobs(step, parts[0])

    def _launch_masked(self, step: StepInFlight, exit: Exit | None, in_flight: Step | None) -> None:
        """Launches the first part of a step with grammars. The parts that need the previous step's tokens are launched
        when these are read; `_complete` launches the rest."""
        plan = step.record.plan
        device_step, *parts = self._captured_step(
            step.sequences, plan, exit, *DeviceStep.masked_parts(plan), grammar_masks=True
        )
        self._times.start(step, self.graphs.readbacks.take(device_step.report), in_flight, self.overlaps)
        self._masked_step = MaskedStep(step, device_step, parts)
        self._masking.launch(self._masked_step)
        if in_flight is None:
            self._continue()

    def _continue(self) -> None:
        """Launches the passes of an unfinished masked step that need the previous tokens; of a plain step, all."""
        if self._masked_step is not None and len(self._masked_step.plan):
            self._masking.draft(self._masked_step)
        else:
            self._complete()

    def _complete(self) -> None:
        """Launches the rest of an unfinished masked step: before all other work on the slots, and before pages of its
        sequences may be given to others."""
        masked, self._masked_step = self._masked_step, None
        if masked is not None:
            self._masking.complete(masked)
            self._send_logprobs(masked.step, masked.device_step)
            assert masked.step.readback is not None
            masked.step.readback.send(masked.device_step.report)

    def _send_logprobs(self, step: StepInFlight, device_step: DeviceStep) -> None:
        """Computes log probabilities after a step, where a sequence wants them, and copies them to the host. If there
        is too little memory for them, fails the requests that want them."""
        if self._top is None:
            return
        try:
            packed = device_step.logprobs(self._top)
        except torch.OutOfMemoryError as error:
            message = f"out of memory for log probabilities ({error}): build the engine with a smaller kv_cache_gb"
            for sequence in step.sequences:
                if sequence.request.logprobs is not None:
                    sequence.request.fail(CacheFull(message))
            return
        step.logprobs = self.graphs.readbacks.take(packed)
        step.logprobs.send(packed)

    def read(self, step: Step) -> None:
        """Waits for the step's report and appends its tokens. Drops the tokens of sequences that have ended since the
        step was launched."""
        assert isinstance(step, StepInFlight) and step.readback is not None
        if self._masked_step is not None and self._masked_step.step is step:
            self._complete()
        reports, plan = step.readback.read(), step.record.plan
        kept, last_nodes, exit_nodes = [], [], []
        for sequence, slot in zip(step.sequences, step.slots, strict=True):
            last = step.appended.get(sequence)
            if sequence.is_finished and last is None:
                continue
            report = reports[slot]
            count = report[COUNT]
            sequence.kv.length += count
            if last is None:
                last = append_tokens(sequence, report[TOKENS : TOKENS + count], plan, report[LAST])
            kept.append(sequence)
            last_nodes.append(last)
            exit_nodes.append(report[EXIT_LAST])
        if step.logprobs is not None:
            self._add_logprobs(step, kept)
        step.enters_costs = step.enters_costs and len(kept) == len(step.sequences)
        step.sequences, step.last_nodes, step.exit_nodes = kept, last_nodes, exit_nodes
        self._continue()
        self._times.stop(step)

    def _add_logprobs(self, step: StepInFlight, kept: list[Sequence]) -> None:
        assert step.logprobs is not None
        packed, slots = step.logprobs.read(), dict(zip(step.sequences, step.slots, strict=True))
        self.graphs.readbacks.give_back(step.logprobs)
        for sequence in kept:
            sequence.add_logprobs(packed[slots[sequence]])

    # Slots

    def _place(self, sequences: Seq[Sequence], exit: Exit | None, in_flight: Step | None) -> None:
        """Gives the sequences slots and writes all changes to the device, if there are any."""
        placement = self._placement
        if placement.is_current(sequences, exit):
            return
        if exit is not None and placement.size not in (0, bucket(len(sequences))):
            # The layout of unfilled states depends on the number of slots: fill the KV first.
            self.fill_exit(list(self._unfilled), exit, score=False, in_flight=in_flight)
        placement.place(sequences, exit)
        wanted = [sequence.request.logprobs for sequence in sequences if sequence.request.logprobs is not None]
        self._top = max(wanted, default=None)

    def release(self, sequence: Sequence) -> None:
        try:
            self._complete()
        finally:  # a slot that is not freed would make all later steps fail
            self._placement.release(sequence)
            self._prompts.release(sequence)
            self._unfilled.pop(sequence, None)

    def suspend(self, sequence: Sequence) -> None:
        """Fills the exit's KV and copies the sequence's feature from its slot."""
        slot, exit = self._placement.slot_of.get(sequence), self._placement.head_exit
        if slot is None:
            return
        if exit is not None:
            self.fill_exit(list(self._unfilled), exit, score=False, in_flight=None)
        sequence.previous_feature = self._buffers.features[slot].clone()

    def close(self) -> None:
        self.graphs.give_back(self._buffers)

    # Prompts

    def prefill_kind(self, tokens: int) -> PrefillKind:
        return self._prompts.prefill_kind(tokens)

    def prefill(self, sequences: Seq[Sequence], exit: Exit | None) -> list[Sequence]:
        self._times.note_slot_writes()
        if self._masked_step is not None:
            self._masked_step.step.enters_costs = False  # the pass runs between its parts
        return self._prompts.run(sequences, exit, captures=self.overlaps)

    def score_prompts(self, sequences: Seq[Sequence], exit: Exit) -> bool:
        """Launches one pass over all slots; its scores arrive with the next step. Does nothing while other scores are
        in flight, or between the draft and the choice of a step with grammars."""
        placement, ends, masked = self._placement, self._prompts.prompt_ends, self._masked_step
        scored = [sequence for sequence in sequences if sequence in ends]
        joining = [sequence for sequence in scored if sequence not in placement.slot_of]  # before their first step
        may_run = masked is None or not (masked.has_drafted or joining)
        if not scored or not may_run or self._prompt_scores.in_flight is not None:
            return False
        if joining:
            with suppress(CacheFull):  # the first step takes its pages, or waits for them
                placement.pages.reserve(joining, NONE, None)  # first, so that the slots are written once
            self._place([*placement.slot_of, *joining], exit, None)
        slots = placement.slots(scored)
        score, replay = self.graphs.prompt_score(self._buffers, placement.size, exit, _max_length(scored))
        lengths = [len(sequence.prompt) - 1 for sequence in scored]
        score.load(slots, [ends.pop(sequence) for sequence in scored], lengths)
        self.note_other_work()
        replay()
        self._prompt_scores.send(score, scored, slots)
        return True

    def note_other_work(self) -> None:
        self._times.note_other_work()
        if self._masked_step is not None:
            self._masked_step.step.enters_costs = False  # the work runs between its parts

    def prompt_scores(self) -> dict[Sequence, tuple[float, int]]:
        return self._prompt_scores.read()

    # The exit's KV while nothing is drafted

    @property
    def max_unfilled(self) -> int:
        return unfilled_capacity(max(self._placement.size, 1))

    def fill_exit(self, sequences: Seq[Sequence], exit: Exit, score: bool, in_flight: Step | None) -> None:
        """Launches one pass over the unfilled positions of all slots."""
        placement = self._placement
        placed = [sequence for sequence in sequences if sequence in placement.slot_of]
        if not placed:
            return
        self._complete()
        placement.idle_vacated_slots()
        self._times.note_other_work()
        longest = _max_length(placed)
        fill, replay = self.graphs.exit_fill(self._buffers, placement.size, exit, placement.options, longest, score)
        replay()
        counts = [self._unfilled.get(sequence, 0) for sequence in placed]
        self._unfilled.clear()
        if score:
            # A step in flight is plain: a drafting step would have filled all positions before.
            unread = [] if in_flight is None else in_flight.sequences
            self._exit_scores.send(fill, placed, placement.slots(placed), counts, unread)

    def unfilled(self, sequence: Sequence) -> int:
        """Counts a plain step in flight, whose position is not part of the sequence's length yet."""
        return self._unfilled.get(sequence, 0)

    def exit_scores(self) -> list[tuple[Sequence, list[bool]]]:
        return self._exit_scores.read()


def append_tokens(sequence: Sequence, tokens: list[int], plan: Plan, last: int) -> int:
    """Appends a step's tokens: at once if none of them can end the sequence, else one by one up to its end. Returns the
    node after which its last token was chosen: `last`, the last accepted node, or one before it if the sequence ended.
    """
    can_end = sequence.request.criteria or len(sequence.tokens) + len(tokens) >= sequence.max_length
    if not can_end and sequence.stop_tokens.isdisjoint(tokens) and min(tokens) >= 0:
        sequence.tokens += tokens
        return last
    for index, token in enumerate(tokens):
        sequence.append(token, drafted=index < len(tokens) - 1)
        if sequence.is_finished:
            return plan.node_at(last, index)
    return last


def _max_length(sequences: Seq[Sequence]) -> int:
    """Tokens that the longest of these sequences may have at its end."""
    return max(sequence.max_length for sequence in sequences)
