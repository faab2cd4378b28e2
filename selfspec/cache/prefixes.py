"""Finds KV pages by their tokens, so that prompts which begin with the same tokens reuse them.

The key of a page is a hash of all tokens up to its end, the kind of prefill and the exit: pages with equal keys hold
equal KV, bit for bit. Registered pages that no sequence holds stay reusable until the cache needs them for other
tokens; the least recently used ones go first. This module holds no tensors.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b

from selfspec.kernels.constants import PAGE_SIZE

_KEY_BYTES = 16  # of a hash: two of 2^40 pages have the same key with a probability below 2^-48
_TAKEN_BACK = 16  # pages at a time, so that a sequence gets ascending ones, which attention reads without a gather


@dataclass(frozen=True)
class PrefillKind:
    """How a prompt is prefilled. Among prompts of one kind, the KV of each whole unit of positions depends only on the
    tokens up to its end."""

    name: str
    unit: int  # positions: whole pages; a prompt reuses a multiple of it
    decode_writes_same_bits: bool  # as prefill, so that pages with generated tokens are reusable too


@dataclass(eq=False)
class PageKeys:
    """The keys of one sequence's pages, each hashed once."""

    kind: PrefillKind
    exit: object  # identifies the exit whose KV the pages hold too; None: they hold no exit's
    _keys: list[bytes] = field(default_factory=list)

    def first(self, count: int, tokens: Seq[int]) -> list[bytes]:
        """The keys of the first `count` pages of these tokens, which must begin with the tokens of earlier calls."""
        for index in range(len(self._keys), count):
            before = self._keys[-1] if index else repr((self.kind.name, self.exit)).encode()
            page = array("q", tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            self._keys.append(blake2b(before + page.tobytes(), digest_size=_KEY_BYTES).digest())
        return self._keys[:count]

    def units(self, positions: int) -> int:
        """Number of pages in the whole units of the first `positions` positions."""
        return max(0, positions) // self.kind.unit * self.kind.unit // PAGE_SIZE


class Prefixes:
    """Registered pages by key, and those that no sequence holds in the order of their last use."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._reusable: OrderedDict[int, None] = OrderedDict()

    @property
    def reusable(self) -> int:
        """Number of registered pages that no sequence holds."""
        return len(self._reusable)

    def find(self, keys: Seq[bytes]) -> list[int]:
        """The pages of the first keys, up to the first key that is not registered."""
        pages: list[int] = []
        for key in keys:
            if (page := self._pages.get(key)) is None:
                break
            pages.append(page)
        return pages

    def register(self, key: bytes, page: int) -> None:
        """Registers a page that a sequence holds, unless its key or the page is registered already."""
        if key not in self._pages and page not in self._keys:
            self._pages[key], self._keys[page] = page, key

    def forget(self, page: int) -> None:
        """Unregisters a page that a sequence holds, so that it is not reused."""
        if (key := self._keys.pop(page, None)) is not None:
            del self._pages[key]

    def hold(self, page: int) -> None:
        """Marks a page as held by a sequence."""
        self._reusable.pop(page, None)

    def keep(self, page: int) -> bool:
        """Makes a page that no sequence holds any more reusable if it is registered; returns whether it is."""
        if page not in self._keys:
            return False
        self._reusable[page] = None
        return True

    def take_back(self) -> list[int]:
        """Unregisters the least recently used reusable pages and returns them, the lowest number last."""
        pages = [self._reusable.popitem(last=False)[0] for _ in range(min(_TAKEN_BACK, len(self._reusable)))]
        for page in pages:
            self.forget(page)
        return sorted(pages, reverse=True)
