"""The LM head's logits and scores, in Triton's interpreter against the references.

Triton's interpreter multiplies with numpy, whose last bits depend on the shape and which knows no bfloat16; so rows are
compared bit for bit on numbers whose sums are exact, and the rest in float16 and float32.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

from selfspec.kernels import lm_head_topk as head  # noqa: E402
from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_reference, lm_head_scores  # noqa: E402
from selfspec.kernels.logits_processing import Masks, mask_reference  # noqa: E402
from selfspec.kernels.noise import Noise, perturbed_reference  # noqa: E402
from selfspec.kernels.norm import Norm, rms_norm_reference, scaled_reference, squares_reference  # noqa: E402
from selfspec.kernels.topk import Scores, topk_tokens  # noqa: E402
from selfspec.sampling import NoiseKey, perturbed, ranked  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device(DEVICE):
        yield


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


@pytest.mark.parametrize(
    ("rows", "columns", "hidden", "dtype", "softcap"),
    [  # one case for each row tile; hidden sizes that are, and are not, multiples of the block of columns
        (1, 100, 48, torch.float16, None),
        (20, 70, 128, torch.float16, 3.0),
        (70, 65, 80, torch.float32, None),
    ],
)
def test_logits_match_the_reference(
    rows: int, columns: int, hidden: int, dtype: torch.dtype, softcap: float | None
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, hidden).to(dtype), (torch.randn(columns, hidden) / hidden**0.5).to(dtype)
    got = torch.full((rows, columns), math.nan)
    lm_head_logits(x, weight, got, softcap=softcap)
    exact = lm_head_reference(x.double(), weight.double(), softcap)
    assert (got - exact).abs().max() < 5e-6


@pytest.mark.parametrize("rows", [1, 17, 70])
def test_the_best_token_is_the_first_of_the_largest_logits(rows: int) -> None:
    x, weight = case(rows, 130, 32, torch.float16)
    logits = lm_head_reference(x, weight)
    assert (logits == logits.amax(-1, keepdim=True)).sum(-1).max() > 1 or rows == 1
    assert torch.equal(best_of(x, weight, 1), ranked(logits, 1))


@pytest.mark.parametrize("width", [5, 20])
def test_the_best_tokens_come_in_order_with_ties_to_the_lower_id(width: int) -> None:
    x, weight = case(2, 333, 32, torch.float16)
    assert torch.equal(best_of(x, weight, width), ranked(lm_head_reference(x, weight), width))


@pytest.mark.parametrize(("rows", "sequences"), [(6, 2), (20, 20)])
def test_drawn_tokens_are_those_of_sampling(rows: int, sequences: int) -> None:
    for seed in range(2):
        x, weight = case(rows, 201, 32, torch.float32, seed)
        noise = noise_for(rows, sequences, 0.7, seed)
        each = [part.repeat(rows // sequences) for part in (noise.seeds, noise.sample_indices)]
        key = NoiseKey(each[0], each[1], noise.positions.long())
        values = perturbed(lm_head_reference(x, weight) / 0.7, key)
        assert torch.equal(best_of(x, weight, 1, noise=noise), ranked(values, 1))


@pytest.mark.parametrize(("gather", "width", "index"), [(False, 1, torch.int64), (True, 7, torch.int32)])
def test_a_trimmed_head_draws_with_the_noise_of_its_tokens(gather: bool, width: int, index: torch.dtype) -> None:
    x, weight = case(3, 300, 48, torch.float16)
    rows = torch.randperm(300)[:101]
    noise = noise_for(3, stream=1)
    got = best_of(
        x, weight if gather else weight[rows], width, 101, token_ids=rows.to(index), gather=gather, noise=noise
    )
    values = perturbed_reference(lm_head_reference(x, weight)[:, rows], rows, noise)
    assert torch.equal(got, rows[ranked(values, width)])


@pytest.mark.parametrize(("gather", "count"), [(False, 6), (True, 64), (True, 70)])
def test_columns_behind_the_count_are_never_chosen(gather: bool, count: int) -> None:
    x, whole = case(2, 300, 48, torch.float32)
    rows = torch.randperm(300)[:130]
    rows[count:] = 10**9  # not to be followed
    part = torch.full((130, 48), math.nan)
    part[:count] = whole[rows[:count]]
    head_count = torch.tensor([count], dtype=torch.int32)
    got = best_of(
        x, whole if gather else part, 7, 130, token_ids=rows, gather=gather, count=head_count, noise=noise_for(2)
    )
    values = perturbed_reference(lm_head_reference(x, part[:count]), rows[:count], noise_for(2))
    assert torch.equal(got[:, :count], rows[:count][ranked(values, min(7, count))])
    assert (got[:, count:] == -1).all()


def test_masked_tokens_are_never_chosen() -> None:
    """With noise, in rows with a mask of their own, a shared one, none, and one that allows nothing."""
    x, weight = case(5, 100, 48, torch.float32)
    bits = torch.randint(-(2**31), 2**31 - 1, (5, 4), dtype=torch.int32)
    bits[2] = 0
    masks, noise = Masks(torch.tensor([1, 0, -1, 1, 2], dtype=torch.int32), bits), noise_for(5)
    values = perturbed_reference(mask_reference(lm_head_reference(x, weight), masks), torch.arange(100), noise)
    scores, chosen = poisoned(5, 100, 1), torch.full((5, 1), -7)
    lm_head_scores(x, weight, scores, noise=noise, masks=masks)
    topk_tokens(scores, chosen, finite=True)
    assert chosen[:, 0].tolist() == [*values.argmax(-1).tolist()[:4], -1]
    assert values[:2].isinf().any() and values[2].isfinite().all()


def test_a_scaled_stream_draws_the_tokens_of_its_norm() -> None:
    torch.manual_seed(0)
    dtype = torch.float16  # whose scaled values are shrunk
    sizes = torch.tensor([0.01, 0.1, 1, 10, 30])[:, None]  # noise shows a factor that is left out
    states, weight = (torch.randn(5, 576) * sizes).to(dtype), (torch.randn(130, 576) / 24).to(dtype)
    weights, noise = torch.linspace(0.5, 2, 576).to(dtype), noise_for(5)
    wide = torch.full((5, 40), math.nan)
    wide[:, :36] = squares_reference(states)
    got = best_of(scaled_reference(states, weights, 0.25), weight, 4, norm=Norm(1e-5, wide[:, :36]), noise=noise)
    logits = lm_head_reference(rms_norm_reference(states.double(), weights.double(), 1e-5, 0.25), weight.double())
    assert torch.equal(got, ranked(perturbed_reference(logits, torch.arange(130), noise), 4))


@pytest.mark.parametrize(("bm", "width"), [(16, 4), (64, 1)])
def test_a_row_depends_neither_on_other_rows_nor_on_the_row_tile(bm: int, width: int) -> None:
    x, weight = case(37, 130, 64, torch.float16)
    noise = noise_for(37)
    together = poisoned(37, 130, width)
    head._launch(x, weight, 130, together, softcap=20.0, noise=noise, bm=bm)
    for row in (0, 36):
        alone = poisoned(1, 130, width)
        own = Noise(noise.seeds, noise.sample_indices, noise.positions[row : row + 1], noise.temperature)
        lm_head_scores(x[row : row + 1], weight, alone, softcap=20.0, noise=own)
        assert torch.equal(alone.tile_keys[0], together.tile_keys[row])
        assert width == 1 or torch.equal(alone.int_scores[0], together.int_scores[row])


def test_strided_rows_and_larger_score_buffers_are_supported() -> None:
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
    "gather_without_token_ids": ("gather needs token_ids", {"gather": True}),
    "token_ids_for_another_weight": ("token_ids", {"token_ids": torch.arange(99)}),
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
