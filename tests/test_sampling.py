"""Logits processing, warping, ranking, noise and choice of each row equal transformers' processors, stable sorts and
plain sums."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.sampling import (
    ACCEPT,
    CHILDREN,
    CHOICE,
    MAX_STOPS,
    NoiseKey,
    SamplingParams,
    choose,
    gumbel,
    perturbed,
    process_logits,
    ranked,
    uniform,
    warp_logits,
)

PROPERTY = settings(max_examples=60)
STREAMS = pytest.mark.parametrize("stream", [CHOICE, CHILDREN, ACCEPT], ids=["choice", "children", "accept"])
GREEDY, SAMPLED = SamplingParams(), SamplingParams(do_sample=True)

eighths = st.integers(-200, 200).map(lambda n: n / 8)  # exact in float32, and small enough for every softmax


@st.composite
def rows_of_logits(draw: st.DrawFn, ties: bool = False, max_rows: int = 3) -> torch.Tensor:
    """[R, V] float64 logits; up to 3 tokens, but not all of a row, may be -inf."""
    size = draw(st.integers(1, 20))
    values = st.sampled_from([-0.5, 0.0, 0.25, 1.0]) if ties else eighths
    row = st.lists(values, min_size=size, max_size=size, unique=not ties)
    logits = torch.tensor(draw(st.lists(row, min_size=1, max_size=max_rows)), dtype=torch.float64)
    cut = draw(st.lists(st.integers(0, size - 1), max_size=min(3, size - 1), unique=True))
    logits[:, cut] = -math.inf
    return logits


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        do_sample=True,
        temperature=draw(st.sampled_from([0.3, 0.8, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 100])),
        top_p=draw(st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
    )


def warpers(sampling: SamplingParams) -> LogitsProcessorList:
    """The warpers that transformers' generate applies, in its order."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors


def warp(logits: torch.Tensor, params: SamplingParams, cut: bool = True) -> torch.Tensor:
    return warp_logits(logits, [params] * len(logits), cut)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equal logits, and -inf for the same tokens."""
    assert (actual > -math.inf).tolist() == (expected > -math.inf).tolist()
    torch.testing.assert_close(actual, expected)


@PROPERTY
@given(logits=rows_of_logits(), sampling=samplings())
def test_without_ties_warping_keeps_what_transformers_keeps(logits: torch.Tensor, sampling: SamplingParams) -> None:
    assert_same(warp(logits, sampling), warpers(sampling)(None, logits))


@PROPERTY
@given(logits=rows_of_logits(), temperature=st.floats(0.05, 5))
def test_without_cut_only_the_temperature_is_applied(logits: torch.Tensor, temperature: float) -> None:
    sampling = SamplingParams(do_sample=True, temperature=temperature, top_k=1, top_p=0.5, min_p=0.5)
    assert_same(warp(logits, sampling, cut=False), TemperatureLogitsWarper(temperature)(None, logits))


@PROPERTY
@given(logits=rows_of_logits(ties=True))
def test_greedy_logits_are_not_warped(logits: torch.Tensor) -> None:
    assert torch.equal(warp(logits, SamplingParams(temperature=0.5, top_k=1, top_p=0.5, min_p=0.5)), logits)


def by_rank(row: list[float]) -> list[int]:
    """Token ids in order of rank: best first, ties by lower id."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def possible(row: torch.Tensor) -> set[int]:
    return set((row > -math.inf).nonzero().squeeze(1).tolist())


@PROPERTY
@given(logits=rows_of_logits(ties=True), k=st.integers(1, 25))
def test_top_k_keeps_the_first_k_by_rank(logits: torch.Tensor, k: int) -> None:
    for row, kept in zip(logits, warp(logits, SamplingParams(do_sample=True, top_k=k)), strict=True):
        assert possible(kept) == set(by_rank(row.tolist())[:k]) & possible(row)


