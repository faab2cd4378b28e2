"""Python's search for garbage, told to come less often while something must not be late.

It starts whenever there are some hundred objects that were not there when it last did, and takes 0.1 ms then, now and
then some milliseconds; a cycle on a GPU may be over in half of one. Requests leave next to no garbage that needs it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

PATIENCE = 50_000  # objects, instead of Python's 700 to 2000: whoever reads the tokens may leave garbage too

_lock = Lock()
_inside = 0  # how many want it now
_usual = gc.get_threshold()


@contextmanager
def garbage_waits() -> Iterator[None]:
    """The first search of the three that Python has waits for many more objects, in the whole process and as long as a
    request is there, read or not; who switched it off keeps it off."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _usual
    with _lock:
        if not _inside:
            _usual = gc.get_threshold()
            gc.set_threshold(max(PATIENCE, _usual[0]) if _usual[0] else 0, *_usual[1:])
        _inside += 1


def _leave() -> None:
    """The last one puts things back, unless somebody else has changed them meanwhile."""
    global _inside
    with _lock:
        _inside -= 1
        if not _inside and gc.get_threshold()[0] == PATIENCE:
            gc.set_threshold(*_usual)
