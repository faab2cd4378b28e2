"""Steps in which Python callables process logits: only the choice leaves the captured graphs, not the model."""

from __future__ import annotations

import torch

from selfspec.backends.cuda.graphs import Launch
from selfspec.backends.cuda.readback import Readback, StepInFlight
from selfspec.backends.cuda.step import DeviceStep
from selfspec.backends.torch_backend import callback_seconds
from selfspec.sampling import process_logits
from selfspec.sequence import Sequence


def run_with_callables(
    step: StepInFlight, parts: tuple[DeviceStep, Launch, Launch, Launch], readback: Readback
) -> None:
    """Runs a step in its three captured parts: passes; choice; acceptance and commit.

    Depth by depth, the callables process the logits of the node that each sequence has reached, and the choice runs
    again. Appends the tokens of sequences with callables; `read` appends those of the others from the report.
    """
    device_step, passes, choose, commit = parts
    size, seconds_before = device_step.slots.count, callback_seconds(step.sequences)
    readback.start()
    passes()
    drafted = device_step.metadata.tokens.tolist() if len(step.record.plan) else []
    walking = {of: (slot, 0) for of, slot in zip(step.sequences, step.slots, strict=True) if of.request.uses_host}
    while walking:
        for sequence, (slot, node) in walking.items():
            _process(sequence, device_step.logits[node * size + slot][None])
        choose()
        chosen = device_step.chosen.view(-1).tolist()
        walking = {
            sequence: (slot, child)
            for sequence, (slot, node) in walking.items()
            if (child := _append(step, sequence, node, chosen[slot::size], drafted[slot::size])) is not None
        }
    if not step.appended:
        choose()
    commit()
    readback.send(device_step.report)
    step.readback = readback
    step.callback_s = callback_seconds(step.sequences) - seconds_before


def _process(sequence: Sequence, logits: torch.Tensor) -> None:
    """Built-in processing, the request's callables, then its grammar, in place on logits [1, V]. Without callables the
    device does the built-in processing, which keeps banned tokens banned."""
    values = logits
    if sequence.request.processors:
        values = process_logits(logits, [sequence.params], [sequence.tokens], [len(sequence.prompt)])
    logits.copy_(sequence.process(values))


def _append(step: StepInFlight, sequence: Sequence, node: int, chosen: list[int], drafted: list[int]) -> int | None:
    """Appends the token chosen at a node. Returns the child that carries it, or None if the walk ends. `chosen` and
    `drafted` are the sequence's tokens by node."""
    token = chosen[node]
    children = step.record.plan.children[node] if sequence.drafts else ()
    child = next((of for of in children if drafted[of] == token), None)
    step.appended[sequence] = node
    sequence.append(token, drafted=child is not None)
    return None if sequence.is_finished else child
