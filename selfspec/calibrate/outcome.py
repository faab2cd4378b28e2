"""The outcome of a calibration: the profile made from its measurements, tried out, saved, and shown as tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from selfspec.calibrate.choice import Candidate, Choice, Measured, Paths, candidates, choose
from selfspec.calibrate.display import Display
from selfspec.calibrate.measuring import Measurement
from selfspec.calibrate.prompts import Domain, Prompt
from selfspec.calibrate.report import write_report
from selfspec.calibrate.settings import TRYING_SHARE, Settings
from selfspec.calibrate.trial import SETTINGS, Trials, trial_length
from selfspec.engine import Engine
from selfspec.governor.costs import StepCost
from selfspec.governor.rules import BATCHES, DEFAULT_TREE
from selfspec.models.decoder import Decoder
from selfspec.profiles.profile import (
    CycleCost,
    Device,
    DomainChoice,
    ExitRates,
    Expected,
    ModelIdentity,
    PlanChoice,
    Profile,
    Run,
    Spread,
)
from selfspec.profiles.router import Router, distances, marks_of
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan

COMPARED_CHAIN = "chain:4"
_GREEDY, _ONE = "0", "1"  # names of a temperature and a batch


class TrainedRun(Protocol):
    """What this module reads of a calibration whose exits are trained."""

    settings: Settings
    display: Display
    engine: Engine
    model: Decoder
    identity: ModelIdentity
    vocabulary: int  # tokens
    domains: list[Domain]
    exits: list[Exit]
    trained: dict[str, float]
    out: Path

    @property
    def router_layer(self) -> int: ...

    def head_rows(self, domain: int, size: int) -> torch.Tensor | None: ...

    def fitting(self, name: str, prompts: Sequence[Prompt]) -> list[list[int]]: ...

    def measuring_prompts(self, domain: Domain) -> list[list[int]]: ...


def build(
    run: TrainedRun,
    measured: dict[tuple[str, str], list[Measurement]],
    paths: dict[str, Measured],
    costs: dict[tuple[int, int], StepCost],
    choices: dict[str, Choice],
    sizes: list[int],
) -> Profile:
    """The profile that the measurements speak for; nothing of it has been run yet."""
    router = Router.fit([_marks(run, domain, domain.training) for domain in run.domains])
    kept_aside = [_marks(run, domain, domain.measuring) for domain in run.domains]
    domains = {}
    for index, domain in enumerate(run.domains):
        choice = choices[domain.name]
        place = [exit.layer for exit in run.exits].index(choice.exit_layer)
        greedy = measured[domain.name, _GREEDY][place]
        accepting = choose(paths[domain.name], costs, "accept").exit_layer
        head_rows = run.head_rows(index, choice.head_rows)
        domains[domain.name] = DomainChoice(
            exit_layer=choice.exit_layer,
            plans={
                temperature: {band: _plan_choice(candidate) for band, candidate in of_batch.items()}
                for temperature, of_batch in choice.plans.items()
            },
            head_rows=0 if head_rows is None else len(head_rows),
            head_coverage=_rounded((greedy.paths(head_rows)[:, 0] >= 0).mean()) if len(greedy.ranks) else 0.0,
            exits=_exit_rates(run, measured[domain.name, _GREEDY], paths[domain.name], costs, sizes[0]),
            most_accepting_exit=accepting,
            ranks=_ranks(paths[domain.name], choice),
            costs={band: _cycle_cost(costs[choice.exit_layer, batch]) for band, batch in BATCHES.items()},
            prompt_agreement=_spread(greedy.prompt_agreement),
            text_agreement=_spread(greedy.text_agreement),
            centroid=_rounded_all(router.centroids[index]),
            distance=_spread(distances(kept_aside[index], router.centroids[index, None])[:, 0].tolist()),
            direction=_rounded_all(router.directions[index]),
            offset=_rounded(router.offsets[index].item()),
        )
    trained = run.trained | {"seconds": round(run.display.elapsed, 1), "router_accuracy": _accuracy(router, kept_aside)}
    return Profile(
        model=run.identity,
        domains=domains,
        device=_device(run.engine),
        created=date.today().isoformat(),
        objective=run.settings.objective,
        trained=trained,
        router_layer=run.router_layer,
    )


def try_out(run: TrainedRun, profile: Profile, plain_step: float) -> Profile:
    """Runs the chosen plans against plain decoding, saves the profile with what came of it, and writes the report."""
    profile = _save(run, profile)
    length = trial_length(TRYING_SHARE * run.settings.minutes * 60 / len(run.domains), plain_step)
    engine = Engine(run.model, run.engine.tokenizer, run.engine.generation_config, profile)
    with run.display.stage("try", len(run.domains) * (len(SETTINGS) + 1), timed=True) as stage:
        domains = {}
        for domain in run.domains:
            choice, prompts = profile.domains[domain.name], run.measuring_prompts(domain)
            plans = {temperature: dict(of_batch) for temperature, of_batch in choice.plans.items()}
            trials = Trials(engine, domain.name, choice.exit_layer, prompts, length)
            for setting in SETTINGS:
                planned = plans[setting.temperature][setting.batch]
                plans[setting.temperature][setting.batch] = _after(planned, trials.run(planned.plan, setting))
                stage.advance(1, domain.name)
            chain = trials.run(COMPARED_CHAIN, SETTINGS[0])
            stage.advance(1)
            domains[domain.name] = choice.model_copy(update={"plans": plans, "chain": chain})
        stage.note = f"chosen plans run against plain decoding, answers of {length} tokens"
    trained = profile.trained | {"seconds": round(run.display.elapsed, 1)}
    profile = _save(run, profile.model_copy(update={"domains": domains, "trained": trained}))
    write_report(profile, run.out / "report.html")
    return profile


def _after(planned: PlanChoice, measured: Run | None) -> PlanChoice:
    """A plan that lost when it was run is not used; what was measured is kept."""
    plan = "none" if measured is not None and measured.speedup < 1 else planned.plan
    return planned.model_copy(update={"plan": plan, "measured": measured})


def _save(run: TrainedRun, profile: Profile) -> Profile:
    """With every exit, chosen or not, since a request may ask for one, and every domain's head."""
    rows = {
        domain.name: run.head_rows(index, profile.domains[domain.name].head_rows or run.vocabulary)
        for index, domain in enumerate(run.domains)
    }
    return profile.save(run.out, run.exits, {name: own for name, own in rows.items() if own is not None})


