"""The paged KV cache: pages of 64 slots, allocated once for all layers, with reference counts and copy on write.

A sequence holds a list of pages and a committed length; slot i of a sequence is slot i % 64 of its page i // 64. During
a step the draft pass (layers below the exit, and the exit block's layer) writes slots past the length, then the verify
pass (the remaining layers) writes the same slots. Commit moves the accepted path's slots so that they follow the length
in every layer, and advances the length. Slots past the length are never read again and are overwritten by the next
step: that is the rollback. This module handles slots and pages; tokens, positions and attention masks are its callers'.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from selfspec.cache.prefixes import Prefixes
from selfspec.kernels.constants import PAGE_SIZE
from selfspec.models.config import ModelConfig


class CacheFull(RuntimeError):
    """The request needs more pages than are free."""


@dataclass(eq=False)
class KVPages:
    """One sequence's pages, in the order of its slots, and its committed length."""

    pages: list[int] = field(default_factory=list)
    length: int = 0  # committed slots: slot i < length holds the keys and values of position i in every layer
    closed: bool = False


@dataclass(frozen=True)
class SwappedPages:
    """Copies of a preempted sequence's pages in host memory."""

    keys: torch.Tensor  # [layers + 1, pages, 64, Hkv, D]
    values: torch.Tensor  # as keys
    length: int


