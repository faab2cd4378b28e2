"""A row: one sequence being generated, what it has come to, and what was counted on the way.

Only holds and counts; who makes its tokens is `runtime`'s business.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from selfspec.cache import Sequence
from selfspec.governor import MEASURING, Change, Watch
from selfspec.shadow import Waiting
from selfspec.tree import Plan


@dataclass(eq=False)
class Row:
    """One sequence being generated."""

    prompt: list[int]
    seed: int
    copy: int  # index among the returned sequences of one prompt
    max_length: int  # prompt and new tokens together
    tokens: list[int] = field(default_factory=list)  # prompt and new tokens; the last one is pending
    sequence: Sequence = field(default_factory=Sequence)
    known: torch.Tensor | None = None  # [2 * hidden] what was known just before the pending token, to be recalled
    finish_reason: str | None = None
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0  # cycles that ended because no child carried the target's token
    plans: Counter[Plan] = field(default_factory=Counter)
    disabled_reason: str | None = None
    elapsed_s: float = 0.0
    origins: list[str] = field(default_factory=list)  # of every new token: "drafted", "decoded" after that, or "plain"
    changes: list[Change] = field(default_factory=list)  # of plan, the first one included
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)  # cycles by depths accepted and asked for
    watch: Watch = field(default_factory=Watch)  # what the governor knows of this text
    waiting: Waiting = field(default_factory=Waiting)  # for the exit's cache

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def ood(self) -> bool:
        return self.watch.ood

    @property
    def accepted_by_depth(self) -> list[int]:
        return [sum(n for (right, _), n in self.outcomes.items() if right > depth) for depth in range(self._deepest)]

    @property
    def reached_by_depth(self) -> list[int]:
        """How often a node of each depth was asked for."""
        return [sum(n for (_, asked), n in self.outcomes.items() if asked > depth) for depth in range(self._deepest)]

    @property
    def _deepest(self) -> int:
        return max((asked for _, asked in self.outcomes), default=0)

    def account(self, plan: Plan, last: int, chosen: Plan, reason: str | None) -> None:
        """A cycle is over that accepted the nodes of `plan` down to `last`; `chosen` is the plan it was cut from."""
        before = self.changes[-1] if self.changes else None
        measured = before is not None and before.reason == MEASURING != reason
        if before is None or measured or before.plan != str(chosen):
            self.changes.append(Change(self.cycles, self.new_tokens - plan.depths[last] - 1, str(chosen), reason))
        self.cycles += 1
        self.drafted += len(plan)
        self.plans[plan] += 1
        if reason != MEASURING:
            self.disabled_reason = self.disabled_reason or reason
        right = self.origins[-1:] == ["drafted"]  # the text ended with a token that was drafted too
        accepted = plan.depths[last] + right
        asked = accepted + (not right and bool(plan.children[last]))
        self.outcomes[accepted, asked] += 1


def origin(plan: Plan, drafted: bool) -> str:
    """Where a token came from."""
    return "plain" if not len(plan) else "drafted" if drafted else "decoded"
