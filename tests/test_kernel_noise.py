"""Noise, logarithms and int scores as kernels compute them, in Triton's interpreter against the references."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

from selfspec.kernels import noise as kernel  # noqa: E402
from selfspec.kernels import philox as reference  # noqa: E402
from selfspec.kernels.topk import NO_SCORE  # noqa: E402
from selfspec.kernels.triton_compat import jit, tl  # noqa: E402
from tests.test_kernel_philox import known_answers, signed  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device(DEVICE):
        yield


@jit
def _philox_kernel(seeds, indices, positions, blocks, out, STREAM: tl.constexpr):
    index = tl.arange(0, 4)
    seed, sample, position = tl.load(seeds + index), tl.load(indices + index), tl.load(positions + index)
    w0, w1, w2, w3 = kernel.philox_words(seed, sample, position, tl.load(blocks + index), STREAM)
    tl.store(out + index, w0.to(tl.int64))
    tl.store(out + 4 + index, w1.to(tl.int64))
    tl.store(out + 8 + index, w2.to(tl.int64))
    tl.store(out + 12 + index, w3.to(tl.int64))


@jit
def _gumbel_kernel(words, out, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, kernel.gumbel(tl.load(words + index).to(tl.uint32)))


@jit
def _log_kernel(numbers, out, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, kernel.log(tl.load(numbers + index)))


@jit
def _consecutive_kernel(seeds, positions, together, single, N: tl.constexpr):
    row, column = tl.arange(0, 2), tl.arange(0, N)
    seed, position = tl.load(seeds + row)[:, None], tl.load(positions + row)[:, None]
    at = row[:, None] * N + column[None, :]
    tl.store(together + at, kernel.gumbel_consecutive(seed, position * 0, position, 2 * N, N, 1))
    tl.store(single + at, kernel.gumbel_of(seed, position * 0, position, 2 * N + column[None, :], 1))


@jit
def _int_scores_kernel(values, scores, back, N: tl.constexpr):
    index = tl.arange(0, N)
    score = kernel.to_int_scores(tl.load(values + index))
    tl.store(scores + index, score)
    tl.store(back + index, kernel.from_int_scores(score))


@known_answers
def test_philox_gives_the_published_words_in_a_kernel(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    block, position, copy, stream = counter
    keys = [torch.full((4,), signed(number, 32)) for number in (copy, position, block)]
    seeds = torch.full((4,), signed(key[1] << 32 | key[0], 64))
    out = torch.zeros(4, 4, dtype=torch.int64)
    _philox_kernel[(1,)](seeds, keys[0], keys[1], keys[2], out, STREAM=signed(stream, 32))
    assert out[:, 2].tolist() == list(words)


def test_gumbel_noise_matches_the_reference() -> None:
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


def test_noise_of_consecutive_tokens_is_that_of_each_token() -> None:
    seeds, positions = torch.tensor([5, -7]), torch.tensor([3, 900])
    together, single = torch.empty(2, 64), torch.full((2, 64), math.nan)
    _consecutive_kernel[(1,)](seeds, positions, together, single, N=64)
    assert torch.equal(together, single)
    tokens = 128 + torch.arange(64).expand(2, -1)
    expected = reference.gumbel(reference.uniform(seeds, positions * 0, positions, tokens, 1))
    torch.testing.assert_close(together, expected, atol=1e-6, rtol=1e-6)


def test_int_scores_have_the_order_of_the_floats_and_convert_back() -> None:
    least = 2.0**-149
    rising = [-math.inf, -3e38, -1.0, -least, 0.0, least, 1.0, 3e38]
    values = torch.tensor([*rising, -0.0, math.inf, math.nan, -math.nan, -0.5, -2.0, 7.0, -7.0])
    scores, back = torch.empty(16, dtype=torch.int32), torch.empty(16)
    _int_scores_kernel[(1,)](values, scores, back, N=16)
    assert (scores[:7] < scores[1:8]).all()
    assert scores[8] == scores[4]
    assert (scores > NO_SCORE).all()
    assert (scores[10:12] == 2**31 - 1).all() and scores[9] == 0x7F800000
    assert torch.equal(back.nan_to_num(nan=0.25), values.nan_to_num(nan=0.25))
