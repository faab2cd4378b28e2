"""Masked steps: steps of sequences with grammars. The host computes the masks of the roots, then those of the drafted
nodes, while the device runs.

A masked step is captured in parts. The first part is launched before the previous step is read: the passes of a plain
step, or the root's pass of a step that drafts with the exit. Once the previous step is read, the host computes the
roots' masks and the forced tokens, which the following parts read. During verify the host computes the masks of the
nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from selfspec.backends.cuda.graphs import Launch
from selfspec.backends.cuda.readback import StepInFlight
from selfspec.backends.cuda.step import DeviceStep
from selfspec.backends.cuda.step_masks import StepMasks
from selfspec.sequence import Sequence
from selfspec.speculation.plan import Plan


@dataclass
class MaskedStep:
    """A masked step whose choice is not launched yet."""

    step: StepInFlight
    device_step: DeviceStep
    parts: list[Launch]  # those left to launch, in order
    has_drafted: bool = False  # `Masking.draft` has launched the parts before the choice
    # Sequences whose root has a mask, with their slots; the root's mask of entry i is mask number i.
    roots: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        return self.step.record.plan

    @property
    def masks(self) -> StepMasks:
        assert self.device_step.masks is not None
        return self.device_step.masks


class Masking:
    """Launches the parts of masked steps and computes their masks."""

    def __init__(self, on_gpu: bool) -> None:
        self._drafts_arrived = torch.cuda.Event() if on_gpu else None  # recorded after the copy of drafted tokens

    def launch(self, masked: MaskedStep) -> None:
        """Launches the first part, the passes that need neither masks nor forced tokens. A plan that only copies has no
        such part."""
        if masked.plan.uses_exit or not len(masked.plan):
            masked.parts.pop(0)()

    def draft(self, masked: MaskedStep) -> None:
        """Computes the roots' masks and the forced tokens, and launches the rest of draft and verify; does nothing if
        that is done. A grammar that fails ends its request."""
        if masked.has_drafted:
            return
        masked.has_drafted = True
        mask_numbers, forced, bits = masked.masks.host_views
        mask_numbers.fill(-1)
        for sequence, slot in zip(masked.step.sequences, masked.step.slots, strict=True):
            if sequence.grammar is not None and not sequence.is_finished:
                with sequence.request.callback():
                    sequence.grammar.mask(sequence.tokens, bits[len(masked.roots)])
                    mask_numbers[slot] = len(masked.roots)
                    masked.roots.append((sequence, slot))
        if masked.plan.copied:
            forced.fill(-1)
            for sequence, slot in masked.roots:
                tokens = sequence.forced(len(forced))
                forced[: len(tokens), slot] = tokens
        if len(masked.plan):
            masked.parts.pop(0)()
            if self._drafts_arrived is not None:
                self._drafts_arrived.record()
            masked.parts.pop(0)()

    def complete(self, masked: MaskedStep) -> None:
        """Computes the nodes' masks and launches the choice. After rows without a mask any token may be chosen."""
        self.draft(masked)
        if len(masked.plan):
            self._mask_nodes(masked)
        masked.parts.pop(0)()
        if not masked.plan.copied:
            for sequence, _ in masked.roots:
                sequence.forced(0)  # counts the forced tokens, which copied nodes of a plan would have carried

    def _mask_nodes(self, masked: MaskedStep) -> None:
        """Waits for the drafted tokens. Computes the masks of the nodes whose tokens from the root on are allowed."""
        if self._drafts_arrived is not None:
            self._drafts_arrived.synchronize()
        masks, size = masked.masks, masked.device_step.slots.count
        (mask_numbers, _, bits), drafted = masks.host_views, masks.host_tokens.tolist()
        trees = [masked.plan] * size
        if masked.plan.beam:
            trees = [masked.plan.of_sequence(parents) for _, *parents in masks.host_parents.tolist()]
        used = len(masked.roots)  # masks that are written
        for index, (sequence, slot) in enumerate(masked.roots):
            # The rule at the launch decides: `sequence.drafts` may have changed since, when other sequences joined.
            if sequence not in masked.step.reasons and sequence.grammar is not None:
                with sequence.request.callback():
                    rows = sequence.grammar.node_masks(trees[slot], drafted[slot::size], bits[index], bits[used:])
                    for node, row in rows.items():
                        mask_numbers[node * size + slot] = used + row
                    used += max(rows.values(), default=-1) + 1
