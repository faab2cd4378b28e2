"""Steps of sequences with grammars: the host computes masks of the root, then of the drafted nodes, while the device
runs.

The step is captured in parts: draft of the root; draft of its descendants; verify; choice, acceptance and commit. The
first part is launched before the step before is read, as without grammars. Once that is read, the roots' masks are
known, and the next two parts are launched. While the device verifies, the host computes the masks of the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from selfspec.backends.cuda.graphs import Launch
from selfspec.backends.cuda.readback import Readback, Readbacks, StepInFlight
from selfspec.backends.cuda.step import DeviceStep
from selfspec.sequence import Sequence
from selfspec.speculation.plan import Plan


@dataclass
class OpenStep:
    """A step whose choice is not launched."""

    step: StepInFlight
    device_step: DeviceStep
    parts: list[Launch]  # that are left to launch
    drafted: Readback | None = None  # the nodes' tokens, node-major
    parents: Readback | None = None  # of a beam's nodes
    is_drafted: bool = False
    roots: list[tuple[Sequence, int]] = field(default_factory=list)  # sequences whose root has a mask, and their slots

    @property
    def plan(self) -> Plan:
        return self.step.record.plan


class Masking:
    """Launches the parts of steps. Holds the masks of the newest step in pinned memory: the host writes them after it
    has read the step before, whose masks are copied by then."""

    def __init__(self, readbacks: Readbacks) -> None:
        self._readbacks = readbacks
        self._words = torch.empty(0, dtype=torch.int32)  # as `DeviceStep.mask_words`
        self._sent: torch.cuda.Event | None = None  # after the newest copy to a GPU

    def launch(self, opened: OpenStep) -> None:
        """Launches the draft of the root, which needs no mask."""
        opened.parts.pop(0)()

    def draft(self, opened: OpenStep) -> None:
        """Computes the roots' masks and launches the other passes, unless that is done. A grammar that fails ends its
        request."""
        if opened.is_drafted:
            return
        opened.is_drafted = True
        if self._sent is not None:
            self._sent.synchronize()  # masks of a step that failed may still be on their way
        of_row, bits = self._views(opened)
        of_row.fill(-1)
        for sequence, slot in zip(opened.step.sequences, opened.step.slots, strict=True):
            if sequence.grammar is not None and not sequence.is_finished:
                with sequence.request.callback():
                    sequence.grammar.mask(sequence.tokens, bits[len(opened.roots)])
                    of_row[slot] = len(opened.roots)
                    opened.roots.append((sequence, slot))
        if opened.plan.uses_exit:
            self._send(opened, len(opened.roots))
            opened.parts.pop(0)()
        if len(opened.plan):
            tokens = opened.device_step.metadata.tokens
            opened.drafted = self._readbacks.take(tokens)
            opened.drafted.send(tokens)
        if opened.plan.beam:
            opened.parents = self._readbacks.take(opened.device_step.parents)
            opened.parents.send(opened.device_step.parents)
        opened.parts.pop(0)()

    def complete(self, opened: OpenStep) -> None:
        """Computes the nodes' masks and launches the choice. Rows without a mask may be followed by any token."""
        self.draft(opened)
        (of_row, bits), size, used = self._views(opened), opened.device_step.slots.count, len(opened.roots)
        if opened.drafted is not None:
            drafted = opened.drafted.read()
            self._readbacks.give_back(opened.drafted)
            trees = self._trees(opened)
            for index, (sequence, slot) in enumerate(opened.roots):
                # As at the launch: `sequence.drafts` may have changed since, when other sequences joined.
                if sequence not in opened.step.reasons and sequence.grammar is not None:
                    with sequence.request.callback():
                        tokens = drafted[slot::size]
                        for node in sequence.grammar.node_masks(trees[slot], tokens, bits[index], bits[used:]):
                            of_row[node * size + slot] = used
                            used += 1
        self._send(opened, used)
        opened.parts.pop(0)()

    def _trees(self, opened: OpenStep) -> list[Plan]:
        """The tree of each slot."""
        if opened.parents is None:
            return [opened.plan] * opened.device_step.slots.count
        parents = opened.parents.read()
        self._readbacks.give_back(opened.parents)
        return [opened.plan.of_sequence(of_nodes) for _, *of_nodes in parents]

    def _views(self, opened: OpenStep) -> tuple[np.ndarray, np.ndarray]:
        """The pinned memory for a step's masks: the mask of each row, and the masks' words."""
        step, like = opened.device_step, opened.device_step.mask_words
        if len(self._words) < len(like):
            self._words = torch.empty(len(like), dtype=torch.int32, pin_memory=like.device.type == "cuda")
        words = self._words[: len(like)].numpy()
        return words[: step.rows], words[step.mask_start :].view(np.uint32).reshape(step.rows, -1)

    def _send(self, opened: OpenStep, used: int) -> None:
        """Copies the rows' numbers and the first `used` masks to the device, without waiting."""
        step, words = opened.device_step, opened.device_step.mask_words
        count = step.mask_start + used * ((len(words) - step.mask_start) // step.rows)
        words[:count].copy_(self._words[:count], non_blocking=True)
        if words.is_cuda:
            self._sent = self._sent or torch.cuda.Event()
            self._sent.record()
