"""The head's kernels against their references: noise on the device, logits, scores, and the best columns in order.

Triton's interpreter multiplies with numpy, whose last bits depend on the shape and which knows no bfloat16; so rows are
compared bit for bit on numbers whose sums are exact, and the rest in float16 and float32.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

from selfspec.kernels import lm_head_topk as head  # noqa: E402
from selfspec.kernels import noise as draw  # noqa: E402
from selfspec.kernels import philox as reference  # noqa: E402
from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_reference, lm_head_scores  # noqa: E402
from selfspec.kernels.noise import Noise, perturbed_reference  # noqa: E402
from selfspec.kernels.norm import Norm, rms_norm_reference, scaled_reference, squares_reference  # noqa: E402
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
from selfspec.kernels.triton_compat import jit, tl  # noqa: E402
from selfspec.sampling import NoiseKey, perturbed, ranked  # noqa: E402
from tests.test_kernels import known_answers, signed  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device(DEVICE):
        yield


# Noise and levels


@jit
def _philox_kernel(seeds, indices, positions, blocks, out, STREAM: tl.constexpr):
    index = tl.arange(0, 4)
    seed, sample, position = tl.load(seeds + index), tl.load(indices + index), tl.load(positions + index)
    w0, w1, w2, w3 = draw.philox_words(seed, sample, position, tl.load(blocks + index), STREAM)
    tl.store(out + index, w0.to(tl.int64))
    tl.store(out + 4 + index, w1.to(tl.int64))
    tl.store(out + 8 + index, w2.to(tl.int64))
    tl.store(out + 12 + index, w3.to(tl.int64))


@jit
def _gumbel_kernel(words, out, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, draw.gumbel(tl.load(words + index).to(tl.uint32)))


@jit
def _log_kernel(numbers, out, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, draw.log(tl.load(numbers + index)))


@jit
def _run_kernel(seeds, positions, run, single, N: tl.constexpr):
    row, column = tl.arange(0, 2), tl.arange(0, N)
    seed, position = tl.load(seeds + row)[:, None], tl.load(positions + row)[:, None]
    at = row[:, None] * N + column[None, :]
    tl.store(run + at, draw.gumbel_consecutive(seed, position * 0, position, 2 * N, N, 1))
    tl.store(single + at, draw.gumbel_of(seed, position * 0, position, 2 * N + column[None, :], 1))


@jit
def _levels_kernel(values, levels, back, N: tl.constexpr):
    index = tl.arange(0, N)
    level = draw.to_int_scores(tl.load(values + index))
    tl.store(levels + index, level)
    tl.store(back + index, draw.from_int_scores(level))


@known_answers
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    block, position, copy, stream = counter
    of = [torch.full((4,), signed(number, 32)) for number in (copy, position, block)]
    seeds = torch.full((4,), signed(key[1] << 32 | key[0], 64))
    out = torch.zeros(4, 4, dtype=torch.int64)
    _philox_kernel[(1,)](seeds, of[0], of[1], of[2], out, STREAM=signed(stream, 32))
    assert out[:, 2].tolist() == list(words)


def test_gumbels_are_the_references() -> None:
    edge = torch.tensor([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFF00, 0xFFFFFFFE, 0xFFFFFFFF])
    words = torch.cat((edge, 2 ** torch.arange(32), torch.randint(0, 2**32, (2**12 - 40,))))
    got = torch.empty(len(words))
    _gumbel_kernel[(1,)](words, got, N=len(words))
    u = reference._to_unit(words)
    exact = reference.gumbel(u.double())
    assert ((got - exact).abs() <= 3e-7 * exact.abs().clamp(min=1)).all()


def test_log_is_accurate_and_exact_at_one() -> None:
    numbers = torch.cat((torch.tensor([1.0, 0.75, 1.5, 1 - 2.0**-24, 1 + 2.0**-23]), torch.rand(1019) * 4 + 1e-6))
    got = torch.empty(len(numbers))
    _log_kernel[(1,)](numbers, got, N=len(numbers))
    exact = numbers.double().log()
    assert got[0] == 0
    assert ((got - exact).abs() <= 3e-7 * exact.abs()).all()


def test_noise_of_a_run_of_tokens_is_that_of_each_token() -> None:
    seeds, positions = torch.tensor([5, -7]), torch.tensor([3, 900])
    run, single = torch.empty(2, 64), torch.full((2, 64), math.nan)
    _run_kernel[(1,)](seeds, positions, run, single, N=64)
    assert torch.equal(run, single)
    tokens = 128 + torch.arange(64).expand(2, -1)
    expected = reference.gumbel(reference.uniform(seeds, positions * 0, positions, tokens, 1))
    torch.testing.assert_close(run, expected, atol=1e-6, rtol=1e-6)


def test_levels_have_the_order_of_the_floats_and_lead_back() -> None:
    least = 2.0**-149
    rising = [-math.inf, -3e38, -1.0, -least, 0.0, least, 1.0, 3e38]
    values = torch.tensor([*rising, -0.0, math.inf, math.nan, -math.nan, -0.5, -2.0, 7.0, -7.0])
    levels, back = torch.empty(16, dtype=torch.int32), torch.empty(16)
    _levels_kernel[(1,)](values, levels, back, N=16)
    assert (levels[:7] < levels[1:8]).all()
    assert levels[8] == levels[4]
    assert (levels > NO_SCORE).all()
    assert (levels[10:12] == 2**31 - 1).all() and levels[9] == 0x7F800000
    assert torch.equal(back.nan_to_num(nan=0.25), values.nan_to_num(nan=0.25))


# The best columns


def scored(levels: torch.Tensor, tokens: torch.Tensor, width: int) -> Scores:
    """Scores as a kernel would leave them, in poisoned buffers."""
    rows, columns = levels.shape
    scores = Scores.empty(rows, columns, width, DEVICE)
    padded = torch.full((rows, num_tiles(columns) * TILE), NO_SCORE, dtype=torch.int32)
    padded[:, :columns] = levels
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("columns", "width"),
    [(1, 1), (1, 3), (700, 1), (700, 2), (130, 5), (700, 8), (64, 20), (700, 20), (700, 64), (1000, 256)],
)
def test_merge_finds_the_best_in_order(kind: str, columns: int, width: int) -> None:
    torch.manual_seed(columns + width)
    levels = KINDS[kind](2, columns).int()
    tokens = torch.randperm(10**6)[:columns].sort().values.int()
    out = torch.full((2, width), -7, dtype=torch.int64)
    topk_tokens(scored(levels, tokens, width), out, token_ids=tokens)
    assert torch.equal(out, topk_tokens_reference(levels, tokens, width).to(DEVICE))


@pytest.mark.parametrize(("width", "best"), [(4, [3, 5, 9, -1]), (9, [3, 5, 5, 9, *[-1] * 5])])
def test_a_token_that_is_there_twice_hides_no_other(width: int, best: list[int]) -> None:
    """Which should not be; a few columns are found by their tokens."""
    tokens = torch.tensor([5, 3, 5, 9]).int()
    out = torch.full((1, width), -7)
    topk_tokens(scored(torch.tensor([[8, 9, 8, 1]]).int(), tokens, width), out, token_ids=tokens)
    assert out.tolist() == [best]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 400), st.integers(1, 70), st.integers(1, 2**31), st.integers(0, 2**32))
def test_merge_finds_the_best_for_any_size(columns: int, width: int, spread: int, seed: int) -> None:
    with torch.device(DEVICE):
        torch.manual_seed(seed)
        levels = torch.randint(-spread + 1, spread, (1, columns)).int()
        tokens = torch.randperm(
            columns
        ).int()  # of equal scores too few to overflow the candidate_capacity, any order will do
        out = torch.empty(1, width, dtype=torch.int32)
        topk_tokens(scored(levels, tokens, width), out, token_ids=tokens)
        expected = topk_tokens_reference(levels, tokens, width).to(DEVICE)
        if columns <= candidate_capacity(width) or spread > 2**20:
            assert torch.equal(out, expected.int())
        else:
            place = torch.empty(columns, dtype=torch.int64).scatter_(0, tokens.long(), torch.arange(columns))
            assert torch.equal(levels[0][place[out[0].long()]], levels[0][place[expected[0]]])


# The head


def case(rows: int, columns: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Small whole numbers: every sum is exact, and many logits are equal."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randint(-2, 3, (rows, hidden), generator=g).to(dtype)
    return x, torch.randint(-2, 3, (columns, hidden), generator=g).to(dtype)


def noise_for(rows: int, sequences: int = 1, temperature: float = 0.8, seed: int = 1, stream: int = 0) -> Noise:
    g = torch.Generator(DEVICE).manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (sequences,), generator=g)
    positions = torch.randint(0, 5000, (rows,), generator=g, dtype=torch.int32)
    return Noise(seeds, torch.arange(sequences) + 2, positions, torch.full((sequences,), temperature), stream)


def poisoned(rows: int, columns: int, width: int) -> Scores:
    scores = Scores.empty(rows, columns, width, DEVICE)
    for buffer in (scores.tile_keys, scores.int_scores, scores.candidates):
        if buffer is not None:
            buffer.fill_(torch.iinfo(buffer.dtype).max)
    return scores


def best_of(x: torch.Tensor, weight: torch.Tensor, width: int, columns: int | None = None, **options: Any):
    scores = poisoned(x.shape[0], columns or weight.shape[0], width)
    out = torch.full((x.shape[0], width), -7)
    lm_head_scores(x, weight, scores, **options)
    topk_tokens(scores, out, token_ids=options.get("token_ids"))
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns", "hidden"), [(1, 100, 48), (5, 333, 64), (17, 130, 80), (70, 65, 576)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_are_the_references(
    rows: int, columns: int, hidden: int, dtype: torch.dtype, softcap: float | None
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, hidden).to(dtype), (torch.randn(columns, hidden) / hidden**0.5).to(dtype)
    got = torch.full((rows, columns), math.nan)
    lm_head_logits(x, weight, got, softcap=softcap)
    exact = lm_head_reference(x.double(), weight.double(), softcap)
    assert (got - exact).abs().max() < 5e-6


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 70])
def test_the_best_is_the_first_of_the_largest_logits(rows: int) -> None:
    x, weight = case(rows, 333, 64, torch.float16)
    logits = lm_head_reference(x, weight)
    assert (logits == logits.amax(-1, keepdim=True)).sum(-1).max() > 1 or rows == 1
    assert torch.equal(best_of(x, weight, 1), ranked(logits, 1))


@pytest.mark.parametrize("width", [2, 5, 20, 64])
def test_the_best_come_in_order_with_ties_to_the_lower_token(width: int) -> None:
    x, weight = case(2, 333, 32, torch.float16)
    assert torch.equal(best_of(x, weight, width), ranked(lm_head_reference(x, weight), width))


@pytest.mark.parametrize(("rows", "sequences"), [(1, 1), (6, 2), (20, 20)])
def test_drawn_tokens_are_those_of_sampling(rows: int, sequences: int) -> None:
    for seed in range(4):
        x, weight = case(rows, 201, 32, torch.float32, seed)
        noise = noise_for(rows, sequences, 0.7, seed)
        each = [part.repeat(rows // sequences) for part in (noise.seeds, noise.sample_indices)]
        key = NoiseKey(each[0], each[1], noise.positions.long())
        values = perturbed(lm_head_reference(x, weight) / 0.7, key)
        assert torch.equal(best_of(x, weight, 1, noise=noise), ranked(values, 1))


@pytest.mark.parametrize("gather", [False, True], ids=["copy", "gather"])
@pytest.mark.parametrize(("width", "index"), [(1, torch.int64), (7, torch.int32)])
def test_a_trimmed_head_draws_with_its_tokens_noise(gather: bool, width: int, index: torch.dtype) -> None:
    x, weight = case(3, 300, 48, torch.float16)
    rows = torch.randperm(300)[:101]
    noise = noise_for(3, stream=1)
    got = best_of(
        x, weight if gather else weight[rows], width, 101, token_ids=rows.to(index), gather=gather, noise=noise
    )
    values = perturbed_reference(lm_head_reference(x, weight)[:, rows], rows, noise)
    assert torch.equal(got, rows[ranked(values, width)])


@pytest.mark.parametrize("gather", [False, True], ids=["copy", "gather"])
@pytest.mark.parametrize("count", [1, 6, 64, 70])
def test_what_lies_behind_the_count_is_never_chosen(gather: bool, count: int) -> None:
    x, whole = case(2, 300, 48, torch.float32)
    rows = torch.randperm(300)[:130]
    rows[count:] = 10**9  # not to be followed
    part = torch.full((130, 48), math.nan)
    part[:count] = whole[rows[:count]]
    of = torch.tensor(count, dtype=torch.int32)
    got = best_of(x, whole if gather else part, 7, 130, token_ids=rows, gather=gather, count=of, noise=noise_for(2))
    values = perturbed_reference(lm_head_reference(x, part[:count]), rows[:count], noise_for(2))
    assert torch.equal(got[:, :count], rows[:count][ranked(values, min(7, count))])
    assert (got[:, count:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_of_a_scaled_stream_tokens_are_drawn_as_of_normed_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([0.01, 0.1, 1, 10, 30])[:, None]  # noise shows a factor that is left out
    states, weight = (torch.randn(5, 576) * sizes).to(dtype), (torch.randn(130, 576) / 24).to(dtype)
    weights, noise = torch.linspace(0.5, 2, 576).to(dtype), noise_for(5)
    wide = torch.full((5, 40), math.nan)
    wide[:, :36] = squares_reference(states)
    got = best_of(scaled_reference(states, weights, 0.25), weight, 4, norm=Norm(1e-5, wide[:, :36]), noise=noise)
    logits = lm_head_reference(rms_norm_reference(states.double(), weights.double(), 1e-5, 0.25), weight.double())
    assert torch.equal(got, ranked(perturbed_reference(logits, torch.arange(130), noise), 4))


@pytest.mark.parametrize("bm", [16, 32, 64])
@pytest.mark.parametrize("width", [1, 4])
def test_a_row_does_not_depend_on_the_others_nor_on_the_row_tile(bm: int, width: int) -> None:
    x, weight = case(37, 130, 64, torch.float16)
    noise = noise_for(37)
    together = poisoned(37, 130, width)
    head._launch(x, weight, 130, together, softcap=20.0, noise=noise, bm=bm)
    for row in (0, 20, 36):
        alone = poisoned(1, 130, width)
        own = Noise(noise.seeds, noise.sample_indices, noise.positions[row : row + 1], noise.temperature)
        lm_head_scores(x[row : row + 1], weight, alone, softcap=20.0, noise=own)
        assert torch.equal(alone.tile_keys[0], together.tile_keys[row])
        assert width == 1 or torch.equal(alone.int_scores[0], together.int_scores[row])


def test_rows_further_apart_and_scores_with_room_for_more() -> None:
    x, weight = case(3, 100, 48, torch.float16)
    wide, tall = torch.full((3, 64), math.nan, dtype=torch.float16), torch.full((100, 80), math.nan).half()
    wide[:, :48], tall[:, :48] = x, weight
    scores, out = poisoned(9, 100, 4), torch.full((5, 8), -7)
    lm_head_scores(wide[:, :48], tall[:, :48], scores)
    topk_tokens(scores, out[:3, :4])
    assert torch.equal(out[:3, :4], ranked(lm_head_reference(x, weight), 4))
    assert (out[3:] == -7).all() and (out[:, 4:] == -7).all()
    assert (scores.tile_keys[3:] == 2**63 - 1).all()


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "hidden_sizes": ("must be", {"weight": torch.zeros(100, 64)}),
    "odd_hidden_size": ("multiple of 16", {"x": torch.zeros(2, 40), "weight": torch.zeros(100, 40)}),
    "dtypes": ("float32", {"weight": torch.zeros(100, 48, dtype=torch.float16)}),
    "strided_x": ("contiguous", {"x": torch.zeros(48, 2).T}),
    "scores_of_another_size": ("keys", {"scores": Scores.empty(2, 200, 1, "cpu")}),
    "gather_without_rows": ("gather needs rows", {"gather": True}),
    "rows_for_another_weight": ("token_ids", {"token_ids": torch.arange(99)}),
    "count_of_another_type": ("count", {"count": torch.tensor(7)}),
    "squares_of_other_rows": ("squares", {"norm": Norm(1e-5, torch.zeros(3, 3))}),
    "softcap": ("softcap", {"softcap": 0.0}),
    "too_many_sequences": (
        "sequences",
        {"noise": Noise(torch.arange(3), torch.arange(3), torch.arange(2), torch.ones(3))},
    ),
    "positions": ("positions", {"noise": Noise(torch.arange(1), torch.arange(1), torch.arange(3), torch.ones(1))}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    text, wrong = WRONG[name]
    wrong = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in wrong.items()}
    right = {"x": torch.zeros(2, 48), "weight": torch.zeros(100, 48), "scores": Scores.empty(2, 100, 1, DEVICE)}
    with pytest.raises(ValueError, match=text):
        lm_head_scores(**{**right, **wrong})


def test_merge_refuses_what_the_scores_were_not_made_for() -> None:
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
