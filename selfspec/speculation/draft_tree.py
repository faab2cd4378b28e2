"""A draft in progress: the tree of one cycle as tensors, level by level, and its shape on the device.

Only holds; who fills it, and what is accepted of it, is `runtime`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from selfspec.cache.layout import Rows
from selfspec.speculation.plan import Plan


@dataclass
class Draft:
    """The tree drafted in one cycle, for B rows."""

    plan: Plan
    tokens: torch.Tensor  # [B, n+1], the root's first
    hidden: torch.Tensor  # [B, n+1, hidden] after layer N-1
    rows: Rows | None = None  # where the newest level stands
    # For each level but the last, of its M nodes:
    reads: list[torch.Tensor] = field(default_factory=list)  # [B, M, hidden] what the exit's head read
    ranked: list[torch.Tensor] = field(default_factory=list)  # [B, M, width] the best draft tokens in order
    logits: list[torch.Tensor] = field(default_factory=list)  # [B, M, V], processed; for rejection only

    def at(self, node: int) -> tuple[int, int]:
        """A node's level and its place in it."""
        depth = self.plan.depths[node]
        return depth, node - self.plan.levels[depth].start


@dataclass(frozen=True)
class Shape:
    """Some nodes of a plan as tensors on the device."""

    depths: torch.Tensor  # [K] of every node up to the last of these
    ancestors: torch.Tensor  # [M, K] bool
    all: bool  # whether every node sees every other
    parents: torch.Tensor  # [M] the place of each node's parent among the nodes of the level before; the root has none
    ranks: torch.Tensor  # [M]

    @classmethod
    def of(cls, plan: Plan, nodes: range, device: torch.device) -> Shape:
        ancestors = plan.ancestors[nodes.start : nodes.stop, : nodes.stop]
        drafted = [node for node in nodes if node]
        above = plan.levels[plan.depths[drafted[0]] - 1].start if drafted and nodes.start else 0
        return cls(
            torch.tensor(plan.depths[: nodes.stop], device=device),
            ancestors.to(device),
            bool(ancestors.all()),
            torch.tensor([plan.parents[node - 1] - above for node in drafted], dtype=torch.int64, device=device),
            torch.tensor([plan.ranks[node - 1] for node in drafted], dtype=torch.int64, device=device),
        )
