"""The one decoding loop: admits waiting sequences, prefills their prompts in chunks, and decodes them in batches.

`generate`, `complete`, `stream` and the command line all submit requests here, from any thread. One thread of the
scheduler's own runs the loop while there is work, so callers only wait, and concurrent calls share batches. What a step
computes is the backend's business, which plan it follows the batch's.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

import torch

from selfspec.backends.base import Backend
from selfspec.batch import Batch
from selfspec.cache.kv_cache import PAGE_SIZE, Cache, CacheFull, is_out_of_memory
from selfspec.drafters import Drafters
from selfspec.metrics import Metrics
from selfspec.sequence import Request, Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_NODES

MAX_DECODING = 64  # sequences that decode together at most
_MARGIN = 2 * (MAX_NODES + 1)  # positions beyond its prompt that a sequence is admitted with: two steps' nodes

BackendFactory = Callable[[bool], Backend]  # (whether the classical rejection is asked for) -> a backend for a batch


class Scheduler:
    """Owns waiting and running sequences."""

    def __init__(
        self,
        cache: Cache,
        drafters: Drafters,
        metrics: Metrics,
        new_backend: BackendFactory,
        max_decoding: int = MAX_DECODING,
    ) -> None:
        self.cache, self.drafters, self.metrics, self.max_decoding = cache, drafters, metrics, max_decoding
        self._new_backend = new_backend
        self.waiting: deque[Sequence] = deque()
        self.prefilling: dict[Batch, list[Sequence]] = {}
        self.batches: dict[tuple, Batch] = {}
        self._mailbox = _Mailbox(cache.keys.device)
        weakref.finalize(self, self._mailbox.close)

    # Called by any thread

    def submit(self, request: Request) -> None:
        """Queues a request, for `wait` or `follow`. An interrupt while it is queued cancels it."""
        self._check_thread()
        try:
            self._mailbox.put(self, request)
        except BaseException:
            self._cancel(request)
            raise

    def wait(self, request: Request) -> None:
        """Blocks until the request has ended; raises its error. Whatever interrupts the wait cancels the request."""
        for _ in self.follow(request, every_step=False):
            pass

    def follow(self, request: Request, every_step: bool = True) -> Generator[int, None, None]:
        """Yields the number of new tokens of the request's first sequence whenever there are more; raises the request's
        error. Leaving early cancels the request. Closing this generator does not wait for that: the garbage collector
        may close it on a thread that holds a lock which the loop needs."""
        try:
            for count in request.progress.follow(every_step):
                yield count
                self._check_thread()
        except GeneratorExit:
            self._cancel(request)
            raise
        except BaseException:
            self.cancel(request)
            raise
        if request.error is not None:
            raise request.error

    def cancel(self, request: Request) -> None:
        """Ends a request; returns when its pages are free."""
        self._cancel(request)
        if not self._mailbox.is_loop_thread:
            request.progress.wait_until_over()

    def _cancel(self, request: Request) -> None:
        request.is_cancelled = self._mailbox.has_cancelled = True
        self._mailbox.notify()

    def _check_thread(self) -> None:
        if self._mailbox.is_loop_thread:
            raise RuntimeError(
                "a logits processor or stopping criterion cannot generate with the engine that calls it, which waits "
                "for it to return: use another engine inside it"
            )

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function between two steps, on the loop's thread, and returns what it returns."""
        self._check_thread()
        call = _Call(function)
        self._mailbox.put(self, call)
        return call.result()

    # The loop

    @torch.inference_mode()
    def step(self) -> bool:
        """One pass of the loop; returns whether anything is left to do."""
        self._take_arrivals()
        self._drop_cancelled()
        self._admit()
        for batch in list(self.batches.values()):
            self._prefill(batch)
            self._decode(batch)
            self._finish(batch)
        return bool(self.waiting or self.prefilling or self._is_decoding)

    def _take_arrivals(self) -> None:
        for arrived in self._mailbox.take():
            if isinstance(arrived, _Call):
                arrived.run()
                continue
            self.metrics.request()
            self.waiting.extend(arrived.sequences)
            if arrived.is_cancelled:  # before it was in any list, so that it may have been overlooked
                self._mailbox.has_cancelled = True

    def _drop_cancelled(self) -> None:
        if not self._mailbox.has_cancelled:
            return
        self._mailbox.has_cancelled = False
        for request in {sequence.request for sequence in self._sequences() if sequence.request.is_cancelled}:
            request.finish("cancelled")
            self._forget(request)

    def _sequences(self) -> Iterator[Sequence]:
        yield from self.waiting
        for sequences in self.prefilling.values():
            yield from sequences
        for batch in self.batches.values():
            yield from batch.running

    def _forget(self, request: Request) -> None:
        """Takes the sequences of a request that has ended out of all lists and ends it, whatever fails on the way."""
        try:
            for sequence in request.sequences:
                if sequence in self.waiting:
                    self.waiting.remove(sequence)
            for batch, sequences in list(self.prefilling.items()):
                for sequence in (of for of in sequences if of.request is request):
                    batch.backend.release(sequence)
                self._set_prefilling(batch, [of for of in sequences if of.request is not request])
            for batch in self.batches.values():
                running = [of for of in batch.running if of.request is request]
                if running:
                    batch.leave(running)
        finally:
            self._end(request)

    def _end(self, request: Request) -> None:
        """All its sequences have ended: returns their pages and wakes the caller."""
        try:
            for sequence in request.sequences:
                self.cache.close(sequence.kv)
                if sequence.prompt_kv is not None:
                    self.cache.close(sequence.prompt_kv)
                sequence.swapped = None
                self.metrics.accepted(sequence.accepted_by_depth, sequence.reached_by_depth)
        finally:
            request.progress.end(request.sequences[0].new_tokens if request.sequences else 0)

    # Admission

    @property
    def _is_decoding(self) -> bool:
        return any(batch.running for batch in self.batches.values())

    @property
    def _admitted(self) -> int:
        prefilling = sum(len(sequences) for sequences in self.prefilling.values())
        return prefilling + sum(len(batch.running) for batch in self.batches.values())

    def _admit(self) -> None:
        """Takes waiting sequences, in order, while there is room in the batch and pages for their prompts."""
        spare = self._spare_pages() if self.waiting else 0
        while self.waiting and self._admitted < self.max_decoding:
            sequence = self.waiting[0]
            needed = self._pages_needed(sequence)
            if needed > spare and self._admitted:
                return  # those that decode will return some
            if sequence.swapped is not None and self.prefilling:
                return  # its next steps would take pages that these prompts were admitted with
            try:
                sequence.request.prepare()
                batch = self._batch(sequence)
                if sequence.swapped is not None:
                    self.cache.swap_in(sequence.kv, sequence.swapped)
            except Exception as error:
                if isinstance(error, CacheFull) and self._admitted:
                    return  # others hold the pages that it needs
                sequence.request.fail(_explained(error))
                self._forget(sequence.request)
                continue
            spare -= needed
            self.waiting.popleft()
            if sequence.swapped is not None:
                sequence.swapped = None
                self._join(batch, [sequence])
            else:
                self.prefilling.setdefault(batch, []).append(sequence)

    @staticmethod
    def _pages_needed(sequence: Sequence) -> int:
        """Pages for a sequence's prompt, or what was swapped out of it, and its first steps."""
        if sequence.swapped is not None:
            length = sequence.swapped.length
        else:
            shared = sequence.parent.prompt_kv if sequence.parent is not None else None
            length = len(sequence.prompt) - (0 if shared is None else shared.length)
        return -(-(length + _MARGIN) // PAGE_SIZE)

    def _spare_pages(self) -> int:
        """Free pages but for those that prompts in progress will take."""
        prompts = [of for sequences in self.prefilling.values() for of in sequences]
        return self.cache.free_pages - sum(max(0, self._pages_needed(of) - len(of.kv.pages)) for of in prompts)

    def _batch(self, sequence: Sequence) -> Batch:
        """The batch of a sequence: those with the same exit and acceptance rule decode together."""
        request = sequence.request
        exit: Exit | None = request.drafter.exit if request.drafter is not None else None
        if exit is None and not request.rejection:
            exit = self.drafters.usual_exit  # plain sequences join those that draft
        key = (None if exit is None else (exit.layer, id(exit.block)), request.rejection)
        if key not in self.batches:
            self.close_idle_batches()
            self.batches[key] = Batch(self._new_backend(request.rejection), exit, self.drafters, self.metrics)
        return self.batches[key]

    def close_idle_batches(self) -> None:
        """Returns what batches without sequences hold on the device; on the loop's thread only."""
        for key in [of for of, batch in self.batches.items() if not batch.running and batch not in self.prefilling]:
            self.batches.pop(key).backend.close()

    def _join(self, batch: Batch, sequences: list[Sequence]) -> None:
        """Sequences decode from the next step on."""
        try:
            batch.join(sequences)
        except Exception as error:  # the batch may be half-way between its old members and the new ones
            self._fail_all(batch, error)

    # Prefill

    def _prefill(self, batch: Batch) -> None:
        """One pass over prompts. The sequences of a request join the batch together, when all its admitted prompts are
        in the cache."""
        sequences = members = self.prefilling.get(batch, [])
        firsts = [of for of in sequences if not of.is_prefilled and of.parent is None]
        started = time.perf_counter()
        if firsts:
            drafts = _drafts(firsts[0])
            alike = [of for of in firsts if _drafts(of) == drafts]
            try:
                for sequence in batch.backend.prefill(alike, batch.base_exit if drafts else None):
                    sequence.is_prefilled = True
            except Exception as error:
                if isinstance(error, CacheFull) and self._is_decoding:
                    return  # those that decode have taken the pages that it was admitted with, and will return them
                firsts[0].request.fail(_explained(error))
                self._forget(firsts[0].request)
                return
        for sequence in sequences:
            if not sequence.is_prefilled and sequence.parent is not None and sequence.parent.is_prefilled:
                self._continue_prompt(sequence, sequence.parent)
        for request in dict.fromkeys(of.request for of in sequences):
            ready = [of for of in sequences if of.request is request]
            if all(of.is_prefilled for of in ready):
                self._keep_prompts(ready)
                sequences = [of for of in sequences if of.request is not request]
                self._set_prefilling(batch, sequences)
                self._join(batch, ready)
        seconds = time.perf_counter() - started
        for sequence in members:
            sequence.elapsed_s += seconds

    def _continue_prompt(self, sequence: Sequence, parent: Sequence) -> None:
        """A further sample of a prompt shares its pages."""
        sequence.kv = self.cache.fork(parent.prompt_kv or parent.kv)
        sequence.previous_feature, sequence.is_prefilled = parent.prompt_feature, True

    def _keep_prompts(self, ready: list[Sequence]) -> None:
        """Keeps the pages of prompts of which further samples wait for admission; returns those of the others."""
        for parent in dict.fromkeys(sequence.parent or sequence for sequence in ready):
            samples = (of for of in parent.request.sequences if of.parent is parent)
            if any(not sample.is_prefilled for sample in samples):
                parent.prompt_kv = parent.prompt_kv or self.cache.fork(parent.kv)
            elif parent.prompt_kv is not None:
                self.cache.close(parent.prompt_kv)
                parent.prompt_kv = None

    def _set_prefilling(self, batch: Batch, sequences: list[Sequence]) -> None:
        if sequences:
            self.prefilling[batch] = sequences
        else:
            self.prefilling.pop(batch, None)

    # Decoding

    def _decode(self, batch: Batch) -> None:
        """One step of the batch. While pages are too few, its newest sequence is swapped to host memory and waits; the
        step follows before the next admission, which would swap it straight back in."""
        started, members = time.perf_counter(), list(batch.running)
        callbacks = {of.request: of.request.callback_s for of in members}
        is_over = False
        while batch.running and not is_over:
            try:
                batch.step()
                is_over = True
            except CacheFull as error:
                self._preempt(batch, error)
            except Exception as error:
                self._fail_all(batch, error)
        in_callbacks = sum(request.callback_s - before for request, before in callbacks.items())
        seconds = time.perf_counter() - started - in_callbacks
        for sequence in members:
            sequence.elapsed_s += seconds

    def _preempt(self, batch: Batch, error: CacheFull) -> None:
        batch.drain()
        self._finish(batch)
        if self._admitted < 2:  # no other sequence will return pages
            for sequence in list(batch.running):
                sequence.request.fail(error)
                self._forget(sequence.request)
            return
        if not batch.running:
            return
        newest = batch.running[-1]
        try:
            batch.backend.suspend(newest)
            newest.swapped = self.cache.swap_out(newest.kv)
        except Exception as failed:
            newest.request.fail(_explained(failed))
            self._forget(newest.request)
            return
        batch.leave([newest])
        self.waiting.appendleft(newest)

    def _fail_all(self, batch: Batch, error: Exception) -> None:
        """A step or a join failed for a reason that belongs to no single request: all requests of the batch fail."""
        batch.in_flight = None
        for request in {sequence.request for sequence in batch.running}:
            request.fail(_explained(error))
            with suppress(Exception):  # whatever is broken
                self._forget(request)

    def _finish(self, batch: Batch) -> None:
        """Sequences whose texts have ended leave; listeners hear of new tokens."""
        for request in {of.request for of in batch.running if of.request.error is not None}:
            self._forget(request)
        ended = [of for of in batch.running if of.is_finished]
        if ended:
            batch.leave(ended)
        for sequence in ended:
            self.cache.close(sequence.kv)
        for request in dict.fromkeys(of.request for of in ended):
            if request.is_finished:
                self._end(request)
        for sequence in batch.running:
            if sequence is sequence.request.sequences[0]:
                sequence.request.progress.update(sequence.new_tokens)

    def fail_everything(self, error: BaseException) -> None:
        """The loop itself failed: every request ends with its error, so that no caller waits for ever."""
        for request in {sequence.request for sequence in self._sequences()}:
            request.fail(error)
            with suppress(Exception):  # whatever is broken
                self._forget(request)
        self.waiting.clear()
        self.prefilling.clear()
        self.batches.clear()


def _drafts(sequence: Sequence) -> bool:
    """Whether something may be drafted for this sequence, so that its exit's KV is worth filling."""
    return sequence.request.drafter is not None and sequence.request.drafter.exit is not None


def _explained(error: Exception) -> Exception:
    """Out of memory says what to do; other errors stay as they are."""
    if is_out_of_memory(error):
        return CacheFull(f"out of memory during a step ({error}): build the engine with a smaller kv_cache_gb")
    return error


class _Call:
    """A function to run on the loop's thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self._done.set()

    def result(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class _Mailbox:
    """What other threads ask of the loop, and the thread that runs it. Outlives the scheduler only until the thread has
    noticed that it is gone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._changed = threading.Condition()
        self._items: deque[Request | _Call] = deque()
        self._has_news = False
        self.has_cancelled = False  # some request, since the loop last looked
        self.is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_loop_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def may_loop(self) -> bool:
        """Whether the calling thread, just started, is to run the loop. An interrupt in `put` can hide that a thread
        starts, so that the next `put` starts another one: the first must not run beside it."""
        with self._changed:
            return self.is_loop_thread

    def put(self, scheduler: Scheduler, item: Request | _Call) -> None:
        with self._changed:
            self._items.append(item)
            if self._thread is None or not self._thread.is_alive():
                arguments = (weakref.ref(scheduler), self)
                self._thread = threading.Thread(target=_run, args=arguments, name="selfspec-loop", daemon=True)
                self._thread.start()
        self.notify()

    def notify(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify()

    def take(self) -> list[Request | _Call]:
        if not self._items:
            return []
        with self._changed:
            items = list(self._items)
            self._items.clear()
            return items

    def wait(self) -> bool:
        """Blocks until there is something to do; returns False once the scheduler is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news or self.is_closed)
            self._has_news = False
            return not self.is_closed

    def close(self) -> None:
        thread = self._thread
        with self._changed:
            self.is_closed = True
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)


def _run(reference: weakref.ref[Scheduler], mailbox: _Mailbox) -> None:
    """The loop's thread: steps while there is work, and keeps the scheduler alive only then."""
    if not mailbox.may_loop():
        return
    if mailbox.device.type == "cuda":
        torch.cuda.set_device(mailbox.device)  # of this thread alone
    while mailbox.wait():
        scheduler = reference()
        try:
            while scheduler is not None and not mailbox.is_closed and scheduler.step():
                pass
        except BaseException as error:
            assert scheduler is not None
            scheduler.fail_everything(error)
        del scheduler
