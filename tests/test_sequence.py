"""Statistics of sequences, with both kinds of backend, against a count kept token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec import Plan, Rules
from selfspec.backends.base import Step
from selfspec.backends.cuda.backend import append_tokens
from selfspec.backends.torch_backend import TorchBackend
from selfspec.batch import Batch
from selfspec.drafters import Drafters
from selfspec.governor.governor import MEASURING
from selfspec.history import Change, StepHistory, StepRecord
from selfspec.metrics import Metrics
from selfspec.results import stats_of
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request, Sequence
from selfspec.speculation.draft_tree import Draft
from selfspec.speculation.plan import NONE
from tests.scripted import IRREGULAR, ScriptedPolicy

OWN, DRAFTED, END = 5, 10, 100  # the model's token; a node's, plus the node; added to either where a sequence ends
VOCABULARY = 256
LENGTHS = {"prompt": 3, "most": 40}


@dataclass(frozen=True)
class Scripted:
    """A step: plan, reason, and for each sequence its last accepted node and the index of an end token or None."""

    plan: Plan
    reason: str | None
    outcomes: list[tuple[int, int | None]]

    def tokens(self, index: int) -> list[int]:
        last, end = self.outcomes[index]
        tokens = [DRAFTED + node for node in self.plan.path(last)[1:]] + [OWN]
        return [token + END * (index == end) for index, token in enumerate(tokens)]


@st.composite
def scripts(draw: st.DrawFn) -> list[Scripted]:
    """Steps of three sequences, enough for all of them to end."""
    kinds = [("none", MEASURING), ("none", "goodput"), ("none", "ood")]
    kinds += [(plan, None) for plan in ("chain:1", "chain:3", "tree:3,2", IRREGULAR)]
    made = []
    for _ in range(LENGTHS["most"]):
        name, reason = draw(st.sampled_from(kinds))
        plan = Plan.parse(name)
        lasts = [draw(st.integers(0, len(plan))) for _ in range(3)]
        ends = [draw(st.sampled_from([None] * 9 + list(range(plan.depths[last] + 1)))) for last in lasts]
        made.append(Scripted(plan, reason, list(zip(lasts, ends, strict=True))))
    return made


class NoCache:
    """Stands in for a cache: does nothing."""

    def reserve(self, sequence: Any, slots: int) -> None: ...
    def commit(self, sequences: Any, paths: Any) -> None: ...
    def abort(self, sequences: Any) -> None: ...


MODEL: Any = SimpleNamespace(device=torch.device("cpu"))


class HostBackend(TorchBackend):
    """The reference backend with a model and an exit that follow a script."""

    def __init__(self, script: list[Scripted], sequences: list[Sequence]) -> None:
        super().__init__(MODEL, NoCache())  # type: ignore[arg-type]
        self.script, self.all, self.done = script, sequences, 0

    def draft(self, sequences: list[Sequence], plan: Plan, exit: Any) -> Draft:
        tokens = torch.arange(len(plan) + 1).repeat(len(sequences), 1) + DRAFTED
        for index, sequence in enumerate(sequences):
            path, chosen = self._chosen(sequence)
            for node, token in zip(path[1:], chosen[:-1], strict=True):
                tokens[index, node:][:1] = token  # a plan that was truncated has fewer nodes
        return Draft(plan, tokens, hidden=tokens)

    def verify(self, sequences: list[Sequence], draft: Draft, exit: Any) -> torch.Tensor:
        logits = torch.zeros(len(sequences), len(self.script[self.done].plan) + 1, VOCABULARY)
        for index, sequence in enumerate(sequences):
            for node, token in zip(*self._chosen(sequence), strict=True):
                logits[index, node, token] = 1
        self.done += 1
        return logits

    def _logits(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def _chosen(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        step, index = self.script[self.done], self.all.index(sequence)
        return step.plan.path(step.outcomes[index][0]), step.tokens(index)


class OverlappingBackend(HostBackend):
    """A backend that follows a script and appends a step's tokens when it is read, after the next one was launched."""

    overlaps = True

    def launch(self, sequences: Seq[Sequence], record: StepRecord, exit: Any, before: Step | None) -> Step:
        self.done += 1
        return Step(list(sequences), record, [self.done - 1], 1e-3)

    def read(self, step: Step) -> None:
        scripted, launched = self.script[step.last_nodes[0]], step.sequences
        step.sequences, step.last_nodes = [sequence for sequence in launched if not sequence.is_finished], []
        for sequence in step.sequences:
            index = self.all.index(sequence)
            tokens, last = scripted.tokens(index), scripted.outcomes[index][0]
            step.last_nodes.append(append_tokens(sequence, tokens, scripted.plan, last))
        step.is_cost_sample = step.sequences == launched