def _plan_choice(candidate: Candidate) -> PlanChoice:
    expected = Expected(
        tokens_per_cycle=_rounded(candidate.tokens_per_cycle),
        accept_rate=_rounded(candidate.accept_rate),
        speedup=_rounded(candidate.speedup),
    )
    return PlanChoice(plan=str(candidate.plan), expected=expected)


def _ranks(paths: Measured, choice: Choice) -> dict[str, list[list[float]]]:
    """Of the chosen exit and head, by temperature."""
    return {name: paths[choice.exit_layer, choice.head_rows, name].shares() for name in choice.plans}


def _cycle_cost(cost: StepCost) -> CycleCost:
    return CycleCost(
        plain=_rounded(cost.plain),
        depth=_rounded(cost.depth),
        drafting=[(nodes, _rounded(seconds)) for nodes, seconds in cost.drafting],
        head_row=_rounded(cost.head_row),
        head_rows=cost.head_rows,
    )


def _exit_rates(
    run: TrainedRun,
    measured: list[Measurement],
    paths: Measured,
    costs: dict[tuple[int, int], StepCost],
    head_size: int,
) -> dict[int, ExitRates]:
    rates = {}
    found = candidates(paths, costs)
    for exit, measurement in zip(run.exits, measured, strict=True):
        own: Paths = paths[exit.layer, head_size, _GREEDY]
        best = found[exit.layer, head_size][_GREEDY][_ONE]
        first = measurement.ranks[:, 0] if len(measurement.ranks) else np.full(1, -1)
        rates[exit.layer] = ExitRates(
            top1=_rounded((first == 0).mean()),
            top4=_rounded(((first >= 0) & (first < 4)).mean()),
            accept_rate=_rounded(own.accept_rate(DEFAULT_TREE)),
            tokens_per_cycle=_rounded(best.tokens_per_cycle),
            speedup=_rounded(best.speedup),
        )
    return rates


def _marks(run: TrainedRun, domain: Domain, prompts: Sequence[Prompt]) -> torch.Tensor:
    tokens = run.fitting(domain.name, prompts)
    return marks_of(run.model, run.engine.cache, tokens, run.router_layer)


