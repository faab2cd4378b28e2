"""The draft tree of one step as tensors: tokens, hidden states and rankings of its nodes, and the plan's shape.

Holds tensors only: `TorchBackend` drafts, verifies and accepts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from selfspec.cache.layout import Rows
from selfspec.speculation.plan import Plan


@dataclass
class Draft:
    """The draft tree of one step for B sequences; n is the number of nodes of the plan."""

    plan: Plan
    tokens: torch.Tensor  # [B, n+1], the root's first
    hidden: torch.Tensor  # [B, n+1, hidden]: output of layer N-1
    rows: Rows | None = None  # layout of the newest level
    # One entry for each level but the last, M being the number of its nodes, without the copied ones:
    reads: list[torch.Tensor] = field(default_factory=list)  # [B, M, hidden]: normed states, the exit head's input
    ranked: list[torch.Tensor] = field(default_factory=list)  # [B, M, width]: draft token ids, best first
    logits: list[torch.Tensor] = field(default_factory=list)  # [B, M, V]: processed draft logits, for rejection only

    def at(self, node: int) -> tuple[int, int]:
        """Returns a node's depth and its index within the level of that depth."""
        depth = self.plan.depths[node]
        return depth, node - self.plan.levels[depth].start


@dataclass(frozen=True)
class Shape:
    """M contiguous nodes of a plan, as tensors on the device; K is one more than the last node."""

    depths: torch.Tensor  # [K]: depths of nodes 0 to K - 1
    ancestors: torch.Tensor  # [M, K] bool
    all: bool  # ancestors.all(), read on the host
    parents: torch.Tensor  # [M] index of each node's parent within the level above; the root has no entry
    ranks: torch.Tensor  # [M]; the root has no entry

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
