"""`python -m bench.replay`: simulates the governor on recorded texts with the profile's step times, on any machine.

Plain decoding writes each answer once (forced texts are taken as given). The exit then drafts at each of its tokens, as
in calibration; the ranks of the answer's tokens in these drafts determine which nodes any plan accepts at any position.
Plain decoding, every candidate plan and the governor are simulated with the step times in the profile. Host time and
prefill are left out; so are graph captures unless `--capture-ms` gives their time.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.governor import plan_label, profile_of, sets_of
from bench.governor_sets import IN_DOMAIN, PromptSet, Source
from bench.modes import Batch, Task, ours, route
from selfspec import Engine, Rules
from selfspec.backends.cuda.exit_scoring import scored_positions
from selfspec.calibrate.corpus import Corpus, Document
from selfspec.calibrate.measuring import DEPTHS, measure
from selfspec.drafters import Drafters
from selfspec.governor.acceptance import UNFAMILIAR, Skill
from selfspec.governor.candidates import PlanCandidates
from selfspec.governor.copying import Copying
from selfspec.governor.costs import Costs
from selfspec.governor.governor import Budget, Governor
from selfspec.governor.rules import BATCHES, Policy
from selfspec.kernels.copy_draft import copy_reference
from selfspec.kernels.final_norm import unfilled_capacity
from selfspec.profiles.profile import DomainChoice
from selfspec.sampling import SamplingParams
from selfspec.speculation.exit_scoring import PROMPT_END
from selfspec.speculation.plan import NONE, Plan

_SHORTEST = 8  # new tokens: shorter texts are left out
_CONTEXT = 1  # tokens of context, for step times: all texts count as short

Seconds = Callable[[int, Plan], float]  # (sequences, plan) -> device seconds of a step


@dataclass(frozen=True)
class Text:
    """An answer: the ranks of its tokens in the exit's drafts, and the scores of its prompt."""

    ranks: np.ndarray  # [tokens, DEPTHS]: of the tokens after each position, in drafts that begin there
    domain: str
    is_unfamiliar: bool  # the prompt is unlike every domain
    agreement: float  # share of positions at the prompt's end where exit and model choose the same token
    positions: int  # number of these positions
    tokens: list[int]  # of prompt and answer
    prompt: int  # tokens of the prompt

    def last(self, plan: Plan, position: int) -> tuple[int, int]:
        """The last node that a step with this plan accepts at a position, and the last one that the exit alone would
        have reached; 0, the root, if there is none."""
        exit_node, copied = self._last_of_exit(plan, position), 0
        if plan.copied:
            start = self.prompt + position
            draft = copy_reference(torch.tensor(self.tokens[:start]), plan.copied).tolist()
            same = (drafted == token for drafted, token in zip(draft, self.tokens[start:], strict=False))
            copied = sum(takewhile(bool, same))
        return copied if copied > plan.depths[exit_node] else exit_node, exit_node

    def _last_of_exit(self, plan: Plan, position: int) -> int:
        node = 0
        while position < len(self.ranks) and plan.depths[node] < DEPTHS:
            rank = self.ranks[position][plan.depths[node]]
            children = (child for child in plan.children[node] if child > plan.copied)
            child = next((child for child in children if plan.ranks[child - 1] == rank), None)
            if child is None:
                break
            node = child
        return node


