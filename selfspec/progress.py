"""The progress of one request, shared between the loop's thread and the threads that wait for the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Lock


class Progress:
    """Number of new tokens of a request's first sequence, and whether the request has ended."""

    def __init__(self) -> None:
        self._steps: SimpleQueue[None] = SimpleQueue()  # wakes the thread that follows every step
        self._running = Lock()  # held until the request has ended
        self._running.acquire()
        self._every_step = False  # a thread follows every step, not only the end
        self.new_tokens = 0
        self.is_over = False
        self.listener: Callable[[], None] | None = None  # called by the loop after each step and at the end

    def update(self, new_tokens: int) -> None:
        """Called by the loop after each step; wakes the thread that follows every step."""
        if self._every_step:
            self.new_tokens = new_tokens
            self._steps.put(None)
        if self.listener is not None:
            self.listener()

    def end(self, new_tokens: int) -> None:
        """Called by the loop when the request has ended and its pages are free; wakes all waiting threads."""
        was_over, self.new_tokens, self.is_over = self.is_over, new_tokens, True
        if not was_over:
            self._running.release()
        self._steps.put(None)
        if self.listener is not None:
            self.listener()

    def follow(self, every_step: bool) -> Iterator[int]:
        """Blocks until the request has ended. With `every_step`, which one thread may ask for, yields the number of new
        tokens each time it grew."""
        seen, self._every_step = 0, every_step
        while every_step and not self.is_over:
            self._steps.get()
            if self.new_tokens > seen:
                seen = self.new_tokens
                yield seen
        self.wait_until_over()
        if every_step and self.new_tokens > seen:
            yield self.new_tokens

    def wait_until_over(self) -> None:
        if not self.is_over:
            with self._running:  # released at once, for other waiting threads
                pass
