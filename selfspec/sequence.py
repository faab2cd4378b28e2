"""A sequence (one text in progress) and a request (the sequences of one call).

A sequence has its tokens, KV pages, sampling parameters and one record per step. A step only appends to these, because
the device may be waiting for the host; statistics are computed from the records when they are read. This module does
not import the scheduler or a backend.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from selfspec.cache.kv_cache import KVPages, SwappedPages
from selfspec.cache.prefixes import PageKeys
from selfspec.governor.acceptance import Skill
from selfspec.governor.copying import Copying
from selfspec.governor.governor import MEASURING, Change
from selfspec.governor.rules import NO_PROFILE
from selfspec.grammar import Grammar
from selfspec.logprobs import TokenLogprob, unpack_logprobs
from selfspec.processors import Processor, run_processors
from selfspec.progress import Progress
from selfspec.sampling import SamplingParams
from selfspec.speculation.exit_scoring import SequenceUnfilled
from selfspec.speculation.plan import Plan

if TYPE_CHECKING:
    from selfspec.drafters import Drafter
    from selfspec.governor.rules import Policy

Criterion = Callable[[torch.Tensor, Any], Any]  # (tokens [1, t], scores) -> whether the sequence ends here


@dataclass(frozen=True, eq=False)  # compared by identity, which makes counting fast
class StepRecord:
    """How a step was decided. Steps decided alike share one object."""

    plan: Plan
    chosen: Plan  # the plan before it was truncated to the tokens that are left
    reason: str | None  # why nothing was drafted; None if something was

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, plan: Plan, chosen: Plan, reason: str | None) -> StepRecord:
        return cls(plan, chosen, reason)


@dataclass(eq=False)
class Sequence:
    """One text in progress."""

    prompt: list[int]
    seed: int
    sample_index: int  # among the returned sequences of one prompt
    max_length: int  # prompt and new tokens together
    params: SamplingParams = field(default_factory=SamplingParams)
    request: Request = field(default_factory=lambda: Request([]), repr=False)
    grammar: Grammar | None = None  # of its new tokens
    parent: Sequence | None = None  # the first sample of the same prompt, whose prompt pages this one shares
    tokens: list[int] = field(default_factory=list)  # prompt and new tokens; KV of the last one is not written yet
    kv: KVPages = field(default_factory=KVPages)
    swapped: SwappedPages | None = None  # its pages while they are in host memory
    is_prefilled: bool = False  # all of the prompt but its last token is in the cache
    page_keys: PageKeys | None = None  # of its pages, by which other prompts find them; None: it shares none
    cached_tokens: int = 0  # of its prompt, whose pages were in the cache before
    prompt_kv: KVPages | None = None  # the prompt's pages, for samples that have not been admitted yet
    prompt_feature: torch.Tensor | None = None  # `previous_feature` at the end of the prompt, for other samples
    previous_feature: torch.Tensor | None = None  # [2 * hidden]: feature of the newest position with KV
    drafts: bool = True  # the rules allow drafting for it in the next step
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    elapsed_s: float = 0.0
    skill: Skill = field(default_factory=Skill)  # how well its drafts are accepted
    copying: Copying = field(default_factory=Copying)  # how much of its text repeats
    unfilled: SequenceUnfilled = field(default_factory=SequenceUnfilled)  # states of tokens that the exit's KV lacks
    records: list[StepRecord] = field(default_factory=list)  # one per step
    last_nodes: list[int] = field(default_factory=list)  # last accepted node of each step
    drafted_end: int | None = None  # index of the step whose drafted token ended the sequence
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the new tokens, if the request asks for them
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens from the second on
    # Computed from the first steps, and extended when statistics are read.
    _counts: Counter[tuple[StepRecord, int]] = field(default_factory=Counter, init=False)
    _origins: list[str] = field(default_factory=list, init=False)
    _steps_in_origins: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        return frozenset(self.params.stop_token_ids)

    @property
    def first_sample(self) -> Sequence:
        """The sample of its prompt that was prefilled: itself, or the one that it shares the prompt's pages with."""
        return self.parent or self

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def tokens_left(self) -> int:
        return self.max_length - len(self.tokens)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int, drafted: bool) -> None:
        """Appends the target's token and sets `finish_reason` if the sequence ends with it. `drafted`: a node carried
        it. Token -1 means that the logits were not finite: fails the request. Does nothing once the request failed."""
        if self.request.error is not None:
            return
        if token < 0:
            self.request.fail(
                ValueError(
                    f"the model's logits for token {len(self.tokens)} of the text are not finite: its weights, the "
                    "temperature or a logits processor overflow, or every token is banned"
                )
            )
            return
        self.tokens.append(token)
        if (self.request.criteria and self._meets_a_criterion()) or token in self.stop_tokens:
            self.finish_reason = self.finish_reason or "stop"
        elif len(self.tokens) >= self.max_length:
            self.finish_reason = "length"
        if drafted and self.finish_reason is not None:
            self.drafted_end = self.steps

    def _meets_a_criterion(self) -> bool:
        with self.request.callback():
            prefix = torch.tensor([self.tokens], device=self.request.device)
            met = [bool(torch.as_tensor(criterion(prefix, None)).any()) for criterion in self.request.criteria]
            return any(met)  # of a list, so that every criterion is called for every token
        return True  # a criterion raised

    def add_logprobs(self, packed: list[list[float]]) -> None:
        """Adds the log probabilities of the newest step's tokens; drops those of tokens after the sequence's end."""
        if self.request.logprobs is not None:
            new = self.tokens[len(self.prompt) + len(self.logprobs) :]
            self.logprobs += unpack_logprobs(packed, new, self.request.logprobs)

    def process(self, values: torch.Tensor) -> torch.Tensor:
        """Runs the request's processors on logits [1, V], then bans the tokens that its grammar forbids."""
        with self.request.callback():
            prefix = torch.tensor([self.tokens], device=values.device)
            values = run_processors(self.request.processors, prefix, values)
            if self.grammar is not None:
                values = self.grammar.apply(values, self.tokens)
        return values

    def forced(self, count: int) -> list[int]:
        """Returns up to `count` tokens that its grammar forces next, which copied nodes carry then."""
        if self.grammar is not None:
            with self.request.callback():
                tokens = self.grammar.forced(self.tokens)
                self.copying.add_forced(len(self.tokens), len(tokens))
                return tokens[:count]
        return []

    @property
    def was_ood(self) -> bool:
        return self.skill.was_ood

    @property
    def steps(self) -> int:
        return len(self.last_nodes)

    def expected_tokens(self, plan: Plan) -> float:
        """Expected tokens of a step with this plan: the mean of the steps so far, at most the plan's depth + 1."""
        return min(self.new_tokens / self.steps, plan.depth + 1) if self.steps else plan.depth + 1

    @property
    def drafted(self) -> int:
        return sum(len(plan) * times for plan, times in self.plans.items())

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def rejections(self) -> int:
        """Steps that ended because no child carried the target's token."""
        return sum(self.reached_by_depth) - self.accepted

    @property
    def plans(self) -> Counter[Plan]:
        """Number of steps by plan, in the order of first use."""
        plans: Counter[Plan] = Counter()
        for (record, _), times in self._counted().items():
            plans[record.plan] += times
        return plans

    @property
    def disabled_reason(self) -> str | None:
        """The first reason why a step drafted nothing; plain steps that only measure do not count. Without a profile it
        is `no_profile`, also where steps copy: no exit drafts."""
        reasons = (record.reason for record, _ in self._counted())
        first = next((reason for reason in reasons if reason not in (None, MEASURING)), None)
        policy = self.request.policy
        return NO_PROFILE if policy is not None and policy.only_copies and first != "processor" else first

    @property
    def outcomes(self) -> Counter[tuple[int, int]]:
        """Number of steps by depths accepted and depths reached: one more if the last node had children, which were all
        rejected."""
        outcomes: Counter[tuple[int, int]] = Counter()
        for (record, last), times in self._counted().items():
            accepted = record.plan.depths[last]
            outcomes[accepted, accepted + (not record.plan.is_leaf(last))] += times
        if self._has_drafted_end:  # the step's last token was drafted too: a child of the last node carried it
            accepted = self.records[-1].plan.depths[self.last_nodes[-1]]
            outcomes -= Counter({(accepted, accepted + 1): 1})
            outcomes[accepted + 1, accepted + 1] += 1
        return outcomes

    @property
    def accepted_by_depth(self) -> list[int]:
        return self._by_depth(0)

    @property
    def reached_by_depth(self) -> list[int]:
        """Steps that reached each depth: they accepted or rejected nodes there."""
        return self._by_depth(1)

    @property
    def origins(self) -> list[str]:
        """For every new token "drafted", "decoded" (the target's own token of a step that drafted) or "plain". Computed
        once per step, since streams read it after every step."""
        steps = self.steps  # the loop may add a step meanwhile, first its record and then its last node
        new = slice(self._steps_in_origins, steps)
        for record, last in zip(self.records[new], self.last_nodes[new], strict=True):
            self._origins += ["drafted"] * record.plan.depths[last] + ["decoded" if len(record.plan) else "plain"]
        self._steps_in_origins = steps
        if self._has_drafted_end:
            self._origins[-1] = "drafted"
        return self._origins

    @property
    def changes(self) -> list[Change]:
        """Changes of plan, the first plan included, and changes from measuring to another reason for plain steps."""
        changes: list[Change] = []
        before, tokens = None, 0
        for step, (record, last) in enumerate(zip(self.records, self.last_nodes, strict=True)):
            if record is not before:
                measured = bool(changes) and changes[-1].reason == MEASURING != record.reason
                if not changes or measured or changes[-1].plan != str(record.chosen):
                    changes.append(Change(step, tokens, str(record.chosen), record.reason))
            before, tokens = record, tokens + record.plan.depths[last] + 1
        return changes

    @property
    def _has_drafted_end(self) -> bool:
        """Whether a drafted token ended the sequence, in a step that was recorded: one that failed is not."""
        return self.drafted_end is not None and self.drafted_end < self.steps

    def _counted(self) -> Counter[tuple[StepRecord, int]]:
        """Number of steps by record and last node."""
        start = self._counts.total()
        if start < self.steps:
            self._counts.update(zip(self.records[start:], self.last_nodes[start:], strict=True))
        return self._counts

    def _by_depth(self, which: int) -> list[int]:
        """Number of steps that accepted (`which` 0) or reached (1) each depth."""
        outcomes = self.outcomes
        deepest = max((reached for _, reached in outcomes), default=0)
        return [sum(times for outcome, times in outcomes.items() if outcome[which] > depth) for depth in range(deepest)]


