"""Routing: embeddings of prompts, the fitted router, and the domains that requests get."""

from __future__ import annotations

from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from selfspec import Engine
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.models.decoder import Decoder
from selfspec.models.loading import adopt
from selfspec.profiles.profile import Spread
from selfspec.profiles.router import Router, distances, normalised, prompt_embedding
from tests.profiles import choice_of, profile_of
from tests.scripted import endless, left_padded, random_prompt
from tests.stepping import enqueue
from tests.tiny import FAMILIES, tiny_model

LAYER = 1
KINDS = {"low": range(3, 11), "middle": range(40, 48), "high": range(90, 98)}  # the token ids of a domain's prompts
EXITS = {"low": 1, "middle": 2, "high": 3}  # so that the statistics show the domain of a request

families = pytest.mark.parametrize("family", FAMILIES)


def prompt_of(kind: str, seed: int, length: int = 30) -> list[int]:
    """A prompt of a domain's tokens."""
    ids, generator = KINDS[kind], torch.Generator().manual_seed(seed)
    return torch.randint(ids.start, ids.stop, (length,), generator=generator).tolist()


@cache
def model_of(family: str) -> Decoder:
    return adopt(endless(tiny_model(family)))


def new_cache(model: Decoder) -> Cache:
    return Cache(model.config, model.device, model.dtype, num_pages=6)


def embedding_of(model: Decoder, prompt: list[int]) -> torch.Tensor:
    return prompt_embedding(model, new_cache(model), prompt, LAYER)


@cache
def router_of(family: str) -> Router:
    """Fitted to twelve prompts of each domain."""
    model = model_of(family)
    return Router.fit(
        [torch.stack([embedding_of(model, prompt_of(kind, seed)) for seed in range(12)]) for kind in KINDS]
    )


def entries(router: Router, index: int) -> dict[str, Any]:
    """The router's entries in a profile's domain."""
    centroid, direction = router.centroids[index].tolist(), router.directions[index].tolist()
    return {"centroid": centroid, "direction": direction, "offset": float(router.offsets[index])}


@cache
def engine_of(family: str = "llama", routes: bool = True) -> Engine:
    """An engine whose profile has a different exit for each domain."""
    routing = [entries(router_of(family), index) if routes else {} for index in range(len(KINDS))]
    domains = {kind: choice_of(EXITS[kind], "chain:2", **own) for kind, own in zip(KINDS, routing, strict=True)}
    profile = profile_of(model_of(family), domains, router_layer=LAYER)
    return Engine.from_model(endless(tiny_model(family)), profile=profile)


def domain_of(engine: Engine, prompts: list[list[int]], **options: Any) -> str:
    """The domain that a request gets."""
    ids, mask = left_padded(prompts)
    out = engine.generate(ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True, **options)
    (layer,) = {stats.exit_layer for stats in out.stats}
    return next(kind for kind, exit_layer in EXITS.items() if exit_layer == layer)


# Marks


@pytest.mark.parametrize("layer", [1, 2])
@families
def test_an_embedding_is_the_mean_of_the_normed_states_of_a_prompt(family: str, layer: int) -> None:
    prompt, hf, model = random_prompt(20), tiny_model(family), model_of(family)
    with torch.no_grad():
        states = hf(torch.tensor([prompt]), output_hidden_states=True).hidden_states[layer][0]
    got = prompt_embedding(model, new_cache(model), prompt, layer)
    assert (got.dtype, got.device.type, got.shape) == (torch.float32, "cpu", (32,))
    normed = states / states.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(got, normed.mean(0).float(), atol=1e-4, rtol=0)


def test_the_embedding_of_a_long_prompt_is_of_its_last_256_tokens() -> None:
    model, prompt = model_of("llama"), random_prompt(300)
    assert torch.equal(embedding_of(model, prompt), embedding_of(model, prompt[-256:]))
    assert not torch.equal(embedding_of(model, prompt), embedding_of(model, prompt[-255:]))


