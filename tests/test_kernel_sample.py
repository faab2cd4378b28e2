"""The model's choice with top-k, top-p and min-p, in Triton's interpreter against `selfspec.sampling`."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

from selfspec import sampling  # noqa: E402
from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_scores  # noqa: E402
from selfspec.kernels.noise import Noise  # noqa: E402
from selfspec.kernels.sample import SampleWorkspace, Truncation, sample, sample_reference, sample_scored, score_logits  # noqa: E402
from selfspec.kernels.topk import Scores, topk_tokens  # noqa: E402
from selfspec.sampling import NoiseKey, SamplingParams, ranked, warp_logits  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURE = 0.8


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device(DEVICE):
        yield


def noise_for(rows: int, seed: int = 1) -> Noise:
    g = torch.Generator(DEVICE).manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 5000, (rows,), generator=g, dtype=torch.int32)
    return Noise(seeds, torch.arange(rows) % 3, positions, torch.full((rows,), TEMPERATURE))


def truncation_for(
    sequences: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, small_top_k: bool | None = None
) -> Truncation:
    return Truncation(
        torch.full((sequences,), top_k, dtype=torch.int32),
        torch.full((sequences,), top_p),
        torch.full((sequences,), min_p),
        1 <= top_k <= 64 if small_top_k is None else small_top_k,
    )


def workspace(rows: int, vocabulary: int, small_top_k: bool = False) -> SampleWorkspace:
    work = SampleWorkspace.empty(rows, vocabulary, DEVICE, small_top_k)
    work.masses.fill_(math.nan)
    work.undecided.fill_(7)
    for buffer in (work.scores.tile_keys, work.scores.int_scores, work.scores.candidates):
        assert buffer is not None
        buffer.fill_(torch.iinfo(buffer.dtype).max)
    return work


def chosen(logits: torch.Tensor, noise: Noise | None, truncation: Truncation | None) -> torch.Tensor:
    out = torch.full((logits.shape[0],), -7)
    sample(
        logits,
        out,
        workspace(*logits.shape, small_top_k=truncation is not None and truncation.small_top_k),
        noise=noise,
        truncation=truncation,
    )
    return out


def expected(logits: torch.Tensor, noise: Noise, **parameters: Any) -> torch.Tensor:
    wanted = [SamplingParams(do_sample=True, temperature=TEMPERATURE, **parameters)] * len(logits)
    key = NoiseKey(noise.seeds, noise.sample_indices, noise.positions.long())
    return sampling.choose(warp_logits(logits, wanted), wanted, key)


def is_clear(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether rounding cannot change which tokens are kept: no mass above a token, and no value, is at the limit."""
    values = (logits.double() / TEMPERATURE).sort(-1, descending=True).values
    if top_k:
        values = values[:, :top_k]
    shares = values.softmax(-1)
    near_p = ((shares.cumsum(-1) - shares)[:, 1:] - top_p).abs().lt(1e-5).any() if top_p < 1 else False
    near_min = (values - values[:, :1] - math.log(min_p)).abs().lt(1e-5).any() if min_p else False
    return not (near_p or near_min)


KINDS = {
    "many_equal": lambda rows, n: torch.randint(0, 4, (rows, n)).float(),
    "peaked": lambda rows, n: torch.randn(rows, n) * 40,
    "flat": lambda rows, n: torch.randn(rows, n) * 0.01,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [0, 50, 65, 290], ids=["no_top_k", "first_sort", "second_sort", "search"])
def test_the_choice_is_that_of_sampling(kind: str, top_k: int) -> None:
    torch.manual_seed(3)
    logits = KINDS[kind](1, 300)
    for number, (top_p, min_p) in enumerate([(1.0, 0.0), (0.31, 0.0), (0.951, 0.103), (1.0, 0.103)]):
        if (top_k or top_p < 1 or min_p) and is_clear(logits, top_k, top_p, min_p):
            noise, truncation = noise_for(1, number), truncation_for(1, top_k, top_p, min_p)
            got = chosen(logits, noise, truncation)
            assert torch.equal(got, expected(logits, noise, top_k=top_k, top_p=top_p, min_p=min_p))
            assert torch.equal(got, sample_reference(logits.double(), noise, truncation))


