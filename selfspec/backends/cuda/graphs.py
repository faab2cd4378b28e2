"""Captures steps and prefill passes as CUDA graphs on first use, and keeps them for all batches.

Also owns the other memory that outlives a batch: slot buffers, scratch, pinned memory for results, and the page that
idle slots write to. `backend.py` decides which graph to replay and reads its results.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from selfspec.backends.cuda.compiler import Compiler
from selfspec.backends.cuda.decoder import FusedDecoder, Scratch
from selfspec.backends.cuda.exit import draft_head_capacity
from selfspec.backends.cuda.exit_scoring import ExitFill
from selfspec.backends.cuda.kernel_prefill import (
    KernelPrefill,
    PromptEmbedding,
    PromptPart,
    groups_per_pass,
    longest_kernel_prompt,
    pass_size,
    segments,
)
from selfspec.backends.cuda.prompt_scoring import PromptScore
from selfspec.backends.cuda.readback import Readback, Readbacks
from selfspec.backends.cuda.slots import SlotBuffers, Slots, StepOptions, bucket
from selfspec.backends.cuda.step import DeviceStep
from selfspec.backends.cuda.torch_prefill import MIN_ROWS, TorchPrefill
from selfspec.cache.kv_cache import PAGE_SIZE, Cache, CacheFull
from selfspec.models.decoder import Decoder
from selfspec.profiles.router import EMBEDDED_TOKENS, Embedded, embed_prompts
from selfspec.speculation.exit import Exit, exit_key
from selfspec.speculation.plan import MAX_NODES, SPARE_POSITIONS, Plan

MAX_GRAPHS = 512  # steps and passes that are kept; the least recently used one is dropped first
MIN_CONTEXT = 8192  # positions that every graph covers at least, so that most sequences share graphs

Launch = Callable[[], None]  # launches a step, a part of one, or a pass, without waiting for it


class GraphCache:
    """The MAX_GRAPHS most recently used steps and passes, by key, each with its captured launches. Keeps each step or
    pass, whose tensors its graphs use, as long as the graphs."""

    def __init__(self, device: torch.device) -> None:
        self.compiler = Compiler()
        self.entries: OrderedDict[tuple, tuple] = OrderedDict()  # key -> (step or pass, launch, ...); oldest use first
        self.captures = 0  # steps and passes captured so far; stays 0 without a GPU
        self.shortest_s = 0.0  # seconds of the fastest capture of a step; 0 before the first
        self._device = device
        self._pool: Any = None  # memory pool that all graphs share
        self._stream: torch.cuda.Stream | None = None  # graphs are captured on it

    def find(self, key: tuple, buffers: SlotBuffers | None, build: Callable[[], Any], *launches: str) -> tuple:
        """Returns the step or pass of `key`, followed by its captured launches. On first use calls `build` and captures
        the methods of its result that `launches` names. `buffers`: the slots that they run on; None: none. Within
        `Compiler.compiling` only compiles their kernels and returns launches that do nothing."""
        found = self.entries.get(key)
        if found is None and self.compiler.only_compiles:
            made = build()
            self.compiler.compile(*(getattr(made, launch) for launch in launches))
            return (made, *(lambda: None for _ in launches))
        if found is None:
            if len(self.entries) >= MAX_GRAPHS:
                self._evict()
            captures, started = self.captures, time.perf_counter()
            made = build()
            found = self.entries[key] = made, *self._capture(buffers, [getattr(made, launch) for launch in launches])
            if self.captures > captures and key[0] == "step":
                seconds = time.perf_counter() - started
                self.shortest_s = min(self.shortest_s or seconds, seconds)
        self.entries.move_to_end(key)
        return found

    def seconds_to_capture(self, key: tuple) -> float:
        """Returns the seconds that capturing the step of `key` will take if its kernels are compiled: those of the
        fastest capture of a step so far. 0 if it is captured, before any capture, and without a GPU."""
        return 0.0 if key in self.entries else self.shortest_s

    def _evict(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a graph may not be running when it is destroyed
        self.entries.popitem(last=False)

    def _capture(self, buffers: SlotBuffers | None, launches: Sequence[Launch]) -> Sequence[Launch]:
        """Compiles the kernels of the launches, captures each launch as a graph, and returns the replays of the graphs.

        Compiling also runs the launches' PyTorch operations: a capture does not allow what their first run sets up.
        Each graph is replayed once, as a first replay takes 0.3 ms longer. All of this happens with all slots idle,
        whose values are then restored. Work launched before and after stays in order on the stream. Without a GPU
        returns the launches themselves.
        """
        if self._device.type != "cuda":
            return launches
        self.captures += 1
        saved = [] if buffers is None else buffers.save_and_idle()
        try:
            self.compiler.compile(*launches)
            if self._stream is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
            graphs = [torch.cuda.CUDAGraph() for _ in launches]
            for graph, launch in zip(graphs, launches, strict=True):
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    launch()
            for graph in graphs:
                graph.replay()
        finally:
            for tensor, before in saved:
                tensor.copy_(before)
        return [graph.replay for graph in graphs]


class Graphs:
    """The steps and prefill passes of one model, built and captured on first use."""

    def __init__(self, model: Decoder, cache: Cache, context: int, max_batch: int) -> None:
        self.model, self.cache, self.context = model, cache, context  # context: the most tokens a sequence may have
        self.capacity = bucket(max_batch)  # slots of a batch
        self.scratch, self.readbacks = Scratch(model.device), Readbacks()
        # Tokens of the longest prompt that the decode kernels prefill; 0 for interpreted kernels, which are too slow.
        self.max_kernel_prompt = longest_kernel_prompt(model) if model.device.type == "cuda" else 0
        self.step_class: Callable[..., DeviceStep] = DeviceStep  # benchmarks replace it by a subclass
        self.captured = GraphCache(model.device)
        self._buffers: list[SlotBuffers] = []
        self._free_buffers: list[SlotBuffers] = []
        self._idle_kv = cache.open()
        cache.reserve(self._idle_kv, MAX_NODES + 1)

    @property
    def idle_page(self) -> int:
        """A page that belongs to no sequence: idle slots and padding write to it."""
        return self._idle_kv.pages[0]

    def take_buffers(self) -> SlotBuffers:
        """Returns slot buffers for a batch: free ones, for which steps are captured already, or new ones."""
        if self._free_buffers:
            # Those with the lowest number: most steps are captured for them.
            buffers = min(self._free_buffers, key=lambda buffers: buffers.number)
            self._free_buffers.remove(buffers)
            return buffers
        pages = -(-(self.context + SPARE_POSITIONS) // PAGE_SIZE)
        self._buffers.append(SlotBuffers(len(self._buffers), self.model, self.capacity, pages, self.idle_page))
        return self._buffers[-1]

    def give_back(self, buffers: SlotBuffers) -> None:
        """Makes all slots idle and keeps the buffers for a later batch."""
        buffers.slots.idle()
        self._free_buffers.append(buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of slots, scratch and captured steps, without the memory that CUDA keeps for graphs."""
        tensors = [tensor for made, *_ in list(self.captured.entries.values()) for tensor in made.tensors]
        tensors += [tensor for buffers in self._buffers for tensor in buffers.tensors]
        return self.scratch.nbytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # Steps

    def step(
        self, buffers: SlotBuffers, count: int, plan: Plan, exit: Exit | None, options: StepOptions, longest: int,
        *parts: str,
    ) -> tuple:  # fmt: skip
        """Returns the step of the first `count` slots with this plan, for sequences of up to `longest` tokens, followed
        by the launch of the whole step, or of each of its `parts`."""
        max_context = self._max_context(longest)

        def build() -> DeviceStep:
            slots = buffers.slots.first(count)
            if options.processes:
                _ = buffers.slots.bias, buffers.slots.counts  # allocated before the graph is captured
            decoder = self._decoder(slots, max_context)
            return self.step_class(decoder, slots, plan, None if exit is None else buffers.exit(exit, count), options)

        key = self.step_key(buffers, count, plan, exit, options, longest, *parts)
        return self.captured.find(key, buffers, build, *(parts or ("launch",)))

    def step_key(
        self, buffers: SlotBuffers, count: int, plan: Plan, exit: Exit | None, options: StepOptions, longest: int,
        *parts: str,
    ) -> tuple:  # fmt: skip
        """Returns the key under which `captured` keeps the step with these settings."""
        exits, max_context = _drafting_key(exit, self.model), self._max_context(longest)
        return "step", parts, buffers.number, count, plan, exits, options, max_context

    def exit_fill(
        self, buffers: SlotBuffers, count: int, exit: Exit, options: StepOptions, longest: int, scores: bool
    ) -> tuple[ExitFill, Launch]:
        """Returns the pass that fills the exit's KV at the unfilled positions of the first `count` slots and, with
        `scores`, drafts at the oldest of them, for sequences of up to `longest` tokens; and its launch."""
        drafting = (_drafting_key(exit, self.model), options) if scores else None
        slots, max_context = buffers.slots.first(count), self._max_context(longest)
        key = ("fill", buffers.number, count, max_context, exit_key(exit), drafting)

        def build() -> ExitFill:
            return ExitFill(self._decoder(slots, max_context), slots, buffers.exit(exit, count), options, scores)

        return self.captured.find(key, buffers, build, "launch")

    def prompt_score(self, buffers: SlotBuffers, count: int, exit: Exit, longest: int) -> tuple[PromptScore, Launch]:
        """Returns the pass that compares exit and model at the last positions of the prompts in the first `count`
        slots, for sequences of up to `longest` tokens; and its launch."""
        slots, max_context = buffers.slots.first(count), self._max_context(longest)
        key = ("prompt score", buffers.number, count, max_context, exit_key(exit))

        def build() -> PromptScore:
            return PromptScore(self._decoder(slots, max_context), slots, exit, buffers.prompt_end(count))

        return self.captured.find(key, buffers, build, "launch")

    def _decoder(self, slots: Slots, max_context: int) -> FusedDecoder:
        return FusedDecoder(self.model, self.cache, self.scratch, slots, max_context)

    def _max_context(self, longest: int) -> int:
        """Returns the positions that a graph for sequences of up to `longest` tokens covers: a power of two, so that
        few sizes are captured, plus SPARE_POSITIONS for nodes."""
        return min(bucket(longest, MIN_CONTEXT), bucket(self.context)) + SPARE_POSITIONS

    # Prefill

    def torch_prefill(
        self, exit: Exit | None, count: int, end: int, keeps_states: bool = False
    ) -> tuple[TorchPrefill, Launch]:
        """Returns the pass of PyTorch operations over a chunk of `count` prompt tokens that ends before position `end`,
        and its launch. `keeps_states`: see `TorchPrefill`."""
        rows = bucket(count, MIN_ROWS)
        max_context = bucket(end - count + rows, PAGE_SIZE)
        key = ("torch prefill", rows, max_context, keeps_states, exit_key(exit))
        parts = self.model, self.cache, exit, rows, max_context, self.idle_page, keeps_states
        return self.captured.find(key, None, lambda: TorchPrefill(*parts), "launch")

    def kernel_prefill(
        self, exit: Exit | None, lengths: Sequence[int], end: int = 0, keeps_states: bool = False
    ) -> tuple[KernelPrefill, Launch]:
        """Returns the pass of decode kernels over the next `lengths` tokens of some prompts, and its launch. `end`: see
        `pass_size`; `keeps_states`: see `KernelPrefill`."""
        size, parts = pass_size(lengths, end), (self.model, self.cache, self.scratch)
        key = ("kernel prefill", *size, keeps_states, exit_key(exit))
        build = partial(KernelPrefill, *parts, *size, self.idle_page, exit=exit, keeps_states=keeps_states)
        return self.captured.find(key, None, build, "launch")

    def prompt_embedding(self, lengths: Sequence[int], layer: int) -> tuple[PromptEmbedding, Launch]:
        """Returns the pass that sums the states of prompts of these lengths after `layer` layers, for the router, and
        its launch."""
        size, parts = pass_size(lengths), (self.model, self.cache, self.scratch)
        key = ("prompt embedding", *size, layer)
        build = partial(PromptEmbedding, *parts, *size, self.idle_page, layer=layer)
        return self.captured.find(key, None, build, "launch")

    @torch.inference_mode()
    def embed_prompts(self, prompts: Sequence[Sequence[int]], layer: int) -> Embedded:
        """Launches the passes that embed prompts for the router, from up to EMBEDDED_TOKENS last tokens of each. Takes
        cache pages for the KV of each pass and returns them; raises CacheFull if too few are free."""
        if self.max_kernel_prompt < EMBEDDED_TOKENS:
            return embed_prompts(self.model, self.cache, prompts, layer)
        ends = [prompt[-EMBEDDED_TOKENS:] for prompt in prompts]
        lengths = list(map(len, ends))
        groups = [ends[group.start : group.stop] for group in groups_per_pass(lengths)]
        sent: list[tuple[Readback, Sequence[Sequence[int]]]] = []
        try:
            for group in groups:
                sent.append((self._send_segment_sums(group, layer), group))
        except CacheFull:
            for readback, _ in sent:
                self.readbacks.give_back(readback)
            raise

        def read() -> torch.Tensor:
            sums = []
            for readback, group in sent:
                sums.append(readback.array()[: sum(segments(len(end)) for end in group)].copy())
                self.readbacks.give_back(readback)
            first_segments = [0, *accumulate(map(segments, lengths[:-1]))]
            by_prompt = np.add.reduceat(np.concatenate(sums), first_segments)  # [prompts, hidden]
            return torch.from_numpy(by_prompt / np.array(lengths, dtype=by_prompt.dtype)[:, None])

        return Embedded(read, lambda: sent[-1][0].is_done)

    def _send_segment_sums(self, prompts: Sequence[Sequence[int]], layer: int) -> Readback:
        """Launches one pass that sums the states of each segment of some prompts, and the copy of the sums
        [segments, hidden] to the host."""
        kvs = [self.cache.open() for _ in prompts]
        try:
            for kv, prompt in zip(kvs, prompts, strict=True):
                self.cache.reserve(kv, len(prompt))
            embedding, replay = self.prompt_embedding(list(map(len, prompts)), layer)
            embedding.load([PromptPart(prompt, kv.pages) for prompt, kv in zip(prompts, kvs, strict=True)])
            replay()
            readback = self.readbacks.take(embedding.sums)
            readback.send(embedding.sums)
            return readback
        finally:
            for kv in kvs:
                self.cache.close(kv)


def _drafting_key(exit: Exit | None, model: Decoder) -> tuple:
    """Returns a key of the exit and of the number of head rows that steps with it are captured for."""
    if exit is None or exit.head_rows is None:
        return exit_key(exit), None
    return exit_key(exit), draft_head_capacity(exit, model)
