"""Compiles kernels for GPUs that this machine does not have: within `compiling`, a launch compiles its kernel only.

The tensors may be on any device ("meta" takes no memory). Triton must not interpret in the process that compiles, so
tests use a subprocess that runs this file: `echo '["gemm", 90, ""]' | python -m tests.compiling` compiles what
`tests/launches_gemm.py` launches and prints one line of JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch

from selfspec.kernels.triton_compat import shared_bytes_of

Launches = Iterable[tuple[str, Callable[[], object]]]  # a name with operation and shape, and a call of the launcher


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: bytes of shared memory, registers and bytes of stack (spills) per thread, and whether inline
    PTX on two elements gets neighbours on the last axis."""

    launch: str
    kernel: str
    arch: int
    warps: int
    shared: int
    registers: int
    stack: int
    packs_neighbours: bool


class _Driver:
    """Stand-in for Triton's CUDA driver; the architecture is the device number, so that each has its own cache."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, _: int) -> int:
        return 0


@contextmanager
def compiling(arch: int) -> Iterator[list[Any]]:
    """Launches within compile for `arch` (80, 90, 120) and append Triton's compiled kernel to the list it yields."""
    import triton
    from triton.runtime.driver import driver

    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise RuntimeError("Triton interprets in this process; compile in one without TRITON_INTERPRET")
    run = triton.runtime.jit.JITFunction.run
    kernels: list[Any] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels.append(kernel)
        return kernel

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(arch)))
        stack.enter_context(mock.patch.object(triton.runtime.jit.JITFunction, "run", compile_only))
        for name, module in list(sys.modules.items()):
            if name.startswith(("selfspec.kernels.", "bench.")) and hasattr(module, "use_pdl"):
                stack.enter_context(mock.patch.object(module, "use_pdl", lambda _: arch >= 90))
            if name.startswith("selfspec.kernels.") and hasattr(module, "shared_bytes"):
                stack.enter_context(
                    mock.patch.object(module, "shared_bytes", lambda _: shared_bytes_of(divmod(arch, 10)))
                )
        yield kernels


def describe(launch: str, kernel: Any) -> Compiled:
    """The resources of a kernel that `compiling` compiled."""
    metadata = kernel.metadata
    registers, stack = _resources(kernel.asm["cubin"])
    return Compiled(
        launch, metadata.name, metadata.target.arch, metadata.num_warps, metadata.shared, registers, stack,
        packs_neighbours(kernel.asm["ttgir"]),
    )  # fmt: skip


def compile_launches(launches: Launches, arch: int) -> Iterator[Compiled]:
    """Compiles every launch for `arch`; describes a kernel that several of them launch once."""
    described: set[str] = set()
    for name, launch in launches:
        with compiling(arch) as kernels:
            launch()
        if not kernels:
            raise RuntimeError(f"{name} launched no kernel")
        for kernel in kernels:
            if kernel.hash not in described:
                described.add(kernel.hash)
                yield describe(name, kernel)


def compile_op(op: str, arch: int, match: str = "") -> list[Compiled]:
    """Compiles the launches of `tests/launches_<op>.py` whose names contain `match`, in the subprocess."""
    process = _compiling_process()
    print(json.dumps([op, arch, match]), file=process.stdin, flush=True)
    answer = json.loads(process.stdout.readline() or "{}")
    if "compiled" not in answer:
        _compiling_process.cache_clear()  # it may have died
        raise RuntimeError(f"compiling {op} for sm_{arch} failed:\n{answer.get('error', '')}")
    return [Compiled(**compiled) for compiled in answer["compiled"]]


@cache
def _compiling_process() -> Any:
    """One subprocess for all tests of this process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, pipe = [sys.executable, "-m", "tests.compiling"], subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def packs_neighbours(ttgir: str) -> bool:
    """Whether all inline PTX that takes two elements of a tensor at once gets neighbours on the last axis: whether the
    first two registers of a thread hold them, in every layout of its operands."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.M))
    packed = [line for line in ttgir.splitlines() if "packed_element = 2" in line]
    used = {name for line in packed for name in re.findall(r"tensor<[^>]*, (#\w+)>", line)}
    return all(_begins_with_neighbours(layouts[name]) for name in used)


def _begins_with_neighbours(layout: str) -> bool:
    if layout.startswith("#ttg.linear"):
        first = re.search(r"register = \[\[([^\]]*)\]", layout)
        return first is not None and re.fullmatch(r"(0, )+1", first[1]) is not None
    if not layout.startswith("#ttg.blocked"):
        return False
    found = {name: eval(of_axes) for name, of_axes in re.findall(r"(\w+) = (\[[\d, ]*\])", layout)}
    # An axis that neither threads nor warps divide is repeated in the registers of each thread.
    is_whole = found["threadsPerWarp"][-1] == found["warpsPerCTA"][-1] == 1
    return found["order"][0] == len(found["order"]) - 1 and (is_whole or found["sizePerThread"][-1] % 2 == 0)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack per thread, where spilled registers go."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resources of the kernel: {text}")
    return int(found[1]), int(found[2])


def answer(op: str, arch: int, match: str) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        module = importlib.import_module(f"tests.launches_{op}")
        gc.freeze()  # a collection walks a million objects of imported modules
        chosen = ((name, launch) for name, launch in module.launches() if match in name)
        return {"compiled": [asdict(compiled) for compiled in compile_launches(chosen, arch)]}
    except Exception:
        return {"error": traceback.format_exc()[-4000:]}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
