"""The progress of one request, shared between the loop's thread and the threads that wait for the request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator


class Progress:
    """Number of new tokens of a request's first sequence, and whether the request has ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._every_step = False  # a thread follows every step, not only the end
        self.new_tokens = 0
        self.is_over = False
        self.listener: Callable[[], None] | None = None  # called by the loop after each step and at the end

    def update(self, new_tokens: int) -> None:
        """Called by the loop after each step; wakes threads that follow every step."""
        if self._every_step:
            with self._changed:
                self.new_tokens = new_tokens
                self._changed.notify_all()
        if self.listener is not None:
            self.listener()

    def end(self, new_tokens: int) -> None:
        """Called by the loop when the request has ended and its pages are free; wakes all waiting threads."""
        with self._changed:
            self.new_tokens, self.is_over = new_tokens, True
            self._changed.notify_all()
        if self.listener is not None:
            self.listener()

    def follow(self, every_step: bool) -> Iterator[int]:
        """Blocks until the request has ended. With `every_step` yields the number of new tokens each time it grew."""
        seen, self._every_step = 0, every_step
        while True:
            with self._changed:
                while not self.is_over and not (every_step and self.new_tokens > seen):
                    self._changed.wait()
                count, is_over = self.new_tokens, self.is_over
            if every_step and count > seen:
                seen = count
                yield count
            elif is_over:
                return

    def wait_until_over(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.is_over)
