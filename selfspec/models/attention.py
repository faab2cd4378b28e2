"""Attention for the decoder: writes the rows' keys and values to the cache, then attends to the slots of each row.

One signature for prefill, plain decoding and trees. This module chooses the implementation; the decoder does not
depend on it.
"""

from __future__ import annotations

import torch

from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.kernels.paged_attention import paged_attention
from selfspec.models.flash_attention import flash_attention, is_usable


def attend(
    q: torch.Tensor,  # [B, M, Hq, D]
    k: torch.Tensor,  # [B, M, Hkv, D]
    v: torch.Tensor,  # [B, M, Hkv, D]
    cache: Cache,
    layer: int,
    rows: Rows,
    window: int | None,
    scale: float,
) -> torch.Tensor:  # [B, M, Hq, D]
    """Writes k and v at the rows' slots of `layer` and returns the rows' attention output."""
    cache.write(layer, rows.flat_slots, k, v)
    keys, values = cache.keys[layer], cache.values[layer]
    if rows.is_causal and is_usable(q):
        return flash_attention(q, keys, values, rows.pages, rows.positions, rows.slots, window, scale)
    return paged_attention(q, keys, values, rows.pages, rows.mask(window), rows.slots, scale)
