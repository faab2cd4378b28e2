"""Steps in which Python callables process logits: only the choice leaves the captured graphs, not the model."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from selfspec.backends.cuda.graphs import Launch
from selfspec.backends.cuda.readback import Readback, StepInFlight
from selfspec.backends.cuda.step import DeviceStep
from selfspec.backends.torch_backend import callback_seconds
from selfspec.sampling import process_logits
from selfspec.sequence import Sequence
from selfspec.speculation.plan import Plan


def run_with_callables(
    step: StepInFlight, parts: tuple[DeviceStep, Launch, Launch, Launch], readback: Readback
) -> None:
    """Runs a step in its three captured parts, `DeviceStep.PARTS`: passes; choice; acceptance and commit.

    Depth by depth, for every sequence with callables or a grammar: processes the logits of the node that the sequence
    has reached, chooses again, appends the chosen token, and goes to the child that carries it. Where two nodes have
    the same tokens from the root on, both get the processed logits. `CudaBackend.read` appends the tokens of the other
    sequences from the report.
    """
    device_step, passes, choose, commit = parts
    size, callables = device_step.slots.count, CallableTime(step.sequences)
    readback.start()
    passes()
    readback.mark()
    plan = step.record.plan
    drafted = device_step.metadata.tokens.tolist() if len(plan) else []  # by row: node * size + slot
    parents = device_step.parents.tolist() if plan.beam else [[0]] * size
    trees = [plan.of_sequence(of_nodes) for _, *of_nodes in parents]  # by slot
    slots = zip(step.sequences, step.slots, strict=True)
    # Sequences whose walk goes on: slot, and the reached nodes, which have the same tokens from the root on.
    walking = {sequence: (slot, [0]) for sequence, slot in slots if sequence.request.uses_host}
    while walking:
        for sequence, (slot, nodes) in walking.items():
            first, *others = (device_step.logits[node * size + slot][None] for node in nodes)  # each [1, V]
            _process(sequence, first)
            for same in others:
                same.copy_(first)
        callables.note_run()
        choose()
        chosen = device_step.chosen.view(-1).tolist()
        walking = {
            sequence: (slot, carriers)
            for sequence, (slot, nodes) in walking.items()
            if (carriers := _append(step, trees[slot], sequence, nodes, chosen[slot::size], drafted[slot::size]))
        }
    if not step.appended:  # no sequence needed the host
        choose()
    commit()
    readback.send(device_step.report)
    step.readback = readback
    step.callback_s = callables.seconds(readback)


class CallableTime:
    """Measures how long the device waits for the callables of a step. In a plain step the first callables
    run beside the passes, so the device may not wait for them."""

    def __init__(self, sequences: Seq[Sequence]) -> None:
        self._sequences, self._before = sequences, callback_seconds(sequences)
        self._started = self._first_ended = time.perf_counter()
        self._in_first = 0.0  # seconds in the first callables

    def note_run(self) -> None:
        """Must be called each time callables have run, before anything waits for the device."""
        if self._first_ended == self._started:
            self._first_ended = time.perf_counter()
            self._in_first = callback_seconds(self._sequences) - self._before

    def seconds(self, readback: Readback) -> float:
        """Seconds that the device waited, where the readback's mark is at the end of the passes."""
        in_others = callback_seconds(self._sequences) - self._before - self._in_first
        if not self._in_first:
            return in_others
        waited = self._first_ended - self._started - readback.marked_seconds
        return in_others + min(self._in_first, max(0.0, waited))


def _process(sequence: Sequence, logits: torch.Tensor) -> None:
    """Processes logits [1, V] in place: with callables by the built-in processing and the callables; then by the
    grammar. Without callables the captured choice does the built-in processing: it comes after the grammar then, but
    tokens that the grammar bans stay banned."""
    values = logits
    if sequence.request.processors:
        values = process_logits(logits, [sequence.params], [sequence.tokens], [len(sequence.prompt)])
    logits.copy_(sequence.process(values))


def _append(
    step: StepInFlight, tree: Plan, sequence: Sequence, nodes: list[int], chosen: list[int], drafted: list[int]
) -> list[int]:
    """Appends the token chosen after `nodes`, which have the same tokens from the root on. Returns the children that
    carry this token; none if the walk ends. `chosen` and `drafted` are the sequence's tokens by node."""
    token = chosen[nodes[0]]
    carriers = tree.matching_children(nodes, token, drafted) if sequence.drafts and len(tree) else []
    step.appended[sequence] = nodes[0]
    sequence.append(token, drafted=bool(carriers))
    return [] if sequence.is_finished else carriers
