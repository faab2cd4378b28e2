"""Compiles kernels side by side before they are launched: on a machine that never ran them that takes most of the time
to the first token."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress

from selfspec.kernels.triton_compat import compiles_only

MAX_THREADS = 16  # compiler passes release Python's lock, but what is between them does not: more do not help
PATIENCE_S = 1.0  # seconds of compiling before the user is told of it


class Compiler:
    """Compiles what launches need. Results are kept on disk by Triton, so this takes long once per machine."""

    def __init__(self) -> None:
        self.collects = False  # launches are compiled together when the outermost block ends

    def compile(self, launch: Callable[[], None]) -> None:
        """Compiles the kernels of a launch, side by side, without running them."""
        with self.together():
            launch()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Launches within it only compile; returns when all kernels are there."""
        if self.collects:
            yield
            return
        from triton import AsyncCompileMode

        self.collects = True
        pool = _CountingPool(min(MAX_THREADS, os.cpu_count() or 1))
        try:
            with compiles_only(), pool, AsyncCompileMode(pool):
                yield
                _tell(pool.futures)
        finally:
            self.collects = False


class _CountingPool(ThreadPoolExecutor):
    """Threads that keep what was submitted."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.futures: list[Future] = []

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        self.futures.append(super().submit(*args, **kwargs))
        return self.futures[-1]


def _tell(futures: list[Future]) -> None:
    """Waits for compilations, with a progress bar on standard error if they take more than a second."""
    if not wait(futures, timeout=PATIENCE_S).not_done:
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("selfspec: compiling kernels, once per machine", total=len(futures))
        for future in futures:
            wait([future])
            progress.update(task, completed=sum(of.done() for of in futures))
