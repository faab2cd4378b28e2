"""Compiles and captures steps and prefill passes before the first request needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from selfspec.backends.cuda.decoder import head_logits
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.kernel_prefill import MAX_TOKENS, groups_per_pass, pass_size, sizes_to_capture
from selfspec.backends.cuda.slots import StepOptions, bucket
from selfspec.backends.cuda.step import DeviceStep
from selfspec.profiles.router import EMBEDDED_TOKENS
from selfspec.sampling import SamplingParams
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan


class ExpectedStep(NamedTuple):
    """A step that requests are expected to need."""

    sequences: int  # number of sequences
    plan: Plan
    exit: Exit | None
    params: SamplingParams
    masks: bool = False  # whether it is a masked step, of sequences with grammars


class WarmUp:
    """Captures steps and prefill passes before requests need them. Takes slot buffers for them and gives them back."""

    def __init__(self, graphs: Graphs, longest: int, max_scored_batch: int) -> None:
        self.graphs = graphs
        self.longest = longest  # tokens that sequences are expected to reach
        self.max_scored_batch = max_scored_batch  # sequences: in larger batches the exit is not scored on prompts

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Within this block `prepare` and `prepare_prompts` only compile kernels, all in parallel; waits for them at
        the end of the block. Does nothing for interpreted kernels."""
        if not self.graphs.max_kernel_prompt:
            yield
            return
        with self.graphs.captured.compiler.compiling():
            yield

    def prepare(self, step: ExpectedStep, fills: bool = True) -> None:
        """Captures a step and, if it is plain and has an exit, the pass that scores the exit on prompts and, with
        `fills`, those that fill the exit's KV, with and without scoring drafts."""
        graphs, exit, options = self.graphs, step.exit, StepOptions.of([step.params])
        size, buffers = bucket(step.sequences), graphs.take_buffers()
        try:
            parts = DeviceStep.masked_parts(step.plan) if step.masks else ()
            masked = replace(options, grammar_masks=step.masks)
            graphs.step(buffers, size, step.plan, exit, masked, self.longest, *parts)
            if exit is None or len(step.plan):
                return
            for scores in (False, True) if fills else ():
                graphs.exit_fill(buffers, size, exit, options, self.longest, scores)
            if size // 2 < self.max_scored_batch:  # more than size // 2 sequences use `size` slots
                graphs.prompt_score(buffers, size, exit, self.longest)
        finally:
            graphs.give_back(buffers)

    @property
    def compiles(self) -> bool:
        """True within `compiling`, unless kernels are interpreted."""
        return self.graphs.captured.compiler.only_compiles

    def compile_logprobs(self) -> None:
        """Within `compiling`, compiles the kernels of log probabilities for all numbers of rows in a tile; elsewhere
        does nothing."""
        graphs, hidden = self.graphs, self.graphs.model.config.hidden_size
        for rows in (8, 16, 32, 64) if self.compiles else ():
            states = torch.empty(rows, hidden, dtype=graphs.model.dtype, device=graphs.model.device)
            graphs.captured.compiler.compile(partial(head_logits, graphs.model, states))

    def prepare_first(self, step: ExpectedStep, prompts: Sequence[Sequence[int]], router_layer: int | None) -> None:
        """Captures the passes that route, prefill and score these prompts, and the plain step after them. If the
        prompts need several passes of one kind, captures only the first. Captures no prefill pass of PyTorch
        operations."""
        graphs = self.graphs
        short = [len(prompt) - 1 for prompt in prompts if 1 < len(prompt) <= graphs.max_kernel_prompt + 1]
        short = [min(length, MAX_TOKENS) for length in short]
        if router_layer is not None:
            ends = [min(len(prompt), EMBEDDED_TOKENS) for prompt in prompts]
            graphs.prompt_embedding(_first_pass(ends), router_layer)
        if short:
            graphs.kernel_prefill(step.exit, _first_pass(short))
        self.prepare(step, fills=False)

    def prepare_prompts(self, exit: Exit | None, batch: int, router_layer: int | None) -> None:
        """Captures the passes of decode kernels over up to `batch` short prompts, and over parts of one longer prompt;
        with `router_layer` also the passes that embed prompts for the router. The largest passes come first: otherwise
        scratch buffers grow, and graphs captured before keep the smaller ones."""
        graphs = self.graphs
        if not graphs.max_kernel_prompt:
            return
        sizes = sizes_to_capture(batch, min(graphs.max_kernel_prompt, bucket(graphs.context)))
        for lengths, end in sorted(sizes, key=lambda size: prod(pass_size(*size)), reverse=True):
            graphs.kernel_prefill(exit, lengths, end)
            if router_layer is not None and max(end, *lengths) <= EMBEDDED_TOKENS:
                graphs.prompt_embedding(lengths, router_layer)


def _first_pass(lengths: Sequence[int]) -> Sequence[int]:
    """Returns the lengths of the first prompts, as many as fit into one pass."""
    return lengths[: next(groups_per_pass(lengths)).stop]