@PROPERTY
@given(logits=rows_of_logits(ties=True), top_p=st.sampled_from([0.15, 0.35, 0.55, 0.85, 0.97]))
def test_top_p_keeps_the_shortest_run_of_ranks_with_that_mass(logits: torch.Tensor, top_p: float) -> None:
    for row, kept in zip(logits, warp(logits, SamplingParams(do_sample=True, top_p=top_p)), strict=True):
        order = by_rank(row.tolist())
        mass = row.softmax(-1)[order].cumsum(-1)
        assume((mass - top_p).abs().min() > 1e-9)
        shortest = 1 + int((mass < top_p).sum())
        assert possible(kept) == set(order[:shortest])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        pytest.param(SamplingParams(do_sample=True, top_k=2), {1, 2}, id="top-k"),
        pytest.param(SamplingParams(do_sample=True, top_p=0.4), {1, 2}, id="top-p"),
        pytest.param(SamplingParams(do_sample=True, top_p=0.5), {1, 2}, id="top-p that two tokens reach exactly"),
        pytest.param(SamplingParams(do_sample=True, top_k=3, top_p=0.5), {1, 2}, id="top-k then top-p"),
        pytest.param(SamplingParams(do_sample=True, min_p=1.0), {1, 2, 4, 5}, id="min-p removes no equals"),
    ],
)
def test_of_four_equal_tokens_the_lower_ids_are_kept(sampling: SamplingParams, kept: set[int]) -> None:
    logits = torch.tensor([[-30.0, 2.0, 2.0, -30.0, 2.0, 2.0]])
    assert possible(warp(logits, sampling)[0]) == kept


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_best_token_is_always_kept(sampling: dict[str, float]) -> None:
    logits = torch.linspace(-1, 1, 50_000)[None]
    assert possible(warp(logits, SamplingParams(do_sample=True, **sampling))[0]) == {49_999}


@PROPERTY
@given(logits=rows_of_logits(ties=True), data=st.data())
def test_processing_of_each_row_equals_transformers(logits: torch.Tensor, data: st.DataObject) -> None:
    """With rows of equal and of different parameters in one call."""
    count, size = logits.shape
    ids = st.integers(0, size - 1)
    each = [data.draw(processed_params(size)) for _ in range(2)]
    params = [each[data.draw(st.integers(0, 1))] for _ in range(count)]
    texts = [data.draw(st.lists(ids, min_size=1, max_size=8)) for _ in range(count)]
    prompts = [data.draw(st.integers(1, len(text))) for text in texts]
    before = logits.clone()
    processed = process_logits(logits, params, texts, prompts)
    for row, expected in enumerate(logits):
        assert_same(processed[row : row + 1], by_transformers(expected[None], params[row], texts[row], prompts[row]))
    assert torch.equal(logits, before), "process_logits() must not change the logits it is given"


@st.composite
def processed_params(draw: st.DrawFn, size: int) -> SamplingParams:
    tokens = st.lists(st.integers(0, size - 1), max_size=3, unique=True)
    return SamplingParams(
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.3, 4.0])),
        logit_bias=tuple((token, draw(st.sampled_from([-2.5, 0.5, -math.inf]))) for token in draw(tokens)),
        banned_token_ids=tuple(draw(tokens)),
        min_new_tokens=draw(st.integers(0, 4)),
        min_length=draw(st.integers(0, 9)),
        stop_token_ids=tuple(draw(tokens)),
    )


def by_transformers(logits: torch.Tensor, params: SamplingParams, text: list[int], prompt: int) -> torch.Tensor:
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.stop_token_ids:
        processors.append(MinLengthLogitsProcessor(params.min_length, list(params.stop_token_ids)))
        processors.append(MinNewTokensLengthLogitsProcessor(prompt, params.min_new_tokens, list(params.stop_token_ids)))
    processors.append(SuppressTokensLogitsProcessor(params.banned_token_ids))
    return processors(torch.tensor([text]), logits)


def test_presence_and_frequency_penalty_count_new_tokens_only() -> None:
    """The prompt's tokens are 0 and 1; of the new tokens 2 occurs twice and 3 once."""
    text, logits = [0, 1, 1, 2, 3, 2], torch.zeros(1, 5)
    presence = process_logits(logits, [SamplingParams(presence_penalty=0.5)], [text], [3])
    assert presence.tolist() == [[0, 0, -0.5, -0.5, 0]]
    both = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25)
    assert process_logits(logits, [both], [text], [3]).tolist() == [[0, 0, 0, -0.25, 0]]


def test_the_repetition_penalty_comes_before_the_presence_penalty() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    assert process_logits(torch.tensor([[4.0, 4.0]]), [params], [[0, 1]], [1]).tolist() == [[2, 1]]


def test_only_allowed_tokens_that_are_not_banned_are_kept() -> None:
    params = SamplingParams(allowed_token_ids=(4, 1, 900), banned_token_ids=(1,))
    assert possible(process_logits(torch.zeros(1, 5), [params], [[0]], [1])[0]) == {4}


@pytest.mark.parametrize("token", [-1, 5])
def test_a_stop_token_outside_the_vocabulary_bans_no_token(token: int) -> None:
    logits = torch.randn(2, 5)
    params = SamplingParams(min_new_tokens=3, stop_token_ids=(token,))
    assert torch.equal(process_logits(logits, [params] * 2, [[1], [1, 2]], [1, 1]), logits)


