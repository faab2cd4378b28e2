"""Routing: finds the domain of a prompt from its hidden states after a few layers.

The *mark* of a prompt is the mean of its tokens' RMS-normed states after the router's layer. The router is a linear
discriminant analysis: a prompt gets the domain whose centroid, the mean of its prompts' marks, is nearest by the
Mahalanobis distance of the marks' covariance within domains.
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

MARKED = 256  # the last tokens of a prompt, of which the mark is made
_SHRINKAGE = 0.5  # weight of the covariance's diagonal: there are more coordinates than prompts
_TINY = 1e-12  # the least norm to divide by


@torch.inference_mode()
def mark(model: Decoder, cache: Cache, prompt: Sequence[int], layer: int) -> torch.Tensor:
    """The mark [hidden] of a prompt, from its states after `layer` layers: float32, on the CPU. Needs free pages of the
    cache for its tokens, and returns them."""
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
    """The marks [P, hidden] of prompts, one pass each."""
    return torch.stack([mark(model, cache, prompt, layer) for prompt in prompts])


# Small products for each request, in numpy: PyTorch would start its threads for them.


def distances(marks: torch.Tensor, centroids: torch.Tensor) -> np.ndarray:
    """Cosine distances [P, D] of marks [P, hidden] and centroids [D, hidden]: from 0, the same direction, to 2."""
    return 1 - _normalised(marks) @ _normalised(centroids).T


def _normalised(vectors: torch.Tensor) -> np.ndarray:
    found = vectors.numpy()
    return found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), _TINY)


class DomainDistances:
    """The distances of D domains' prompts to the domains' centroids."""

    def __init__(self, centroids: torch.Tensor, means: Sequence[float], deviations: Sequence[float]) -> None:
        self._centroids = _normalised(centroids)  # [D, hidden]
        self._means, self._deviations = np.array(means), np.array(deviations)  # [D] of the distances

    def exceeds(self, marks: torch.Tensor, deviations: float) -> list[bool]:
        """For each of the marks [P, hidden], whether its distance to every centroid exceeds the domain's mean by more
        than so many standard deviations."""
        off = 1 - _normalised(marks) @ self._centroids.T
        return (off > self._means + deviations * self._deviations).all(1).tolist()


@dataclass(frozen=True)
class Router:
    """Scores marks for each of D domains; the domain with the highest score is the nearest."""

    centroids: torch.Tensor  # [D, hidden]
    directions: torch.Tensor  # [D, hidden]
    offsets: torch.Tensor  # [D]

    @classmethod
    def fit(cls, marks: list[torch.Tensor]) -> Router:
        """Fits the router to the marks [P, hidden] of each domain's prompts."""
        centroids = torch.stack([of_domain.mean(0) for of_domain in marks]).double()
        off = torch.cat([of_domain - of_domain.mean(0) for of_domain in marks]).double()
        scatter = off.T @ off / len(off)
        scatter = torch.lerp(scatter, scatter.diag().diag(), _SHRINKAGE)
        scatter += 1e-6 * torch.eye(len(scatter), dtype=scatter.dtype)  # invertible where a coordinate is constant
        directions = torch.linalg.solve(scatter, centroids.T).T
        return cls(centroids.float(), directions.float(), -0.5 * (directions * centroids).sum(1).float())

    def scores(self, marks: torch.Tensor) -> np.ndarray:
        """[P, D] for marks [P, hidden]; differences between domains are log odds."""
        return marks.numpy() @ self.directions.numpy().T + self.offsets.numpy()

    def route(self, marks: torch.Tensor) -> int:
        """The most likely domain of several prompts together: the log odds of independent prompts add up."""
        return int(self.scores(marks).sum(0).argmax())
