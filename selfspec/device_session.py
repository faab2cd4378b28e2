"""Sessions whose cycles run on the device as kernels: the host launches a cycle and reads the one before it.

`Machine` keeps what outlives a request: seats, scratch, and captured cycles. A `DeviceSession` sits its rows down,
replays cycles, and does with the tokens what every session does. Requests that need the host between the model's
logits and its choice (processors, penalties) use the same kernels outside of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.cache import PAGE_SIZE, Cache
from selfspec.device_cycle import Cycle, Drafter, DraftHead, Drawing, known_buffer
from selfspec.device_prefill import SMALLEST, Prefill, padded
from selfspec.draft import Draft
from selfspec.exits import Exit
from selfspec.fused import WANTED, FusedDecoder, Launch, Scratch, Seats, captured, is_supported, table_pages
from selfspec.kernels.accept import COUNT, LAST, TOKENS
from selfspec.model import Decoder
from selfspec.room import device_room
from selfspec.runtime import Row, Session
from selfspec.sampling import Sampling
from selfspec.tree import MAX_NODES, Plan

__all__ = ["WANTED", "DeviceSession", "Machine", "is_supported"]

HEAD_ROOM = 4096  # drafted tokens beyond a domain's that a captured cycle has room for, in these steps
AHEAD = 256  # positions whose pages are taken at once, so that page tables seldom change
CACHE_SHARE = 0.25  # of the free memory that the cache takes at once where nobody says how much it needs
USUAL_BATCH = 16
SPARE = 3 * (MAX_NODES + 1)  # positions past its end that a text may be drafted to before that is noticed
LONGEST_CAPTURED_PROMPT = 8192
SHORTEST_REACH = 2048  # positions that attention is planned for at least


class Machine:
    """Everything on the device that outlives a request."""

    def __init__(self, model: Decoder, cache: Cache, context: int) -> None:
        self.model, self.cache, self.context = model, cache, context
        self.scratch = Scratch(model.device)
        self._seats: dict[int, Seats] = {}
        self._known: dict[int, torch.Tensor] = {}
        self._heads: dict[int, DraftHead] = {}
        self._cycles: dict[tuple, Cycle] = {}
        self._replays: dict[tuple, Launch] = {}
        self._prefills: dict[tuple, tuple[Prefill, Launch]] = {}
        self._keys = cache.keys  # the storage that captured cycles know
        self._idle = cache.open()
        self._pool: Any = None
        self.owners: dict[int, DeviceSession] = {}  # who sits on the seats of each size

    def session(self, *args: Any, **kwargs: Any) -> DeviceSession:
        """A session on this machine. The first one takes the cache's memory: where a cache grows later, cycles have to
        be captured anew."""
        if self.model.device.type == "cuda" and not self.cache.num_pages:
            self.cache.provide(self._first_pages())
        return DeviceSession(*args, machine=self, **kwargs)

    def _first_pages(self) -> int:
        if self.cache.max_pages is not None:
            return self.cache.max_pages
        share = int(CACHE_SHARE * device_room(self.model.device) / self.cache.page_nbytes)
        return min(USUAL_BATCH * table_pages(self.context + SPARE) + 1, share)

    @property
    def nbytes(self) -> int:
        """Memory of seats, buffers between kernels, and captured cycles."""
        tensors = [tensor for cycle in self._cycles.values() for tensor in cycle.tensors]
        tensors += [tensor for seats in self._seats.values() for tensor in vars(seats).values() if _is_tensor(tensor)]
        tensors += [*self._known.values(), *(head.tokens for head in self._heads.values())]
        return self.scratch.nbytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.inference_mode()
    def prepare(self, rows: int, plan: Plan, exit: Exit | None, sampling: Sampling, longest: int) -> None:
        """Compiles and captures the cycle that requests of this kind will replay."""
        key, _ = self.cycle(self.seats(rows), plan, exit, Drawing.of(sampling), longest)
        self.replay(key)

    def seats(self, rows: int) -> Seats:
        """Seats for so many rows: a power of two of them, so that few sizes are ever captured."""
        count = 1 << (rows - 1).bit_length()
        if count not in self._seats:
            self._seats[count] = Seats(count, table_pages(self.context + SPARE), self.model.device)
        return self._seats[count]

    def idle_page(self) -> int:
        """A page that belongs to nobody's text: seats nobody sits on write there."""
        if not self._idle.pages:
            self.cache.reserve(self._idle, MAX_NODES + 1)
        return self._idle.pages[0]

    def drafter(self, seats: Seats, exit: Exit | None) -> Drafter | None:
        if exit is None:
            return None
        known = None
        if exit.block is not None:
            if seats.count not in self._known:
                self._known[seats.count] = known_buffer(self.model, seats, MAX_NODES + 1)
            known = self._known[seats.count]
        return Drafter(exit, self._head(exit), known)

    def _head(self, exit: Exit) -> DraftHead | None:
        if exit.head_rows is None:
            return None
        capacity = min(-(-len(exit.head_rows) // HEAD_ROOM) * HEAD_ROOM, self.model.config.vocab_size)
        if capacity not in self._heads:
            self._heads[capacity] = DraftHead.empty(capacity, self.model.device)
        return self._heads[capacity]

    def cycle(self, seats: Seats, plan: Plan, exit: Exit | None, drawing: Drawing, longest: int) -> tuple[tuple, Cycle]:
        """The cycle of these seats with this plan for texts of up to `longest`, and the key it is kept under."""
        self._forget_if_moved()
        drafter = self.drafter(seats, exit)
        block = None if exit is None or exit.block is None else id(exit.block)
        capacity = None if drafter is None or drafter.head is None else len(drafter.head.tokens)
        reach = max(SHORTEST_REACH, 1 << (longest + SPARE - 1).bit_length())  # few sizes: each is captured
        key = (seats.count, reach, plan, None if exit is None else exit.layer, block, capacity, drawing)
        if key not in self._cycles:
            fused = FusedDecoder(self.model, self.cache, self.scratch, seats, reach)
            self._cycles[key] = Cycle(fused, plan, drafter, drawing)
        return key, self._cycles[key]

    def replay(self, key: tuple) -> Launch:
        """The cycle kept under `key` as something to replay; captured on first use, from idle seats."""
        if key not in self._replays:
            cycle = self._cycles[key]
            self.vacate(cycle.seats)
            if self.model.device.type == "cuda":
                cycle.launch()  # compiles what is new; on idle seats it moves nothing
                self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._replays[key] = captured(cycle.launch, self.model.device, self._pool)
        return self._replays[key]

    def prefill(self, exit: Exit | None, count: int, end: int) -> tuple[Prefill, Launch]:
        """For a chunk of `count` tokens that ends at position `end`; captured on first use."""
        self._forget_if_moved()
        rows = padded(count, SMALLEST)
        key = ("prefill", rows, padded(end - count + rows, PAGE_SIZE), exit and (exit.layer, id(exit.block)))
        if key not in self._prefills:
            prefill = Prefill(self.model, self.cache, exit, rows, key[2], self.idle_page())
            if self.model.device.type == "cuda":
                prefill.load([0], 0, [], None)
                prefill.table.fill_(self.idle_page())
                prefill.launch()
                self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._prefills[key] = prefill, captured(prefill.launch, self.model.device, self._pool)
        return self._prefills[key]

    def is_captured(self, key: tuple) -> bool:
        return key in self._replays

    def vacate(self, seats: Seats) -> None:
        """Nobody sits here any more; who did keeps what the device knows of its rows."""
        owner = self.owners.pop(seats.count, None)
        if owner is not None:
            owner.rise()
        seats.active.zero_()
        seats.lengths.zero_()
        seats.page_table.fill_(self.idle_page())

    def _forget_if_moved(self) -> None:
        """Captured cycles hold the cache's address: when it has grown elsewhere they are void."""
        self.idle_page()
        if self._keys is not self.cache.keys:
            self._keys = self.cache.keys
            for known in (self._cycles, self._replays, self._prefills):
                known.clear()


@dataclass
class Flight:
    """A cycle that was launched and whose report is on its way."""

    rows: list[Row]
    plan: Plan
    reason: str | None
    report: torch.Tensor  # on the host
    landed: Callable[[], None]  # waits for it


class DeviceSession(Session):
    """A session whose cycles are kernels. On the device everything is as in Session, to the token."""

    def __init__(self, *args: Any, machine: Machine, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.machine = machine
        self._seated: list[Row] = []
        self._flight: Flight | None = None
        self._drawing = Drawing.of(self.sampling)
        self._longest = max(row.max_length for row in self.rows)
        self._cycle: Cycle | None = None  # of the pass in progress, where the host chooses

    def _prefill_chunk(self, rows: list[Row], tokens: list[list[int]]) -> None:
        """A chunk of a prompt, alone: what is computed for it depends on nothing else."""
        (row,), (chunk,) = rows, tokens
        sequence, count = row.sequence, len(chunk)
        if sequence.length + count > LONGEST_CAPTURED_PROMPT:  # the device is busy enough for the host to keep up
            super()._prefill_chunk(rows, tokens)
            return
        self.cache.reserve(sequence, sequence.length + count)
        prefill, replay = self.machine.prefill(self.exit, count, sequence.length + count)
        prefill.load(chunk, sequence.length, sequence.pages, row.known)
        replay()
        if self.exit is not None:
            row.known = prefill.known[0, 0].clone()
        sequence.drafted = sequence.verified = count
        self.cache.commit([sequence], [range(count)])

    @property
    def _host_chooses(self) -> bool:
        return bool(self.processors) or self.sampling.repetition_penalty != 1 or self.sampling.min_new_tokens > 0

    def close(self) -> None:
        for count in [count for count, owner in self.machine.owners.items() if owner is self]:
            del self.machine.owners[count]
        self._seated, self._flight = [], None
        super().close()

    @torch.inference_mode()
    def cycle(self) -> None:
        """Every active row advances by at least one token. The next cycle is already running when its tokens are
        read; what it finds for rows that have ended meanwhile is dropped."""
        if self._host_chooses:
            super().cycle()
            self.rise()
            return
        flight, self._flight = self._flight or self._launch(), None
        ahead = self._launch() if self._goes_on(flight) else None
        rows = self.active
        self._land(flight)
        if ahead is not None and len(self.active) < len(rows):
            self._land(ahead)
            ahead = None
        self._flight = ahead

    def _goes_on(self, flight: Flight) -> bool:
        """Whether the next cycle can be launched before this one has landed: the same again, from the same seats, and
        surely needed."""
        seated = self.machine.owners.get(self.machine.seats(len(flight.rows)).count) is self
        same = self.policy.choose(len(flight.rows))[0] == flight.plan
        return seated and same and any(row.max_length - len(row.tokens) > flight.plan.depth + 1 for row in flight.rows)

    def _launch(self) -> Flight:
        rows = self.active
        plan, reason = self.policy.choose(len(rows))
        seats = self._sit(rows, plan)
        key, cycle = self.machine.cycle(seats, plan, self.exit, self._drawing, self._longest)
        if not self.machine.is_captured(key):
            self.machine.replay(key)  # empties the seats
            self._sit(rows, plan)
        self.machine.replay(key)()
        report = cycle.report
        if report.device.type != "cuda":
            return Flight(rows, plan, reason, report.clone(), lambda: None)
        copy = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        copy.copy_(report, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Flight(rows, plan, reason, copy, event.synchronize)

    def _land(self, flight: Flight) -> None:
        """Reads a cycle's report: tokens are emitted, and ends of text noticed, one by one."""
        flight.landed()
        living = [index for index, row in enumerate(flight.rows) if row.finish_reason is None]
        reports = flight.report.tolist()
        for index in living:
            row, report = flight.rows[index], reports[index]
            count, last = report[COUNT], report[LAST]
            row.sequence.length += count
            for place, token in enumerate(report[TOKENS : TOKENS + count]):
                self._emit(row, token)
                row.accepted += place < count - 1
                row.rejections += place == count - 1 and bool(flight.plan.children[last])
                if row.finish_reason is not None:
                    break
        self._account([flight.rows[index] for index in living], flight.plan, flight.reason)

    def _sit(self, rows: list[Row], plan: Plan) -> Seats:
        """Makes sure that these rows sit on the device's seats, with pages enough for a cycle."""
        seats = self.machine.seats(len(rows))
        moved = False
        for row in rows:
            moved |= self._take_pages(row, plan)
        if self.machine.owners.get(seats.count) is self and self._seated == rows:
            if moved:
                self._write_pages(seats, rows)
            return seats
        self.rise()
        self.machine.vacate(seats)
        self._write_rows(seats, rows)
        self.machine.owners[seats.count] = self
        self._seated = list(rows)
        return seats

    def _take_pages(self, row: Row, plan: Plan) -> bool:
        """Pages for this cycle and the one in flight; whether there are new ones."""
        held = list(row.sequence.pages)
        least = row.sequence.length + 2 * (plan.depth + 1) + len(plan) + 1
        if least > len(held) * PAGE_SIZE:
            wanted = min(least + AHEAD, max(least, row.max_length + MAX_NODES))
            self.cache.reserve(row.sequence, wanted)
        else:
            self.cache.reserve(row.sequence, least)  # a shared last page becomes the row's own
        return held != row.sequence.pages

    def _write_pages(self, seats: Seats, rows: list[Row]) -> None:
        width = max(len(row.sequence.pages) for row in rows)
        table = [row.sequence.pages + [0] * (width - len(row.sequence.pages)) for row in rows]
        seats.page_table[: len(rows), :width].copy_(_host_ints(table, seats.lengths.device), non_blocking=True)

    def _write_rows(self, seats: Seats, rows: list[Row]) -> None:
        device, count = seats.lengths.device, len(rows)
        self._write_pages(seats, rows)
        columns = [[row.sequence.length for row in rows], [row.tokens[-1] for row in rows], [row.copy for row in rows]]
        for target, values in zip((seats.lengths, seats.pending, seats.copies), columns, strict=True):
            target[:count].copy_(_host_ints(values, device), non_blocking=True)
        seats.active[:count].fill_(1)
        seats.seeds[:count].copy_(torch.tensor([row.seed for row in rows]))
        for name in ("temperature", "top_k", "top_p", "min_p"):
            getattr(seats, name).fill_(getattr(self.sampling, name))
        drafter = self.machine.drafter(seats, self.exit)
        if drafter is not None and drafter.known is not None:
            drafter.known[:count].copy_(self._last_known(rows)[:, 0])
        if drafter is not None and drafter.head is not None and self.exit is not None:
            assert self.exit.head_rows is not None
            drafter.head.fill(self.exit.head_rows)

    def rise(self) -> None:
        """Leaves the seats; what the exit recalls, which only the device knows, is kept for sitting down again."""
        if not self._seated:
            return
        seats = self.machine.seats(len(self._seated))
        drafter = self.machine.drafter(seats, self.exit)
        if drafter is not None and drafter.known is not None and not self._host_chooses:
            for row, known in zip(self._seated, drafter.known[: len(self._seated)].clone(), strict=True):
                row.known = known
        self._seated = []

    # Where the host chooses: the same kernels, pass by pass.

    def draft(self, rows: list[Row], plan: Plan) -> Draft:
        seats = self._sit(rows, plan)
        _, self._cycle = self.machine.cycle(seats, plan, self.exit, self._drawing, self._longest)
        self._cycle.draft()
        return Draft(plan, self._of_rows(self._cycle.places.tokens, rows).long(), hidden=self._cycle.stream.states)

    def verify(self, rows: list[Row], draft: Draft) -> torch.Tensor:
        cycle = self._cycle
        assert cycle is not None
        cycle.verify()
        for row in rows:
            row.sequence.drafted = row.sequence.verified = len(draft.plan) + 1
        if cycle.drafter is None or cycle.drafter.known is None:
            return self._of_rows(cycle.reads, rows)
        return self._of_rows(cycle.drafter.known[cycle.seats.count :][: cycle.rows], rows)

    def _logits(self, known: torch.Tensor) -> torch.Tensor:
        assert self._cycle is not None
        return self._of_rows(self._cycle.logits(), self._seated)

    def _of_rows(self, values: torch.Tensor, rows: list[Row]) -> torch.Tensor:
        """Node-major [(n + 1) * B, ...] to [rows, n + 1, ...]."""
        assert self._cycle is not None
        return values.unflatten(0, (-1, self._cycle.seats.count))[:, : len(rows)].transpose(0, 1)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _host_ints(values: list, device: torch.device) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.int32)
    return tensor.pin_memory() if device.type == "cuda" else tensor
