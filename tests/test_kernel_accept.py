"""Acceptance in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.backends.cuda.decoder import Tree
from selfspec.kernels.accept import COUNT, EXIT_LAST, LAST, TOKENS, TreeTensors, accept, accept_reference
from selfspec.speculation.plan import MAX_NODES, Plan
from tests.strategies import plans


def tree_of(plan: Plan) -> TreeTensors:
    return Tree(plan, 4, torch.device("cpu")).tensors


@settings(max_examples=40)
@given(
    plan=plans(max_copied=4), sequences=st.integers(1, 4), seed=st.integers(0, 2**20),
    vocabulary=st.sampled_from([1, 2, 3, 9]), least=st.sampled_from([0, -1]), counted=st.booleans(),
    stop_count=st.sampled_from([0, 1, 3]),
)  # fmt: skip
def test_every_sequence_walks_as_the_reference_does(
    plan: Plan, sequences: int, seed: int, vocabulary: int, least: int, counted: bool, stop_count: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes, depths = len(plan) + 1, plan.depth + 1
    size = (nodes * sequences,)
    tokens = torch.randint(0, vocabulary, size, generator=generator, dtype=torch.int32)
    chosen = torch.randint(least, vocabulary, size, generator=generator, dtype=torch.int32)
    stops = torch.randint(-1, 4, (sequences, stop_count), generator=generator, dtype=torch.int32)
    stops = stops if stop_count else None
    counts = torch.randint(0, 9, (sequences, vocabulary), generator=generator, dtype=torch.int32)
    expected_counts = counts.clone()
    active = torch.randint(0, 3, (sequences,), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, 200, (sequences,), generator=generator, dtype=torch.int32)
    before, newest_tokens = lengths.clone(), torch.full((sequences,), 77, dtype=torch.int32)
    lengths_before, paths = (
        torch.full((sequences,), -1, dtype=torch.int32),
        torch.full((sequences, depths), -1, dtype=torch.int32),
    )
    report = torch.full((sequences, TOKENS + depths), -1, dtype=torch.int32)
    texts = torch.full((sequences, 200 + depths + 1), -9, dtype=torch.int32)
    expected_texts = texts.clone()
    accept(
        chosen, tokens, tree_of(plan), active, lengths, lengths_before, newest_tokens, paths, report, texts,
        counts=counts if counted else None, stops=stops,
    )  # fmt: skip
    assert torch.equal(lengths_before, before)
    walks = accept_reference(chosen, tokens, list(plan.parents), sequences, stops)
    for sequence, walk in enumerate(walks):
        if not active[sequence]:
            assert report[sequence, COUNT] == 0
            assert (lengths[sequence], newest_tokens[sequence]) == (before[sequence], 77)
            continue
        walk = walk[:1] if active[sequence] == 1 else walk  # 1: accepts no draft, only the root's choice
        path = max(walk, key=lambda path: (len(path), path[-1]))
        emitted, count = [int(chosen[node * sequences + sequence]) for node in path], len(path)
        assert report[sequence, COUNT] == count
        assert report[sequence, LAST] == path[-1]
        exits = [path for path in walk if path[-1] > plan.copied or path == [0]]
        assert report[sequence, EXIT_LAST] == max(exits, key=lambda path: (len(path), path[-1]))[-1]
        assert report[sequence, TOKENS : TOKENS + count].tolist() == emitted
        assert paths[sequence, :count].tolist() == path
        assert lengths[sequence] == before[sequence] + count
        assert newest_tokens[sequence] == emitted[-1]
        start = before[sequence] + 1
        expected_texts[sequence, start : start + count] = torch.tensor(emitted)
        for token in emitted if counted else []:
            expected_counts[sequence, token] += 2 * (token >= 0)
    assert torch.equal(counts, expected_counts) and torch.equal(texts, expected_texts)


@pytest.mark.parametrize("copied", [0, 40])
def test_63_nodes_are_walked(copied: int) -> None:
    """With the root one bit each of 64."""
    plan = Plan.tree((1,) * (MAX_NODES - copied)).with_copy(copied)
    chosen = torch.arange(1, MAX_NODES + 2, dtype=torch.int32)
    tokens = torch.tensor([0, *(int(chosen[parent]) for parent in plan.parents)], dtype=torch.int32)
    ints = [torch.full((1,), 2, dtype=torch.int32) for _ in range(4)]
    paths, report = (torch.zeros(1, width + plan.depth + 1, dtype=torch.int32) for width in (0, TOKENS))
    accept(chosen, tokens, tree_of(plan), *ints, paths, report)
    assert report[0, :TOKENS].tolist() == [plan.depth + 1, max(copied, MAX_NODES * (copied < 32)), MAX_NODES]


def test_the_walk_ends_after_a_stop_token_and_after_a_missing_choice() -> None:
    tokens = torch.tensor([5, 7, 7], dtype=torch.int32)
    for choices, stop, emitted in (
        ([7, 7, 7], -1, [7, 7, 7]),
        ([7, 7, 7], 7, [7]),
        ([7, -1, 7], 7, [7]),
        ([7, -1, 7], 3, [7, -1]),
    ):
        stops = torch.tensor([[3, stop]], dtype=torch.int32) if stop >= 0 else None
        chosen = torch.tensor(choices, dtype=torch.int32)
        ints = [torch.full((1,), 2, dtype=torch.int32) for _ in range(4)]
        paths, report = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, TOKENS + 3, dtype=torch.int32)
        counts = torch.zeros(1, 9, dtype=torch.int32)
        accept(chosen, tokens, tree_of(Plan.tree((1, 1))), *ints, paths, report, counts=counts, stops=stops)
        assert len(accept_reference(chosen, tokens, [0, 1], 1, stops)[0]) == len(emitted)
        assert report[0, COUNT] == len(emitted)
        assert report[0, TOKENS : TOKENS + len(emitted)].tolist() == emitted
        assert counts[0].tolist() == [0] * 7 + [2 * emitted.count(7), 0]


def test_a_report_that_is_too_narrow_is_refused() -> None:
    ints = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="too narrow"):
        accept(ints, ints, tree_of(Plan()), *[ints] * 4, torch.zeros(1, 2).int(), torch.zeros(1, TOKENS + 1).int())