class ScriptedBatch(Batch):
    """A batch whose plans and reasons come from a script."""

    def __init__(self, script: list[Scripted], lengths: list[int], backend: type[HostBackend] = HostBackend) -> None:
        params = SamplingParams(stop_token_ids=tuple(range(END, VOCABULARY)))
        prompt = [1] * LENGTHS["prompt"]
        self.sequences = [Sequence(prompt, 0, 0, len(prompt) + length, params=params) for length in lengths]
        self.request = Request(self.sequences, policy=ScriptedPolicy(["none"]))  # type: ignore[arg-type]
        self.script = script
        drafters = Drafters(MODEL, None, lambda *_: torch.empty(0))
        super().__init__(backend(script, self.sequences), None, drafters, Metrics())
        self.join(self.sequences)

    def _choose_plan(self) -> tuple[Plan, str | None]:
        step = self.script[self.backend.done]  # type: ignore[attr-defined]
        return step.plan, step.reason

    def _choose_governor(self) -> None: ...

    def _continues(self, step: Step) -> bool:
        return self.backend.done < len(self.script)  # type: ignore[attr-defined]

    def step(self) -> None:
        """Removes sequences that have ended, as the scheduler does."""
        super().step()
        for sequence in [sequence for sequence in self.running if sequence.is_finished]:
            self.leave([sequence])


