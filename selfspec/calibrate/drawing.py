"""Draws plans as trees. Units are pixels."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.profiles.profile import DomainChoice, PlanChoice, Profile
from selfspec.speculation.plan import Plan

_SHADES = 5  # of a tree's nodes: ranks 0 to 3, and all others
_TOP, _ROW = 38.0, 9.0  # the first row of nodes, and the distance of two


@dataclass(frozen=True)
class Node:
    x: float
    y: float
    parent_x: float
    parent_y: float
    rank: int
    shade: int


@dataclass(frozen=True)
class TreeDrawing:
    width: float
    height: float
    root_y: float
    step: float  # from one depth to the next
    nodes: list[Node]


@dataclass(frozen=True)
class TreeCard:
    """A plan for one greedy sequence, and the domains that use it; no tree for the plan `none`."""

    plan: Plan
    tree: TreeDrawing | None
    members: list[tuple[str, DomainChoice, PlanChoice]]


def tree_cards(profile: Profile) -> list[TreeCard]:
    """The plans for one greedy sequence, each once."""
    cards: dict[Plan, TreeCard] = {}
    for name, choice in profile.domains.items():
        greedy = choice.plans["0"]["1"]
        plan = Plan.parse(greedy.plan)
        card = cards.setdefault(plan, TreeCard(plan, draw_tree(plan) if len(plan) else None, []))
        card.members.append((name, choice, greedy))
    return sorted(cards.values(), key=lambda card: card.tree is None)


def draw_tree(plan: Plan) -> TreeDrawing:
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
    ys = [_TOP + row * _ROW for row in rows]
    xs = [10 + depth * step for depth in plan.depths]
    nodes = [
        Node(xs[node], ys[node], xs[parent], ys[parent], rank, min(rank, _SHADES - 1))
        for node, (parent, rank) in enumerate(zip(plan.parents, plan.ranks, strict=True), start=1)
    ]
    return TreeDrawing(max(xs) + 34, max(ys) + 10, _TOP, step, nodes)
