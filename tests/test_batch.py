"""Requests under a governor: whatever it decides the tokens are those of plain decoding, and what it did is told."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.host import IdleBackend, idle_scheduler
from selfspec import Engine, Rules
from selfspec.backends import torch_backend as runtime
from selfspec.backends.base import Step
from selfspec.batch import Batch
from selfspec.batch_scoring import BatchScoring
from selfspec.cache.kv_cache import Cache, CacheFull
from selfspec.governor.acceptance import UNFAMILIAR, Acceptance, Skill
from selfspec.governor.candidates import PlanCandidates, SharedPlans
from selfspec.governor.costs import Costs, StepCost, estimated_cost, gpu_rows
from selfspec.governor.governor import MEASURING, Governor
from selfspec.governor.rules import BATCHES, Policy
from selfspec.models.decoder import Decoder
from selfspec.models.row_times import RowTimes
from selfspec.profiles.profile import Device, Spread
from selfspec.profiles.router import Embedded, prompt_embedding
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request, Sequence
from selfspec.speculation.plan import NONE, Plan
from tests.profiles import choice_of, profile_of
from tests.scripted import endless, left_padded, random_prompt
from tests.test_exit import Trained

RESTLESS = Rules(max_step=inf, budget=50, budget_refill=1)
RANKS = {"0": [[0.6, 0.1, 0.05], [0.6, 0.1], [0.5]], "1": [[0.5, 0.1], [0.4]]}
PROMPTS = [random_prompt(length) for length in (9, 3, 20, 9, 5)]


@pytest.fixture(autouse=True, scope="module")
def _rows_are_almost_free() -> Iterator[None]:
    """What is decided shall not depend on how busy this machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.engine.time_rows", lambda model, cache: gpu_rows)
        yield


class RandomClock:
    """Time that passes as it likes: a governor that believes it changes plans for no reason."""

    def __init__(self, seed: int) -> None:
        self.random, self.now = Random(seed), 0.0

    def perf_counter(self) -> float:
        self.now += self.random.choice((0.0001, 0.001, 0.01)) * self.random.random()
        return self.now


@cache
def trained(family: str) -> Trained:
    model = Trained(family, quiet=0.3)
    endless(model.hf)
    return model


