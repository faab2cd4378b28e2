"""What outlives a batch on the device: slot tables, buffers, and the steps and prefill passes captured as CUDA graphs.

Captures on first use and keeps the graphs used last. Which step a batch needs, and what its report means, is the
backend's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from selfspec.backends.cuda.compiler import Compiler
from selfspec.backends.cuda.decoder import FusedDecoder, Launch, Scratch, captured, table_pages
from selfspec.backends.cuda.exit import Drafter, DraftHead, known_buffer
from selfspec.backends.cuda.exit_scoring import ExitFill
from selfspec.backends.cuda.prefill import SMALLEST, Prefill, padded
from selfspec.backends.cuda.prompt_scoring import PromptScore, ends_buffer
from selfspec.backends.cuda.readback import Readbacks
from selfspec.backends.cuda.short_prefill import Marking, Prompts, longest_together, pass_size, passes, stretches
from selfspec.backends.cuda.slots import Features, SlotTable
from selfspec.backends.cuda.step import DeviceStep
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.kernels.final_norm import UnfilledStates
from selfspec.models.decoder import Decoder
from selfspec.profiles.router import MARKED, marks_of
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_NODES, MAX_STEP_ROWS, NONE, SPARE_POSITIONS, Plan

HEAD_STEP = 4096  # draft head rows that captured steps have room for, in these steps: domains share graphs
GUESTS = 1024  # of which so many at least are for the prompts' own tokens
MAX_GRAPHS = 512  # captured at a time; the one that was used longest ago goes first
SHORTEST_REACH = 2048  # the length of texts that attention is planned for at least


@dataclass(eq=False)
class _Captured:
    """Something launched as one graph. Its tensors stay alive as long as the graph."""

    made: Any
    replays: tuple[Launch, ...]

    @property
    def replay(self) -> Launch:
        return self.replays[0]


class Table:
    """A slot table with the exit's buffers of its slots."""

    def __init__(self, number: int, model: Decoder, capacity: int, pages: int, idle_page: int) -> None:
        self.number, self.model = number, model
        self.slots = SlotTable(capacity, pages, model.config.vocab_size, model.device, idle_page)
        self.known = known_buffer(model, capacity + MAX_STEP_ROWS)  # each slot's, then every node's
        self._waiting: dict[int, UnfilledStates] = {}
        self._ends: dict[int, torch.Tensor] = {}
        self._heads: dict[int, DraftHead] = {}

    def waiting(self, count: int) -> UnfilledStates:
        """Room for states that the exit's cache lacks, of the first `count` slots."""
        if count not in self._waiting:
            slots, config = self.slots.first(count), self.model.config
            self._waiting[count] = UnfilledStates.empty(slots.unfilled, config.hidden_size, self.model.dtype)
        return self._waiting[count]

    def ends(self, count: int) -> torch.Tensor:
        """Room for what prompts are scored by, [positions, count, ...]."""
        if count not in self._ends:
            self._ends[count] = ends_buffer(self.model, count)
        return self._ends[count]

    def head(self, capacity: int) -> DraftHead:
        if capacity not in self._heads:
            self._heads[capacity] = DraftHead.empty(capacity, self.model.device)
        return self._heads[capacity]

    def save(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of what a step of idle slots would change; makes all slots idle."""
        waiting = [tensor for of in self._waiting.values() for tensor in (of.hidden, of.previous)]
        changed = [*self.slots.changing, self.known[: self.slots.capacity], *waiting]
        saved = [(tensor, tensor.clone()) for tensor in changed]
        self.slots.idle()
        return saved

    @property
    def tensors(self) -> list[torch.Tensor]:
        waiting = [tensor for of in list(self._waiting.values()) for tensor in (of.hidden, of.previous)]
        heads = [head.tokens for head in list(self._heads.values())]
        return [*self.slots.tensors, self.known, *waiting, *list(self._ends.values()), *heads]


class Graphs:
    """Everything on the device that outlives a batch."""

    def __init__(self, model: Decoder, cache: Cache, context: int, max_batch: int) -> None:
        self.model, self.cache, self.context = model, cache, context
        self.capacity = bucket(max_batch)
        self.scratch, self.readbacks = Scratch(model.device), Readbacks()
        self._on_gpu = model.device.type == "cuda"
        # Prompts up to this length go through the kernels that decode, together; interpreted ones would take ages.
        self.short_prompt = longest_together(model) if self._on_gpu else 0
        self.new_step: Callable[..., DeviceStep] = DeviceStep  # a benchmark may put in its own before the first
        self.compiler = Compiler()
        self._captured: OrderedDict[tuple, _Captured] = OrderedDict()
        self._tables: list[Table] = []
        self._free_tables: list[Table] = []
        self._idle = cache.open()
        cache.reserve(self._idle, MAX_NODES + 1)
        self._pool: Any = None
        self._capturing: torch.cuda.Stream | None = None

    @property
    def idle_page(self) -> int:
        """A page that belongs to no sequence: idle slots and padding write there."""
        return self._idle.pages[0]

    def take_table(self) -> Table:
        if self._free_tables:
            return self._free_tables.pop()
        pages = table_pages(self.context + SPARE_POSITIONS)
        self._tables.append(Table(len(self._tables), self.model, self.capacity, pages, self.idle_page))
        return self._tables[-1]

    def give_back(self, table: Table) -> None:
        table.slots.idle()
        self._free_tables.append(table)

    @property
    def nbytes(self) -> int:
        """Memory of slots, of buffers between kernels, and of captured steps but for what CUDA keeps for itself."""
        tensors = [tensor for of in list(self._captured.values()) for tensor in of.made.tensors]
        tensors += [tensor for table in self._tables for tensor in table.tensors]
        return self.scratch.nbytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # Steps

    def step(
        self, table: Table, count: int, plan: Plan, exit: Exit | None, features: Features, longest: int
    ) -> tuple[DeviceStep, Launch]:
        """The step of the first `count` slots with this plan, for texts of up to `longest` tokens."""
        key = ("step", *self._step_key(table, count, plan, exit, features, longest))
        found = self._find(key, table, lambda: self._new_step(table, count, plan, exit, features, longest), "launch")
        return found.made, found.replay

    def parts(
        self, table: Table, count: int, plan: Plan, exit: Exit | None, features: Features, longest: int
    ) -> tuple[DeviceStep, Launch, Launch, Launch]:
        """The same in three parts, for callables that process logits: passes, choice, commit."""
        key = ("parts", *self._step_key(table, count, plan, exit, features, longest))
        build = partial(self._new_step, table, count, plan, exit, features, longest)
        found = self._find(key, table, build, "launch_passes", "choose_processed", "commit")
        passes, choice, commit = found.replays
        return found.made, passes, choice, commit

    def _step_key(
        self, table: Table, count: int, plan: Plan, exit: Exit | None, features: Features, longest: int
    ) -> tuple:
        return table.number, count, plan, *_kind(exit, self.model), features, self._reach(longest)

    def _new_step(
        self, table: Table, count: int, plan: Plan, exit: Exit | None, features: Features, longest: int
    ) -> DeviceStep:
        slots = table.slots.first(count)
        if features.processes:  # must be there before the graph is captured
            _ = table.slots.bias, table.slots.counts
        fused = FusedDecoder(self.model, self.cache, self.scratch, slots, self._reach(longest))
        return self.new_step(fused, slots, plan, self.drafter(table, count, exit), features)

    def drafter(self, table: Table, count: int, exit: Exit | None) -> Drafter | None:
        if exit is None:
            return None
        head = None if exit.head_rows is None else table.head(head_capacity(exit, self.model))
        known = None if exit.block is None else table.known
        return Drafter(exit, head, known, table.slots.capacity, table.waiting(count))

    def exit_fill(
        self, table: Table, count: int, exit: Exit, features: Features, longest: int, scores: bool
    ) -> tuple[ExitFill, Launch]:
        """The pass over the unfilled positions of the first `count` slots."""
        kind = (*_kind(exit, self.model), features) if scores else _identity(exit)
        key = ("fill", table.number, count, self._reach(longest), scores, *kind)

        def build() -> ExitFill:
            drafter = self.drafter(table, count, exit)
            assert drafter is not None
            place = self.model, self.cache, self.scratch, table.slots.first(count), self._reach(longest)
            return ExitFill(*place, drafter, features, scores)

        found = self._find(key, table, build, "launch")
        return found.made, found.replay

    def prompt_score(self, table: Table, count: int, exit: Exit, longest: int) -> tuple[PromptScore, Launch]:
        """For prompts whose sequences are in slots and whose ends are in the table."""
        key = ("prompt score", table.number, count, self._reach(longest), *_identity(exit))
        parts = self.model, self.cache, self.scratch, table.slots.first(count), self._reach(longest)
        found = self._find(key, table, lambda: PromptScore(*parts, exit, table.ends(count)), "launch")
        return found.made, found.replay

    def _reach(self, longest: int) -> int:
        """How long texts may get as far as attention is concerned, if they are to have up to `longest` tokens."""
        return min(max(SHORTEST_REACH, _rounded(longest)), _rounded(self.context)) + SPARE_POSITIONS

    # Prefill

    def prefill(self, exit: Exit | None, count: int, end: int) -> tuple[Prefill, Launch]:
        """For a chunk of `count` tokens that ends at position `end`."""
        rows = padded(count, SMALLEST)
        slots = padded(end - count + rows, PAGE_SIZE)
        key = ("prefill", rows, slots, *_identity(exit))
        parts = self.model, self.cache, exit, rows, slots, self.idle_page
        found = self._find(key, None, lambda: Prefill(*parts), "launch")
        return found.made, found.replay

    def prompts(self, exit: Exit | None, lengths: Sequence[int]) -> tuple[Prompts, Launch]:
        """For short prompts of so many tokens, in one pass."""
        size, parts = pass_size(lengths), (self.model, self.cache, self.scratch)
        key = ("prompts", *size, *_identity(exit))
        found = self._find(key, None, lambda: Prompts(*parts, *size, self.idle_page, exit=exit), "launch")
        return found.made, found.replay

    @torch.inference_mode()
    def marks(self, prompts: Sequence[Sequence[int]], layer: int) -> torch.Tensor:
        """The prompts' marks [P, hidden] after `layer` layers, on the CPU (see `profiles.router.mark`)."""
        texts = [prompt[-MARKED:] for prompt in prompts]
        if self.short_prompt < MARKED:
            return marks_of(self.model, self.cache, prompts, layer)
        groups = [texts[group.start : group.stop] for group in passes(list(map(len, texts)))]
        sums = torch.cat([self._sums(group, layer) for group in groups]).cpu()
        counts = [stretches(len(text)) for text in texts]
        of_texts = torch.stack([of_text.sum(0) for of_text in sums.split(counts)])
        return of_texts / torch.tensor(list(map(len, texts)))[:, None]

    def _sums(self, texts: Sequence[Sequence[int]], layer: int) -> torch.Tensor:
        """Of the states of each stretch of some texts, [stretches, hidden]."""
        sequences = [self.cache.open() for _ in texts]
        try:
            for sequence, text in zip(sequences, texts, strict=True):
                self.cache.reserve(sequence, len(text))
            marking, replay = self.marking(list(map(len, texts)), layer)
            marking.load([(text, sequence.pages) for text, sequence in zip(texts, sequences, strict=True)])
            replay()
            return marking.sums[: sum(stretches(len(text)) for text in texts)].clone()
        finally:
            for sequence in sequences:
                self.cache.close(sequence)

    def marking(self, lengths: Sequence[int], layer: int) -> tuple[Marking, Launch]:
        size, parts = pass_size(lengths), (self.model, self.cache, self.scratch)
        key = ("marks", *size, layer)
        found = self._find(key, None, lambda: Marking(*parts, *size, self.idle_page, layer=layer), "launch")
        return found.made, found.replay

    # Capture

    def _find(self, key: tuple, table: Table | None, build: Callable[[], Any], *launches: str) -> _Captured:
        """What is kept under `key`; built, and its launches captured, on first use."""
        found = self._captured.get(key)
        if found is None and self.compiler.collects:
            made = build()
            for launch in launches:
                self.compiler.compile(getattr(made, launch))
            return _Captured(made, tuple(lambda: None for _ in launches))
        if found is None:
            if len(self._captured) >= MAX_GRAPHS:
                self._evict()
            made = build()
            replays = tuple(self._capture(table, getattr(made, launch)) for launch in launches)
            found = self._captured[key] = _Captured(made, replays)
        self._captured.move_to_end(key)
        return found

    def _evict(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.model.device)  # a graph may not be running when it is destroyed
        self._captured.popitem(last=False)

    def _capture(self, table: Table | None, launch: Launch) -> Launch:
        """Compiles, captures and replays once with all slots idle, since a first replay costs 0.3 ms; then the slots
        are as before. Work launched before and after stays in order on the stream."""
        if not self._on_gpu:
            return launch
        saved = [] if table is None else table.save()
        try:
            self.compiler.compile(launch)
            launch()
            if self._pool is None:
                self._pool, self._capturing = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.model.device)
            replay = captured(launch, self._pool, self._capturing)
            replay()
        finally:
            for tensor, before in saved:
                tensor.copy_(before)
        return replay