@settings(max_examples=10)
@given(
    st.integers(1, 300),
    st.sampled_from([0, 1, 2, 20, 64, 257]),
    st.sampled_from([1.0, 0.0001, 0.5, 0.9, 0.99999]),
    st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    st.sampled_from([0.0, 0.3, 3.0, 50.0]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_choice_is_that_of_sampling_for_any_parameters(
    columns: int, top_k: int, top_p: float, min_p: float, spread: float, ties: bool, seed: int
) -> None:
    assume(top_k or top_p < 1 or min_p)
    with torch.device(DEVICE):
        torch.manual_seed(seed)
        logits = torch.randn(2, columns) * spread
        logits = logits.round() if ties else logits
        # Where all are equal at the limit of min-p, both sides have the same number.
        assume(is_clear(logits, top_k, top_p, 0.0 if min_p == 1 else min_p))
        noise = noise_for(2, seed)
        got = chosen(logits, noise, truncation_for(2, top_k, top_p, min_p))
        assert torch.equal(got, expected(logits, noise, top_k=top_k, top_p=top_p, min_p=min_p))


def test_a_nucleus_larger_than_the_sorted_tokens_is_searched_for() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 500) * 0.5
    logits[1] *= 20
    work, out, noise = workspace(3, 500), torch.full((3,), -7), noise_for(3)
    sample(logits, out, work, noise=noise, truncation=truncation_for(3, top_p=0.9))
    assert (work.undecided != 0).tolist() == [True, False, True]
    assert torch.equal(out, expected(logits, noise, top_p=0.9))


@pytest.mark.parametrize("top_k", [4, 68, 260], ids=["first_sort", "second_sort", "search"])
def test_of_equal_tokens_the_lower_ids_are_kept_and_each_of_them_can_be_drawn(top_k: int) -> None:
    logits = torch.zeros(16, 400)
    logits[:, 100:390] = 1.0
    noise = Noise(torch.arange(16) + 3, torch.zeros(16).long(), torch.zeros(16).int(), torch.ones(16))
    drawn = set(chosen(logits, noise, truncation_for(16, top_k)).tolist())
    assert drawn <= set(range(100, 100 + top_k))
    # With these seeds each of four is drawn.
    assert max(drawn) > 100 + top_k // 2 and (top_k > 4 or len(drawn) == 4)


@pytest.mark.parametrize("parameters", [{"top_k": 3}, {"top_k": 65}, {"top_k": 300}, {}], ids=str)
@pytest.mark.parametrize(("top_p", "kept"), [(0.4975, {1}), (0.5025, {1, 0})])
def test_top_p_keeps_tokens_until_their_mass_reaches_it(
    parameters: dict[str, Any], top_p: float, kept: set[int]
) -> None:
    shares = torch.tensor([0.3, 0.5, 0.0, 0.2])
    logits = (shares.log() * TEMPERATURE).repeat(10, 1)
    assert set(chosen(logits, noise_for(10, 2), truncation_for(10, **parameters, top_p=top_p)).tolist()) == kept


@pytest.mark.parametrize("top_k", [3, 65, 300, 0])
def test_min_p_keeps_tokens_with_its_share_of_the_best(top_k: int) -> None:
    inside, outside = (TEMPERATURE * math.log(share) for share in (0.503, 0.497))
    logits = torch.tensor([[0.0, inside, outside]]).repeat(16, 1)
    got = chosen(logits, noise_for(16), truncation_for(16, top_k, min_p=0.5))
    assert set(got.tolist()) == {0, 1}


@pytest.mark.parametrize("parameters", [{"top_k": 3}, {"top_k": 65}, {"top_k": 300}, {}], ids=str)
def test_the_best_token_is_kept_at_any_top_p(parameters: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    assert chosen(logits, noise_for(1), truncation_for(1, **parameters, top_p=0.0)).tolist() == [1]


def test_without_noise_the_first_of_the_largest_is_chosen() -> None:
    logits = torch.randint(0, 3, (3, 333)).float()
    assert torch.equal(chosen(logits, None, None), ranked(logits, 1)[:, 0])


def test_without_truncation_noise_is_added_to_the_whole_vocabulary() -> None:
    for seed in range(2):
        logits, noise = torch.randn(3, 333), noise_for(3, seed)
        assert torch.equal(chosen(logits, noise, None), expected(logits, noise))


SPECIAL = {
    "zeros_of_both_signs": ([-1.0, -0.0, 0.0, -0.0], [1, 2, 3, 0]),
    "infinities": ([-math.inf, 1.0, math.inf, math.inf, -math.inf], [2, 3, 1, 0, 4]),
    "only_banned": ([-math.inf] * 3, [0, 1, 2]),
    "smallest_numbers": ([0.0, -(2.0**-149), 2.0**-149], [2, 0, 1]),
    "no_numbers": ([1.0, math.inf, math.nan, -math.nan], [2, 3, 1, 0]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_are_ordered(name: str) -> None:
    values, order = SPECIAL[name]
    scores, out = Scores.empty(1, len(values), 5, DEVICE), torch.full((1, len(values)), -7)
    score_logits(torch.tensor([values]), scores)
    topk_tokens(scores, out)
    assert out[0].tolist() == order


@pytest.mark.parametrize("parameters", [{"top_k": 5}, {"top_k": 65}, {"top_k": 300}, {"top_p": 0.9}], ids=str)
def test_banned_tokens_are_not_drawn(parameters: dict[str, Any]) -> None:
    logits = torch.full((8, 100), -math.inf)
    logits[:, 70], logits[:, 30] = 1.0, 1.5
    got = chosen(logits, noise_for(8), truncation_for(8, **parameters))
    assert set(got.tolist()) == {30, 70}


@pytest.mark.parametrize("parameters", [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_tiles_of_banned_tokens_are_not_searched(parameters: dict[str, Any]) -> None:
    """As with a mask that allows few tokens of a large vocabulary: their tiles alone are read."""
    logits = torch.full((2, 4500), -math.inf)
    logits[:, [3, 130, 131, 4499]] = torch.tensor([0.5, 1.0, 0.0, 0.7])
    noise, truncation = noise_for(2), truncation_for(2, **parameters)
    work, out = workspace(*logits.shape, small_top_k=truncation.small_top_k), torch.full((2,), -7)
    assert work.scores.tile_list is not None
    work.scores.tile_list.fill_(-1)
    sample(logits, out, work, noise=noise, truncation=truncation)
    assert torch.equal(out, expected(logits, noise, **parameters))
    assert [[tile for tile in row if tile >= 0] for row in work.scores.tile_list.tolist()] == [[0, 2, 70]] * 2


WAYS: dict[str, dict[str, Any] | None] = {
    "greedy": None,
    "not_truncated": {},
    "first_sort": {"top_k": 5, "top_p": 0.9},
    "second_sort": {"top_k": 65, "min_p": 0.1},
    "search": {"top_k": 300, "top_p": 0.9},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_row_without_a_finite_best_score_has_no_choice(way: str) -> None:
    logits = torch.zeros(3, 310)
    logits[0, 290], logits[1, 290], logits[2] = math.nan, math.inf, -math.inf
    noise, truncation = noise_for(3), truncation_for(3, **(WAYS[way] or {}))
    if WAYS[way] is None:
        noise.temperature.zero_()
        assert chosen(logits, None, None).tolist() == [-1] * 3
    assert chosen(logits, noise, truncation).tolist() == [-1] * 3
    assert sample_reference(logits, noise, truncation).tolist() == [-1] * 3


def test_scores_of_the_head_equal_scores_of_its_logits() -> None:
    torch.manual_seed(0)
    x, weight = torch.randint(-2, 3, (3, 48)).half(), torch.randint(-2, 3, (333, 48)).half()
    logits, noise, truncation = torch.empty(3, 333), noise_for(3), truncation_for(3, 20)
    lm_head_logits(x, weight, logits)
    ours, theirs = workspace(3, 333, small_top_k=True), workspace(3, 333, small_top_k=True)
    lm_head_scores(x, weight, ours.scores, noise=noise, truncation=truncation)
    score_logits(logits, theirs.scores, noise=noise, truncation=truncation)
    assert ours.scores.int_scores is not None and theirs.scores.int_scores is not None
    assert torch.equal(ours.scores.tile_keys, theirs.scores.tile_keys)
    assert torch.equal(ours.scores.int_scores, theirs.scores.int_scores)
    out = torch.full((3,), -7, dtype=torch.int32)
    sample_scored(333, out, ours, noise=noise, truncation=truncation)
    assert torch.equal(out.long(), expected(logits, noise, top_k=20))


def test_wrong_arguments_are_named() -> None:
    logits, out, work, noise = torch.zeros(2, 100), torch.zeros(2).int(), workspace(2, 100), noise_for(2)
    with pytest.raises(ValueError, match="give the noise"):
        sample(logits, out, work, truncation=truncation_for(2, 3))
    with pytest.raises(ValueError, match=r"top_k must have shape \[2\]"):
        sample(logits, out, work, noise=noise, truncation=truncation_for(1, 3))
    with pytest.raises(ValueError, match="top_p must be torch.float32"):
        sample(logits, out, work, noise=noise, truncation=replace(truncation_for(2), top_p=torch.ones(2).double()))
    with pytest.raises(ValueError, match=r"temperature must have shape \[2\]"):
        sample(logits, out, work, noise=replace(noise, temperature=torch.ones(1)))
    with pytest.raises(ValueError, match="too small for the 256"):
        sample(logits, out, workspace(2, 100, small_top_k=True), noise=noise, truncation=truncation_for(2, top_p=0.5))
    with pytest.raises(ValueError, match="float32"):
        sample(logits.half(), out, work)
    with pytest.raises(ValueError, match="keys"):
        sample(torch.zeros(3, 100), out, work)
    with pytest.raises(ValueError, match="2 tiles"):
        sample_scored(200, out, work, noise=noise, truncation=truncation_for(2, 3))
    with pytest.raises(ValueError, match="one best column"):
        topk_tokens(work.scores, torch.zeros(2, 2).int(), finite=True)
