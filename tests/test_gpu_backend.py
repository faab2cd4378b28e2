"""The CUDA backend on a GPU: the same bits for every plan and batch in 16 bit; memory and failures."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from bench.synthetic import synthetic
from selfspec import Engine, Rules
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.kernel_prefill import PromptPart
from selfspec.cache.kv_cache import CacheFull, KVPages, flat_slot
from selfspec.models.decoder import Decoder
from selfspec.profiles.profile import Spread
from selfspec.profiles.router import prompt_embeddings
from selfspec.speculation.exit import Exit
from tests.profiles import choice_of, profile_of, random_exit
from tests.tiny import FAMILIES, tiny_model
from tests.tiny_tokenizer import JSON_TOKENS, json_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLANS = [
    "chain:4",
    "tree:3,2,1",
    "nodes:0.0,0.2,1.0,1.1,2.0,4.1",
    "tree:4,2+copy:15",
    "copy:8",
    "beam:3,8,6",
    "beam:16,4+copy:8",
]
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 11}
CUT: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 11}
ANY_CUT: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 0.9, "min_p": 0.01, "seed": 11}
PENALISED: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.2}
EVERY = {"greedy": GREEDY, "sampled": SAMPLED, "cut": CUT, "any_cut": ANY_CUT, "penalised": PENALISED}


def endless(family: str) -> Any:
    """A tiny model in bfloat16 without an end token."""
    model = tiny_model(family, dtype=torch.bfloat16, head_dim=64, hidden_size=64).cuda()
    model.generation_config.eos_token_id = None
    return model


def graphs_of(engine: Engine) -> Graphs:
    assert engine._graphs is not None
    return engine._graphs


@pytest.fixture(scope="module")
def small() -> Decoder:
    """The shape of a small model; the exit after 2 layers is often right."""
    return synthetic("smollm2-135m", "cuda", torch.bfloat16, exit_layer=2, damping=0.2)


def prompts(count: int, longest: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of different lengths."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(3, 40000, (count, longest), generator=generator)
    lengths = torch.randint(5, longest + 1, (count,), generator=generator)
    lengths[0] = longest
    mask = (torch.arange(longest)[None] >= longest - lengths[:, None]).long()
    return (ids * mask).cuda(), mask.cuda()


def generate(engine: Engine, batch: int, plan: str, count: int, longest: int = 150, **settings: Any) -> Any:
    ids, mask = prompts(batch, longest)
    speculation = {"speculative_decoding": "force", "plan": plan, "exit_layer": 2} if plan != "none" else {}
    settings = {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True, **speculation, **settings}
    return engine.generate(ids, mask, max_new_tokens=count, **settings)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("batch", [1, 16])
def test_every_plan_gives_the_tokens_of_plain_decoding(small: Decoder, batch: int, name: str) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    plain = generate(engine, batch, "none", 64, **EVERY[name])
    accepted = 0
    for plan in PLANS:
        drafted = generate(engine, batch, plan, 64, **EVERY[name])
        assert torch.equal(drafted.sequences, plain.sequences), plan
        accepted += sum(stats.accepted for stats in drafted.stats)
    assert accepted > 0


@pytest.mark.parametrize("plan", ["none", "tree:3,2,1"])
def test_concurrent_requests_get_the_tokens_that_they_get_alone(small: Decoder, plan: str) -> None:
    """From 12 threads, with different sampling parameters and lengths, some without drafts: batches grow and shrink
    with a step in flight. The second time all steps are captured."""
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    kinds = [*EVERY.values(), {**GREEDY, "speculative_decoding": False}, {**SAMPLED, "frequency_penalty": 0.3}]
    requests = [(5 + 37 * place % 140, 4 + 7 * place % 50, kinds[place % len(kinds)]) for place in range(24)]

    def run(request: tuple[int, int, dict[str, Any]], plan: str) -> list[int]:
        longest, count, settings = request
        return generate(engine, 1, plan, count, longest=longest, **settings).sequences[0].tolist()

    alone = [run(request, "none") for request in requests]
    for _ in range(2):
        with ThreadPoolExecutor(12) as threads:
            together = list(threads.map(lambda request: run(request, plan), requests))
        assert together == alone
    assert engine.cache.free_pages == engine.cache.num_pages - 1  # idle slots keep a page to write to


def test_a_prompts_kv_is_the_same_alone_and_together_and_nearly_that_of_pytorch(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    exit = random_exit(small, 2)
    generator = torch.Generator().manual_seed(3)
    groups = [
        [torch.randint(3, 40000, (n,), generator=generator).tolist() for n in lengths]
        for lengths in ((1, 5, 64, 65, 100, 200, 256), (5, 257, 200, 300), (1000,))
    ]
    shared = [left for group in groups for left in _left_by(engine, exit, group)]
    for text, together in zip(chain.from_iterable(groups), shared, strict=True):
        (alone,) = _left_by(engine, exit, [text])
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True)), len(text)
        of_pytorch = _left_by_pytorch(engine, exit, text)
        for ours, theirs in zip(alone, of_pytorch, strict=True):
            error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
            assert error < 0.03, (len(text), error)


def _left_by(engine: Engine, exit: Exit, texts: list[list[int]]) -> list[list[torch.Tensor]]:
    """KV, last feature and prompt end of each of some prompts, prefilled together by the kernels."""
    cache = engine.cache
    sequences = [cache.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        cache.reserve(sequence, len(text))
    with torch.inference_mode():
        prefill, replay = graphs_of(engine).kernel_prefill(exit, list(map(len, texts)))
        prefill.load([PromptPart(text, sequence.pages) for text, sequence in zip(texts, sequences, strict=True)])
        replay()
        found = [
            _in_cache(engine, sequence, len(text), feature, end)
            for sequence, text, feature, end in zip(
                sequences, texts, prefill.features, prefill.prompt_end, strict=False
            )
        ]
    for sequence in sequences:
        cache.close(sequence)
    return found


def _left_by_pytorch(engine: Engine, exit: Exit, text: list[int]) -> list[torch.Tensor]:
    sequence = engine.cache.open()
    engine.cache.reserve(sequence, len(text))
    with torch.inference_mode():
        prefill, replay = graphs_of(engine).torch_prefill(exit, len(text), len(text))
        prefill.load(text, 0, sequence.pages)
        prefill.load_previous(None)
        replay()
        found = _in_cache(engine, sequence, len(text), prefill.feature[0, 0], prefill.prompt_end)
    engine.cache.close(sequence)
    return found


def _in_cache(
    engine: Engine, sequence: KVPages, count: int, feature: torch.Tensor, end: torch.Tensor
) -> list[torch.Tensor]:
    slots = [flat_slot(sequence, slot) for slot in range(count)]
    cached = [t.flatten(1, 2)[:, slots].clone() for t in (engine.cache.keys, engine.cache.values)]
    return [*cached, feature.clone(), end[:count].clone()]


@pytest.mark.parametrize("name", ["greedy", "any_cut"])
def test_log_probabilities_have_the_same_bits_for_every_plan_and_batch(small: Decoder, name: str) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    wanted: dict[str, Any] = {**EVERY[name], "logprobs": 5, "prompt_logprobs": 1}
    plain, without = generate(engine, 4, "none", 32, **wanted), generate(engine, 4, "none", 32, **EVERY[name])
    assert torch.equal(plain.sequences, without.sequences)
    for plan in PLANS:
        drafted = generate(engine, 4, plan, 32, **wanted)
        assert drafted.logprobs == plain.logprobs and drafted.prompt_logprobs == plain.prompt_logprobs, plan
    ids, mask = prompts(4)
    alone = engine.generate(ids[:1], mask[:1], max_new_tokens=32, return_dict_in_generate=True, **wanted)
    assert alone.prompt_logprobs == plain.prompt_logprobs[:1] and alone.logprobs == plain.logprobs[:1]


def test_prompt_log_probabilities_are_nearly_those_of_pytorch(small: Decoder) -> None:
    """Of prompts that share a pass, and of one that runs in captured chunks."""
    wanted: dict[str, Any] = {"prompt_logprobs": 0, **GREEDY}
    engines = [Engine(small, kernels=kernels, max_length=2048, max_batch=4) for kernels in (True, False)]
    for batch, longest in ((3, 150), (1, 1500)):
        found = [generate(engine, batch, "none", 1, longest, **wanted).prompt_logprobs for engine in engines]
        ours, theirs = (torch.tensor([token.logprob for prompt in every for token in prompt]) for every in found)
        assert len(ours) >= longest - 1
        assert ((ours - theirs) / theirs).abs().mean() < 0.004  # bfloat16; values are in the hundreds


def test_warm_up_captures_all_steps_of_usual_requests(tmp_path: Path) -> None:
    engine = governed(endless("llama"), tmp_path)
    engine.warmup(3)
    held = set(graphs_of(engine).captured.entries)
    for count, longest in ((3, 100), (1, 250), (1, 400)):
        ids, mask = prompts(count, longest)
        engine.generate(ids % 90 + 3, mask, max_new_tokens=8, pad_token_id=0, **GREEDY)
        assert set(graphs_of(engine).captured.entries) == held


def test_prompt_embeddings_are_nearly_the_routers(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(3, 40000, (n,), generator=generator).tolist() for n in (1, 31, 64, 130, 256, 300, 20, 90)]
    found, expected = graphs_of(engine).embed_prompts(texts, 3).read(), prompt_embeddings(small, engine.cache, texts, 3)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.999


@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_of_a_trained_exit_gives_the_tokens_of_plain_decoding(family: str) -> None:
    model = endless(family)
    engine = Engine.from_model(model, kernels=True)
    engine.drafters.exits = {2: random_exit(engine.model, 2)}
    ids = torch.randint(3, 100, (3, 90), generator=torch.Generator().manual_seed(1)).cuda()
    settings: dict[str, Any] = {"max_new_tokens": 60, "pad_token_id": 0, **GREEDY}
    plain = engine.generate(ids, **settings)
    for plan in PLANS:
        drafted = engine.generate(ids, speculative_decoding="force", plan=plan, exit_layer=2, **settings)
        assert torch.equal(drafted, plain), plan


def governed(model: Any, folder: Path) -> Engine:
    """An engine whose profile routes and scores prompts and leaves plans to a governor."""
    decoder = Engine.from_model(model, kernels=False).model
    generator = torch.Generator().manual_seed(5)
    ranks = {"0": [[0.6, 0.1, 0.05], [0.6, 0.1], [0.5]], "1": [[0.5, 0.1], [0.4]]}
    domains = {}
    for name in ("one", "two"):
        centroid, direction = torch.randn(2, decoder.config.hidden_size, generator=generator).tolist()
        agreement, distance = Spread(mean=0.5, deviation=0.1), Spread(mean=0.9, deviation=0.1)
        domains[name] = choice_of(
            2, "chain:2", ranks=ranks, prompt_agreement=agreement, distance=distance, centroid=centroid,
            direction=direction, offset=0.0,
        )  # fmt: skip
    profile = profile_of(decoder, domains, router_layer=1).save(folder, [random_exit(decoder, 2)])
    return Engine.from_model(model, profile=profile)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_routed_and_governed_requests_get_the_tokens_of_plain_decoding(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """With rules under which the governor changes the plan often."""
    model = endless("llama")
    engine = governed(model, tmp_path)
    assert engine.has_kernels
    ids = torch.randint(3, 100, (3, 90), generator=torch.Generator().manual_seed(1)).cuda()
    options: dict[str, Any] = {"max_new_tokens": 120, "pad_token_id": 0, "return_dict_in_generate": True, **settings}
    plain = engine.generate(ids, speculative_decoding=False, **options)
    rules = Rules(max_step=math.inf, budget=50, budget_refill=1)
    drafted = engine.generate(ids, rules=rules, **options)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert any(stats.drafted for stats in drafted.stats)
    prompt = ids[0].tolist()
    request = engine.build_request(prompt, max_new_tokens=60, rules=rules, **settings)
    engine.scheduler.submit(request)
    engine.scheduler.wait(request)
    embeddings = engine.scheduler.call(lambda: engine.drafters.embed([prompt]).read())
    assert engine.profile is not None and request.drafter is not None and request.policy is not None
    domain = engine.profile.route(embeddings)
    found = engine.drafters.candidates(domain, engine.profile.choice(domain), request.policy)
    assert request.drafter.candidates is found, "the domain was not found behind the first steps"


def test_tokens_are_nearly_always_those_of_pytorch(small: Decoder) -> None:
    """Rounding differs, so near-ties may be decided differently; most sequences of 8 tokens are equal."""
    ours = generate(Engine(small, kernels=True, max_length=512), 16, "none", 8, **GREEDY).sequences
    theirs = generate(Engine(small, kernels=False, max_length=512), 16, "none", 8, **GREEDY).sequences
    assert (ours == theirs).all(1).sum() >= 10


def test_plans_give_the_same_tokens_across_page_and_attention_range_boundaries(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=2048, max_batch=1)
    for longest in (900, 1100):  # prefilled as a short prompt, and in chunks
        plain = generate(engine, 1, "none", 400, longest=longest, **GREEDY)
        assert torch.equal(generate(engine, 1, "tree:4,2", 400, longest=longest, **GREEDY).sequences, plain.sequences)


def test_callables_get_the_same_tokens_with_every_plan(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=4)
    settings = {**SAMPLED, "repetition_penalty": 1.2, "logits_processor": [lambda ids, logits: logits * 0.9]}
    plain = generate(engine, 2, "none", 24, **settings)
    assert torch.equal(generate(engine, 2, "tree:3,2", 24, **settings).sequences, plain.sequences)


def test_drafting_needs_at_most_a_fifth_of_the_weights_in_memory(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=1)
    generate(engine, 1, "none", 16, **GREEDY)
    torch.cuda.reset_peak_memory_stats()
    plain = torch.cuda.max_memory_allocated()
    generate(engine, 1, "tree:8,3", 16, **GREEDY)
    assert torch.cuda.max_memory_allocated() - plain < 0.2 * small.nbytes
    assert engine.memory()["graphs"] < 0.2 * small.nbytes


def test_out_of_memory_while_capturing_fails_the_request_and_not_the_engine(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=4)
    expected = generate(engine, 1, "none", 16, **GREEDY).sequences
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        with pytest.raises(CacheFull, match="out of memory"):
            generate(engine, 4, "tree:8,3", 16, **CUT)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.cache.free_pages == engine.cache.num_pages - 1
    assert torch.equal(generate(engine, 1, "none", 16, **GREEDY).sequences, expected)


def test_structured_output_is_valid_and_every_plan_gives_the_tokens_of_plain_decoding() -> None:
    """Also beside sequences without a grammar, which get the tokens that they get alone."""
    model = tiny_model("llama", dtype=torch.bfloat16, head_dim=64, hidden_size=64, vocab_size=len(JSON_TOKENS)).cuda()
    engine = Engine.from_model(model, json_tokenizer(), profile=None, max_batch=8)
    properties = {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "b": {"enum": ["x", "the"]},
        "c": {"type": "boolean"},
    }
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    schema |= {"x-guidance": {"whitespace_flexible": False}}
    structured = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}

    def run(plan: str, count: int) -> list[list[int]]:
        drafts = {"plan": plan, "exit_layer": 2, "speculative_decoding": "force"}
        requests = [
            engine.build_request([1, 30 + index], max_new_tokens=60, **settings, **drafts, **own)
            for index, settings in enumerate(EVERY.values())
            for own in (structured, {})
        ][:count]
        for request in requests:
            engine.scheduler.submit(request)
        for request in requests:
            engine.scheduler.wait(request)
        return [request.sequences[0].tokens for request in requests]

    plain = run("none", 8)
    for text in (engine.tokenizer.decode(tokens[2:], skip_special_tokens=True) for tokens in plain[::2]):
        jsonschema.validate(json.loads(text), schema)
    for plan in PLANS:
        assert run(plan, 8) == plain
        assert run(plan, 1) == plain[:1]
    assert engine.metrics().accept_rate > 0