def bucket(count: int) -> int:
    """The slots that a step of so many sequences is captured for: a power of two, so that few sizes are."""
    return 1 << (count - 1).bit_length()


def _rounded(longest: int) -> int:
    """The length that attention is planned for where texts get so long; few of them, since each is captured."""
    return 1 << (longest - 1).bit_length()


def head_capacity(exit: Exit, model: Decoder) -> int:
    """How many rows of the head steps are captured for: the domain's, and room for some of the prompts' own tokens."""
    assert exit.head_rows is not None
    own = len(exit.head_rows) - exit.prompt_rows
    return min(-(-(own + GUESTS) // HEAD_STEP) * HEAD_STEP, model.config.vocab_size)


def _identity(exit: Exit | None) -> tuple[int | None, int | None]:
    """What tells exits apart, whatever part of the head they draft from."""
    return (None, None) if exit is None else (exit.layer, None if exit.block is None else id(exit.block))


def _kind(exit: Exit | None, model: Decoder) -> tuple[int | None, ...]:
    """The same of what is captured for steps: also by how many rows of the head there is room for."""
    if exit is None or exit.head_rows is None:
        return (*_identity(exit), None)
    return (*_identity(exit), head_capacity(exit, model))


__all__ = ["NONE", "Graphs", "Table", "bucket", "head_capacity"]
