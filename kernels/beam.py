"""Beams: chooses the nodes of one depth of every sequence's draft tree among all children of the depth above.

One program for the i-th node of the depth of one sequence finds the candidate with the i-th highest score and adds it
to the sequence's tree. The score of a candidate is the sum of the log probabilities along its path; ties go to the
parent that comes first, then to the better rank. `topk_tokens` finds the candidates. Other kernels read these trees
like fixed ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.accept import TreeTensors
from selfspec.kernels.noise import pack_keys, to_int_scores, unpack_tokens
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.topk import next_best
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton


@dataclass(frozen=True)
class BeamTrees:
    """The trees of B sequences, n nodes and the root each, which grow depth by depth."""

    tree: TreeTensors  # not shared by sequences
    log_prob_sums: torch.Tensor  # [B, n + 1] float32: sums along the nodes' paths; the root's is 0
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


def beam_reference(
    log_probs: torch.Tensor,  # [P, W] of the candidates of one sequence
    scores: torch.Tensor,  # [P] of the nodes of the depth above
    width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices of parents and ranks of the `width` best candidates, and their scores, best first."""
    totals = (scores[:, None] + log_probs).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).flatten()
    best, index = totals.sort(descending=True, stable=True)
    return index[:width] // log_probs.shape[1], index[:width] % log_probs.shape[1], best[:width]


@jit(do_not_specialize=["first_feature_row", "first_above", "above", "first_node"])
def _choose_nodes_kernel(
    tokens, log_probs, tokens_out, scores, parents, ancestors, paths, parent_rows, feature_rows,
    first_feature_row, first_above, above, first_node, sequences, width, nodes, path_width,
    CANDIDATES: tl.constexpr, PATH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row, node-major. Past a node's depth its path is 0."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0)
    sequence = row % sequences
    place = row // sequences
    node = first_node + place
    trees = sequence * nodes
    candidate = tl.arange(0, CANDIDATES)
    exists = candidate < above * width
    at = (candidate // width * sequences + sequence) * width + candidate % width
    score = tl.load(scores + trees + first_above + candidate // width, mask=exists, other=0.0)
    score += tl.load(log_probs + at, mask=exists, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    keys = tl.where(exists, pack_keys(to_int_scores(score), candidate), -0x8000000000000000)
    key = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for _ in range(place + 1):
        key = next_best(keys, key)
    chosen = unpack_tokens(key)
    parent = first_above + chosen // width
    token = tl.load(tokens + (chosen // width * sequences + sequence) * width + chosen % width)
    tl.store(tokens_out + row, token)
    tl.store(scores + trees + node, tl.sum(tl.where(candidate == chosen, score, 0.0), 0))
    tl.store(parents + trees + node, parent)
    own_bit = tl.full((), 1, tl.int64) << (node - 1).to(tl.int64)
    tl.store(ancestors + trees + node, tl.load(ancestors + trees + parent) | own_bit)
    step = tl.arange(0, PATH)
    path = tl.load(paths + (trees + parent) * path_width + step, mask=step < path_width, other=0)
    depth = tl.sum((path > 0).to(tl.int32), 0) + 1
    path = tl.where(step == depth, node, path)
    tl.store(paths + (trees + node) * path_width + step, path, mask=step < path_width)
    own_row, parent_row = node * sequences + sequence, parent * sequences + sequence
    tl.store(parent_rows + own_row, parent_row.to(tl.int64))
    tl.store(feature_rows + own_row, (first_feature_row + parent_row).to(tl.int64))


def choose_nodes(
    level: BeamLevel,
    tokens_out: torch.Tensor,  # [M * B] int32, to fill: the tokens of the M nodes of this depth, node-major
    first_node: int,  # the first of these nodes
) -> None:
    """Chooses the nodes of a depth and adds them to the trees."""
    trees, tree, (rows, width) = level.trees, level.trees.tree, level.tokens.shape
    sequences, nodes = trees.log_prob_sums.shape
    count, above = len(tokens_out) // sequences, rows // sequences
    if not 0 < count <= above * width or len(tokens_out) % sequences or first_node + count > nodes:
        raise ValueError(
            f"{len(tokens_out)} rows are not nodes of {sequences} sequences with {above * width} candidates"
        )
    sums = trees.log_prob_sums
    contiguous = (level.tokens, level.log_probs, tokens_out, sums, tree.parents, tree.ancestors, tree.paths)
    if not all(tensor.is_contiguous() for tensor in contiguous) or level.log_probs.shape != level.tokens.shape:
        raise ValueError("candidates and trees of a beam must be contiguous, and each candidate have one score")
    _choose_nodes_kernel[(len(tokens_out),)](
        level.tokens, level.log_probs, tokens_out, sums, tree.parents, tree.ancestors, tree.paths,
        trees.parent_rows, trees.feature_rows,
        trees.first_feature_row, level.first_above, above, first_node, sequences, width, nodes, tree.paths.shape[2],
        CANDIDATES=triton.next_power_of_2(above * width), PATH=triton.next_power_of_2(tree.paths.shape[2]),
        num_warps=1 if above * width <= 128 else 4, **pdl_options(tokens_out),
    )  # fmt: skip
