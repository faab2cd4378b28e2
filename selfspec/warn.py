"""Warnings that appear once per engine and point at the caller's line."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


class WarnOnce:
    """Issues each text as a UserWarning the first time it is given; its line is the first one outside selfspec."""

    def __init__(self) -> None:
        self._issued: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._issued:
            self._issued.add(text)
            warnings.warn(text, UserWarning, stacklevel=_caller_level())


def _caller_level() -> int:
    """The `stacklevel` with which the calling function's warning points at the first frame outside selfspec."""
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
