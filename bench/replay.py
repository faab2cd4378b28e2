"""`python -m bench.replay`: the governor on recorded texts, with step costs of the profile's device, on any machine.

Answers are written once by plain decoding (recited sets have theirs), and the exit drafts at each of their tokens, as
in calibration: the ranks found there say what any plan would accept anywhere. Plain decoding, every candidate plan and
the governor are then replayed with the step costs of the profile. Late hosts, prefill and captures are not part of it:
this compares policies, not machines.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.governor import profile_of, sets_of, shown
from bench.governor_sets import IN_DOMAIN, PromptSet, Source
from bench.modes import Batch, Task, ours, route
from selfspec import Engine, Rules
from selfspec.backends.cuda.exit_scoring import scored_positions
from selfspec.calibrate.corpus import Corpus, Document
from selfspec.calibrate.measuring import DEPTHS, Answers, measure
from selfspec.drafters import Drafters
from selfspec.governor.acceptance import Skill
from selfspec.governor.candidates import PlanCandidates
from selfspec.governor.costs import Costs
from selfspec.governor.governor import Budget, Governor
from selfspec.governor.rules import BATCHES, Policy
from selfspec.kernels.final_norm import unfilled_capacity
from selfspec.profiles.profile import DomainChoice
from selfspec.sampling import SamplingParams
from selfspec.speculation.exit_scoring import PROMPT_END
from selfspec.speculation.plan import NONE, Plan

_SHORTEST = 8  # tokens of a text that is worth replaying
_CONTEXT = 1  # tokens: all texts are in the bucket of short ones

Seconds = Callable[[int, Plan], float]  # (sequences, plan) -> device time of a step


@dataclass(frozen=True)
class Text:
    """The ranks that an exit's drafts would have had along an answer."""

    ranks: np.ndarray  # [tokens, DEPTHS]: of the tokens after each position, in drafts that begin there
    domain: str
    far: bool  # the prompt is far from every domain
    agreement: float  # of exit and model at the prompt's end
    positions: int  # there

    def last(self, plan: Plan, position: int) -> int:
        """The last node that a step of this plan would accept at some position."""
        node = 0
        while position < len(self.ranks) and plan.depths[node] < DEPTHS:
            rank = self.ranks[position][plan.depths[node]]
            child = next((child for child in plan.children[node] if plan.ranks[child - 1] == rank), None)
            if child is None:
                break
            node = child
        return node


def record(engine: Engine, prompts: PromptSet) -> list[Text]:
    """The answers, with the drafts of the exit that each prompt would get."""
    profile, model, write = profile_of(engine), engine.model, ours(engine, speculative_decoding=False)
    task, texts = Task(prompts.new_tokens + DEPTHS, prompts.temperature), []
    for seed, prompt in enumerate(track(prompts.prompts, description=prompts.name)):
        if prompts.recital is not None:
            answer = prompts.recital.texts[tuple(prompt)]
        else:
            (answer,) = write(Batch([prompt], [seed], model.device), task).tokens
        if len(answer) < _SHORTEST + DEPTHS:
            continue
        domain = route(engine, [prompt])
        exit = profile.exit(model, profile.choice(domain).exit_layer)
        corpus = Corpus.pack([Document(prompt + answer, len(prompt))], len(prompt) + len(answer))
        answers = Answers(prompts.temperature, corpus)
        (found,) = measure(model, [exit], profile.head_rows(model, domain), answers, seed)
        far = profile.far(engine.drafters.marks([prompt]), Rules().max_distance)[0] if profile.routes else False
        positions = min(len(prompt) - 1, PROMPT_END)
        texts.append(Text(found.ranks[: prompts.new_tokens], domain, bool(far), found.prompt_agreement[0], positions))
    return texts


def read_texts(path: Path) -> dict[str, list[Text]]:
    """Recorded texts by set; none where the file does not exist yet."""
    sets = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: [Text(np.array(of.pop("ranks")), **of) for of in texts] for name, texts in sets.items()}


def write_texts(path: Path, sets: dict[str, list[Text]]) -> None:
    entries = {name: [{**asdict(text), "ranks": text.ranks.tolist()} for text in texts] for name, texts in sets.items()}
    path.write_text(json.dumps(entries), encoding="utf-8")


class _AtHome(Drafters):
    """Has the candidates that requests get on the device that the profile was measured on."""

    _is_at_home = True  # type: ignore[assignment]


