"""The choice of a beam's nodes in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.backends.cuda.decoder import Tree
from selfspec.kernels.beam import BeamLevel, beam_reference, choose_nodes
from selfspec.kernels.topk import MAX_SCAN_WIDTH, topk_tokens
from selfspec.speculation.plan import Plan
from tests.test_kernel_topk import scored


def grow(tree: Tree, level: range, candidates: BeamLevel) -> torch.Tensor:
    """Chooses the nodes of a level; returns their tokens [M, B]."""
    tokens = torch.full((len(level) * tree.sequences,), -7, dtype=torch.int32)
    choose_nodes(candidates, tokens, level.start)
    return tokens.view(len(level), tree.sequences)


@settings(max_examples=25)
@given(
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3), copied=st.integers(0, 2), sequences=st.integers(1, 2),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_trees_grow_by_the_best_candidates(widths: list[int], copied: int, sequences: int, seed: int) -> None:
    """Few different log probabilities, some of them NaN or -inf, so that many candidates have the same score."""
    generator = torch.Generator().manual_seed(seed)
    plan = Plan(beam=tuple(widths)).with_copy(copied)
    tree = Tree(plan, sequences, torch.device("cpu"), first_feature_row=100)
    assert tree.beam is not None
    parents = [list(range(copied)) for _ in range(sequences)]
    scores = torch.zeros(sequences, 1)
    above = range(1)
    for level in plan.levels[1:]:
        size = (len(above), sequences, len(level))
        values = torch.tensor([-1.0, -0.5, -2.0, -torch.inf, torch.nan])
        log_probs = values[torch.randint(0, 5, size, generator=generator)]
        tokens = torch.randint(0, 1000, size, generator=generator, dtype=torch.int32)
        found = grow(tree, level, BeamLevel(tokens.flatten(0, 1), log_probs.flatten(0, 1), above.start, tree.beam))
        chosen = [beam_reference(log_probs[:, index], scores[index], len(level)) for index in range(sequences)]
        for index, (parent, rank, _) in enumerate(chosen):
            parents[index] += (above.start + parent).tolist()
            assert found[:, index].tolist() == tokens[parent, index, rank].tolist()
        scores, above = torch.stack([best for _, _, best in chosen]), level
        assert torch.equal(tree.beam.log_prob_sums[:, level.start : level.stop], scores)
    for index in range(sequences):
        expected = Tree(plan.of_sequence(parents[index]), sequences, torch.device("cpu"), first_feature_row=100)
        for name in ("parents", "ancestors", "paths"):
            assert torch.equal(getattr(tree.tensors, name)[index], getattr(expected.tensors, name)[index]), name
        assert torch.equal(tree.previous_rows[index::sequences], expected.previous_rows[index::sequences])
        rows = expected.parent_rows(range(len(plan) + 1), 0)[index::sequences]
        assert torch.equal(tree.beam.parent_rows[index::sequences][copied + 1 :], rows[copied + 1 :])


@pytest.mark.parametrize("width", [1, 3, MAX_SCAN_WIDTH + 1])
def test_log_probabilities_are_normalised_by_the_best_column_of_each_tile(width: int) -> None:
    values = torch.randn(4, 150, generator=torch.Generator().manual_seed(width)) * 3
    values[1, 5:] = -torch.inf
    bits = (values + 0.0).view(torch.int32)
    scores = scored(bits ^ ((bits >> 31) & 0x7FFFFFFF), torch.arange(150), width)
    tokens, log_probs = torch.empty(4, width, dtype=torch.int32), torch.full((4, width), torch.nan)
    topk_tokens(scores, tokens, log_probs_out=log_probs)
    tiles = torch.nn.functional.pad(values, (0, 42), value=-torch.inf).view(4, 3, 64).amax(-1)
    expected = values.gather(1, tokens.long()) - tiles.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(log_probs, expected)
