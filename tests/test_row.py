"""What rows count, whoever makes their tokens, against a count kept token by token."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec import Plan, Rules
from selfspec.backends.cuda.session import DeviceSession, Flight
from selfspec.backends.torch_backend import Session
from selfspec.governor.governor import MEASURING, Change
from selfspec.governor.rules import Policy
from selfspec.results import stats_of
from selfspec.sampling import Sampling
from selfspec.sequence import Row
from selfspec.speculation.draft_tree import Draft
from selfspec.speculation.plan import NONE
from tests.scripted import IRREGULAR

OWN, DRAFTED, END = 5, 10, 100  # the model's token; a node's, plus the node; added to either where the text ends
VOCABULARY = 256
LENGTHS = {"prompt": 3, "most": 40}


@dataclass(frozen=True)
class Scripted:
    """A cycle: how it was chosen, and for each row the last node that is right and the place of an end, if any."""

    plan: Plan
    reason: str | None
    rows: list[tuple[int, int | None]]

    def tokens(self, row: int) -> list[int]:
        last, end = self.rows[row]
        tokens = [DRAFTED + node for node in self.plan.path(last)[1:]] + [OWN]
        return [token + END * (place == end) for place, token in enumerate(tokens)]


@st.composite
def scripts(draw: st.DrawFn) -> list[Scripted]:
    """Cycles of three rows, enough for every text to end."""
    kinds = [("none", MEASURING), ("none", "goodput"), ("none", "ood")]
    kinds += [(plan, None) for plan in ("chain:1", "chain:3", "tree:3,2", IRREGULAR)]
    made = []
    for _ in range(LENGTHS["most"]):
        name, reason = draw(st.sampled_from(kinds))
        plan = Plan.parse(name)
        lasts = [draw(st.integers(0, len(plan))) for _ in range(3)]
        ends = [draw(st.sampled_from([None] * 9 + list(range(plan.depths[last] + 1)))) for last in lasts]
        made.append(Scripted(plan, reason, list(zip(lasts, ends, strict=True))))
    return made


class Cache:
    """Stands in for the cache: nothing is kept."""

    def reserve(self, sequence: Any, slots: int) -> None: ...
    def commit(self, sequences: Any, paths: Any) -> None: ...
    def abort(self, sequences: Any) -> None: ...
    def close(self, sequence: Any) -> None: ...


def rows_of(lengths: list[int]) -> list[Row]:
    return [Row([1] * LENGTHS["prompt"], 0, 0, LENGTHS["prompt"] + length) for length in lengths]


class OfHost(Session):
    """A session whose model says, and whose exit drafts, what a script tells."""

    def __init__(self, script: list[Scripted], lengths: list[int]) -> None:
        model: Any = SimpleNamespace(device=torch.device("cpu"))
        sampling = Sampling(eos_token_ids=tuple(range(END, VOCABULARY)))
        super().__init__(model, Cache(), rows_of(lengths), sampling, Policy(Rules(), sampling))  # type: ignore[arg-type]
        self.script, self.done = script, 0

    def prefill(self) -> None: ...

    def choose_plan(self, rows: list[Row], in_flight: Any = None) -> tuple[Plan, str | None]:
        return self.script[self.done].plan, self.script[self.done].reason

    def draft(self, rows: list[Row], plan: Plan) -> Draft:
        tokens = torch.arange(len(plan) + 1).repeat(len(rows), 1) + DRAFTED
        for place, row in enumerate(rows):
            path, said = self._said(row)
            for node, token in zip(path[1:], said[:-1], strict=True):
                tokens[place, node:][:1] = token  # a plan that was cut has fewer nodes
        return Draft(plan, tokens, hidden=tokens)

    def verify(self, rows: list[Row], draft: Draft) -> torch.Tensor:
        logits = torch.zeros(len(rows), len(self.script[self.done].plan) + 1, VOCABULARY)
        for place, row in enumerate(rows):
            for node, token in zip(*self._said(row), strict=True):
                logits[place, node, token] = 1
        self.done += 1
        return logits

    def _logits(self, known: torch.Tensor) -> torch.Tensor:
        return known

    def _said(self, row: Row) -> tuple[list[int], list[int]]:
        cycle, index = self.script[self.done], next(i for i, other in enumerate(self.rows) if other is row)
        return cycle.plan.path(cycle.rows[index][0]), cycle.tokens(index)


class OfDevice(DeviceSession):
    """A session whose device reports what a script tells; each cycle is launched before the last one has landed."""

    def __init__(self, script: list[Scripted], lengths: list[int], listens: bool) -> None:
        machine: Any = SimpleNamespace(
            take_memory=lambda: None, current=nullcontext, take_back=lambda *mails: None, owners={}
        )
        model: Any = SimpleNamespace(device=torch.device("cpu"))
        sampling = Sampling(eos_token_ids=tuple(range(END, VOCABULARY)))
        policy: Any = Policy(Rules(), sampling)
        super().__init__(model, Cache(), rows_of(lengths), sampling, policy, machine=machine)
        self.script, self.done = script, 0
        self.heard: list[int] = []
        if listens:
            self.on_token = lambda row, token: self.heard.append(token)

    def prefill(self) -> None: ...

    def _goes_on(self, flight: Flight) -> bool:
        return self.done < len(self.script)

    def _launch(self, before: Flight | None = None) -> Flight:
        cycle, rows = self.script[self.done], self.active
        places = [index for index, row in enumerate(self.rows) if row.finish_reason is None]
        reports = [[cycle.plan.depths[cycle.rows[i][0]] + 1, cycle.rows[i][0], *cycle.tokens(i)] for i in places]
        self.done += 1
        reports.append([0, 0, 0])  # a seat that nobody sits on
        mail: Any = SimpleNamespace(is_there=False, read=lambda: reports, seconds=1e-3, after=lambda before: 1e-3)
        return Flight(rows, cycle.plan, cycle.reason, mail)


class Observer:
    """Stands in for a governor: notes what it is told of cycles, but for whose they were and how long they took."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.timed: list[bool] = []

    def knows(self, *_: Any) -> bool:
        return True

    def observe(self, watches: Any, plan: Plan, ends: Any, seconds: float | None, *rest: Any) -> None:
        assert len(watches) == len(ends)
        self.seen.append((plan, ends, *rest))
        self.timed.append(seconds is not None)


