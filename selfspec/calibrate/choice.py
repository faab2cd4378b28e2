"""Chooses exit, head and plans from two measurements: the ranks of the model's tokens in drafts, and step costs.

A *rank path* belongs to one position of a text: the rank of the model's next token in the draft, then the rank of the
token after it one depth deeper, and so on. A node of a plan is the start of some rank paths; it is accepted as often as
rank paths start with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np

from selfspec.governor.costs import StepCost
from selfspec.governor.rules import BATCHES, DEFAULT_TREE
from selfspec.speculation.plan import MAX_NODES, Plan

MISSED = -1  # the rank of a token that has no row in the head
_WIDEST = 32  # ranks that plans may use
_DIGITS = 4  # of shares in the profile

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A plan and its expected figures."""

    plan: Plan
    tokens_per_cycle: float
    accept_rate: float
    speedup: float  # over plain decoding


@dataclass(frozen=True)
class Choice:
    """The exit and head of a domain, and a plan for every temperature and batch."""

    exit_layer: int
    head_rows: int
    plans: dict[str, dict[str, Candidate]]  # temperature -> batch -> plan


class Paths:
    """The rank paths of one exit in one domain at one temperature."""

    def __init__(self, ranks: np.ndarray) -> None:  # [W, D] ints
        self.total = max(1, len(ranks))
        self.depth = ranks.shape[1]
        self.begin: Counter[Ranks] = Counter()  # how many paths start with these ranks
        for depth in range(1, self.depth + 1):
            reached = ranks[((ranks[:, :depth] != MISSED) & (ranks[:, :depth] < _WIDEST)).all(1), :depth]
            values, counts = np.unique(reached, axis=0, return_counts=True)
            self.begin.update({tuple(map(int, v)): int(c) for v, c in zip(values, counts, strict=True)})

    def shares(self) -> list[list[float]]:
        """[depth][rank]: the share of the positions reached at a depth where the next token has that rank. Leaves out
        depths that are never reached, and ranks after the last that occurs. Rounded down, so that no sum exceeds 1."""
        counts = np.zeros((self.depth, _WIDEST), dtype=int)
        for path, count in self.begin.items():
            counts[len(path) - 1, path[-1]] += count
        reached = [self.total, *counts.sum(1)[:-1].tolist()]
        unit = 10**_DIGITS
        shares = [unit * own // places / unit for own, places in zip(counts, reached, strict=True) if places]
        return [np.trim_zeros(of_depth, "b").tolist() for of_depth in shares]

    def most_reached(self, depth: int, chain: bool = False) -> list[Ranks]:
        """Possible nodes, those accepted most often first. A node is accepted at most as often as its parent, so the
        first n nodes are a tree, and no other tree of n nodes is accepted as often."""
        nodes = [path for path in self.begin if len(path) <= depth and not (chain and any(path))]
        return sorted(nodes, key=lambda path: (-self.begin[path], len(path), path))[:MAX_NODES]

    def tokens_per_cycle(self, plan: Plan) -> float:
        return 1 + sum(self.begin[path] for path in rank_paths(plan)[1:]) / self.total

    def accept_rate(self, plan: Plan) -> float:
        """The share of reached depths that hold the model's token."""
        paths = rank_paths(plan)
        accepted = sum(self.begin[path] for path in paths[1:])
        inner = [path for path, children in zip(paths, plan.children, strict=True) if children]
        asked = sum(self.begin[path] if path else self.total for path in inner)
        return accepted / asked if asked else 0.0

    def best(self, cost: StepCost, head_rows: int | None = None, chain: bool = False) -> Candidate:
        """The plan with the most expected tokens per second; `none` where no plan is faster than plain decoding."""
        best, speedup = (0, 0), 1.0
        for depth in range(1, self.depth + 1):
            expected = 1.0
            for nodes, path in enumerate(self.most_reached(depth, chain), start=1):
                expected += self.begin[path] / self.total
                if expected * cost.plain / cost.seconds(depth, nodes, head_rows) > speedup:
                    best, speedup = (depth, nodes), expected * cost.plain / cost.seconds(depth, nodes, head_rows)
        plan = Plan.from_paths(self.most_reached(best[0], chain)[: best[1]])
        return Candidate(plan, self.tokens_per_cycle(plan), self.accept_rate(plan), speedup)


def rank_paths(plan: Plan) -> list[Ranks]:
    """The ranks from the root to every node; the root's path is empty and comes first."""
    paths: list[Ranks] = [()]
    for parent, rank in zip(plan.parents, plan.ranks, strict=True):
        paths.append((*paths[parent], rank))
    return paths


Measured = dict[tuple[int, int, str], Paths]  # (exit layer, head rows, temperature) -> rank paths of one domain


def candidates(
    measured: Measured, costs: dict[tuple[int, int], StepCost]
) -> dict[tuple[int, int], dict[str, dict[str, Candidate]]]:
    """The best plan at each temperature and batch, by exit layer and head rows; `costs` by exit layer and batch."""
    found: dict[tuple[int, int], dict[str, dict[str, Candidate]]] = {}
    for (layer, head_rows, temperature), paths in measured.items():
        plans = found.setdefault((layer, head_rows), {}).setdefault(temperature, {})
        for band, batch in BATCHES.items():
            plans[band] = paths.best(costs[layer, batch], head_rows, chain=batch > 4)
    return found


def choose(measured: Measured, costs: dict[tuple[int, int], StepCost], objective: str = "throughput") -> Choice:
    """The exit and head with the highest expected speed of one sequence, as the geometric mean over temperatures. With
    the objective 'accept': the exit with the highest accept rate in DEFAULT_TREE that is faster than plain decoding."""
    found = candidates(measured, costs)

    def speed(key: tuple[int, int]) -> float:
        speedups = [of_batch["1"].speedup for of_batch in found[key].values()]
        return prod(speedups) ** (1 / len(speedups))

    def merit(key: tuple[int, int]) -> tuple[float, ...]:
        greedy = next(iter(found[key]))
        accepts = measured[*key, greedy].accept_rate(DEFAULT_TREE)
        if objective != "accept":
            return (speed(key), accepts)  # forced requests use the exit even where no plan is faster
        pays = len(found[key][greedy]["1"].plan) > 0
        return (float(pays), accepts, speed(key))

    best = max(sorted(found), key=merit)
    return Choice(*best, found[best])