def record(engine: Engine, prompts: PromptSet) -> list[Text]:
    """Decodes each prompt plainly, or takes its forced text, and ranks the tokens in drafts of its domain's exit."""
    profile, model, write = profile_of(engine), engine.model, ours(engine, speculative_decoding=False)
    task, texts = Task(prompts.new_tokens + DEPTHS, prompts.temperature), []
    for seed, prompt in enumerate(track(prompts.prompts, description=prompts.name)):
        if prompts.forced is not None:
            answer = prompts.forced.texts[tuple(prompt)]
        else:
            (answer,) = write(Batch([prompt], [seed], model.device), task).tokens
        if len(answer) < _SHORTEST + DEPTHS:
            continue
        domain = route(engine, [prompt])
        file = profile.exits_file
        exit, head_rows = file.exit(model, profile.choice(domain).exit_layer), file.head_rows(model, domain)
        corpus = Corpus.pack([Document(prompt + answer, len(prompt))], len(prompt) + len(answer))
        (found,) = measure(model, [exit], head_rows, corpus, prompts.temperature, seed)
        embeddings = engine.drafters.embed([prompt]).read() if profile.routes else None
        is_unfamiliar = embeddings is not None and profile.are_unfamiliar(embeddings, Rules().max_distance)[0]
        positions = min(len(prompt) - 1, PROMPT_END)
        ranks = found.ranks[: prompts.new_tokens]
        agreement = found.prompt_agreement[0]
        texts.append(Text(ranks, domain, is_unfamiliar, agreement, positions, prompt + answer, len(prompt)))
    return texts


def read_texts(path: Path) -> dict[str, list[Text]]:
    """Recorded texts by set; empty if the file does not exist."""
    sets = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: [Text(np.array(text.pop("ranks")), **text) for text in texts] for name, texts in sets.items()}


def write_texts(path: Path, sets: dict[str, list[Text]]) -> None:
    entries = {name: [{**asdict(text), "ranks": text.ranks.tolist()} for text in texts] for name, texts in sets.items()}
    path.write_text(json.dumps(entries), encoding="utf-8")


class _OnProfileDevice(Drafters):
    """Gives the candidates of the device that the profile was measured on, whatever device the model is on."""

    _is_measured_here = True  # type: ignore[assignment]


@dataclass
class DomainTiming:
    """A domain's candidate plans and the device times of their steps, both for the profile's device."""

    candidates: PlanCandidates
    choice: DomainChoice
    rules: Rules

    @classmethod
    def of(cls, engine: Engine, temperature: float, max_step: float | None, domain: str) -> DomainTiming:
        profile = profile_of(engine)
        device, choice = profile.device, profile.choice(domain)
        rules = Rules(max_step=max_step).for_device(device.type if device else "cpu")
        policy = Policy(rules, SamplingParams(do_sample=temperature > 0, temperature=temperature or 1.0))
        kernels = device is not None and device.kernels
        drafters = _OnProfileDevice(engine.model, profile, engine.drafters._embed, kernels)
        return cls(drafters.candidates(domain, choice, policy), choice, rules)

    def seconds(self, sequences: int, plan: Plan) -> float:
        """Device seconds of a step. Slots are a power of two; plain steps of slots that calibration did not measure are
        interpolated."""
        slots = 1 << (sequences - 1).bit_length()
        measured = {size: self.choice.costs[band].plain for band, size in BATCHES.items() if band in self.choice.costs}
        plain = float(np.interp(slots, list(measured), list(measured.values())))
        return plain * self.candidates.cost(plan, slots)