@dataclass
class Counted:
    """One text of a script, token by token."""

    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    cycles: list[tuple[Plan, Plan, str | None]] = field(default_factory=list)  # plan, what it was cut from, reason
    starts: list[int] = field(default_factory=list)  # tokens before each cycle
    accepted: Counter[int] = field(default_factory=Counter)  # by depth
    reached: Counter[int] = field(default_factory=Counter)
    rejections: int = 0
    last: int = 0  # node, of the last cycle
    finish_reason: str | None = None

    def add(self, plan: Plan, chosen: Plan, reason: str | None, last: int, tokens: list[int], most: int) -> None:
        self.cycles.append((plan, chosen, reason))
        self.starts.append(len(self.tokens))
        self.last = last
        for depth, token in enumerate(tokens):
            drafted = depth < plan.depths[last]
            self.tokens.append(token)
            self.origins.append("drafted" if drafted else "decoded" if len(plan) else "plain")
            self.accepted[depth] += drafted
            rejected = not drafted and len(plan.children[last]) > 0
            self.reached[depth] += drafted or rejected
            self.rejections += rejected
            if token >= END or len(self.tokens) == most:
                self.finish_reason = "stop" if token >= END else "length"
                return

    def changes(self) -> list[Change]:
        """Another plan, or the end of measuring."""
        found: list[Change] = []
        for cycle, (start, (_, chosen, reason)) in enumerate(zip(self.starts, self.cycles, strict=True)):
            last = found[-1] if found else None
            if last is None or last.plan != str(chosen) or (last.reason == MEASURING and reason != MEASURING):
                found.append(Change(cycle, start, str(chosen), reason))
        return found

    def by_depth(self, counts: Counter[int]) -> list[int]:
        return [counts[depth] for depth in range(sum(count > 0 for count in self.reached.values()))]

    def end(self) -> int | None:
        """The last node, while the text goes on."""
        return self.last if self.finish_reason is None else None

    def left(self, most: int) -> int:
        return most - len(self.tokens) if self.finish_reason is None else 0

    def check(self, row: Row) -> None:
        assert row.tokens[LENGTHS["prompt"] :] == self.tokens
        assert row.finish_reason == self.finish_reason
        assert row.origins == self.origins
        assert row.cycles == len(self.cycles)
        assert row.drafted == sum(len(plan) for plan, _, _ in self.cycles)
        assert row.accepted == self.accepted.total() == self.origins.count("drafted")
        assert row.rejections == self.rejections
        assert row.plans == Counter(plan for plan, _, _ in self.cycles)
        assert list(row.plans) == list(dict.fromkeys(plan for plan, _, _ in self.cycles)), "the first of equals leads"
        assert row.accepted_by_depth == self.by_depth(self.accepted)
        assert row.reached_by_depth == self.by_depth(self.reached)
        assert sum(row.outcomes.values()) == row.cycles and min(row.outcomes.values()) > 0
        reasons = [reason for _, _, reason in self.cycles if reason not in (None, MEASURING)]
        assert row.disabled_reason == (reasons[0] if reasons else None)
        assert row.changes == self.changes()


