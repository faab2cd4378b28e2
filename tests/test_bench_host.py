"""The host benchmark's idle backend, and what a scheduler does with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import host
from selfspec.governor.costs import Costs
from selfspec.governor.governor import Governor
from selfspec.governor.rules import Rules
from selfspec.speculation.plan import NONE, Plan


def test_the_command_times_every_kind_of_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--rows", "1", "3", "--cycles", "40"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(row["kind"], row["rows"]) for row in found] == [(kind, rows) for kind in host.KINDS for rows in (1, 3)]
    assert all(row["us_p50"] > 0 for row in found)
    drafted = {row["kind"]: row["drafted"] for row in found}
    assert drafted["plain"] == 0 and drafted["drafting"] > 0.8 > 0.2 > drafted["nothing pays"]


def test_sequences_get_what_the_plan_accepts_and_end_at_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Governor, "choose", lambda *_, **__: (Plan.parse("chain:3"), None))
    scheduler, request = host.idle_scheduler(host.IdleBackend(right=1.0), Costs(), rows=2, new_tokens=41)
    while scheduler.step():
        pass
    assert request.progress.is_over and [of.steps for of in request.sequences] == [11, 11]
    assert all(of.accepted == 33 for of in request.sequences)


def test_every_request_of_an_idle_batch_has_its_exit_scored_as_soon_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Patience with an exit that did not pay belongs to the texts that have ended."""
    monkeypatch.setattr(Governor, "choose", lambda *_, **__: (NONE, "goodput"))
    scores: list[int] = []
    fill_exit = host.IdleBackend.fill_exit

    def noted(self: Any, sequences: Any, exit: Any, score: bool, before: Any) -> None:
        if score:
            scores.append(sequences[0].steps + (before is not None))
        fill_exit(self, sequences, exit, score, before)

    monkeypatch.setattr(host.IdleBackend, "fill_exit", noted)
    scheduler, _ = host.idle_scheduler(host.IdleBackend(right=0.0), Costs(), rows=2, new_tokens=100)
    while scheduler.step():
        pass
    (first, *_), scores[:] = scores, []
    _, again = host.idle_scheduler(host.IdleBackend(), Costs(), rows=2, new_tokens=100)
    scheduler.waiting.extend(again.sequences)
    while scheduler.step():
        pass
    assert (first, scores[0]) == (Rules().scored_after(2),) * 2