@pytest.mark.parametrize("length", [1, PAGE_SIZE, PAGE_SIZE + 1, 300])
def test_an_embedding_returns_its_pages(length: int) -> None:
    model, prompt = model_of("llama"), random_prompt(length)
    cache = new_cache(model)
    prompt_embedding(model, cache, prompt, LAYER)
    again = [prompt_embedding(model, cache, prompt, LAYER) for _ in range(3)]
    assert cache.free_pages == cache.num_pages
    assert all(torch.equal(other, embedding_of(model, prompt)) for other in again), "each is independent"


def test_an_embedding_does_not_change_running_sequences() -> None:
    engine = engine_of()
    requests = []
    for interrupted in (True, False):
        requests.append(enqueue(engine, [random_prompt(70)], 2, "tree:2,1", max_new_tokens=12))
        while engine.scheduler.step():
            if interrupted:
                prompt_embedding(engine.model, engine.cache, random_prompt(90), LAYER)
    first, second = (request.sequences[0].tokens for request in requests)
    assert first == second
    assert engine.cache.free_pages == engine.cache.num_pages


def test_an_embedding_that_fails_returns_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = model_of("llama"), new_cache(model_of("llama"))
    prompt_embedding(model, cache, random_prompt(70), LAYER)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Decoder, "run", fails)
    with pytest.raises(ZeroDivisionError):
        prompt_embedding(model, cache, random_prompt(70), LAYER)
    assert cache.free_pages == cache.num_pages > 0


# Scores