class Texts:
    """A batch of texts, and the position of each."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts, self.positions = texts, [0] * len(texts)

    @property
    def active(self) -> list[int]:
        return [number for number, text in enumerate(self.texts) if self.positions[number] < len(text.ranks)]

    def step(self, plan: Plan) -> list[tuple[int, int, int]]:
        """Advances all active texts; returns each one's number, the last node it accepted and the exit's last one."""
        outcomes = [(number, *self.texts[number].last(plan, self.positions[number])) for number in self.active]
        for number, last, _ in outcomes:
            self.positions[number] += plan.depths[last] + 1
        return outcomes


def fixed(texts: Sequence[Text], plan: Plan, seconds: Seconds) -> float:
    """Device seconds of a batch with one plan."""
    running, total = Texts(texts), 0.0
    while running.active:
        total += seconds(len(running.active), plan)
        running.step(plan)
    return total


@dataclass
class Captures:
    """The captured steps of a process, and the seconds that one more takes."""

    seconds: float = 0.0
    steps: set[tuple[int, Plan]] = field(default_factory=set)  # (slots, plan)

    def needed(self, slots: int, plan: Plan) -> float:
        """Seconds that capturing the step takes; 0 if it is captured, and for plain steps."""
        return self.seconds if len(plan) and (slots, plan) not in self.steps else 0.0


class Governed:
    """A batch with a governor, which chooses each plan while the previous step is in flight."""

    def __init__(
        self,
        texts: Sequence[Text],
        timing: DomainTiming,
        costs: Costs,
        budget: Budget,
        noise: float = 0.0,
        captures: Captures | None = None,
    ) -> None:
        self.captures = captures or Captures()
        self.governor = Governor(timing.candidates, costs, timing.rules, budget)
        self.timing, self.running = timing, Texts(texts)
        self.skills = [Skill(UNFAMILIAR) if text.is_unfamiliar else Skill() for text in texts]
        self.copying = [Copying() for _ in texts]
        self.plans: list[Plan] = []  # of each step
        self.total = 0.0  # device seconds
        self._noise, self._random = noise, Random(0)  # standard deviation of the logarithm of measured times
        self._unfilled = 0  # plainly decoded positions whose exit block KV is not written

    def run(self) -> float:
        """Device seconds of the batch."""
        agreement, running = self.timing.choice.prompt_agreement, self.running
        scores_prompts = agreement is not None and len(running.texts) <= self.timing.rules.max_tree_batch
        if scores_prompts:
            self._charge_score()
        plan = self._launch()
        while running.active:
            following = self._launch()
            count = len(running.active)
            seconds, outcomes = self.timing.seconds(count, plan), running.step(plan)
            if not self.plans and scores_prompts and agreement is not None:  # scores come with the first step's tokens
                for skill, text in zip(self.skills, running.texts, strict=True):
                    skill.observe_prompt(text.agreement, text.positions, agreement.mean)
            active = set(running.active)
            observed = [(self.skills[number] if number in active else None, last) for number, last, _ in outcomes]
            measured, exit_nodes = (
                seconds * math.exp(self._random.gauss(0, self._noise)),
                [exit_node for *_, exit_node in outcomes],
            )
            self.governor.observe(plan, observed, measured, _CONTEXT, exit_nodes)
            for number, *_ in outcomes:
                text = running.texts[number]
                end = text.prompt + running.positions[number]
                self.skills[number].copying_level = self.copying[number].read(text.tokens[:end], text.prompt)
            self.total += seconds
            self.plans.append(plan)
            plan = following
        return self.total

    def _launch(self) -> Plan:
        active, slots = self.running.active, 1 << (len(self.running.active) - 1).bit_length()
        self._score(active)
        skills, needed = [self.skills[number] for number in active], partial(self.captures.needed, slots)
        plan = self.governor.choose(skills, len(active), _CONTEXT, needed)[0]
        self.governor.charge_step(plan, len(active), _CONTEXT)
        self.total += needed(plan)
        self.captures.steps.add((slots, plan))
        if len(plan) and self._unfilled:
            self.total += self.timing.candidates.score_cost * self.timing.seconds(len(active), NONE)
        self._unfilled = 0 if len(plan) else self._unfilled + 1
        return plan

    def _score(self, active: Sequence[int]) -> None:
        """Scores the exit's best draft at the oldest unfilled positions when as many are unfilled as the CUDA backend
        waits for."""
        slots = 1 << (len(active) - 1).bit_length()
        scores, capacity = self.governor.may_score, unfilled_capacity(slots)
        if self._unfilled < min(self.governor.score_interval if scores else capacity, capacity):
            return
        if scores:
            count = min(self._unfilled, scored_positions(slots))
            self._charge_score()
            for number in active:
                start = max(0, self.running.positions[number] - self._unfilled)
                ranks = self.running.texts[number].ranks[start : start + count, 0]
                self.governor.observe_score(self.skills[number], (ranks == 0).tolist())
        self._unfilled = 0

    def _charge_score(self) -> None:
        self.governor.charge_score()
        self.total += self.timing.candidates.score_cost * self.timing.seconds(len(self.running.active), NONE)


def compare(
    texts: Sequence[Text], size: int, timing_of: Callable[[str], DomainTiming], noise: float, capture_s: float
) -> dict[str, Any]:
    """Compares the modes in batches of `size` texts; the first texts fill up the last batch. Fixed plans are the
    candidates of the domain that most texts have."""
    batches = [[texts[(start + n) % len(texts)] for n in range(size)] for start in range(0, len(texts), size)]
    timing = timing_of(_most_frequent([text.domain for text in texts]))
    plain = [fixed(batch, NONE, timing.seconds) for batch in batches]
    plans = timing.candidates.table(size).plans
    totals = {plan: sum(fixed(batch, plan, timing.seconds) for batch in batches) for plan in plans}
    best, costs = min(totals, key=lambda plan: totals[plan]), Costs()
    budget = Budget(timing.rules.budget, timing.rules.budget_refill)
    timings = [timing_of(_most_frequent([text.domain for text in batch])) for batch in batches]
    captures = Captures(capture_s)
    governed = [
        Governed(batch, timing, costs, budget, noise, captures).run()
        for batch, timing in zip(batches, timings, strict=True)
    ]
    return {
        "batch": size,
        "texts": len(texts),
        "best_fixed": plan_label(best),
        "best_fixed_against_plain": round(sum(plain) / totals[best], 4),
        "governor_against_plain": round(sum(plain) / sum(governed), 4),
        "governor_against_best_fixed": round(totals[best] / sum(governed), 4),
        "worst_batch_against_plain": round(min(p / g for p, g in zip(plain, governed, strict=True)), 4),
    }


def _most_frequent(domains: Sequence[str]) -> str:
    return max(sorted(set(domains)), key=domains.count)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    add = parser.add_argument
    add("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    add("--profile", default="auto", help="folder, or 'auto'")
    add("--sets", nargs="+", default=list(IN_DOMAIN), help="sets of bench.governor (default: the in-domain ones)")
    add("--prompts", type=Path, help="folder of NAME.jsonl files (default: the shipped domains' prompts for measuring)")
    add("--texts", type=Path, help="JSON file of recorded texts; sets that it lacks are recorded and added")
    add("--batch", type=int, nargs="+", default=[1, 4, 16], help="sequences of a batch (default: 1 4 16)")
    add("--limit", type=int, default=8, help="prompts of each set (default: 8)")
    add("--max-new-tokens", type=int, default=128, help="of each text (default: 128)")
    add("--max-step", type=float, help="longest step of the governor, in plain steps (default: by device)")
    add("--noise", type=float, default=0.0, help="standard deviation of the logarithm of measured step times")
    add("--capture-ms", type=float, default=0.0, help="of each step's capture on first use (default: all are captured)")
    args = parser.parse_args(arguments)
    engine, console = Engine.from_pretrained(args.model, profile=args.profile), Console(width=110)
    device = profile_of(engine).device
    table = Table(title=f"Simulated with step times of {device.name if device else 'an unnamed device'}")
    ratios = ("best / plain", "governor / plain", "governor / best", "worst batch / plain")
    for heading in ("set", "batch", "best fixed plan", *ratios):
        table.add_column(heading, justify="left" if heading in ("set", "best fixed plan") else "right")
    recorded, results = read_texts(args.texts) if args.texts else {}, []
    for prompts in sets_of(Source(engine, args.prompts, args.limit, args.max_new_tokens), args.sets, console):
        texts = recorded[prompts.name] if prompts.name in recorded else record(engine, prompts)
        recorded[prompts.name] = texts
        if args.texts:
            write_texts(args.texts, recorded)
        timing_of = cache(partial(DomainTiming.of, engine, prompts.temperature, args.max_step))
        for size in args.batch if texts else ():
            found = compare(texts, size, timing_of, args.noise, args.capture_ms / 1e3)
            results.append({"set": prompts.name, **found})
            names = ("best_fixed_against_plain", "governor_against_plain", "governor_against_best_fixed")
            speeds = [f"{found[name]:.2f}x" for name in (*names, "worst_batch_against_plain")]
            table.add_row(prompts.name, str(size), found["best_fixed"], *speeds)
    console.print(table)
    print(json.dumps({"benchmark": "replay", "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