def engine_of(family: str, folder: Path, **entries: Any) -> Engine:
    exit = trained(family).exit
    choice = choice_of(exit.layer, "chain:2", **{"ranks": RANKS, **entries})
    profile = profile_of(exit.model, {"text": choice})
    return Engine.from_model(trained(family).hf, profile=profile.save(folder, [exit]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


def generate(engine: Engine, prompts: list[list[int]], tokens: int = 40, **kwargs: Any) -> Any:
    ids, mask = left_padded(prompts)
    kwargs = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, **kwargs}
    return engine.generate(ids, mask, max_new_tokens=tokens, **kwargs)


@settings(max_examples=10)
@given(
    family=st.sampled_from(["llama", "gemma3_text"]),
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    sample=st.booleans(),
    refill=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_no_decision_changes_a_token(
    family: str, folder: Path, seed: int, rows: int, sample: bool, refill: float
) -> None:
    engine = engine_of(family, folder / family, prompt_agreement=Spread(mean=0.5, deviation=0.1))
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": seed} if sample else {}
    plain = generate(engine, PROMPTS[:rows], speculative_decoding=False, **sampling)
    rules = replace(RESTLESS, budget_refill=refill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "time", RandomClock(seed))
        out = generate(engine, PROMPTS[:rows], rules=rules, **sampling)
    assert torch.equal(out.sequences, plain.sequences)
    assert any(stats.drafted for stats in out.stats)


def test_restless_clocks_do_change_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before this one relies on."""
    changes = []
    for seed in range(4):
        monkeypatch.setattr(runtime, "time", RandomClock(seed))
        (stats,) = generate(engine_of("llama", folder / f"restless{seed}"), PROMPTS[:1], 120, rules=RESTLESS).stats
        changes.append([change.plan for change in stats.changes])
    assert sum(map(len, changes)) > 4 * 6
    assert any("none" in plans[2:] for plans in changes), "it went off again"


@dataclass
class Joined:
    """A batch as it was when the sequences of a request had joined it."""

    governor: Governor | None
    costs: Costs
    sequences: list[Sequence]


def joined(engine: Engine, prompts: int = 2, tokens: int = 4, **kwargs: Any) -> Joined:
    """Generates; returns the state of the batch when the request joined."""
    seen: list[Joined] = []
    join = Batch.join

    def remember(self: Batch, sequences: Any) -> None:
        join(self, sequences)
        seen.append(Joined(self.governor, self._costs, list(sequences)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "join", remember)
        generate(engine, PROMPTS[:prompts], tokens, **kwargs)
    return seen[0]


@pytest.mark.parametrize(
    ("kwargs", "is_governed"),
    [
        ({}, True),
        ({"speculative_decoding": True}, True),
        ({"domain": "text"}, True),
        ({"speculative_decoding": "force"}, False),
        ({"speculative_decoding": False}, False),
        ({"plan": "chain:2"}, False),
        ({"exit_layer": 1}, False),
        ({"stateful_processors": True}, False),
        ({"do_sample": True, "temperature": 1.6}, False),
    ],
    ids=str,
)
def test_who_asks_for_nothing_is_governed(folder: Path, kwargs: dict[str, Any], is_governed: bool) -> None:
    request = joined(engine_of("llama", folder / "plain"), **kwargs)
    assert (request.governor is not None) == is_governed


def test_a_profile_without_ranks_keeps_its_plans(folder: Path) -> None:
    engine = engine_of("llama", folder / "fixed", ranks={})
    request = joined(engine)
    assert request.governor is None
    assert str(request.sequences[0].history.plans.most_common()[0][0]) == "chain:2"


def test_a_profile_from_another_device_is_tried_here_all_the_same(folder: Path) -> None:
    exit = trained("llama").exit
    device = Device(type="cuda", name="some GPU", dtype="bfloat16", torch="2.13.0")
    profile = profile_of(exit.model, {"text": choice_of(exit.layer, "none", ranks=RANKS)}, device=device)
    engine = Engine.from_model(trained("llama").hf, profile=profile.save(folder / "elsewhere", [exit]))
    assert joined(engine).governor is not None


@pytest.mark.parametrize("kernels", [False, True])
def test_costs_count_where_the_same_operations_run(folder: Path, kernels: bool) -> None:
    exit = trained("llama").exit
    device = Device(type="cpu", name="some CPU", dtype="float32", torch="2.13.0", kernels=kernels)
    costs = {"1": StepCost(plain=1.0, depth=2.0, drafting=((1, 5.0),), head_row=0.0, head_rows=0)}
    choice = choice_of(exit.layer, "none", ranks=RANKS, costs=costs)
    profile = profile_of(exit.model, {"text": choice}, device=device).save(folder / f"costs {kernels}", [exit])
    governor = joined(Engine.from_model(trained("llama").hf, profile=profile)).governor
    assert governor is not None
    assert (governor.candidates.cost(Plan.parse("chain:1"), 1) == 7.0) == (not kernels)


@pytest.mark.parametrize(("temperature", "top1"), [(0.0, 0.6), (0.4, 0.6), (0.9, 0.5), (1.0, 0.5), (1.4, 0.462)])
def test_what_is_expected_follows_the_temperature(folder: Path, temperature: float, top1: float) -> None:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 20} if temperature else {}
    governor = joined(engine_of("llama", folder / "warm"), **sampling).governor
    assert governor is not None
    assert governor.candidates.acceptance.chance(0, 0, Skill().level) == pytest.approx(top1, abs=1e-4)


def test_rules_of_a_request_reach_its_governor(folder: Path) -> None:
    rules = Rules(budget=7, max_tree_batch=1, max_step=5.0)
    governor = joined(engine_of("llama", folder / "ruled"), rules=rules).governor
    assert governor is not None
    assert governor.rules == rules
    assert all(plan.is_chain for plan in governor.candidates.table(2).plans)


@pytest.mark.parametrize("limit", [0.0, 2.5, 3.5])
def test_a_limit_on_steps_changes_no_token(folder: Path, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", folder / "timely")
    plain = generate(engine, PROMPTS[:2], speculative_decoding=False)
    monkeypatch.setattr(runtime, "time", RandomClock(int(10 * limit)))
    out = generate(engine, PROMPTS[:2], rules=replace(RESTLESS, max_step=limit))
    assert torch.equal(out.sequences, plain.sequences)
    assert any(stats.drafted for stats in out.stats) == (limit >= 1), "no step is shorter than a plain one"


@pytest.mark.parametrize("asked", [{"speculative_decoding": "force"}, {"plan": "chain:3"}], ids=["forced", "asked_for"])
def test_a_plan_that_was_asked_for_is_not_limited(folder: Path, asked: dict[str, Any]) -> None:
    (stats,) = generate(engine_of("llama", folder / "asked"), PROMPTS[:1], rules=Rules(max_step=0), **asked).stats
    assert stats.drafted


def test_costs_outlive_a_request(folder: Path) -> None:
    engine = engine_of("llama", folder / "lasting")
    first, second = (generate(engine, PROMPTS[:1], 30).stats[0] for _ in range(2))
    assert first.changes[0].reason == MEASURING
    assert second.changes[0].reason != MEASURING
    assert first.disabled_reason != MEASURING, "that was no reason to be off"


def test_requests_that_do_other_things_have_costs_of_their_own(folder: Path) -> None:
    engine = engine_of("llama", folder / "kinds")
    kinds = [{}, {"do_sample": True}, {"repetition_penalty": 1.2}, {"logits_processor": [lambda ids, logits: logits]}]
    costs = [joined(engine, **kwargs).costs for kwargs in kinds]
    assert costs[0] is joined(engine).costs
    assert len({id(of_kind) for of_kind in costs}) == 4


@pytest.mark.parametrize(
    ("bands", "ranks", "timed"), [([], RANKS, 1), (["1"], RANKS, 1), (list(BATCHES), RANKS, 0), ([], {}, 0)]
)
def test_rows_are_timed_at_loading_where_calibration_has_not_measured_steps(
    folder: Path, bands: list[str], ranks: dict[str, Any], timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has not, costs are estimated from these times."""
    calls: list[Decoder] = []

    def dear(model: Decoder, cache: Cache) -> RowTimes:
        calls.append(model)
        return RowTimes((1, 2, 8), (1.0, 2.0, 5.0))

    monkeypatch.setattr("selfspec.engine.time_rows", dear)
    cost = StepCost(plain=1.0, depth=0.1, drafting=((1, 1.1), (3, 1.2)), head_row=0.0, head_rows=0)
    engine = engine_of("llama", folder / f"timed{len(bands)}{timed}", costs=dict.fromkeys(bands, cost), ranks=ranks)
    assert calls == [engine.model] * timed
    if timed:
        governor = joined(engine).governor
        assert governor is not None
        chain, exit = Plan.parse("chain:1"), trained("llama").exit
        of_depth = (exit.layer + 2) / exit.model.config.num_layers
        assert governor.candidates.cost(chain, 4) == pytest.approx(5 / 3 + of_depth), "8 rows in place of 4"
        assert (governor.candidates.cost(chain, 1) == pytest.approx(1.2)) == ("1" in bands)


def test_a_profile_whose_drafts_were_never_right_decodes_as_it_plans(folder: Path) -> None:
    engine = engine_of("llama", folder / "hopeless", ranks={"0": [[]], "1": [[0.0]]})
    assert joined(engine).governor is None


def test_a_large_batch_is_off_whoever_governs(folder: Path) -> None:
    stats = generate(engine_of("llama", folder / "large"), [PROMPTS[0]] * 17, 6).stats
    assert {s.disabled_reason for s in stats} == {"batch"}
    assert not any(s.drafted for s in stats)


def test_a_sequence_that_joined_a_large_batch_gets_its_head_rows_once_the_batch_is_smaller(folder: Path) -> None:
    """Its plan asks for rank 19, and the others' domain drafts 4 tokens."""
    exit = trained("llama").exit
    domains = {"narrow": choice_of(exit.layer, "chain:1", head_rows=4), "wide": choice_of(exit.layer, "chain:1")}
    profile = profile_of(exit.model, domains).save(folder / "shrinks", [exit], {"narrow": torch.arange(3, 7)})
    engine = Engine.from_model(trained("llama").hf, profile=profile)
    options: dict[str, Any] = {"seed": 0, "do_sample": False}
    requests = [engine.build_request([5, 6], max_new_tokens=40, domain="narrow", **options) for _ in range(17)]
    requests.append(engine.build_request([5, 6], max_new_tokens=60, domain="wide", plan="tree:20", **options))
    for request in requests:
        engine.scheduler.waiting.extend(request.sequences)
    while engine.scheduler.step():
        pass
    assert [request.error for request in requests] == [None] * 18
    last = requests[-1].sequences[0].history
    assert [change.plan for change in last.changes] == ["none", "chain:1", "tree:20"]


@pytest.mark.parametrize(("prompt", "skill"), [(0, 1.0), (1, UNFAMILIAR)], ids=["familiar", "unfamiliar"])
def test_a_prompt_far_from_every_domain_begins_with_the_skill_of_unfamiliar_text(
    folder: Path, prompt: int, skill: float
) -> None:
    """Two domains around the first prompt; the second lies elsewhere."""
    exit = trained("llama").exit
    engine = Engine.from_model(trained("llama").hf)
    embedding = prompt_embedding(engine.model, engine.cache, PROMPTS[0], 1).tolist()
    near = {"direction": embedding, "centroid": embedding, "ranks": RANKS}
    choice = choice_of(exit.layer, "chain:2", distance=Spread(mean=0.0, deviation=0.01), **near)
    profile = profile_of(exit.model, {"a": choice, "b": choice})
    governed = Engine.from_model(trained("llama").hf, profile=profile.save(folder / f"unfamiliar{prompt}", [exit]))
    text = PROMPTS[0] if prompt == 0 else PROMPTS[2]
    assert skills_at_join(governed, text) == [skill]


def skills_at_join(engine: Engine, prompt: list[int]) -> list[float]:
    seen: list[float] = []
    join = Batch.join

    def remember(self: Batch, sequences: Any) -> None:
        seen.extend(sequence.skill.value for sequence in sequences)
        join(self, sequences)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "join", remember)
        generate(engine, [prompt], 2)
    return seen


def test_the_domain_of_a_prompt_is_found_behind_its_first_step() -> None:
    """The first steps draft with another domain's plans; the pass's result arrives some steps later."""
    events: list[str] = []

    class Recording(IdleBackend):
        def launch(self, *arguments: Any) -> Step:
            events.append("step")
            return super().launch(*arguments)

    scheduler, request = idle_scheduler(Recording(0.6), Costs(), new_tokens=40)
    first = request.drafter
    assert first is not None
    parts = Acceptance([[0.5, 0.2]]), {16: estimated_cost(1, 30)}
    found = replace(first, candidates=PlanCandidates(*parts, SharedPlans(*parts, max_tree_batch=4)), unfamiliar=[True])

    def embed(prompts: list[list[int]]) -> Embedded:
        events.append("embed")
        assert prompts == [request.sequences[0].prompt]
        return Embedded(lambda: torch.zeros(1, 8), lambda: events.count("step") > 3)

    request.drafter = replace(first, reroute=lambda embeddings: events.append(f"{len(embeddings)} found") or found)
    scheduler.drafters.embed = embed  # type: ignore[method-assign]
    while scheduler.step():
        governors = [batch.governor for batch in scheduler.batches.values() if batch.governor is not None]
        wanted = found if "1 found" in events else first
        assert all(governor.candidates is wanted.candidates for governor in governors)
    assert events[:6] == ["step", "step", "embed", "step", "step", "1 found"]
    assert events.count("embed") == events.count("1 found") == 1
    assert request.drafter is found and request.sequences[0].skill.was_ood
    assert request.sequences[0].new_tokens >= 40


@pytest.mark.parametrize("shortage", [False, True], ids=["a sequence joins later", "no page is free at first"])
def test_a_request_is_routed_once(shortage: bool) -> None:
    """Its prompts' tokens enter the draft head then; joining before that trims no head again."""
    steps, embedded, found, in_head = [0], [], [], []

    class Counting(IdleBackend):
        def launch(self, *arguments: Any) -> Step:
            steps[0] += 1
            return super().launch(*arguments)

    scheduler, request = idle_scheduler(Counting(0.6), Costs(), count=3, new_tokens=40)
    if not shortage:
        scheduler.max_decoding = 2
        request.sequences[0].max_length = len(request.sequences[0].prompt) + 2  # the third sequence takes its place
    own = request.drafter
    assert own is not None

    def embed(prompts: list[list[int]]) -> Embedded:
        if shortage and steps[0] < 4:
            raise CacheFull("no page is free")
        embedded.append(steps[0])
        return Embedded(lambda: torch.zeros(3, 8), lambda: steps[0] > embedded[0] + 6)

    def exit_with_rows(exit: Any, rows: Any, prompts: list[list[int]]) -> Any:
        in_head.append(len(prompts))
        return exit

    request.drafter = replace(own, reroute=lambda embeddings: found.append(len(embeddings)) or own)
    scheduler.drafters.embed = embed  # type: ignore[method-assign]
    scheduler.drafters.exit_with_rows = exit_with_rows  # type: ignore[method-assign]
    while scheduler.step():
        pass
    assert in_head == [0, 3 if shortage else 2]
    assert request.error is None and request.is_finished
    assert len(embedded) == 1 and found == [3] and request.drafter is own


@pytest.mark.parametrize("is_routed", [False, True])
def test_an_idle_batch_drops_ended_requests(is_routed: bool) -> None:
    """Also one whose domain is being found when it ends."""
    scheduler, request = idle_scheduler(IdleBackend(1.0), Costs(), new_tokens=40)
    assert request.drafter is not None
    request.drafter = replace(request.drafter, reroute=None if is_routed else lambda _: None)
    read: list[bool] = []
    embedded = Embedded(lambda: read.append(True) or torch.zeros(1, 8), lambda: False)
    scheduler.drafters.embed = lambda _: embedded  # type: ignore[method-assign]
    while scheduler.step():
        pass
    ended = weakref.ref(request)
    assert request.progress.is_over
    del request
    gc.collect()
    assert ended() is None
    assert len(read) == (not is_routed), "a readback returns to its pool when it is read"


def test_what_happened_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "time", RandomClock(5))
    engine = engine_of("llama", folder / "told")
    sequences = joined(engine, 3, 60, rules=RESTLESS).sequences
    for row in sequences:
        history = row.history
        origins = Counter(history.origins)
        assert len(history.origins) == row.new_tokens
        assert origins["drafted"] == history.accepted
        assert origins["decoded"] + origins["plain"] >= history.steps - 1, "every cycle ends with the model's own token"
        assert sum(history.accepted_by_depth) == history.accepted
        assert sum(history.reached_by_depth) == history.accepted + history.rejections
        assert all(a <= r for a, r in zip(history.accepted_by_depth, history.reached_by_depth, strict=True))
        assert sorted(history.reached_by_depth, reverse=True) == history.reached_by_depth
        assert [change.step for change in history.changes] == sorted({change.step for change in history.changes})
        assert history.changes[0].step == history.changes[0].token == 0
        assert all((change.plan == "none") == (change.reason is not None) for change in history.changes)
    summary = engine.metrics()
    assert summary.tokens == sum(row.new_tokens for row in sequences)
    assert summary.emissions == sum(row.history.steps for row in sequences)
    assert summary.accepted_by_depth[0] == sum(row.history.accepted_by_depth[0] for row in sequences)


