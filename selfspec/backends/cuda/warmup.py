"""Compiles and captures what requests will replay, before the first of them arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from selfspec.backends.cuda.graphs import Graphs, bucket
from selfspec.backends.cuda.short_prefill import passes_up_to
from selfspec.backends.cuda.slots import Features
from selfspec.profiles.router import MARKED
from selfspec.sampling import SamplingParams
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan


class ExpectedStep(NamedTuple):
    """A step that requests are expected to need."""

    sequences: int
    plan: Plan
    exit: Exit | None
    params: SamplingParams


class WarmUp:
    """Captures steps and prefill passes on a table of their own batch."""

    def __init__(self, graphs: Graphs, longest: int, most_scored: int) -> None:
        self.graphs, self.longest = graphs, longest
        self.most_scored = most_scored  # prompts of batches up to this size are scored

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What is prepared within it is only compiled, all of it side by side."""
        if not self.graphs.short_prompt:  # interpreted kernels are not compiled
            yield
            return
        with self.graphs.compiler.together():
            yield

    def prepare(self, step: ExpectedStep) -> None:
        """One step and, with a plain one, the passes that fill and score the exit's KV and that score prompts."""
        graphs, exit, features = self.graphs, step.exit, Features.of([step.params])
        size, table = bucket(step.sequences), graphs.take_table()
        try:
            graphs.step(table, size, step.plan, exit, features, self.longest)
            if exit is None or len(step.plan):
                return
            for scores in (False, True):
                graphs.exit_fill(table, size, exit, features, self.longest, scores)
            if size // 2 < self.most_scored:
                graphs.prompt_score(table, size, exit, self.longest)
        finally:
            graphs.give_back(table)

    def prepare_prompts(self, exit: Exit | None, batch: int, mark_layer: int | None) -> None:
        """Passes over up to `batch` short prompts, or a longer one alone; with `mark_layer` also those that route."""
        graphs = self.graphs
        if not graphs.short_prompt:
            return
        for lengths in passes_up_to(batch, min(graphs.short_prompt, 1 << (graphs.context - 1).bit_length())):
            graphs.prompts(exit, lengths)
            if mark_layer is not None and max(lengths) <= MARKED:
                graphs.marking(lengths, mark_layer)
