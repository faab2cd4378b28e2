"""`python -m bench.host`: microseconds of host time per step, with a backend that returns a step's tokens at once.

Scheduler, batch and governor are those that run on a GPU, where host time is hidden as long as it is shorter than a
step; launching kernels is not included.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from bench import tables
from bench.timing import percentile
from selfspec.backends.base import Step
from selfspec.cache.kv_cache import PAGE_SIZE
from selfspec.cache.prefixes import PrefillKind
from selfspec.drafters import Drafter
from selfspec.governor.acceptance import Acceptance
from selfspec.governor.candidates import PlanCandidates, SharedPlans
from selfspec.governor.costs import Costs, estimated_cost
from selfspec.governor.governor import Budget
from selfspec.governor.rules import Policy, Rules
from selfspec.history import StepRecord
from selfspec.metrics import Metrics
from selfspec.sampling import SamplingParams
from selfspec.scheduler import Scheduler
from selfspec.sequence import Request, Sequence
from selfspec.speculation.plan import NONE, Plan

PROMPT = 10  # tokens
CEILING = "backend alone"  # no scheduler, batch or governor
CASES = {"plain": 0.0, "nothing accepted": 0.0, "drafting": 0.6}  # the share of nodes that are accepted
_SCORED = 4  # positions of a sequence that are scored at once
_EXIT: Any = SimpleNamespace(layer=1, block=None, domain_rows=None)


class IdleBackend:
    """Accepts nodes at random and has the tokens of a step at once."""

    overlaps = True
    max_unfilled = 16  # tokens, as of CUDA batches of 4 sequences and more

    def slots_for(self, sequences: int) -> int:
        return sequences

    def step_options(self, sequences: Seq[Sequence]) -> bool:
        return any(sequence.params.do_sample for sequence in sequences)

    def __init__(self, accepted: float = 1.0, seed: int = 0) -> None:
        self._accepted, self._drawn = accepted, random.Random(seed)
        self._scores: list[tuple[Sequence, list[bool]]] = []

    def prefill(self, sequences: Seq[Sequence], exit: Any) -> list[Sequence]:
        return list(sequences)

    def capture_s(self, sequences: Seq[Sequence], plan: Plan, exit: Any) -> float:
        return 0.0

    def launch(self, sequences: Seq[Sequence], record: StepRecord, exit: Any, before: Step | None) -> Step:
        seconds = 1e-3 * (1 + 0.1 * record.plan.depth)
        lasts = [self._last(record.plan) for _ in sequences]
        return Step(list(sequences), record, lasts, seconds, is_cost_sample=before is not None)

    def _last(self, plan: Plan) -> int:
        node = 0
        while not plan.is_leaf(node) and self._accepts():
            node = plan.levels[plan.depths[node] + 1].start if plan.beam else plan.children[node][0]
        return node

    def _accepts(self) -> bool:
        return self._drawn.random() < self._accepted

    def read(self, step: Step) -> None:
        pairs = zip(step.sequences, step.last_nodes, strict=True)
        unfinished = [(sequence, last) for sequence, last in pairs if not sequence.is_finished]
        step.sequences, step.last_nodes = [sequence for sequence, _ in unfinished], [last for _, last in unfinished]
        for sequence, last in unfinished:
            newest = len(sequence.tokens)  # tokens that do not repeat, so that none are copied
            sequence.tokens += range(newest, newest + step.record.plan.depths[last] + 1)
            if sequence.tokens_left <= 0:
                sequence.finish_reason = "length"

    def fill_exit(self, sequences: Seq[Sequence], exit: Any, score: bool, before: Step | None) -> None:
        if score:
            self._scores += [(sequence, [self._accepts() for _ in range(_SCORED)]) for sequence in sequences]

    def exit_scores(self) -> list[tuple[Sequence, list[bool]]]:
        scores, self._scores = self._scores, []
        return scores

    def unfilled(self, sequence: Sequence) -> int:
        return 0

    def prefill_kind(self, tokens: int) -> PrefillKind:
        return PrefillKind("idle", PAGE_SIZE, decode_writes_same_bits=True)

    def score_prompts(self, sequences: Seq[Sequence], exit: Any) -> bool:
        return False

    def note_other_work(self) -> None: ...

    def prompt_scores(self) -> dict[Sequence, tuple[float, int]]:
        return {}

    def release(self, sequence: Sequence) -> None: ...

    def suspend(self, sequence: Sequence) -> None: ...

    def close(self) -> None: ...


def idle_scheduler(
    backend: IdleBackend, costs: Costs, count: int = 1, new_tokens: int = 120, governed: bool = True
) -> tuple[Scheduler, Request]:
    """A scheduler with one waiting request of `count` sequences, governed or plain."""
    params, rules = SamplingParams(), Rules()
    budget = Budget(rules.budget, rules.budget_refill)
    parts = Acceptance([[0.75, 0.1]]), {16: estimated_cost(1, 30)}
    candidates = PlanCandidates(*parts, SharedPlans(*parts, max_tree_batch=4))
    sequences = [Sequence([1] * PROMPT, seed, 0, PROMPT + new_tokens, params) for seed in range(count)]
    policy = Policy(rules, params, mode=None if governed else False)
    drafter = Drafter(_EXIT, candidates=candidates) if governed else None
    request = Request(sequences, policy=policy, drafter=drafter)
    cache: Any = SimpleNamespace(keys=torch.empty(0), free_pages=1 << 20, close=lambda kv: None)
    drafters: Any = SimpleNamespace(
        loaded_exit=_EXIT,
        shared_rows=lambda drafters: None,
        exit_with_rows=lambda exit, rows, prompts: exit,
        costs=lambda kind: costs,
        budget=lambda rules: budget,
    )
    scheduler = Scheduler(cache, drafters, Metrics(), lambda rejection: backend, max_decoding=count, prefix_reuse=False)
    scheduler.waiting.extend(sequences)
    return scheduler, request


def measure(case: str, count: int, steps: int) -> dict[str, Any]:
    """Host time of a step with `count` sequences; the first `steps` steps are not counted."""
    scheduler, request = idle_scheduler(
        IdleBackend(CASES[case]), Costs(), count, new_tokens=20 * steps, governed=case != "plain"
    )
    spent = [_microseconds(scheduler.step) for _ in range(2 * steps)][steps:]
    drafted = sum(len(record.plan) > 0 for record in request.sequences[0].history.records[-steps:])
    return _result(case, count, spent, drafted / steps)


def measure_ceiling(count: int, steps: int) -> dict[str, Any]:
    """Host time of the backend's calls of a plain step."""
    backend = IdleBackend()
    sequences = [Sequence([1] * PROMPT, seed, 0, PROMPT + 4 * steps) for seed in range(count)]
    record = StepRecord.of(NONE, NONE, None)
    spent = [
        _microseconds(lambda: backend.read(backend.launch(sequences, record, None, None))) for _ in range(2 * steps)
    ]
    return _result(CEILING, count, spent[steps:], 0.0)


def _microseconds(function: Callable[[], Any]) -> float:
    before = time.perf_counter()
    function()
    return 1e6 * (time.perf_counter() - before)


def _result(case: str, count: int, spent: list[float], drafted: float) -> dict[str, Any]:
    return {
        "case": case,
        "sequences": count,
        "us_p50": round(median(spent), 1),
        "us_p95": round(percentile(spent, 0.95), 1),
        "drafted": round(drafted, 2),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    add = parser.add_argument
    add("--sequences", type=int, nargs="+", default=[1, 4, 16], help="that decode together (default: 1 4 16)")
    add("--steps", type=int, default=300, help="timed steps (default: 300)")
    args = parser.parse_args(arguments)
    results = [measure_ceiling(count, args.steps) for count in args.sequences]
    results += [measure(case, count, args.steps) for case in CASES for count in args.sequences]
    headings = ("case", "sequences", "us p50", "us p95", "share of steps that drafted")
    print(*tables.table(headings, [list(result.values()) for result in results]), sep="\n")
    print(json.dumps({"benchmark": "host", "steps": args.steps, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
