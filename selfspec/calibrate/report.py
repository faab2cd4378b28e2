"""Writes a calibrated profile as one HTML page, made of `report.html.jinja`."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from selfspec.calibrate.drawing import tree_cards
from selfspec.calibrate.settings import OBJECTIVES
from selfspec.calibrate.trial import COMPARED_CHAIN
from selfspec.profiles.profile import Profile, Run
from selfspec.speculation.plan import Plan


def write_report(profile: Profile, path: Path, model: str, loading: str = "") -> None:
    """Writes the page of a profile that was calibrated for `model`, a folder or name; `loading`: that of
    `CalibrationSettings`. The page loads no other file."""
    speedups = [1.0, *(run.speedup for name in profile.domains for run in _runs(profile, name))]
    page = _page().render(
        profile=profile,
        model=model,
        objective=OBJECTIVES[profile.objective],
        training=training(profile.trained),
        verdict=verdict(profile),
        trees=tree_cards(profile),
        low=min(speedups),
        high=max(speedups),
        chain=COMPARED_CHAIN,
        model_argument=_quoted(model) + loading,
        folder_argument=_quoted(str(profile.folder)),
    )
    path.write_text(page, encoding="utf-8")


@lru_cache(maxsize=1)
def _page() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"px": _px, "percent": _percent, "decimals": _decimals, "times": _times}
    return pages.get_template("report.html.jinja")


def training(trained: dict[str, float]) -> str:
    """The amounts of the calibration."""
    units = {"tokens": "tokens of text", "steps": "training steps"}
    parts = [f"{trained[key]:,.0f} {unit}" for key, unit in units.items() if key in trained]
    parts.append(f"{trained['seconds'] / 60:.1f} minutes")
    parts.append(f"{trained['router_accuracy']:.0%} of the measuring prompts routed to their own domain")
    return ", ".join(parts)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _percent(value: float, digits: int = 0) -> str:
    return f"{value:.{digits}%}"


def _decimals(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}"


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _quoted(text: str) -> str:
    """A Python string literal."""
    return json.dumps(text, ensure_ascii=False)


def verdict(profile: Profile) -> str:
    """The measured speed of one greedy sequence in each domain, relative to plain decoding; or that no plan is
    faster."""
    greedy = {name: choice.plans["0"]["1"] for name, choice in profile.domains.items()}
    faster = {
        name: choice.measured.speedup for name, choice in greedy.items() if choice.measured and choice.plan != "none"
    }
    if faster:
        figures = ", ".join(f"{speedup:.2f}x as fast on {name}" for name, speedup in faster.items())
        plain = [name for name in profile.domains if name not in faster]
        rest = f"; no plan is faster on {', '.join(plain)}" if plain else ""
        return f"For one greedy sequence, drafting is faster than plain decoding: {figures}{rest}."
    where = f" on {profile.device.name}" if profile.device else ""
    if profile.drafts:
        return f"For one greedy sequence, no plan is faster than plain decoding{where}; in other cases some are."
    runs = [(run.speedup, run.plan, name) for name in profile.domains for run in _runs(profile, name)]
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
