"""Positions of everything that the report draws: the exit chart, the speed chart, and the trees. Units are pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, log10

from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.profiles.profile import DomainChoice, PlanChoice, Profile, Run
from selfspec.speculation.plan import Plan

SHADES = 5  # of a tree's nodes: ranks 0 to 3, and all others
LABEL = 15  # pixels between two labels


@dataclass(frozen=True)
class PlanRow:
    """The plan of one domain, temperature and batch."""

    domain: str
    temperature: str
    batch: str
    choice: PlanChoice
    plan: Plan
    measured: float | None  # speed-up
    first: bool  # row of its domain
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
            yield PlanRow(domain, temperature, batch, cell, plan, speedup_of(cell.measured), not number, len(cells))


def greedy_plan(choice: DomainChoice) -> PlanChoice | None:
    """The plan for one greedy sequence; None where the profile has none."""
    return choice.plans.get("0", {}).get("1")


def speedup_of(run: Run | None) -> float | None:
    """None where the plan was not measured."""
    return None if run is None else run.speedup


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float  # pixels
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def around(cls, values: list[float], start: float, end: float, steps: int = 6) -> Axis:
        """An axis from one round value to another that contains all values, with about `steps` steps between ticks."""
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
    temperature: int = 0  # index in TEMPERATURES
    batch: int = 0  # index in BATCHES
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
    right: float  # end of the plot; labels follow
    rates: Axis
    layers: list[tuple[int, float, bool]]  # layer, x, and whether its label fits
    lines: list[Line]


def exit_chart(profile: Profile, width: float = 520, height: float = 320) -> ExitChart | None:
    """Accept rate over exit layer, a line for each domain; None where the profile has no rates."""
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
    """The x of each layer, proportional to its number; a single one is in the middle."""
    if len(layers) == 1:
        return [(layers[0], (start + end) / 2, True)]
    places: list[tuple[int, float, bool]] = []
    named = start - 100.0
    for layer in layers:
        x = start + (layer - layers[0]) / (layers[-1] - layers[0]) * (end - start)
        fits = x - named >= 24
        named = x if fits else named
        places.append((layer, x, fits))
    return places


def spread(wanted: list[float], top: float, bottom: float) -> list[float]:
    """Heights close to the wanted ones, in the same order, at least a label apart where they fit."""
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
    """Measured over expected speed-up; None where no plan has both."""
    both = [(row, row.choice.expected, row.measured) for row in plan_rows(profile)]
    found = [
        (row, choice.speedup, measured) for row, choice, measured in both if choice is not None and measured is not None
    ]
    if not found:
        return None
    values = [1.0] + [value for _, expected, measured in found for value in (expected, measured)]
    across, up = Axis.around(values, 54, size - 24), Axis.around(values, size - 50, 16)
    marks = [
        Mark(
            across.at(expected),
            up.at(measured),
            f"{row.domain}, temperature {row.temperature}, batch {row.batch}: "
            f"expected {times(expected)}, measured {times(measured)}",
            temperature=list(TEMPERATURES).index(row.temperature),
            batch=list(BATCHES).index(row.batch),
            domain=row.domain,
        )
        for row, expected, measured in found
    ]
    return SpeedChart(size, across, up, marks)


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
    depths: list[tuple[int, float, int, bool]]  # depth, x, number of nodes, and whether its label fits


@dataclass(frozen=True)
class TreeCard:
    """A plan for one greedy sequence, and the domains that use it; no tree for the plan `none`."""

    plan: Plan
    tree: Tree | None
    members: list[tuple[str, DomainChoice, PlanChoice]]


def tree_cards(profile: Profile) -> list[TreeCard]:
    """The plans for one greedy sequence, each once."""
    cards: dict[Plan, TreeCard] = {}
    for name, choice in profile.domains.items():
        greedy = greedy_plan(choice)
        if greedy is not None:
            plan = Plan.parse(greedy.plan)
            card = cards.setdefault(plan, TreeCard(plan, draw_tree(plan) if len(plan) else None, []))
            card.members.append((name, choice, greedy))
    return sorted(cards.values(), key=lambda card: card.tree is None)


def draw_tree(plan: Plan, pitch: float = 9, top: float = 38) -> Tree:
    """The root at the left, a column for each depth; the first child is beside its parent, the others below."""
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


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"
