"""The host benchmark: its command, its idle backend, and a scheduler that runs on it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import host
from selfspec.governor.costs import Costs
from selfspec.governor.governor import Governor
from selfspec.speculation.plan import NONE, Plan


def test_the_command_times_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--sequences", "1", "3", "--steps", "40"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    cases = [host.CEILING, *host.CASES]
    assert [(result["case"], result["sequences"]) for result in found] == [
        (case, count) for case in cases for count in (1, 3)
    ]
    assert all(result["us_p50"] > 0 for result in found)
    drafted = {result["case"]: result["drafted"] for result in found}
    assert drafted["plain"] == 0 and drafted["drafting"] > 0.8 > 0.2 > drafted["nothing accepted"]


def test_sequences_get_the_accepted_tokens_and_end_at_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Governor, "choose", lambda *_, **__: (Plan.parse("chain:3"), None))
    scheduler, request = host.idle_scheduler(host.IdleBackend(accepted=1.0), Costs(), count=2, new_tokens=41)
    while scheduler.step():
        pass
    assert request.progress.is_over and [sequence.history.steps for sequence in request.sequences] == [11, 11]
    assert all(sequence.history.accepted == 33 for sequence in request.sequences)


def test_every_request_of_an_idle_batch_has_its_exit_scored_as_soon_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting longer after an exit that did not pay concerns the sequences of that request alone."""
    monkeypatch.setattr(Governor, "choose", lambda *_, **__: (NONE, "goodput"))
    scores: list[int] = []
    fill_exit = host.IdleBackend.fill_exit

    def recorded(self: Any, sequences: Any, exit: Any, score: bool, before: Any) -> None:
        if score:
            scores.append(sequences[0].history.steps + (before is not None))
        fill_exit(self, sequences, exit, score, before)

    monkeypatch.setattr(host.IdleBackend, "fill_exit", recorded)
    scheduler, _ = host.idle_scheduler(host.IdleBackend(accepted=0.0), Costs(), count=2, new_tokens=100)
    while scheduler.step():
        pass
    (first, *_), scores[:] = scores, []
    _, again = host.idle_scheduler(host.IdleBackend(), Costs(), count=2, new_tokens=100)
    scheduler.waiting.extend(again.sequences)
    while scheduler.step():
        pass
    assert first == scores[0] >= host.IdleBackend.max_unfilled