class Observer:
    """Stands in for a governor: records the arguments of `observe`, of times only whether there was one."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.rules, self.may_score = Rules(), False
        self.timed: list[bool] = []

    def charge_step(self, *_: Any) -> None: ...

    def observe(self, plan: Plan, outcomes: Any, seconds: float | None, context: int, exit_nodes: Any) -> None:
        self.seen.append((plan, [None if skill is None else last for skill, last in outcomes], context))
        self.timed.append(seconds is not None)


@dataclass
class Counted:
    """The statistics of one sequence of a script, counted token by token."""

    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    steps: list[tuple[Plan, Plan, str | None]] = field(default_factory=list)  # plan, before it was truncated, reason
    starts: list[int] = field(default_factory=list)  # tokens before each step
    accepted: Counter[int] = field(default_factory=Counter)  # by depth
    reached: Counter[int] = field(default_factory=Counter)
    rejections: int = 0
    last: int = 0  # node, of the last step
    finish_reason: str | None = None

    def add(self, plan: Plan, chosen: Plan, reason: str | None, last: int, tokens: list[int], most: int) -> None:
        self.steps.append((plan, chosen, reason))
        self.starts.append(len(self.tokens))
        self.last = last
        for depth, token in enumerate(tokens):
            drafted = depth < plan.depths[last]
            self.tokens.append(token)
            self.origins.append("drafted" if drafted else "decoded" if len(plan) else "plain")
            self.accepted[depth] += drafted
            rejected = not drafted and len(plan.children[last]) > 0
            self.reached[depth] += drafted or rejected
            self.rejections += rejected
            if token >= END or len(self.tokens) == most:
                self.finish_reason = "stop" if token >= END else "length"
                return

    def changes(self) -> list[Change]:
        """Steps with another plan than before, or with another reason than measuring before."""
        found: list[Change] = []
        for step, (start, (_, chosen, reason)) in enumerate(zip(self.starts, self.steps, strict=True)):
            last = found[-1] if found else None
            if last is None or last.plan != str(chosen) or (last.reason == MEASURING and reason != MEASURING):
                found.append(Change(step, start, str(chosen), reason))
        return found

    def by_depth(self, counts: Counter[int]) -> list[int]:
        return [counts[depth] for depth in range(sum(count > 0 for count in self.reached.values()))]

    def end(self) -> int | None:
        """The last node, unless the sequence has ended."""
        return self.last if self.finish_reason is None else None

    def check(self, sequence: Sequence) -> None:
        assert sequence.tokens[LENGTHS["prompt"] :] == self.tokens
        assert sequence.finish_reason == self.finish_reason
        assert sequence.history.origins == self.origins
        assert sequence.history.steps == len(self.steps)
        assert sequence.history.drafted == sum(len(plan) for plan, _, _ in self.steps)
        assert sequence.history.accepted == self.accepted.total() == self.origins.count("drafted")
        assert sequence.history.rejections == self.rejections
        assert sequence.history.plans == Counter(plan for plan, _, _ in self.steps)
        assert list(sequence.history.plans) == list(dict.fromkeys(plan for plan, _, _ in self.steps)), (
            "the first of equals leads"
        )
        assert sequence.history.accepted_by_depth == self.by_depth(self.accepted)
        assert sequence.history.reached_by_depth == self.by_depth(self.reached)
        outcomes = sequence.history.outcomes
        assert sum(outcomes.values()) == sequence.history.steps and min(outcomes.values()) > 0
        reasons = [reason for _, _, reason in self.steps if reason not in (None, MEASURING)]
        assert sequence.disabled_reason == (reasons[0] if reasons else None)
        assert sequence.history.changes == self.changes()


def counted(script: list[Scripted], lengths: list[int], truncates: bool) -> list[list[Counted]]:
    """The statistics of each sequence after each step, until all have ended. A backend that does not overlap
    `truncates` plans to the tokens that are left of the longest sequence."""
    sequences, after_steps = [Counted() for _ in lengths], []
    for step in script:
        active = [index for index, sequence in enumerate(sequences) if sequence.finish_reason is None]
        if not active:
            break
        left = max(lengths[index] - len(sequences[index].tokens) for index in active)
        plan = step.plan.truncated(left - 1) if truncates else step.plan
        for index in active:
            path = [node for node in step.plan.path(step.outcomes[index][0]) if node <= len(plan)]
            tokens = step.tokens(index)[: len(path)]
            sequences[index].add(plan, step.plan, step.reason, path[-1], tokens, lengths[index])
        after_steps.append([Counted(**{name: _copy(value) for name, value in vars(one).items()}) for one in sequences])
    return after_steps


def _copy(value: Any) -> Any:
    return value.copy() if hasattr(value, "copy") else value


MANY = st.lists(st.integers(1, LENGTHS["most"]), min_size=3, max_size=3)


@pytest.mark.parametrize("backend", [HostBackend, OverlappingBackend])
@settings(max_examples=40)
@given(script=scripts(), lengths=MANY, every_step=st.booleans())
def test_statistics_equal_a_count_token_by_token(
    backend: type[HostBackend], script: list[Scripted], lengths: list[int], every_step: bool
) -> None:
    """Whether they are read after every step or only at the end."""
    batch, overlaps = ScriptedBatch(script, lengths, backend), backend.overlaps
    counts = counted(script, lengths, truncates=not overlaps)
    batch.governor = observer = Observer()  # type: ignore[assignment]
    steps = 0
    while batch.running:
        batch.step()
        steps += 1
        for sequence, of_sequence in zip(batch.sequences, counts[steps - 1], strict=True) if every_step else ():
            of_sequence.check(sequence)
    assert steps == len(counts)
    for before, after, seen in zip([[Counted()] * 3, *counts], counts, observer.seen, strict=False):
        active = [index for index, sequence in enumerate(before) if sequence.finish_reason is None]
        plan, ends = after[active[0]].steps[-1][0], [after[i].end() for i in active]
        context = LENGTHS["prompt"] + max(len(before[i].tokens) for i in active)  # when the step began
        assert seen == (plan, ends, context)
    ended = [
        sum(sequence.finish_reason is not None for sequence in all_of) for all_of in ([Counted()] * 3, *counts[:-1])
    ]
    with_ended = [overlaps and now > before for before, now in zip([0, *ended], ended, strict=False)]
    assert observer.timed == [not has_ended for has_ended in with_ended], (
        "times of steps with ended sequences are not typical"
    )
    for sequence, of_sequence in zip(batch.sequences, counts[-1], strict=True):
        of_sequence.check(sequence)
        stats = stats_of(sequence)
        reached = sum(sequence.history.reached_by_depth)
        assert stats.accept_rate == (sequence.history.accepted / reached if reached else 0)
        assert stats.plan == str(sequence.history.plans.most_common(1)[0][0])
    summary = batch.metrics.summary()
    assert (summary.cycles, summary.emissions) == (steps, sum(sequence.history.steps for sequence in batch.sequences))
    assert summary.tokens == sum(sequence.new_tokens for sequence in batch.sequences)


def test_an_end_below_a_copied_node_whose_token_the_exit_drafted_as_a_leaf_counts_once() -> None:
    plan, sequence = Plan.parse("tree:2,1+copy:4"), Sequence([1], 0, 0, max_length=4)
    leaf = next(node for node in range(plan.copied + 1, len(plan) + 1) if plan.is_leaf(node))
    for token in (5, 6, 7):
        sequence.append(token, drafted=True)
    sequence.history.add(StepRecord.of(plan, plan, None), leaf)
    assert plan.depths[leaf] == 2 and sequence.history.origins == ["drafted"] * 3
    assert sequence.history.accepted_by_depth == sequence.history.reached_by_depth == [1, 1, 1]


@pytest.mark.parametrize("backend", [HostBackend, OverlappingBackend])
def test_a_drafted_token_that_ends_the_sequence_is_followed_by_no_token(backend: type[HostBackend]) -> None:
    script = [Scripted(Plan.parse("chain:3"), None, [(2, None)]), Scripted(Plan.parse("chain:3"), None, [(2, 1)])]
    batch = ScriptedBatch(script, [40], backend)
    (sequence,) = batch.sequences
    while batch.running:
        batch.step()
    assert sequence.history.origins == ["drafted", "drafted", "decoded", "drafted", "drafted"]
    assert (sequence.history.accepted, sequence.history.rejections, sequence.history.drafted) == (4, 1, 6)
    assert sequence.history.outcomes == {(2, 3): 1, (2, 2): 1}
    assert (sequence.history.accepted_by_depth, sequence.history.reached_by_depth) == ([2, 2, 0], [2, 2, 1])


@pytest.mark.parametrize("backend", [HostBackend, OverlappingBackend])
def test_a_criterion_that_raises_fails_the_request(backend: type[HostBackend]) -> None:
    calls: list[int] = []

    def fails(prefix: torch.Tensor, _: Any) -> bool:
        calls.append(prefix.shape[1])
        return len(calls) > 3 and 1 // 0 > 0

    batch = ScriptedBatch([Scripted(Plan.parse("chain:1"), None, [(1, None)])] * 5, [40], backend)
    batch.request.criteria = (fails,)
    while batch.running:
        batch.step()
    assert isinstance(batch.request.error, ZeroDivisionError)
    assert batch.sequences[0].new_tokens == len(calls) == 4


def test_logits_that_are_not_finite_fail_the_request() -> None:
    sequences = [Sequence([1, 2], 0, index, 9) for index in range(2)]
    request = Request(sequences)
    sequences[0].append(-1, drafted=False)
    sequences[1].append(7, drafted=False)
    assert isinstance(request.error, ValueError) and "not finite" in str(request.error)
    assert [sequence.finish_reason for sequence in sequences] == ["error"] * 2
    assert [sequence.new_tokens for sequence in sequences] == [0, 0], "no tokens are appended after the failure"


def test_statistics_of_a_sequence_without_steps_are_zero() -> None:
    new = Sequence([1], 0, 0, 9)
    history = new.history
    assert (history.steps, history.drafted, history.accepted, history.rejections) == (0, 0, 0, 0)
    assert new.disabled_reason is None
    assert (history.origins, history.changes, history.accepted_by_depth, history.reached_by_depth) == ([], [], [], [])
    assert not history.plans and not history.outcomes and NONE not in history.plans


def test_origins_can_be_read_while_the_loop_adds_a_step() -> None:
    """The step has a record already and no last node yet."""
    sequence, record = Sequence([1], 0, 0, 9), StepRecord.of(NONE, NONE, "request")
    sequence.history.records += [record, record]
    sequence.history.last_nodes.append(0)
    assert sequence.history.origins == ["plain"]
    sequence.history.last_nodes.append(0)
    assert sequence.history.origins == ["plain", "plain"]


def test_statistics_can_be_read_while_the_loop_adds_a_step() -> None:
    history, plan = StepHistory(), Plan.parse("chain:2")
    record = StepRecord.of(plan, plan, None)
    history.add(record, 1)
    history.records.append(record)  # its last node follows
    assert (history.drafted, history.accepted, history.rejections) == (2, 1, 1)


def test_a_last_step_that_the_loop_adds_while_origins_are_read_marks_its_own_token() -> None:
    plan = Plan.parse("chain:2")
    record = StepRecord.of(plan, plan, None)

    class Growing(list):
        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            if history.drafted_end is None:  # the loop's thread ends the sequence with a drafted token
                history.drafted_end = 1
                history.add(record, 0)
            return found

    history = StepHistory(Growing([record]), [2])
    assert history.origins == ["drafted", "drafted", "decoded"]
    assert history.origins == ["drafted", "drafted", "decoded", "drafted"]


@pytest.mark.parametrize(
    ("new", "steps", "usual"),
    [(0, 0, 3), (12, 8, 1.5), (30, 10, 3), (50, 10, 3)],
    ids=["no step", "below the depth", "at the depth", "above the depth"],
)
def test_expected_tokens_of_a_step_are_the_mean_so_far_up_to_the_plans_depth(
    new: int, steps: int, usual: float
) -> None:
    sequence = Sequence([1], seed=0, sample_index=0, max_length=100, history=StepHistory(last_nodes=[0] * steps))
    sequence.tokens += [2] * new
    assert sequence.expected_tokens(Plan.parse("chain:2")) == usual
