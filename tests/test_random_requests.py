"""Requests that arrive, wait, are cancelled and swapped out at random, by the scheduler, on both backends: every
sequence gets the tokens that it gets alone and with plain steps on the reference backend, and every page comes back.

SELFSPEC_EXAMPLES=200 runs 200 examples on each backend instead of the few that CI has time for.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from selfspec import Engine
from selfspec import scheduler as scheduler_module
from selfspec.backends import torch_backend
from selfspec.backends.cuda import placement
from selfspec.backends.cuda.backend import CudaBackend
from selfspec.backends.torch_backend import PREFILL_CHUNK, TorchBackend
from selfspec.batch import Batch
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.request import SpeculationRequest
from selfspec.sequence import Request
from selfspec.speculation.exit import Exit, HeadRows
from selfspec.speculation.plan import Plan
from tests import interpreted, test_scheduler
from tests.interpreted import ONLY_INTERPRETED, exit_keys, sequence_of
from tests.profiles import choice_of, profile_of, random_exit, random_rows
from tests.scripted import DRAFTING_PLANS, endless, random_prompt
from tests.test_scheduler import (
    LEAST_PAGES,
    PLAIN,
    SAMPLINGS,
    assert_all_pages_free,
    generate,
    new_engine,
    request_of,
    tokens_of,
)
from tests.tiny import VOCABULARY, tiny_model

EXAMPLES = int(os.environ.get("SELFSPEC_EXAMPLES", "0"))


@cache
def float32_model() -> PreTrainedModel:
    """As small as the kernels take; with groups of query heads."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 16, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "num_hidden_layers": 2, "max_position_embeddings": 128}
    return endless(tiny_model("llama", torch.float32, **sizes))


@cache
def float32_profile() -> Any:
    return profile_of(Engine.from_model(float32_model()).model, {"text": choice_of(1, "chain:1")})


@dataclass(frozen=True)
class Setup:
    """A backend, and how much its requests ask for: interpreted kernels are slow."""

    model: Callable[[], PreTrainedModel]
    profile: Callable[[], Any]
    kernels: bool
    examples: int
    requests: tuple[int, int]  # of a run: least, most
    prompts: list[int]  # lengths
    new_tokens: list[int]
    arrivals: list[int]  # steps
    cancellations: list[int]  # steps after the arrival
    exit_layers: list[int | None]  # None: the profile's exit
    plans: list[str]
    pages: list[int | None]  # of the cache; None: enough for all
    held_pages: list[int]
    max_batch: list[int]

    def new_engine(self, limits: Limits) -> Engine:
        options = {"model": self.model(), "profile": self.profile(), "kernels": self.kernels}
        engine = new_engine(limits.pages, limits.max_batch, **options)
        if limits.head_rows is not None:
            rows = HeadRows(random_rows(limits.head_rows))
            engine.drafters.head_rows = {"text": rows, None: rows}
        if engine._graphs is not None:
            engine._graphs.max_kernel_prompt = limits.kernel_prompt
            engine.scheduler._before_first = None  # which then would run kernels to compile them
            (layer,) = engine.drafters.exits
            engine.drafters.exits[layer] = random_exit(engine.model, layer, scale=0.01)  # its drafts are often accepted
            engine.scheduler._new_backend = lambda rejection: overlapping(engine.new_backend(rejection))
        return engine


def overlapping(backend: Any) -> Any:
    """Makes a CUDA backend launch a step before it reads the one before, as on a GPU."""
    if isinstance(backend, CudaBackend):
        backend.overlaps = True
    return backend


TORCH = Setup(
    test_scheduler.hf_model,
    test_scheduler.profile,
    kernels=False,
    examples=10,
    requests=(1, 7),
    prompts=[1, 2, 40, 60, 63, 64, 100, 110],
    new_tokens=[1, 7, 20, 30],
    arrivals=[0, 0, 1, 3, 10],
    cancellations=[0, 1, 5, 15],
    exit_layers=[None, 1, 2],
    plans=["none", *DRAFTING_PLANS, "copy:3", "beam:3,2+copy:2"],
    pages=[LEAST_PAGES + 2, LEAST_PAGES + 3, LEAST_PAGES + 5, None],
    held_pages=[0],
    max_batch=[1, 3, 16, 16],
)
KERNELS = Setup(
    float32_model,
    float32_profile,
    kernels=True,
    examples=4,
    requests=(3, 5),
    prompts=[1, 5, 9, 60, 61, 62, 63],
    new_tokens=[2, 6, 8],
    arrivals=[0, 1, 2, 3, 4],
    cancellations=[0, 1, 3],
    exit_layers=[None, None, 0],
    plans=["none", "chain:1", "copy:2", "tree:2+copy:1", "beam:2,1"],
    pages=[LEAST_PAGES + 1],
    held_pages=[0, 0, 1],
    max_batch=[4],
)


@dataclass
class Call:
    """One request of a run, and the steps after which it arrives and, perhaps, is cancelled."""

    prompts: list[list[int]]
    options: dict[str, Any]
    arrives: int
    is_cancelled_at: int | None = None
    is_rejection: bool = False
    request: Request = field(init=False)

    def expected(self, model: PreTrainedModel) -> list[list[int]]:
        """The tokens of every sequence decoded plainly and alone, on a fresh engine."""
        own = {name: value for name, value in self.options.items() if name not in SpeculationRequest.__annotations__}
        alone = Engine.from_model(model)
        return [tokens for prompt in self.prompts for tokens in generate(alone, prompt, **own, **PLAIN)]


def random_call(random: Random, setup: Setup) -> Call:
    sampling = random.choice(SAMPLINGS)
    options = {**sampling, "max_new_tokens": random.choice(setup.new_tokens), "seed": random.randrange(4)}
    if sampling["do_sample"]:
        options["num_return_sequences"] = random.choice([1, 1, 2, 3])
    if random.random() < 0.3:
        options["eos_token_id"] = random.sample(range(3, VOCABULARY), random.randint(1, 30))
        options["min_new_tokens"] = random.choice([None, None, 3, 12])
    rejection = random.random() < 0.1
    return Call(
        [random_prompt(random.choice(setup.prompts)) for _ in range(random.choice([1, 1, 2]))],
        {**options, **({"acceptance": "rejection"} if rejection else random_speculation(random, setup))},
        random.choice(setup.arrivals),
        random.choice(setup.cancellations) if random.random() < 0.3 else None,
        rejection,
    )


def random_speculation(random: Random, setup: Setup) -> dict[str, Any]:
    """None, governed, forced, or with an exit and a plan of the request's own."""
    plan, layer = random.choice(setup.plans), random.choice(setup.exit_layers)
    own = {"plan": plan} if layer is None else {"plan": plan, "exit_layer": layer}
    force = {"speculative_decoding": "force"}
    return random.choice([{}, PLAIN, force, own, own, {**own, **force}, {**own, **force}])


@dataclass
class Limits:
    """Limits of the engine in one example, and whether plans are drawn at random."""

    pages: int | None
    held_pages: int  # pages that no request can get: an engine refuses a cache as small as the rest
    max_batch: int
    margin: int  # positions past its text that a sequence is admitted with: fewer make it be swapped more often
    chunk: int  # tokens of a prompt in one pass
    ahead: int  # positions past a step whose pages are reserved with the step's
    kernel_prompt: int  # tokens of the longest prompt that kernels prefill
    head_rows: int | None  # of the trimmed head
    is_scripted: bool  # plans of steps are drawn at random; otherwise policies and the governor choose them

    @classmethod
    def at(cls, random: Random, setup: Setup) -> Limits:
        return cls(
            pages=random.choice(setup.pages),
            held_pages=random.choice(setup.held_pages),
            max_batch=random.choice(setup.max_batch),
            margin=random.choice([1, 1, 1, scheduler_module._STEP_POSITIONS]),
            chunk=random.choice([16, PREFILL_CHUNK]),
            ahead=random.choice([0, 0, 0, placement.RESERVED_POSITIONS]),
            kernel_prompt=random.choice([0, 0, 2]),
            head_rows=random.choice([None, 85]),
            is_scripted=setup.kernels or random.random() < 0.5,
        )


@pytest.mark.parametrize(
    "setup", [pytest.param(TORCH, id="torch"), pytest.param(KERNELS, id="kernels", marks=ONLY_INTERPRETED)]
)
def test_every_sequence_gets_the_tokens_it_gets_alone(setup: Setup) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES or setup.examples, phases=[Phase.generate])  # a seed cannot be shrunk
    @given(st.randoms(use_true_random=True))
    def check(random: Random) -> None:
        calls, limits = (
            [random_call(random, setup) for _ in range(random.randint(*setup.requests))],
            Limits.at(random, setup),
        )
        engine = setup.new_engine(limits)
        held = engine.cache.open()
        engine.cache.reserve(held, limits.held_pages * PAGE_SIZE)
        for call in calls:
            call.request = request_of(engine, call.prompts, **call.options)
        swap_out, choose = Cache.swap_out, Batch._choose_plan
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler_module, "_STEP_POSITIONS", limits.margin)
            patch.setattr(torch_backend, "PREFILL_CHUNK", limits.chunk)
            patch.setattr(placement, "RESERVED_POSITIONS", limits.ahead)
            patch.setattr(Cache, "swap_out", lambda *args: (seen.update(["swapped"]), swap_out(*args))[1])
            if limits.is_scripted:
                patch.setattr(Batch, "_choose_plan", random_plans(choose, random, setup.plans))
            run(engine, calls, check_exit_keys)
        engine.cache.close(held)
        assert_all_pages_free(engine)
        assert_all_slots_free(engine)
        for call in calls:
            assert call.request.error is None and call.request.progress.is_over
            seen.update(str(sequence.finish_reason) for sequence in call.request.sequences)
            seen["accepted"] += sum(sequence.history.accepted for sequence in call.request.sequences)
            for got, expected in zip(tokens_of(call.request), call.expected(setup.model()), strict=True):
                if call.is_cancelled_at is not None:
                    expected = expected[: len(got)]
                assert call.is_rejection or got == expected

    check()
    assert seen["accepted"] and seen["swapped"]


def random_plans(choose: Callable[[Batch], Any], random: Random, plans: list[str]) -> Callable[[Batch], Any]:
    """Returns a replacement for `Batch._choose_plan` that draws plans at random; calls `choose` where a rule forbids
    drafting, or where there is a governor, which cannot learn from all plans."""

    def random_plan(batch: Batch) -> tuple[Plan, str | None]:
        if batch._rule() is not None or batch.governor is not None:
            return choose(batch)
        return batch._bounded(Plan.parse(random.choice(["none", "none", *plans]))), None

    return random_plan


def run(engine: Engine, calls: list[Call], after_step: Callable[[Engine], None] = lambda _: None) -> None:
    """Runs passes of the loop until every request has arrived and ended."""
    scheduler, steps, left = engine.scheduler, 0, True
    while left or any(call.arrives >= steps for call in calls):
        for call in calls:
            if call.arrives == steps:
                scheduler.waiting.extend(call.request.sequences)
            if call.is_cancelled_at is not None and call.arrives + call.is_cancelled_at == steps:
                scheduler._cancel(call.request)
        left, steps = scheduler.step(), steps + 1
        assert sum(len(batch.running) for batch in scheduler.batches.values()) <= scheduler.max_decoding
        assert steps < 3000, "the loop does not come to an end"
        after_step(engine)


def check_exit_keys(engine: Engine) -> None:
    """Compares the exit block's keys of every running sequence with those of a prompt of the same tokens: they do not
    depend on the plans."""
    for batch in engine.scheduler.batches.values():
        for sequence in batch.running:
            exit = sequence.request.exit
            if sequence.first_sample.cached_tokens:
                continue  # the exit reads no feature before the first position after reused pages
            if exit is not None and exit.block is not None and not sequence.request.rejection:
                filled = min(sequence.kv.length, len(sequence.tokens) - 1) - batch.backend.unfilled(sequence)
                ours = exit_keys(engine.cache, sequence, filled)
                torch.testing.assert_close(
                    ours, reference_keys(engine, exit, sequence.tokens, filled), atol=5e-4, rtol=5e-4
                )


@torch.inference_mode()
def reference_keys(engine: Engine, exit: Exit, tokens: list[int], count: int) -> torch.Tensor:
    backend, text = TorchBackend(engine.model, interpreted.new_cache(engine.model, 8)), sequence_of([*tokens, 0], 1)
    while not backend.prefill([text], exit):
        pass
    return exit_keys(backend.cache, text, count)


def assert_all_slots_free(engine: Engine) -> None:
    for batch in engine.scheduler.batches.values():
        if isinstance(batch.backend, CudaBackend):
            slots = batch.backend._placement
            assert not slots.slot_of and len(slots._free) == batch.backend.graphs.capacity
