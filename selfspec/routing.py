"""Routing: which domain a prompt belongs to, told by its shallow hidden states.

A prompt's mark is the mean of its tokens' states after a few layers, each state normed. Calibration keeps each
domain's mean mark, and how much marks of one domain vary in each coordinate; a new prompt goes to the domain whose mean
lies most in its direction, seen from the middle of all domains, with coordinates that vary less counting more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from selfspec.cache import Cache, Rows
from selfspec.model import Decoder

_TOKENS = 256  # of a prompt's end that are looked at


@torch.inference_mode()
def mark(model: Decoder, cache: Cache, prompt: Sequence[int], layer: int) -> torch.Tensor:
    """The mean state [hidden] of a prompt after `layer` layers, float32 on the CPU; the cache is left as it was."""
    tokens = list(prompt[-_TOKENS:])
    sequence = cache.open()
    try:
        cache.reserve(sequence, len(tokens))
        rows = Rows.causal([sequence], len(tokens), model.device)
        hidden = model.run(model.embed(torch.tensor([tokens], device=model.device)), 0, layer, rows, cache)
        return F.rms_norm(hidden[0].float(), hidden.shape[-1:]).mean(0).cpu()
    finally:
        cache.close(sequence)


def likeness(
    marks: torch.Tensor,  # [P, hidden]
    centroids: torch.Tensor,  # [D, hidden]
    middle: torch.Tensor,  # [hidden]
    spread: torch.Tensor | None = None,  # [hidden] how much marks of one domain vary; None: alike
) -> torch.Tensor:  # [P, D] in -1..1
    """How much each mark lies in the direction of each domain's centroid."""
    unit = torch.ones_like(middle) if spread is None else spread
    return F.normalize((marks - middle) / unit, dim=-1) @ F.normalize((centroids - middle) / unit, dim=-1).T


def route(
    marks: torch.Tensor, centroids: dict[str, list[float]], middle: list[float], spread: list[float] | None = None
) -> str:
    """The domain of a batch of prompts: the one they are most like together."""
    names = list(centroids)
    towards = torch.tensor([centroids[name] for name in names])
    alike = likeness(marks, towards, torch.tensor(middle), torch.tensor(spread) if spread else None)
    return names[int(alike.sum(0).argmax())]
