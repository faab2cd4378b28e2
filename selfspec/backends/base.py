"""What executes steps: the interface that the two backends share.

A backend runs passes and moves what follows from them (KV, lengths, tokens); which sequences decode together, with
which plan, and when the exit is scored, is decided by its caller.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from selfspec.sequence import Sequence, StepRecord
from selfspec.speculation.exit import Exit


@dataclass(eq=False)
class Step:
    """A step that was launched, and once it was read, its outcome."""

    sequences: list[Sequence]
    record: StepRecord
    last_nodes: list[int] = field(default_factory=list)  # the last accepted node of each sequence, once read
    seconds: float = 0.0  # on the device, once read; time in callables is not part of it
    wall_seconds: float = 0.0  # from the end of the step before, where that one was launched right before
    is_typical: bool = True  # nothing but this plan's own work was part of it, so its time tells what the plan costs
    is_late: bool = False  # the device had ended the step before when this one was launched
    reasons: dict[Sequence, str] = field(default_factory=dict)  # of sequences that a rule forbids to draft for


@dataclass(eq=False)
class ExitScores:
    """Which rank the model's own tokens would have had among an exit's drafts, for plainly decoded tokens."""

    sequences: list[Sequence]
    ranks: list[list[int]]
    offered: int  # ranks below this are told apart; a rank of `offered` is a miss


class Backend(Protocol):
    """Executes prefill passes and steps of one batch: sequences that share an exit."""

    @property
    def overlaps(self) -> bool:
        """Whether the next step can be launched before this one is read."""
        ...

    @property
    def max_unfilled(self) -> int:
        """Plainly decoded tokens per sequence that the exit's cache can be behind by."""
        ...

    def slots_for(self, sequences: int) -> int:
        """Slots that a step of so many sequences computes, idle ones included."""
        ...

    def prefill(self, sequences: Seq[Sequence], exit: Exit | None) -> list[Sequence]:
        """Runs one pass over prompt tokens: several short prompts, or one chunk of the first one. Returns the sequences
        whose prompts are in the cache then, but for their last token."""
        ...

    def score_prompts(self, sequences: Seq[Sequence], exit: Exit) -> None:
        """Compares exit and model at the last positions of prompts that were prefilled and not decoded yet."""
        ...

    def prompt_scores(self, wait: bool = False) -> dict[Sequence, tuple[float, int]]:
        """Scores that have arrived since the last call, or with `wait` all that are on their way: the share of
        positions at which the exit's best token is the model's, and how many positions that are."""
        ...

    def launch(self, sequences: Seq[Sequence], record: StepRecord, exit: Exit | None, before: Step | None) -> Step:
        """Drafts, verifies, accepts and commits for all sequences; `before` was launched and not read yet."""
        ...

    def read(self, step: Step) -> None:
        """Waits for the step, appends its tokens to the sequences that go on, and fills in its outcome."""
        ...

    def fill_exit(self, sequences: Seq[Sequence], exit: Exit, score: bool, before: Step | None) -> None:
        """Fills the exit block's KV for plainly decoded tokens and, if asked to, scores drafts at some of them."""
        ...

    def exit_scores(self) -> list[ExitScores]:
        """Scores that have arrived since the last call."""
        ...

    def release(self, sequence: Sequence) -> None:
        """The sequence has left the batch: its slot is free. Its pages are returned by the caller."""
        ...

    def suspend(self, sequence: Sequence) -> None:
        """Saves what only the device knows of a sequence that leaves the batch for a while; no step is in flight."""
        ...

    def close(self) -> None:
        """The batch is gone: returns what its sequences shared."""
        ...
