"""Plan: the shape of the draft tree of one step, as plain data.

Node 0 is the root (the newest committed token), nodes 1..n are drafted. The first `copied` of them are a chain below
the root, whose tokens are copied from the sequence's own text. The others are the exit's, ordered by depth; each has a
parent and a rank: the node with rank r is the parent's draft token of rank r, rank 0 being the best. In a beam only the
number of the exit's nodes at each depth is fixed: of all children of the depth above, those with the highest sums of
log probabilities along their path are taken, so that each sequence has its own tree. A plan holds no tokens, no tensors
of a model and no cache slots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from operator import index

import torch

from selfspec.kernels.constants import MAX_NODES

DEEPEST_PLAN = 5  # largest depth of the plans that calibration measures and the governor chooses from
MAX_STEP_ROWS = 1024  # rows of one verify pass, all sequences together: bounds its buffers
# Cache positions past a sequence's longest length: a step needs slots for its nodes and root, for the path that it
# accepts and for the path of the step in flight before it, each at most MAX_NODES + 1.
SPARE_POSITIONS = 3 * (MAX_NODES + 1)

_FORMS = (
    "'none', 'chain:4', 'tree:4,2,2,1', 'beam:6,6,6' (the likeliest 6 nodes of each depth), or 'nodes:0.0,0.1,1.0' "
    "(parent.rank for each node, the root being 0); 'copy:8' copies 8 tokens of the text, alone or after '+' as in "
    "'tree:4,2+copy:8'"
)


@dataclass(frozen=True)
class Plan:
    """The nodes to draft. `parents[i]` and `ranks[i]` belong to node i + 1; the rank of a copied node is 0. A plan with
    a beam has them for copied nodes only. The plan without nodes decodes plainly."""

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    copied: int = 0
    beam: tuple[int, ...] = ()  # number of the exit's nodes at each depth; empty: they have parents and ranks

    def __post_init__(self) -> None:
        if self.beam and (len(self.parents) != self.copied or min(self.beam) < 1):
            raise ValueError(f"a beam needs at least one node at every depth, got {self.beam}; write {_FORMS}")
        if len(self.parents) != len(self.ranks):
            raise ValueError(
                f"a plan needs one rank per node, got {len(self.parents)} parents and {len(self.ranks)} ranks"
            )
        if len(self) > MAX_NODES:
            raise ValueError(f"a plan of {len(self)} nodes is too large; at most {MAX_NODES} can be drafted")
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True), start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} of the plan has parent {parent}; a parent must come before its child")
            if rank < 0:
                raise ValueError(f"node {node} of the plan has rank {rank}; ranks start at 0")
        if self.parents[: self.copied] != tuple(range(self.copied)) or any(self.ranks[: self.copied]):
            raise ValueError(f"the first {self.copied} nodes of the plan are copied: they must be a chain of rank 0")
        parents, ranks = self.parents[self.copied :], self.ranks[self.copied :]
        if any(0 < parent <= self.copied for parent in parents):
            raise ValueError("the plan gives a copied node a child of the exit's")
        if len(set(zip(parents, ranks, strict=True))) != len(parents):
            raise ValueError("the plan gives a parent two children of the same rank")
        drafted = self.depths[self.copied + 1 :]
        if list(drafted) != sorted(drafted):
            raise ValueError("the plan must list its nodes depth by depth")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Computed once: plans are dictionary keys in every step.
        return hash((self.parents, self.ranks, self.copied, self.beam))

    def __str__(self) -> str:
        """Returns the shortest string that `parse` reads as this plan."""
        return self._name

    @cached_property
    def _name(self) -> str:
        if not len(self):
            return "none"
        if self.copied:
            copy = f"copy:{self.copied}"
            return f"{self.without_copy}+{copy}" if self.uses_exit else copy
        if self.beam:
            return "beam:" + ",".join(map(str, self.beam))
        widths = tuple(self.width(level) for level in self.levels[:-1])
        nodes = sum(prod(widths[: depth + 1]) for depth in range(self.depth))
        if nodes == len(self) and self == Plan.tree(widths):  # every node has all its children, in order of rank
            return f"chain:{self.depth}" if self.is_chain else "tree:" + ",".join(map(str, widths))
        pairs = zip(self.parents, self.ranks, strict=True)
        return "nodes:" + ",".join(f"{parent}.{rank}" for parent, rank in pairs)

    def __len__(self) -> int:
        return len(self.parents) + sum(self.beam)

    @classmethod
    def parse(cls, plan: str | Plan | Iterable[tuple[int, int]]) -> Plan:
        """Returns the plan given as a string, as an iterable of (parent, rank), or as a Plan."""
        if isinstance(plan, Plan):
            return plan
        if not isinstance(plan, str):
            return cls.from_nodes(plan)
        if plan == "none":
            return NONE
        copies = re.fullmatch(r"(?:((?:chain|tree|beam|nodes):[\d.,]+)\+)?copy:([1-9]\d*)", plan)
        if copies:
            return cls.parse(copies[1] or NONE).with_copy(int(copies[2]))
        kind, _, text = plan.partition(":")
        if kind == "chain" and re.fullmatch(r"\d+", text):
            if int(text) > MAX_NODES:
                raise ValueError(f"{plan} has more than {MAX_NODES} nodes; shorten it")
            return cls.tree((1,) * int(text))
        if kind == "tree" and re.fullmatch(r"\d+(,\d+)*", text):
            return cls.tree(tuple(int(width) for width in text.split(",")))
        if kind == "beam" and re.fullmatch(r"\d+(,\d+)*", text):
            return cls(beam=tuple(int(width) for width in text.split(",")))
        if kind == "nodes" and re.fullmatch(r"\d+\.\d+(,\d+\.\d+)*", text):
            pairs = (pair.split(".") for pair in text.split(","))
            return cls.from_nodes((int(parent), int(rank)) for parent, rank in pairs)
        raise ValueError(f"plan {plan!r} is malformed; write {_FORMS}")

    @classmethod
    def from_nodes(cls, nodes: Iterable[tuple[int, int]]) -> Plan:
        """Returns the plan with these nodes, each (parent, rank), depth by depth."""
        try:
            pairs = [(index(parent), index(rank)) for parent, rank in nodes]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a plan given as nodes must be pairs (parent, rank): {error}; or write {_FORMS}"
            ) from error
        return cls(tuple(parent for parent, _ in pairs), tuple(rank for _, rank in pairs))

    @classmethod
    def from_paths(cls, paths: Iterable[tuple[int, ...]]) -> Plan:
        """Returns the plan with one node per path, a path being the ranks from the root to the node; every prefix of a
        path must be among the paths."""
        ordered = sorted(paths, key=lambda path: (len(path), path))
        number = {(): 0} | {path: index for index, path in enumerate(ordered, start=1)}
        return cls.from_nodes((number[path[:-1]], path[-1]) for path in ordered)

    @classmethod
    def tree(cls, widths: tuple[int, ...]) -> Plan:
        """Returns the tree in which every node of depth d has `widths[d]` children."""
        if not widths or min(widths) < 1:
            raise ValueError(f"a plan needs at least one node at every depth, got widths {widths}; write {_FORMS}")
        parents: list[int] = []
        ranks: list[int] = []
        level = [0]
        for width in widths:
            if len(parents) + len(level) * width > MAX_NODES:
                raise ValueError(f"a tree of widths {widths} has more than {MAX_NODES} nodes; narrow or shorten it")
            first = len(parents) + 1
            for parent in level:
                parents += [parent] * width
                ranks += range(width)
            level = list(range(first, len(parents) + 1))
        return cls(tuple(parents), tuple(ranks))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node, the root first (0)."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        for depth, width in enumerate(self.beam, start=1):
            depths += [depth] * width
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The nodes that pass the draft layers together, as ranges: the root and the copied nodes, whose tokens are
        known before the exit runs, then the exit's nodes of each depth."""
        drafted = self.depths[self.copied + 1 :]
        counts = [self.copied + 1, *(drafted.count(depth) for depth in range(1, max(drafted, default=0) + 1))]
        starts = [sum(counts[:level]) for level in range(len(counts))]
        return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of every node, the root included, in order of rank (best first); a copied child comes last."""
        self._check_fixed()
        children: list[list[int]] = [[] for _ in self.depths]
        for node, parent in enumerate(self.parents, start=1):
            children[parent].append(node)
        return tuple(
            tuple(sorted(nodes, key=lambda node: (node <= self.copied, self.ranks[node - 1]))) for nodes in children
        )

    def matching_children(self, nodes: Sequence[int], token: int, tokens: Sequence[int]) -> list[int]:
        """The children of `nodes` that carry a token; `tokens` are those of all nodes. There are up to two, the exit's
        first: a copied token may be one of the exit's too. Both then have one token path, so acceptance follows
        both."""
        return [child for node in nodes for child in self.children[node] if tokens[child] == token]

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """[n+1, n+1] bool: entry [i, j] is true if j is i or an ancestor of i."""
        self._check_fixed()
        mask = torch.eye(len(self) + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parents, start=1):
            mask[node] |= mask[parent]
        return mask

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one, both included."""
        self._check_fixed()
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1] - 1])
        return path[::-1]

    def _check_fixed(self) -> None:
        if self.beam:
            raise ValueError(f"the parents of the nodes of {self} differ by sequence: use of_sequence(parents)")

    def of_sequence(self, parents: Sequence[int]) -> Plan:
        """Returns the tree of one sequence in which the nodes of this beam have these parents; this plan if it has no
        beam."""
        if not self.beam:
            return self
        seen: dict[int, int] = {}
        ranks = []
        for node, parent in enumerate(parents, start=1):
            ranks.append(0 if node <= self.copied else seen.get(parent, 0))
            seen[parent] = ranks[-1] + (node > self.copied)
        return Plan(tuple(parents), tuple(ranks), self.copied)

    def node_at(self, last: int, depth: int) -> int:
        """A node of this depth: that on the path to node `last`, in a beam the first of the exit's at the depth."""
        if not self.beam:
            return self.path(last)[depth]
        return depth if last <= self.copied else self.levels[depth].start

    def is_leaf(self, node: int) -> bool:
        """True if the node has no children; in a beam, if it is on the last depth."""
        if not self.beam:
            return not self.children[node]
        return self.depths[node] >= len(self.beam) if node == 0 or node > self.copied else node == self.copied

    @property
    def uses_exit(self) -> bool:
        """True if some node is the exit's."""
        return len(self) > self.copied

    @cached_property
    def without_copy(self) -> Plan:
        """This plan without its copied nodes."""
        if not self.copied:
            return self
        parents = (max(0, parent - self.copied) for parent in self.parents[self.copied :])
        return Plan(tuple(parents), self.ranks[self.copied :], beam=self.beam)

    def with_copy(self, count: int) -> Plan:
        """Returns the exit's nodes of this plan and `count` copied nodes."""
        drafted = self.without_copy
        if count + len(drafted) > MAX_NODES:
            raise ValueError(
                f"{count} copied nodes and {len(drafted)} of the exit are more than {MAX_NODES} nodes; shorten the plan"
            )
        parents = (parent + count if parent else 0 for parent in drafted.parents)
        return Plan((*range(count), *parents), (0,) * count + drafted.ranks, count, drafted.beam)

    def width(self, level: range) -> int:
        """Number of draft tokens to rank for each node of a level: the largest rank of its children plus one, in a beam
        the number of nodes of the next depth. Copied nodes are not ranked."""
        if self.beam:
            return (*self.beam, 0)[self.depths[level.start]]
        children = (child for node in level for child in self.children[node] if child > self.copied)
        return 1 + max((self.ranks[child - 1] for child in children), default=-1)

    @cached_property
    def widest_rank(self) -> int:
        """The highest rank that the plan drafts; 0 without nodes of the exit's."""
        return max((*self.ranks, *(width - 1 for width in self.beam)), default=0)

    @lru_cache(maxsize=256)  # noqa: B019 - plans are small and few, and truncated in every step
    def truncated(self, depth: int) -> Plan:
        """Returns this plan without the nodes deeper than `depth`."""
        if depth >= self.depth:
            return self
        drafted = self.without_copy
        keep = 0 if self.beam else sum(1 for d in drafted.depths[1:] if d <= depth)
        kept = Plan(drafted.parents[:keep], drafted.ranks[:keep], beam=self.beam[:depth])
        return kept.with_copy(min(self.copied, depth))

    @lru_cache(maxsize=256)  # noqa: B019
    def first_chain(self) -> Plan:
        """Returns the chain as long as the path from the root through each node's best-ranked child; a plan without
        nodes of the exit's as it is."""
        if not self.uses_exit:
            return self
        if self.beam:
            return Plan.tree((1,) * len(self.beam))
        length, node = 0, 0
        while self.children[node]:
            node, length = self.children[node][0], length + 1
        return Plan.tree((1,) * length)

    @property
    def is_chain(self) -> bool:
        """True if no node has two children; true for the plan without nodes."""
        return len(self) == self.depth


NONE = Plan()
