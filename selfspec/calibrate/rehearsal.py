"""Rehearses drafts over text that is known: what an exit's head reads at some place, and the ranks that gives the text.

No cache and no session: many drafts at once, each along the text itself, exactly as the runtime would draft it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from selfspec.calibrate.choice import MISSED
from selfspec.calibrate.corpus import Corpus, scaled_attention
from selfspec.speculation.exit import Exit

_ROWS_AT_ONCE = 256  # of logits that are ranked together


def drafted_reads(
    exit: Exit,
    hidden: torch.Tensor,  # [B, T, hidden] after layer N
    recalled: torch.Tensor,  # [B, T, 2 * hidden] what the model leaves to recall
    batch: Corpus,
    roots: torch.Tensor,  # [B, n] where drafts begin; the tokens after them are what is drafted
    depths: int,
) -> list[torch.Tensor]:
    """What the exit's head reads [B, n, hidden] at each root, at the token after it, and so on. The root recalls the
    model's own states, the others the exit's; all see the verified text up to the root, past it only their draft."""
    model, block = exit.model, exit.block
    assert block is not None and exit.norm is not None
    spec = model.config.layers[exit.layer]
    before = recalled.roll(1, dims=1).masked_fill((batch.positions == 0)[..., None], 0)
    verified = block.enter(hidden, before)
    _, keys, values = model.queries_keys_values(block.layer, verified, model.rotations(batch.positions)[spec.rope])
    seen = [(keys, values)]
    places = batch.positions.gather(1, roots)
    drafted: list[torch.Tensor] = []
    for depth in range(depths):
        mask = _visible(batch, roots, depth, spec.window)
        attend = partial(_attend, seen=seen, root=depth == 0, mask=mask, scale=model.config.attention_scale)
        at = (roots + depth).clamp(max=batch.length - 1)[..., None].expand(-1, -1, hidden.shape[-1])
        entered = block.enter(hidden.gather(1, at), drafted[-1]) if drafted else verified.gather(1, at)
        state = model.run_layer(block.layer, spec, entered, model.rotations(places + depth), attend)
        drafted.append(model.normalise(block.leave(state), exit.norm))
    return drafted


def _visible(batch: Corpus, roots: torch.Tensor, depth: int, window: int | None) -> torch.Tensor:
    """[B, n, T + depth * n] bool: of the text, what lies before the root in its document; of the draft, its own."""
    documents, places = batch.documents.gather(1, roots)[..., None], batch.positions.gather(1, roots)[..., None]
    slots = torch.arange(batch.length, device=roots.device)
    text = (documents == batch.documents[:, None]) & (slots <= roots[..., None])
    own = torch.eye(roots.shape[1], dtype=torch.bool, device=roots.device).expand(len(roots), -1, -1)
    drafts = [own] * depth
    if window is not None:
        text = text & (places + depth - batch.positions[:, None] < window)
        drafts = [own & (depth - step < window) for step in range(1, depth + 1)]
    return torch.cat([text, *drafts], dim=-1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seen: list[tuple[torch.Tensor, torch.Tensor]],
    root: bool,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention to the text and to the draft so far, which this depth joins; the root is in the text already.

    In float32, which cuDNN leaves to others: its 16-bit backward gives NaN for some numbers of keys where all logits of
    a row lie far below zero, as they do with the key biases of over a hundred that some families have."""
    if not root:
        seen.append((k, v))
    keys, values = (torch.cat(parts, dim=1) for parts in zip(*seen, strict=True))
    wide = torch.promote_types(q.dtype, torch.float32)
    return scaled_attention(q.to(wide), keys.to(wide), values.to(wide), mask, scale).to(q.dtype)


@torch.no_grad()
def text_ranks(
    exit: Exit,
    read: torch.Tensor,  # [P, hidden] what the exit's head reads at some places
    tokens: torch.Tensor,  # [P] the tokens that follow there
    noise: torch.Tensor | None = None,  # [P, V] that they were drawn with, if they were
    temperature: float = 1.0,
) -> np.ndarray:
    """The rank of each token among the exit's candidates; MISSED where it is not one of them."""
    ranks = []
    for start in range(0, len(read), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        values = exit.logits(read[part])
        if noise is not None:
            values = values / temperature + (noise[part] if exit.head_rows is None else noise[part][:, exit.head_rows])
        column = _column(exit, tokens[part])
        own = values.gather(1, column.clamp(min=0)[:, None])
        rank = (values > own).sum(-1)
        ranks.append(torch.where((column < 0) | own[:, 0].isnan(), MISSED, rank).cpu().numpy())
    return np.concatenate(ranks) if ranks else np.zeros(0, dtype=np.int64)


def _column(exit: Exit, tokens: torch.Tensor) -> torch.Tensor:
    """Where each token stands among the exit's head rows; -1 where it is not there."""
    if exit.head_rows is None:
        return tokens
    order = exit.head_rows.argsort()
    column = order[torch.searchsorted(exit.head_rows, tokens, sorter=order).clamp(max=len(order) - 1)]
    return torch.where(exit.head_rows[column] == tokens, column, -1)
