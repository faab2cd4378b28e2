"""LM head, top-k and sampling on a CUDA device at real sizes: the same bits for any rows, in graphs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec import sampling
from selfspec.kernels import lm_head_topk as head
from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_reference, lm_head_scores
from selfspec.kernels.noise import Noise, Truncation, perturbed_reference
from selfspec.kernels.sample import SampleWorkspace, sample, sample_scored
from selfspec.kernels.topk import Scores, topk_tokens
from selfspec.sampling import NoiseKey, SamplingParams, ranked, warp_logits
from selfspec.speculation.plan import Plan
from tests.sampling_batches import Batch, drawn, drawn_with_own_features

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"smol": (49152, 576), "8b": (128256, 4096), "odd": (1001, 208)}
sizes = pytest.mark.parametrize("size", SIZES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def case(size: str, dtype: torch.dtype, rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary, hidden = SIZES[size]
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, hidden, generator=g, device="cuda", dtype=dtype)
    return x, torch.randn(vocabulary, hidden, generator=g, device="cuda", dtype=dtype) * (3 / hidden**0.5)


def noise_for(rows: int, temperature: float = 0.8) -> Noise:
    g = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g).cuda()
    positions = torch.randint(0, 5000, (rows,), generator=g, dtype=torch.int32).cuda()
    temperatures = torch.full((rows,), temperature, device="cuda")
    return Noise(seeds, torch.arange(rows, device="cuda") % 3, positions, temperatures)


def part(noise: Noise, rows: int) -> Noise:
    return Noise(*(tensor[:rows] for tensor in noise.tensors), noise.stream)


def logits_of(x: torch.Tensor, weight: torch.Tensor, bm: int | None = None) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, device="cuda")
    head._launch(x, weight, weight.shape[0], None, logits=out, bm=bm)
    return out


@sizes
@dtypes
def test_logits_have_the_same_bits_for_any_rows_and_tile(size: str, dtype: torch.dtype) -> None:
    x, weight = case(size, dtype)
    whole = torch.full((256, weight.shape[0]), torch.nan, device="cuda")
    lm_head_logits(x, weight, whole)
    exact = lm_head_reference(x[:4].double(), weight.double())
    assert (whole[:4] - exact).abs().max() < 1e-4
    for rows in (1, 2, 5, 16, 17, 32, 33, 64):
        for bm in (16, 32, 64):
            assert torch.equal(logits_of(x[:rows], weight, bm), whole[:rows]), (rows, bm)
    assert torch.equal(logits_of(x[37:38], weight), whole[37:38])


@sizes
@dtypes
def test_scores_have_the_same_bits_for_any_rows_and_tile(size: str, dtype: torch.dtype) -> None:
    x, weight = case(size, dtype, 64)
    noise = noise_for(64)
    whole = Scores.empty(64, weight.shape[0], 4, "cuda")
    lm_head_scores(x, weight, whole, noise=noise, softcap=30.0)
    assert whole.int_scores is not None
    for rows, bm in ((1, 16), (1, 64), (16, 16), (17, 32), (40, 16), (64, 32)):
        some = Scores.empty(rows, weight.shape[0], 4, "cuda")
        head._launch(x[:rows], weight, weight.shape[0], some, softcap=30.0, noise=part(noise, rows), bm=bm)
        assert some.int_scores is not None
        assert torch.equal(some.tile_keys, whole.tile_keys[:rows]), (rows, bm)
        assert torch.equal(some.int_scores, whole.int_scores[:rows]), (rows, bm)


@sizes
def test_the_greedy_choice_is_the_first_of_the_largest_logits(size: str) -> None:
    x, weight = case(size, torch.bfloat16, 64)
    logits = logits_of(x, weight)
    for width in (1, 20):
        scores, out = Scores.empty(64, weight.shape[0], width, "cuda"), torch.empty(64, width, device="cuda").long()
        lm_head_scores(x, weight, scores)
        topk_tokens(scores, out)
        assert torch.equal(out, ranked(logits, width))


@sizes
@pytest.mark.parametrize("width", [1, 7, 20, 64])
def test_drawn_tokens_match_the_reference(size: str, width: int) -> None:
    x, weight = case(size, torch.bfloat16, 48)
    noise = noise_for(48)
    tokens = torch.arange(weight.shape[0], device="cuda")
    scores, out = Scores.empty(48, weight.shape[0], width, "cuda"), torch.empty(48, width, device="cuda").long()
    lm_head_scores(x, weight, scores, noise=noise)
    topk_tokens(scores, out)
    expected = ranked(perturbed_reference(logits_of(x, weight), tokens, noise), width)
    # The logarithms of the two may differ in their last bit, which swaps nearly equal neighbours at times.
    assert (out == expected).float().mean() > 0.995


@pytest.mark.parametrize("gather", [False, True], ids=["copy", "gather"])
def test_a_trimmed_head_draws_the_tokens_of_the_reference(gather: bool) -> None:
    x, weight = case("smol", torch.bfloat16, 16)
    rows = torch.randperm(49152, device="cuda")[:16000]
    rows[15872:] = 10**9
    count = torch.tensor([15872], dtype=torch.int32, device="cuda")
    own = torch.full((16000, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    own[:15872] = weight[rows[:15872]]
    noise = noise_for(16)
    scores, out = Scores.empty(16, 16000, 20, "cuda"), torch.empty(16, 20, device="cuda").long()
    lm_head_scores(x, weight if gather else own, scores, token_ids=rows, gather=gather, count=count, noise=noise)
    topk_tokens(scores, out, token_ids=rows)
    offered = rows[:15872]
    values = perturbed_reference(logits_of(x, weight)[:, offered], offered, noise)
    in_order = offered.sort().indices
    expected = offered[in_order][ranked(values[:, in_order], 20)]
    assert (out == expected).float().mean() > 0.995


TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 50},
    "top_k_and_top_p": {"top_k": 50, "top_p": 0.9},
    "top_k_200_min_p": {"top_k": 200, "min_p": 0.05},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "top_k_1000": {"top_k": 1000, "top_p": 0.97},
}


def truncation_of(settings: dict[str, Any], rows: int) -> Truncation:
    top_k = torch.full((rows,), settings.get("top_k", 0), dtype=torch.int32, device="cuda")
    shares = (
        torch.full((rows,), settings.get(name, off), device="cuda") for name, off in (("top_p", 1.0), ("min_p", 0.0))
    )
    return Truncation(top_k, *shares, small_top_k=1 <= settings.get("top_k", 0) <= 64)


@pytest.mark.parametrize("vocabulary", [49152, 128256, 1001])
@pytest.mark.parametrize("name", TRUNCATIONS)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_the_truncated_choice_is_that_of_sampling(vocabulary: int, name: str, spread: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, vocabulary, device="cuda") * spread
    noise, out = noise_for(64), torch.full((64,), -7, device="cuda")
    sample(
        logits,
        out,
        SampleWorkspace.empty(64, vocabulary, "cuda"),
        noise=noise,
        truncation=truncation_of(TRUNCATIONS[name], 64),
    )
    wanted = [SamplingParams(do_sample=True, temperature=0.8, **TRUNCATIONS[name])] * len(logits)
    key = NoiseKey(noise.seeds, noise.sample_indices, noise.positions.long())
    expected = sampling.choose(warp_logits(logits, wanted), wanted, key)
    assert (out == expected).float().mean() > 0.98  # a mass at the very limit, or a last bit of the noise
    for rows in (1, 17):
        alone = torch.full((rows,), -7, device="cuda")
        work = SampleWorkspace.empty(rows, vocabulary, "cuda")
        sample(logits[:rows], alone, work, noise=part(noise, rows), truncation=truncation_of(TRUNCATIONS[name], rows))
        assert torch.equal(alone, out[:rows])


def test_ties_at_the_cutoff_go_to_the_lower_ids() -> None:
    logits = torch.randint(0, 3, (16, 49152), device="cuda").float()
    for name in ("top_k", "top_k_1000"):
        noise, out = noise_for(16), torch.full((16,), -7, device="cuda")
        truncation = truncation_of({"top_k": TRUNCATIONS[name]["top_k"]}, 16)
        sample(logits, out, SampleWorkspace.empty(16, 49152, "cuda"), noise=noise, truncation=truncation)
        wanted = [SamplingParams(do_sample=True, temperature=0.8, top_k=TRUNCATIONS[name]["top_k"])] * len(logits)
        key = NoiseKey(noise.seeds, noise.sample_indices, noise.positions.long())
        assert torch.equal(out, sampling.choose(warp_logits(logits, wanted), wanted, key))


def test_a_captured_graph_serves_other_rows_temperatures_and_truncations() -> None:
    x, weight = case("smol", torch.bfloat16, 16)
    noise, truncation, work = (
        noise_for(16),
        truncation_of(TRUNCATIONS["top_k_and_top_p"], 16),
        SampleWorkspace.empty(16, 49152, "cuda"),
    )
    one, best, out = Scores.empty(16, 49152, 1, "cuda"), torch.zeros(16, 1, device="cuda").long(), noise.seeds.clone()

    def step() -> None:
        lm_head_scores(x, weight, one, noise=noise)
        topk_tokens(one, best)
        lm_head_scores(x, weight, work.scores, noise=noise, truncation=truncation)
        sample_scored(49152, out, work, noise=noise, truncation=truncation)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # neighbours may overlap
            step()
    for number in range(5):
        x.normal_()
        noise.positions.add_(1)
        noise.temperature.fill_(0.5 + number / 4)
        truncation.top_k.fill_(1 + 12 * number)
        truncation.top_p.fill_(0.95 - number / 10)
        best.fill_(-7)
        out.fill_(-7)
        graph.replay()
        replayed = best.clone(), out.clone()
        step()
        assert torch.equal(best, replayed[0]) and torch.equal(out, replayed[1])
        logits = logits_of(x, weight)
        apart = torch.full((16,), -7, device="cuda")
        sample(logits, apart, work, noise=noise, truncation=truncation)
        assert torch.equal(apart, out)
        sample(logits, apart, work, noise=noise)
        assert torch.equal(apart, best[:, 0])


@pytest.mark.parametrize("vocabulary", [49152, 1001])
@pytest.mark.parametrize("plan", ["none", "tree:4,2"])
def test_sequences_with_any_parameters_draw_the_same_alone_and_together(vocabulary: int, plan: str) -> None:
    with torch.device("cuda"):
        torch.manual_seed(0)
        weight = torch.randn(vocabulary, 576).half() / 8
        for _ in range(5):
            batch = Batch.random(Plan.parse(plan), 8, vocabulary, 576)
            tokens, keys = drawn(batch, weight, batch.noise, batch.truncation, batch.processing)
            for part in [*([sequence] for sequence in range(8)), [5, 2, 7], [7, 6, 5, 4, 3, 2, 1, 0]]:
                own_tokens, own_keys = drawn_with_own_features(batch.take(part), weight)
                assert torch.equal(own_keys, keys[batch.rows_of(part)])
                assert torch.equal(own_tokens, tokens[batch.rows_of(part)])