@dataclass
class Stage:
    """A domain's candidates and the device times of their steps, both on the profile's device."""

    candidates: PlanCandidates
    choice: DomainChoice
    rules: Rules

    @classmethod
    def of(cls, engine: Engine, temperature: float, max_step: float | None, domain: str) -> Stage:
        profile = profile_of(engine)
        device, choice = profile.device, profile.choice(domain)
        rules = Rules(max_step=max_step).on(device.type if device else "cpu")
        policy = Policy(rules, SamplingParams(do_sample=temperature > 0, temperature=temperature or 1.0))
        drafters = _AtHome(engine.model, profile, engine.drafters._mark, device is not None and device.kernels)
        return cls(drafters.candidates(domain, choice, policy), choice, rules)

    def seconds(self, sequences: int, plan: Plan) -> float:
        """Slots are a power of two; plain steps of sizes that were not measured lie on straight lines."""
        slots = 1 << (sequences - 1).bit_length()
        measured = {size: self.choice.costs[band].plain for band, size in BATCHES.items() if band in self.choice.costs}
        plain = float(np.interp(slots, list(measured), list(measured.values())))
        return plain * self.candidates.cost(plan, slots)


class Texts:
    """Texts that decode together, and the position that each has reached."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts, self.positions = texts, [0] * len(texts)

    @property
    def active(self) -> list[int]:
        return [number for number, text in enumerate(self.texts) if self.positions[number] < len(text.ranks)]

    def step(self, plan: Plan) -> list[tuple[int, int]]:
        """Advances all active texts; returns each one's number and the last node it accepted."""
        outcomes = [(number, self.texts[number].last(plan, self.positions[number])) for number in self.active]
        for number, last in outcomes:
            self.positions[number] += plan.depths[last] + 1
        return outcomes


def fixed(texts: Sequence[Text], plan: Plan, seconds: Seconds) -> float:
    """The time of a batch with one plan."""
    running, total = Texts(texts), 0.0
    while running.active:
        total += seconds(len(running.active), plan)
        running.step(plan)
    return total


class Governed:
    """A batch under a governor, which chooses each plan while the step before is in flight."""

    def __init__(self, texts: Sequence[Text], stage: Stage, costs: Costs, budget: Budget, noise: float = 0.0) -> None:
        self.governor = Governor(stage.candidates, costs, stage.rules, budget)
        self.stage, self.running = stage, Texts(texts)
        self.skills = [Skill.of_prompt(text.far) for text in texts]
        self.plans: list[Plan] = []
        self.total = 0.0
        self._noise, self._drawn = noise, Random(0)  # of measured times: deviation of their logarithm
        self._unfilled = 0

    def run(self) -> float:
        """The time of the batch."""
        agreement, running = self.stage.choice.prompt_agreement, self.running
        scores_prompts = agreement is not None and len(running.texts) <= self.stage.rules.max_tree_batch
        if scores_prompts:
            self._pay_score()
        plan = self._launch(NONE)
        while running.active:
            following = self._launch(plan)
            count = len(running.active)
            seconds, outcomes = self.stage.seconds(count, plan), running.step(plan)
            if not self.plans and scores_prompts and agreement is not None:  # scores come with the first step's tokens
                for skill, text in zip(self.skills, running.texts, strict=True):
                    skill.observe_prompt(text.agreement, text.positions, agreement.mean)
            active = set(running.active)
            observed = [(self.skills[number] if number in active else None, last) for number, last in outcomes]
            self.governor.observe(plan, observed, seconds * math.exp(self._drawn.gauss(0, self._noise)), _CONTEXT)
            self.total += seconds
            self.plans.append(plan)
            plan = following
        return self.total

    def _launch(self, in_use: Plan) -> Plan:
        active = self.running.active
        self._score(active)
        plan = self.governor.choose([self.skills[number] for number in active], len(active), _CONTEXT, in_use)[0]
        self.governor.launched(plan, len(active), _CONTEXT)
        if len(plan) and self._unfilled:
            self.total += self.stage.candidates.score_cost * self.stage.seconds(len(active), NONE)
        self._unfilled = 0 if len(plan) else self._unfilled + 1
        return plan

    def _score(self, active: Sequence[int]) -> None:
        """As kernels score: the best draft at the oldest of the unfilled positions."""
        slots = 1 << (len(active) - 1).bit_length()
        scores, capacity = self.governor.may_score, unfilled_capacity(slots)
        if self._unfilled < min(self.governor.score_interval if scores else capacity, capacity):
            return
        if scores:
            count = min(self._unfilled, scored_positions(slots))
            self._pay_score()
            for number in active:
                start = max(0, self.running.positions[number] - self._unfilled)
                ranks = self.running.texts[number].ranks[start : start + count, 0]
                self.governor.scored(self.skills[number], ranks.tolist())
        self._unfilled = 0

    def _pay_score(self) -> None:
        self.governor.charge_score()
        self.total += self.stage.candidates.score_cost * self.stage.seconds(len(self.running.active), NONE)


