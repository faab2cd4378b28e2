"""Attention for the decoder: store the rows' keys and values, then attend to what each row may see.

One signature for prefill, plain decoding and trees; which implementation runs behind it is decided here, never in the
model.
"""

from __future__ import annotations

import torch

from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.kernels.tree_attention_reference import tree_attention


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
    return tree_attention(q, keys, values, rows.pages, rows.mask(window), rows.slots, scale)
