"""The hard rules, which forbid or narrow drafting; settings of the governor; plans of requests without a governor.

A policy decides from the request and the batch size alone. Tokens do not depend on the plan, so the rules change only
the speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from selfspec.sampling import SamplingParams
from selfspec.speculation.plan import NONE, Plan

Mode = Literal["force"] | bool | None

NO_PROFILE = "no_profile"  # why no exit drafts: no profile was found and no exit was given

BATCHES = {"1": 1, "2-4": 4, "5-16": 16}  # bands of batch sizes with plans of their own -> largest size of the band
TEMPERATURES = {"0": 0.0, "0.7": 0.7, "1": 1.0}  # temperatures with plans of their own; 0 is greedy
DEFAULT_TREE = Plan.parse("tree:4,2,2,1")


@dataclass(frozen=True)
class Rules:
    """Thresholds past which drafting is off or narrowed, and settings of the governor; docs/governor.md has reasons."""

    max_batch: int = 16  # sequences: off in larger batches
    max_tree_batch: int = 4  # sequences: larger batches draft chains only, and their prompts are not scored
    max_temperature: float = 1.5
    max_top_k: int = 200
    unset_top_k_temperature: float = 1.0  # above this temperature an unset top-k counts as a large one
    max_distance: float = 3.0  # standard deviations: a prompt farther from every domain than this is an unfamiliar one
    max_step: float | None = None  # plain steps that a candidate may take; None: by device, see `for_device`
    budget: float = 4.0  # plain steps that drafting and scoring may lose
    budget_refill: float = 0.01  # plain steps that each plain step adds to the budget, up to its capacity

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "max_step" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"rule {name}={value!r} must be a number of at least 0")

    def for_device(self, device: str) -> Rules:
        """Returns these rules with `max_step` set by the type of device. Long steps emit tokens in bursts. On a GPU
        they gain a few per cent; on a CPU, where every row adds time, no plan within a limit is faster than plain
        decoding."""
        if self.max_step is not None:
            return self
        return replace(self, max_step=1.67 if device == "cuda" else inf)

    @property
    def step_limit(self) -> float:
        return inf if self.max_step is None else self.max_step


@dataclass(eq=False)
class Policy:
    """Applies the rules to one request, and chooses its plan where no governor does."""

    rules: Rules
    sampling: SamplingParams
    mode: Mode = None
    plan: Plan | None = None  # the request's
    plans: dict[int, Plan] = field(default_factory=dict)  # the profile's, by the largest batch that each is for
    has_exit: bool = True
    stateful_processors: bool = False
    new_tokens: int | None = None  # of each sequence, at most; None: unknown

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        return self.sampling.temperature if self.sampling.do_sample else 0.0

    @property
    def permanent_reason(self) -> str | None:
        """The reason why no step drafts for this request, however small the batch becomes; None if some may. A request
        for one new token keeps its drafter, so that requests that draft can reuse its prompt's pages."""
        reason = self._rule(batch=1)
        return None if reason == "goodput" and any(map(len, self.plans.values())) else reason

    @property
    def possible_plans(self) -> list[Plan]:
        """Every plan that a step of this request may draft without a governor."""
        return [self.plan] if self.plan else [*self.plans.values(), DEFAULT_TREE]

    @property
    def only_copies(self) -> bool:
        """Whether the request asks for no plan and has no exit to draft with: it only copies from its own text."""
        return not self.has_exit and self.plan is None and self.mode in (None, True)

    def reason(self, batch: int) -> str | None:
        """The first rule that forbids drafting in a batch of this size; None if none does."""
        is_plain = self.new_tokens == 1 and self.plan is None and self.mode != "force"  # a plain step emits it
        return self._rule(batch) or ("goodput" if is_plain else None)

    def _rule(self, batch: int) -> str | None:
        """`reason` without regard to the number of new tokens."""
        rules, sampling = self.rules, self.sampling
        if self.mode is False or (self.plan is not None and not len(self.plan)):
            return "request"
        if self.stateful_processors:  # also with "force": their state cannot follow a tree
            return "processor"
        if self.mode == "force":
            return None
        if batch > rules.max_batch:
            return "batch"
        if sampling.do_sample and sampling.temperature > rules.max_temperature:
            return "temperature"
        unset_is_large = sampling.temperature > rules.unset_top_k_temperature
        large = sampling.top_k > rules.max_top_k or (sampling.top_k == 0 and unset_is_large)
        if sampling.do_sample and large:
            return "top_k"
        profile_plan = self._profile_plan(batch)
        return "goodput" if self.plan is None and profile_plan is not None and not len(profile_plan) else None

    def choose(self, batch: int) -> tuple[Plan, str | None]:
        """The plan for a step of `batch` sequences and, where it is `none`, the reason."""
        reason = self.reason(batch)
        if reason is not None:
            return NONE, reason
        # A profile's plan `none` is falsy: "force" then drafts DEFAULT_TREE.
        plan = self.plan or self._profile_plan(batch) or DEFAULT_TREE
        has_tree = self.mode == "force" or batch <= self.rules.max_tree_batch
        return plan if has_tree else plan.first_chain(), None

    def _profile_plan(self, batch: int) -> Plan | None:
        """The profile's plan for the smallest of its batch sizes that holds this batch, else for its largest."""
        sizes = sorted(self.plans)
        return self.plans[next((size for size in sizes if batch <= size), sizes[-1])] if sizes else None
