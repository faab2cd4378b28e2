"""Beams: chooses the nodes of one depth of every sequence's draft tree among all children of the depth above.

Not a kernel of its own: `choose_node` is inlined in `embed_rope`, whose program of the i-th node of a depth finds the
candidate with the i-th highest score and adds it to its sequence's tree. The score of a candidate is the sum of the log
probabilities along its path; ties go to the parent that comes first, then to the better rank. `topk_tokens` finds the
candidates. Trees are memory of a step, which later kernels read as they read those of plans without a beam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from selfspec.kernels.accept import TreeTensors
from selfspec.kernels.noise import pack_keys, to_int_scores, unpack_tokens
from selfspec.kernels.topk import next_best
from selfspec.kernels.triton_compat import jit, tl, triton


@dataclass(frozen=True)
class BeamTrees:
    """The trees of B sequences, n nodes and the root each, which grow depth by depth."""

    tree: TreeTensors  # in memory of each sequence's own
    scores: torch.Tensor  # [B, n + 1] float32: sums of log probabilities; the root's is 0
    parent_rows: torch.Tensor  # [(n + 1) * B] int64: row of each row's parent, node-major
    feature_rows: torch.Tensor  # the same in the buffer of features, in which rows begin at `first_feature_row`
    first_feature_row: int


@dataclass(frozen=True)
class BeamLevel:
    """The candidates for the nodes of one depth: the W best tokens after each of the P nodes of the depth above."""

    tokens: torch.Tensor  # [P * B, W] int32, node-major; -1: there is none
    log_probs: torch.Tensor  # [P * B, W] float32
    first_above: int  # the first of the P nodes
    trees: BeamTrees

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The kernel's argument `beam`."""
        trees, tree, (rows, width) = self.trees, self.trees.tree, self.tokens.shape
        return (
            self.tokens, self.log_probs, trees.scores, tree.parents, tree.ancestors, tree.paths, trees.parent_rows,
            trees.feature_rows, trees.first_feature_row, self.first_above, rows // len(trees.scores), width,
            trees.scores.shape[1], tree.paths.shape[2],
        )  # fmt: skip

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constexpr arguments: numbers of candidates and of nodes of a path, as powers of two."""
        candidates = self.tokens.numel() // len(self.trees.scores)
        sizes = {"CANDIDATES": candidates, "PATH": self.trees.tree.paths.shape[2]}
        return {name: triton.next_power_of_2(size) for name, size in sizes.items()}

    def check(self) -> None:
        trees = self.trees
        contiguous = (
            self.tokens, self.log_probs, trees.scores, trees.tree.parents, trees.tree.ancestors, trees.tree.paths,
        )  # fmt: skip
        if not all(tensor.is_contiguous() for tensor in contiguous) or self.tokens.shape != self.log_probs.shape:
            raise ValueError("candidates and trees of a beam must be contiguous, and each candidate have one score")


def beam_reference(
    log_probs: torch.Tensor,  # [P, W] of the candidates of one sequence
    scores: torch.Tensor,  # [P] of the nodes of the depth above
    width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices of parents and ranks of the `width` best candidates, and their scores, best first."""
    totals = (scores[:, None] + log_probs).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).flatten()
    best, index = totals.sort(descending=True, stable=True)
    return index[:width] // log_probs.shape[1], index[:width] % log_probs.shape[1], best[:width]


@jit
def choose_node(beam, sequence, sequences, place, node, CANDIDATES: tl.constexpr, PATH: tl.constexpr):
    """The token of one sequence's node, the `place`-th of its depth. Writes the node's parent, path, ancestors, score
    and rows of its parent to the trees."""
    (
        tokens, log_probs, scores, parents, ancestors, paths, parent_rows, feature_rows, first_feature_row, first_above,
        above, width, nodes, path_width,
    ) = beam  # fmt: skip
    candidate = tl.arange(0, CANDIDATES)
    exists = candidate < above * width
    of_sequence = sequence * nodes
    at = (candidate // width * sequences + sequence) * width + candidate % width
    score = tl.load(scores + of_sequence + first_above + candidate // width, mask=exists, other=0.0)
    score += tl.load(log_probs + at, mask=exists, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    keys = tl.where(exists, pack_keys(to_int_scores(score), candidate), -0x8000000000000000)
    key = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for _ in range(place + 1):
        key = next_best(keys, key)
    chosen = tl.maximum(unpack_tokens(key), 0)
    parent = first_above + chosen // width
    tl.store(scores + of_sequence + node, tl.sum(tl.where(candidate == chosen, score, 0.0), 0))
    tl.store(parents + of_sequence + node, parent)
    above_bits = tl.load(ancestors + of_sequence + parent)
    tl.store(ancestors + of_sequence + node, above_bits | (tl.full((), 1, tl.int64) << (node - 1).to(tl.int64)))
    step = tl.arange(0, PATH)
    inherited = tl.load(paths + (of_sequence + parent) * path_width + step, mask=step < path_width, other=0)
    depth = tl.sum((inherited > 0).to(tl.int32), 0) + 1  # past a node's depth its path is 0
    tl.store(
        paths + (of_sequence + node) * path_width + step, tl.where(step == depth, node, inherited),
        mask=step < path_width,
    )  # fmt: skip
    row = node * sequences + sequence
    tl.store(parent_rows + row, (parent * sequences + sequence).to(tl.int64))
    tl.store(feature_rows + row, (first_feature_row + parent * sequences + sequence).to(tl.int64))
    return tl.load(tokens + (chosen // width * sequences + sequence) * width + chosen % width)