@dataclass(eq=False)
class Request:
    """One call: its sequences, its callables, and the drafter of its sequences."""

    sequences: list[Sequence]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()
    policy: Policy | None = None  # None: plain decoding
    drafter: Drafter | None = None  # domain, exit and plans; None: plain decoding
    find_drafter: Callable[[], Drafter | None] = lambda: None  # called by the loop before the request is admitted
    is_prepared: bool = False  # `find_drafter` was called
    rejection: bool = False  # `acceptance="rejection"`
    logprobs: int | None = None  # likely tokens listed beside each new token's log probability; None: not computed
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    callback_s: float = 0.0  # seconds in processors and criteria, which steps are not charged for
    error: BaseException | None = None
    is_cancelled: bool = False
    progress: Progress = field(default_factory=Progress)
    uses_host: bool = field(init=False)  # the host takes part in its steps: it has callables or a grammar

    def __post_init__(self) -> None:
        self.uses_host = bool(self.processors) or any(sequence.grammar is not None for sequence in self.sequences)
        for sequence in self.sequences:
            sequence.request = self

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def prepare(self) -> None:
        """Finds the drafter, once. Runs passes over the prompts, so only the loop's thread may call it."""
        if not self.is_prepared:
            self.draft_with(self.find_drafter())
            self.is_prepared = True

    def draft_with(self, drafter: Drafter | None) -> None:
        """Sets the drafter; sequences whose prompts are unlike every domain begin with the skill of such texts."""
        self.drafter = drafter
        unfamiliar = () if drafter is None else drafter.unfamiliar
        for prompt, is_unfamiliar in zip(self.first_samples, unfamiliar, strict=False):
            for sequence in self.sequences if is_unfamiliar else ():
                if sequence.first_sample is prompt:
                    sequence.skill.begin_unfamiliar()

    @property
    def first_samples(self) -> list[Sequence]:
        """One sequence for each prompt."""
        return [sequence for sequence in self.sequences if sequence.parent is None]

    def finish(self, reason: str) -> None:
        for sequence in self.sequences:
            sequence.finish_reason = sequence.finish_reason or reason

    def fail(self, error: BaseException) -> None:
        """Ends all sequences with "error"; the call that made the request raises the first error given."""
        self.error = self.error or error
        for sequence in self.sequences:
            sequence.finish_reason = "error"

    @contextmanager
    def callback(self) -> Iterator[None]:
        """Runs the user's callables: adds the time of its block to `callback_s`, and fails the request with any error
        raised in it."""
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.fail(error)
        finally:
            self.callback_s += time.perf_counter() - started