def test_a_governor_that_fails_leaves_no_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", folder / "failing")

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Governor, "observe", fail)
    with pytest.raises(RuntimeError, match="broken"):
        generate(engine, PROMPTS[:2], 8)
    assert engine.cache.free_pages == engine.cache.num_pages


def test_an_unknown_clock_cannot_be_divided_by_zero(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of some systems stand still for a cycle of a tiny model."""
    monkeypatch.setattr(runtime, "time", SimpleNamespace(perf_counter=lambda: 1.0))
    engine = engine_of("llama", folder / "still")
    plain = generate(engine, PROMPTS[:1], 40, speculative_decoding=False)
    assert torch.equal(generate(engine, PROMPTS[:1], 40).sequences, plain.sequences)


def test_a_trimmed_head_is_scored_too(folder: Path) -> None:
    exit = trained("llama").exit
    rows = torch.arange(0, 101, 2)
    profile = profile_of(exit.model, {"text": choice_of(exit.layer, "chain:2", ranks=RANKS, head_rows=len(rows))})
    saved = profile.save(folder / "trimmed", [replace(exit, head_rows=None)], {"text": rows})
    engine = Engine.from_model(trained("llama").hf, profile=saved)
    plain = generate(engine, PROMPTS[:2], 40, speculative_decoding=False)
    assert torch.equal(generate(engine, PROMPTS[:2], 40).sequences, plain.sequences)


def test_a_step_is_timed_for_the_kind_of_batch_that_it_was_launched_for() -> None:
    """A sampling request that joins before a greedy step is read gets its own kind of costs."""
    found: dict[Any, Costs] = {}
    scheduler, _ = idle_scheduler(IdleBackend(0.0), Costs(), 2, new_tokens=1000, governed=False)
    scheduler.drafters.costs = lambda kind: found.setdefault(kind, Costs())
    for _ in range(6):
        scheduler.step()
    batch, params = next(iter(scheduler.batches.values())), SamplingParams(do_sample=True)
    sampling = Sequence([1] * 10, 9, 0, 500, params)
    Request([sampling], policy=Policy(Rules(), params, mode=False))
    batch.launch()
    batch.join([sampling])
    batch.drain()
    assert {kind[1] for kind, costs in found.items() if costs._buckets} == {False}


def test_copied_nodes_do_not_take_the_place_of_a_score() -> None:
    parts: Any = None, None, SimpleNamespace()
    scoring, exit = BatchScoring(*parts[:2]), parts[2]
    for plan, unscored in ((NONE, 1), (Plan.parse("copy:3"), 1), (NONE, 2), (Plan.parse("chain:1"), 0)):
        scoring.count_step(plan, exit)
        assert scoring._unscored == unscored


def test_a_request_of_many_prompts_is_routed_by_the_first_16() -> None:
    scheduler, request = idle_scheduler(IdleBackend(), Costs(), count=20, new_tokens=40)
    known, embedded = request.drafter, []
    assert known is not None
    request.drafter = replace(known, reroute=lambda rows: replace(known, unfamiliar=[True] * len(rows)))

    def embed(texts: list[list[int]]) -> Embedded:
        embedded.append(len(texts))
        return Embedded(lambda: torch.zeros(len(texts), 4))

    scheduler.drafters.embed = embed
    for _ in range(4):
        scheduler.step()
    assert embedded == [16]
    assert [sequence.skill.value < 1 for sequence in request.sequences] == [True] * 16 + [False] * 4


@pytest.mark.parametrize(("unscored", "is_scored"), [(16, True), (15, False)])
def test_an_exit_whose_kv_must_be_filled_is_scored_if_a_score_is_due_within_a_step(
    unscored: int, is_scored: bool
) -> None:
    """Else the fill would take the positions that the score needs."""
    filled: list[bool] = []
    backend: Any = SimpleNamespace(
        max_unfilled=16,
        fill_exit=lambda sequences, exit, score, in_flight: filled.append(score),
        exit_scores=list,
        prompt_scores=dict,
    )
    governor: Any = SimpleNamespace(may_score=True, score_interval=16.64, charge_score=lambda: None)
    scoring, exit = BatchScoring(backend, backend), SimpleNamespace()
    scoring.unfilled, scoring._unscored = 16, unscored
    scoring.score_exit([], exit, governor, None)
    assert filled == [is_scored]
