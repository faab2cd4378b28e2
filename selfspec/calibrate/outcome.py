"""Makes the profile from a calibration's measurements, tries its plans, and saves it with its report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import numpy as np
import torch

from selfspec.calibrate import heads
from selfspec.calibrate.choice import Candidate, Choice, Measured, Paths, candidates, choose
from selfspec.calibrate.display import CalibrationDisplay
from selfspec.calibrate.heads import Trained
from selfspec.calibrate.measuring import Measurement
from selfspec.calibrate.prompts import Domain, Prompt
from selfspec.calibrate.report import write_report
from selfspec.calibrate.settings import TRYING_SHARE
from selfspec.calibrate.setup import Setup
from selfspec.calibrate.trial import COMPARED_CHAIN, SETTINGS, Trials, rounded, trial_length
from selfspec.engine import Engine
from selfspec.governor.costs import StepCost
from selfspec.governor.rules import BATCHES, DEFAULT_TREE
from selfspec.models.decoder import Decoder
from selfspec.profiles.profile import Device, DomainChoice, ExitRates, Expected, PlanChoice, Profile, Run, Spread
from selfspec.profiles.router import Router, distances, normalised, prompt_embeddings

_GREEDY, _ONE = "0", "1"  # names of a temperature and a batch


def build(
    setup: Setup,
    trained: Trained,
    measured: dict[tuple[str, str], list[Measurement]],  # by domain and temperature, one for each exit
    paths: dict[str, Measured],
    costs: dict[tuple[int, int], StepCost],  # by exit layer and batch size
    choices: dict[str, Choice],
    seconds: float,
) -> Profile:
    """The profile before its plans are tried; the calibration has taken `seconds` so far."""
    router = Router.fit([_embeddings(setup, domain, domain.training) for domain in setup.domains])
    measuring = [_embeddings(setup, domain, domain.measuring) for domain in setup.domains]
    domains = {}
    for index, domain in enumerate(setup.domains):
        choice = choices[domain.name]
        chosen = choice.exit_layer, choice.head_rows
        place = [exit.layer for exit in trained.exits].index(choice.exit_layer)
        greedy = measured[domain.name, _GREEDY][place]
        accepting = choose(paths[domain.name], costs, "accept").exit_layer
        head_rows = trained.head_rows(index, choice.head_rows)
        domains[domain.name] = DomainChoice(
            exit_layer=choice.exit_layer,
            plans={
                temperature: {band: _plan_choice(candidate) for band, candidate in of_batch.items()}
                for temperature, of_batch in choice.plans.items()
            },
            head_rows=0 if head_rows is None else len(head_rows),
            head_coverage=rounded((greedy.paths(head_rows)[:, 0] >= 0).mean()) if len(greedy.ranks) else 0.0,
            exits=_exit_rates(setup, trained, measured[domain.name, _GREEDY], paths[domain.name], costs),
            most_accepting_exit=accepting,
            ranks={name: paths[domain.name][*chosen, name].shares() for name in choice.plans},
            costs={band: costs[choice.exit_layer, batch] for band, batch in BATCHES.items()},
            prompt_agreement=_spread(greedy.prompt_agreement),
            text_agreement=_spread(greedy.text_agreement),
            centroid=_rounded_all(router.centroids[index]),
            distance=_spread(distances(measuring[index], normalised(router.centroids[index, None]))[:, 0].tolist()),
            direction=_rounded_all(router.directions[index]),
            offset=rounded(router.offsets[index].item()),
        )
    return Profile(
        model=setup.identity,
        domains=domains,
        device=_device(setup.engine),
        created=date.today().isoformat(),
        objective=setup.settings.objective,
        trained=trained.amounts | {"seconds": round(seconds, 1), "router_accuracy": _accuracy(router, measuring)},
        router_layer=setup.router_layer,
    )


def try_out(
    setup: Setup, trained: Trained, profile: Profile, display: CalibrationDisplay, plain_step: float
) -> Profile:
    """Measures the chosen plans against plain decoding, whose steps take `plain_step` seconds; saves the profile with
    these measurements, and writes the report."""
    settings = setup.settings
    profile = _save(setup, trained, profile)
    length = trial_length(TRYING_SHARE * settings.minutes * 60 / len(setup.domains), plain_step)
    parts = setup.model, setup.engine.tokenizer, setup.engine.generation_config, profile
    engine = Engine(*parts, prefix_reuse=False)  # plain and drafting calls of a prompt take turns
    with display.stage("try", len(setup.domains) * (len(SETTINGS) + 1), timed=True) as stage:
        domains = {}
        for domain in setup.domains:
            choice, prompts = profile.domains[domain.name], setup.measuring_prompts(domain)
            plans = {temperature: dict(of_batch) for temperature, of_batch in choice.plans.items()}
            trials = Trials(engine, domain.name, choice.exit_layer, prompts, length)
            for setting in SETTINGS:
                planned = plans[setting.temperature][setting.batch]
                plans[setting.temperature][setting.batch] = _after(planned, trials.run(planned.plan, setting))
                stage.advance(1, domain.name)
            chain = trials.run(COMPARED_CHAIN, SETTINGS[0])
            stage.advance(1)
            domains[domain.name] = choice.model_copy(update={"plans": plans, "chain": chain})
        stage.note = f"the chosen plans and plain decoding, answers of {length} tokens"
    amounts = profile.trained | {"seconds": round(display.elapsed, 1)}
    profile = _save(setup, trained, profile.model_copy(update={"domains": domains, "trained": amounts}))
    write_report(profile, setup.out / "report.html", settings.model, settings.loading)
    return profile


def _after(planned: PlanChoice, measured: Run | None) -> PlanChoice:
    """Replaces a plan that was slower than plain decoding by `none`, and keeps the measurement."""
    plan = "none" if measured is not None and measured.speedup < 1 else planned.plan
    return planned.model_copy(update={"plan": plan, "measured": measured})


def _save(setup: Setup, trained: Trained, profile: Profile) -> Profile:
    """Saves the profile with the head rows of every domain and with all exits, since requests may name any of them.
    Without training: with all exits of the earlier profile, in the dtype in which they are stored."""
    rows = {
        domain.name: trained.head_rows(index, profile.domains[domain.name].head_rows or setup.vocabulary)
        for index, domain in enumerate(setup.domains)
    }
    exits = trained.exits if setup.stored_exits is None else setup.stored_exits
    return profile.save(setup.out, exits, {name: own for name, own in rows.items() if own is not None})


def _plan_choice(candidate: Candidate) -> PlanChoice:
    expected = {name: rounded(getattr(candidate, name)) for name in Expected.model_fields}
    return PlanChoice(plan=str(candidate.plan), expected=Expected(**expected))


def _exit_rates(
    setup: Setup, trained: Trained, measured: list[Measurement], paths: Measured, costs: dict[tuple[int, int], StepCost]
) -> dict[int, ExitRates]:
    """Greedy figures of every exit with the largest head, by layer."""
    rates = {}
    found, head_size = candidates(paths, costs), heads.largest_head(setup.vocabulary)
    for exit, measurement in zip(trained.exits, measured, strict=True):
        own: Paths = paths[exit.layer, head_size, _GREEDY]
        best = found[exit.layer, head_size][_GREEDY][_ONE]
        first = measurement.ranks[:, 0] if len(measurement.ranks) else np.full(1, -1)
        rates[exit.layer] = ExitRates(
            top1=rounded((first == 0).mean()),
            top4=rounded(((first >= 0) & (first < 4)).mean()),
            accept_rate=rounded(own.accept_rate(DEFAULT_TREE)),
            tokens_per_cycle=rounded(best.tokens_per_cycle),
            speedup=rounded(best.speedup),
        )
    return rates


def _embeddings(setup: Setup, domain: Domain, prompts: Sequence[Prompt]) -> torch.Tensor:
    """Embeddings [P, hidden] of a domain's prompts, for the router."""
    tokens = setup.fitting(domain.name, prompts)
    return prompt_embeddings(setup.model, setup.engine.cache, tokens, setup.router_layer)


def _accuracy(router: Router, embeddings: list[torch.Tensor]) -> float:
    """The share of prompts that the router sends to their own domain, given the embeddings of each domain's."""
    right = sum(int((router.scores(own).argmax(-1) == index).sum()) for index, own in enumerate(embeddings))
    return rounded(right / sum(map(len, embeddings)))


def _spread(values: list[float]) -> Spread | None:
    return Spread(mean=rounded(float(np.mean(values))), deviation=rounded(float(np.std(values)))) if values else None


def _rounded_all(values: torch.Tensor) -> list[float]:
    return [rounded(value) for value in values.tolist()]


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
