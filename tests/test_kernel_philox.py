"""The noise reference: published vectors, equality however it is asked for, and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy.stats
import torch

from selfspec.kernels import philox as noise
from selfspec.kernels.philox import gumbel, philox, uniform, uniform_vocabulary

# Random123 publishes these for Philox 4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = {
    "zeros": (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    "ones": (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "digits of pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
known_answers = pytest.mark.parametrize(
    ("counter", "key", "words"), KNOWN_ANSWERS.values(), ids=[name.replace(" ", "_") for name in KNOWN_ANSWERS]
)


def signed(word: int, bits: int) -> int:
    """The integer that torch holds for these bits."""
    return word - (1 << bits) if word >> (bits - 1) else word


@known_answers
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    got = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(word.item() for word in got) == words


def test_philox_broadcasts() -> None:
    counters, keys, words = zip(*KNOWN_ANSWERS.values(), strict=True)
    got = philox(
        tuple(torch.tensor(column)[:, None] for column in zip(*counters, strict=True)),
        tuple(torch.tensor(column)[None] for column in zip(*keys, strict=True)),
    )
    assert torch.stack(got, dim=-1).shape == (3, 3, 4)
    assert [tuple(word[i, i].item() for word in got) for i in range(3)] == list(words)


@known_answers
def test_uniform_is_the_published_words_of_its_seed_sample_index_position_token_and_stream(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    block, position, sample_index, stream = counter
    seed = signed(key[1] << 32 | key[0], 64)
    tokens = 4 * block + torch.arange(4)
    got = uniform(torch.tensor([seed]), torch.tensor([sample_index]), torch.tensor([position]), tokens[None], stream)
    expected = (torch.tensor(words, dtype=torch.float64) + 0.5) / 2**32
    assert (got[0].double() - expected).abs().max() <= 2.0**-25 * 1.001


# The same number however it is asked for


ROWS = (
    torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 1 << 32]),  # seeds
    torch.tensor([0, 1, 0, 7, 0, 2]),  # sample_indices
    torch.tensor([0, 1, 511, 2**20, 5, 5]),  # positions
)


@pytest.mark.parametrize(("vocabulary", "stream"), [(1, 0), (101, 1), (128, 2)])
def test_a_whole_vocabulary_equals_token_by_token(vocabulary: int, stream: int) -> None:
    tokens = torch.arange(vocabulary).expand(len(ROWS[0]), -1)
    assert torch.equal(uniform_vocabulary(*ROWS, vocabulary, stream), uniform(*ROWS, tokens, stream))


def test_order_of_rows_and_tokens_does_not_matter() -> None:
    rows, tokens = torch.randperm(6), torch.randperm(101)
    whole = uniform_vocabulary(*ROWS, 101, 0)
    got = uniform(*(column[rows] for column in ROWS), tokens.expand(6, -1), 0)
    assert torch.equal(got, whole[rows][:, tokens])


# Statistics. Fixed seeds, so a p-value is the same in every run; 1e-3 is far below what these show.

DRAWS = 20_000
LINE = torch.arange(DRAWS)
ZERO = torch.zeros(DRAWS, dtype=torch.long)


def one_each(
    seeds: torch.Tensor, sample_indices: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, stream: int = 0
):
    return uniform(seeds, sample_indices, positions, tokens[:, None], stream).squeeze(1)


ALONG: dict[str, Callable[[], torch.Tensor]] = {
    "tokens": lambda: uniform_vocabulary(torch.tensor([3]), torch.tensor([0]), torch.tensor([17]), DRAWS, 0)[0],
    "positions": lambda: one_each(ZERO + 3, ZERO, LINE, ZERO + 42),
    "sample_indices": lambda: one_each(ZERO + 3, LINE, ZERO + 17, ZERO + 42),
    "seeds": lambda: one_each(LINE, ZERO, ZERO + 17, ZERO + 42),
    "high_seeds": lambda: one_each(LINE << 32, ZERO, ZERO + 17, ZERO + 42),
    "streams": lambda: torch.cat([one_each(ZERO[:1] + 3, ZERO[:1], ZERO[:1] + 17, ZERO[:1], s) for s in range(500)]),
}
along = pytest.mark.parametrize("axis", ALONG)


@along
def test_uniform_is_uniform_along(axis: str) -> None:
    assert scipy.stats.kstest(ALONG[axis]().double().numpy(), "uniform").pvalue > 1e-3


@along
def test_neighbours_are_independent_along(axis: str) -> None:
    cells = (ALONG[axis]() * 8).long()
    assert independence_pvalue(cells[:-1], cells[1:]) > 1e-3


@pytest.mark.parametrize("other", ["seed", "high_seed", "sample_index", "position", "stream"])
def test_tokens_of_two_rows_are_independent_where_they_differ_by(other: str) -> None:
    first = {"seed": 3, "sample_index": 0, "position": 17, "stream": 0}
    second = {**first, **({"seed": 3 + 2**32} if other == "high_seed" else {other: first[other] + 1})}
    a, b = (
        uniform_vocabulary(
            *(torch.tensor([row[x]]) for x in ("seed", "sample_index", "position")), DRAWS, row["stream"]
        )[0]
        for row in (first, second)
    )
    assert independence_pvalue((a * 8).long(), (b * 8).long()) > 1e-3


def independence_pvalue(a: torch.Tensor, b: torch.Tensor) -> float:
    """Chi-square of the joint counts of two series of numbers 0..7."""
    return scipy.stats.chisquare((8 * a + b).bincount(minlength=64).numpy()).pvalue


@pytest.mark.parametrize("word", [0, 1, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_extreme_words_stay_inside_the_interval_and_give_finite_gumbels(
    word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "philox", lambda counter, key: (torch.full_like(counter[0] + key[0], word),) * 4)
    numbers = uniform_vocabulary(*ROWS, 5, 0)
    assert ((numbers > 0) & (numbers < 1)).all()
    assert gumbel(numbers).isfinite().all()


def test_gumbel_has_the_gumbel_distribution() -> None:
    assert scipy.stats.kstest(gumbel(ALONG["tokens"]()).double().numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("exponent", [-3, -12, -24, -33])
def test_gumbel_is_exact_where_it_is_large(exponent: int) -> None:
    got = gumbel(torch.tensor([2.0**exponent])).item()
    assert got == pytest.approx(-math.log(-math.log1p(-(2.0**exponent))), rel=1e-6)


def test_adding_gumbel_noise_and_taking_the_largest_draws_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0])
    numbers = uniform_vocabulary(ZERO + 5, ZERO, LINE, len(logits), 0)
    counts = (logits + gumbel(numbers)).argmax(-1).bincount(minlength=len(logits))
    expected = logits.double().softmax(-1) * DRAWS
    assert scipy.stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3