@PROPERTY
@given(logits=rows_of_logits(ties=True), data=st.data())
def test_processing_of_a_trimmed_head_equals_the_full_heads(logits: torch.Tensor, data: st.DataObject) -> None:
    count, size = logits.shape
    ids = st.integers(0, size - 1)
    head = torch.tensor(data.draw(st.lists(ids, min_size=1, unique=True)))
    texts = data.draw(st.lists(st.lists(ids, min_size=1), min_size=count, max_size=count))
    allowed = data.draw(st.none() | st.lists(ids, min_size=1))
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "allowed_token_ids": allowed}
    params = [replace(data.draw(processed_params(size)), **penalties)] * count
    whole = process_logits(logits, params, texts, [1] * count)
    assert torch.equal(process_logits(logits[:, head], params, texts, [1] * count, head), whole[:, head])


any_float = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, -math.inf, math.inf, 1.0, -1.0])


@PROPERTY
@given(rows=st.integers(1, 12).flatmap(lambda n: st.lists(st.lists(any_float, min_size=n, max_size=n), min_size=1)))
def test_ranking_is_a_stable_sort(rows: list[list[float]]) -> None:
    values = torch.tensor(rows, dtype=torch.float32)
    expected = np.argsort(-values.numpy(), axis=-1, kind="stable")
    for k in (1, values.shape[-1] // 2 + 1, values.shape[-1]):
        assert ranked(values, k).tolist() == expected[:, :k].tolist()


def test_ranking_a_large_vocabulary_full_of_ties_is_a_stable_sort() -> None:
    values = torch.randn(2, 3, 150_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = values.float().sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(ranked(values, 1000), expected[..., :1000])


@PROPERTY
@given(logits=rows_of_logits(ties=True))
def test_the_greedy_choice_is_the_lowest_of_the_best_tokens(logits: torch.Tensor) -> None:
    chosen = choose(logits, [GREEDY] * len(logits), key_of(len(logits)))
    assert chosen.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_the_greedy_choice_among_equal_tokens_of_a_large_vocabulary_is_the_lowest_id() -> None:
    assert choose(torch.full((3, 50_257), 1.5), [GREEDY] * 3, key_of(3)).tolist() == [0, 0, 0]


def key_of(rows: int, seed: int = 11) -> NoiseKey:
    """A key whose rows differ in seed, sample index and position."""
    numbers = torch.arange(rows)
    return NoiseKey(seed + 7 * numbers, numbers % 3, 5 + numbers)


def noise_of(key: NoiseKey, row: int, token: int, stream: int) -> float:
    one = key.at(torch.tensor([row]))
    return gumbel(uniform(one.seeds, one.sample_indices, one.positions, torch.tensor([[token]]), stream)).item()


@STREAMS
@pytest.mark.parametrize("kept", [0, 9, 37], ids=lambda kept: f"{kept} of 37 tokens")
def test_every_kept_token_gets_its_own_noise(kept: int, stream: int) -> None:
    """Noise drawn for the whole vocabulary equals noise drawn for the kept tokens."""
    key = key_of(4)
    values = torch.randn(4, 37, generator=torch.Generator().manual_seed(1))
    removed = values.argsort(-1)[:, : 37 - kept]
    values = values.scatter(1, removed, -math.inf)
    noisy = perturbed(values, key, stream)
    assert torch.equal(noisy > -math.inf, values > -math.inf)
    for row, token in (values > -math.inf).nonzero().tolist():
        assert noisy[row, token] == values[row, token] + noise_of(key, row, token, stream)


def test_columns_of_a_trimmed_head_get_the_noise_of_their_tokens() -> None:
    key = key_of(4)
    values = torch.randn(4, 37, generator=torch.Generator().manual_seed(1))
    head = torch.tensor([0, 3, 4, 11, 30, 36])
    assert torch.equal(perturbed(values[:, head], key, CHOICE, head), perturbed(values, key, CHOICE)[:, head])


def test_the_choice_of_a_row_does_not_depend_on_the_other_rows() -> None:
    key = key_of(6)
    values = torch.randn(6, 37, generator=torch.Generator().manual_seed(1))
    values[1:4] = values[1:4].masked_fill(values[1:4] < 1, -math.inf)  # few tokens in some rows, all in others
    params = [SAMPLED, GREEDY, SamplingParams(do_sample=True, top_k=3, temperature=2.0), SAMPLED, GREEDY, SAMPLED]
    together = choose(warp_logits(values, params), params, key)
    alone = [
        choose(warp(values[row : row + 1], params[row]), [params[row]], key.at(torch.tensor([row]))).item()
        for row in range(6)
    ]
    assert together.tolist() == alone
    assert [together[row] for row in (1, 4)] == [values[row].argmax() for row in (1, 4)]


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, SamplingParams(do_sample=True, top_k=2)], ids=["greedy", "sampled", "top-k"]
)
@pytest.mark.parametrize("fault", [math.nan, -math.nan, math.inf], ids=["nan", "-nan", "inf"])
def test_logits_that_are_not_finite_are_refused_with_their_row(fault: float, params: SamplingParams) -> None:
    values = torch.zeros(3, 5)
    values[1, 2] = fault
    with pytest.raises(ValueError, match="row 1: the model's logits are not finite"):
        choose(warp_logits(values, [params] * 3), [params] * 3, key_of(3))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(do_sample=True, temperature=1e-38), SamplingParams(banned_token_ids=tuple(range(5)))],
    ids=["temperature overflows", "all tokens banned"],
)
def test_a_row_without_a_finite_logit_is_refused(params: SamplingParams) -> None:
    every = [SAMPLED, params]
    values = process_logits(torch.tensor([[1.0, 2, 3, -1, 5]] * 2), every, [[0], [0]], [1, 1])
    with pytest.raises(ValueError, match="row 1: the model's logits are not finite"):
        choose(warp_logits(values, every), every, key_of(2))


