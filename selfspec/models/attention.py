"""Attention for the decoder: writes the rows' keys and values to the cache, then attends to the slots of each row.

One signature for prefill, plain decoding and trees; the decoder does not depend on the implementation. flash-attn,
where it is installed, computes causal attention without reading a mask, and skips the keys that no row sees. Whether it
is used follows from the installation, the device, the dtype and the head size alone, so every chunk of every prompt
takes the same path on one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.kernels.paged_attention import gather_slots, paged_attention

MAX_HEAD_DIM = 256  # elements: the limit of flash-attn's kernels


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


@cache
def installed() -> Callable[..., torch.Tensor] | None:
    """flash-attn's `flash_attn_varlen_func`; None without the package, or if it was built for another torch."""
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError):
        return None
    return flash_attn_varlen_func


def is_usable(q: torch.Tensor) -> bool:
    """Whether flash-attn can compute attention of these queries [B, M, Hq, D]: one sequence, 16 bits, on a
    GPU from sm_80 on."""
    is_16_bit = q.dtype in (torch.float16, torch.bfloat16)
    if not q.is_cuda or not is_16_bit or len(q) > 1 or q.shape[-1] > MAX_HEAD_DIM or installed() is None:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


def flash_attention(
    q: torch.Tensor,  # [1, M, Hq, D]
    keys: torch.Tensor,  # [pages, page size, Hkv, D], one layer of the cache
    values: torch.Tensor,  # [pages, page size, Hkv, D]
    page_table: torch.Tensor | slice,  # [1, P]: the sequence's pages, in slot order
    positions: torch.Tensor,  # [1, M]: consecutive; row m sees slots 0..positions[0, m]
    slots: int,  # S: at least the last position + 1
    window: int | None,  # newest slots that a row sees, its own included; None: all
    scale: float,
) -> torch.Tensor:  # [1, M, Hq, D]
    """Causal attention of a prompt's chunk. Gathers keys and values first: flash-attn reads a page table only for pages
    of 256 positions and more, and the copy is small beside the attention of a chunk."""
    flash = installed()
    assert flash is not None
    k, v = (gather_slots(pages, page_table, slots)[0] for pages in (keys, values))  # [S, Hkv, D]
    rows, ends = q.shape[1], torch.arange(2, dtype=torch.int32, device=q.device)
    out = flash(
        q[0],
        k,
        v,
        cu_seqlens_q=ends * rows,
        cu_seqlens_k=(ends * (positions[0, -1] + 1)).int(),  # on the device, so that a captured graph can read it
        max_seqlen_q=rows,
        max_seqlen_k=slots,
        softmax_scale=scale,
        causal=True,  # the last row is aligned with the last key
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return out[None]
