"""Routing: which domain a prompt belongs to, told by its shallow hidden states.

A prompt's mark is the mean of its tokens' states after a few layers, each state normed. Calibration finds, from the
marks of each domain's prompts, the directions that tell the domains apart; a prompt goes to the domain whose centroid
it lies nearest to, in the measure that the marks' own scatter gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.models.decoder import Decoder

MARKED = 256  # tokens of a prompt's end that are looked at
_SHRINKAGE = 0.5
_TINY = 1e-12  # a vector of no length is left as it is


@torch.inference_mode()
def mark(model: Decoder, cache: Cache, prompt: Sequence[int], layer: int) -> torch.Tensor:
    """The mean state [hidden] of a prompt after `layer` layers, float32 on the CPU; the cache is left as it was."""
    tokens = list(prompt[-MARKED:])
    sequence = cache.open()
    try:
        cache.reserve(sequence, len(tokens))
        rows = Rows.causal([sequence], len(tokens), model.device)
        hidden = model.run(model.embed(torch.tensor([tokens], device=model.device)), 0, layer, rows, cache)
        return F.rms_norm(hidden[0].float(), hidden.shape[-1:]).mean(0).cpu()
    finally:
        cache.close(sequence)


def marks_of(model: Decoder, cache: Cache, prompts: Sequence[Sequence[int]], layer: int) -> torch.Tensor:
    """[P, hidden], one after the other."""
    return torch.stack([mark(model, cache, prompt, layer) for prompt in prompts])


# What follows is done for every request with a few small matrices, by numpy: PyTorch would wake all its threads.


def distances(marks: torch.Tensor, centroids: torch.Tensor) -> np.ndarray:
    """How far each of the marks [P, hidden] lies from each of the centroids [D, hidden], [P, D]: from 0, the same
    direction, to 2, the opposite one."""
    return 1 - _normalised(marks) @ _normalised(centroids).T


def _normalised(vectors: torch.Tensor) -> np.ndarray:
    found = vectors.numpy()
    return found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), _TINY)


class Outskirts:
    """How far from each of D domains' centroids the domain's own prompts lie."""

    def __init__(self, centroids: torch.Tensor, means: Sequence[float], deviations: Sequence[float]) -> None:
        self._centroids = _normalised(centroids)  # [D, hidden]
        self._means, self._deviations = np.array(means), np.array(deviations)  # [D] of the distances

    def beyond(self, marks: torch.Tensor, deviations: float) -> list[bool]:
        """For each of the marks [P, hidden], whether it lies farther from every centroid than so many deviations."""
        off = 1 - _normalised(marks) @ self._centroids.T
        return (off > self._means + deviations * self._deviations).all(1).tolist()


@dataclass(frozen=True)
class Router:
    """Scores marks for each of D domains: higher is nearer to the domain's centroid."""

    centroids: torch.Tensor  # [D, hidden]
    directions: torch.Tensor  # [D, hidden]
    offsets: torch.Tensor  # [D]

    @classmethod
    def fit(cls, marks: list[torch.Tensor]) -> Router:
        """From the marks [P, hidden] of some prompts of each domain."""
        centroids = torch.stack([of_domain.mean(0) for of_domain in marks]).double()
        off = torch.cat([of_domain - of_domain.mean(0) for of_domain in marks]).double()
        scatter = off.T @ off / len(off)
        own = scatter.diag().diag()  # there are more coordinates than prompts: half of the way to none but these
        scatter = torch.lerp(scatter, own, _SHRINKAGE) + 1e-6 * torch.eye(len(scatter), dtype=scatter.dtype)
        directions = torch.linalg.solve(scatter, centroids.T).T
        return cls(centroids.float(), directions.float(), -0.5 * (directions * centroids).sum(1).float())

    def scores(self, marks: torch.Tensor) -> np.ndarray:
        """[P, D] for marks [P, hidden]; differences between domains are log odds."""
        return marks.numpy() @ self.directions.numpy().T + self.offsets.numpy()

    def route(self, marks: torch.Tensor) -> int:
        """The domain that a batch of prompts most likely shares: log odds of independent prompts add up."""
        return int(self.scores(marks).sum(0).argmax())
