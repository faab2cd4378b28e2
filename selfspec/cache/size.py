"""Computes the number of KV cache pages from the context, the batch limit and the free memory, when an engine is built.

Allocates nothing.
"""

from __future__ import annotations

from math import inf

import torch

from selfspec.cache.kv_cache import PAGE_SIZE, page_nbytes
from selfspec.models.config import ModelConfig
from selfspec.speculation.plan import SPARE_POSITIONS

USUAL_BATCH = 16  # sequences of the full context that fit unless max_batch is given: above 16 nothing is drafted
SHARE = 0.5  # of the memory left by the weights, at most: CUDA graphs and other programs need the rest


def cache_pages(
    config: ModelConfig,
    dtype: torch.dtype,
    context: int,  # most positions of one sequence
    max_batch: int | None,
    kv_cache_gb: float | None,
    most: float,  # bytes that the cache may take
) -> int:
    """Returns the pages for `max_batch` sequences of the full context (16 unless given), but at most `most` bytes of
    them; `kv_cache_gb` (10^9 bytes) overrides both. Never returns fewer than a sequence of 64 positions needs."""
    size, least = page_nbytes(config, dtype), pages_for(PAGE_SIZE + SPARE_POSITIONS) + 1
    if kv_cache_gb is not None:
        check_gigabytes("kv_cache_gb", kv_cache_gb)
        pages = int(kv_cache_gb * 1e9 / size + 1e-6)  # whole pages in gigabytes may be rounded down
        if pages < least:
            raise ValueError(
                f"kv_cache_gb={kv_cache_gb:g} holds {pages} pages of {PAGE_SIZE} positions, and at least {least} are "
                f"needed: pass {least * size / 1e9:.2g} or more"
            )
        return pages
    wanted = (max_batch or USUAL_BATCH) * pages_for(context + SPARE_POSITIONS) + 1
    return max(least, min(wanted, int(most / size)))


def check_limits(**limits: int | None) -> None:
    """Raises ValueError for a limit that is no integer of at least 1, or None."""
    for name, limit in limits.items():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ValueError(f"{name}={limit!r} is not possible: it must be an integer of at least 1")


def check_gigabytes(name: str, value: float) -> None:
    """Raises ValueError for anything but a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"{name}={value!r} is not possible: it must be a finite number above 0")


def longest_sequence(pages: int, sequences: int = 1) -> int:
    """Largest length at which `sequences` sequences fit a cache of this many pages; the CUDA backend keeps one page for
    itself."""
    return max(0, (pages - 1) // sequences * PAGE_SIZE - SPARE_POSITIONS)


def pages_for(positions: int) -> int:
    """Pages that hold this many positions of one sequence."""
    return -(-positions // PAGE_SIZE)
