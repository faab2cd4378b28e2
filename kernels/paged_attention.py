"""Attention over the paged KV cache with an explicit mask, in plain PyTorch.

The operation of the reference backend, on any device: q [B, M, Hq, D] over the first S slots of each sequence. The mask
says which slots a query sees, so plain decoding, draft trees and prefill are the same operation. `tree_attention` is
the CUDA backend's kernel; it derives visibility from the tree instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def paged_attention(
    q: torch.Tensor,  # [B, M, Hq, D]
    keys: torch.Tensor,  # [pages, page size, Hkv, D], one layer of the cache
    values: torch.Tensor,  # [pages, page size, Hkv, D]
    page_table: torch.Tensor | slice,  # [B, P]: pages of each sequence in slot order; or a range of pages, for B = 1
    mask: torch.Tensor | None,  # [B, M, S] bool, true where query m sees slot s; None: every query sees all S slots
    slots: int,  # S
    scale: float,
) -> torch.Tensor:  # [B, M, Hq, D]
    """Softmax attention over the first `slots` slots of every sequence's pages."""
    batch, rows, query_heads, dim = q.shape
    kv_heads = keys.shape[2]
    group = query_heads // kv_heads
    k, v = (gather_slots(pages, page_table, slots).transpose(1, 2) for pages in (keys, values))  # [B, Hkv, S, D]
    # The query heads that share a key-value head become further rows of it, so that keys are not repeated.
    q = q.view(batch, rows, kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, rows * group, dim)
    if mask is not None:
        mask = mask.repeat_interleave(group, dim=1).unsqueeze(1)  # [B, 1, M * group, S]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    out = out.view(batch, kv_heads, rows, group, dim).permute(0, 2, 1, 3, 4)
    return out.reshape(batch, rows, query_heads, dim)


def gather_slots(pages: torch.Tensor, page_table: torch.Tensor | slice, slots: int) -> torch.Tensor:
    """The first `slots` slots of every sequence, in slot order: [B, S, Hkv, D]. A range of pages is not copied."""
    if isinstance(page_table, slice):
        return pages[page_table].flatten(0, 1)[None, :slots]
    batch = page_table.shape[0]
    page_size, heads, dim = pages.shape[1:]
    needed = page_table[:, : -(-slots // page_size)]
    gathered = pages.index_select(0, needed.reshape(-1))
    return gathered.view(batch, needed.shape[1] * page_size, heads, dim)[:, :slots]
