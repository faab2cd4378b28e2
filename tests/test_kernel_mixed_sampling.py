"""Sequences with different sampling parameters side by side: each gets the bits that it gets alone, with only its own
features switched on, in any order and batch."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_reference, lm_head_scores  # noqa: E402
from selfspec.kernels.noise import Noise, Truncation  # noqa: E402
from selfspec.kernels.sample import SampleWorkspace, sample, sample_reference  # noqa: E402
from selfspec.kernels.topk import Scores  # noqa: E402
from selfspec.speculation.plan import Plan  # noqa: E402
from tests.sampling_batches import DEVICE, Batch, drawn, drawn_with_own_features  # noqa: E402
from tests.strategies import plans  # noqa: E402


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device(DEVICE):
        yield


@settings(max_examples=4)
@given(plans(3), st.integers(2, 3), st.sampled_from([100, 300]), st.integers(0, 2**32), st.data())
def test_a_sequence_draws_the_same_alone_and_in_any_batch(
    plan: Plan, sequences: int, vocabulary: int, seed: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(sequences)))
    with torch.device(DEVICE):
        torch.manual_seed(seed)
        weight = torch.randint(-2, 3, (vocabulary, 16)).half()
        batch = Batch.random(plan, sequences, vocabulary)
        tokens, keys = drawn(batch, weight, batch.noise, batch.truncation, batch.processing)
        for part in [[sequence] for sequence in range(sequences)] + [order]:
            rows = batch.rows_of(part)
            own_tokens, own_keys = drawn_with_own_features(batch.take(part), weight)
            assert torch.equal(own_keys, keys[rows])
            assert torch.equal(own_tokens, tokens[rows])


@settings(max_examples=12)
@given(plans(2), st.integers(1, 3), st.sampled_from([100, 300]), st.integers(0, 2**32))
def test_sequences_with_different_parameters_draw_as_the_reference(
    plan: Plan, sequences: int, vocabulary: int, seed: int
) -> None:
    with torch.device(DEVICE):
        torch.manual_seed(seed)
        batch = Batch.random(plan, sequences, vocabulary)
        logits = torch.randn(len(batch.x), vocabulary) * 3
        out = torch.full((len(batch.x),), -7)
        work = SampleWorkspace.empty(len(batch.x), vocabulary, DEVICE)
        sample(logits, out, work, noise=batch.noise, truncation=batch.truncation, processing=batch.processing)
        expected = sample_reference(logits, batch.noise, batch.truncation, batch.processing)
        assert torch.equal(out, expected)


def test_a_sequence_at_temperature_0_keeps_the_bits_of_its_logits() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 32), torch.randn(200, 32)
    noise = Noise(torch.arange(2), torch.arange(2), torch.arange(4).int(), torch.tensor([0.0, 0.9]))
    plain, mixed = (Scores.empty(4, 200, 2, DEVICE) for _ in range(2))
    lm_head_scores(x, weight, plain)
    lm_head_scores(x, weight, mixed, noise=noise)
    assert torch.equal(plain.int_scores[::2], mixed.int_scores[::2]) and torch.equal(
        plain.tile_keys[::2], mixed.tile_keys[::2]
    )
    assert not (plain.int_scores[1::2, :200] == mixed.int_scores[1::2, :200]).any()


def test_one_launch_chooses_as_four_do_where_every_top_k_is_small() -> None:
    torch.manual_seed(0)
    logits, rows = torch.randn(12, 500) * 2, 12
    noise = Noise(torch.arange(rows) + 5, torch.zeros(rows).int(), torch.arange(rows).int(), torch.ones(rows))
    noise.temperature[:3] = 0
    top_k = torch.tensor([0, 3, 300, 0, 0, 1, 7, 20, 50, 63, 64, 64], dtype=torch.int32)
    top_p = torch.where(top_k > 0, 0.9, 1.0)
    choices = []
    for small_top_k in (True, False):
        work, out = SampleWorkspace.empty(rows, 500, DEVICE, small_top_k), torch.full((rows,), -7)
        sample(logits, out, work, noise=noise, truncation=Truncation(top_k, top_p, torch.zeros(rows), small_top_k))
        choices.append(out)
    assert torch.equal(*choices)
    assert torch.equal(choices[0][:3], logits[:3].argmax(-1)) and (choices[0] >= 0).all()


def test_scores_from_the_head_equal_scores_from_its_logits() -> None:
    """The head's processed scores are those of the logits that it writes out."""
    torch.manual_seed(0)
    batch, weight = Batch.random(Plan.parse("chain:2"), 3, 300), torch.randn(300, 16).half()
    logits, out = torch.empty(len(batch.x), 300), torch.full((len(batch.x),), -7)
    lm_head_logits(batch.x, weight, logits, softcap=4.0)
    torch.testing.assert_close(logits, lm_head_reference(batch.x.float(), weight.float(), 4.0), atol=1e-5, rtol=1e-5)
    work = SampleWorkspace.empty(len(batch.x), 300, DEVICE)
    sample(logits, out, work, noise=batch.noise, truncation=batch.truncation, processing=batch.processing)
    tokens, keys = drawn(batch, weight, batch.noise, batch.truncation, batch.processing)
    assert torch.equal(out, tokens) and torch.equal(work.scores.tile_keys, keys)
