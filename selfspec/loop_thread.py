"""The thread that runs the decoding loop, and the queue by which other threads reach it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from selfspec.sequence import Request


class Loop(Protocol):
    """The scheduler, as its thread sees it."""

    def step(self) -> bool:
        """Runs one pass of the loop; returns whether more work is left."""
        ...

    def fail_everything(self, error: BaseException) -> None:
        """Ends every request with this error."""
        ...


class Call(Future):
    """The result of a function that runs on the loop's thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def run(self) -> None:
        try:
            self.set_result(self._function())
        except BaseException as error:
            self.set_exception(error)


class LoopThread:
    """Queues requests and calls, and runs the loop on a thread of its own while there is work. The thread starts with
    the first item. While idle it holds no strong reference to the loop, so that an engine without references is
    collected."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starting = threading.Lock()
        self._items: deque[Request | Call] = deque()
        self._wake_ups: SimpleQueue[None] = SimpleQueue()  # wakes a thread faster than a Condition, without a lock
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    def put(self, loop: Loop, item: Request | Call) -> None:
        """Queues an item and starts the thread if none runs."""
        self._items.append(item)
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                arguments = (weakref.ref(loop),)
                self._thread = threading.Thread(target=self._run, args=arguments, name="selfspec-loop", daemon=True)
                self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Makes the loop run one pass, even if nothing was queued."""
        self._wake_ups.put(None)

    def take(self) -> Request | Call | None:
        """Removes and returns the oldest queued item; None if there is none."""
        return self._items.popleft() if self._items else None

    def close(self) -> None:
        """Ends the thread after its current pass; waits at most 5 s for it."""
        thread, self._is_closed = self._thread, True
        self.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _run(self, reference: weakref.ref[Loop]) -> None:
        if not self._may_loop():
            return
        while self._wait():
            loop = reference()
            has_work = True
            while loop is not None and has_work and not self._is_closed:
                try:
                    if self._device.type == "cuda":
                        torch.cuda.set_device(self._device)  # of this thread alone
                    has_work = loop.step()
                except BaseException as error:
                    loop.fail_everything(error)
                    has_work = bool(self._items)  # of items that were not taken yet
            del loop

    def _may_loop(self) -> bool:
        """Whether this thread is the one that `put` registered last: an interrupted `put` can cause two starts, of
        which only the last may run."""
        with self._starting:
            return self.is_current

    def _wait(self) -> bool:
        """Blocks until `wake`; returns False once the thread must end."""
        self._wake_ups.get()
        while not self._wake_ups.empty():  # one pass is enough for several
            self._wake_ups.get()
        return not self._is_closed
