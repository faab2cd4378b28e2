"""What outlives a request on the device: seats, buffers, and the cycles and prompts that were captured as CUDA graphs.

Captures on first use and keeps; which cycle a request needs, and what its report means, is `device_session`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Launch, Scratch, Seats, captured, table_pages
from selfspec.backends.cuda.exit import Drafter, DraftHead, known_buffer
from selfspec.backends.cuda.exit_scoring import Shadow
from selfspec.backends.cuda.prefill import SMALLEST, Prefill, padded
from selfspec.backends.cuda.prompt_scoring import Judge, ends_buffer
from selfspec.backends.cuda.short_prefill import (
    Marking,
    Prompts,
    longest_together,
    pass_size,
    passes,
    passes_up_to,
    stretches,
)
from selfspec.backends.cuda.slot_move import Move
from selfspec.backends.cuda.step import Cycle, Drawing
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.kernels.final_norm import Waiting
from selfspec.memory import device_room
from selfspec.models.decoder import Decoder
from selfspec.profiles.router import MARKED, marks_of
from selfspec.sampling import Sampling
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_NODES, Plan

HEAD_STEP = 4096  # drafted tokens that captured cycles have room for, in these steps: domains share them
GUESTS = 1024  # of which so many at least are for a request's own tokens
CACHE_SHARE = 0.25  # of the free memory that the cache takes at once where nobody says how much it needs
LARGEST_SHARE = 0.9  # the same where somebody does
USUAL_BATCH = 16
SPARE = 3 * (MAX_NODES + 1)  # positions past its end that a text may be drafted to before that is noticed
SHORTEST_REACH = 2048  # the length of texts that attention is planned for at least


class Occupant(Protocol):
    """Who sits on seats: told to rise when others need them."""

    def rise(self) -> None: ...


class Mail:
    """Something small on its way to the host: a cycle's report, most of all."""

    def __init__(self, like: torch.Tensor) -> None:
        on_gpu = like.device.type == "cuda"
        self.like = like.shape, like.dtype
        self._copy = torch.empty(like.shape, dtype=like.dtype, pin_memory=on_gpu)
        # Timers on the device: nobody waits for them who does not wait for the report.
        self._own_start, self._event = (torch.cuda.Event(enable_timing=True) if on_gpu else None for _ in range(2))
        self._began = self._own_start
        self._clock = [0.0, 0.0]

    def start(self, stream: torch.cuda.Stream | None, after: Mail | None = None) -> None:
        """The cycle to be reported begins; on a device that is still busy, right after another one's report."""
        self._clock[0] = time.perf_counter()
        self._began = self._own_start if after is None else after._event
        if self._own_start is not None and after is None:
            self._own_start.record(stream)

    def send(self, report: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self._copy.copy_(report, non_blocking=True)
        if self._event is not None:
            self._event.record(stream)
        self._clock[1] = time.perf_counter()

    @property
    def is_there(self) -> bool:
        """Whether a device has sent it already, so that nobody would have to wait."""
        return self._event is not None and self._event.query()

    def read(self) -> list[Any]:
        """Waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()

    @property
    def seconds(self) -> float:
        """How long the cycle took, once its report was read and before that of one it followed is used again."""
        if self._began is None or self._event is None:
            return self._clock[1] - self._clock[0]
        return self._began.elapsed_time(self._event) / 1e3

    def after(self, before: Mail) -> float:
        """Seconds from another one's report to this, where both were read."""
        if before._event is None or self._event is None:
            return self._clock[1] - before._clock[1]
        return before._event.elapsed_time(self._event) / 1e3


class Machine:
    """Everything on the device that outlives a request."""

    def __init__(self, model: Decoder, cache: Cache, context: int) -> None:
        self.model, self.cache, self.context = model, cache, context
        self.scratch = Scratch(model.device)
        self._seats: dict[int, Seats] = {}
        self._known: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, Waiting] = {}
        self._ends: dict[int, torch.Tensor] = {}
        self._heads: dict[tuple[int, int], DraftHead] = {}
        self.new_cycle: Callable[..., Cycle] = Cycle  # a benchmark may put in its own before the first
        self._numbers: dict[tuple, int] = {}  # of cycles, which are looked up by it several times before each
        self._cycles: dict[int, Cycle] = {}
        self._shadows: dict[tuple, Shadow] = {}
        self._moves: dict[tuple, Move] = {}
        self._replays: dict[int | tuple, Launch] = {}
        self._passes: dict[tuple, tuple[Any, Launch]] = {}
        self._keys = cache.keys  # the storage that captured cycles know
        self._idle = cache.open()
        self._on_gpu = model.device.type == "cuda"
        # Prompts up to this length go through the kernels that decode, together; interpreted ones would take ages.
        self.short_prompt = longest_together(model) if self._on_gpu else 0
        self._pool: Any = None
        self._capturing: torch.cuda.Stream | None = None
        self.stream: torch.cuda.Stream | None = None  # that launches go to, within `current`
        self.newest_mail: Mail | None = None  # of the cycle that was launched last, if nothing was since
        self._took_memory = False
        self._mails: dict[tuple, list[Mail]] = {}  # that are free, by what they can carry
        self.owners: dict[int, Occupant] = {}  # who sits on the seats of each size

    def take_memory(self) -> None:
        """Takes the cache's memory, if it has none yet, at once: when it grows, cycles have to be captured anew."""
        if self._on_gpu and not self._took_memory:
            self._took_memory = True
            with self.current():
                self.cache.provide(self._first_pages())

    def _first_pages(self) -> int:
        usual = USUAL_BATCH * table_pages(self.context + SPARE) + 1
        wanted, share = (usual, CACHE_SHARE) if self.cache.max_pages is None else (self.cache.max_pages, LARGEST_SHARE)
        return min(wanted, int(share * device_room(self.model.device) / self.cache.page_nbytes))

    @property
    def nbytes(self) -> int:
        """Memory of seats, of buffers between kernels, and of captured cycles but for what CUDA keeps for itself."""
        tensors = [tensor for cycle in self._cycles.values() for tensor in cycle.tensors]
        tensors += [tensor for shadow in self._shadows.values() for tensor in shadow.tensors]
        tensors += [move.who for move in self._moves.values()]
        tensors += [tensor for seats in self._seats.values() for tensor in seats.tensors]
        tensors += [tensor for waiting in self._waiting.values() for tensor in (waiting.hidden, waiting.previous)]
        tensors += [tensor for made, _ in self._passes.values() for tensor in made.tensors]
        tensors += [*self._known.values(), *self._ends.values(), *(head.tokens for head in self._heads.values())]
        return self.scratch.nbytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.inference_mode()
    def prepare(
        self, rows: int, plan: Plan, exit: Exit | None, sampling: Sampling, longest: int, judged: bool = False
    ) -> None:
        """Compiles and captures the cycle that requests of this kind will replay; with a plain one, what catches up on
        many of it, what moves rows to fewer seats, and what judges their prompts."""
        with self.current():
            self.take_memory()
            seats, drawing = self.seats(rows), Drawing.of(sampling)
            key, _ = self.cycle(seats, plan, exit, drawing, longest)
            self.replay(key)
            if len(plan):
                return
            if exit is not None and judged:
                self.judge(seats, exit, longest)
            self.vacate(seats)  # or it would catch up with what waits there, and others move
            for _ in range(2 if self._on_gpu else 1):  # replayed for the first time they take longer than ever again
                if exit is not None:
                    for scores in (False, True):
                        self.catch_up(seats, exit, drawing, longest, scores)
                for count in (1 << power for power in range(seats.count.bit_length() - 1)):
                    self.move(seats, self.seats(count), exit, [])

    @torch.inference_mode()
    def prepare_prompts(self, exit: Exit | None, batch: int, mark_layer: int | None) -> None:
        """The same for passes of up to `batch` short prompts of one or two stretches each, or a longer one alone, told
        apart by their states after a layer or not."""
        if not self.short_prompt:
            return
        with self.current():
            self.take_memory()
            for lengths in passes_up_to(batch, min(self.short_prompt, _rounded(self.context))):
                self.prompts(exit, lengths)
                if mark_layer is not None and max(lengths) <= MARKED:
                    self._marking(lengths, mark_layer)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Launches go to the current device: within this it is the model's. All work on what is shared here comes in
        the order in which it was launched, whatever streams callers are on; some of it nobody waits for."""
        if not self._on_gpu:
            yield
            return
        with torch.cuda.device(self.model.device):
            stream = torch.cuda.current_stream()
            if self.stream is not None and self.stream != stream:
                stream.wait_stream(self.stream)
            self.stream = stream
            yield

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
        known, count = None, seats.count
        if exit.block is not None:
            if count not in self._known:
                self._known[count] = known_buffer(self.model, (MAX_NODES + 2) * count)
            known = self._known[count]
        if count not in self._waiting:
            self._waiting[count] = Waiting.empty(seats.waiting, self.model.config.hidden_size, self.model.dtype)
        return Drafter(exit, self._head(seats, exit), known, self._waiting[count])

    def _head(self, seats: Seats, exit: Exit) -> DraftHead | None:
        if exit.head_rows is None:
            return None
        capacity = min(head_capacity(len(exit.head_rows), exit.guests), self.model.config.vocab_size)
        key = (seats.count, capacity)
        if key not in self._heads:
            self._heads[key] = DraftHead.empty(capacity, self.model.device)
        return self._heads[key]

    def cycle(self, seats: Seats, plan: Plan, exit: Exit | None, drawing: Drawing, longest: int) -> tuple[int, Cycle]:
        """The cycle of these seats with this plan for texts of up to `longest`, and the key it is kept under."""
        self._forget_if_moved()
        drafter, reach = self.drafter(seats, exit), self._reach(longest)
        kind = (seats.count, reach, plan, *_kind(drafter), drawing)
        key = self._numbers.setdefault(kind, len(self._numbers))
        if key not in self._cycles:
            fused = FusedDecoder(self.model, self.cache, self.scratch, seats, reach)
            self._cycles[key] = self.new_cycle(fused, seats, plan, drafter, drawing)
        return key, self._cycles[key]

    def kept_cycle(self, key: int) -> Cycle | None:
        """The one that was kept under `key`, if it still is."""
        self._forget_if_moved()
        return self._cycles.get(key)

    def catch_up(self, seats: Seats, exit: Exit, drawing: Drawing, longest: int, scores: bool) -> torch.Tensor:
        """Launches the pass over what waits at these seats, and captures it when that is done for the first time;
        returns its report."""
        self._forget_if_moved()
        drafter, reach = self.drafter(seats, exit), self._reach(longest)
        key = ("shadow", seats.count, reach, *((*_kind(drafter), drawing) if scores else _identity(exit)))
        if key not in self._shadows:
            assert drafter is not None
            place = self.model, self.cache, self.scratch, seats, reach
            self._shadows[key] = Shadow(*place, drafter, drawing, scores)
        self._launch(key, self._shadows[key].launch)
        return self._shadows[key].report

    def move(self, left: Seats, right: Seats, exit: Exit | None, places: Sequence[int]) -> None:
        """Who sits in these places goes to the first of other seats, after what was launched before; whoever sat there
        rises. Captured when that is done for the first time."""
        self._forget_if_moved()
        self._evict(right)
        before, after = self.drafter(left, exit), self.drafter(right, exit)
        key = ("move", left.count, right.count, *_kind(before))
        if key not in self._moves:
            self._moves[key] = Move(left, right, before, after, self.idle_page())
        self._moves[key].load(places)
        self._launch(key, self._moves[key].launch)

    def _launch(self, key: tuple, launch: Launch) -> None:
        """What is kept under `key`; captured once it has been done for the first time."""
        self.newest_mail = None
        if key in self._replays:
            self._replays[key]()
        else:
            launch()
            self._replays[key] = self._captured(launch)

    def _reach(self, longest: int) -> int:
        """How long texts may get as far as attention is concerned, if they are to have up to `longest` tokens."""
        return min(max(SHORTEST_REACH, _rounded(longest)), _rounded(self.context)) + SPARE

    def replay(self, key: int) -> Launch:
        """The cycle kept under `key` as something to replay; captured on first use, from idle seats."""
        if key not in self._replays:
            cycle, self.newest_mail = self._cycles[key], None
            self.vacate(cycle.seats)  # so that nothing of anybody's moves
            self._replays[key] = self._rehearsed(cycle.launch)
        return self._replays[key]

    def prefill(self, exit: Exit | None, count: int, end: int) -> tuple[Prefill, Launch]:
        """For a chunk of `count` tokens that ends at position `end`."""
        rows = padded(count, SMALLEST)
        slots = padded(end - count + rows, PAGE_SIZE)
        key = ("prefill", rows, slots, *_identity(exit))
        return self._pass(key, lambda idle: Prefill(self.model, self.cache, exit, rows, slots, idle))

    def prompts(self, exit: Exit | None, lengths: Sequence[int]) -> tuple[Prompts, Launch]:
        """For short prompts of so many tokens, in one pass."""
        size, parts = pass_size(lengths), (self.model, self.cache, self.scratch)
        key = ("prompts", *size, *_identity(exit))
        return self._pass(key, lambda idle: Prompts(*parts, *size, idle, exit=exit))

    def ends(self, seats: Seats) -> torch.Tensor:
        """Where passes over prompts leave what these are judged by, each at its own seat: [places, seats, ...]."""
        if seats.count not in self._ends:
            self._ends[seats.count] = ends_buffer(self.model, seats.count)
        return self._ends[seats.count]

    def judge(self, seats: Seats, exit: Exit, longest: int) -> tuple[Judge, Launch]:
        """For prompts of texts of up to `longest` whose rows sit and whose ends are there."""
        parts, ends, reach = (self.model, self.cache, self.scratch), self.ends(seats), self._reach(longest)
        key = ("judge", seats.count, reach, *_identity(exit))
        return self._pass(key, lambda _: Judge(*parts, seats, reach, exit, ends))

    @torch.inference_mode()
    def marks(self, prompts: Sequence[Sequence[int]], layer: int) -> torch.Tensor:
        """The prompts' marks [P, hidden] after `layer` layers, on the CPU (see `routing.mark`)."""
        texts = [prompt[-MARKED:] for prompt in prompts]
        if self.short_prompt < MARKED:
            return marks_of(self.model, self.cache, prompts, layer)
        with self.current():
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
            marking, replay = self._marking(list(map(len, texts)), layer)
            marking.load([(text, sequence.pages) for text, sequence in zip(texts, sequences, strict=True)])
            replay()
            return marking.sums[: sum(stretches(len(text)) for text in texts)].clone()
        finally:
            for sequence in sequences:
                self.cache.close(sequence)

    def _marking(self, lengths: Sequence[int], layer: int) -> tuple[Marking, Launch]:
        size, parts = pass_size(lengths), (self.model, self.cache, self.scratch)
        return self._pass(("marks", *size, layer), lambda idle: Marking(*parts, *size, idle, layer=layer))

    def _pass(self, key: tuple, build: Callable[[int], Any]) -> tuple[Any, Launch]:
        """The pass over prompts kept under `key`, built around the idle page and captured on first use."""
        self._forget_if_moved()
        self.newest_mail = None
        if key not in self._passes:
            made = build(self.idle_page())
            self._passes[key] = made, self._rehearsed(made.launch)
        return self._passes[key]

    def _rehearsed(self, launch: Launch) -> Launch:
        """Captured and replayed once, at a place where nobody minds: the first time takes the host 0.3 ms longer."""
        if not self._on_gpu:
            return launch
        launch()  # compiles what is new
        replay = self._captured(launch)
        replay()
        return replay

    def _captured(self, launch: Launch) -> Launch:
        """All of a machine's graphs share one pool of memory, and a stream that no other machine captures on."""
        if self._on_gpu and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._on_gpu and self._capturing is None:
            self._capturing = torch.cuda.Stream(self.model.device)
        return captured(launch, self._pool, self._capturing)

    def mail(self, report: torch.Tensor) -> Mail:
        """Something to send what looks like this with; who has read it gives it back."""
        free = self._mails.get((report.shape, report.dtype))
        return free.pop() if free else Mail(report)

    def take_back(self, *mails: Mail | None) -> None:
        """Those that are still on their way may be among them: whoever takes them sends later."""
        for mail in mails:
            if mail is not None:
                self._mails.setdefault(mail.like, []).append(mail)

    def is_captured(self, key: int) -> bool:
        return key in self._replays

    def vacate(self, seats: Seats) -> None:
        """Nobody sits here any more; who did keeps what the device knows of its rows."""
        self._evict(seats)
        seats.vacate(self.idle_page())

    def _evict(self, seats: Seats) -> None:
        owner = self.owners.pop(seats.count, None)
        if owner is not None:
            owner.rise()

    def _forget_if_moved(self) -> None:
        """Captured cycles hold the cache's address: when it has grown elsewhere they are void."""
        self.idle_page()
        if self._keys is not self.cache.keys:
            if self._on_gpu:
                torch.cuda.synchronize(self.model.device)  # none of them may be running when it is destroyed
            self._keys, self._pool = self.cache.keys, None
            self.scratch.forget_outgrown()
            for known in (self._cycles, self._shadows, self._moves, self._replays, self._passes):
                known.clear()


def _rounded(longest: int) -> int:
    """The length that attention is planned for where texts get so long; few of them, since each is captured."""
    return 1 << (longest - 1).bit_length()


def head_capacity(rows: int, guests: int) -> int:
    """How many rows of the head cycles are captured for that draft from `rows` of them: as many for most requests of a
    domain, whatever their own tokens."""
    wanted = rows - guests + max(guests, GUESTS)
    return -(-wanted // HEAD_STEP) * HEAD_STEP


def _identity(exit: Exit | None) -> tuple[int | None, int | None]:
    """What tells exits apart, whatever part of the head they draft from."""
    return (None, None) if exit is None else (exit.layer, None if exit.block is None else id(exit.block))


def _kind(drafter: Drafter | None) -> tuple[int | None, ...]:
    """The same of what is captured for drafters: also by how many rows of the head there is room for."""
    if drafter is None:
        return (*_identity(None), None)
    return (*_identity(drafter.exit), None if drafter.head is None else len(drafter.head.tokens))
