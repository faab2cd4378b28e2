"""`python -m bench.governor`: the governor beside plain decoding and every fixed plan it chooses from, in one run.

For every set of prompts and batch size all modes take turns on each batch, after a warm-up. Times are those of prefill
and cycles together; what a call does before its prefill (finding the domain) has a column of its own. The best fixed
plan is the one with the least total time over the set. A batch loses where even its own best plan is under 0.97x plain;
strange text is noticed early if it is flagged before 32 tokens. Sets of given texts are recited: where there are
kernels inside of captured cycles, by a second engine around the same model, and otherwise by a processor on the host.
Numbers go to a file after every set.
"""

from __future__ import annotations

import argparse
import gc
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
from bench.governor_calls import Call, Mode, around, compare, follow, returns
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
_REHEARSED = 8  # tokens with which modes without anything to capture or learn are warmed up


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 180  # a log has room that no terminal tells of
    engine = open_engine(args)
    if engine.model.device.type == "cuda":  # one search for garbage among all of it stalls a call for 0.2 seconds
        gc.collect()
        gc.freeze()
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
    told = [{name: value for name, value in cell.items() if name not in governor_report.DETAILS} for cell in cells]
    print(json.dumps({"benchmark": "governor", "setup": setup, "summary": summary, "cells": told}))
    return int(bool(setup["kernels"]) and not summary["all_tokens_same"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.governor", description=__doc__)
    add = parser.add_argument
    add("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    add("--profile", default="auto", help="folder, or 'auto'")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--no-kernels", action="store_true", help="PyTorch's operations on a GPU too")
    add("--sets", nargs="+", default=list(BUILDERS), choices=BUILDERS, metavar="SET", help=", ".join(BUILDERS))
    add("--prompts", type=Path, help="folder of NAME.jsonl files (default: calibration's prompts for measuring)")
    add("--batch", type=int, nargs="+", default=[1, 4], help="rows at a time (default: 1 4)")
    add("--plans", type=Plan.parse, nargs="+", help="fixed plans to run beside the governor (default: all of its own)")
    add("--max-step", type=float, help="plain steps that a step of the governor's may take (default: the rules')")
    add("--limit", type=int, default=8, help="prompts of each set; a larger batch takes as many as it holds")
    add("--max-new-tokens", type=int, default=128, help="(default: 128)")
    add("--ignore-eos", action="store_true", help="every text goes on to the last token asked for")
    add("--max-length", type=int, default=1024, help="of prompt and new tokens; prompts that do not fit are left out")
    add("--repeat", type=int, default=1, help="times that every batch is decoded in every mode; medians are told")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=OUT, help="folder for governor.json and governor.svg")
    return parser.parse_args(arguments)


def open_engine(args: argparse.Namespace) -> Engine:
    return Engine.from_pretrained(
        args.model, args.device, args.dtype, args.profile, Rules(max_step=args.max_step),
        max_length=args.max_length, max_batch=max(16, *args.batch), kernels=False if args.no_kernels else None,
    )  # fmt: skip


def profile_of(engine: Engine) -> Profile:
    """The engine's profile, if a governor can work with it."""
    if engine.profile is None:
        raise SystemExit("the model has no profile: python -m selfspec.calibrate makes one")
    if not all(choice.ranks for choice in engine.profile.domains.values()):
        raise SystemExit("the profile tells plans alone, no ranks, so nothing is governed: calibrate the model again")
    return engine.profile


def sets_of(source: Source, names: Sequence[str], console: Console) -> Iterator[PromptSet]:
    """One by one; says which ones there are no prompts for."""
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
    """An engine, and how its modes are compared."""

    engine: Engine
    profile: Profile
    repeat: int = 1
    ignore_eos: bool = False
    plans: Sequence[Plan] | None = None  # None: all that the governor chooses from
    limit: int = 8  # prompts that a set has at most
    recites: bool = False  # the engine itself does, and needs no processor for it

    def for_set(self, prompts: PromptSet) -> Bench:
        """This one or, for texts to be recited on the device, one whose engine has learned them."""
        if prompts.recital is None or not self.engine.has_kernels:
            return self
        self._stage.set_texts(prompts.prompts, prompts.recital)
        return replace(self, engine=self._stage.engine, recites=True)

    @cached_property
    def _stage(self) -> ForcedTextEngine:
        return ForcedTextEngine(self.engine, self.limit)

    def cell(self, prompts: PromptSet, size: int, count: int) -> dict[str, Any]:
        """One set in batches of one size: all modes take turns; who goes first changes with every batch."""
        batches = self.batches(prompts.prompts[:count], size)
        domain = self.domain_of(prompts.name, prompts.prompts[:count])
        plain, *fixed, governor = modes = self.modes(prompts, size, domain)
        self._rehearse(modes, prompts, batches)
        turns = [(number, batch) for _ in range(self.repeat) for number, batch in enumerate(batches)]
        # Drawn between calls only: a thread of its own would take the interpreter from the host while it is timed.
        with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
            bar = progress.add_task(f"{prompts.name}, batch {size}", total=len(turns) * len(modes))
            for turn, (number, batch) in enumerate(turns):
                for offset in range(len(modes)):
                    mode = modes[(turn + offset) % len(modes)]
                    mode.add(number, self.call(mode, prompts, batch))
                    progress.update(bar, advance=1, refresh=True)
        return {
            "set": prompts.name,
            "hostile": prompts.is_hostile,
            "batch": size,
            "temperature": prompts.temperature,
            "recited": prompts.recital is not None,
            "domain": domain,
            "calls": len(batches),
            "tokens": plain.tokens,
            "modes": [mode.result(plain) for mode in modes],
            **compare(plain, fixed, governor, prompts.new_tokens),
            **turning(prompts, plain, fixed, governor),
        }

    def batches(self, prompts: list[list[int]], size: int) -> list[Batch]:
        """The last one is filled up with the first prompts. A prompt's seed is its number."""
        groups = [[i % len(prompts) for i in range(at, at + size)] for at in range(0, len(prompts), size)]
        return [Batch([prompts[i] for i in group], group, self.engine.model.device) for group in groups]

    def domain_of(self, name: str, prompts: list[list[int]]) -> str:
        """The one of the set's name, or that of most of its prompts; all fixed plans are this domain's."""
        return name if name in self.profile.domains else route(self.engine, prompts)

    def modes(self, prompts: PromptSet, size: int, domain: str) -> list[Mode]:
        """Plain decoding, the fixed plans that were asked for or else every candidate of the governor (those that take
        longer than `max_step` too), and the governor."""
        choice = self.profile.choice(domain)
        forced = {"speculative_decoding": "force", "exit_layer": choice.exit_layer, "domain": domain}
        plans = self.plans or self._plans(choice, domain, prompts.temperature, size)
        fixed = [Mode(str(plan), shown(plan), {"plan": plan, **forced}) for plan in plans]
        return [Mode(PLAIN, PLAIN, {"speculative_decoding": False}), *fixed, Mode(GOVERNOR, GOVERNOR, {})]

    def _plans(self, choice: DomainChoice, domain: str, temperature: float, size: int) -> list[Plan]:
        sampling = SamplingParams(do_sample=temperature > 0, temperature=temperature or 1.0)
        rules = self.engine.rules, replace(self.engine.rules, max_step=math.inf)
        candidates = [self.engine.drafters.candidates(domain, choice, Policy(of, sampling)) for of in rules]
        plans = {plan for of_rules in candidates for plan in of_rules.table(size).plans}
        return sorted(plans, key=lambda plan: (len(plan), str(plan)))

    def _rehearse(self, modes: list[Mode], prompts: PromptSet, batches: list[Batch]) -> None:
        """Compiles, captures and allocates whatever will be needed, and lets the governor measure costs."""
        kernels = self.engine.has_kernels
        warm_up(self.engine, batches, prompts.temperature)
        longest = max(batches, key=lambda batch: batch.width)
        for mode in modes:
            tokens = prompts.new_tokens if kernels or mode.name == GOVERNOR else min(_REHEARSED, prompts.new_tokens)
            for batch in [longest, *batches] if kernels and mode.name == GOVERNOR else [longest]:
                self.call(mode, prompts, batch, tokens)
            if kernels and "plan" in mode.options:
                self.engine.scheduler.call(partial(self._capture, mode, prompts, len(longest.prompts)))

    def _capture(self, mode: Mode, prompts: PromptSet, size: int) -> None:
        """A fixed plan for every number of rows that a batch may shrink to; on the loop's thread."""
        from selfspec.backends.cuda.warmup import ExpectedStep, WarmUp  # imports Triton

        engine, plan = self.engine, mode.options["plan"]
        assert engine._graphs is not None
        engine.scheduler.close_idle_batches()
        exit = engine.drafters.trimmed_exit(mode.options["domain"])
        asked = Task(prompts.new_tokens, prompts.temperature).sampling
        params = read_settings(engine.generation_config, None, dict(asked)).resolve(1).params
        warm_up = WarmUp(engine._graphs, engine.context, most_scored=0)
        for rows in (1 << power for power in range((size - 1).bit_length() + 1)):
            warm_up.prepare(ExpectedStep(rows, plan, exit, params))

    def call(self, mode: Mode, prompts: PromptSet, batch: Batch, new_tokens: int | None = None) -> Call:
        task = Task(new_tokens or prompts.new_tokens, prompts.temperature)
        new_request = partial(self._request, mode, prompts, batch, task)
        call = follow(self.engine.scheduler, new_request, lambda: self.engine._metrics.seconds)
        rows = zip(batch.prompts, call.tokens, strict=True)
        if prompts.recital is not None and not all(prompts.recital.is_written(*row) for row in rows):
            raise RuntimeError(f"{mode.name} wrote other texts than those that {prompts.name} recites")
        return call

    def _request(self, mode: Mode, prompts: PromptSet, batch: Batch, task: Task) -> Request:
        """What `generate` would run to its end."""
        ends: dict[str, Any] = {"eos_token_id": None} if self.ignore_eos else {}
        wishes, _ = split_options(mode.options)
        kwargs = {"max_new_tokens": task.max_new_tokens, **task.sampling, **ends}
        settings = read_settings(self.engine.generation_config, None, kwargs)
        processors = [] if prompts.recital is None or self.recites else [prompts.recital]
        members = [list(prompt) for prompt in batch.prompts]
        return self.engine._request(members, batch.width, settings, batch.seeds, processors, None, wishes)


def turning(prompts: PromptSet, plain: Mode, fixed: Sequence[Mode], governor: Mode) -> dict[str, Any]:
    """What happens where recited texts become other ones."""
    if prompts.turn is None:
        return {}
    found = {"turn": prompts.turn, "around_turn": around(prompts.turn, plain, fixed, governor)}
    return found | ({"return": returns(governor, prompts.turn)} if prompts.resumes else {})


def shown(plan: Plan) -> str:
    """A plan's name for a table: that of an irregular one lists all its nodes."""
    name = str(plan)
    return f"{len(plan)} nodes, depth {plan.depth}" if name.startswith("nodes") else name


if __name__ == "__main__":
    sys.exit(main())
