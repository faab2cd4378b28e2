"""The token layout of one pass: the cache slot, position and attention mask of each of its rows.

Computes indices and masks from page tables, committed lengths and the nodes of a plan; holds no keys, values or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property

import torch

from selfspec.cache.kv_cache import PAGE_SIZE, KVPages, flat_slot


class Rows:
    """M rows of hidden states for each of B sequences, one row per tree node; the nodes are the same in all sequences.

    Row m of a sequence with committed length l is node `nodes[m]`: its slot is l + node, its position l + depth of the
    node. It attends to every committed slot, to the slots of its ancestors and to its own.
    """

    def __init__(
        self,
        sequences: Seq[KVPages],
        nodes: range,
        depths: torch.Tensor,  # [K] depths of nodes 0 to K - 1, K = nodes.stop
        ancestors: torch.Tensor,  # [M, K] or [B, M, K] bool: the nodes that each row attends to
        device: torch.device,
        all_ancestors: bool | None = None,  # ancestors.all() if the caller has it: reading it waits for the device
    ) -> None:
        self.sequences = sequences
        self.nodes = nodes
        self.device = device
        self.lengths = torch.tensor([sequence.length for sequence in sequences], device=device)  # [B]
        self.depths = depths.to(device)
        self.ancestors = ancestors.to(device)
        self.positions = self.lengths[:, None] + self.depths[nodes.start : nodes.stop]  # [B, M]
        self.slots = max(sequence.length for sequence in sequences) + nodes.stop  # S: slots that some row attends to
        self._all_ancestors = bool(ancestors.all()) if all_ancestors is None else all_ancestors
        self._same_length = all(sequence.length == sequences[0].length for sequence in sequences)
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self.rotations: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # filled by Decoder.rotations_of
        self.is_causal = False  # each row attends to all positions up to its own

    @classmethod
    def causal(cls, sequences: Seq[KVPages], count: int, device: torch.device) -> Rows:
        """The layout of `count` tokens that follow each sequence; each attends to the ones before it."""
        rows = cls(sequences, range(count), torch.arange(count), torch.ones(count, count).tril().bool(), device)
        rows.is_causal = True
        return rows

    @cached_property
    def pages(self) -> torch.Tensor | slice:
        """The sequences' page tables [B, P], padded with page 0; a slice if there is one sequence and its pages are
        contiguous, which spares attention a gather."""
        needed = -(-self.slots // PAGE_SIZE)
        table = [(sequence.pages + [0] * needed)[:needed] for sequence in self.sequences]
        first = table[0][0]
        if len(table) == 1 and table[0] == list(range(first, first + needed)):
            return slice(first, first + needed)
        return torch.tensor(table, device=self.device)

    @cached_property
    def flat_slots(self) -> torch.Tensor:  # [B * M]
        flat = [flat_slot(s, s.length + node) for s in self.sequences for node in self.nodes]
        return torch.tensor(flat, device=self.device)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """[B, M, S] bool: the slots each row attends to; None if each row attends to all S. Kept for all layers with
        the same window: a row at position t attends to positions above t - window (None: to all)."""
        if window is not None and window >= self.slots:
            window = None
        if window not in self._masks:
            unmasked = window is None and self._same_length and self._all_ancestors
            self._masks[window] = None if unmasked else self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> torch.Tensor:
        node = torch.arange(self.slots, device=self.device) - self.lengths[:, None]  # [B, S]; negative: committed slot
        index = node.clamp(0, self.nodes.stop - 1)
        count = self.nodes.stop - self.nodes.start
        ancestors = self.ancestors.expand(len(index), count, -1)  # [B, M, K]
        of_tree = ancestors.gather(2, index[:, None].expand(-1, count, -1))  # [B, M, S]
        visible = (node < 0)[:, None] | (of_tree & ((node >= 0) & (node < self.nodes.stop))[:, None])
        if window is not None:
            slot_position = self.lengths[:, None] + torch.where(node < 0, node, self.depths[index])  # [B, S]
            visible &= slot_position[:, None] > self.positions[:, :, None] - window
        return visible
