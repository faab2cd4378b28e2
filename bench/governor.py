"""`python -m bench.governor`: the speed of the governor, of plain decoding and of every fixed plan it chooses from.

After a warm-up, all modes decode each batch of every set of prompts one after the other, for every batch size. Times
include prefill and steps; the time before prefill (finding the domain) has its own column. The best fixed plan is the
one with the least total time over the set. A batch loses if each fixed plan is below 0.97x plain speed; a sequence is
found out of distribution early if it has fewer than 32 new tokens then. Forced texts are written in captured steps by
a second engine on the same model where it has kernels, and otherwise by a logits processor on the host. Results are
written to governor.json after every set and batch size.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench import governor_report, machine, tables
from bench.forced_text import ForcedTextEngine
from bench.governor_calls import Call, Mode, around_switch, compare, resumption, run_request
from bench.governor_sets import BUILDERS, Missing, PromptSet, Source
from bench.modes import Batch, Task, route, warm_up
from selfspec import Engine
from selfspec.governor.rules import Policy, Rules
from selfspec.profiles.profile import DomainChoice, Profile
from selfspec.request import read_settings, split_options
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request
from selfspec.speculation.plan import Plan

OUT = Path(__file__).parent / "out"
PLAIN, GOVERNOR = "plain", "governor"
_WARM_UP_TOKENS = 8  # new tokens that warm up a mode that captures and measures nothing


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 180  # characters; rich takes a log for a terminal of 80
    engine = open_engine(args)
    machine.freeze_objects(engine)
    limit = max(args.limit, *args.batch)
    bench = Bench(engine, profile_of(engine), args.repeat, args.ignore_eos, args.plans, limit)
    setup = machine.describe(engine, args.model) | {"repeat": args.repeat, "seed": args.seed}
    console.print(*tables.setup(setup), sep="\n", soft_wrap=True)
    cells: list[dict[str, Any]] = []
    source = Source(engine, args.prompts, limit, args.max_new_tokens, args.seed)
    for prompts in sets_of(source, args.sets, console):
        of_set = bench.for_set(prompts)
        for size in args.batch:
            cells.append(of_set.cell(prompts, size, max(args.limit, size)))
            governor_report.show(console, cells[-1])
            write(args.out / "governor.json", {"setup": setup, "cells": cells})
    summary = governor_report.summary(cells)
    governor_report.show_summary(console, cells, summary)
    console.print(governor_report.plot(args.out / "governor.svg", setup, cells), soft_wrap=True)
    brief = [{name: value for name, value in cell.items() if name not in governor_report.DETAILS} for cell in cells]
    print(json.dumps({"benchmark": "governor", "setup": setup, "summary": summary, "cells": brief}))
    return int(bool(setup["kernels"]) and not summary["all_tokens_same"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.governor", description=__doc__)
    add = parser.add_argument
    add("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    add("--profile", default="auto", help="folder, or 'auto'")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--no-kernels", action="store_true", help="use the PyTorch backend on a GPU too")
    add("--sets", nargs="+", default=list(BUILDERS), choices=BUILDERS, metavar="SET", help=", ".join(BUILDERS))
    add("--prompts", type=Path, help="folder of NAME.jsonl files (default: the shipped domains' prompts for measuring)")
    add("--batch", type=int, nargs="+", default=[1, 4], help="sequences of a batch (default: 1 4)")
    add("--plans", type=Plan.parse, nargs="+", help="fixed plans (default: all that the governor chooses from)")
    add("--max-step", type=float, help="longest step of the governor, in plain steps (default: by device)")
    add("--limit", type=int, default=8, help="prompts of each set, at least one batch (default: 8)")
    add("--max-new-tokens", type=int, default=128, help="of each sequence (default: 128)")
    add("--ignore-eos", action="store_true", help="end tokens end no sequence")
    add("--max-length", type=int, default=1024, help="tokens of prompt and answer; longer prompts are left out")
    add("--repeat", type=int, default=1, help="calls of each batch in each mode; reports medians")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=OUT, help="folder for governor.json and governor.svg")
    return parser.parse_args(arguments)


def open_engine(args: argparse.Namespace) -> Engine:
    return Engine.from_pretrained(
        args.model, args.device, args.dtype, args.profile, rules=Rules(max_step=args.max_step),
        max_length=args.max_length, max_batch=max(16, *args.batch), kernels=False if args.no_kernels else None,
        prefix_reuse=False,
    )  # fmt: skip


def profile_of(engine: Engine) -> Profile:
    """Returns the engine's profile; exits if there is none or if it has no ranks, without which no governor runs."""
    if engine.profile is None:
        raise SystemExit("the model has no profile: make one with python -m selfspec.calibrate")
    if not all(choice.ranks for choice in engine.profile.domains.values()):
        raise SystemExit("the profile has no ranks, which the governor needs: calibrate the model again")
    return engine.profile


