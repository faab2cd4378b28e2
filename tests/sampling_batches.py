"""Batches of sequences with random sampling parameters, for tests of the kernels that sample."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from selfspec.kernels.lm_head_topk import lm_head_scores
from selfspec.kernels.logits_processing import Processing
from selfspec.kernels.noise import Noise, Truncation
from selfspec.kernels.sample import SampleWorkspace, sample_scored
from selfspec.kernels.topk import NO_SCORE, Scores, topk_tokens
from selfspec.speculation.plan import Plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STOPS = 3


@dataclass(frozen=True)
class Tree:
    paths: torch.Tensor  # [n + 1, depth + 1] int32
    depths: torch.Tensor  # [n + 1] int32


def tree_of(plan: Plan) -> Tree:
    paths = torch.full((len(plan) + 1, plan.depth + 1), 10**6, dtype=torch.int32)  # past a node's depth: out of range
    for node, depth in enumerate(plan.depths):
        above = node
        for at in range(depth, -1, -1):
            paths[node, at] = above
            above = plan.parents[above - 1] if above else 0
    return Tree(paths, torch.tensor(plan.depths, dtype=torch.int32))


def off(tree: Tree, sequences: int, vocabulary: int) -> Processing:
    """All parameters off; every node has token 0."""
    rows = len(tree.depths) * sequences
    return Processing(
        torch.ones(sequences), torch.zeros(sequences), torch.zeros(sequences),
        torch.zeros(sequences, vocabulary), torch.zeros(sequences, vocabulary, dtype=torch.int32),
        torch.zeros(sequences, dtype=torch.int32), torch.full((sequences, STOPS), -1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32), tree.paths.expand(sequences, -1, -1), tree.depths,
        torch.zeros(rows, dtype=torch.int32),
    )  # fmt: skip


def random_processing(plan: Plan, sequences: int, vocabulary: int) -> Processing:
    """Each parameter is on for about half of the sequences."""
    processing = off(tree_of(plan), sequences, vocabulary)

    def some(tensor: torch.Tensor, values: torch.Tensor) -> None:
        on = torch.rand(sequences) < 0.5
        tensor.copy_(torch.where(on.view(-1, *[1] * (tensor.dim() - 1)), values.to(tensor.dtype), tensor))

    some(processing.repetition, torch.rand(sequences) + 0.5)
    some(processing.presence, torch.randn(sequences))
    some(processing.frequency, torch.randn(sequences))
    some(processing.bias, torch.randn(sequences, vocabulary) * (torch.rand(sequences, vocabulary) < 0.3))
    some(processing.bias, processing.bias.masked_fill(torch.rand(sequences, vocabulary) < 0.2, -math.inf))
    processing.counts.copy_(torch.randint(0, 6, (sequences, vocabulary)) * (torch.rand(sequences, vocabulary) < 0.5))
    processing.stops.copy_(torch.randint(-1, vocabulary, processing.stops.shape))
    processing.positions.copy_(torch.randint(5, 15, processing.positions.shape))
    some(processing.min_length, torch.full((sequences,), 10))
    processing.tokens.copy_(torch.randint(0, min(vocabulary, 6), processing.tokens.shape))
    return processing


def int_scores_of(values: torch.Tensor) -> torch.Tensor:
    """The int scores of float32 values, as `kernels.noise.to_int_scores` defines them."""
    bits = (values + 0.0).view(torch.int32)
    scores = torch.where(values.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF)).int()
    assert (scores > NO_SCORE).all()
    return scores


@dataclass(frozen=True)
class Batch:
    """Rows of a tree for B sequences, and the sequences' parameters."""

    x: torch.Tensor
    noise: Noise
    truncation: Truncation
    processing: Processing

    @classmethod
    def random(cls, plan: Plan, sequences: int, vocabulary: int, hidden: int = 16) -> Batch:
        def any_of(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (sequences,))]

        processing = random_processing(plan, sequences, vocabulary)
        rows = len(processing.positions)
        seeds, indices = torch.randint(0, 2**40, (sequences,)), torch.randint(0, 3, (sequences,))
        noise = Noise(seeds, indices, processing.positions, any_of([0.0, 0.7, 1.4], torch.float32))
        truncation = Truncation(
            any_of([0, 0, 1, 7, 64, 65, 200, 257], torch.int32),
            any_of([1.0, 1.0, 0.6, 0.95], torch.float32),
            any_of([0.0, 0.0, 0.05], torch.float32),
        )
        return cls(torch.randint(-2, 3, (rows, hidden)).half(), noise, truncation, processing)

    def take(self, order: list[int]) -> Batch:
        """The batch of these sequences."""
        noise, processing, at = self.noise, self.processing, torch.tensor(order)
        rows = self.rows_of(order)
        positions = noise.positions[rows]
        tokens = processing.tokens.view(-1, len(noise.seeds))[:, at].flatten()
        named = ("repetition", "presence", "frequency", "bias", "counts", "min_length", "stops", "paths")
        return Batch(
            self.x[rows],
            Noise(noise.seeds[at], noise.sample_indices[at], positions, noise.temperature[at]),
            Truncation(self.truncation.top_k[at], self.truncation.top_p[at], self.truncation.min_p[at]),
            replace(
                processing,
                **{name: getattr(processing, name)[at] for name in named},
                positions=positions,
                tokens=tokens,
            ),
        )

    def rows_of(self, order: list[int]) -> torch.Tensor:
        rows = torch.arange(len(self.x)).view(-1, len(self.noise.seeds))
        return rows[:, torch.tensor(order)].flatten()

    @property
    def processes(self) -> bool:
        part = self.processing
        off = (part.repetition == 1).all() and (part.presence == 0).all() and (part.frequency == 0).all()
        early = (part.positions.view(-1, len(part.min_length)) < part.min_length).any()
        return not (off and not early and (part.bias == 0).all())

    @property
    def small_top_k(self) -> bool:
        truncated = self.truncation.on & (self.noise.temperature > 0)
        return bool((~truncated | ((self.truncation.top_k >= 1) & (self.truncation.top_k <= 64))).all())


def drawn(
    batch: Batch,
    weight: torch.Tensor,
    noise: Noise | None,
    truncation: Truncation | None,
    processing: Processing | None,
):
    """Choices [R] and the tiles' keys [R, tiles]."""
    rows, vocabulary = len(batch.x), len(weight)
    if noise is None or truncation is None:
        scores, out = Scores.empty(rows, vocabulary, 1, DEVICE), torch.full((rows, 1), -7)
        lm_head_scores(batch.x, weight, scores, softcap=4.0, noise=noise, processing=processing)
        topk_tokens(scores, out, finite=True)
        return out[:, 0], scores.tile_keys
    work, out = SampleWorkspace.empty(rows, vocabulary, DEVICE, truncation.small_top_k), torch.full((rows,), -7)
    work.masses.fill_(torch.nan)
    work.undecided.fill_(7)
    lm_head_scores(batch.x, weight, work.scores, softcap=4.0, noise=noise, truncation=truncation, processing=processing)
    sample_scored(vocabulary, out, work, noise=noise, truncation=truncation)
    return out, work.scores.tile_keys


def drawn_with_own_features(batch: Batch, weight: torch.Tensor):
    sampled = bool((batch.noise.temperature > 0).any())
    truncated = sampled and bool(batch.truncation.on.any())
    return drawn(
        batch,
        weight,
        batch.noise if sampled else None,
        replace(batch.truncation, small_top_k=batch.small_top_k) if truncated else None,
        batch.processing if batch.processes else None,
    )
