"""Sessions on the GPU's kernels and graphs: the same bits for every plan and batch, in 16 bit; memory and failures."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.synthetic import synthetic
from selfspec import Engine, Rules
from selfspec.cache.kv_cache import flat_slot
from selfspec.governor.governor import Watch
from selfspec.models.decoder import Decoder
from selfspec.profiles.profile import Spread
from selfspec.profiles.router import marks_of
from selfspec.request import read_settings, split_options
from selfspec.speculation.exit import Exit
from tests.profiles import choice_of, profile_of, random_exit
from tests.scripted import endless
from tests.test_device_session import LAYER
from tests.test_device_session import governed as governed_session
from tests.tiny import FAMILIES, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLANS = ["chain:1", "chain:4", "tree:3,2,1", "tree:8,3", "nodes:0.0,0.2,1.0,1.1,2.0,4.1"]
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 11}
CUT: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def small() -> Decoder:
    """The shape of a small model; the exit after layer 2 is often right."""
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


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED, CUT], ids=["greedy", "sampled", "cut"])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_every_plan_gives_the_tokens_of_plain_decoding(small: Decoder, batch: int, settings: dict[str, Any]) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    plain = generate(engine, batch, "none", 64, **settings)
    accepted = 0
    for plan in PLANS:
        drafted = generate(engine, batch, plan, 64, **settings)
        assert torch.equal(drafted.sequences, plain.sequences), plan
        accepted += sum(stats.accepted for stats in drafted.stats)
    assert accepted > 0


@pytest.mark.parametrize("plan", ["none", "tree:3,2,1"])
def test_rows_that_end_one_after_the_other_change_nothing_for_those_that_go_on(small: Decoder, plan: str) -> None:
    """Which move to fewer seats, with a cycle in flight; the second time by what was captured in the first."""
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    whole = generate(engine, 16, "none", 64, **GREEDY).sequences[:, 150:].tolist()
    for _ in range(2):
        assert ending_apart(engine, 16, plan) == [row[: 4 * place + 3] for place, row in enumerate(whole)]


def ending_apart(engine: Engine, batch: int, plan: str) -> list[list[int]]:
    """New tokens of rows of which each gets four more than the one before."""
    ids, mask = prompts(batch)
    texts = [row[seen > 0].tolist() for row, seen in zip(ids, mask, strict=True)]
    drafting = {"speculative_decoding": "force", "plan": plan, "exit_layer": 2}
    request, _ = split_options(drafting if plan != "none" else {"speculative_decoding": False})
    settings = read_settings(engine.generation_config, None, {"max_new_tokens": 64, "eos_token_id": None, **GREEDY})
    session = engine._session(texts, 150, settings, list(range(batch)), [], None, request)
    for place, row in enumerate(session.rows):
        row.max_length = len(row.prompt) + 4 * place + 3
    for _ in session.run():
        pass
    return [row.tokens[len(row.prompt) :] for row in session.rows]


def test_a_row_alone_draws_what_it_draws_in_a_batch(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    ids, mask = prompts(16)
    together = generate(engine, 16, "tree:3,2,1", 48, **GREEDY).sequences
    for row in (0, 7, 15):
        alone: Any = engine.generate(
            ids[row][mask[row] > 0][None], max_new_tokens=48, eos_token_id=None, pad_token_id=0, **GREEDY
        )
        assert torch.equal(alone[0, -48:], together[row, -48:])


def test_prompts_leave_the_same_bits_alone_and_together_and_nearly_pytorchs(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    machine, exit = engine._machine, random_exit(small, 2)
    assert machine is not None
    machine.take_memory()
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
    """What each of some prompts leaves in the cache, and what is known of its end, passed together by the kernels."""
    machine, cache = engine._machine, engine.cache
    assert machine is not None
    sequences = [cache.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        cache.reserve(sequence, len(text))
    with torch.inference_mode():
        prompts, replay = machine.prompts(exit, list(map(len, texts)))
        prompts.load([(text, sequence.pages) for text, sequence in zip(texts, sequences, strict=True)])
        replay()
        found = [
            _in_cache(engine, sequence, len(text), known, judged)
            for sequence, text, known, judged in zip(sequences, texts, prompts.known, prompts.judged, strict=False)
        ]
    for sequence in sequences:
        cache.close(sequence)
    return found


def _left_by_pytorch(engine: Engine, exit: Exit, text: list[int]) -> list[torch.Tensor]:
    machine, sequence = engine._machine, engine.cache.open()
    assert machine is not None
    engine.cache.reserve(sequence, len(text))
    with torch.inference_mode():
        prefill, replay = machine.prefill(exit, len(text), len(text))
        prefill.load(text, 0, sequence.pages)
        prefill.remember(None)
        replay()
        found = _in_cache(engine, sequence, len(text), prefill.known[0, 0], prefill.judged)
    engine.cache.close(sequence)
    return found


def _in_cache(
    engine: Engine, sequence: Any, count: int, known: torch.Tensor, judged: torch.Tensor
) -> list[torch.Tensor]:
    slots = [flat_slot(sequence, slot) for slot in range(count)]
    cached = [t.flatten(1, 2)[:, slots].clone() for t in (engine.cache.keys, engine.cache.values)]
    return [*cached, known.clone(), judged[:count].clone()]


def test_requests_on_different_streams_come_in_their_order(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    expected = generate(engine, 4, "tree:3,2,1", 32, **GREEDY).sequences
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 3]):
            found = generate(engine, 4, "tree:3,2,1", 32, **GREEDY).sequences
            assert torch.equal(found, expected), turn


def test_warming_up_leaves_nothing_of_usual_prompts_to_capture(tmp_path: Path) -> None:
    model = endless(tiny_model("llama", dtype=torch.bfloat16, head_dim=64, hidden_size=64).cuda())
    engine = governed(model, tmp_path)
    machine = engine._machine
    assert machine is not None
    engine.warmup(3)
    held = set(machine._passes)
    for count, longest in ((3, 100), (1, 250), (1, 400)):
        ids, mask = prompts(count, longest)
        engine.generate(ids % 90 + 3, mask, max_new_tokens=8, pad_token_id=0, **GREEDY)
        assert set(machine._passes) == held


def test_prompts_are_judged_alike_in_any_company_and_nearly_as_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: dict[int, float] = {}
    monkeypatch.setattr(Watch, "learn_prompt", lambda self, share, *_: shares.update({id(self): share}))
    model = endless(tiny_model("llama", dtype=torch.bfloat16, head_dim=64, hidden_size=64).cuda())
    generator = torch.Generator().manual_seed(6)
    texts = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in (300, 20, 90, 400)]
    found = []
    for kernels, batches in ((True, [texts, *([text] for text in texts)]), (False, [[text] for text in texts])):
        engine = Engine.from_model(model, kernels=kernels)
        engine.drafters.exits = {LAYER: random_exit(engine.model, LAYER)}
        if engine._machine is not None:
            engine._machine.short_prompt = 256  # longer ones are alone
        for batch in batches:
            shares.clear()
            session = governed_session(engine, batch, 4, {})
            for _ in session.run():
                pass
            found += [shares[id(row.watch)] for row in session.rows]
    together, alone, of_pytorch = found[:4], found[4:8], found[8:]
    assert together == alone and max(alone) > 0
    assert all(abs(ours - theirs) < 0.1 for ours, theirs in zip(alone, of_pytorch, strict=True))


def test_marks_are_nearly_those_of_routing(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=16)
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(3, 40000, (n,), generator=generator).tolist() for n in (1, 31, 64, 130, 256, 300, 20, 90)]
    assert engine._machine is not None
    found, expected = engine._machine.marks(texts, 3), marks_of(small, engine.cache, texts, 3)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.999


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_trained_exits_keep_their_tokens(family: str) -> None:
    model = endless(tiny_model(family, dtype=torch.bfloat16, head_dim=64, hidden_size=64).cuda())
    engine = Engine.from_model(model, kernels=True)
    engine.drafters.exits = {2: random_exit(engine.model, 2)}
    ids = torch.randint(3, 100, (3, 90), generator=torch.Generator().manual_seed(1)).cuda()
    settings: dict[str, Any] = {"max_new_tokens": 60, "pad_token_id": 0, **GREEDY}
    plain = engine.generate(ids, **settings)
    for plan in PLANS:
        drafted = engine.generate(ids, speculative_decoding="force", plan=plan, exit_layer=2, **settings)
        assert torch.equal(drafted, plain), plan


def governed(model: Any, folder: Path) -> Engine:
    """An engine whose profile routes prompts, judges them, and leaves plans to a governor."""
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
def test_routed_and_governed_requests_keep_their_tokens(tmp_path: Path, settings: dict[str, Any]) -> None:
    """With a governor that changes its mind all the time."""
    model = endless(tiny_model("llama", dtype=torch.bfloat16, head_dim=64, hidden_size=64).cuda())
    engine = governed(model, tmp_path)
    assert engine.has_kernels
    ids = torch.randint(3, 100, (3, 90), generator=torch.Generator().manual_seed(1)).cuda()
    options: dict[str, Any] = {"max_new_tokens": 120, "pad_token_id": 0, "return_dict_in_generate": True, **settings}
    plain = engine.generate(ids, speculative_decoding=False, **options)
    rules = Rules(
        least_gain=0.0, hysteresis=0.0, longest_cycle=math.inf, probe_interval=3, probe_allowance=50, loss_allowance=50
    )
    drafted = engine.generate(ids, rules=rules, **options)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert any(stats.drafted for stats in drafted.stats)


def test_tokens_are_nearly_always_those_of_pytorch(small: Decoder) -> None:
    """Rounding differs, so a near-tie may fall the other way; most rows of a few tokens are equal."""
    ours = generate(Engine(small, kernels=True, max_length=512), 16, "none", 8, **GREEDY).sequences
    theirs = generate(Engine(small, kernels=False, max_length=512), 16, "none", 8, **GREEDY).sequences
    assert (ours == theirs).all(1).sum() >= 10


def test_texts_grow_over_pages_and_ranges(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=2048, max_batch=1)
    for longest in (900, 1100):  # with others, if there are any, and alone
        plain = generate(engine, 1, "none", 400, longest=longest, **GREEDY)
        assert torch.equal(generate(engine, 1, "tree:4,2", 400, longest=longest, **GREEDY).sequences, plain.sequences)


def test_processors_leave_the_graph_and_keep_the_tokens(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=4)
    settings = {**SAMPLED, "repetition_penalty": 1.2, "logits_processor": [lambda ids, logits: logits * 0.9]}
    plain = generate(engine, 2, "none", 24, **settings)
    assert torch.equal(generate(engine, 2, "tree:3,2", 24, **settings).sequences, plain.sequences)


def test_two_streams_on_one_engine_do_not_disturb_each_other(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=4)
    expected = [generate(engine, 1, "chain:4", 40, longest=length, **GREEDY).sequences[0] for length in (60, 90)]
    sessions = []
    for length in (60, 90):
        ids, mask = prompts(1, length)
        request = _request(engine, ids, {"max_new_tokens": 40, "plan": "chain:4", "exit_layer": 2})
        sessions.append(request)
    running = [session.run() for session in sessions]
    while running:
        running = [run for run in running if next(run, "over") != "over"]
    assert [session.rows[0].tokens for session in sessions] == [tokens.tolist() for tokens in expected]


def _request(engine: Engine, ids: torch.Tensor, options: dict[str, Any]) -> Any:
    from selfspec.governor.rules import Policy, Rules
    from selfspec.sampling import Sampling
    from selfspec.sequence import Row
    from selfspec.speculation.plan import Plan

    sampling = Sampling()
    policy = Policy(Rules(), sampling, mode="force", plan=Plan.parse(options["plan"]))
    row = Row(ids[0].tolist(), 0, 0, ids.shape[1] + options["max_new_tokens"])
    return engine.open([row], sampling, policy, Exit(engine.model, options["exit_layer"]))


def test_a_speculating_engine_needs_little_more_memory(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=1)
    generate(engine, 1, "none", 16, **GREEDY)
    torch.cuda.reset_peak_memory_stats()
    plain = torch.cuda.max_memory_allocated()
    generate(engine, 1, "tree:8,3", 16, **GREEDY)
    assert torch.cuda.max_memory_allocated() - plain < 0.2 * small.nbytes
    assert engine.memory()["cycles"] < 0.2 * small.nbytes


def test_out_of_memory_while_capturing_fails_the_request_and_not_the_engine(small: Decoder) -> None:
    engine = Engine(small, kernels=True, max_length=1024, max_batch=4)
    expected = generate(engine, 1, "none", 16, **GREEDY).sequences
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            generate(engine, 4, "tree:8,3", 16, **CUT)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.cache.free_pages == engine.cache.num_pages - 1
    assert torch.equal(generate(engine, 1, "none", 16, **GREEDY).sequences, expected)
