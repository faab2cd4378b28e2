"""Top-k tokens of scored rows, in Triton's interpreter against the reference."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

from selfspec.kernels.topk import (  # noqa: E402
    MAX_WIDTH,
    NO_SCORE,
    TILE,
    Scores,
    candidate_capacity,
    num_tiles,
    topk_tokens,
    topk_tokens_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device(DEVICE):
        yield


def scored(int_scores: torch.Tensor, tokens: torch.Tensor, width: int) -> Scores:
    """Scores as a kernel would leave them, in poisoned buffers."""
    rows, columns = int_scores.shape
    scores = Scores.empty(rows, columns, width, DEVICE)
    padded = torch.full((rows, num_tiles(columns) * TILE), NO_SCORE, dtype=torch.int32)
    padded[:, :columns] = int_scores
    ids = torch.zeros(padded.shape[1], dtype=torch.int64)
    ids[:columns] = tokens
    keys = (padded.long() << 32) | (0x7FFFFFFF - ids)
    keys[padded == NO_SCORE] = -(2**63)
    scores.tile_keys.copy_(keys.view(rows, -1, TILE).amax(-1))
    if scores.int_scores is not None and scores.candidates is not None and scores.tile_list is not None:
        scores.int_scores.copy_(padded)
        scores.candidates.fill_(2**62)
        scores.tile_list.fill_(10**8)
    return scores


KINDS = {
    "all_different": lambda rows, n: torch.randint(-(2**31) + 1, 2**31, (rows, n)),
    "many_equal": lambda rows, n: torch.randint(0, 3, (rows, n)),
    "all_equal": lambda rows, n: torch.full((rows, n), -5),
    "best_in_few_tiles": lambda rows, n: torch.arange(n).expand(rows, n) * 1000,
    "one_far_above": lambda rows, n: torch.randint(-9, 0, (rows, n)).index_fill(1, torch.tensor([n // 2]), 2**31 - 1),
    "some_missing": lambda rows, n: torch.where(torch.rand(rows, n) < 0.97, NO_SCORE, torch.randint(0, 50, (rows, n))),
}


@pytest.mark.parametrize(
    ("columns", "width", "kind"),
    [
        (1, 1, "all_different"),
        (1, 3, "all_different"),  # fewer columns than asked for
        (300, 1, "many_equal"),
        (300, 3, "best_in_few_tiles"),
        (130, 8, "many_equal"),
        (130, 5, "some_missing"),
        (64, 20, "some_missing"),  # from here on candidates are gathered and ranked
        (300, 20, "all_different"),
        (300, 20, "best_in_few_tiles"),
        (300, 20, "many_equal"),  # the threshold is raised
        (300, 20, "all_equal"),  # more equal columns than candidates
        (300, 20, "one_far_above"),
        (600, 256, "all_equal"),
    ],
)
def test_the_best_tokens_are_found_in_order(columns: int, width: int, kind: str) -> None:
    torch.manual_seed(columns + width)
    int_scores = KINDS[kind](2, columns).int()
    tokens = torch.randperm(10**6)[:columns].sort().values.int()
    out = torch.full((2, width), -7, dtype=torch.int64)
    topk_tokens(scored(int_scores, tokens, width), out, token_ids=tokens)
    assert torch.equal(out, topk_tokens_reference(int_scores, tokens, width).to(DEVICE))


@pytest.mark.parametrize(("width", "best"), [(4, [3, 5, 9, -1]), (9, [3, 5, 5, 9, *[-1] * 5])])
def test_a_token_given_twice_hides_no_other(width: int, best: list[int]) -> None:
    """Token ids should all be different; scanning finds columns by their tokens."""
    tokens = torch.tensor([5, 3, 5, 9]).int()
    out = torch.full((1, width), -7)
    topk_tokens(scored(torch.tensor([[8, 9, 8, 1]]).int(), tokens, width), out, token_ids=tokens)
    assert out.tolist() == [best]


@settings(max_examples=10)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 2**31), st.integers(0, 2**32))
def test_the_best_tokens_are_found_for_any_size(columns: int, width: int, spread: int, seed: int) -> None:
    with torch.device(DEVICE):
        torch.manual_seed(seed)
        int_scores = torch.randint(-spread + 1, spread, (1, columns)).int()
        tokens = torch.randperm(
            columns
        ).int()  # of equal scores too few to overflow the candidate_capacity, any order will do
        out = torch.empty(1, width, dtype=torch.int32)
        topk_tokens(scored(int_scores, tokens, width), out, token_ids=tokens)
        expected = topk_tokens_reference(int_scores, tokens, width).to(DEVICE)
        if columns <= candidate_capacity(width) or spread > 2**20:
            assert torch.equal(out, expected.int())
        else:
            place = torch.empty(columns, dtype=torch.int64).scatter_(0, tokens.long(), torch.arange(columns))
            assert torch.equal(int_scores[0][place[out[0].long()]], int_scores[0][place[expected[0]]])


def test_widths_and_rows_that_the_scores_were_not_made_for_are_refused() -> None:
    scores = Scores.empty(2, 100, 1, DEVICE)
    with pytest.raises(ValueError, match="not made for 5"):
        topk_tokens(scores, torch.zeros(2, 5).int())
    with pytest.raises(ValueError, match="up to 2 rows"):
        topk_tokens(scores, torch.zeros(3, 1).int())
    with pytest.raises(ValueError, match="int32"):
        topk_tokens(scores, torch.zeros(2, 1))
    with pytest.raises(ValueError, match="token_ids"):
        topk_tokens(Scores.empty(2, 100, 4, DEVICE), torch.zeros(2, 4).int(), token_ids=torch.arange(300))
    with pytest.raises(ValueError, match=str(MAX_WIDTH)):
        Scores.empty(2, 100, MAX_WIDTH + 1, DEVICE)
