"""Routing: finds the domain of a prompt from its hidden states after a few layers.

The *embedding* of a prompt is the mean of its tokens' RMS-normed states after `router_layer` layers. The router is a
linear discriminant analysis: a prompt gets the domain whose centroid, the mean of its prompts' embeddings, is nearest
by the Mahalanobis distance of the embeddings' covariance within domains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.models.decoder import Decoder

EMBEDDED_TOKENS = 256  # the last tokens of a prompt, of which its embedding is made
_SHRINKAGE = 0.5  # weight of the covariance's diagonal: there are more coordinates than prompts
_TINY = 1e-12  # the least norm to divide by


@torch.inference_mode()
def prompt_embedding(model: Decoder, cache: Cache, prompt: Sequence[int], layer: int) -> torch.Tensor:
    """The embedding [hidden] of a prompt, from its states after `layer` layers: float32, on the CPU. Needs free pages
    of the cache for its tokens, and returns them."""
    tokens, sequence = list(prompt[-EMBEDDED_TOKENS:]), cache.open()
    try:
        cache.reserve(sequence, len(tokens))
        rows = Rows.causal([sequence], len(tokens), model.device)
        hidden = model.run(model.embed(torch.tensor([tokens], device=model.device)), 0, layer, rows, cache)
        return F.rms_norm(hidden[0].float(), hidden.shape[-1:]).mean(0).cpu()
    finally:
        cache.close(sequence)


def prompt_embeddings(model: Decoder, cache: Cache, prompts: Sequence[Sequence[int]], layer: int) -> torch.Tensor:
    """The embeddings [P, hidden] of prompts, one pass each."""
    return torch.stack([prompt_embedding(model, cache, prompt, layer) for prompt in prompts])


@dataclass(frozen=True)
class Embedded:
    """Prompt embeddings that a pass on the device may still be computing."""

    read: Callable[[], torch.Tensor]  # waits for them: [P, hidden]
    is_done: Callable[[], bool] = lambda: True  # whether `read` does not wait


def embed_prompts(model: Decoder, cache: Cache, prompts: Sequence[Sequence[int]], layer: int) -> Embedded:
    """The embeddings [P, hidden] of prompts, computed when they are read."""
    return Embedded(partial(prompt_embeddings, model, cache, prompts, layer))


# Small products for each request, by einsum: a matrix product would wake the threads of PyTorch or of a BLAS, which
# takes milliseconds.


def _products(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[P, D] from [P, hidden] and [D, hidden]."""
    return np.einsum("ph,dh->pd", rows, others, optimize=False)


def distances(embeddings: torch.Tensor, centroids: np.ndarray) -> np.ndarray:
    """Cosine distances [P, D] of embeddings [P, hidden] and normalised centroids [D, hidden]: from 0, the same
    direction, to 2."""
    return 1 - _products(normalised(embeddings), centroids)


def normalised(vectors: torch.Tensor) -> np.ndarray:
    """The vectors scaled to length 1; vectors of zeros stay zero."""
    array = vectors.numpy()
    return array / np.maximum(np.linalg.norm(array, axis=-1, keepdims=True), _TINY)


@dataclass(frozen=True)
class Router:
    """Scores embeddings for each of D domains; the domain with the highest score is the nearest."""

    centroids: torch.Tensor  # [D, hidden]
    directions: torch.Tensor  # [D, hidden]
    offsets: torch.Tensor  # [D]

    @classmethod
    def fit(cls, embeddings: list[torch.Tensor]) -> Router:
        """Fits the router to the embeddings [P, hidden] of each domain's prompts."""
        centroids = torch.stack([rows.mean(0) for rows in embeddings]).double()
        off = torch.cat([rows - rows.mean(0) for rows in embeddings]).double()
        scatter = off.T @ off / len(off)
        scatter = torch.lerp(scatter, scatter.diag().diag(), _SHRINKAGE)
        scatter += 1e-6 * torch.eye(len(scatter), dtype=scatter.dtype)  # invertible where a coordinate is constant
        directions = torch.linalg.solve(scatter, centroids.T).T
        return cls(centroids.float(), directions.float(), -0.5 * (directions * centroids).sum(1).float())

    def scores(self, embeddings: torch.Tensor) -> np.ndarray:
        """[P, D] for embeddings [P, hidden]; differences between domains are log odds."""
        return _products(embeddings.numpy(), self.directions.numpy()) + self.offsets.numpy()

    def route(self, embeddings: torch.Tensor) -> int:
        """The most likely domain of several prompts together: the log odds of independent prompts add up."""
        return int(self.scores(embeddings).sum(0).argmax())
