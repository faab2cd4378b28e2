"""The one key-value cache: pages of 64 positions, shared by draft and verify, rolled back by layer partition.

A sequence owns pages and a committed length. During a cycle the draft partition (layers below the exit, and the exit
block's own layer) writes ahead of the verify partition; commit makes the accepted path contiguous in all layers and
moves the length, abort leaves it. Whatever lies past the length is dead and overwritten in time: the rollback.
Knows slots and pages; what a token is, or which slots a row attends to, is other modules' business.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import torch

from selfspec.models.config import ModelConfig

PAGE_SIZE = 64


class CacheFull(RuntimeError):
    """No page is free and the cache may not or cannot grow."""


@dataclass(eq=False)
class Sequence:
    """One sequence's share of the cache."""

    pages: list[int] = field(default_factory=list)
    length: int = 0  # committed positions; slots below it hold their position's keys and values in every layer
    drafted: int = 0  # slots past the length that the draft partition has written in this cycle
    verified: int = 0  # slots past the length that the verify partition has written in this cycle
    closed: bool = False


class Cache:
    """Pages for all layers plus one: index `num_layers` holds the exit block's keys and values."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, max_pages: int | None = None
    ) -> None:
        self.exit_layer_index = config.num_layers
        self.max_pages = max_pages
        shape = (config.num_layers + 1, 0, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        # Zeros, not empty: masked slots are still multiplied by a zero weight, which NaN garbage would survive.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self._free: list[int] = []
        self._owners: list[int] = []  # how many sequences hold each page

    @property
    def num_pages(self) -> int:
        return self.keys.shape[1]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def page_nbytes(self) -> int:
        layers, _, size, heads, dim = self.keys.shape
        return 2 * layers * size * heads * dim * self.keys.element_size()

    def open(self) -> Sequence:
        return Sequence()

    def provide(self, pages: int) -> None:
        """Has at least so many pages from now on, within the limit: growing later moves the cache in memory."""
        wanted = pages if self.max_pages is None else min(pages, self.max_pages)
        if wanted > self.num_pages:
            self._grow(wanted - self.num_pages)

    def close(self, sequence: Sequence) -> None:
        """Returns the sequence's pages; closing twice is harmless."""
        self._release(sequence.pages)
        sequence.pages.clear()
        sequence.length = sequence.drafted = sequence.verified = 0
        sequence.closed = True

    def reserve(self, sequence: Sequence, slots: int) -> None:
        """Makes sure that the first `slots` slots have pages, and that those past the length are the sequence's own to
        write to; all or nothing."""
        if sequence.closed:
            raise ValueError("this sequence is closed; open a new one")
        missing = -(-slots // PAGE_SIZE) - len(sequence.pages)
        last = sequence.length // PAGE_SIZE
        shared = sequence.length % PAGE_SIZE != 0 and self._owners[sequence.pages[last]] > 1
        needed = max(missing, 0) + shared
        if needed > len(self._free):
            self._grow(needed - len(self._free))
        if shared:
            self._copy_page(sequence, last)
        sequence.pages += [self._take() for _ in range(missing)]

    def fork(self, parent: Sequence) -> Sequence:
        """A sequence with the same committed content. Pages are shared; whoever first writes to the partly filled last
        one gets a copy of it."""
        pages = parent.pages[: -(-parent.length // PAGE_SIZE)]
        for page in pages:
            self._owners[page] += 1
        return Sequence(pages, parent.length)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k and v [B, M, Hkv, D] of one layer at flat slots [B * M]."""
        for tensor, rows in ((self.keys, k), (self.values, v)):
            tensor[layer].flatten(0, 1).index_copy_(0, slots, rows.flatten(0, 1))

    def commit(self, sequences: Seq[Sequence], paths: Seq[Seq[int]]) -> None:
        """Accepts for each sequence the nodes of `paths` (slots past its length, ascending): they become its newest
        positions in every layer, and everything else past its length is forgotten."""
        source: list[int] = []
        target: list[int] = []
        for sequence, path in zip(sequences, paths, strict=True):
            written = min(sequence.drafted, sequence.verified)
            if any(not 0 <= node < written for node in path) or list(path) != sorted(set(path)):
                raise ValueError(f"path {list(path)} does not ascend through the {written} slots written this cycle")
            for offset, node in enumerate(path):
                if node != offset:
                    source.append(flat_slot(sequence, sequence.length + node))
                    target.append(flat_slot(sequence, sequence.length + offset))
        if source:
            moves = torch.tensor([source, target]).to(self.keys.device, non_blocking=True)
            compact(self.keys, moves[0], moves[1])
            compact(self.values, moves[0], moves[1])
        for sequence, path in zip(sequences, paths, strict=True):
            sequence.length += len(path)
            sequence.drafted = sequence.verified = 0

    def abort(self, sequences: Seq[Sequence]) -> None:
        """Forgets whatever this cycle has written past the committed lengths."""
        for sequence in sequences:
            sequence.drafted = sequence.verified = 0

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Cuts the committed length back; pages that are no longer needed are returned."""
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot cut a sequence of {sequence.length} positions to {length}")
        keep = -(-length // PAGE_SIZE)
        self._release(sequence.pages[keep:])
        del sequence.pages[keep:]
        sequence.length, sequence.drafted, sequence.verified = length, 0, 0

    def _copy_page(self, sequence: Sequence, index: int) -> None:
        shared, own = sequence.pages[index], self._take()
        for tensor in (self.keys, self.values):
            tensor[:, own] = tensor[:, shared]
        sequence.pages[index] = own
        self._release([shared])

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _release(self, pages: Seq[int]) -> None:
        """The last one first, so that whoever takes them next gets pages one behind the other again."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def _grow(self, missing: int) -> None:
        """Adds pages, at least doubling, within the limit; on failure nothing has changed."""
        limit = self.max_pages
        wanted = max(self.num_pages + missing, 2 * self.num_pages, 16)
        total = wanted if limit is None else min(wanted, limit)
        if total < self.num_pages + missing:
            raise CacheFull(
                f"the KV cache is full: {limit} pages of {PAGE_SIZE} positions, all in use. Close other streams, send "
                "a smaller batch, or build the engine with a larger max_length or max_batch."
            )
        grown = []
        for tensor in (self.keys, self.values):
            try:
                larger = tensor.new_zeros((tensor.shape[0], total, *tensor.shape[2:]))
            except RuntimeError as error:  # how torch says out of memory, on any device
                raise CacheFull(
                    f"no memory to grow the KV cache from {self.num_pages} to {total} pages of {PAGE_SIZE} positions "
                    f"({self.nbytes / 1e9:.1f} GB now): send fewer or shorter prompts, or ask for fewer new tokens"
                ) from error
            larger[:, : self.num_pages] = tensor
            grown.append(larger)
        self._free.extend(reversed(range(self.num_pages, total)))
        self._owners.extend([0] * (total - self.num_pages))
        self.keys, self.values = grown


def compact(pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies flat slots `source` [n] to `target` [n] in all layers of pages [layers, pages, page size, Hkv, D].

    Reads everything before it writes: a target may be another entry's source.
    """
    flat = pages.flatten(1, 2)  # [layers, slots, Hkv, D]
    flat[:, target] = flat[:, source]


def flat_slot(sequence: Sequence, slot: int) -> int:
    return sequence.pages[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE


class Rows:
    """Where the rows of one pass stand: M rows for each of B sequences, at the same tree nodes in all of them.

    Row m of a sequence of length l is node `nodes[m]`: its slot is l + node, its position l + depth of the node. It
    sees every committed slot, and past them the slots of its ancestors and itself.
    """

    def __init__(
        self,
        sequences: Seq[Sequence],
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
    def causal(cls, sequences: Seq[Sequence], count: int, device: torch.device) -> Rows:
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