def _accuracy(router: Router, marks: list[torch.Tensor]) -> float:
    """The share of prompts that are routed to their own domain, given the marks of each domain's."""
    right = sum(int((router.scores(own).argmax(-1) == index).sum()) for index, own in enumerate(marks))
    return _rounded(right / sum(map(len, marks)))


def _spread(values: list[float]) -> Spread | None:
    return Spread(mean=_rounded(float(np.mean(values))), deviation=_rounded(float(np.std(values)))) if values else None


def _rounded_all(values: torch.Tensor) -> list[float]:
    return [_rounded(value) for value in values.tolist()]


def _rounded(value: float) -> float:
    return float(f"{float(value):.5g}")


def _device(engine: Engine) -> Device:
    model = engine.model
    return Device(
        type=model.device.type,
        name=device_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        torch=torch.__version__,
        kernels=engine.has_kernels,
    )


def device_name(model: Decoder) -> str:
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "the CPU"


def show(profile: Profile, console: Console, model: str) -> None:
    """The tables a person can act on, and the line of Python that uses the profile."""
    for title, table in (_rates_table(profile), _choice_table(profile), _compared_table(profile)):
        console.print(f"\n{title}", soft_wrap=True, highlight=False)
        console.print(table)
    assert profile.folder is not None
    console.print(
        f"profile and report.html are in {profile.folder}\n"
        f'use it:  Engine.from_pretrained("{model}", profile="{profile.folder}")',
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _rates_table(profile: Profile) -> tuple[str, Table]:
    layers = sorted({layer for choice in profile.domains.values() for layer in choice.exits})
    title = f"Accept rate of {DEFAULT_TREE} by exit layer (* chosen for {profile.objective}, + accepts most)"
    table = Table()
    table.add_column("domain")
    for layer in layers:
        table.add_column(f"layer {layer}", justify="right")
    for name, choice in profile.domains.items():
        cells = []
        for layer in layers:
            marks = "*" * (layer == choice.exit_layer) + "+" * (layer == choice.most_accepting_exit)
            cells.append(f"{choice.exits[layer].accept_rate:.1%} {marks:<2}" if layer in choice.exits else "")
        table.add_row(escape(name), *cells)
    return title, table


def _choice_table(profile: Profile) -> tuple[str, Table]:
    table = Table()
    table.add_column("domain")
    for heading in ("exit", "head", "plan", "top-1", "top-4", "tokens/cycle", "predicted", "measured", "tokens/s"):
        table.add_column(heading, justify="right")
    for name, choice in profile.domains.items():
        planned = choice.plans[_GREEDY][_ONE]
        run, rates = planned.measured, choice.exits[choice.exit_layer]
        plan = Plan.parse(run.plan if run else planned.plan)
        shape = f"{len(plan)} nodes, depth {plan.depth}" if len(plan) else "none"
        shape += " (lost)" if run and planned.plan == "none" else ""
        table.add_row(
            escape(name),
            str(choice.exit_layer),
            str(choice.head_rows or "all"),
            shape,
            f"{rates.top1:.2f}",
            f"{rates.top4:.2f}",
            f"{run.tokens_per_cycle:.2f}" if run else "",
            f"{planned.expected.speedup:.2f}x" if planned.expected else "",
            f"{run.speedup:.2f}x" if run else "",
            f"{run.plain_tokens_per_second:.0f} -> {run.tokens_per_second:.0f}" if run else "",
        )
    return "Chosen, for one row, greedy", table


def _compared_table(profile: Profile) -> tuple[str, Table]:
    table = Table()
    for heading in ("domain", "accept rate", "tokens/cycle", "speed-up"):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for name, choice in profile.domains.items():
        pair = (choice.chain, choice.plans[_GREEDY][_ONE].measured)
        cells = [
            tuple(f"{value:{form}}" for value, form in zip(_figures(run), (".1%", ".2f", ".2f"), strict=True))
            if run
            else ("-",) * 3
            for run in pair
        ]
        table.add_row(escape(name), *(f"{chain} | {tree}" for chain, tree in zip(*cells, strict=True)))
    return f"{COMPARED_CHAIN} | the chosen plan, greedy", table


def _figures(run: Run) -> tuple[float, float, float]:
    return run.accept_rate, run.tokens_per_cycle, run.speedup
