"""The one KV cache: pages of 64 positions, allocated once, shared by draft and verify, rolled back by length.

A sequence holds pages and a committed length. During a step the draft partition (layers below the exit, and the exit
block's own layer) writes ahead of the verify partition; commit makes the accepted path contiguous in all layers and
advances the length. Slots past the length are dead and overwritten later: that is the rollback. Knows slots and pages,
not tokens or attention.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from selfspec.kernels.constants import PAGE_SIZE
from selfspec.models.config import ModelConfig


class CacheFull(RuntimeError):
    """Too few pages are free."""


@dataclass(eq=False)
class KVPages:
    """One sequence's share of the cache."""

    pages: list[int] = field(default_factory=list)
    length: int = 0  # committed positions; slots below it hold their position's keys and values in every layer
    drafted: int = 0  # slots past the length that the draft partition has written in this step
    verified: int = 0  # slots past the length that the verify partition has written in this step
    closed: bool = False


@dataclass(frozen=True)
class SwappedPages:
    """A sequence's pages in host memory: [layers, pages, page size, Hkv, D]."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int


class Cache:
    """A fixed number of pages for all layers plus one: index `num_layers` holds the exit block's keys and values."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, num_pages: int) -> None:
        self.exit_layer_index = config.num_layers
        shape = (config.num_layers + 1, num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        # Zeros, not empty: masked slots are still multiplied by a zero weight, which NaN garbage would survive.
        try:
            self.keys, self.values = (_zeros(shape, device, dtype) for _ in range(2))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CacheFull(
                f"no memory for a KV cache of {num_pages} pages of {PAGE_SIZE} positions "
                f"({num_pages * page_nbytes(config, dtype) / 1e9:.1f} GB): pass a smaller kv_cache_gb, max_length or "
                "max_batch when building the engine"
            ) from error
        self._free = list(reversed(range(num_pages)))
        self._owners = [0] * num_pages  # how many sequences hold each page

    @property
    def num_pages(self) -> int:
        return self.keys.shape[1]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def open(self) -> KVPages:
        return KVPages()

    def close(self, sequence: KVPages) -> None:
        """Returns the sequence's pages; closing twice is harmless."""
        self._release(sequence.pages)
        sequence.pages.clear()
        sequence.length = sequence.drafted = sequence.verified = 0
        sequence.closed = True

    def missing_pages(self, sequence: KVPages, slots: int) -> int:
        """Pages that `reserve` would take for this many slots."""
        return max(-(-slots // PAGE_SIZE) - len(sequence.pages), 0) + self._shares_last_page(sequence)

    def reserve(self, sequence: KVPages, slots: int) -> None:
        """Makes sure that the first `slots` slots have pages, and that no other sequence holds the pages past the
        length; all or nothing."""
        if sequence.closed:
            raise ValueError("this sequence is closed; open a new one")
        needed = self.missing_pages(sequence, slots)
        if needed > len(self._free):
            raise CacheFull(
                f"the KV cache is full: {self.num_pages} pages of {PAGE_SIZE} positions, {len(self._free)} of them "
                f"free and {needed} needed. Close other streams, send fewer or shorter prompts, or build the engine "
                "with a larger kv_cache_gb."
            )
        if self._shares_last_page(sequence):
            self._copy_page(sequence, sequence.length // PAGE_SIZE)
        sequence.pages += [self._take() for _ in range(-(-slots // PAGE_SIZE) - len(sequence.pages))]

    def _shares_last_page(self, sequence: KVPages) -> bool:
        last, offset = divmod(sequence.length, PAGE_SIZE)
        return offset != 0 and self._owners[sequence.pages[last]] > 1

    def fork(self, parent: KVPages) -> KVPages:
        """A sequence with the same committed content. Full pages stay shared; the partly filled last one is copied by
        the first sequence that writes to it."""
        pages = parent.pages[: -(-parent.length // PAGE_SIZE)]
        for page in pages:
            self._owners[page] += 1
        return KVPages(pages, parent.length)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k and v [B, M, Hkv, D] of one layer at flat slots [B * M]. Values that are not finite are stored as
        0: a zero attention weight on a masked slot would not cancel them. Their rows' own states stay as they are."""
        for tensor, rows in ((self.keys, k), (self.values, v)):
            finite = torch.nan_to_num(rows.flatten(0, 1), nan=0.0, posinf=0.0, neginf=0.0)
            tensor[layer].flatten(0, 1).index_copy_(0, slots, finite)

    def commit(self, sequences: Seq[KVPages], paths: Seq[Seq[int]]) -> None:
        """Accepts for each sequence the nodes of `paths` (slots past its length, ascending): they become its newest
        positions in every layer, and everything else past its length is dropped."""
        source: list[int] = []
        target: list[int] = []
        for sequence, path in zip(sequences, paths, strict=True):
            written = min(sequence.drafted, sequence.verified)
            if any(not 0 <= node < written for node in path) or list(path) != sorted(set(path)):
                raise ValueError(f"path {list(path)} does not ascend through the {written} slots written this step")
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

    def extend(self, sequence: KVPages, count: int) -> None:
        """Makes the next `count` slots, which a prefill pass has written in every layer, the newest positions."""
        sequence.length += count
        sequence.drafted = sequence.verified = 0

    def abort(self, sequences: Seq[KVPages]) -> None:
        """Drops what this step has written past the committed lengths."""
        for sequence in sequences:
            sequence.drafted = sequence.verified = 0

    def truncate(self, sequence: KVPages, length: int) -> None:
        """Cuts the committed length back; pages that are no longer needed are returned."""
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot cut a sequence of {sequence.length} positions to {length}")
        keep = -(-length // PAGE_SIZE)
        self._release(sequence.pages[keep:])
        del sequence.pages[keep:]
        sequence.length, sequence.drafted, sequence.verified = length, 0, 0

    def swap_out(self, sequence: KVPages) -> SwappedPages:
        """Copies the committed pages to host memory and returns them to the pool. The sequence keeps nothing."""
        pages = self._indices(sequence.pages[: -(-sequence.length // PAGE_SIZE)])
        swapped = SwappedPages(self.keys[:, pages].cpu(), self.values[:, pages].cpu(), sequence.length)
        self._release(sequence.pages)
        sequence.pages.clear()
        sequence.length = sequence.drafted = sequence.verified = 0
        return swapped

    def swap_in(self, sequence: KVPages, swapped: SwappedPages) -> None:
        """Takes pages for what was swapped out and copies it back, bit for bit."""
        self.reserve(sequence, swapped.length)
        pages = self._indices(sequence.pages[: swapped.keys.shape[1]])
        self.keys[:, pages] = swapped.keys.to(self.keys.device)
        self.values[:, pages] = swapped.values.to(self.values.device)
        sequence.length = swapped.length

    def _indices(self, pages: Seq[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.keys.device)

    def _copy_page(self, sequence: KVPages, index: int) -> None:
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
        """The last one first, so that the next sequence gets neighbouring pages again."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; in host memory the system commits a page only when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def page_nbytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one page: keys and values of all layers and of the exit block."""
    return 2 * (config.num_layers + 1) * PAGE_SIZE * config.num_kv_heads * config.head_dim * dtype.itemsize


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch failed for want of memory; CUDA faults and other errors are RuntimeErrors too."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def compact(pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies flat slots `source` [n] to `target` [n] in all layers of pages [layers, pages, page size, Hkv, D].

    Reads everything before it writes: a target may be another entry's source.
    """
    flat = pages.flatten(1, 2)  # [layers, slots, Hkv, D]
    flat[:, target] = flat[:, source]


def flat_slot(sequence: KVPages, slot: int) -> int:
    return sequence.pages[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE
