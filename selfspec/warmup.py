"""Compiles and captures the steps that an engine's requests are expected to replay. Needs Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from rich.console import Console
from rich.progress import track
from transformers import GenerationConfig

from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.warmup import ExpectedStep, WarmUp
from selfspec.drafters import Drafters
from selfspec.governor.rules import Policy, Rules
from selfspec.profiles.profile import Profile
from selfspec.request import read_settings
from selfspec.sequence import Request
from selfspec.speculation.plan import NONE


@dataclass(frozen=True)
class ExpectedRequests:
    """The requests to prepare for: up to `batch` sequences of up to `max_length` tokens."""

    batch: int
    domain: str | None  # None: every domain of the profile
    temperatures: Sequence[float]
    max_length: int


def warm_up(
    graphs: Graphs, drafters: Drafters, rules: Rules, generation_config: GenerationConfig, expected: ExpectedRequests
) -> int:
    """Compiles all expected steps side by side, then captures them one by one and shows progress. Returns how many. For
    one sequence also compiles steps with a grammar, and log probabilities; their steps are captured on first use."""
    profile = drafters.profile
    router_layer = _router_layer(profile)
    scored = profile is not None and any(choice.prompt_agreement for choice in profile.domains.values())
    steps = list(dict.fromkeys(expected_steps(drafters, rules, generation_config, expected)))
    preparing = WarmUp(graphs, expected.max_length, rules.max_tree_batch if scored else 0)
    exits = dict.fromkeys(step.exit for step in steps)
    with preparing.compiling():
        for exit in exits:
            preparing.prepare_prompts(exit, expected.batch, router_layer)
        for step in steps:
            preparing.prepare(step)
            if step.sequences == 1 and preparing.compiles:
                preparing.prepare(step._replace(masks=True))
        preparing.compile_logprobs()
    for exit in exits:
        preparing.prepare_prompts(exit, expected.batch, router_layer)
    for step in track(steps, description="capturing steps", console=Console(stderr=True), transient=True):
        preparing.prepare(step)
    return len(steps)


def compile_first(graphs: Graphs, drafters: Drafters, request: Request) -> None:
    """Compiles side by side what an engine's first request needs up to its first token: the passes that find its
    domain, prefill its prompts and score them, and a plain step. Each would compile its own kernels when it runs."""
    if graphs.captured.entries or not graphs.max_kernel_prompt:
        return  # after a warm-up; or kernels are interpreted
    profile, policy = drafters.profile, request.policy
    if policy is None or policy.permanent_reason:
        profile = None
    exit = drafters.most_used_exit if profile is not None else None
    first, masks = request.sequences[0], request.uses_host and not request.processors
    sequences = min(len(request.sequences), graphs.capacity)  # the others wait until some of these end
    step = ExpectedStep(sequences, NONE, exit, first.params, masks)
    prompts = [sequence.prompt for sequence in request.sequences if sequence.parent is None]
    preparing = WarmUp(graphs, max(sequence.max_length for sequence in request.sequences), len(prompts))
    with preparing.compiling():
        preparing.prepare_first(step, prompts, _router_layer(profile))
        if request.logprobs is not None or request.prompt_logprobs is not None:
            preparing.compile_logprobs()


def _router_layer(profile: Profile | None) -> int | None:
    return profile.router_layer if profile is not None and profile.routes else None


def expected_steps(
    drafters: Drafters, rules: Rules, generation_config: GenerationConfig, expected: ExpectedRequests
) -> Iterator[ExpectedStep]:
    """Yields plain steps and those of the profile's plans, without a profile of plans that copy, for batches of every
    power of two up to `batch`."""
    profile, domain, batch = drafters.profile, expected.domain, expected.batch
    domains = [] if profile is None else [domain] if domain is not None else list(profile.domains)
    sizes = [1 << power for power in range((batch - 1).bit_length(), -1, -1)]  # sequences end at different times
    for temperature, size in product(expected.temperatures, sizes):
        asked = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        params = read_settings(generation_config, None, asked).resolve(1).params
        yield ExpectedStep(size, NONE, None, params)
        sequences, policy = min(size, batch), Policy(rules, params)
        copies = profile is None and policy.reason(sequences) is None
        for plan in drafters.copying_candidates(rules).table(sequences).plans if copies else ():
            yield ExpectedStep(size, plan, None, params)
        for plan, exit in drafters.expected(sequences, domains, policy):
            yield ExpectedStep(size, plan, exit, params)
