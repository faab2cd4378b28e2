"""The interface that both backends implement, and the outcome of a step.

A backend executes passes and moves their results (KV, lengths, tokens). The caller decides which sequences decode
together, with which plan, and when the exit is scored.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from selfspec.cache.prefixes import PrefillKind
from selfspec.history import StepRecord
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan


@dataclass(eq=False)
class Step:
    """A step that was launched; after `Backend.read` also its outcome."""

    sequences: list[Sequence]
    record: StepRecord
    last_nodes: list[int] = field(default_factory=list)  # last accepted node of each sequence; after reading
    seconds: float = 0.0  # on the device, without time in callables; after reading
    is_cost_sample: bool = True  # `seconds` is the cost of this plan alone: the governor averages it
    reasons: dict[Sequence, str] = field(default_factory=dict)  # why a rule forbids drafting for a sequence
    costs: Any = None  # measured costs of batches of the kind that the batch had at the launch
    governor: Any = None  # which chose the plan and charged its budget; None: no governor did
    charge: float = 0.0  # plain steps that its launch charged to the governor's budget
    # Of each sequence, the deepest reached node that the exit drafted, or the root; after reading. Empty: `last_nodes`.
    exit_nodes: list[int] = field(default_factory=list)


class Backend(Protocol):
    """Executes prefill passes and steps of one batch: sequences that share an exit."""

    @property
    def overlaps(self) -> bool:
        """Whether the next step can be launched before this one is read."""
        ...

    @property
    def max_unfilled(self) -> int:
        """Plainly decoded tokens per sequence after which `fill_exit` must be called."""
        ...

    def slots_for(self, sequences: int) -> int:
        """Number of slots that a step of `sequences` sequences computes, idle ones included."""
        ...

    def step_options(self, sequences: Seq[Sequence]) -> Hashable:
        """A key of what steps of these sequences compute to choose tokens; their times are kept apart by it."""
        ...

    def prefill_kind(self, tokens: int) -> PrefillKind:
        """Returns the kind of prefill of a prompt of `tokens` tokens, which decides whose pages it can reuse."""
        ...

    def prefill(self, sequences: Seq[Sequence], exit: Exit | None) -> list[Sequence]:
        """Runs one pass over tokens of several prompts, or over one chunk of the first. Returns the sequences whose
        prompts are then in the cache, all but the last token."""
        ...

    def score_prompts(self, sequences: Seq[Sequence], exit: Exit) -> bool:
        """Compares exit and model at the last positions of prompts, before or after their first step. Returns whether a
        pass ran: none does for prompts that are too short or too long, or while another score is in flight."""
        ...

    def note_other_work(self) -> None:
        """Excludes work launched outside of steps from the next step's time."""
        ...

    def prompt_scores(self) -> dict[Sequence, tuple[float, int]]:
        """Returns, by sequence, the scores that have arrived since the last call: the share of positions at which the
        exit's best token is the model's, and the number of positions."""
        ...

    def capture_s(self, sequences: Seq[Sequence], plan: Plan, exit: Exit | None) -> float:
        """Seconds that `launch` will take, before it launches this step, to capture it as a graph; 0 if it is captured,
        or needs no capture."""
        ...

    def launch(self, sequences: Seq[Sequence], record: StepRecord, exit: Exit | None, in_flight: Step | None) -> Step:
        """Drafts, verifies, accepts and commits for all sequences; `in_flight` was launched and not read yet."""
        ...

    def read(self, step: Step) -> None:
        """Waits for the step, appends its tokens to sequences that have not ended, and fills in its outcome."""
        ...

    def fill_exit(self, sequences: Seq[Sequence], exit: Exit, score: bool, in_flight: Step | None) -> None:
        """Fills the exit block's KV for plainly decoded tokens; with `score` also scores drafts at some of them."""
        ...

    def unfilled(self, sequence: Sequence) -> int:
        """Returns how many of the sequence's last positions may lack the exit block's KV."""
        ...

    def exit_scores(self) -> list[tuple[Sequence, list[bool]]]:
        """Returns scores that have arrived since the last call: at each scored position of a sequence, whether the
        exit's best draft token is the decoded one."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that has left the batch. The caller returns its pages."""
        ...

    def suspend(self, sequence: Sequence) -> None:
        """Copies state that is only on the device to a sequence that will leave and join again; no step may be in
        flight."""
        ...

    def close(self) -> None:
        """Returns the device buffers of the batch, which has no sequences any more."""
        ...
