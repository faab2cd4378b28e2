"""Compilation in parallel: what is shown while it takes long."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Timer

import pytest

pytest.importorskip("triton")

from selfspec.backends.cuda import compiler  # noqa: E402


@pytest.mark.parametrize(("seconds", "is_shown"), [(0.0, False), (0.3, True)])
def test_compilations_that_take_long_are_explained_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, is_shown: bool
) -> None:
    monkeypatch.setattr(compiler, "PROGRESS_AFTER_S", 0.1)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    futures: list[Future] = [Future(), Future()]
    timers = [Timer(seconds, future.set_result, [None]) for future in futures]
    for timer in timers:
        timer.start()
    if not seconds:
        for timer in timers:
            timer.join()
    compiler._wait_with_progress(futures)
    assert all(future.done() for future in futures)
    captured = capsys.readouterr()
    assert ("compiling kernels, once per machine" in captured.err) is is_shown and captured.out == ""
