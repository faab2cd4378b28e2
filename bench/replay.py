"""`python -m bench.replay`: the governor on texts whose drafts are known, on any machine.

Answers are written once, plainly, and the exit's drafts rehearsed at each of their tokens, as calibration does it: what
any plan would accept anywhere follows from that. Plain decoding, every plan of the ladder and the governor are then
replayed with what cycles take by the profile, on the device that it was measured on. Hosts that stall, prompts, and
what is captured or compiled are not there: this compares policies, not machines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.governor import profile_of, sets_of, shown
from bench.governor_sets import IN_DOMAIN, PromptSet, Source
from bench.modes import Batch, Task, ours, route
from selfspec import Engine, Rules
from selfspec.backends.cuda.exit_scoring import OFFERED, scored_positions
from selfspec.batch import _FIRST_FILL, _SELDOM
from selfspec.calibrate.corpus import Corpus, Document
from selfspec.calibrate.measuring import DEPTHS, Answers, measure
from selfspec.drafters import Drafters
from selfspec.governor.candidates import Ladder
from selfspec.governor.costs import Costs
from selfspec.governor.governor import MEASURING, Governor, Watch
from selfspec.governor.rules import BATCHES, Policy
from selfspec.kernels.final_norm import unfilled_capacity
from selfspec.profiles.profile import DomainChoice
from selfspec.sampling import SamplingParams
from selfspec.speculation.exit_scoring import PROMPT_END
from selfspec.speculation.plan import NONE, Plan

_SHADOW = 0.1  # plain steps that catching up takes
_FEWEST = 8  # tokens of a text that are worth replaying


@dataclass(frozen=True)
class Text:
    """What an exit would have drafted along an answer."""

    ranks: np.ndarray  # [tokens, DEPTHS]: of the tokens after each place, in drafts that begin there
    domain: str
    far: bool  # the prompt is unlike anything that calibration saw
    agreement: float  # of exit and model at the prompt's end
    places: int  # there

    def last(self, plan: Plan, place: int) -> int:
        """The last node that a cycle of this plan would accept at some place."""
        node = 0
        while place < len(self.ranks) and plan.depths[node] < DEPTHS:
            rank = self.ranks[place][plan.depths[node]]
            child = next((child for child in plan.children[node] if plan.ranks[child - 1] == rank), None)
            if child is None:
                break
            node = child
        return node


def record(engine: Engine, prompts: PromptSet) -> list[Text]:
    """The model's own answers, with the drafts of the exit that each prompt would get."""
    profile, model, write = profile_of(engine), engine.model, ours(engine, speculative_decoding=False)
    task, texts = Task(prompts.new_tokens + DEPTHS, prompts.temperature), []
    for seed, prompt in enumerate(track(prompts.prompts, description=prompts.name)):
        (answer,) = write(Batch([prompt], [seed], model.device), task).tokens
        if len(answer) < _FEWEST + DEPTHS:
            continue
        domain = route(engine, [prompt])
        exit = profile.exit(model, profile.choice(domain).exit_layer)
        corpus = Corpus.pack([Document(prompt + answer, len(prompt))], len(prompt) + len(answer))
        answers = Answers(prompts.temperature, corpus)
        (found,) = measure(model, [exit], profile.head_rows(model, domain), answers, seed)
        far = profile.far(engine.drafters.marks([prompt]), Rules().max_distance)[0] if profile.routes else False
        places = min(len(prompt) - 1, PROMPT_END)
        texts.append(Text(found.ranks[: prompts.new_tokens], domain, far, found.prompt_agreement[0], places))
    return texts


class _AtHome(Drafters):
    """Thinks of plans as on the device that the profile was measured on."""

    _is_at_home = True  # type: ignore[assignment]


