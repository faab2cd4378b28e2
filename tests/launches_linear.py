"""What `tests/test_kernel_compile.py` compiles of the linear kernels."""

from __future__ import annotations

from tests.compiling import Launches


def launches() -> Launches:
    yield from ()
