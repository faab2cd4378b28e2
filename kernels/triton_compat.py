"""Triton where it is installed; elsewhere stand-ins, so that the kernels' PyTorch references can be imported."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

_compiled_kernels: ContextVar[list[Any] | None] = ContextVar("selfspec_compiled_kernels", default=None)


@contextmanager
def compiles_only() -> Iterator[list[Any]]:
    """Launches on this thread compile their kernel, append it to the list that is yielded, and do not run it."""
    kernels: list[Any] = []
    token = _compiled_kernels.set(kernels)
    try:
        yield kernels
    finally:
        _compiled_kernels.reset(token)


def load_kernel(kernel: Any) -> None:
    """Loads a compiled kernel onto the GPU. Its first launch would do so, but CUDA forbids that during a capture."""
    getattr(kernel, "result", lambda: kernel)()._init_handles()  # one compiled by a pool comes as a future's `result`


INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

try:
    import triton
    import triton.language as tl

    class _Kernel(triton.JITFunction):
        """A kernel whose launch compiles only, within `compiles_only`."""

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            compiled = _compiled_kernels.get()
            kernel = super().run(*args, grid=grid, warmup=warmup or compiled is not None, **options)
            if compiled is not None:
                compiled.append(kernel)
            return kernel

    def jit(function: Any = None, **options: Any) -> Any:
        """`triton.jit`; launches within `compiles_only` only compile."""
        if INTERPRETED:
            return triton.jit(function, **options)
        return _Kernel(function, **options) if function is not None else lambda decorated: _Kernel(decorated, **options)

except ImportError:  # no Triton on this platform: kernels can be imported, not launched
    triton = None

    class _Language:
        def __getattr__(self, name: str) -> Any:
            return object

    tl: Any = _Language()  # type: ignore[no-redef]

    def jit(function: Any = None, **_: Any) -> Any:
        return function if function is not None else jit


# What the compiler of this Triton chooses where the kernels leave it the choice: see `quantized_tile`.
IS_TRITON_3_6: Any = tl.constexpr(triton.__version__.startswith("3.6.")) if triton is not None else False


def use_pdl(tensor: torch.Tensor) -> bool:
    """Whether the tensor's device has programmatic dependent launch (sm_90 and newer; see `pdl`)."""
    return tensor.is_cuda and not INTERPRETED and torch.cuda.get_device_capability(tensor.device)[0] >= 9


def pdl_options(tensor: torch.Tensor) -> dict[str, bool]:
    """The launch options by which a kernel on the tensor's device uses programmatic dependent launch."""
    return {"PDL": True, "launch_pdl": True} if use_pdl(tensor) else {"PDL": False}


def shared_bytes(tensor: torch.Tensor) -> int:
    """Bytes of shared memory that a program may use on the tensor's device."""
    return shared_bytes_of(torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 6))


def shared_bytes_of(arch: tuple[int, int]) -> int:
    """The same by architecture; others than sm_80 and sm_90 have at least 99 KB. A few KB are left to the compiler."""
    return {(8, 0): 160, (9, 0): 220}.get(arch, 96) * 1024


@cache
def can_launch() -> bool:
    """Whether Triton can launch kernels here; warns if not. Triton builds its launcher with a C compiler on first
    use."""
    try:
        _ = triton.runtime.driver.active.utils
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        warnings.warn(
            "decoding with PyTorch's own operations, which are much slower: Triton cannot launch kernels here; install "
            f"a C compiler and Python's headers ({text})",
            UserWarning,
            stacklevel=2,
        )
        return False
    return True
