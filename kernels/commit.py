"""Commit: the accepted path's keys and values move to consecutive slots, in every layer at once (PyTorch reference)."""

from __future__ import annotations

import torch


def compact(pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies flat slots `source` to flat slots `target` in all layers, in place.

    pages [layers, pages, page size, Hkv, D]; source and target [n], flat slot = page * page size + offset. Everything
    is read before anything is written: a target may be another entry's source.
    """
    flat = pages.flatten(1, 2)  # [layers, slots, Hkv, D]
    flat[:, target] = flat[:, source]
