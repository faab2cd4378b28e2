"""Writes what calibration found as one HTML page for the person who ran it.

Works out the sentences and where things lie in the drawings; `report.html.jinja` is the page around them. Takes a
profile as it is: measuring and choosing are done elsewhere, and a part that a profile lacks is left out or said to be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from math import ceil, floor, log10
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.profiles.profile import DomainChoice, PlanChoice, Profile, Run, Spread
from selfspec.speculation.plan import Plan

COLOURS = 8  # series colours of the page; more domains use them again
SHADES = 5  # shades of a tree's nodes: ranks 0 to 3, and all others
LABEL = 15  # pixels from one label to the next
OBJECTIVES = {"throughput": "the most tokens per second", "accept": "the highest accept rate"}


def write_report(profile: Profile, path: Path) -> None:
    """Writes the page; it needs nothing but itself to be read."""
    page = _page().render(
        profile=profile,
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
        folder=json.dumps(str(profile.folder), ensure_ascii=False) if profile.folder else None,
    )
    Path(path).write_text(page, encoding="utf-8")


@lru_cache(maxsize=1)
def _page() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"px": _px, "percent": _percent, "decimals": _decimals, "times": _times, "speedup": _speedup}
    return pages.get_template("report.html.jinja")


# Words and numbers


def verdict(profile: Profile) -> str:
    """What came out of it, in a sentence."""
    rows = list(plan_rows(profile))
    if all(row.choice.expected is None and row.measured is None for row in rows):
        return "These plans were set without measuring: how fast they are is not known yet."
    greedy = [choice for choice in map(_greedy, profile.domains.values()) if choice is not None]
    paying = sum(
        len(Plan.parse(choice.plan)) > 0 and (choice.expected is None or choice.expected.speedup > 1)
        for choice in greedy
    )
    domains = f"{len(greedy)} domain{'s' * (len(greedy) != 1)}"
    text = f"Speculation is expected to pay in {paying or 'none'} of {domains} for a single greedy request"
    runs = [(row.measured, row) for row in rows if row.measured is not None]
    if not runs:
        return f"{text}; it was not run against plain decoding."
    best, row = max(runs, key=lambda run: run[0])
    where = f"in {row.domain} (temperature {row.temperature}, batch {row.batch})"
    if best <= 1:
        return f"{text}; no measured run was faster than plain decoding, the best being {_times(best)} {where}."
    slower = sum(speedup < 1 for speedup, _ in runs)
    losses = f"{slower or 'none'} of the {len(runs)} measured plans {'was' if slower == 1 else 'were'} slower"
    return f"{text}; the best measured speed-up is {_times(best)} {where}, and {losses} than plain decoding."


def training(trained: dict[str, float]) -> str:
    """How much went into the profile; empty where that was not recorded."""
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


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


# What the profile says of its plans


@dataclass(frozen=True)
class PlanRow:
    """The plan of one domain, temperature and batch."""

    domain: str
    temperature: str
    batch: str
    choice: PlanChoice
    plan: Plan
    measured: float | None  # speed-up
    first: bool  # of its domain
    rows: int  # of its domain


def plan_rows(profile: Profile) -> Iterator[PlanRow]:
    """Every plan of the profile, in the order of domains, temperatures and batches."""
    for domain, choice in profile.domains.items():
        cells = [
            (temperature, batch, choice.plans[temperature][batch])
            for temperature in TEMPERATURES
            for batch in BATCHES
            if batch in choice.plans.get(temperature, {})
        ]
        for number, (temperature, batch, cell) in enumerate(cells):
            plan = Plan.parse(cell.plan)
            yield PlanRow(domain, temperature, batch, cell, plan, _speedup(cell.measured), not number, len(cells))


def _greedy(choice: DomainChoice) -> PlanChoice | None:
    """The plan for one greedy request."""
    return choice.plans.get("0", {}).get("1")


def _speedup(run: Run | None) -> float | None:
    return run.speedup if run is not None and run.plain_tokens_per_second > 0 else None


def _duels(profile: Profile) -> Iterator[tuple[str, list[Run | None], bool]]:
    """Where a chain was run: it and the tree that was chosen instead, and whether that was plain decoding."""
    for domain, choice in profile.domains.items():
        if choice.chain is not None:
            greedy = _greedy(choice)
            plain = greedy is not None and not len(Plan.parse(greedy.plan))
            yield domain, [choice.chain, greedy.measured if greedy else None], plain


def _agreements(profile: Profile) -> list[tuple[str, tuple[Spread | None, Spread | None]]]:
    """How the exits of the domains agreed with the model, on prompts and on what followed; only where recorded."""
    pairs = [(name, (choice.prompt_agreement, choice.text_agreement)) for name, choice in profile.domains.items()]
    return [(name, pair) for name, pair in pairs if any(pair)]


# Charts


@dataclass(frozen=True)
class Axis:
    """Where values lie in a drawing."""

    low: float
    high: float
    start: float  # pixels
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def around(cls, values: list[float], start: float, end: float, steps: int = 6) -> Axis:
        """An axis that holds the values and begins and ends at round ones, about so many steps apart."""
        low, high = min(values), max(values)
        rough = max(high - low, 0.1) / steps
        power = 10 ** floor(log10(rough))
        step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
        ticks = tuple(number * step for number in range(first, max(last, first + 1) + 1))
        return cls(ticks[0], ticks[-1], start, end, ticks)

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class Mark:
    """A point of a chart."""

    x: float
    y: float
    title: str
    chosen: bool = False
    most_accepting: bool = False
    temperature: int = 0  # which of the known ones
    batch: int = 0
    domain: str = ""


@dataclass(frozen=True)
class Line:
    domain: str
    label: str
    label_y: float
    marks: list[Mark]


@dataclass(frozen=True)
class ExitChart:
    width: float
    height: float
    right: float  # where the plot ends and the labels begin
    rates: Axis
    layers: list[tuple[int, float, bool]]  # each with its place, and whether there is room to name it
    lines: list[Line]


def exit_chart(profile: Profile, width: float = 520, height: float = 320) -> ExitChart | None:
    """Accept rate over exit layer, a line for each domain; None where no exit was tried."""
    tried = {name: dict(sorted(choice.exits.items())) for name, choice in profile.domains.items() if choice.exits}
    if not tried:
        return None
    labels = {name: name if len(name) <= 14 else f"{name[:13]}…" for name in tried}
    right = width - 26 - 8 * max(map(len, labels.values()))
    rates = Axis.around([r.accept_rate for exits in tried.values() for r in exits.values()], height - 46, 14)
    layers = _layer_places(sorted({layer for exits in tried.values() for layer in exits}), 62, right - 16)
    place = {layer: x for layer, x, _ in layers}
    marks: dict[str, list[Mark]] = {}
    for name, exits in tried.items():
        choice = profile.domains[name]
        marks[name] = [
            Mark(
                place[layer],
                rates.at(found.accept_rate),
                f"{name}, exit {layer}: {found.accept_rate:.1%} accepted",
                chosen=layer == choice.exit_layer,
                most_accepting=layer == choice.most_accepting_exit,
            )
            for layer, found in exits.items()
        ]
    label_ys = spread([marks[name][-1].y for name in tried], 14, height - 46)
    lines = [Line(name, labels[name], y, marks[name]) for name, y in zip(tried, label_ys, strict=True)]
    return ExitChart(width, height, right, rates, layers, lines)


def _layer_places(layers: list[int], start: float, end: float) -> list[tuple[int, float, bool]]:
    """Layers along the chart, in proportion; a single one lies in the middle."""
    if len(layers) == 1:
        return [(layers[0], (start + end) / 2, True)]
    places: list[tuple[int, float, bool]] = []
    named = start - 100.0
    for layer in layers:
        x = start + (layer - layers[0]) / (layers[-1] - layers[0]) * (end - start)
        room = x - named >= 24
        named = x if room else named
        places.append((layer, x, room))
    return places


def spread(wanted: list[float], top: float, bottom: float) -> list[float]:
    """Heights near the wanted ones, in the same order and far enough apart for a label each."""
    gap = min(LABEL, (bottom - top) / max(len(wanted) - 1, 1))
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    heights = sorted(wanted)
    for number, height in enumerate(heights):
        heights[number] = max(height, heights[number - 1] + gap if number else top)
    for number in reversed(range(len(heights))):
        below = heights[number + 1] - gap if number + 1 < len(heights) else bottom
        heights[number] = min(heights[number], below)
    found = dict(zip(order, heights, strict=True))
    return [found[number] for number in range(len(wanted))]


@dataclass(frozen=True)
class SpeedChart:
    size: float
    across: Axis
    up: Axis
    marks: list[Mark]


def speed_chart(profile: Profile, size: float = 480) -> SpeedChart | None:
    """Predicted against measured speed-up; None where no plan has both."""
    both = [(row, row.choice.expected, row.measured) for row in plan_rows(profile)]
    found = [(row, hoped.speedup, got) for row, hoped, got in both if hoped is not None and got is not None]
    if not found:
        return None
    values = [1.0] + [value for _, predicted, got in found for value in (predicted, got)]
    across, up = Axis.around(values, 54, size - 24), Axis.around(values, size - 50, 16)
    marks = [
        Mark(
            across.at(predicted),
            up.at(got),
            f"{row.domain}, temperature {row.temperature}, batch {row.batch}: "
            f"predicted {_times(predicted)}, measured {_times(got)}",
            temperature=list(TEMPERATURES).index(row.temperature),
            batch=list(BATCHES).index(row.batch),
            domain=row.domain,
        )
        for row, predicted, got in found
    ]
    return SpeedChart(size, across, up, marks)


# Trees


@dataclass(frozen=True)
class Node:
    x: float
    y: float
    parent_x: float
    parent_y: float
    rank: int
    shade: int


@dataclass(frozen=True)
class Tree:
    width: float
    height: float
    root_y: float
    step: float  # from one depth to the next
    nodes: list[Node]
    depths: list[tuple[int, float, int, bool]]  # depth, its place, its nodes, and whether there is room to name it


@dataclass(frozen=True)
class TreeCard:
    """A plan for one greedy request, and the domains that have it; no tree for plain decoding."""

    plan: Plan
    tree: Tree | None
    members: list[tuple[str, DomainChoice, PlanChoice]]


def tree_cards(profile: Profile) -> list[TreeCard]:
    """The plans for one greedy request, each once."""
    cards: dict[Plan, TreeCard] = {}
    for name, choice in profile.domains.items():
        greedy = _greedy(choice)
        if greedy is not None:
            plan = Plan.parse(greedy.plan)
            card = cards.setdefault(plan, TreeCard(plan, draw_tree(plan) if len(plan) else None, []))
            card.members.append((name, choice, greedy))
    return sorted(cards.values(), key=lambda card: card.tree is None)


def draw_tree(plan: Plan, pitch: float = 9, top: float = 38) -> Tree:
    """The root at the left, a column for each depth; a first child lies beside its parent, the others below it."""
    rows = [0] * (len(plan) + 1)
    last = 0

    def place(node: int) -> None:
        nonlocal last
        rows[node] = last
        for number, child in enumerate(plan.children[node]):
            last += number > 0
            place(child)

    place(0)
    step = min(70.0, max(14.0, 210 / plan.depth))
    ys = [top + row * pitch for row in rows]
    xs = [10 + depth * step for depth in plan.depths]
    nodes = [
        Node(xs[node], ys[node], xs[parent], ys[parent], rank, min(rank, SHADES - 1))
        for node, (parent, rank) in enumerate(zip(plan.parents, plan.ranks, strict=True), start=1)
    ]
    every = ceil(22 / step)
    levels = enumerate(plan.levels[1:], start=1)
    depths = [(depth, 10 + depth * step, len(level), (depth - 1) % every == 0) for depth, level in levels]
    return Tree(max(xs) + 34, max(ys) + 10, top, step, nodes, depths)
