"""A sequence (one text in progress) and a request (the sequences of one call).

A sequence has its tokens, KV pages, sampling parameters and the history of its steps. This module does not import the
scheduler or a backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from selfspec.cache.kv_cache import KVPages, SwappedPages
from selfspec.cache.prefixes import PageKeys
from selfspec.governor.acceptance import Skill
from selfspec.governor.copying import Copying
from selfspec.governor.rules import NO_PROFILE
from selfspec.grammar import Grammar
from selfspec.history import StepHistory
from selfspec.logprobs import TokenLogprob, unpack_logprobs
from selfspec.processors import Processor, run_processors
from selfspec.sampling import SamplingParams
from selfspec.speculation.exit import Exit
from selfspec.speculation.exit_scoring import SequenceUnfilled
from selfspec.speculation.plan import Plan

if TYPE_CHECKING:
    from selfspec.drafters import Drafter
    from selfspec.governor.rules import Policy

Criterion = Callable[[torch.Tensor, Any], Any]  # (tokens [1, t], scores) -> whether the sequence ends here


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
    drafts: bool = True  # whether the rules allow drafting for it in the next step
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    elapsed_s: float = 0.0  # seconds in prefill and steps
    skill: Skill = field(default_factory=Skill)  # how well its drafts are accepted
    copying: Copying = field(default_factory=Copying)  # how often copied nodes would be accepted
    unfilled: SequenceUnfilled = field(default_factory=SequenceUnfilled)  # states of positions without the exit's KV
    history: StepHistory = field(default_factory=StepHistory)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the new tokens, if the request asks for them
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens from the second on

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        return frozenset(self.params.stop_token_ids)

    @cached_property
    def prompt_tokens(self) -> frozenset[int]:
        """The different tokens of the prompt."""
        return frozenset(self.prompt)

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
        """Appends the model's token and sets `finish_reason` if the sequence ends with it. `drafted`: a node carried
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
            self.history.drafted_end = self.history.steps

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
        """Returns up to `count` tokens that its grammar forces next, which copied nodes carry then; none where the
        rules forbid drafting."""
        if self.grammar is not None and self.drafts:
            with self.request.callback():
                tokens = self.grammar.forced(self.tokens)
                self.copying.add_forced(len(self.tokens), len(tokens))
                return tokens[:count]
        return []

    def expected_tokens(self, plan: Plan) -> float:
        """Expected tokens of a step with this plan: the mean of the steps so far, at most the plan's depth + 1."""
        steps = self.history.steps
        return min(self.new_tokens / steps, plan.depth + 1) if steps else plan.depth + 1

    @property
    def disabled_reason(self) -> str | None:
        """The first reason why a step drafted nothing, other than measuring. Without a profile it is `no_profile`, also
        where steps draft copied nodes: no exit drafts."""
        first, policy = self.history.first_reason, self.request.policy
        return NO_PROFILE if policy is not None and policy.only_copies and first != "processor" else first


class Progress:
    """Number of new tokens of a request's first sequence, and whether the request has ended; shared between the loop's
    thread and the threads that wait for the request."""

    def __init__(self) -> None:
        self._steps: SimpleQueue[None] = SimpleQueue()  # wakes the thread that follows every step
        self._running = Lock()  # held until the request has ended
        self._running.acquire()
        self._every_step = False  # a thread follows every step, not only the end
        self.new_tokens = 0
        self.is_over = False
        self.listener: Callable[[], None] | None = None  # called by the loop after each step and at the end

    def update(self, new_tokens: int) -> None:
        """Called by the loop after each step; wakes the thread that follows every step."""
        if self._every_step:
            self.new_tokens = new_tokens
            self._steps.put(None)
        if self.listener is not None:
            self.listener()

    def end(self, new_tokens: int) -> None:
        """Called by the loop when the request has ended and its pages are free; wakes all waiting threads."""
        was_over, self.new_tokens, self.is_over = self.is_over, new_tokens, True
        if not was_over:
            self._running.release()
        self._steps.put(None)
        if self.listener is not None:
            self.listener()

    def follow(self, every_step: bool) -> Iterator[int]:
        """Blocks until the request has ended. With `every_step`, which one thread may ask for, yields the number of new
        tokens each time it grew."""
        seen, self._every_step = 0, every_step
        while every_step and not self.is_over:
            self._steps.get()
            if self.new_tokens > seen:
                seen = self.new_tokens
                yield seen
        self.wait_until_over()
        if every_step and self.new_tokens > seen:
            yield self.new_tokens

    def wait_until_over(self) -> None:
        if not self.is_over:
            with self._running:  # released at once, for other waiting threads
                pass


@dataclass(eq=False)
class Request:
    """One call: its sequences, its callables, and the drafter of its sequences."""

    sequences: list[Sequence]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()
    policy: Policy | None = None  # None: plain decoding
    drafter: Drafter | None = None  # domain, exit and plans; None: plain decoding
    find_drafter: Callable[[], Drafter | None] | None = None  # called by the loop before the request is admitted
    rejection: bool = False  # `acceptance="rejection"`
    logprobs: int | None = None  # likely tokens listed beside each new token's log probability; None: not computed
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    callback_s: float = 0.0  # seconds in callables; costs of steps leave out those that the device waits for
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

    @property
    def exit(self) -> Exit | None:
        """The exit of its drafter; None: it drafts nothing, or only copied tokens."""
        return None if self.drafter is None else self.drafter.exit

    def prepare(self) -> None:
        """Finds the drafter, once. Runs passes over the prompts, so only the loop's thread may call it."""
        if self.find_drafter is not None:
            self.draft_with(self.find_drafter())
            self.find_drafter = None

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
