"""`python -m bench.all`: measures everything that bench/RESULTS.md reports, in one run of one commit, and writes it.

Start-up, decoding by domain, request options, serving, exactness and memory share one engine; every section has a time
budget, and one that fails is reported with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench import decode, exactness, machine, options, serving, tables
from bench.requests import GREEDY, PROMPTS, Target, TimedRequest, open_target
from bench.serving import Load
from bench.timing import Limit

FOLDER = Path(__file__).parent
Result = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    prompts: int = 16  # of each domain
    option_prompts: int = 10  # for the options, of different domains
    new_tokens: int = 128  # of each sequence
    batches: tuple[int, ...] = (1, 4, 16)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    repeat: int = 3  # timed repeats of decoding, options and serving
    compared: int = 50_000  # tokens of each exactness check
    arrivals: int = exactness.ARRIVALS  # requests of a round of one of them
    load: Load = Load()


QUICK = Sizes(
    prompts=1, option_prompts=1, new_tokens=6, batches=(1, 2), temperatures=(0.0,), repeat=1, compared=50, arrivals=6,
    load=Load(new_tokens=6, requests=3, decoding=2, long_prompt=600, running=2, running_tokens=256, repeat=1),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """An opened model, how much to measure with it, and the time budget of the section in seconds."""

    target: Target
    sizes: Sizes
    seconds: float
    load_s: float = 0.0  # seconds that opening took


def startup(run: Run) -> Result:
    """Seconds to the first token of a new engine, and of its warm-up for one greedy sequence."""
    engine = run.target.engine
    first = _timed_request(run)
    start = time.perf_counter()
    steps = engine.warmup()
    warm = time.perf_counter()
    engine.warmup()
    again = time.perf_counter()
    second = _timed_request(run)
    return {
        "kernel_cache": "empty" if engine.has_kernels else "not used",
        "load_s": run.load_s,
        "first_token_s": first.first_token_s,
        "warmup_s": warm - start,
        "warmup_steps": steps,
        "repeated_warmup_s": again - warm,
        "warm_first_token_s": second.first_token_s,
        "warm_call_s": second.ended_at - second.submitted_at,
    }


def _timed_request(run: Run) -> TimedRequest:
    target = run.target
    request = TimedRequest(target.engine, target.prompts[0], 0, run.sizes.new_tokens, {**GREEDY, **target.speculation})
    request.submit()
    return request.wait()


def decoding(run: Run) -> Result:
    """Plain and default decoding of every domain, batch size and temperature."""
    target, sizes = run.target, run.sizes
    cells = decode.cells_of(target, sizes.batches, sizes.temperatures)
    ways = decode.ways_of(target, list(target.modes), [])
    return decode.measure(target, ways, cells, sizes.new_tokens, sizes.repeat, Limit(run.seconds))


def request_options(run: Run) -> Result:
    """Every option on prompts of different domains."""
    prompts = {"mixed": run.target.prompts[: run.sizes.option_prompts]}
    target = Target(run.target.name, run.target.engine, prompts, run.target.speculation)
    offered = options.options_of(target)
    return options.measure(target, offered, run.sizes.new_tokens, run.sizes.repeat, Limit(run.seconds))


def serve(run: Run) -> Result:
    parts = [part for part in serving.PARTS if part != "second_turn"]  # `bench.serving` alone: results fit 150 lines
    return serving.measure(run.target, run.sizes.load, parts, Limit(run.seconds))


def compare(run: Run) -> Result:
    sizes = run.sizes
    return exactness.measure(
        run.target, exactness.CHECKS, sizes.compared, sizes.new_tokens, run.seconds, 0, sizes.batches, sizes.arrivals
    )


def memory(run: Run) -> Result:
    """Bytes that the engine holds after all other sections, and the process's peak."""
    device = run.target.engine.model.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_host_bytes()
    return {**run.target.engine.memory(), "peak_of_the_process": peak}


def _peak_host_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(frozen=True)
class Section:
    """A part of the results: its measurement, its table, and its time budget in seconds on a GPU."""

    title: str
    measure: Callable[[Run], Result]
    table: Callable[[Result], list[str]]
    seconds: float


# Budgets add up to 400 s; loading and begun items that end after their budget may take a minute more.
SECTIONS = {
    "startup": Section("Start-up", startup, tables.startup, 60),
    "decode": Section("Decoding", decoding, tables.decode, 130),
    "options": Section("Options", request_options, tables.options, 60),
    "serving": Section("Serving", serve, tables.serving, 60),
    "exactness": Section("Exactness", compare, tables.exactness, 90),
    "memory": Section("Memory", memory, tables.memory, 0),
}


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    results = json.loads(args.source.read_text(encoding="utf-8")) if args.source else measure_all(args)
    if args.peer:
        results["peers"] = [read_peer(path) for path in args.peer]
    write(args.out, results)
    print(render(results))
    print(json.dumps({"benchmark": "all", **results}))
    return int(bool(faults(results)))


