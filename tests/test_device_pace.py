"""Which cycles a device's session times, sends ahead and shows to its governor; with a machine that runs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfspec.acceptance import Acceptance
from selfspec.costs import Costs, guessed_cost
from selfspec.device_session import DeviceSession
from selfspec.governor import MEASURING, Governor
from selfspec.ladder import Ladder
from selfspec.policy import Policy, Rules
from selfspec.row import Row
from selfspec.sampling import Sampling
from selfspec.tree import NONE, Plan

CHAIN = Plan.parse("chain:2")


class Mail:
    """Tells that all drafts of a cycle were right."""

    is_there = False

    def __init__(self, plan: Plan) -> None:
        self.plan, self.seconds = plan, 1e-3 * (1 + 0.1 * plan.depth)

    def after(self, before: Mail) -> float:
        return self.seconds

    def start(self) -> None: ...

    def send(self, report: Any) -> None: ...

    def read(self) -> list[list[int]]:
        deepest = max(range(len(self.plan) + 1), key=lambda node: self.plan.depths[node])
        count = self.plan.depths[deepest] + 1
        return [[count, deepest, *[7] * count]]


class Machine:
    """Knows which cycles were captured and launched, and launches none."""

    def __init__(self) -> None:
        self.captured: set[Any] = set()
        self.launched: set[Any] = set()
        self.mails: list[Any] = []
        self.owners: dict[int, Any] = {}
        self.current = nullcontext
        self.newest = NONE

    def take_memory(self) -> None: ...

    def seats(self, rows: int) -> Any:
        return SimpleNamespace(count=rows)

    def cycle(self, seats: Any, plan: Plan, exit: Any, drawing: Any, longest: int) -> tuple[Any, Any]:
        self.newest = plan
        return plan, SimpleNamespace(report=None)

    def is_captured(self, key: Any) -> bool:
        return key in self.captured

    def is_new(self, key: Any) -> bool:
        new = key not in self.launched
        self.launched.add(key)
        return new

    def replay(self, key: Any) -> Callable[[], None]:
        self.captured.add(key)
        return lambda: None

    def mail(self, report: Any) -> Mail:
        return Mail(self.newest)

    def take_back(self, *mails: Mail | None) -> None:
        self.mails += [mail for mail in mails if mail is not None]


class Paced(DeviceSession):
    """A session of one row on such a machine; notes of each cycle whether it was timed."""

    def __init__(self, machine: Machine, costs: Costs, new_tokens: int = 120) -> None:
        sampling, rules = Sampling(do_sample=False), Rules()
        ladder = Ladder(Acceptance([[0.75, 0.1]]), {16: guessed_cost(1, 30, on_gpu=True)}, 1, max_tree_batch=4)
        row = Row([1] * 10, seed=0, copy=0, max_length=10 + new_tokens)
        row.sequence = SimpleNamespace(length=9, pages=[])  # type: ignore[assignment]
        parts: Any = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(close=lambda sequence: None)
        governor = Governor(ladder, costs, rules)
        policy = Policy(rules, sampling)
        super().__init__(*parts, [row], sampling, policy, governor=governor, costs=costs, machine=machine)
        self.timed: list[bool] = []

    def step(self) -> None:
        """A cycle, and what is otherwise told when the next one begins."""
        self.cycle()
        self.tell()

    def _reserve(self, *_: Any) -> None: ...

    def _sit(self, rows: list[Row], in_flight: bool = False) -> Any:
        self._own(self.machine.seats(len(rows)), rows)

    def _account(
        self, rows: Any, turn: Any, lasts: Any, seconds: float, passed: float | None, hurry: bool = False
    ) -> None:
        self.timed.append(passed is not None)
        super()._account(rows, turn, lasts, seconds, passed, hurry)


def test_a_cycle_of_a_new_kind_and_the_first_of_a_request_are_not_timed() -> None:
    """The one takes longer than ever again, of the other the host's launch is a part."""
    machine, costs = Machine(), Costs(in_seats=True)
    first, second = Paced(machine, costs), Paced(machine, costs)
    for session in (first, second):
        for _ in range(20):
            session.step()
    plans = [turn.plan for turn in first.rows[0].turns]
    drafts_from = next(place for place, plan in enumerate(plans) if len(plan))
    assert {place for place, timed in enumerate(first.timed) if not timed} == {0, drafts_from}
    assert second.timed == [False] + [True] * 19