def sets_of(source: Source, names: Sequence[str], console: Console) -> Iterator[PromptSet]:
    """Builds the sets one by one; prints why a set is skipped."""
    for name in names:
        try:
            yield source.build(name)
        except Missing as error:
            console.print(str(error), soft_wrap=True)


def write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1), encoding="utf-8")


@dataclass
class Bench:
    """Compares the modes of one engine."""

    engine: Engine
    profile: Profile
    repeat: int = 1  # calls of each batch in each mode
    ignore_eos: bool = False
    plans: Sequence[Plan] | None = None  # None: all that the governor chooses from
    limit: int = 8  # prompts of a set at most
    forces_in_steps: bool = False  # the engine's steps force the texts; no logits processor is needed

    def for_set(self, prompts: PromptSet) -> Bench:
        """Returns this bench; for forced texts on an engine with kernels, one whose engine forces them in steps."""
        if prompts.forced is None or not self.engine.has_kernels:
            return self
        self._forced_text_engine.set_texts(prompts.prompts, prompts.forced)
        return replace(self, engine=self._forced_text_engine.engine, forces_in_steps=True)

    @cached_property
    def _forced_text_engine(self) -> ForcedTextEngine:
        return ForcedTextEngine(self.engine, self.limit)

    def cell(self, prompts: PromptSet, size: int, count: int) -> dict[str, Any]:
        """Compares all modes on the set's first `count` prompts in batches of one size. The modes decode each batch one
        after the other; each batch begins with the next mode."""
        batches = self.batches(prompts.prompts[:count], size)
        domain = self.domain_of(prompts.name, prompts.prompts[:count])
        plain, *fixed, governor = modes = self.modes(prompts, size, domain)
        self._warm_up(modes, prompts, batches)
        rounds = [(number, batch) for _ in range(self.repeat) for number, batch in enumerate(batches)]
        # Refreshed between calls only: a refreshing thread would hold the interpreter during timed calls.
        with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
            bar = progress.add_task(f"{prompts.name}, batch {size}", total=len(rounds) * len(modes))
            for first, (number, batch) in enumerate(rounds):
                for offset in range(len(modes)):
                    mode = modes[(first + offset) % len(modes)]
                    mode.add(number, self.call(mode, prompts, batch))
                    progress.update(bar, advance=1, refresh=True)
        return {
            "set": prompts.name,
            "in_domain": prompts.in_domain,
            "batch": size,
            "temperature": prompts.temperature,
            "forced": prompts.forced is not None,
            "domain": domain,
            "calls": len(batches),
            "tokens": plain.tokens,
            "modes": [mode.result(plain) for mode in modes],
            **compare(plain, fixed, governor, prompts.new_tokens),
            **at_switch(prompts, plain, fixed, governor),
        }

    def batches(self, prompts: list[list[int]], size: int) -> list[Batch]:
        """Splits prompts into batches; the first prompts fill up the last one. A prompt's seed is its index."""
        groups = [[i % len(prompts) for i in range(at, at + size)] for at in range(0, len(prompts), size)]
        return [Batch([prompts[i] for i in group], group, self.engine.model.device) for group in groups]

    def domain_of(self, name: str, prompts: list[list[int]]) -> str:
        """The domain with the set's name, else the one that the router finds; fixed plans use its exit."""
        return name if name in self.profile.domains else route(self.engine, prompts)

    def modes(self, prompts: PromptSet, size: int, domain: str) -> list[Mode]:
        """Plain decoding, the fixed plans and the governor. Fixed plans are `plans`, else all that the governor chooses
        from, with and without `max_step`."""
        choice = self.profile.choice(domain)
        options = {"speculative_decoding": "force", "exit_layer": choice.exit_layer, "domain": domain}
        plans = self.plans or self._plans(choice, domain, prompts.temperature, size)
        fixed = [Mode(str(plan), plan_label(plan), {"plan": plan, **options}) for plan in plans]
        return [Mode(PLAIN, PLAIN, {"speculative_decoding": False}), *fixed, Mode(GOVERNOR, GOVERNOR, {})]

    def _plans(self, choice: DomainChoice, domain: str, temperature: float, size: int) -> list[Plan]:
        sampling = SamplingParams(do_sample=temperature > 0, temperature=temperature or 1.0)
        rules = self.engine.rules, replace(self.engine.rules, max_step=math.inf)
        candidates = [self.engine.drafters.candidates(domain, choice, Policy(rule_set, sampling)) for rule_set in rules]
        plans = {plan for of_rules in candidates for plan in of_rules.table(size).plans}
        return sorted(plans, key=lambda plan: (len(plan), str(plan)))

    def _warm_up(self, modes: list[Mode], prompts: PromptSet, batches: list[Batch]) -> None:
        """Compiles, captures and allocates all that the timed calls need, and lets the governor measure step times."""
        kernels = self.engine.has_kernels
        warm_up(self.engine, batches, prompts.temperature)
        longest = max(batches, key=lambda batch: batch.width)
        for mode in modes:
            needs_all = kernels or mode.name == GOVERNOR
            tokens = prompts.new_tokens if needs_all else min(_WARM_UP_TOKENS, prompts.new_tokens)
            for batch in [longest, *batches] if kernels and mode.name == GOVERNOR else [longest]:
                self.call(mode, prompts, batch, tokens)
            if kernels and "plan" in mode.options:
                self.engine.scheduler.call(partial(self._capture, mode, prompts, len(longest.prompts)))

    def _capture(self, mode: Mode, prompts: PromptSet, size: int) -> None:
        """Captures a fixed plan's step for every number of slots that a batch has while its sequences end. Runs on the
        loop's thread."""
        from selfspec.backends.cuda.warmup import ExpectedStep, WarmUp  # imports Triton

        engine, plan = self.engine, mode.options["plan"]
        assert engine._graphs is not None
        engine.scheduler.close_idle_batches()
        exit = engine.drafters.trimmed_exit(mode.options["domain"])
        sampling = Task(prompts.new_tokens, prompts.temperature).sampling
        params = read_settings(engine.generation_config, None, dict(sampling)).resolve(1).params
        warm_up = WarmUp(engine._graphs, engine.context, max_scored_batch=0)
        for sequences in (1 << power for power in range((size - 1).bit_length() + 1)):
            warm_up.prepare(ExpectedStep(sequences, plan, exit, params))

    def call(self, mode: Mode, prompts: PromptSet, batch: Batch, new_tokens: int | None = None) -> Call:
        """Decodes a batch in one mode; raises RuntimeError if a forced text was not written."""
        task = Task(new_tokens or prompts.new_tokens, prompts.temperature)
        new_request = partial(self._request, mode, prompts, batch, task)
        call = run_request(self.engine.scheduler, new_request, lambda: self.engine.metrics().seconds)
        pairs = zip(batch.prompts, call.tokens, strict=True)
        if prompts.forced is not None and not all(prompts.forced.is_written(*pair) for pair in pairs):
            raise RuntimeError(f"{mode.name} wrote other texts than {prompts.name} forces: its times are invalid")
        return call

    def _request(self, mode: Mode, prompts: PromptSet, batch: Batch, task: Task) -> Request:
        """The request that `generate` makes for these prompts and options."""
        ends: dict[str, Any] = {"eos_token_id": None} if self.ignore_eos else {}
        options, _ = split_options(mode.options)
        kwargs = {"max_new_tokens": task.max_new_tokens, **task.sampling, **ends}
        settings = read_settings(self.engine.generation_config, None, kwargs)
        processors = [] if prompts.forced is None or self.forces_in_steps else [prompts.forced]
        copies = [list(prompt) for prompt in batch.prompts]
        return self.engine._requests.build(copies, batch.width, settings, batch.seeds, processors, None, options)


def at_switch(prompts: PromptSet, plain: Mode, fixed: Sequence[Mode], governor: Mode) -> dict[str, Any]:
    """Entries of a cell whose forced texts switch to another text: speeds before and after, tokens until drafting."""
    if prompts.switch_at is None:
        return {}
    switch_at = prompts.switch_at
    found = {"switch_at": switch_at, "around_switch": around_switch(switch_at, plain, fixed, governor)}
    return found | ({"resumption": resumption(governor, switch_at)} if prompts.ends_in_domain else {})


def plan_label(plan: Plan) -> str:
    """A plan's name in tables: an irregular plan's own name lists all its nodes."""
    name = str(plan)
    return f"{len(plan)} nodes, depth {plan.depth}" if name.startswith("nodes") else name


if __name__ == "__main__":
    sys.exit(main())