class Cache:
    """Keys and values [layers + 1, pages, 64, Hkv, D]; layer index `num_layers` is the exit block's."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, num_pages: int) -> None:
        self.exit_layer_index = config.num_layers
        shape = (config.num_layers + 1, num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        # Zeros, not empty: attention multiplies masked slots by a zero weight, and 0 * NaN is NaN.
        try:
            self.keys, self.values = (_zeros(shape, device, dtype) for _ in range(2))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CacheFull(
                f"not enough memory for a KV cache of {num_pages} pages of {PAGE_SIZE} positions "
                f"({num_pages * page_nbytes(config, dtype) / 1e9:.1f} GB): pass a smaller kv_cache_gb, max_length or "
                "max_batch when building the engine"
            ) from error
        self._free = list(reversed(range(num_pages)))
        self._owners = [0] * num_pages  # number of sequences that hold each page
        self._prefixes = Prefixes()

    @property
    def num_pages(self) -> int:
        return self.keys.shape[1]

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds; `reusable_pages` of them are registered for reuse until they are taken."""
        return len(self._free) + self._prefixes.reusable

    @property
    def reusable_pages(self) -> int:
        return self._prefixes.reusable

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def open(self) -> KVPages:
        return KVPages()

    def close(self, sequence: KVPages) -> None:
        """Releases the sequence's pages; a second call does nothing."""
        self._release(sequence.pages)
        sequence.pages.clear()
        sequence.length, sequence.closed = 0, True

    def reserve(self, sequence: KVPages, slots: int) -> None:
        """Gives the sequence pages for its first `slots` slots, and makes every slot past the length writable: copies
        the last page if another sequence holds it too. Raises CacheFull, and changes nothing, if too few are free."""
        if sequence.closed:
            raise ValueError("this sequence is closed; open a new one")
        missing, copies = max(-(-slots // PAGE_SIZE) - len(sequence.pages), 0), self._shares_last_page(sequence)
        needed = missing + copies
        if needed > self.free_pages:
            raise CacheFull(
                f"the KV cache is full: it has {self.num_pages} pages of {PAGE_SIZE} positions, {self.free_pages} of "
                f"them free, and {needed} more are needed. Close other streams, send fewer or shorter prompts, or "
                "build the engine with a larger kv_cache_gb."
            )
        if copies:
            self._copy_page(sequence, sequence.length // PAGE_SIZE)
        sequence.pages += [self._take() for _ in range(missing)]

    def _shares_last_page(self, sequence: KVPages) -> bool:
        """True if the next slot lies in a partly filled page that another sequence holds too."""
        last, offset = divmod(sequence.length, PAGE_SIZE)
        return offset != 0 and self._owners[sequence.pages[last]] > 1

    def fork(self, parent: KVPages) -> KVPages:
        """Returns a sequence with the same committed slots. All pages are shared; `reserve` copies a partly filled last
        page before one of the sequences writes to it."""
        pages = parent.pages[: -(-parent.length // PAGE_SIZE)]
        for page in pages:
            self._owners[page] += 1
        return KVPages(pages, parent.length)

    def open_with(self, keys: Seq[bytes], unit: int) -> KVPages:
        """Returns a sequence that shares the registered pages of the first of these keys: as many as are registered,
        in multiples of `unit` pages."""
        pages = self._prefixes.find(keys)
        del pages[len(pages) // unit * unit :]
        for page in pages:
            self._owners[page] += 1
            self._prefixes.hold(page)
        return KVPages(pages, len(pages) * PAGE_SIZE)

    def register(self, sequence: KVPages, keys: Seq[bytes]) -> None:
        """Registers the sequence's first pages, which must be filled in every layer, under these keys."""
        for key, page in zip(keys, sequence.pages, strict=False):
            self._prefixes.register(key, page)

    def forget(self, sequence: KVPages) -> None:
        """Unregisters the sequence's pages, so that no other sequence reuses them."""
        for page in sequence.pages:
            self._prefixes.forget(page)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k and v [B, M, Hkv, D] of one layer at flat slots [B * M]. Stores 0 for values that are not finite:
        the zero attention weight of a masked slot would not cancel them."""
        for stored, given in ((self.keys, k), (self.values, v)):
            finite = torch.nan_to_num(given.flatten(0, 1), nan=0.0, posinf=0.0, neginf=0.0)
            stored[layer].flatten(0, 1).index_copy_(0, slots, finite)

    def commit(self, sequences: Seq[KVPages], paths: Seq[Seq[int]]) -> None:
        """Moves the slots of each sequence's accepted path (nodes in ascending order, the root first) to the slots that
        follow its length, in every layer, and advances the length. Drops all other slots past it."""
        source: list[int] = []
        target: list[int] = []
        for sequence, path in zip(sequences, paths, strict=True):
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

    def swap_out(self, sequence: KVPages) -> SwappedPages:
        """Copies the committed pages to host memory and releases all of the sequence's pages."""
        pages = self._indices(sequence.pages[: -(-sequence.length // PAGE_SIZE)])
        swapped = SwappedPages(self.keys[:, pages].cpu(), self.values[:, pages].cpu(), sequence.length)
        self._release(sequence.pages)
        sequence.pages.clear()
        sequence.length = 0
        return swapped

    def swap_in(self, sequence: KVPages, swapped: SwappedPages) -> None:
        """Takes free pages for a swapped-out sequence and copies its pages back, bit for bit. Skips the whole pages
        that it shares already."""
        first = sequence.length // PAGE_SIZE
        self.reserve(sequence, swapped.length)
        pages = self._indices(sequence.pages[first : swapped.keys.shape[1]])
        self.keys[:, pages] = swapped.keys[:, first:].to(self.keys.device)
        self.values[:, pages] = swapped.values[:, first:].to(self.values.device)
        sequence.length = swapped.length

    def _indices(self, pages: Seq[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.keys.device)

    def _copy_page(self, sequence: KVPages, index: int) -> None:
        """Replaces a shared page of the sequence by a copy."""
        shared, own = sequence.pages[index], self._take()
        for tensor in (self.keys, self.values):
            tensor[:, own] = tensor[:, shared]
        sequence.pages[index] = own
        self._release([shared])

    def _take(self) -> int:
        if not self._free:
            self._free = self._prefixes.take_back()
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _release(self, pages: Seq[int]) -> None:
        """Drops one reference to each page. Frees the last page first: pages are taken from the end of the free list,
        so the next sequence gets them in ascending order, and attention reads a contiguous range without a gather. A
        reusable page is taken back before the pages of earlier positions, without which it cannot be reused."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0 and not self._prefixes.keep(page):
                self._free.append(page)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros. In host memory by numpy (calloc): the operating system commits memory on the first write."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def page_nbytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one page: keys and values of all layers and of the exit block."""
    return 2 * (config.num_layers + 1) * PAGE_SIZE * config.num_kv_heads * config.head_dim * dtype.itemsize


def is_out_of_memory(error: Exception) -> bool:
    """True for an allocation that failed; on the CPU torch raises a plain RuntimeError, as for other faults."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def compact(pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies flat slots `source` [n] to `target` [n] in all layers of pages [layers, pages, page size, Hkv, D].

    Reads all sources before it writes: a target may be the source of another entry.
    """
    flat = pages.flatten(1, 2)  # [layers, slots, Hkv, D]
    flat[:, target] = flat[:, source]


def flat_slot(sequence: KVPages, slot: int) -> int:
    """Index of a sequence's slot among all slots of a layer, pages flattened."""
    return sequence.pages[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE
