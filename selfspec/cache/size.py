"""How many pages the KV cache gets: decided once, when an engine is built."""

from __future__ import annotations

import torch

from selfspec.cache.kv_cache import PAGE_SIZE, page_nbytes
from selfspec.memory import device_room
from selfspec.models.config import ModelConfig
from selfspec.speculation.plan import SPARE_POSITIONS

USUAL_BATCH = 16  # texts of the full context that the cache has room for, unless max_batch is given
SHARE = 0.5  # of the memory that is free once the weights are loaded: the rest is for graphs and other programs


def cache_pages(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    context: int,  # positions of a text, at most
    max_batch: int | None,
    kv_cache_gb: float | None,
) -> int:
    """Room for `max_batch` texts of the full context (16 unless given), but at most half of the memory that is free;
    `kv_cache_gb` (10^9 bytes) overrides both. Always enough for one short text."""
    size, least = page_nbytes(config, dtype), pages_for(PAGE_SIZE + SPARE_POSITIONS) + 1
    if kv_cache_gb is not None:
        if isinstance(kv_cache_gb, bool) or not isinstance(kv_cache_gb, int | float) or not kv_cache_gb > 0:
            raise ValueError(f"kv_cache_gb={kv_cache_gb!r} is not possible: it must be a number above 0")
        pages = int(kv_cache_gb * 1e9 / size)
        if pages < least:
            raise ValueError(
                f"kv_cache_gb={kv_cache_gb:g} holds {pages} pages of {PAGE_SIZE} positions, and {least} are needed at "
                f"least: pass {least * size / 1e9:.2g} or more"
            )
        return pages
    wanted = (max_batch or USUAL_BATCH) * pages_for(context + SPARE_POSITIONS) + 1
    return max(least, min(wanted, int(SHARE * device_room(device) / size)))


def pages_for(positions: int) -> int:
    return -(-positions // PAGE_SIZE)
