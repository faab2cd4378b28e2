"""How often Python looks for garbage while requests run on a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from bench.host import IdleSession, Machine
from selfspec.garbage import PATIENCE, garbage_waits
from selfspec.governor.costs import Costs


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield
    gc.set_threshold(*before)


def test_it_waits_until_the_last_one_has_left() -> None:
    first, second = garbage_waits(), garbage_waits()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (PATIENCE, 11, 12)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("first", [0, PATIENCE, 2 * PATIENCE])
def test_who_wants_it_more_seldom_or_not_at_all_keeps_that(first: int) -> None:
    gc.set_threshold(first, 11, 12)
    with garbage_waits():
        assert gc.get_threshold() == (first, 11, 12)
    assert gc.get_threshold() == (first, 11, 12)


def test_what_somebody_else_wants_meanwhile_is_kept() -> None:
    with pytest.raises(KeyError), garbage_waits():
        gc.set_threshold(900)
        raise KeyError
    assert gc.get_threshold()[0] == 900


def test_a_request_on_a_device_makes_it_wait_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdleSession, "prefill", lambda self: None)
    for ends in (True, False):
        run = IdleSession(Machine(), Costs(in_seats=True)).run()
        next(run)
        assert gc.get_threshold()[0] == PATIENCE
        list(run) if ends else run.close()
        assert gc.get_threshold()[0] == 700
