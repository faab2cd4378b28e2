"""Where the rows of one pass stand in the cache: their slots, positions, and what each of them may attend to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property

import torch

from selfspec.cache.kv_cache import PAGE_SIZE, KVPages, flat_slot


class Rows:
    """M rows for each of B sequences, at the same tree nodes in all of them.

    Row m of a sequence of length l is node `nodes[m]`: its slot is l + node, its position l + depth of the node. It
    sees every committed slot, and past them the slots of its ancestors and itself.
    """

    def __init__(
        self,
        sequences: Seq[KVPages],
        nodes: range,
        depths: torch.Tensor,  # [K] depth of every node up to the last row's, K = nodes.stop
        ancestors: torch.Tensor,  # [M, K] bool: which nodes each row sees
        device: torch.device,
        all_ancestors: bool | None = None,  # whether that is all of them, where it is known without a look
    ) -> None:
        self.sequences = sequences
        self.nodes = nodes
        self.device = device
        self.lengths = torch.tensor([sequence.length for sequence in sequences], device=device)  # [B]
        self.depths = depths.to(device)
        self.ancestors = ancestors.to(device)
        self.positions = self.lengths[:, None] + self.depths[nodes.start : nodes.stop]  # [B, M]
        self.slots = max(sequence.length for sequence in sequences) + nodes.stop  # S: slots that any row may see
        self._all_ancestors = bool(ancestors.all()) if all_ancestors is None else all_ancestors
        self._same_length = all(sequence.length == sequences[0].length for sequence in sequences)
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self.rotations: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # the model's, of the positions

    @classmethod
    def causal(cls, sequences: Seq[KVPages], count: int, device: torch.device) -> Rows:
        """`count` known tokens after every sequence: a chain, every row of which sees the ones before it."""
        return cls(sequences, range(count), torch.arange(count), torch.ones(count, count).tril().bool(), device)

    @cached_property
    def pages(self) -> torch.Tensor | slice:
        """The pages of each sequence [B, P]; for one whose pages lie one behind the other, simply their range."""
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
        """[B, M, S] bool, or None where every row sees every slot. Built once a pass, for all layers alike."""
        if window is not None and window >= self.slots:
            window = None
        if window not in self._masks:
            everything = window is None and self._same_length and self._all_ancestors
            self._masks[window] = None if everything else self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> torch.Tensor:
        node = torch.arange(self.slots, device=self.device) - self.lengths[:, None]  # [B, S]: below 0, committed
        known = node.clamp(0, self.nodes.stop - 1)
        of_tree = self.ancestors[:, known].transpose(0, 1)  # [B, M, S]
        visible = (node < 0)[:, None] | (of_tree & ((node >= 0) & (node < self.nodes.stop))[:, None])
        if window is not None:
            slot_position = self.lengths[:, None] + torch.where(node < 0, node, self.depths[known])  # [B, S]
            visible &= slot_position[:, None] > self.positions[:, :, None] - window
        return visible
