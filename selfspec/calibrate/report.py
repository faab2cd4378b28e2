"""Writes a profile's measurements as one HTML page.

`report.html.jinja` is the page, `drawing` computes its charts. Parts that a profile lacks are left out or said to be
missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from selfspec.calibrate.drawing import exit_chart, greedy_plan, plan_rows, speed_chart, speedup_of, times, tree_cards
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.profiles.profile import Profile, Run, Spread
from selfspec.speculation.plan import Plan

COLOURS = 8  # of domains on the page; more domains repeat them
OBJECTIVES = {"throughput": "the most tokens per second", "accept": "the highest accept rate"}


def write_report(profile: Profile, path: Path, model: str, loading: str = "") -> None:
    """Writes the page of a profile that was made for `model`, a folder or name; `loading` as in Settings. The page
    loads no other file."""
    page = _page().render(
        profile=profile,
        model=model,
        date=_date(profile.created),
        objective=OBJECTIVES.get(profile.objective, ""),
        training=training(profile.trained),
        verdict=verdict(profile),
        exits=exit_chart(profile),
        trees=tree_cards(profile),
        speed=speed_chart(profile),
        plans=list(plan_rows(profile)),
        duels=list(_duels(profile)),
        agreements=_agreements(profile),
        temperatures=list(TEMPERATURES),
        batches=list(BATCHES),
        colours={name: number % COLOURS for number, name in enumerate(profile.domains)},
        model_argument=_quoted(model) + loading,
        folder_argument=_quoted(str(profile.folder)) if profile.folder else None,
    )
    Path(path).write_text(page, encoding="utf-8")


@lru_cache(maxsize=1)
def _page() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"px": _px, "percent": _percent, "decimals": _decimals, "times": times, "speedup": speedup_of}
    return pages.get_template("report.html.jinja")


def training(trained: dict[str, float]) -> str:
    """The amounts of the calibration; empty where the profile has none."""
    units = {"tokens": "tokens of text", "steps": "training steps"}
    parts = [f"{_count(trained[key])} {unit}" for key, unit in units.items() if key in trained]
    if "seconds" in trained:
        seconds = trained["seconds"]
        minutes = f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
        parts.append(f"{seconds:.0f} seconds" if seconds < 120 else minutes)
    if "router_accuracy" in trained:
        parts.append(f"{trained['router_accuracy']:.0%} of the measuring prompts routed to their own domain")
    return ", ".join(parts)


def _date(created: str) -> str:
    try:
        return f"{datetime.fromisoformat(created):%Y-%m-%d}"
    except ValueError:
        return created


def _count(value: float) -> str:
    return f"{value / 1e6:.1f} million" if value >= 1e6 else f"{value:,.0f}"


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}%}"


def _decimals(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _quoted(text: str) -> str:
    """A Python string literal."""
    return json.dumps(text, ensure_ascii=False)


def _duels(profile: Profile) -> Iterator[tuple[str, list[Run | None], bool]]:
    """For each domain with a measured chain: the domain, the measurements of chain and chosen plan, and whether the
    chosen plan is `none`."""
    for domain, choice in profile.domains.items():
        if choice.chain is not None:
            greedy = greedy_plan(choice)
            plain = greedy is not None and not len(Plan.parse(greedy.plan))
            yield domain, [choice.chain, greedy.measured if greedy else None], plain


def _agreements(profile: Profile) -> list[tuple[str, tuple[Spread | None, Spread | None]]]:
    """The agreement of each domain's exit with the model, on prompts and on answers, where the profile has it."""
    pairs = [(name, (choice.prompt_agreement, choice.text_agreement)) for name, choice in profile.domains.items()]
    return [(name, pair) for name, pair in pairs if any(pair)]


def verdict(profile: Profile) -> str:
    """The speed of one greedy sequence in each domain, relative to plain decoding; or that no plan is faster."""
    greedy = {name: choice.plans.get("0", {}).get("1") for name, choice in profile.domains.items()}
    drafting = {name: choice for name, choice in greedy.items() if choice is not None and len(Plan.parse(choice.plan))}
    known = {name: of.speedup for name, choice in drafting.items() if (of := choice.measured or choice.expected)}
    faster = {name: speedup for name, speedup in known.items() if speedup > 1}
    if faster:
        be = "is" if all(drafting[name].measured for name in faster) else "is expected to be"
        figures = ", ".join(f"{speedup:.2f}x as fast on {name}" for name, speedup in faster.items())
        plain = [name for name in profile.domains if name not in faster]
        rest = f"; no plan is faster on {', '.join(plain)}" if plain else ""
        return f"For one greedy sequence, drafting {be} faster than plain decoding: {figures}{rest}."
    runs = [(run.speedup, run.plan, name) for name in profile.domains for run in _runs(profile, name)]
    if not runs and not known:
        return "The plans of this profile were not measured: how fast they are is not known."
    where = f" on {profile.device.name}" if profile.device else ""
    if profile.drafts and not known:
        return f"For one greedy sequence, no plan is faster than plain decoding{where}; in other cases some are."
    tried = ""
    for speedup, plan, name in sorted(run for run in runs if run[0] <= 1)[-1:]:
        tried = f": the fastest that was tried, {_short(plan)} on {name}, is {speedup:.2f}x as fast"
    return f"No plan is faster than plain decoding{where}{tried}."


def _short(plan: str) -> str:
    """A plan as text; long trees by their size."""
    parsed = Plan.parse(plan)
    return plan if len(plan) <= 20 else f"a tree of {len(parsed)} nodes and depth {parsed.depth}"


def _runs(profile: Profile, name: str) -> list[Run]:
    """All measurements of a domain's plans."""
    choice = profile.domains[name]
    runs = [choice.chain, *(by_batch.measured for by_band in choice.plans.values() for by_batch in by_band.values())]
    return [run for run in runs if run is not None]