def faults(results: Result) -> list[str]:
    """Sections that failed, and exactness checks that found a difference where kernels promise none."""
    sections = results["sections"]
    checks = sections.get("exactness", {}).get("figures", {}) if results["setup"]["kernels"] else {}
    failed = [name for name, section in sections.items() if "failed" in section]
    return failed + [name for name, check in checks.items() if check["differing"]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.all", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a few tokens of each, for a CPU; writes to bench/out")
    add("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS, help=f"(default: {' '.join(SECTIONS)})")
    budgets = ", ".join(f"{name} {section.seconds:g}" for name, section in SECTIONS.items())
    add("--limit", type=float, help=f"time budget of each section in seconds (default: {budgets}; 30 with --quick)")
    add("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    add("--device", default="auto", help="cpu, cuda (default: the best there is)")
    add("--dtype", default="auto", help="float32, bfloat16, float16 (default: by device)")
    add("--profile", default="auto", help="folder, 'auto' or 'none'")
    add("--commit", help="the measured commit, where the files are not a git checkout")
    add("--peer", type=Path, nargs="+", default=[], help="JSON of other engines' measurements to add; see read_peer")
    add("--from", type=Path, dest="source", help="measure nothing; write the tables of this results.json")
    add("--out", type=Path, help="folder for RESULTS.md and results.json (default: bench)")
    args = parser.parse_args(arguments)
    args.out = args.out or (FOLDER / "out" if args.quick else FOLDER)
    return args


def measure_all(args: argparse.Namespace) -> Result:
    """Opens the model and runs the sections in order; results.json is written after each."""
    sizes = QUICK if args.quick else Sizes()
    with tempfile.TemporaryDirectory() as kernel_cache, mock.patch.dict(os.environ, TRITON_CACHE_DIR=kernel_cache):
        # An empty kernel cache, so that start-up times include compilation.
        start = time.perf_counter()
        target = open_target(
            model_arguments(args, sizes), max(sizes.load.max_batch, *sizes.batches), sizes.load.longest
        )
        loaded = time.perf_counter() - start
        setup = machine.describe(target.engine, target.name)
        setup["commit"] = args.commit or setup["commit"]
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # measuring the bandwidth took gigabytes
        results: Result = {"setup": setup, "quick": args.quick, "sections": {}}
        for name in args.sections:
            budget = args.limit or (30 if args.quick else SECTIONS[name].seconds)
            results["sections"][name] = run_section(name, Run(target, sizes, budget, loaded))
            write(args.out, results, with_tables=False)
    return results


def model_arguments(args: argparse.Namespace, sizes: Sizes) -> argparse.Namespace:
    """The arguments that `open_target` reads."""
    return argparse.Namespace(
        model=args.model, shape=None, device=args.device, dtype=args.dtype, quantize=None, profile=args.profile,
        plan=None, exit_layer=None, no_kernels=False, prompts=PROMPTS, limit=sizes.prompts,
        max_new_tokens=sizes.new_tokens,
    )  # fmt: skip


def run_section(name: str, run: Run) -> Result:
    """The section's figures and its seconds; if it fails, its error in place of the figures."""
    start = time.perf_counter()
    print(f"{name}: at most about {run.seconds:g} s", file=sys.stderr, flush=True)
    found: Result
    try:
        found = {"figures": SECTIONS[name].measure(run)}
    except Exception as error:  # a section that fails must not cost the others' figures
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def read_peer(path: Path) -> Result:
    """Another engine's figures. The last line of the file is the JSON of `bench.decode`, or an object with `name` and
    `results`, a list of {case, batch, temperature, tokens_per_s}, where `case` names one of our domains if it can, and
    perhaps `serving`, a list of {case, load} with figures named as those of `bench.serving`."""
    if not path.exists():
        return {"name": path.name, "failed": "the file does not exist"}
    found = json.loads(path.read_text(encoding="utf-8").strip().split("\n")[-1])
    if "cells" not in found:
        return found
    results = [
        {"name": mode, "case": cell["domain"], "batch": cell["batch"], "temperature": cell["temperature"],
         "tokens_per_s": result["tokens_per_s"]["median"]}
        for cell in found["cells"]
        for mode, result in cell["modes"].items()
        if mode.startswith("transformers") and "failed" not in result
    ]  # fmt: skip
    return {"name": path.name, "results": results}


def render(results: Result) -> str:
    """RESULTS.md: a paragraph about the conditions and a part for every section."""
    lines = [
        "# Results",
        "",
        "Written by `python -m bench.all`: one run of one commit; figures under Peers come from files of other runs.",
        *(["A quick run: too short for figures that mean anything."] if results["quick"] else []),
        " ".join(tables.setup(results["setup"])),
    ]
    for name, found in results["sections"].items():
        lines += ["", f"## {SECTIONS[name].title}", ""]
        lines += [f"FAILED: {found['failed']}"] if "failed" in found else SECTIONS[name].table(found["figures"])
    if results.get("peers"):
        ours = results["sections"].get("decode", {}).get("figures", {"cells": []})
        lines += ["", "## Peers", "", *tables.peers(results["peers"], ours)]
    return "\n".join(lines) + "\n"


def write(folder: Path, results: Result, with_tables: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    if with_tables:
        (folder / "RESULTS.md").write_text(render(results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