def counted(script: list[Scripted], lengths: list[int], cuts: bool) -> list[list[Counted]]:
    """What is told of each row after each cycle, up to the last one's end. Where the host drafts it `cuts` plans that
    are longer than what is left of every text."""
    rows, told = [Counted() for _ in lengths], []
    for cycle in script:
        active = [index for index, row in enumerate(rows) if row.finish_reason is None]
        if not active:
            break
        left = max(lengths[index] - len(rows[index].tokens) for index in active)
        plan = cycle.plan.truncated(left - 1) if cuts else cycle.plan
        for index in active:
            path = [node for node in cycle.plan.path(cycle.rows[index][0]) if node <= len(plan)]
            tokens = cycle.tokens(index)[: len(path)]
            rows[index].add(plan, cycle.plan, cycle.reason, path[-1], tokens, lengths[index])
        told.append([Counted(**{name: _copy(of) for name, of in vars(row).items()}) for row in rows])
    return told


def _copy(value: Any) -> Any:
    return value.copy() if hasattr(value, "copy") else value


MANY = st.lists(st.integers(1, LENGTHS["most"]), min_size=3, max_size=3)


@pytest.mark.parametrize("kind", ["host", "device", "device, heard"])
@settings(max_examples=60, deadline=None)
@given(script=scripts(), lengths=MANY, each_cycle=st.booleans())
def test_rows_tell_what_happened_token_by_token(
    kind: str, script: list[Scripted], lengths: list[int], each_cycle: bool
) -> None:
    """Whether somebody asks to be told after every cycle or only once it is over."""
    session: Session = OfHost(script, lengths) if kind == "host" else OfDevice(script, lengths, "heard" in kind)
    told = counted(script, lengths, cuts=kind == "host")
    session.governor = observer = Observer()  # type: ignore[assignment]
    cycles = 0
    for _ in session.run():
        cycles += 1
        if each_cycle:
            session.tell()
            for row, of_row in zip(session.rows, told[cycles - 1], strict=True):
                of_row.check(row)
    assert cycles == len(told)
    for before, after, seen in zip([[Counted()] * 3, *told], told, observer.seen, strict=False):
        active = [index for index, row in enumerate(before) if row.finish_reason is None]
        plan, _, reason = after[active[0]].cycles[-1]
        ends, left = [after[i].end() for i in active], [after[i].left(lengths[i]) for i in active]
        context = LENGTHS["prompt"] + max(len(before[i].tokens) for i in active)  # when the cycle began
        assert seen == (plan, ends, context, reason, left)
    ended = [sum(row.finish_reason is not None for row in rows) for rows in ([Counted()] * 3, *told[:-1])]
    sent_ahead = [kind != "host" and now > before for before, now in zip([0, *ended], ended, strict=False)]
    assert observer.timed == [not others for others in sent_ahead], "a cycle's time is of all rows that were in it"
    for row, of_row in zip(session.rows, told[-1], strict=True):
        of_row.check(row)
        stats = stats_of(row, session)
        assert stats.accept_rate == (row.accepted / sum(row.reached_by_depth) if row.reached_by_depth else 0)
        assert stats.plan == str(row.plans.most_common(1)[0][0])
    summary = session.metrics.summary()
    assert (summary.cycles, summary.emissions) == (cycles, sum(row.cycles for row in session.rows))
    assert summary.tokens == sum(row.new_tokens for row in session.rows)
    if kind == "device, heard":
        assert len(session.heard) == summary.tokens  # type: ignore[attr-defined]


