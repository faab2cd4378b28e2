"""Steps of sequences with grammars: the host computes masks of the root, then of the drafted nodes, while the device
runs.

The step is captured in parts. A plain step's passes are launched while the previous step is unread, as without
grammars; once that is read, the roots' masks are computed and the choice is launched. A step that drafts with the exit
begins with the root's pass; the roots' masks, and the tokens that grammars force, are there for the passes that follow.
While the device verifies, the host computes the masks of the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from selfspec.backends.cuda.graphs import Launch
from selfspec.backends.cuda.readback import StepInFlight
from selfspec.backends.cuda.step import DeviceStep
from selfspec.sequence import Sequence
from selfspec.speculation.plan import Plan


@dataclass
class OpenStep:
    """A step whose choice is not launched."""

    step: StepInFlight
    device_step: DeviceStep
    parts: list[Launch]  # that are left to launch
    is_drafted: bool = False
    roots: list[tuple[Sequence, int]] = field(default_factory=list)  # sequences whose root has a mask, and their slots

    @property
    def plan(self) -> Plan:
        return self.step.record.plan


class Masking:
    """Launches the parts of steps."""

    def __init__(self, on_gpu: bool) -> None:
        self._drafted = torch.cuda.Event() if on_gpu else None  # after the newest copy of drafted tokens to the host

    def launch(self, opened: OpenStep) -> None:
        """Launches the passes that need neither masks nor forced tokens."""
        if opened.plan.uses_exit or not len(opened.plan):
            opened.parts.pop(0)()

    def draft(self, opened: OpenStep) -> None:
        """Computes the roots' masks and forced tokens, and launches the other passes, unless that is done. A grammar
        that fails ends its request."""
        if opened.is_drafted:
            return
        opened.is_drafted = True
        of_row, forced, bits = opened.device_step.host_views
        of_row.fill(-1)
        for sequence, slot in zip(opened.step.sequences, opened.step.slots, strict=True):
            if sequence.grammar is not None and not sequence.is_finished:
                with sequence.request.callback():
                    sequence.grammar.mask(sequence.tokens, bits[len(opened.roots)])
                    of_row[slot] = len(opened.roots)
                    opened.roots.append((sequence, slot))
        if opened.plan.copied:
            forced.fill(-1)
            for sequence, slot in opened.roots:
                tokens = sequence.forced(len(forced))
                forced[: len(tokens), slot] = tokens
        if len(opened.plan):
            opened.parts.pop(0)()
            if self._drafted is not None:
                self._drafted.record()
            opened.parts.pop(0)()

    def complete(self, opened: OpenStep) -> None:
        """Computes the nodes' masks and launches the choice. Rows without a mask may be followed by any token."""
        self.draft(opened)
        if len(opened.plan):
            self._mask_nodes(opened)
        opened.parts.pop(0)()
        if not opened.plan.copied:
            for sequence, _ in opened.roots:
                sequence.forced(0)  # the governor learns what copied nodes would bring

    def _mask_nodes(self, opened: OpenStep) -> None:
        if self._drafted is not None:
            self._drafted.synchronize()
        step, used = opened.device_step, len(opened.roots)
        (of_row, _, bits), size, drafted = step.host_views, step.slots.count, step.host_tokens.tolist()
        trees = [opened.plan] * size
        if opened.plan.beam:
            trees = [opened.plan.of_sequence(parents) for _, *parents in step.host_parents.tolist()]
        for index, (sequence, slot) in enumerate(opened.roots):
            # As at the launch: `sequence.drafts` may have changed since, when other sequences joined.
            if sequence not in opened.step.reasons and sequence.grammar is not None:
                with sequence.request.callback():
                    rows = sequence.grammar.node_masks(trees[slot], drafted[slot::size], bits[index], bits[used:])
                    for node, row in rows.items():
                        of_row[node * size + slot] = used + row
                    used += max(rows.values(), default=-1) + 1
