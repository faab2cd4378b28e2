"""`python -m bench.all`: measures everything that bench/RESULTS.md reports, in one run of one commit, and writes it.

Its sections share one copy of the model; every section has a time budget, and one that fails is reported with its
error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench import machine, result_tables, tables
from bench.requests import PROMPTS, open_target
from bench.sections import QUICK, SECTIONS, Run, Sizes, one_line

FOLDER = Path(__file__).parent
SAME_RUN = ("model", "device", "dtype", "kernels", "memory_gb", "exits", "versions", "commit")  # of the setup
Result = dict[str, Any]


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
    failed = [name for name, of in sections.items() if "failed" in of]
    return failed + [name for name, of in checks.items() if of["differing"]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.all", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a few tokens of each, for a CPU; writes to bench/out")
    chosen = "measure these and keep the others of a results.json of this commit and machine in the folder of --out"
    add("--sections", nargs="+", choices=SECTIONS, help=f"{chosen} (default: {' '.join(SECTIONS)})")
    budgets = ", ".join(f"{name} {of.seconds:g}" for name, of in SECTIONS.items())
    add("--limit", type=float, help=f"time budget of each section in seconds (default: {budgets}; 20 with --quick)")
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
        target = open_target(model_arguments(args, sizes), sizes.max_batch, sizes.load.longest)
        loaded = time.perf_counter() - start
        setup = machine.describe(target.engine, target.name)
        setup["commit"] = args.commit or setup["commit"]
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # measuring the bandwidth took gigabytes
        results: Result = {"setup": setup, "quick": args.quick, "runs": 1, "sections": {}}
        if args.sections:
            results = earlier(args.out, results)
        for name in args.sections or SECTIONS:
            budget = args.limit or (20 if args.quick else SECTIONS[name].seconds)
            results["sections"][name] = run_section(name, Run(target, sizes, budget, loaded))
            write(args.out, results, with_tables=False)
    return results


def earlier(folder: Path, results: Result) -> Result:
    """The results in the folder if they are of the same commit, machine and sizes, counted as one run more; else
    `results`. Of a checkout with changes the commit is not known."""
    path = folder / "results.json"
    if not path.exists():
        return results
    found, setup = json.loads(path.read_text(encoding="utf-8")), results["setup"]
    is_known = setup["commit"] != "unknown" and not setup["commit"].endswith("+ changes")
    same = found["quick"] == results["quick"] and all(found["setup"].get(name) == setup[name] for name in SAME_RUN)
    if not (is_known and same):
        print(f"{path} is not of this commit and machine, and will be replaced", file=sys.stderr)
        return results
    return {**found, "runs": found.get("runs", 1) + 1}


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
    print(f"{name}: about {run.seconds:g} s, more if one run of each case takes more", file=sys.stderr, flush=True)
    machine.freeze_objects(run.target.engine)  # also those that earlier sections compiled and captured
    found: Result
    try:
        found = {"figures": SECTIONS[name].measure(run)}
    except Exception as error:  # a section that fails must not cost the others' figures
        traceback.print_exc()
        found = {"failed": one_line(error)}
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
         "tokens_per_s": of["tokens_per_s"]["median"]}
        for cell in found["cells"]
        for mode, of in cell["modes"].items()
        if mode.startswith("transformers") and "failed" not in of
    ]  # fmt: skip
    return {"name": path.name, "results": results}


def render(results: Result) -> str:
    """RESULTS.md: the conditions, the sections that have one line to report, and a part for each of the others."""
    runs = results.get("runs", 1)
    lines = [
        "# Results",
        "",
        f"Written by `python -m bench.all`: {'one run' if runs == 1 else f'{runs} runs'} of one commit; figures under "
        "Peers come from files of other runs.",
        *(["A quick run: too short for figures that mean anything."] if results["quick"] else []),
        " ".join(tables.setup(results["setup"])),
        "",
    ]
    found = {SECTIONS[name].title: report(name, of) for name, of in in_order(results["sections"]).items()}
    lines += [f"- {title}: {of[0]}" for title, of in found.items() if len(of) == 1]
    for title, of in found.items():
        lines += ["", f"## {title}", "", *of] if len(of) > 1 else []
    if results.get("peers"):
        ours = results["sections"].get("decode", {}).get("figures", {"cells": []})
        lines += ["", "## Peers", "", *result_tables.peers(results["peers"], ours)]
    return "\n".join(lines) + "\n"


def in_order(sections: Result) -> Result:
    return {name: sections[name] for name in SECTIONS if name in sections}


def report(name: str, found: Result) -> list[str]:
    return [f"FAILED: {found['failed']}"] if "failed" in found else SECTIONS[name].table(found["figures"])


def write(folder: Path, results: Result, with_tables: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    if with_tables:
        (folder / "RESULTS.md").write_text(render(results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