def compare(texts: Sequence[Text], size: int, stage_of: Callable[[str], Stage], noise: float = 0.0) -> dict[str, Any]:
    """Batches of so many texts; the last of them may be among the first again. Fixed plans are those of most texts'
    domain."""
    batches = [[texts[(start + n) % len(texts)] for n in range(size)] for start in range(0, len(texts), size)]
    stage = stage_of(_most([text.domain for text in texts]))
    plain = [fixed(batch, NONE, stage.seconds) for batch in batches]
    plans = stage.candidates.table(size).plans
    totals = {plan: sum(fixed(batch, plan, stage.seconds) for batch in batches) for plan in plans}
    best, costs = min(totals, key=lambda plan: totals[plan]), Costs()
    budget = Budget(stage.rules.budget, stage.rules.budget_refill)
    stages = [stage_of(_most([text.domain for text in batch])) for batch in batches]
    taken = [Governed(batch, of, costs, budget, noise).run() for batch, of in zip(batches, stages, strict=True)]
    return {
        "batch": size,
        "texts": len(texts),
        "best_fixed": shown(best),
        "best_fixed_against_plain": round(sum(plain) / totals[best], 4),
        "governor_against_plain": round(sum(plain) / sum(taken), 4),
        "governor_against_best_fixed": round(totals[best] / sum(taken), 4),
        "worst_batch_against_plain": round(min(p / t for p, t in zip(plain, taken, strict=True)), 4),
    }


def _most(domains: Sequence[str]) -> str:
    return max(sorted(set(domains)), key=domains.count)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    add = parser.add_argument
    add("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    add("--profile", default="auto", help="folder, or 'auto'")
    add("--sets", nargs="+", default=list(IN_DOMAIN), help="as of bench.governor")
    add("--prompts", type=Path, help="folder of NAME.jsonl files (default: calibration's prompts for measuring)")
    add("--texts", type=Path, help="JSON file of recorded texts: sets in it are replayed, others recorded and added")
    add("--batch", type=int, nargs="+", default=[1, 4, 16])
    add("--limit", type=int, default=8, help="prompts of each set")
    add("--max-new-tokens", type=int, default=128)
    add("--max-step", type=float, help="plain steps that a step of the governor's may take (default: by the device)")
    add("--noise", type=float, default=0.0, help="deviation of the logarithm of measured step times")
    args = parser.parse_args(arguments)
    engine, console = Engine.from_pretrained(args.model, profile=args.profile), Console(width=110)
    device = profile_of(engine).device
    table = Table(title=f"replayed with step costs of {device.name if device else 'some device'}")
    for heading in ("set", "batch", "best fixed plan", "against plain", "governor", "of the best", "worst batch"):
        table.add_column(heading, justify="left" if heading in ("set", "best fixed plan") else "right")
    recorded, results = read_texts(args.texts) if args.texts else {}, []
    for prompts in sets_of(Source(engine, args.prompts, args.limit, args.max_new_tokens), args.sets, console):
        texts = recorded[prompts.name] if prompts.name in recorded else record(engine, prompts)
        recorded[prompts.name] = texts
        if args.texts:
            write_texts(args.texts, recorded)
        stage_of = cache(partial(Stage.of, engine, prompts.temperature, args.max_step))
        for size in args.batch if texts else ():
            found = compare(texts, size, stage_of, args.noise)
            results.append({"set": prompts.name, **found})
            names = ("best_fixed_against_plain", "governor_against_plain", "governor_against_best_fixed")
            speeds = [f"{found[name]:.2f}x" for name in (*names, "worst_batch_against_plain")]
            table.add_row(prompts.name, str(size), found["best_fixed"], *speeds)
    console.print(table)
    print(json.dumps({"benchmark": "replay", "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