def test_a_text_that_ends_with_a_drafted_token_has_none_of_the_models_own() -> None:
    script = [Scripted(Plan.parse("chain:3"), None, [(2, None)]), Scripted(Plan.parse("chain:3"), None, [(2, 1)])]
    for session in (OfHost(script, [40]), OfDevice(script, [40], listens=False)):
        (row,) = session.rows
        list(session.run())
        assert row.origins == ["drafted", "drafted", "decoded", "drafted", "drafted"]
        assert (row.accepted, row.rejections, row.drafted) == (4, 1, 6)
        assert row.outcomes == {(2, 3): 1, (2, 2): 1}
        assert (row.accepted_by_depth, row.reached_by_depth) == ([2, 2, 0], [2, 2, 1])


def test_a_cycle_that_fails_is_not_told_of() -> None:
    """The first text ends with a drafted token, and what fails is after that; its error is not hidden by another."""
    for cycles_before in (0, 1):
        script = [Scripted(Plan.parse("chain:2"), None, [(1, None), (1, None)])] * cycles_before
        session = OfHost([*script, Scripted(Plan.parse("chain:2"), None, [(1, 0), (1, None)])], [40, 40])
        session.stops = [_FailsAfter(4 * cycles_before + 1)]
        with pytest.raises(ZeroDivisionError):
            list(session.run())
        ended = session.rows[0]
        assert ended.finish_reason == "stop"
        assert ended.cycles == cycles_before and ended.outcomes == Counter({(1, 2): cycles_before})
        assert session.metrics.summary().accepted_by_depth == [2, 0][: 2 * cycles_before]


class _FailsAfter:
    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, prefix: torch.Tensor) -> bool:
        self.calls -= 1
        return self.calls < 0 and 1 // 0 > 0


def test_a_row_that_has_not_begun_tells_of_nothing() -> None:
    row = Row([1], 0, 0, 9)
    assert (row.cycles, row.drafted, row.accepted, row.rejections, row.disabled_reason) == (0, 0, 0, 0, None)
    assert (row.origins, row.changes, row.accepted_by_depth, row.reached_by_depth) == ([], [], [], [])
    assert not row.plans and not row.outcomes and NONE not in row.plans


@pytest.mark.parametrize(
    ("new", "cycles", "usual"),
    [(0, 0, 3), (12, 8, 1.5), (30, 10, 3), (50, 10, 3)],
    ids=["nothing yet", "few", "all", "more"],
)
def test_a_cycle_usually_brings_what_those_before_brought_and_no_more_than_it_can(
    new: int, cycles: int, usual: float
) -> None:
    row = Row([1], seed=0, copy=0, max_length=100, lasts=[0] * cycles)
    row.tokens += [2] * new
    assert row.usual_tokens(Plan.parse("chain:2")) == usual
