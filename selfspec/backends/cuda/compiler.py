"""Compiles kernels in parallel and loads them before they are launched.

Triton keeps compiled kernels on disk, so they are compiled once per machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress

from selfspec.kernels.triton_compat import compiles_only, load_kernel

MAX_THREADS = 16  # more are no faster: Triton releases Python's global interpreter lock only in compiler passes
PROGRESS_AFTER_S = 1.0  # seconds of compiling before a progress bar appears


class Compiler:
    """Compiles the kernels of launches, and loads them onto the GPU, without running them."""

    def __init__(self) -> None:
        self.only_compiles = False  # True within `compiling`: launches compile kernels and run none

    def compile(self, *launches: Callable[[], object]) -> None:
        """Compiles the kernels of launches in parallel, waits for them and loads them. Within a `compiling` block only
        starts their compilation; the end of the block waits and loads."""
        with self.compiling():
            for launch in launches:
                launch()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Within this block launches only compile their kernels, in parallel. At the end of the outermost block waits
        for all compilations and loads the kernels."""
        if self.only_compiles:
            yield
            return
        from triton import AsyncCompileMode

        self.only_compiles = True
        pool = _RecordingPool(min(MAX_THREADS, os.cpu_count() or 1))
        try:
            with compiles_only() as kernels, pool, AsyncCompileMode(pool):
                yield
                _wait_with_progress(pool.futures)
            for kernel in kernels:
                load_kernel(kernel)
        finally:
            self.only_compiles = False


class _RecordingPool(ThreadPoolExecutor):
    """A thread pool that keeps the futures of everything submitted to it."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.futures: list[Future] = []

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        self.futures.append(super().submit(*args, **kwargs))
        return self.futures[-1]


def _wait_with_progress(futures: list[Future]) -> None:
    """Waits for compilations; shows a progress bar on standard error once they take more than PROGRESS_AFTER_S."""
    if not wait(futures, timeout=PROGRESS_AFTER_S).not_done:
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("selfspec: compiling kernels, once per machine", total=len(futures))
        for future in futures:
            wait([future])
            progress.update(task, completed=sum(other.done() for other in futures))
