"""The thread that runs the decoding loop, and the queue by which other threads reach it."""

from __future__ import annotations

import os
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
    """The methods of the scheduler that its thread calls."""

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
        self._items: deque[Request | Call] = deque()
        self._wake_ups: SimpleQueue[None] = SimpleQueue()  # wakes a thread faster than a Condition, without a lock
        self._is_closed = False
        self._threads: dict[int, threading.Thread] = {}  # by process id: a forked process runs the loop on its own

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._threads.get(os.getpid())

    def put(self, loop: Loop, item: Request | Call) -> None:
        """Queues an item and starts the thread if none runs. Calls of several threads, or after an interrupt, may start
        several, of which one runs the loop. Does not use `Thread.is_alive`: an interrupt inside it marks a running
        thread as ended."""
        self._items.append(item)
        if os.getpid() not in self._threads:
            threading.Thread(target=self._run, args=(weakref.ref(loop),), name="selfspec-loop", daemon=True).start()
        self.wake()

    def wake(self) -> None:
        """Makes the loop run one pass, even if nothing was queued."""
        self._wake_ups.put(None)

    def take(self) -> Request | Call | None:
        """Removes and returns the oldest queued item; None if there is none."""
        return self._items.popleft() if self._items else None

    def close(self) -> None:
        """Ends the thread after its current pass; waits at most 5 s for it."""
        thread, self._is_closed = self._threads.get(os.getpid()), True
        self.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _run(self, reference: weakref.ref[Loop]) -> None:
        thread = threading.current_thread()
        if self._threads.setdefault(os.getpid(), thread) is not thread:
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

    def _wait(self) -> bool:
        """Blocks until `wake`; returns False once the thread must end."""
        self._wake_ups.get()
        while not self._wake_ups.empty():  # one pass is enough for several
            self._wake_ups.get()
        return not self._is_closed
