"""Which cycles a device's session times, sends ahead and shows to its governor; with a machine that runs nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from bench import host
from bench.host import IdleSession, Machine, Mail
from selfspec.backends.cuda import graphs as machine
from selfspec.governor.costs import Costs
from selfspec.governor.governor import MEASURING, Governor
from selfspec.speculation.plan import NONE, Plan

CHAIN = Plan.parse("chain:2")


class Paced(IdleSession):
    """A session of one row whose drafts are all right; notes of each cycle whether it was timed."""

    def __init__(self, machine: Machine, costs: Costs, new_tokens: int = 120) -> None:
        super().__init__(machine, costs, new_tokens=new_tokens)
        self.timed: list[bool] = []

    def step(self) -> None:
        """A cycle, and what is otherwise told when the next one begins."""
        self.cycle()
        self.tell()

    def _account(
        self, rows: Any, turn: Any, lasts: Any, seconds: float, passed: float | None, hurry: bool = False
    ) -> None:
        self.timed.append(passed is not None)
        super()._account(rows, turn, lasts, seconds, passed, hurry)


def test_a_cycle_that_was_captured_first_and_the_first_of_a_request_are_not_timed() -> None:
    """Nothing was in flight before them, so that the host's launch is a part of both; of an engine that knows nothing
    yet the first one is."""
    machine, costs = Machine(), Costs(in_seats=True)
    first, second = Paced(machine, costs), Paced(machine, costs)
    for session in (first, second):
        for _ in range(20):
            session.step()
    plans = [turn.plan for turn in first.rows[0].turns]
    drafts_from = next(place for place, plan in enumerate(plans) if len(plan))
    assert {place for place, timed in enumerate(first.timed) if not timed} == {drafts_from}
    assert second.timed == [False] + [True] * 19


class Event:
    """A timer that was recorded at a time."""

    def __init__(self, at: float) -> None:
        self.at, self.recorded = at, 0

    def record(self, stream: Any) -> None:
        self.recorded += 1

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_a_report_tells_the_time_since_its_own_beginning_or_the_report_before() -> None:
    before, mail = (machine.Mail(torch.zeros(1)) for _ in range(2))
    before._event, mail._own_start, mail._event = Event(2.0), Event(5.0), Event(9.0)  # type: ignore[assignment]
    mail.start(None, before)
    assert mail.seconds == pytest.approx(7e-3) and not mail._own_start.recorded  # type: ignore[attr-defined]
    mail.start(None)
    assert mail.seconds == pytest.approx(4e-3) and mail._own_start.recorded  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", [False, True])
def test_a_device_that_has_nothing_to_do_comes_before_the_governor(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which chooses without what it was not told yet; but whose text has ended gives its pages back first."""
    done: list[Any] = []
    monkeypatch.setattr(Mail, "start", lambda *_: done.append("launched"))
    monkeypatch.setattr(IdleSession, "_goes_on", lambda *_: False)
    monkeypatch.setattr(Governor, "observe", lambda *_: done.append("told"))
    monkeypatch.setattr(
        Governor, "choose", lambda self, watches, context, untold, left: done.append(untold) or (CHAIN, None)
    )
    session = IdleSession(Machine(2), Costs(in_seats=True), rows=2, new_tokens=120)
    session.rows[1].max_length -= 119 if ends else 0
    session.cycle()
    done.clear()
    session.cycle()
    assert done == (["told", None, "launched"] if ends else [(CHAIN, None), "launched", "told"])


def observed(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Paced, Machine, list[float | None]]:
    """A session that uses this plan, with a host that takes 7 seconds for every cycle; and what its governor is told
    that they took."""
    monkeypatch.setattr(Mail, "after", lambda self, before: 7.0)
    session, machine = Paced(Machine(), Costs(in_seats=True)), Machine()
    machine.captured = {plan}
    session.machine = machine  # type: ignore[assignment]
    told: list[float | None] = []
    monkeypatch.setattr(Governor, "choose", lambda *_: (plan, None if len(plan) else "goodput"))
    monkeypatch.setattr(Governor, "observe", lambda self, watches, plan, ends, passed, *_: told.append(passed))
    return session, machine, told


