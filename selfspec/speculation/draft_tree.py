"""The draft tree of one step as tensors: tokens, hidden states and rankings of its nodes, and the plan's shape.

Holds tensors only: `TorchBackend` drafts, verifies and accepts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from selfspec.cache.layout import Rows
from selfspec.sampling import ranked
from selfspec.speculation.plan import NONE, Plan


@dataclass
class Draft:
    """The draft tree of one step for B sequences; n is the number of nodes of the plan."""

    plan: Plan
    tokens: torch.Tensor  # [B, n+1], the root's first
    hidden: torch.Tensor  # [B, n+1, hidden]: states after N layers
    rows: Rows | None = None  # layout of the newest level
    # One entry for each level but the last, M being the number of its nodes, without the copied ones:
    head_inputs: list[torch.Tensor] = field(default_factory=list)  # [B, M, hidden]: the exit's normed states
    ranked: list[torch.Tensor] = field(default_factory=list)  # [B, M, width]: draft token ids, best first
    logits: list[torch.Tensor] = field(default_factory=list)  # [B, M, V]: processed draft logits, for rejection only
    beam: BeamTree | None = None  # None: the plan fixes the parents
    log_probs: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # of `ranked[-1]`, for a beam only

    def tree(self, index: int) -> Plan:
        """The tree of one sequence, up to the newest level."""
        return self.plan if self.beam is None else self.plan.of_sequence(self.beam.parents[index].tolist())

    def at(self, node: int) -> tuple[int, int]:
        """Returns a node's depth and its index within the level of that depth."""
        depth = self.plan.depths[node]
        return depth, node - self.plan.levels[depth].start


class BeamTree:
    """The trees of B sequences whose plan has a beam, grown level by level: the nodes so far, n and the root."""

    def __init__(self, plan: Plan, sequences: int, device: torch.device) -> None:
        self.plan = plan
        first = NONE.with_copy(plan.copied)  # the root and copied nodes
        self.parents = torch.tensor(first.parents, dtype=torch.int64, device=device).expand(sequences, -1)  # [B, n]
        self.ancestors = first.ancestors.to(device).expand(sequences, -1, -1)  # [B, n + 1, n + 1] bool
        # [B, M]: along the paths to the newest level, without copied nodes.
        self.log_prob_sums = torch.zeros(sequences, 1, device=device)
        self.above = torch.zeros(sequences, 0, dtype=torch.int64, device=device)  # [B, M]: parents within their level

    def grow(self, log_probs: torch.Tensor, width: int, first_above: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the level of the `width` best candidates. `log_probs` [B, M, W] of the ranked draft tokens after the M
        nodes of the level above, whose first is `first_above`. Returns indices [B, width] of parents and ranks."""
        sequences, _, ranks = log_probs.shape
        totals = (self.log_prob_sums[..., None] + log_probs).nan_to_num(nan=-torch.inf).flatten(1)
        chosen = ranked(totals, width)
        self.log_prob_sums, self.above = totals.gather(1, chosen), chosen // ranks
        parents = self.above + first_above
        inherited = self.ancestors[torch.arange(sequences, device=parents.device)[:, None], parents]
        own = torch.eye(width, dtype=torch.bool, device=parents.device).expand(sequences, -1, -1)
        self.ancestors = torch.cat((F.pad(self.ancestors, (0, width)), torch.cat((inherited, own), dim=2)), dim=1)
        self.parents = torch.cat((self.parents, parents), dim=1)
        return self.above, chosen % ranks

    def shape(self, nodes: range) -> Shape:
        """These nodes as tensors; parents are indices within the level above, or of nodes if `nodes` are all."""
        depths = torch.tensor(self.plan.depths[: nodes.stop], device=self.parents.device)
        ancestors = self.ancestors[:, nodes.start : nodes.stop, : nodes.stop]
        parents = self.above if nodes.start else self.parents[:, : nodes.stop - 1]
        return Shape(depths, ancestors, False, parents)


@dataclass(frozen=True)
class Shape:
    """M contiguous nodes of a plan, as tensors on the device; K is one more than the last node. Ancestors and parents
    of a beam differ by sequence: [B, M, K] and [B, M]."""

    depths: torch.Tensor  # [K]: depths of nodes 0 to K - 1
    ancestors: torch.Tensor  # [M, K] bool
    all: bool  # ancestors.all(), read on the host
    parents: torch.Tensor  # [M] index of each node's parent within the level above; the root has no entry
    ranks: torch.Tensor | None = None  # [M]; the root has no entry

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