def test_plans_are_judged_by_the_time_that_passes_and_not_by_that_of_the_device_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host may take longer than the device; of a cycle that nothing went before, only its own time is known."""
    monkeypatch.setattr(Mail, "after", lambda self, before: 7.0)
    session, machine = Paced(Machine(), Costs(in_seats=True)), Machine()
    machine.captured, machine.launched = {NONE}, {NONE}
    session.machine = machine  # type: ignore[assignment]
    told: list[float | None] = []
    monkeypatch.setattr(Governor, "choose", lambda *_: (NONE, "goodput"))
    monkeypatch.setattr(Governor, "observe", lambda self, watches, plan, ends, passed, *_: told.append(passed))
    for _ in range(4):
        session.step()
    assert told[0] is None and told[1:] == pytest.approx([7.0] * 3, abs=0.5)
    session.step()
    session._left_at -= 5.0  # somebody else was at it meanwhile
    session.step()  # the one that was in flight then is over; the next one waited
    session.step()
    assert told[4:] == pytest.approx([7.0, 7.0, 2.0], abs=0.5)
    session.close()
    assert len(machine.mails) == len(set(map(id, machine.mails))) >= 2


def test_an_engine_that_has_captured_nothing_drafts_in_the_end() -> None:
    """What is not captured cannot be sent ahead; plain steps that measure are, or they would never be timed."""
    session = Paced(Machine(), Costs(in_seats=True))
    while session.active:
        session.step()
    turns = session.rows[0].turns
    measuring = [turn for turn in turns if turn.reason == MEASURING]
    assert len(measuring) < 8
    assert all(len(turn.plan) for turn in turns[len(measuring) :])


@pytest.mark.parametrize(("behind", "owed", "unseen"), [(False, -5, 0), (True, 3.5, 0), (True, 3, 1), (True, -5, 3)])
def test_a_host_that_is_behind_asks_the_governor_only_now_and_then(
    behind: bool, owed: float, unseen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once that has settled on a plan and, of all it may lose, has a cycle left; what they cost is booked all the
    same."""
    told: list[str] = []

    def observe(self: Governor, *_: Any) -> None:
        self.plan, self._at_stake = CHAIN, 1.0
        told.append("observed")

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "overlook", lambda *_: told.append("overlooked"))
    monkeypatch.setattr(Governor, "choose", lambda *_: told.append("asked") or (CHAIN, None))
    monkeypatch.setattr(Mail, "is_there", behind)
    session = Paced(Machine(), Costs(in_seats=True))
    assert session.governor is not None
    session.governor.ledger.owed = owed
    seen = []
    for _ in range(10):
        told.clear()
        session.step()
        seen.append(sorted(set(told)))
    if not unseen:
        assert seen == [["asked", "observed"]] * 10
        return
    hurried = [["asked", "overlooked"], *[["overlooked"]] * (unseen - 1), ["observed"]]
    assert seen == [["asked", "observed"], *hurried * 5][:10]


def test_a_host_is_behind_if_the_device_is_idle_by_the_time_that_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing takes time too: the cycle in flight may end meanwhile."""
    chosen, overlooked = [False], []

    def observe(self: Governor, *_: Any) -> None:
        self.plan, self._at_stake = CHAIN, 0.1

    def choose(*_: Any) -> tuple[Plan, None]:
        chosen[0] = True
        return CHAIN, None

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "overlook", lambda *_: overlooked.append(_))
    monkeypatch.setattr(Governor, "choose", choose)
    monkeypatch.setattr(Mail, "is_there", property(lambda self: chosen[0]))
    session = Paced(Machine(), Costs(in_seats=True))
    for _ in range(6):
        chosen[0] = False
        session.step()
    assert overlooked


@pytest.mark.parametrize(("in_use", "at_stake"), [(NONE, 0.1), (Plan.parse("chain:1"), 0.1), (CHAIN, math.inf)])
def test_a_probe_and_a_plan_of_unknown_costs_are_always_seen(
    in_use: Plan, at_stake: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlooked: list[Any] = []

    def observe(self: Governor, *_: Any) -> None:
        self.plan, self._at_stake = in_use, at_stake

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "overlook", lambda *_: overlooked.append(_))
    monkeypatch.setattr(Governor, "choose", lambda *_: (CHAIN, None))
    monkeypatch.setattr(Mail, "is_there", True)
    session = Paced(Machine(), Costs(in_seats=True))
    for _ in range(6):
        session.step()
    assert not overlooked


def test_what_is_lost_unseen_is_booked_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next plan is asked for as soon as one more cycle could lose too much."""
    asked: list[float] = []

    def observe(self: Governor, *_: Any) -> None:
        self.plan, self._at_stake = CHAIN, 1.0

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "overlook", lambda self, *_: self.ledger.spend(1.0))
    monkeypatch.setattr(Governor, "choose", lambda self, *_: asked.append(self.ledger.owed) or (CHAIN, None))
    monkeypatch.setattr(Mail, "is_there", True)
    session = Paced(Machine(), Costs(in_seats=True))
    assert session.governor is not None
    session.governor.ledger.owed = 2.5
    for _ in range(5):
        session.step()
    assert asked.count(3.5) >= 3 and session.governor.ledger.owed == 3.5


def test_tokens_are_there_before_anybody_is_told_what_they_came_to() -> None:
    """Which happens when the next ones are asked for, with the last of them, or when nobody asks any more."""
    whole, left = (Paced(Machine(), Costs(in_seats=True), new_tokens=20) for _ in range(2))
    row = whole.rows[0]
    whole.cycle()
    assert row.new_tokens and not row.turns
    whole.cycle()
    assert len(row.turns) == 1
    cycles = 2
    while whole.active:
        whole.cycle()
        cycles += 1
    assert len(row.turns) == cycles
    left.cycle()
    left.close()
    left.close()
    assert len(left.rows[0].turns) == 1