@pytest.mark.parametrize("behind", [False, True])
def test_a_cycle_begins_where_the_one_before_ended_unless_the_device_may_have_waited(
    behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody has to tell a device that is busy when it begins."""
    begins: list[Mail | None] = []
    monkeypatch.setattr(Mail, "start", lambda self, stream, after: begins.append(after))
    monkeypatch.setattr(Mail, "is_there", behind)
    session, _, _ = observed(NONE, monkeypatch)
    flights = []
    for _ in range(4):
        session.step()
        assert session._flight is not None
        flights.append(session._flight.mail)
    assert begins[0] is None and (begins[1] is None) == behind
    assert begins[2:] == ([None] * 3 if behind else flights[:-1])


def test_that_the_host_was_late_is_no_plain_cycles_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a stall would make plans look cheap, and until the next plain cycle drafts that are all wrong would pay."""
    session, _, told = observed(NONE, monkeypatch)
    for _ in range(4):
        session.step()
    assert told[0] is None and told[1:] == pytest.approx([1.05e-3] * 3)


def test_that_the_host_was_late_is_not_the_fault_of_a_plan_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first cycles take the host longer than any later; once it has been timed a few times, being late counts."""
    session, _, _ = observed(CHAIN, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(Mail, "after", lambda self, before: 7.0)
    monkeypatch.setattr(Governor, "choose", lambda *_: (CHAIN, None))
    told: list[float | None] = []
    observe = Governor.observe

    def noted(self: Governor, *of: Any) -> None:
        told.append(of[3])
        observe(self, *of)

    monkeypatch.setattr(Governor, "observe", noted)
    for _ in range(6):
        session.step()
    assert told[0] is None and told[1:4] == pytest.approx([1.05 * 1.2e-3] * 3)
    assert told[4:] == pytest.approx([7.0] * 2, abs=0.5)


def test_plans_are_judged_by_the_time_that_passes_and_not_by_that_of_the_device_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host may take longer than the device; of a cycle that nothing went before, only its own time is known."""
    session, machine, told = observed(CHAIN, monkeypatch)
    monkeypatch.setattr(Governor, "knows", lambda *_: True)
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
    assert 3 <= len(measuring) < 10, "three of each length that the text has had, or one more each"
    assert all(len(turn.plan) for turn in turns if turn.reason != MEASURING)


@pytest.mark.parametrize(("behind", "owed", "unseen"), [(False, -5, 0), (True, 3.5, 0), (True, 3, 1), (True, -5, 3)])
def test_a_host_that_is_behind_asks_the_governor_only_now_and_then(
    behind: bool, owed: float, unseen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once that has settled on a plan and, of all it may lose, has a cycle left; what they cost is booked all the
    same."""
    told: list[str] = []

    def observe(self: Governor, *_: Any) -> None:
        self.plan = CHAIN
        told.append("observed")

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "_at_stake", 1.0)
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
    # What was observed in a step is told before the next one, which then asks nothing: never both between two cycles.
    hurried = [["overlooked"]] * unseen + [["asked", "observed"]]
    assert seen == [["asked", "observed"], ["asked", "overlooked"], *(hurried * 5)[1:]][:10]


def test_before_rows_move_to_fewer_seats_the_governor_is_not_told_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving and choosing for another batch are work enough for one cycle."""
    told: list[tuple[str, int]] = []

    def observe(self: Governor, watches: Any, *_: Any) -> None:
        self.plan = CHAIN
        told.append(("observed", len(session.active)))

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "_at_stake", 0.1)
    monkeypatch.setattr(Governor, "overlook", lambda *_: told.append(("overlooked", len(session.active))))
    monkeypatch.setattr(Governor, "choose", lambda *_: (CHAIN, None))
    session = IdleSession(Machine(2), Costs(in_seats=True), rows=2, new_tokens=30)
    session.rows[1].max_length -= 15
    while session.active:
        session.cycle()
    assert told == [("observed", 2)] * 4 + [("overlooked", 1)] + [("observed", 1)] * 4 + [("observed", 0)]


def test_a_plan_that_may_have_lost_too_much_is_not_used_again_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind as the host is: what it was just told may have closed the ledger."""
    told: list[str] = []

    def observe(self: Governor, *_: Any) -> None:
        closes = len(told) > 10
        self.plan, self.ledger.owed = CHAIN, 9.0 if closes else -5.0
        told.append("closed" if closes else "observed")

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "overlook", lambda *_: told.append("overlooked"))
    monkeypatch.setattr(Governor, "choose", lambda *_: told.append("asked") or (CHAIN, None))
    monkeypatch.setattr(Mail, "is_there", True)
    session = Paced(Machine(), Costs(in_seats=True))
    while "closed" not in told or told[-1] == "closed":
        session.cycle()
    assert told[told.index("closed") + 1] == "asked"


@pytest.mark.parametrize("cycles", [10, 11, 12, 13])  # in every phase of a host that is behind
def test_a_plan_for_more_rows_is_not_used_again_unasked(cycles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(self: Governor, *_: Any) -> None:
        self.plan, self.ledger.owed = CHAIN, -5.0

    one = Plan.parse("chain:1")
    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "overlook", lambda *_: None)
    monkeypatch.setattr(Governor, "choose", lambda self, watches, *_: (one if len(watches) == 1 else CHAIN, None))
    monkeypatch.setattr(Mail, "is_there", True)
    machine = Machine(3)
    machine.captured = {CHAIN, one}
    session = IdleSession(machine, Costs(in_seats=True), rows=3, new_tokens=90)
    for row in session.rows[1:]:
        row.max_length = len(row.tokens) + cycles * (CHAIN.depth + 1)
    while session.active:
        session.cycle()
    in_flight = 1  # when the others ended
    plans = [turn.plan for turn in session.rows[0].turns]
    assert plans[: cycles + in_flight] == [CHAIN] * (cycles + in_flight) and set(plans[cycles + in_flight :]) == {one}


def test_a_host_is_behind_if_the_device_is_idle_by_the_time_that_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing takes time too: the cycle in flight may end meanwhile."""
    chosen, overlooked = [False], []

    def observe(self: Governor, *_: Any) -> None:
        self.plan = CHAIN

    def choose(*_: Any) -> tuple[Plan, None]:
        chosen[0] = True
        return CHAIN, None

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "_at_stake", 0.1)
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
        self.plan = in_use

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "_at_stake", at_stake)
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
        self.plan = CHAIN

    monkeypatch.setattr(Governor, "observe", observe)
    monkeypatch.setattr(Governor, "_at_stake", 1.0)
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


@pytest.mark.parametrize(("kind", "drafts"), [("plain", False), ("nothing pays", False), ("drafting", True)])
def test_what_keeps_the_host_is_measured_where_nothing_and_where_something_is_drafted(kind: str, drafts: bool) -> None:
    found = host.measure(kind, rows=3, cycles=40)
    assert 0 < found["us_p50"] <= found["us_p95"]
    assert (found["drafted"] > 0.5) == drafts


def test_the_host_is_told_of_in_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--rows", "2", "--cycles", "10"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(found["kind"], found["rows"]) for found in results] == [(kind, 2) for kind in host.KINDS]
