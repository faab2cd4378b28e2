"""`python -m bench.host`: how long a step keeps the host, with a device that does nothing.

The host launches a step while the one before runs, so its own time is hidden as long as it is less than a step's;
beyond that the device waits. Scheduler, batch, governor and accounts are those that run on a GPU; only the backend is a
stand-in that has the tokens of a step at once. The time that launching takes on a GPU is not in it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence as Seq
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from selfspec.backends.base import ExitScores, Step
from selfspec.drafters import Drafter
from selfspec.governor.acceptance import Acceptance
from selfspec.governor.candidates import Ladder
from selfspec.governor.costs import Costs, guessed_cost
from selfspec.governor.rules import Policy, Rules
from selfspec.metrics import Metrics
from selfspec.sampling import SamplingParams
from selfspec.scheduler import Scheduler
from selfspec.sequence import Request, Sequence, StepRecord
from selfspec.speculation.plan import Plan

PROMPT = 10  # tokens
KINDS = {"plain": 0.0, "nothing pays": 0.0, "drafting": 0.6}  # how often a draft is right
_TOKEN = 7
_SCORED = 4  # positions of a sequence that are scored at once
_EXIT: Any = SimpleNamespace(layer=1, block=None)


class IdleBackend:
    """Tells at once how many drafts of a step were right, for every sequence."""

    overlaps = True
    most_unfilled = 16  # tokens, as of CUDA batches of 4 sequences and more

    def slots_for(self, sequences: int) -> int:
        return sequences

    def __init__(self, right: float = 1.0, seed: int = 0) -> None:
        self._right, self._drawn = right, random.Random(seed)
        self._scores: list[ExitScores] = []

    def prefill(self, sequences: Seq[Sequence], exit: Any) -> list[Sequence]:
        return list(sequences)

    def launch(self, sequences: Seq[Sequence], record: StepRecord, exit: Any, before: Step | None) -> Step:
        seconds = 1e-3 * (1 + 0.1 * record.plan.depth)
        lasts = [self._last(record.plan) for _ in sequences]
        return Step(list(sequences), record, lasts, seconds, seconds, is_typical=before is not None)

    def _last(self, plan: Plan) -> int:
        node = 0
        while plan.children[node] and self._is_right():
            node = plan.children[node][0]
        return node

    def _is_right(self) -> bool:
        return self._drawn.random() < self._right

    def read(self, step: Step) -> None:
        going_on = [(of, last) for of, last in zip(step.sequences, step.lasts, strict=True) if not of.is_finished]
        step.sequences, step.lasts = [of for of, _ in going_on], [last for _, last in going_on]
        for sequence, last in going_on:
            sequence.tokens += [_TOKEN] * (step.record.plan.depths[last] + 1)
            if sequence.tokens_left <= 0:
                sequence.finish_reason = "length"

    def fill_exit(self, sequences: Seq[Sequence], exit: Any, score: bool, before: Step | None) -> None:
        if score:
            ranks = [[int(not self._is_right()) for _ in range(_SCORED)] for _ in sequences]
            self._scores.append(ExitScores(list(sequences), ranks, offered=1))

    def exit_scores(self) -> list[ExitScores]:
        scores, self._scores = self._scores, []
        return scores

    def score_prompts(self, sequences: Seq[Sequence], exit: Any) -> None: ...

    def prompt_scores(self, wait: bool = False) -> dict[Sequence, tuple[float, int]]:
        return {}

    def release(self, sequence: Sequence) -> None: ...

    def suspend(self, sequence: Sequence) -> None: ...

    def close(self) -> None: ...


def idle_scheduler(
    backend: IdleBackend, costs: Costs, rows: int = 1, new_tokens: int = 120, governed: bool = True
) -> tuple[Scheduler, Request]:
    """A scheduler with one request of so many sequences, under a governor or plain, waiting for its first step."""
    params, rules = SamplingParams(), Rules()
    ladder = Ladder(Acceptance([[0.75, 0.1]]), {16: guessed_cost(1, 30)}, 1, max_tree_batch=4)
    sequences = [Sequence([1] * PROMPT, seed, 0, PROMPT + new_tokens, params) for seed in range(rows)]
    policy = Policy(rules, params, mode=None if governed else False)
    drafter = Drafter(_EXIT, candidates=ladder) if governed else None
    request = Request(sequences, policy=policy, drafter=drafter, is_prepared=True)
    cache: Any = SimpleNamespace(keys=torch.empty(0), free_pages=1 << 20, close=lambda kv: None)
    drafters: Any = SimpleNamespace(
        default_exit=_EXIT, shared_exit=lambda exit, drafters, prompts: exit, costs=lambda kind: costs
    )
    scheduler = Scheduler(cache, drafters, Metrics(), lambda rejection: backend, max_decoding=rows)
    scheduler.waiting.extend(sequences)
    return scheduler, request


def measure(kind: str, rows: int, cycles: int) -> dict[str, Any]:
    """Microseconds of a step, after as many that are not counted."""
    scheduler, request = idle_scheduler(
        IdleBackend(KINDS[kind]), Costs(in_seats=True), rows, new_tokens=20 * cycles, governed=kind != "plain"
    )
    spent = []
    for _ in range(2 * cycles):
        before = time.perf_counter()
        scheduler.step()
        spent.append(1e6 * (time.perf_counter() - before))
    drafted = sum(len(record.plan) > 0 for record in request.sequences[0].records[-cycles:])
    late = sorted(spent[cycles:])[int(0.95 * cycles)]
    return {
        "kind": kind,
        "rows": rows,
        "us_p50": round(median(spent[cycles:]), 1),
        "us_p95": round(late, 1),
        "drafted": round(drafted / cycles, 2),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="sequences that decode together")
    parser.add_argument("--cycles", type=int, default=300, help="steps that are timed")
    args = parser.parse_args(arguments)
    table = Table("request", "rows", "us p50", "us p95", "cycles that drafted", title="the host's own time of a cycle")
    results = [measure(kind, rows, args.cycles) for kind in KINDS for rows in args.rows]
    for found in results:
        table.add_row(*map(str, found.values()))
    Console().print(table)
    print(json.dumps({"benchmark": "host", "cycles": args.cycles, "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
