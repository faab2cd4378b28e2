"""When to speculate and with which plan: the hard rules, and the default plans within them.

Decides from the request and the number of active rows alone. Coupled tokens do not depend on the plan, so what is
decided here can change only their speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from selfspec.sampling import SamplingParams
from selfspec.speculation.plan import NONE, Plan

Mode = Literal["force"] | bool | None

BATCHES = {"1": 1, "2-4": 4, "5-16": 16}  # bands of active rows with plans of their own, and the largest of each
TEMPERATURES = {"0": 0.0, "0.7": 0.7, "1": 1.0}  # temperatures with plans of their own; 0 is greedy
DEFAULT_TREE = Plan.parse("tree:4,2,2,1")
DEFAULT_CHAIN = Plan.parse("chain:5")


@dataclass(frozen=True)
class Rules:
    """Thresholds past which speculation is switched off or narrowed."""

    max_batch: int = 16  # active rows above this: off
    max_tree_batch: int = 4  # active rows above this: chains only; of a request: prompts are not judged
    max_temperature: float = 1.5
    max_top_k: int = 200
    unset_top_k_temperature: float = 1.0  # above this temperature an unset top-k counts as a large one
    longest_cycle: float | None = None  # plain steps that the governor's cycles may take; None: by the device, see `on`
    max_distance: float = 3.0  # deviations: a prompt farther from every domain than this is an unfamiliar one
    least_gain: float = 0.05  # how much drafting must be expected to bring, to begin with it
    hysteresis: float = 0.02  # and how much more another plan than that in use, to change to it
    probe_interval: int = 32  # tokens: while nothing pays, it is tried again after no more than these, if it may be
    loss_allowance: float = 4.0  # plain steps that may be lost, in all, to plans that were expected to pay
    probe_allowance: float = 0.5  # and to trying whether they would, which beginning is too
    probe_share: float = 0.01  # every plain step allows so much more of both
    shadow_tokens: int = 16  # while nothing is drafted, the exit is scored after so many, then more seldom; 0: never

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "longest_cycle" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"rule {name}={value!r} must be a number of at least 0")

    def on(self, device: str) -> Rules:
        """The same on this type of device: what is left to it is settled. Long cycles make tokens come in bursts. On a
        GPU they gain a few per cent; on a CPU, where every row costs, there would be nothing without them."""
        if self.longest_cycle is not None:
            return self
        return replace(self, longest_cycle=1.67 if device == "cuda" else inf)

    def scored_after(self, rows: int) -> int:
        """Tokens after which the exit of a request with so many rows is first scored while nothing is drafted. Sooner
        where a few rows are: one of them may have made all step aside, and to look at a few is cheap."""
        return (self.shadow_tokens + 1) // 2 if 1 < rows <= self.max_tree_batch else self.shadow_tokens

    @property
    def cycle_limit(self) -> float:
        return inf if self.longest_cycle is None else self.longest_cycle


class Policy:
    """Chooses the plan of each cycle of one request."""

    def __init__(
        self,
        rules: Rules,
        sampling: SamplingParams,
        mode: Mode = None,
        plan: Plan | None = None,
        plans: dict[int, Plan] | None = None,
        has_exit: bool = True,
        stateful_processors: bool = False,
    ) -> None:
        self.rules = rules
        self.sampling = sampling
        self.mode = mode
        self.plan = plan  # the request's
        self.plans = plans or {}  # the profile's, by the largest batch each is for
        self.has_exit = has_exit
        self.stateful_processors = stateful_processors

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        return self.sampling.temperature if self.sampling.do_sample else 0.0

    @property
    def off_for_good(self) -> str | None:
        """The reason why no cycle of this request will speculate, however small the batch becomes; None if some may."""
        reason = self.reason(batch=1)
        return None if reason == "goodput" and any(map(len, self.plans.values())) else reason

    @property
    def possible_plans(self) -> list[Plan]:
        """Every plan that some cycle of this request might draft."""
        return [self.plan] if self.plan else [*self.plans.values(), DEFAULT_TREE]

    def reason(self, batch: int) -> str | None:
        """The first rule that forbids speculating with `batch` active rows; None if none does."""
        rules, sampling = self.rules, self.sampling
        if self.mode is False or (self.plan is not None and not len(self.plan)):
            return "request"
        if self.stateful_processors:  # their state cannot follow a tree: forcing cannot make that right
            return "processor"
        if self.mode == "force":
            return None
        if not self.has_exit:
            return "no_profile"
        if batch > rules.max_batch:
            return "batch"
        if sampling.do_sample and sampling.temperature > rules.max_temperature:
            return "temperature"
        unset_is_large = sampling.temperature > rules.unset_top_k_temperature
        large = sampling.top_k > rules.max_top_k or (sampling.top_k == 0 and unset_is_large)
        if sampling.do_sample and large:
            return "top_k"
        profiled = self._profiled(batch)
        return "goodput" if self.plan is None and profiled is not None and not len(profiled) else None

    def choose(self, batch: int) -> tuple[Plan, str | None]:
        """The plan for a cycle of `batch` active rows and, where it is `none`, the reason."""
        reason = self.reason(batch)
        if reason is not None:
            return NONE, reason
        if self.mode == "force" or batch <= self.rules.max_tree_batch:
            return self._planned(batch, DEFAULT_TREE), None
        return self._planned(batch, DEFAULT_CHAIN).first_chain(), None

    def _planned(self, batch: int, default: Plan) -> Plan:
        """The request's plan, else the profile's, else the default; forcing skips a profile's advice not to draft."""
        return self.plan or self._profiled(batch) or self._cooled(default)

    def _profiled(self, batch: int) -> Plan | None:
        """The profile's plan for this batch: that of the smallest band it fits in."""
        sizes = sorted(self.plans)
        return self.plans[next((size for size in sizes if batch <= size), sizes[-1])] if sizes else None

    def _cooled(self, plan: Plan) -> Plan:
        """Hotter text is harder to guess: one level less above temperature 0.3, two above 0.7, three above 1.0."""
        if not self.sampling.do_sample:
            return plan
        fewer = sum(self.sampling.temperature > bound for bound in (0.3, 0.7, 1.0))
        least = 2 if plan.is_chain else 1
        return plan.truncated(max(least, plan.depth - fewer))
