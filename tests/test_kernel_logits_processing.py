"""Logits processing inside the kernels that score logits, against its reference."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

from selfspec.kernels.lm_head_topk import lm_head_reference, lm_head_scores  # noqa: E402
from selfspec.kernels.logits_processing import Processing, process_logits_reference  # noqa: E402
from selfspec.kernels.score_logits import score_logits  # noqa: E402
from selfspec.kernels.topk import Scores, topk_tokens  # noqa: E402
from selfspec.sampling import ranked  # noqa: E402
from selfspec.speculation.plan import Plan  # noqa: E402
from tests.sampling_batches import DEVICE, int_scores_of, off, random_processing, tree_of  # noqa: E402
from tests.strategies import plans  # noqa: E402


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device(DEVICE):
        yield


def scored(logits: torch.Tensor, processing: Processing | None) -> torch.Tensor:
    scores = Scores.empty(*logits.shape, 2, DEVICE)
    score_logits(logits, scores, processing=processing)
    assert scores.int_scores is not None
    return scores.int_scores[:, : logits.shape[1]]


@settings(max_examples=12)
@given(plans(), st.integers(1, 3), st.sampled_from([1, 5, 70]), st.integers(0, 2**32))
def test_processed_scores_have_the_bits_of_the_reference(
    plan: Plan, sequences: int, vocabulary: int, seed: int
) -> None:
    with torch.device(DEVICE):
        torch.manual_seed(seed)
        processing = random_processing(plan, sequences, vocabulary)
        logits = torch.randn((len(plan) + 1) * sequences, vocabulary) * 3
        assert torch.equal(scored(logits, processing), int_scores_of(process_logits_reference(logits, processing)))
        # Drafting scores one depth of the tree at a time.
        first = plan.levels[-1].start
        rows = slice(first * sequences, None)
        part = replace(processing, positions=processing.positions[rows], first_node=first)
        assert torch.equal(
            scored(logits[rows], part), int_scores_of(process_logits_reference(logits, processing)[rows])
        )


def one(vocabulary: int = 8, plan: str = "none") -> Processing:
    """Everything off, for one sequence: token 1 is in its prompt, 2 was generated once, 3 twice and is in it too."""
    processing = off(tree_of(Plan.parse(plan)), 1, vocabulary)
    processing.counts[0, 1:4] = torch.tensor([1, 2, 5], dtype=torch.int32)
    return processing


LOGITS = [2.0, 2.0, -2.0, 2.0, -2.0, 0.0, 1.0, 3.0]
CASES = {
    "off": ({}, LOGITS),
    "repetition": ({"repetition": 2.0}, [2.0, 1.0, -4.0, 1.0, -2.0, 0.0, 1.0, 3.0]),
    "presence": ({"presence": 0.5}, [2.0, 2.0, -2.5, 1.5, -2.0, 0.0, 1.0, 3.0]),
    "frequency": ({"frequency": 0.5}, [2.0, 2.0, -2.5, 1.0, -2.0, 0.0, 1.0, 3.0]),
    "all": ({"repetition": 2.0, "presence": 0.5, "frequency": 1.0}, [2.0, 1.0, -5.5, -1.5, -2.0, 0.0, 1.0, 3.0]),
    "min_length": ({"min_length": 10}, [2.0, 2.0, -2.0, 2.0, -2.0, 0.0, 1.0, -math.inf]),
    "min_length_reached": ({"min_length": 9}, LOGITS),
}


@pytest.mark.parametrize("name", CASES)
def test_each_parameter_has_its_defined_effect(name: str) -> None:
    parameters, expected = CASES[name]
    processing = one()
    for parameter, value in parameters.items():
        getattr(processing, parameter).fill_(value)
    processing.positions.fill_(9)
    processing.stops[0, 0] = 7
    got = process_logits_reference(torch.tensor([LOGITS]), processing)
    assert got.tolist() == [expected]
    assert torch.equal(scored(torch.tensor([LOGITS]), processing), int_scores_of(got))


def test_bias_comes_before_penalties_and_bans() -> None:
    processing = one()
    processing.repetition.fill_(2)
    processing.bias[0, :4] = torch.tensor([-math.inf, -3.0, 1.0, -math.inf])
    got = process_logits_reference(torch.tensor([LOGITS]), processing)
    assert got.tolist() == [[-math.inf, -2.0, -2.0, -math.inf, *LOGITS[4:]]]
    assert torch.equal(scored(torch.tensor([LOGITS]), processing), int_scores_of(got))


def test_tokens_on_the_path_count_as_generated_and_siblings_do_not() -> None:
    processing = one(plan="tree:2,1")  # nodes 1 and 2 are siblings, 3 and 4 their children
    processing.frequency.fill_(1)
    processing.tokens.copy_(torch.tensor([2, 4, 5, 4, 6]))  # the root's own is in the counts
    logits = torch.zeros(5, 8)
    counted = -process_logits_reference(logits, processing)
    assert counted[:, 4:7].tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [2, 0, 0], [0, 1, 1]]
    assert (counted[:, 2] == 1).all()
    assert torch.equal(scored(logits, processing), int_scores_of(-counted))


@pytest.mark.parametrize("gather", [False, True], ids=["copy", "gather"])
def test_a_trimmed_head_processes_by_token(gather: bool) -> None:
    torch.manual_seed(0)
    plan = Plan.parse("tree:2,2")
    processing = random_processing(plan, 2, 300)
    rows, count = torch.randperm(300)[:101], torch.tensor([90], dtype=torch.int32)
    rows[90:] = 10**9  # not to be followed
    x, weight = torch.randint(-2, 3, (14, 48)).half(), torch.randint(-2, 3, (300, 48)).half()
    own = torch.zeros(101, 48).half()
    own[:90] = weight[rows[:90]]
    scores, out = Scores.empty(14, 101, 7, DEVICE), torch.full((14, 7), -7)
    lm_head_scores(
        x, weight if gather else own, scores, token_ids=rows, gather=gather, count=count, processing=processing
    )
    topk_tokens(scores, out, token_ids=rows)
    offered = rows[:90].sort().values
    values = process_logits_reference(lm_head_reference(x, weight)[:, offered], processing, offered)
    assert torch.equal(out, offered[ranked(values, 7)])


def test_wrong_arguments_are_named() -> None:
    logits, right = torch.zeros(1, 8), one()
    wrong = {
        "bias": torch.zeros(1, 7),
        "counts": torch.zeros(1, 8),
        "presence": torch.zeros(2),
        "stops": torch.zeros(2, 1).int(),
        "positions": torch.zeros(2).int(),
        "tokens": torch.zeros(2).int(),
        "first_node": 1,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            scored(logits, replace(right, **{name: value}))