def cloud(centre: tuple[float, float], scale: tuple[float, float], seed: int) -> torch.Tensor:
    """Marks of a domain with a larger variance along one coordinate."""
    noise = torch.randn(2000, 2, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(centre) + torch.tensor(scale) * noise


def test_coordinates_with_a_smaller_variance_count_more() -> None:
    left, right = cloud((-1.0, 0.0), (3.0, 0.3), 0), cloud((0.0, 1.0), (3.0, 0.3), 1)
    router = Router.fit([left, right])
    assert router.route(torch.tensor([[-3.0, 0.9]])) == 1, "as the second coordinate says"
    assert router.route(torch.tensor([[3.0, 0.1]])) == 0


def test_differences_of_scores_are_log_odds() -> None:
    clouds = [cloud((-1.0, 0.0), (1.0, 0.5), 0), cloud((1.0, 0.5), (1.0, 0.5), 1)]
    embeddings = torch.tensor([[0.0, 0.0], [1.5, -0.5], [-2.0, 0.7]])
    gaps = torch.from_numpy(np.diff(Router.fit(clouds).scores(embeddings)))[:, 0]
    scale = torch.tensor([1.0, 0.5])
    distances = [(((embeddings - torch.tensor(c)) / scale) ** 2).sum(1) for c in ((-1.0, 0.0), (1.0, 0.5))]
    torch.testing.assert_close(gaps, 0.5 * (distances[0] - distances[1]), atol=0.2, rtol=0.1)


def test_several_prompts_get_the_domain_that_is_most_likely_for_all_together() -> None:
    router = Router.fit([cloud((1.0, 0.0), (1.0, 1.0), 0), cloud((0.0, 1.0), (1.0, 1.0), 1)])
    right, up, rather_up = [1.0, 0.0], [0.0, 1.0], [0.4, 0.6]
    assert router.route(torch.tensor([right])) == 0
    assert router.route(torch.tensor([right, up, rather_up])) == 1
    assert router.route(torch.tensor([right, up, right])) == 0


def test_a_router_can_be_fitted_to_fewer_prompts_than_coordinates() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = [torch.randn(5, 64, generator=generator) + shift for shift in (0.0, 1.0)]
    router = Router.fit(embeddings)
    assert [router.route(of_domain) for of_domain in embeddings] == [0, 1]
    assert np.isfinite(router.scores(embeddings[0])).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_domain_of_several_prompts_maximizes_the_product_of_their_probabilities(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    router = Router(*(torch.randn(*shape, generator=generator) for shape in ((4, 8), (4, 8), (4,))))
    embeddings = torch.randn(3, 8, generator=generator)
    scores = embeddings @ router.directions.T + router.offsets
    torch.testing.assert_close(torch.from_numpy(router.scores(embeddings)), scores)
    assert router.route(embeddings) == scores.softmax(-1).prod(0).argmax()


# Distances


def test_distances_do_not_depend_on_lengths() -> None:
    embeddings, centroids = torch.randn(3, 8), torch.randn(2, 8)
    expected = [
        [1 - F.cosine_similarity(of_prompt, centroid, dim=0) for centroid in centroids] for of_prompt in embeddings
    ]
    torch.testing.assert_close(torch.from_numpy(distances(embeddings, normalised(centroids))), torch.tensor(expected))
    assert distances(torch.zeros(1, 2), normalised(torch.ones(1, 2))).tolist() == [[1.0]], (
        "no direction is half-way to any"
    )


def test_an_unfamiliar_prompt_exceeds_the_distances_of_every_domain_that_has_them() -> None:
    routed = {"direction": [1.0, 0.0], "ranks": {}}
    domains = {
        "right": choice_of(1, "chain:1", centroid=[2.0, 0.0], distance=Spread(mean=0.5, deviation=0.25), **routed),
        "up": choice_of(1, "chain:1", centroid=[0.0, 3.0], distance=Spread(mean=0.0, deviation=0.5), **routed),
        "left": choice_of(1, "chain:1", centroid=[-1.0, 0.0], **routed),
    }
    profile = profile_of(model_of("llama"), domains)
    embeddings = torch.tensor([[5.0, 0.0], [0.0, 1.0], [0.0, -1.0], [-1.0, -1.0]])  # 0, 1, 1 and 1.7 from the right
    assert profile.are_unfamiliar(embeddings, 2.0) == [False, False, False, True], "1 from the right equals the limit"
    assert profile.are_unfamiliar(embeddings, 1.0) == [False, False, True, True]
    assert profile.are_unfamiliar(embeddings, 10.0) == [False] * 4
    unknown = {name: choice.model_copy(update={"distance": None}) for name, choice in domains.items()}
    assert profile_of(model_of("llama"), unknown).are_unfamiliar(embeddings, 0.0) == [False] * 4


# Requests


@pytest.mark.parametrize("kind", KINDS)
@families
def test_other_prompts_of_a_domain_are_routed_to_it(family: str, kind: str) -> None:
    profile, model = engine_of(family).profile, model_of(family)
    assert profile is not None
    for seed in range(100, 110):
        for length in (30, 90):
            assert profile.route(embedding_of(model, prompt_of(kind, seed, length))[None]) == kind, f"{seed}, {length}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_routes_its_requests(kind: str) -> None:
    assert domain_of(engine_of(), [prompt_of(kind, 100)]) == kind
    assert domain_of(engine_of(), [prompt_of(kind, 100)], domain="auto", do_sample=True, seed=1) == kind


def test_routing_is_deterministic() -> None:
    model, prompt = model_of("llama"), random_prompt(40)
    assert torch.equal(embedding_of(model, prompt), embedding_of(model, prompt))
    assert len({domain_of(engine_of(), [prompt]) for _ in range(4)}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_routed_by_most_of_its_prompts(kind: str) -> None:
    other = next(name for name in KINDS if name != kind)
    batch = [prompt_of(kind, 100), prompt_of(other, 101), prompt_of(kind, 102, length=45)]
    assert domain_of(engine_of(), batch) == kind


def test_routing_does_not_depend_on_order_or_padding() -> None:
    batch = [prompt_of("low", 100, 9), prompt_of("high", 101, 70), prompt_of("high", 102, 30)]
    assert {domain_of(engine_of(), list(order)) for order in permutations(batch)} == {"high"}


def test_embeddings_do_not_depend_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def spy(model: Decoder, cache: Cache, prompt: list[int], layer: int) -> torch.Tensor:
        seen.append(list(prompt))
        return prompt_embedding(model, cache, prompt, layer)

    monkeypatch.setattr("selfspec.profiles.router.prompt_embedding", spy)
    batch = [prompt_of("low", 100, 9), prompt_of("low", 101, 70)]
    domain_of(engine_of(), batch)
    assert seen == batch


def test_routing_does_not_change_any_token() -> None:
    batch = [prompt_of("low", 100, 9), prompt_of("high", 101, 70)]
    ids, mask = left_padded(batch)
    plain, *others = (
        engine_of().generate(ids, attention_mask=mask, max_new_tokens=8, **options).tolist()
        for options in ({"speculative_decoding": False}, {}, {"domain": "low"}, {"domain": "high"})
    )
    assert others == [plain] * 3
    assert engine_of().cache.free_pages == engine_of().cache.num_pages


# Where nothing needs to be looked at


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes computing an embedding fail."""

    def never(*_: Any) -> None:
        raise AssertionError("a prompt was looked at")

    monkeypatch.setattr("selfspec.profiles.router.prompt_embedding", never)


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_domain_needs_no_embedding(kind: str, blind: None) -> None:
    assert domain_of(engine_of(), [prompt_of("low", 100)], domain=kind) == kind


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_router_requests_get_the_first_domain_and_need_no_embedding(kind: str, blind: None) -> None:
    assert domain_of(engine_of(routes=False), [prompt_of(kind, 100)]) == "low"


def test_a_request_for_one_token_needs_no_embedding(blind: None) -> None:
    ids = torch.tensor([prompt_of("high", 100)])
    out: Any = engine_of().generate(ids, max_new_tokens=1, return_dict_in_generate=True)
    assert (out.stats[0].disabled_reason, out.stats[0].new_tokens) == ("goodput", 1)


def test_a_profile_with_one_domain_needs_no_embedding() -> None:
    profile = profile_of(model_of("llama"), {"a": choice_of(1, "chain:2", **entries(router_of("llama"), 0))})
    assert not profile.routes
    assert profile.route(torch.ones(1, 32)) == "a"


@pytest.mark.parametrize("change", [{"direction": [1.0] * 31}, {"direction": []}], ids=["short", "missing"])
def test_a_router_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    router = router_of("llama")
    domains = {
        "a": choice_of(1, "chain:2", **entries(router, 0) | change),
        "b": choice_of(2, "chain:2", **entries(router, 1)),
    }
    with pytest.raises(ValueError, match="router.*calibrate"):
        Engine.from_model(tiny_model("llama"), profile=profile_of(model_of("llama"), domains))


@pytest.mark.parametrize("layer", [0, 4, -1])
def test_a_router_layer_that_the_model_lacks_is_refused(layer: int) -> None:
    domains = {kind: choice_of(1, "chain:2", **entries(router_of("llama"), i)) for i, kind in enumerate(KINDS)}
    with pytest.raises(ValueError, match="router.*calibrate"):
        Engine.from_model(tiny_model("llama"), profile=profile_of(model_of("llama"), domains, router_layer=layer))


def test_requests_without_speculation_need_no_embedding(blind: None) -> None:
    ids = torch.tensor([prompt_of("low", 100)])
    out = engine_of().generate(ids, max_new_tokens=3, speculative_decoding=False, return_dict_in_generate=True)
    assert out.stats[0].disabled_reason == "request"


def test_a_routed_request_needs_an_embedding(blind: None) -> None:
    with pytest.raises(AssertionError, match="looked at"):
        domain_of(engine_of(), [prompt_of("low", 100)])


def test_a_saved_profile_routes_equally(tmp_path: Path) -> None:
    profile = engine_of().profile
    assert profile is not None
    again = Engine.from_model(endless(tiny_model("llama")), profile=profile.save(tmp_path, []))
    for kind in KINDS:
        assert domain_of(again, [prompt_of(kind, 100)]) == kind
