"""`python -m bench.decode`: speed of our plain and speculative decoding and of transformers' ways, in one run.

All modes share one copy of the weights and take turns on every prompt, for every model, batch and temperature asked
for. Each table starts with the ceiling: reading all weights once per token at the memory bandwidth measured here.
"Same as plain" counts texts equal to plain decoding by the same implementation. With --exactness nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress, track

from bench import exactness, kernels, report, synthetic
from bench.modes import PEER_NAMES, Batch, Memory, Mode, Task, Way, ours, peers, release, warm_up
from bench.requests import PROMPTS, read_prompts
from selfspec import Engine
from selfspec.memory import limit_memory, memory_limit
from selfspec.models import loading as weights
from selfspec.text import encode

PLOT = Path(__file__).parent / "out" / "decode.svg"
MODES = ("plain", "profile", "plans", *PEER_NAMES)
EAGER, PLAIN, PROFILE = "transformers eager", "selfspec plain", "selfspec profile"
DEFAULT_PLANS = ("chain:2", "tree:4,2,2,1")
ROOM = 128  # positions that the exactness check may put before a prompt


@dataclass(frozen=True)
class Setup:
    """What a number needs beside it to mean something."""

    model: str
    device: str
    dtype: str
    kernels: bool
    threads: int
    torch: str
    transformers: str
    max_new_tokens: int
    bandwidth_gb_s: float
    ceiling_tokens_per_s: float
    exits: str
    synthetic: dict[str, Any] | None
    memory_gb: float | None = None  # of GPU memory that the process may allocate at most; None: all


@dataclass
class Subject:
    """A model to measure: its engine, its transformers twin where there is one, and what to ask it."""

    name: str
    engine: Engine
    prompts: list[list[int]]
    memory: Memory
    exit_layer: int | None
    hf: Any = None
    pad: int = 0
    synthetic: dict[str, Any] | None = None


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 165  # a log has room that no terminal tells of
    if args.memory_gb is not None:
        bound(args.memory_gb, weights.pick_device(args.device))
    runs = []
    for name in args.shape or args.model:
        subject = open_shape(args, name) if args.shape else open_model(args, name)
        setup = asdict(describe(args, subject))
        report.describe(console, setup)
        runs.append({"setup": setup, **(compare if args.exactness else measure)(console, args, subject, setup)})
        del subject
        release()
    if not args.exactness:
        console.print(report.plot(args.plot, runs), soft_wrap=True)
    print(json.dumps({"benchmark": "decode", "runs": runs}))
    return int(any(run["wrong"] for run in runs))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    add = parser.add_argument
    add("--model", nargs="+", default=["demo"], help="folders, GGUF files, hub names (default: the demo model)")
    add("--shape", nargs="+", default=[], choices=synthetic.SHAPES, help="in place of models: synthetic weights")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--memory-gb", type=float, help="allocate at most so many 10^9 bytes of GPU memory, weights and all")
    add("--modes", nargs="*", default=MODES, choices=MODES, help="default: all; for a shape, ours only")
    add("--batch", type=int, nargs="+", default=[1], help="rows at a time (default: 1)")
    add("--temperature", type=float, nargs="+", default=[0.0], help="0 is greedy")
    add("--prompts", type=Path, default=PROMPTS, help="folder of .jsonl files with 'prompt' lines")
    add("--limit", type=int, default=8, help="prompts taken from each file; for a shape, all random prompts")
    add("--prompt-tokens", type=int, default=128, help="length of a shape's random prompts")
    add("--max-new-tokens", type=int, default=64, help="(default: 64)")
    add("--mode-minutes", type=float, default=5.0, help="a mode measures no further prompt after so long in a table")
    add("--profile", default="auto", help="folder, 'auto' or 'none'")
    add("--exit-layer", type=int, help="default: the profile's, else a quarter of the layers, untrained; 2 for a shape")
    add("--plans", nargs="*", help="plans to force (default: chain:2 tree:4,2,2,1; more with --exactness)")
    add("--early-exit", type=int, nargs="*", help="layers for transformers' early exit (default: four fifths)")
    add("--used", type=int, help="tokens that a shape writes, and drafts look at (default: a quarter of all)")
    add("--agree", type=float, default=0.70, help="how often a shape's exit shall hold the model's token")
    add("--agree-top4", type=float, default=0.85, help="how often one of its best four shall")
    add("--exactness", type=int, default=0, help="compare tokens of all plans until so many were compared; no timing")
    add("--no-kernels", action="store_true", help="PyTorch's operations on a GPU too")
    add("--plot", type=Path, default=PLOT, help="where the SVG goes")
    args = parser.parse_args(arguments)
    args.plans = args.plans if args.plans is not None else exactness.PLANS if args.exactness else DEFAULT_PLANS
    return args


def bound(gigabytes: float, device: torch.device) -> None:
    """Keeps to so much GPU memory; before anything is loaded."""
    try:
        limit_memory(gigabytes, device)
    except ValueError as error:
        raise SystemExit(f"--memory-gb: {error}") from error


def open_model(args: argparse.Namespace, name: str) -> Subject:
    """A model with weights, and transformers' over the same ones."""
    device = weights.pick_device(args.device)
    memory = Memory(device)
    folder = weights.resolve(name)
    stored = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype or torch.float32
    dtype = weights.pick_dtype(args.dtype, device, stored)
    hf: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    hf = hf.to(device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prompts = [
        encode(tokenizer, [{"role": "user", "content": text}]) for text in read_prompts(args.prompts, args.limit)
    ]
    before = memory.now()
    profile = None if args.profile == "none" else args.profile
    engine = Engine.from_model(hf, tokenizer, profile=profile, **limits(args, prompts))
    memory.engine = memory.now() - before
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return Subject(name, engine, prompts, memory, args.exit_layer, hf, pad)


def open_shape(args: argparse.Namespace, shape: str) -> Subject:
    """A model of random weights, tuned so that its raw exit agrees as often as asked for."""
    device = weights.pick_device(args.device)
    dtype = weights.pick_dtype(args.dtype, device, torch.bfloat16)
    layer = 2 if args.exit_layer is None else args.exit_layer
    model, memory = synthetic.synthetic(shape, str(device), dtype), Memory(device)
    prompts = synthetic.random_prompts(model, args.limit, args.prompt_tokens).tolist()
    before = memory.now()
    engine = Engine(model, **limits(args, prompts))
    memory.engine = memory.now() - before
    told = synthetic.tune_exit(engine, layer, synthetic.Agreement(args.agree, args.agree_top4), args.used)
    return Subject(shape, engine, prompts, memory, layer, synthetic=told)


def limits(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """An engine with room for what is measured, and no more."""
    longest = max(map(len, prompts)) + args.max_new_tokens + ROOM * bool(args.exactness)
    return {
        "max_length": max(256, -(-longest // 64) * 64),
        "max_batch": max(16, *args.batch),
        "kernels": False if args.no_kernels else None,
    }


def describe(args: argparse.Namespace, subject: Subject) -> Setup:
    engine, device = subject.engine, subject.engine.model.device
    allowed = memory_limit(device)
    bandwidth = kernels.read_bandwidth() if device.type == "cuda" else read_bandwidth()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}"
    trained = engine.profile.trained_layers() if engine.profile else []
    return Setup(
        model=subject.name,
        device=name,
        dtype=str(engine.model.dtype).removeprefix("torch."),
        kernels=engine.has_kernels,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        max_new_tokens=args.max_new_tokens,
        bandwidth_gb_s=round(bandwidth / 1e9, 1),
        ceiling_tokens_per_s=round(bandwidth / bytes_per_token(engine), 1),
        exits=f"exits trained after layers {trained}" if trained else "exits untrained",
        synthetic=subject.synthetic,
        memory_gb=None if allowed is None else round(allowed / 1e9, 2),
    )


def bytes_per_token(engine: Engine) -> int:
    """Weights that a token must read: of an embedding that is not the head, one row, which does not count."""
    embedding = engine.model.embedding
    unread = 0 if engine.model.head is embedding else embedding.numel() * embedding.element_size()
    return engine.model.nbytes - unread


def read_bandwidth() -> float:
    """Bytes per second of reading a CPU's memory that no cache holds, best of several."""
    data = torch.ones(2**26)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * data.element_size() / min(times)


def compare(console: Console, args: argparse.Namespace, subject: Subject, setup: dict[str, Any]) -> dict[str, Any]:
    """The exactness check in place of measurements."""
    write = exactness.writer(subject.engine, args.max_new_tokens, subject.exit_layer)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("tokens compared", total=args.exactness)

        def tell(so_far: list[exactness.Comparison]) -> None:
            compared, differences = exactness.summary(so_far).values()
            progress.update(bar, completed=compared)
            if not console.is_terminal:  # where no bar is drawn, a run that is cut off shall not have been for nothing
                console.print(f"{compared:,} tokens compared so far, {differences} texts differ")

        comparisons = exactness.check(write, subject.prompts, args.exactness, args.plans, progress=tell)
    exactness.show(console, comparisons)
    found = exactness.as_json(comparisons)
    return {"exactness": found, "wrong": found["differences"]}


def measure(console: Console, args: argparse.Namespace, subject: Subject, setup: dict[str, Any]) -> dict[str, Any]:
    """A table for every batch and temperature."""
    cells = []
    ways = ways_of(args, subject)
    for size in args.batch:
        for temperature in args.temperature:
            task = Task(args.max_new_tokens, temperature)
            results = measure_cell(args, subject, ways, batches_of(subject, size), task)
            for row in results if size == 1 else ():
                if "failed" not in row and row["tokens_per_cycle"] == 1:  # the ceiling is of a token per pass
                    row["of_ceiling"] = round(1e3 / row["ms_per_token_p50"] / setup["ceiling_tokens_per_s"], 3)
            report.show(console, setup, size, temperature, results)
            cells.append({"batch": size, "temperature": temperature, "results": results})
    failed = [
        row for cell in cells for row in cell["results"] if "failed" in row and row["mode"].startswith("selfspec")
    ]
    return {"cells": cells, "wrong": len(failed)}


def ways_of(args: argparse.Namespace, subject: Subject) -> dict[str, Way]:
    """Every way asked for that makes sense for this model, by name."""
    engine = subject.engine
    ways: dict[str, Way] = {}
    if subject.hf is not None:
        layers = subject.hf.config.num_hidden_layers
        early = [max(1, layers * 4 // 5)] if args.early_exit is None else args.early_exit
        ways |= peers(subject.hf, subject.pad, args.modes, early)
    if "plain" in args.modes:
        ways[PLAIN] = ours(engine, speculative_decoding=False)
    if "profile" in args.modes and engine.profile is not None:
        ways[PROFILE] = ours(engine)
    for plan in args.plans if "plans" in args.modes else ():
        forced = {"speculative_decoding": "force", "plan": plan, "exit_layer": subject.exit_layer}
        ways[f"selfspec {plan}"] = ours(engine, **forced)
    return ways


def batches_of(subject: Subject, size: int) -> list[Batch]:
    """The prompts in batches of one size; the last is filled up with the first prompts."""
    prompts, device = subject.prompts, subject.engine.model.device
    starts = range(0, len(prompts), size)
    members = [[index % len(prompts) for index in range(start, start + size)] for start in starts]
    return [Batch([prompts[index] for index in group], group, device, subject.pad) for group in members]


def measure_cell(
    args: argparse.Namespace, subject: Subject, ways: dict[str, Way], batches: Sequence[Batch], task: Task
) -> list[dict[str, Any]]:
    """All ways take turns on all batches; who goes first changes with every batch."""
    modes = {name: Mode(name, way, 60 * args.mode_minutes) for name, way in ways.items()}
    longest = max(batches, key=lambda batch: batch.width)
    for name, mode in modes.items():
        with subject.memory.keeping(name, lambda: subject.engine.memory()["exits"]):
            if name == PROFILE:
                warm_up(subject.engine, batches, task.temperature)
            # Ours may take another plan, and so capture another graph, for every kind of prompt.
            captures = name.startswith("selfspec") and longest.device.type == "cuda"
            mode.rehearse([longest, *batches] if captures else [longest], task)
            if "compile" in name:
                mode.rehearse([longest], task)  # it is recorded the second time
    order = list(modes.values())
    bar = track(batches, description="prompts", console=Console(stderr=True), auto_refresh=False)
    for turn, batch in enumerate(bar):
        for offset in range(len(order)):
            order[(turn + offset) % len(order)].measure(turn, batch, task)
    return [result_of(mode, modes, subject.memory, task) for mode in order]


def result_of(mode: Mode, modes: dict[str, Mode], memory: Memory, task: Task) -> dict[str, Any]:
    is_ours = mode.name.startswith("selfspec")
    peak = memory.own_peak(mode.name, mode.peak, is_ours, drafts=is_ours and mode.name != PLAIN)
    result = mode.result(modes.get(EAGER), modes.get(PLAIN if is_ours else EAGER), peak)
    if is_ours and task.temperature and "failed" not in result:
        result["same_tokens_as_transformers"] = None  # its noise is another
    return result


if __name__ == "__main__":
    sys.exit(main())