@dataclass
class Stage:
    """A domain's plans and what cycles take, both on the profile's device."""

    ladder: Ladder
    choice: DomainChoice
    rules: Rules

    @classmethod
    def of(cls, engine: Engine, temperature: float, longest: float | None, domain: str) -> Stage:
        profile = profile_of(engine)
        device, choice = profile.device, profile.choice(domain)
        rules = Rules(longest_cycle=longest).on(device.type if device else "cpu")
        policy = Policy(rules, SamplingParams(do_sample=temperature > 0, temperature=temperature or 1.0))
        drafters = _AtHome(engine.model, profile, engine.drafters._mark, device is not None and device.kernels)
        return cls(drafters.ladder(domain, choice, policy), choice, rules)

    def seconds(self, rows: int, plan: Plan) -> float:
        """Seats are a power of two; a plain step of a number that was not measured lies between those that were."""
        seats = 1 << (rows - 1).bit_length()
        measured = {size: self.choice.costs[band].plain for band, size in BATCHES.items() if band in self.choice.costs}
        plain = float(np.interp(seats, list(measured), list(measured.values())))
        return plain * (self.ladder.guess(seats)(plan.depth, len(plan)) if len(plan) else 1.0)


class Rows:
    """Texts of one batch, and how far each has been replayed."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts, self.places = texts, [0] * len(texts)

    @property
    def active(self) -> list[int]:
        return [row for row, text in enumerate(self.texts) if self.places[row] < len(text.ranks)]

    def left(self, row: int) -> int:
        return max(0, len(self.texts[row].ranks) - self.places[row])

    def cycle(self, plan: Plan) -> tuple[list[int], list[int | None]]:
        """All that are active go on; returns them, and where each stopped, or None where a text has ended."""
        rows, lasts = self.active, []
        for row in rows:
            last = self.texts[row].last(plan, self.places[row])
            self.places[row] += plan.depths[last] + 1
            lasts.append(last if self.left(row) else None)
        return rows, lasts


def fixed(texts: Sequence[Text], plan: Plan, seconds: Callable[[int, Plan], float]) -> float:
    """How long a batch takes with one plan."""
    rows, total = Rows(texts), 0.0
    while rows.active:
        total += seconds(len(rows.active), plan)
        rows.cycle(plan)
    return total


def governed(texts: Sequence[Text], stage: Stage, costs: Costs) -> tuple[float, list[Plan]]:
    """The same under a governor, which chooses each plan while the cycle before is in flight; also the plans."""
    usual = stage.choice.prompt_agreement
    governor = Governor(stage.ladder, costs, stage.rules, None if usual is None else (usual.mean, usual.deviation))
    watches, rows, plans = [Watch.of_prompt(text.far) for text in texts], Rows(texts), []
    unjudged = [] if len(texts) > stage.rules.max_tree_batch else list(zip(watches, texts, strict=True))
    first = patience = stage.rules.scored_after(len(texts)) or _FIRST_FILL
    total, waiting, unscored = 0.0, 0, 0

    def judge() -> None:
        while unjudged and usual is not None:
            watch, text = unjudged.pop()
            watch.learn_prompt(text.agreement, text.places, usual.mean, usual.deviation)

    def choose(in_flight: tuple[Plan, str | None] | None) -> tuple[Plan, str | None]:
        left = [max(1, rows.left(row) - (in_flight is not None)) for row in rows.active]
        return governor.choose([watches[row] for row in rows.active], 1, in_flight, left)

    in_doubt = usual is not None and len(unjudged) > 0 and any(text.far for text in texts)
    flight = (NONE, MEASURING) if in_doubt else choose(None)
    while rows.active:
        plan, reason = flight
        if in_doubt:
            judge()
        flight = choose(flight)
        plain = stage.seconds(len(rows.active), NONE)
        room = unfilled_capacity(1 << (len(rows.active) - 1).bit_length())
        looks = stage.rules.shadow_tokens > 0 and waiting > 0 and unscored >= patience
        catching_up = _SHADOW * plain if looks or waiting >= room or (waiting and len(plan)) else 0.0
        if looks:
            _score(governor, watches, rows, waiting)
            most = _SELDOM if len(rows.active) <= stage.rules.max_tree_batch else 2 * _SELDOM
            unscored, patience = 0, max(first, min(2 * patience, most))
        waiting = (0 if catching_up else waiting) + (not len(plan))
        unscored, patience = (0, first) if len(plan) else (unscored + 1, patience)
        taken = stage.seconds(len(rows.active), plan) + catching_up
        now, lasts = rows.cycle(plan)
        judge()  # which comes with the first cycle's tokens
        is_usual = len(plan) > 0 or not catching_up
        left = [rows.left(row) for row in now]
        governor.observe([watches[row] for row in now], plan, lasts, taken if is_usual else None, 1, reason, left)
        plans.append(plan)
        total += taken
    return total, plans


def _score(governor: Governor, watches: Sequence[Watch], rows: Rows, waiting: int) -> None:
    """The oldest of the tokens that waited, as kernels score them: by the best draft alone."""
    count = min(waiting, scored_positions(len(watches)))
    ranks = []
    for row in rows.active:
        start = rows.places[row] - waiting
        first = rows.texts[row].ranks[max(0, start) : start + count, 0]
        ranks.append([int(rank != 0) for rank in first])
    governor.scored([watches[row] for row in rows.active], ranks, OFFERED)


def compare(texts: Sequence[Text], size: int, stage_of: Callable[[str], Stage]) -> dict[str, Any]:
    """Batches of so many texts; the last of them may be among the first again. Fixed plans are those of most texts'
    domain."""
    batches = [[texts[(start + n) % len(texts)] for n in range(size)] for start in range(0, len(texts), size)]
    most = stage_of(_most([text.domain for text in texts]))
    plain = sum(fixed(batch, NONE, most.seconds) for batch in batches)
    plans = {plan: sum(fixed(batch, plan, most.seconds) for batch in batches) for plan in most.ladder.plans(size)}
    best, costs = min(plans, key=lambda plan: plans[plan]), Costs(in_seats=True)
    stages = [stage_of(_most([text.domain for text in batch])) for batch in batches]
    taken = sum(governed(batch, stage, costs)[0] for batch, stage in zip(batches, stages, strict=True))
    return {
        "batch": size,
        "texts": len(texts),
        "best_fixed": shown(best),
        "best_fixed_against_plain": round(plain / plans[best], 4),
        "governor_against_plain": round(plain / taken, 4),
        "governor_against_best_fixed": round(plans[best] / taken, 4),
    }


def _most(domains: Sequence[str]) -> str:
    return max(sorted(set(domains)), key=domains.count)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    add = parser.add_argument
    add("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    add("--profile", default="auto", help="folder, or 'auto'")
    add("--sets", nargs="+", default=list(IN_DOMAIN), help="as of bench.governor, but for those that recite")
    add("--prompts", type=Path, help="folder of NAME.jsonl files (default: calibration's prompts for measuring)")
    add("--batch", type=int, nargs="+", default=[1, 4, 16])
    add("--limit", type=int, default=8, help="prompts of each set")
    add("--max-new-tokens", type=int, default=128)
    add("--longest-cycle", type=float, help="plain steps that the governor's cycles may take (default: by the device)")
    args = parser.parse_args(arguments)
    engine, console = Engine.from_pretrained(args.model, profile=args.profile), Console(width=110)
    device = profile_of(engine).device
    table = Table(title=f"replayed with what cycles take on {device.name if device else 'some device'}")
    for heading in ("set", "batch", "best fixed plan", "against plain", "governor", "of the best"):
        table.add_column(heading, justify="left" if heading in ("set", "best fixed plan") else "right")
    results = []
    for prompts in sets_of(Source(engine, args.prompts, args.limit, args.max_new_tokens), args.sets, console):
        if prompts.recital is not None:
            console.print(f"{prompts.name} is skipped: what it recites is not the model's own text")
            continue
        texts = record(engine, prompts)
        stage_of = cache(partial(Stage.of, engine, prompts.temperature, args.longest_cycle))
        for size in args.batch if texts else ():
            found = compare(texts, size, stage_of)
            results.append({"set": prompts.name, **found})
            names = ("best_fixed_against_plain", "governor_against_plain", "governor_against_best_fixed")
            speeds = [f"{found[name]:.2f}x" for name in names[:2]] + [f"{found[names[2]]:.2f}"]
            table.add_row(prompts.name, str(size), found["best_fixed"], *speeds)
    console.print(table)
    print(json.dumps({"benchmark": "replay", "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
