"""The CUDA backend of one batch: launches steps as captured graphs of Triton kernels, and reads their reports (emitted
tokens, last nodes).

One step is in flight: the host launches the next step before it reads the step in flight. The caller decides which
sequences decode, and with which plan. `placement.py` gives them slots, `graphs.py` captures steps, and `step.py` is the
step itself. On a CPU the same code runs with interpreted kernels, one step at a time.

A position is *unfilled* while the KV of the exit block is missing there: plain steps do not run the exit. A *masked
step* has sequences with grammars; it is launched in parts, between which the host computes masks.
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
from selfspec.backends.cuda.slots import StepOptions, bucket
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
        self._masked_step: MaskedStep | None = None  # the newest one, until its choice is launched
        self._unfilled: dict[Sequence, int] = {}  # number of unfilled positions; 0 if missing
        # Log probabilities are read of this many likeliest tokens per position; None: no sequence wants them.
        self._top_logprobs: int | None = None

    def slots_for(self, sequences: int) -> int:
        return bucket(sequences)

    def step_options(self, sequences: Seq[Sequence]) -> StepOptions:
        return self._placement.options_of(sequences)

    # Steps

    def launch(self, sequences: Seq[Sequence], record: StepRecord, exit: Exit | None, in_flight: Step | None) -> Step:
        """Launches a step and the copy of its report to the host, without waiting for the device, unless callables
        process logits. Of a masked step launches only the first part while another step is in flight."""
        self._complete_masked_step()
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
        """Launches a step as one graph."""
        device_step, replay = self._captured_step(step.sequences, step.record.plan, exit)
        readback = self.graphs.readbacks.take(device_step.report)
        self._times.start(step, readback, in_flight, self.overlaps)
        replay()
        self._send_logprobs(step, device_step)
        readback.send(device_step.report)

    def capture_s(self, sequences: Seq[Sequence], plan: Plan, exit: Exit | None) -> float:
        return self.graphs.captured.seconds_to_capture(self.graphs.step_key(*self._settings(sequences, plan, exit)))

    def _captured_step(self, sequences: Seq[Sequence], plan: Plan, exit: Exit | None) -> tuple:
        """Returns the device step for these sequences, captured on first use, followed by its launch, or by the launch
        of each of its parts."""
        captures = self.graphs.captured.captures
        found = self.graphs.step(*self._settings(sequences, plan, exit))
        if self.graphs.captured.captures > captures:
            self._times.exclude_next_step()
        return found

    def _settings(self, sequences: Seq[Sequence], plan: Plan, exit: Exit | None) -> tuple:
        """Returns the arguments of `Graphs.step` for these sequences, which need not have slots yet."""
        parts: tuple[str, ...] = ()
        has_callables = any(sequence.request.processors for sequence in sequences)
        has_masks = not has_callables and any(sequence.request.uses_host for sequence in sequences)
        if has_callables:
            parts = DeviceStep.PARTS
        elif has_masks:
            parts = DeviceStep.masked_parts(plan)
        options = replace(self._placement.options_of(sequences), grammar_masks=has_masks)
        return self._buffers, bucket(len(sequences)), plan, exit, options, _max_length(sequences), *parts

    def _launch_with_callables(self, step: StepInFlight, exit: Exit | None) -> None:
        """Runs a step in which Python callables process logits, and waits for their results."""
        parts = self._captured_step(step.sequences, step.record.plan, exit)
        self._times.note_other_work()
        run_with_callables(step, parts, self.graphs.readbacks.take(parts[0].report))
        self._send_logprobs(step, parts[0])

    def _launch_masked(self, step: StepInFlight, exit: Exit | None, in_flight: Step | None) -> None:
        """Launches the first part of a masked step. The parts after it need the tokens of the step in flight: `read`
        launches them, or this method if no step is in flight. `_complete_masked_step` launches the choice."""
        plan = step.record.plan
        device_step, *parts = self._captured_step(step.sequences, plan, exit)
        self._times.start(step, self.graphs.readbacks.take(device_step.report), in_flight, self.overlaps)
        self._masked_step = MaskedStep(step, device_step, parts)
        self._masking.launch(self._masked_step)
        if in_flight is None:
            self._continue_masked_step()

    def _continue_masked_step(self) -> None:
        """Launches the parts of the masked step up to its choice; if its plan is `none`, also the choice. The tokens of
        the step before must have been read."""
        if self._masked_step is not None and len(self._masked_step.plan):
            self._masking.draft(self._masked_step)
        else:
            self._complete_masked_step()

    def _complete_masked_step(self) -> None:
        """Launches the remaining parts of the masked step, if there is one. Must come before all other work on the
        slots, and before the pages of its sequences are given to others."""
        masked, self._masked_step = self._masked_step, None
        if masked is not None:
            self._masking.complete(masked)
            self._send_logprobs(masked.step, masked.device_step)
            assert masked.step.readback is not None
            masked.step.readback.send(masked.device_step.report)

    def _send_logprobs(self, step: StepInFlight, device_step: DeviceStep) -> None:
        """Launches the log probabilities of a step's tokens and their copy to the host, if a sequence wants them. Fails
        the requests that want them if the device has too little memory for them."""
        if self._top_logprobs is None:
            return
        try:
            packed = device_step.logprobs(self._top_logprobs)
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
        step was launched. Then continues the masked step that was launched after it, if there is one."""
        assert isinstance(step, StepInFlight) and step.readback is not None
        if self._masked_step is not None and self._masked_step.step is step:
            self._complete_masked_step()
        reports, plan = step.readback.read(), step.record.plan
        kept, last_nodes, exit_nodes = [], [], []
        for sequence, slot in zip(step.sequences, step.slots, strict=True):
            last = step.appended.get(sequence)  # None: the sequence's tokens are not appended yet
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
        step.is_cost_sample = step.is_cost_sample and len(kept) == len(step.sequences)
        step.sequences, step.last_nodes, step.exit_nodes = kept, last_nodes, exit_nodes
        self._continue_masked_step()
        self._times.stop(step)

    def _add_logprobs(self, step: StepInFlight, kept: list[Sequence]) -> None:
        """Waits for the step's log probabilities and adds them to the sequences that have not ended."""
        assert step.logprobs is not None
        packed, slots = step.logprobs.read(), dict(zip(step.sequences, step.slots, strict=True))
        self.graphs.readbacks.give_back(step.logprobs)
        for sequence in kept:
            sequence.add_logprobs(packed[slots[sequence]])

    # Slots

    def _place(self, sequences: Seq[Sequence], exit: Exit | None, in_flight: Step | None) -> None:
        """Gives the sequences slots, and writes to the device what has changed since the newest step."""
        placement = self._placement
        if placement.is_current(sequences, exit):
            return
        if exit is not None and placement.size not in (0, bucket(len(sequences))):
            # The layout of unfilled states depends on the number of slots, which changes: fill the KV first.
            self.fill_exit(list(self._unfilled), exit, score=False, in_flight=in_flight)
        placement.place(sequences, exit)
        wanted = [sequence.request.logprobs for sequence in sequences if sequence.request.logprobs is not None]
        self._top_logprobs = max(wanted, default=None)

    def release(self, sequence: Sequence) -> None:
        try:
            self._complete_masked_step()
        finally:  # a slot that is not freed would make all later steps fail
            self._placement.release(sequence)
            self._prompts.release(sequence)
            self._unfilled.pop(sequence, None)

    def suspend(self, sequence: Sequence) -> None:
        """Fills the exit's KV of all sequences, and copies the sequence's feature from its slot."""
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
        self._times.exclude_next_step()
        if self._masked_step is not None:
            self._masked_step.step.is_cost_sample = False  # the pass runs between the step's parts
        return self._prompts.run(sequences, exit, captures=self.overlaps)

    def score_prompts(self, sequences: Seq[Sequence], exit: Exit) -> bool:
        """Launches one pass over all slots, whose scores `prompt_scores` returns once they have arrived. Launches
        nothing while other scores are in flight, between the draft and the choice of a masked step, or, for sequences
        without a slot, while a masked step is in progress. Returns whether the pass was launched."""
        placement, states, masked = self._placement, self._prompts.prompt_ends, self._masked_step
        scored = [sequence for sequence in sequences if sequence in states]
        joining = [sequence for sequence in scored if sequence not in placement.slot_of]  # before their first step
        may_run = masked is None or not (masked.has_drafted or joining)
        if not scored or not may_run or self._prompt_scores.in_flight is not None:
            return False
        if joining:
            with suppress(CacheFull):  # then the launch of the first step reserves them, or fails
                placement.pages.reserve(joining, NONE, None)  # before `_place`, so that page tables are written once
            self._place([*placement.slot_of, *joining], exit, None)
        slots = placement.slots(scored)
        score, replay = self.graphs.prompt_score(self._buffers, placement.size, exit, _max_length(scored))
        lengths = [len(sequence.prompt) - 1 for sequence in scored]
        score.load(slots, [states.pop(sequence) for sequence in scored], lengths)
        self.note_other_work()
        replay()
        self._prompt_scores.send(score, scored, slots)
        return True

    def note_other_work(self) -> None:
        self._times.note_other_work()
        if self._masked_step is not None:
            self._masked_step.step.is_cost_sample = False  # the work runs between the step's parts

    def prompt_scores(self) -> dict[Sequence, tuple[float, int]]:
        return self._prompt_scores.read()

    # The exit's KV while nothing is drafted

    @property
    def max_unfilled(self) -> int:
        return unfilled_capacity(max(self._placement.size, 1))

    def fill_exit(self, sequences: Seq[Sequence], exit: Exit, score: bool, in_flight: Step | None) -> None:
        """Launches one pass over the unfilled positions of all slots, also of those that are not in `sequences`. With
        `score` the pass scores drafts at the oldest of these positions, and its scores are copied to the host."""
        placement = self._placement
        placed = [sequence for sequence in sequences if sequence in placement.slot_of]
        if not placed:
            return
        self._complete_masked_step()
        placement.idle_vacated_slots()
        self._times.note_other_work()
        longest = _max_length(placed)
        fill, replay = self.graphs.exit_fill(self._buffers, placement.size, exit, placement.options, longest, score)
        replay()
        counts = [self._unfilled.get(sequence, 0) for sequence in placed]
        self._unfilled.clear()
        if score:
            # A step in flight is plain: before a step that drafts, all positions are filled.
            unread = [] if in_flight is None else in_flight.sequences
            self._exit_scores.send(fill, placed, placement.slots(placed), counts, unread)

    def unfilled(self, sequence: Sequence) -> int:
        """Returns the number of unfilled positions. Includes the position of a plain step in flight, which is not part
        of the sequence's length yet."""
        return self._unfilled.get(sequence, 0)

    def exit_scores(self) -> list[tuple[Sequence, list[bool]]]:
        return self._exit_scores.read()


def append_tokens(sequence: Sequence, tokens: list[int], plan: Plan, last: int) -> int:
    """Appends a step's tokens: all at once if none of them can end the sequence, else one by one until one ends it.

    Returns the node after which the last appended token was chosen: `last`, the last accepted node, or a node above it
    if the sequence ended early. A token of -1 (the logits were not finite) fails the request.
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
    """Returns the number of tokens that the longest of these sequences may have at its end."""
    return max(sequence.max_length for sequence in sequences)
