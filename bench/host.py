"""`python -m bench.host`: how long a cycle keeps the host, with a device that does nothing.

The host launches a cycle while the one before runs, so whatever it does is free as long as it takes less than a cycle;
beyond that the device waits. Sessions, governors and accounts are those that run on a GPU; only the machine is not
there: it tells at once what a cycle has accepted. What launching takes on a GPU is not in it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from selfspec.backends.cuda.session import DeviceSession
from selfspec.governor.acceptance import Acceptance
from selfspec.governor.candidates import Ladder
from selfspec.governor.costs import Costs, guessed_cost
from selfspec.governor.governor import Governor
from selfspec.governor.rules import Policy, Rules
from selfspec.sampling import Sampling
from selfspec.sequence import Row
from selfspec.speculation.plan import NONE, Plan

PROMPT = 10
KINDS = {"plain": 0.0, "nothing pays": 0.0, "drafting": 0.6}  # how often a draft is right


class Mail:
    """Tells how many drafts of a cycle were right, for every row."""

    is_there = False

    def __init__(self, plan: Plan, rows: int, is_right: Callable[[], bool]) -> None:
        self.plan, self.seconds = plan, 1e-3 * (1 + 0.1 * plan.depth)
        self._reports = [self._report(is_right) for _ in range(rows)]

    def _report(self, is_right: Callable[[], bool]) -> list[int]:
        node = 0
        while self.plan.children[node] and is_right():
            node = self.plan.children[node][0]
        count = self.plan.depths[node] + 1
        return [count, node, *[7] * count]

    def after(self, before: Mail) -> float:
        return self.seconds

    def start(self, stream: None, after: Mail | None) -> None: ...

    def send(self, report: Any, stream: None) -> None: ...

    def read(self) -> list[list[int]]:
        return self._reports


class Machine:
    """Knows which cycles were captured, and launches none."""

    def __init__(self, rows: int = 1, right: float = 1.0, seed: int = 0) -> None:
        self.captured: set[Any] = set()
        self.mails: list[Any] = []
        self.owners: dict[int, Any] = {}
        self.current = nullcontext
        self.stream = None
        self.newest_mail: Mail | None = None
        self.newest = NONE
        self._rows, self._right, self._drawn = rows, right, random.Random(seed)

    def take_memory(self) -> None: ...

    def seats(self, rows: int) -> Any:
        return SimpleNamespace(count=rows)

    def cycle(self, seats: Any, plan: Plan, exit: Any, drawing: Any, longest: int) -> tuple[Any, Any]:
        self.newest = plan
        return plan, SimpleNamespace(report=None)

    def kept_cycle(self, key: Any) -> None:
        """Nothing is."""

    def is_captured(self, key: Any) -> bool:
        return key in self.captured

    def replay(self, key: Any) -> Callable[[], None]:
        self.captured.add(key)
        return lambda: None

    def mail(self, report: Any) -> Mail:
        return Mail(self.newest, self._rows, lambda: self._drawn.random() < self._right)

    def take_back(self, *mails: Mail | None) -> None:
        self.mails += [mail for mail in mails if mail is not None]


class IdleSession(DeviceSession):
    """Rows that are decoded on such a machine, under a governor or plainly."""

    def __init__(
        self, machine: Machine, costs: Costs, rows: int = 1, new_tokens: int = 120, governed: bool = True
    ) -> None:
        sampling, rules = Sampling(do_sample=False), Rules()
        ladder = Ladder(Acceptance([[0.75, 0.1]]), {16: guessed_cost(1, 30)}, 1, max_tree_batch=4)
        parts: Any = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(close=lambda sequence: None)
        of_rows = [Row([1] * PROMPT, seed=seed, copy=0, max_length=PROMPT + new_tokens) for seed in range(rows)]
        for row in of_rows:
            row.sequence = SimpleNamespace(length=PROMPT - 1, pages=[])  # type: ignore[assignment]
        governor, policy = Governor(ladder, costs, rules), Policy(rules, sampling, mode=None if governed else False)
        kwargs: dict[str, Any] = {"governor": governor if governed else None, "costs": costs, "machine": machine}
        super().__init__(*parts, of_rows, sampling, policy, **kwargs)

    def _reserve(self, *_: Any) -> None: ...

    def _sit(self, rows: list[Row], in_flight: bool = False) -> Any:
        self._own(self.machine.seats(len(rows)), rows)


def measure(kind: str, rows: int, cycles: int) -> dict[str, Any]:
    """Microseconds of a cycle, after as many that are not counted."""
    session = IdleSession(
        Machine(rows, KINDS[kind]), Costs(in_seats=True), rows, new_tokens=20 * cycles, governed=kind != "plain"
    )
    spent = []
    for _ in range(2 * cycles):
        before = time.perf_counter()
        session.cycle()
        spent.append(1e6 * (time.perf_counter() - before))
    drafted = sum(len(turn.plan) > 0 for turn in session.rows[0].turns[-cycles:])
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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--cycles", type=int, default=300)
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