@pytest.mark.parametrize("field", ["seeds", "sample_indices", "positions"])
def test_noise_depends_on(field: str) -> None:
    numbers = {name: torch.zeros(200, dtype=torch.long) for name in ("seeds", "sample_indices", "positions")}
    numbers[field] = torch.arange(200)
    chosen = choose(torch.zeros(200, 50), [SAMPLED] * 200, NoiseKey(**numbers))
    assert len(chosen.unique()) > 25


def test_choices_are_drawn_with_the_probabilities_of_their_logits() -> None:
    values = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]).log()
    rows = 40_000
    key = NoiseKey(torch.arange(rows), torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long))
    shares = choose(values.expand(rows, -1), [SAMPLED] * rows, key).bincount(minlength=5) / rows
    torch.testing.assert_close(shares, values.exp(), rtol=0, atol=0.01)
    assert shares[4] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", math.nan),
        ("temperature", "0.7"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("min_new_tokens", -1),
        ("min_length", -1),
        ("presence_penalty", math.inf),
        ("frequency_penalty", 10**400),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {-3: 1.0}),
        ("logit_bias", ((3, 1.0), (3, 2.0))),
        ("logit_bias", 5),
        ("banned_token_ids", (-1,)),
        ("banned_token_ids", (1.5,)),
        ("allowed_token_ids", ("a",)),
    ],
)
def test_an_impossible_setting_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))} .*must be"):
        SamplingParams(**{name: value})


def test_more_stop_tokens_than_a_minimum_length_can_ban_are_refused() -> None:
    stops = tuple(range(MAX_STOPS + 1))
    assert SamplingParams(stop_token_ids=stops).stop_token_ids == stops
    with pytest.raises(ValueError, match=f"{len(stops)} stop tokens .*at most {MAX_STOPS}"):
        SamplingParams(stop_token_ids=stops, min_length=1)


def test_an_empty_list_of_allowed_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed_token_ids is empty"):
        SamplingParams(allowed_token_ids=())


def test_the_wrong_entry_of_a_long_list_of_token_ids_is_named() -> None:
    with pytest.raises(ValueError, match="^allowed_token_ids=.{,99} is not possible: .*, and True is none$"):
        SamplingParams(allowed_token_ids=(*range(10_000), True))


def test_numbers_and_ids_of_numpy_and_torch_become_python_numbers() -> None:
    converted = SamplingParams(
        do_sample=np.bool_(True),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=torch.tensor(7),  # type: ignore[arg-type]
        min_length=np.int64(3),  # type: ignore[arg-type]
        logit_bias={np.int64(5): np.float64(1.5), 2: 1},  # type: ignore[arg-type]
        banned_token_ids=np.array([4, 1]),  # type: ignore[arg-type]
        stop_token_ids=torch.tensor([2, 3]),  # type: ignore[arg-type]
    )
    expected = SamplingParams(
        True, 0.5, 7, min_length=3, logit_bias=((2, 1.0), (5, 1.5)), banned_token_ids=(1, 4), stop_token_ids=(2, 3)
    )
    assert converted == expected and hash(converted) == hash(expected)
    assert repr(converted) == repr(expected)
