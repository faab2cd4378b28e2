"""Routing: which domain a prompt belongs to, told by its shallow hidden states.

A prompt's mark is the mean of its tokens' states after a few layers. Calibration keeps each domain's mean mark; a new
prompt goes to the domain whose mean lies most in its direction, seen from the middle of all domains.
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
        return hidden[0].float().mean(0).cpu()
    finally:
        cache.close(sequence)


def likeness(marks: torch.Tensor, centroids: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    """How much each mark [P, hidden] lies in the direction of each domain's centroid [D, hidden]: [P, D] in -1..1."""
    return F.normalize(marks - middle, dim=-1) @ F.normalize(centroids - middle, dim=-1).T


def route(marks: torch.Tensor, centroids: dict[str, list[float]], middle: list[float]) -> str:
    """The domain of a batch of prompts: the one they are most like together."""
    names = list(centroids)
    alike = likeness(marks, torch.tensor([centroids[name] for name in names]), torch.tensor(middle))
    return names[int(alike.sum(0).argmax())]
