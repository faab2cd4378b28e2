"""Drafts along given text, for training and measuring: the states that an exit computes, and the ranks of the text's
tokens in its drafts.

Computes many drafts at once without a KV cache. Each follows the tokens of the text, with the arithmetic of the engine.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from selfspec.calibrate.choice import MISSED
from selfspec.calibrate.corpus import Corpus, scaled_attention
from selfspec.speculation.exit import Exit

_RANKED_TOGETHER = 256  # positions; bounds the memory of their logits


def draft_head_inputs(
    exit: Exit,
    hidden: torch.Tensor,  # [B, T, hidden] after N layers
    features: torch.Tensor,  # [B, T, 2 * hidden] the model's states that the exit reads one position later
    batch: Corpus,
    roots: torch.Tensor,  # [B, n] indices in the rows
    depths: int,
) -> list[torch.Tensor]:
    """The inputs of the exit's LM head, [B, n, hidden] for each depth: at the roots, at the tokens after them, and so
    on. A root reads the model's states of the position before it, deeper nodes the exit's own. All nodes attend to the
    text up to their root, and to their own draft after it."""
    model, block = exit.model, exit.block
    assert block is not None and exit.norm is not None
    spec = model.config.layers[exit.layer]
    before = features.roll(1, dims=1).masked_fill((batch.positions == 0)[..., None], 0)
    verified = block.add_feature(hidden, before)
    _, keys, values = model.queries_keys_values(block.layer, verified, model.rotations(batch.positions)[spec.rope])
    seen = [(keys, values)]
    places = batch.positions.gather(1, roots)
    drafted: list[torch.Tensor] = []
    for depth in range(depths):
        mask = _visible(batch, roots, depth, spec.window)
        attend = partial(_attend, seen=seen, root=depth == 0, mask=mask, scale=model.config.attention_scale)
        at = (roots + depth).clamp(max=batch.length - 1)[..., None].expand(-1, -1, hidden.shape[-1])
        inputs = block.add_feature(hidden.gather(1, at), drafted[-1]) if drafted else verified.gather(1, at)
        state = model.run_layer(block.layer, spec, inputs, model.rotations(places + depth), attend)
        drafted.append(model.normalise(block.add_affine(state), exit.norm))
    return drafted


def _visible(batch: Corpus, roots: torch.Tensor, depth: int, window: int | None) -> torch.Tensor:
    """Mask [B, n, T + depth * n]: the text up to the root, in the root's document; then each draft's own nodes."""
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
    """Attention to the text and to the nodes of the draft. Appends this depth's keys and values to `seen`; those of the
    root are in the text already.

    Computes in float32: cuDNN's 16-bit backward pass gives NaN for some numbers of keys where all logits of a row are
    far below zero, as with the key biases above 100 of some models."""
    if not root:
        seen.append((k, v))
    keys, values = (torch.cat(parts, dim=1) for parts in zip(*seen, strict=True))
    wide = torch.promote_types(q.dtype, torch.float32)
    return scaled_attention(q.to(wide), keys.to(wide), values.to(wide), mask, scale).to(q.dtype)


@torch.no_grad()
def text_ranks(
    exit: Exit,
    head_input: torch.Tensor,  # [P, hidden]: the exit's normed states at some positions
    tokens: torch.Tensor,  # [P] the tokens that follow
    noise: torch.Tensor | None = None,  # [P, V] with which they were drawn; None: greedy
    temperature: float = 1.0,
) -> np.ndarray:
    """The rank of each token in the exit's draft; MISSED where the exit's head has no row for it."""
    ranks = []
    for start in range(0, len(head_input), _RANKED_TOGETHER):
        part = slice(start, start + _RANKED_TOGETHER)
        values = exit.logits(head_input[part])
        if noise is not None:
            values = values / temperature + (noise[part] if exit.head_rows is None else noise[part][:, exit.head_rows])
        column = _column(exit, tokens[part])
        own = values.gather(1, column.clamp(min=0)[:, None])
        rank = (values > own).sum(-1)
        ranks.append(torch.where((column < 0) | own[:, 0].isnan(), MISSED, rank).cpu().numpy())
    return np.concatenate(ranks) if ranks else np.zeros(0, dtype=np.int64)


def _column(exit: Exit, tokens: torch.Tensor) -> torch.Tensor:
    """The index of each token in the exit's head rows; -1 where it has none."""
    if exit.head_rows is None:
        return tokens
    order = exit.head_rows.argsort()
    column = order[torch.searchsorted(exit.head_rows, tokens, sorter=order).clamp(max=len(order) - 1)]
    return torch.where(exit.head_rows[column] == tokens, column, -1)
