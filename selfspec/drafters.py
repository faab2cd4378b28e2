"""Finds the exit, head rows and plans of a request, for its profile and rules.

An engine keeps one `Drafters`; its requests share exits and plan candidates, which are made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import product
from weakref import WeakValueDictionary

import torch

from selfspec.governor.acceptance import Acceptance
from selfspec.governor.candidates import PlanCandidates, SharedPlans
from selfspec.governor.costs import (
    CostModel,
    Costs,
    RowCost,
    StepCost,
    calibrated_cost,
    estimated_cost,
    gpu_rows,
)
from selfspec.governor.governor import Budget
from selfspec.governor.rules import BATCHES, Policy, Rules
from selfspec.models.decoder import Decoder
from selfspec.profiles.profile import DomainChoice, Profile
from selfspec.profiles.router import Embedded
from selfspec.request import SpeculationRequest
from selfspec.speculation.exit import Exit, HeadRows, check_exit_layer
from selfspec.speculation.exit_scoring import CPU_SCORED_POSITIONS, PROMPT_END
from selfspec.speculation.plan import NONE, Plan

Embed = Callable[[Sequence[Sequence[int]], int], Embedded]  # (prompts, layer) -> their embeddings, see `router`


@dataclass(frozen=True, eq=False)
class Drafter:
    """Exit, head rows and plan candidates of one request."""

    exit: Exit | None  # with the whole LM head; None: drafts copied tokens only
    head_rows: HeadRows | None = None  # of its domain; None: the full head
    candidates: PlanCandidates | None = None  # the governor's plans; None: the policy chooses the plan
    prompt_agreement: float | None = None  # calibration's mean share of prompt positions at which exit and model agree
    unfamiliar: Sequence[bool] = ()  # for each prompt, whether it is farther than `max_distance` from every domain
    # Set while this drafter is provisional (of another domain with the same exit): (the prompts' embeddings) -> the
    # drafter of their own domain.
    reroute: Callable[[torch.Tensor], Drafter | None] | None = None


class Drafters:
    """Exits, head rows, plan candidates, measured costs and budgets of one engine."""

    def __init__(
        self,
        model: Decoder,
        profile: Profile | None,
        embed: Embed,
        kernels: bool = False,
        time_rows: Callable[[], RowCost] | None = None,  # called if the profile lacks costs; None: `gpu_rows`
    ) -> None:
        self.model, self.profile = model, profile
        self._embed, self._kernels, self._time_rows = embed, kernels, time_rows
        self._row_cost = time_rows() if time_rows is not None and self._lacks_costs else gpu_rows
        self.exits: dict[int, Exit] = {}  # by layer; they draft from the whole LM head
        self.head_rows: dict[str | None, HeadRows | None] = {}  # by domain; None: all domains together
        self.costs: Callable[[Hashable], Costs] = cache(lambda kind: Costs())  # by `Batch._cost_kind`
        self._budget = cache(Budget)  # by capacity and refill
        self._candidates: dict[tuple[str, float, int, float], PlanCandidates] = {}  # by domain, temperature and rules
        self._last_domain: str | None = None  # of the request routed last
        self._domains_share_exit = lru_cache(maxsize=64)(self._compare_domains)  # by temperature
        self._shared_plans = cache(self._make_shared_plans)  # by exit layer and rules
        self._copying = cache(self._make_copying)  # by step limit
        self._trimmed_exits: WeakValueDictionary[int, Exit] = WeakValueDictionary()  # those in use, by id

    @property
    def nbytes(self) -> int:
        """Bytes of exits and trimmed heads. Copies each dict first: the loop may change it on another thread."""
        copies = [rows.copy for rows in list(self.head_rows.values()) if rows is not None and rows.copy is not None]
        trimmed = [exit for reference in self._trimmed_exits.valuerefs() if (exit := reference()) is not None]
        own = sum(exit.nbytes for exit in list(self.exits.values())) + sum(exit.head_nbytes for exit in trimmed)
        return own + sum(copy.nbytes for copy in copies)

    def requested_exit_layer(self, request: SpeculationRequest, plan: Plan | None) -> int | None:
        """The exit layer that the request gives. Without one, and without a profile: a quarter of the layers if the
        request's plan uses the exit or speculation is forced; else None."""
        if request.exit_layer is not None:
            check_exit_layer(request.exit_layer, self.model.config.num_layers)
            return request.exit_layer
        if self.profile is not None and request.domain != "auto":
            self.profile.choice(request.domain)  # raises for an unknown domain, even if nothing will be drafted
        wanted = request.speculative_decoding == "force" if plan is None else plan.uses_exit
        return max(1, self.model.config.num_layers // 4) if wanted and self.profile is None else None

    def drafter(
        self, request: SpeculationRequest, prompts: list[list[int]], policy: Policy, layer: int | None
    ) -> Drafter | None:
        """Returns the request's drafter, None if nothing will be drafted; sets `policy.plans`. If all domains share an
        exit, returns the drafter of the domain of the request routed last, with `reroute`: routing this request first
        would delay its first step."""
        if self.profile is None:
            if policy.only_copies:
                return Drafter(None, candidates=self.copying_candidates(policy.rules))
            exit = None if layer is None else self.exit(layer)
            return self._checked(Drafter(exit), policy.possible_plans)
        if request.domain != "auto" or not self.profile.routes:
            domain = request.domain if request.domain != "auto" else self.profile.route(None)
            return self._drafter_of_domain(domain, policy, layer)
        reroute = partial(self._route, policy, layer)
        is_governed = layer is None and policy.mode != "force" and policy.plan is None
        likely = self._last_domain or self.profile.route(None)
        if is_governed and policy.new_tokens == 1:  # drafts nothing; fills the exit's KV in case pages are reused
            return self._drafter_of_domain(likely, policy, layer)
        if self._kernels and is_governed and self._domains_share_exit(policy.temperature):
            found = self._drafter_of_domain(likely, policy, layer)
            return None if found is None else replace(found, reroute=reroute)
        return reroute(self.embed(prompts).read())

    def _compare_domains(self, temperature: float) -> bool:
        """Whether all domains have the same exit and can be governed, so that only head rows and plans depend on the
        domain."""
        assert self.profile is not None
        choices = self.profile.domains.values()
        layers = {choice.exit_layer for choice in choices}
        return len(layers) == 1 and all(self._has_ranks(choice, temperature) for choice in choices)

    def _route(self, policy: Policy, layer: int | None, embeddings: torch.Tensor) -> Drafter | None:
        """The drafter of the domain of prompts with these embeddings [P, hidden]."""
        assert self.profile is not None
        self._last_domain = self.profile.route(embeddings)
        found = self._drafter_of_domain(self._last_domain, policy, layer)
        unfamiliar = self.profile.are_unfamiliar(embeddings, policy.rules.max_distance)
        return None if found is None else replace(found, unfamiliar=unfamiliar)

    def _drafter_of_domain(self, domain: str, policy: Policy, layer: int | None) -> Drafter | None:
        """The drafter of a domain, with its exit or the one after `layer` layers; None if nothing will be drafted. Sets
        `policy.plans` if no governor chooses."""
        assert self.profile is not None
        choice, candidates = self.profile.choice(domain), None
        if layer is None:
            layer = choice.exit_layer
            if self._is_governed(choice, policy):
                candidates = self.candidates(domain, choice, policy)
            else:
                policy.plans = self.plans(choice, policy)
                if policy.permanent_reason:
                    return None
        plans = policy.possible_plans if candidates is None else candidates.plans
        calibrated = choice.prompt_agreement
        agreement = None if calibrated is None or candidates is None else calibrated.mean
        exit = self.exit(layer)
        rows = self.head_rows_of(domain) if exit.block is not None else None
        return self._checked(Drafter(exit, rows, candidates, agreement), plans)

    @staticmethod
    def _checked(drafter: Drafter, plans: Iterable[Plan]) -> Drafter:
        """Returns the drafter; raises ValueError if a plan asks for a token of a rank that its exit does not offer."""
        if drafter.exit is None:
            return drafter
        widest = max((plan.widest_rank for plan in plans), default=0)
        offered = drafter.exit.vocabulary if drafter.head_rows is None else len(drafter.head_rows)
        if widest >= offered:
            raise ValueError(f"the plan asks for rank {widest}, but the exit drafts only {offered} tokens")
        return drafter

    def exit(self, layer: int) -> Exit:
        """The exit after this many layers, with the whole LM head."""
        model, profile = self.model, self.profile
        if layer not in self.exits:
            self.exits[layer] = Exit(model, layer) if profile is None else profile.exits_file.exit(model, layer)
        return self.exits[layer]

    @property
    def most_used_exit(self) -> Exit | None:
        """The exit that most domains of the profile use; None without a profile."""
        return None if self._most_used_layer is None else self.exit(self._most_used_layer)

    @property
    def loaded_exit(self) -> Exit | None:
        """`most_used_exit` if it is loaded, else None."""
        return None if self._most_used_layer is None else self.exits.get(self._most_used_layer)

    @property
    def _most_used_layer(self) -> int | None:
        layers = Counter(choice.exit_layer for choice in self.profile.domains.values()) if self.profile else Counter()
        return layers.most_common(1)[0][0] if layers else None

    def head_rows_of(self, domain: str | None) -> HeadRows | None:
        """The head rows that a domain drafts from; for None those of all domains together. None: the full head."""
        assert self.profile is not None
        if domain not in self.head_rows:
            names = [domain] if domain is not None else list(self.profile.domains)
            rows = [self.profile.exits_file.head_rows(self.model, name) for name in names]
            trimmed = [ids for ids in rows if ids is not None]
            needs_full = len(trimmed) < len(rows)
            ids = None if needs_full else trimmed[0] if len(trimmed) == 1 else torch.cat(trimmed).unique()
            of_all = None if domain is None else self.head_rows_of(None)
            self.head_rows[domain] = None if ids is None else HeadRows(ids, 0 if of_all is None else len(of_all))
        return self.head_rows[domain]

    def shared_rows(self, drafters: Sequence[Drafter]) -> HeadRows | None:
        """The head rows that sequences of one batch draft from: those of their domain, or of all domains if they have
        several. None: the full head."""
        rows = {id(drafter.head_rows): drafter.head_rows for drafter in drafters}
        if None in rows.values():
            return None
        return next(iter(rows.values())) if len(rows) == 1 else self.head_rows_of(None)

    def exit_with_rows(self, exit: Exit, rows: HeadRows | None, prompts: Sequence[Collection[int]]) -> Exit:
        """The exit with these head rows and those of the prompts' own tokens, which sequences often repeat."""
        trimmed = exit.with_head_rows(rows, prompts)
        if trimmed.head_rows is not None:
            self._trimmed_exits[id(trimmed)] = trimmed
        return trimmed

    def embed(self, prompts: Sequence[Sequence[int]]) -> Embedded:
        """Launches the passes that embed prompts for the profile's router."""
        assert self.profile is not None
        return self._embed(prompts, self.profile.router_layer)

    def plans(self, choice: DomainChoice, policy: Policy) -> dict[int, Plan]:
        """The profile's plans for a request, by batch size; `{1: NONE}` if they were measured on another type of
        device, unless speculation is forced."""
        forced = policy.mode == "force"
        if not self._is_measured_here and not forced:
            return {1: NONE}
        return choice.plans_at(policy.temperature, forced)

    @property
    def _is_measured_here(self) -> bool:
        """Whether the profile names this type of device, or none."""
        device = self.profile.device if self.profile is not None else None
        return device is None or device.type == self.model.device.type

    def budget(self, rules: Rules) -> Budget:
        """The budget of all batches of the engine with these rules."""
        return self._budget(rules.budget, rules.budget_refill)

    def _is_governed(self, choice: DomainChoice, policy: Policy) -> bool:
        """Whether the governor chooses the plans: the request neither gives nor forces one, and calibration measured
        accepted ranks."""
        return policy.mode != "force" and policy.plan is None and self._has_ranks(choice, policy.temperature)

    @staticmethod
    def _has_ranks(choice: DomainChoice, temperature: float) -> bool:
        """Whether calibration saw accepted drafts at the measured temperature nearest to this one."""
        return any(map(sum, choice.ranks[choice.nearest(choice.ranks, temperature)])) if choice.ranks else False

    def candidates(self, domain: str, choice: DomainChoice, policy: Policy) -> PlanCandidates:
        """The plans that the governor chooses from for a domain and temperature."""
        rules, temperature = policy.rules, round(policy.temperature, 1)
        key = domain, temperature, rules.max_tree_batch, rules.step_limit
        if key not in self._candidates:
            shared = self._shared_plans(choice.exit_layer, rules.max_tree_batch, rules.step_limit)
            acceptance = Acceptance(choice.ranks_at(temperature))
            self._candidates[key] = PlanCandidates(acceptance, self._cost_models(choice), shared, self._score_cost)
        return self._candidates[key]

    def _make_shared_plans(self, exit_layer: int, max_tree_batch: int, max_step: float) -> SharedPlans:
        """The plans of all governed domains that draft with this exit, chosen for the first of them whose greedy
        drafts calibration accepted."""
        assert self.profile is not None
        choices = [
            choice for choice in self.profile.domains.values() if choice.exit_layer == exit_layer and choice.ranks
        ]
        first = next((choice for choice in choices if self._has_ranks(choice, 0.0)), choices[0])
        widest = min(choice.head_rows or self.model.config.vocab_size for choice in choices)
        acceptance, costs = Acceptance(first.ranks_at(0.0)), self._cost_models(first)
        return SharedPlans(acceptance, costs, max_tree_batch, widest, max_step)

    def copying_candidates(self, rules: Rules) -> PlanCandidates:
        """The plans that the governor chooses from without an exit."""
        return self._copying(rules.step_limit)

    def _make_copying(self, max_step: float) -> PlanCandidates:
        row_cost = gpu_rows if self._time_rows is None else self._time_rows()
        costs = {size: estimated_cost(0, self.model.config.num_layers, size, row_cost) for size in BATCHES.values()}
        return PlanCandidates(None, costs, SharedPlans(None, costs, max_tree_batch=0, max_step=max_step))

    def _cost_models(self, choice: DomainChoice) -> dict[int, CostModel]:
        """Cost models by the largest batch that each is for."""
        return {size: self._cost_model(choice, size) for size in BATCHES.values()}

    def _cost_model(self, choice: DomainChoice, batch: int) -> CostModel:
        """The calibrated cost model if there is one, else an estimate from numbers of layers and rows."""
        calibrated = self._calibrated(choice).get(batch)
        if calibrated is not None:
            return calibrated_cost(calibrated, choice.head_rows or None)
        return estimated_cost(choice.exit_layer, self.model.config.num_layers, batch, self._row_cost)

    @property
    def _score_cost(self) -> float:
        """Cost, in plain steps, of a pass of the exit's block and head (counted as two layers) over the scored
        positions."""
        positions = CPU_SCORED_POSITIONS if self.model.device.type == "cpu" else PROMPT_END
        return 2 / self.model.config.num_layers * self._row_cost(positions)

    def _calibrated(self, choice: DomainChoice) -> dict[int, StepCost]:
        """Step costs that calibration measured on this type of device with the same operations, by batch size."""
        device = self.profile.device if self.profile is not None else None
        alike = self._is_measured_here and (device is None or device.kernels == self._kernels)
        return {size: choice.costs[band] for band, size in BATCHES.items() if alike and band in choice.costs}

    @property
    def _lacks_costs(self) -> bool:
        """Whether `_calibrated` lacks a batch size for some governed domain."""
        domains = self.profile.domains.values() if self.profile is not None else ()
        return any(choice.ranks and len(self._calibrated(choice)) < len(BATCHES) for choice in domains)

    def expected(self, batch: int, domains: Sequence[str], policy: Policy) -> Iterator[tuple[Plan, Exit]]:
        """Yields the plans and exits that requests of these domains may use in a batch of this size; each (plan, exit
        layer, head size) once."""
        seen: set[tuple] = set()
        for name in domains if policy.reason(batch) is None else ():
            for plan, exit in product(self._expected_plans(name, batch, policy), self._expected_exits(name, batch)):
                key = plan, exit.layer, exit.vocabulary
                if key not in seen:
                    seen.add(key)
                    yield plan, exit

    def _expected_plans(self, domain: str, batch: int, policy: Policy) -> list[Plan]:
        assert self.profile is not None
        choice = self.profile.choice(domain)
        if self._has_ranks(choice, policy.temperature):
            return [NONE, *self.candidates(domain, choice, policy).table(batch).plans]
        policy.plans = self.plans(choice, policy)
        return [plan for plan in [policy.choose(batch)[0]] if len(plan)]

    def _expected_exits(self, domain: str, batch: int) -> list[Exit]:
        """The exit with the domain's head rows and, for several sequences, with those of all domains together."""
        trimmed = self.trimmed_exit(domain)
        if batch == 1 or trimmed.block is None:
            return [trimmed]
        return [trimmed, self.exit(trimmed.layer).with_head_rows(self.head_rows_of(None), [])]

    def trimmed_exit(self, domain: str) -> Exit:
        """The exit of a domain with the domain's head rows."""
        assert self.profile is not None
        exit = self.exit(self.profile.choice(domain).exit_layer)
        return exit.with_head_rows(self.head_rows_of(domain), []) if exit.block is not None else exit
