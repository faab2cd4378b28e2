"""Steps of sequences with grammars: the host computes masks from the drafted tokens while the device verifies them.

The step is captured in three parts: draft; verify; choice, acceptance and commit. The first two are launched at once,
the last when the masks are known. The next step can be launched before this one is read, as without grammars: only the
choice needs the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from selfspec.backends.cuda.graphs import Launch
from selfspec.backends.cuda.readback import Readback, Readbacks, StepInFlight
from selfspec.backends.cuda.step import DeviceStep
from selfspec.speculation.plan import NONE


@dataclass(frozen=True)
class OpenStep:
    """A step whose passes are launched."""

    step: StepInFlight
    device_step: DeviceStep
    choose_and_commit: Launch
    drafted: Readback | None  # the nodes' tokens, node-major; None: nothing is drafted


class Masking:
    """Launches the parts of steps, and holds the masks of the newest one in pinned memory: the host writes them after
    it has read the step before, whose masks are copied by then."""

    def __init__(self, readbacks: Readbacks) -> None:
        self._readbacks = readbacks
        self._words = torch.empty(0, dtype=torch.int32)  # as `DeviceStep.mask_words`

    def launch(self, step: StepInFlight, parts: tuple[DeviceStep, Launch, Launch, Launch]) -> OpenStep:
        """Launches draft and verify, and the copy of the drafted tokens between them."""
        device_step, draft, verify, choose_and_commit = parts
        drafted = None
        draft()
        if len(step.record.plan):
            drafted = self._readbacks.take(device_step.metadata.tokens)
            drafted.send(device_step.metadata.tokens)
        verify()
        return OpenStep(step, device_step, choose_and_commit, drafted)

    def complete(self, opened: OpenStep) -> None:
        """Computes the masks, copies them to the device and launches the choice. A grammar that fails ends its request;
        rows without a mask may be followed by any token."""
        step, device_step, size = opened.step, opened.device_step, opened.device_step.slots.count
        rows, drafted = device_step.rows, [0] * device_step.rows
        if opened.drafted is not None:
            drafted = opened.drafted.read()
            self._readbacks.give_back(opened.drafted)
        words = self._take(device_step.mask_words)
        of_row, bits, used = words[:rows].view(np.int32), words[rows:].reshape(rows, -1), 0
        of_row.fill(-1)
        for sequence, slot in zip(step.sequences, step.slots, strict=True):
            if sequence.grammar is None or sequence.is_finished:
                continue
            with sequence.request.callback():
                plan = step.record.plan if sequence.drafts else NONE
                for node in sequence.grammar.masks(sequence.tokens, plan, drafted[slot::size], bits[used:]):
                    of_row[node * size + slot] = used
                    used += 1
        count = rows + used * bits.shape[1]
        device_step.mask_words[:count].copy_(self._words[:count], non_blocking=True)
        opened.choose_and_commit()

    def _take(self, like: torch.Tensor) -> np.ndarray:
        """Pinned memory of at least the size of `like`, as unsigned words."""
        if len(self._words) < len(like):
            self._words = torch.empty(len(like), dtype=torch.int32, pin_memory=like.device.type == "cuda")
        return self._words[: len(like)].numpy().view(np.uint32)
