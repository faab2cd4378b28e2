"""The one decoding loop: admits waiting sequences, prefills their prompts in chunks, and decodes them in batches.

`generate`, `complete`, `stream` and the server submit requests from any thread and wait for them. One thread per engine
runs the loop while there is work. The scheduler decides which sequences prefill and decode, a batch chooses the plan of
each step, and a backend executes the step. A *pass of the loop* is one call of `Scheduler.step`.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any

import torch

from selfspec.backends.base import Backend
from selfspec.batch import Batch
from selfspec.cache.kv_cache import PAGE_SIZE, Cache, CacheFull, is_out_of_memory
from selfspec.drafters import Drafters
from selfspec.loop_thread import Call, LoopThread
from selfspec.metrics import Metrics
from selfspec.prompt_pages import PromptPages
from selfspec.sequence import Request, Sequence
from selfspec.speculation.exit import Exit, exit_key
from selfspec.speculation.plan import MAX_NODES

MAX_DECODING = 64  # sequences that prefill or decode at a time, at most
_STEP_POSITIONS = 2 * (MAX_NODES + 1)  # cache positions of two steps; admission needs free pages for them too

BackendFactory = Callable[[bool], Backend]  # (whether acceptance is "rejection") -> the backend of a new batch


class Scheduler:
    """Owns all sequences: waiting for admission, prefilling, and decoding in a batch."""

    def __init__(
        self,
        cache: Cache,
        drafters: Drafters,
        metrics: Metrics,
        new_backend: BackendFactory,
        max_decoding: int = MAX_DECODING,
        before_first: Callable[[Request], None] | None = None,  # called once, before the first admission
        prefix_reuse: bool = True,
    ) -> None:
        self.cache, self.drafters, self.metrics, self.max_decoding = cache, drafters, metrics, max_decoding
        self.prompt_pages = PromptPages(cache, prefix_reuse)
        self._new_backend, self._before_first = new_backend, before_first
        self._requests: set[Request] = set()  # requests that have not ended
        self.waiting: deque[Sequence] = deque()  # for admission
        self.batches: dict[tuple, Batch] = {}  # by exit and acceptance rule
        self._thread = LoopThread(cache.keys.device)
        self._has_cancelled = False  # whether a request was cancelled since the loop last checked
        weakref.finalize(self, self._thread.close)

    # Called by any thread

    def submit(self, request: Request) -> None:
        """Queues a request, for `wait` or `follow`. An interrupt of this call cancels the request."""
        self._refuse_loop_thread()
        try:
            self._thread.put(self, request)
        except BaseException:
            self._cancel(request)
            raise

    def wait(self, request: Request) -> None:
        """Blocks until the request has ended, then raises its error if it failed. An interrupt cancels the request."""
        for _ in self.follow(request, every_step=False):
            pass

    def follow(self, request: Request, every_step: bool = True) -> Generator[int, None, None]:
        """Blocks until the request has ended, then raises its error if it failed. With `every_step` yields the number
        of new tokens of the request's first sequence each time that number has grown.

        An interrupt of the wait cancels the request and waits until its pages are free. Closing this generator cancels
        the request without waiting: the garbage collector may close it on a thread that holds a lock which the loop
        needs.
        """
        try:
            for count in request.progress.follow(every_step):
                yield count
                self._refuse_loop_thread()
        except GeneratorExit:
            self._cancel(request)
            raise
        except BaseException:
            self.cancel(request)
            raise
        if request.error is not None:
            raise request.error

    def cancel(self, request: Request, wait: bool = True) -> None:
        """Ends a request early and waits until its pages are free. On the loop's own thread, or with `wait` False,
        returns at once; the next pass of the loop then frees the pages."""
        self._cancel(request)
        if wait and not self._thread.is_current:
            request.progress.wait_until_over()

    def _cancel(self, request: Request) -> None:
        """Marks a request as cancelled, and wakes the loop, whose next pass ends it."""
        request.is_cancelled = self._has_cancelled = True
        self._thread.wake()

    def _refuse_loop_thread(self) -> None:
        """Raises RuntimeError on the loop's own thread, which cannot wait for itself."""
        if self._thread.is_current:
            raise RuntimeError(
                "a logits processor or stopping criterion cannot generate with the engine that calls it, which waits "
                "for it to return: use another engine inside it"
            )

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the loop's thread at the start of a pass. Waits for its result and returns it."""
        self._refuse_loop_thread()
        call = Call(function)
        self._thread.put(self, call)
        return call.result()

    # The loop

    @torch.inference_mode()
    def step(self) -> bool:
        """Runs one pass of the loop: for every batch one prefill pass and one step, then admission. Returns whether
        work is left.

        Admits last, while the device runs the steps just launched, because finding a prompt's domain takes about as
        long as a step. Prefill of an admitted prompt starts in the next pass of the loop, so that running sequences do
        not wait for admission and prefill of one prompt in the same pass.
        """
        self._take_arrivals()
        self._drop_cancelled()
        for batch in list(self.batches.values()):
            self._prefill(batch)
            self._decode(batch)
            self._finish(batch)
            if not batch.running:
                try:
                    batch.reset()
                except Exception:  # the step in flight failed; its sequences have all ended, so no request fails
                    batch.abort()
        self._admit()
        return bool(self.waiting or self.admitted)

    def _take_arrivals(self) -> None:
        """Runs queued calls, and moves the sequences of queued requests to `waiting`."""
        while (arrived := self._thread.take()) is not None:
            if isinstance(arrived, Call):
                arrived.run()
                continue
            self._requests.add(arrived)
            self.waiting.extend(arrived.sequences)
            self.metrics.add_request()
            if arrived.is_cancelled:  # `_drop_cancelled` may have run before the request was in any list
                self._has_cancelled = True

    def _drop_cancelled(self) -> None:
        """Ends cancelled requests."""
        if not self._has_cancelled:
            return
        self._has_cancelled = False
        for request in {sequence.request for sequence in self._sequences() if sequence.request.is_cancelled}:
            request.finish("cancelled")
            self._remove(request)

    def _sequences(self) -> Iterator[Sequence]:
        """Yields all sequences: waiting, prefilling and running."""
        yield from self.waiting
        for batch in self.batches.values():
            yield from (*batch.prefilling, *batch.running)

    def _remove(self, request: Request) -> None:
        """Removes a request's sequences from all lists and ends the request, even if a backend fails to release one."""
        try:
            for sequence in request.sequences:
                if sequence in self.waiting:
                    self.waiting.remove(sequence)
            for batch in self.batches.values():
                for sequence in (other for other in batch.prefilling if other.request is request):
                    self.prompt_pages.register(batch.backend, sequence)
                    batch.backend.release(sequence)
                batch.prefilling = [other for other in batch.prefilling if other.request is not request]
                running = [sequence for sequence in batch.running if sequence.request is request]
                if running:
                    for sequence in running:
                        self.prompt_pages.register(batch.backend, sequence)
                    batch.leave(running)
        finally:
            self._end(request)

    def _end(self, request: Request) -> None:
        """Returns the pages of a request whose sequences are in no list any more, adds its acceptance to the metrics,
        and wakes its caller."""
        try:
            for sequence in request.sequences:
                if request.error is not None:
                    self.cache.forget(sequence.kv)  # no prompt may reuse its pages: values may not be finite
                self.cache.close(sequence.kv)
                if sequence.prompt_kv is not None:
                    self.cache.close(sequence.prompt_kv)
                sequence.swapped = None
                history = sequence.history
                if drafted := history.drafted:
                    self.metrics.add_acceptance(history.accepted_by_depth, history.reached_by_depth, drafted)
        finally:
            self._requests.discard(request)
            request.progress.end(request.sequences[0].new_tokens if request.sequences else 0)

    # Admission

    @property
    def _is_decoding(self) -> bool:
        return any(batch.running for batch in self.batches.values())

    @property
    def admitted(self) -> int:
        """Number of sequences that prefill or run in a batch. Copies the dict first, for other threads."""
        return sum(len(batch.prefilling) + len(batch.running) for batch in list(self.batches.values()))

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences whose prompts are not in the cache yet, of all batches."""
        return [sequence for batch in self.batches.values() for sequence in batch.prefilling]

    def _admit(self) -> None:
        """Admits waiting sequences in order of arrival, while fewer than `max_decoding` are admitted and enough pages
        are free for their prompts and two steps. If no sequence is admitted, admits the first one however few
        pages are free."""
        spare = self._spare_pages() if self.waiting else 0
        while self.waiting and self.admitted < self.max_decoding:
            sequence = self.waiting[0]
            needed = self._pages_needed(sequence)
            if needed > spare and self.admitted:
                return  # until admitted sequences free pages
            if sequence.swapped is not None and self.prefilling:
                return  # its steps could take the pages that prefilling prompts were admitted with
            try:
                if self._before_first is not None:
                    before, self._before_first = self._before_first, None
                    before(sequence.request)
                sequence.request.prepare()
                batch = self._batch(sequence)
                if sequence.swapped is not None:
                    self.prompt_pages.swap_in(sequence, sequence.swapped)
            except Exception as error:
                if isinstance(error, CacheFull) and self.admitted:
                    return  # until admitted sequences free the pages that this one needs
                sequence.request.fail(_with_advice(error))
                self._remove(sequence.request)
                continue
            spare -= needed
            self.waiting.popleft()
            if sequence.swapped is not None:
                sequence.swapped = None
                self._join(batch, [sequence])
            else:
                batch.prefilling.append(sequence)

    @staticmethod
    def _pages_needed(sequence: Sequence) -> int:
        """Returns the number of pages for two steps and for a sequence's prompt, or its swapped-out positions."""
        if sequence.swapped is not None:
            length = sequence.swapped.length
        else:
            shared = sequence.parent.prompt_kv if sequence.parent is not None else None
            length = len(sequence.prompt) - (0 if shared is None else shared.length)
        return -(-(length + _STEP_POSITIONS) // PAGE_SIZE)

    def _spare_pages(self) -> int:
        """Returns the number of free pages, less those that prefilling sequences were admitted with and have not taken
        yet."""
        promised = (max(0, self._pages_needed(sequence) - len(sequence.kv.pages)) for sequence in self.prefilling)
        return self.cache.free_pages - sum(promised)

    def _batch(self, sequence: Sequence) -> Batch:
        """Returns the batch of the sequence's exit and acceptance rule. If there is none, closes idle batches and makes
        it."""
        request = sequence.request
        exit = request.exit
        if exit is None and not request.rejection:
            exit = self.drafters.loaded_exit  # so that sequences that never draft join the batch of those that do
        key = (exit_key(exit), request.rejection)
        if key not in self.batches:
            self.close_idle_batches()
            self.batches[key] = Batch(self._new_backend(request.rejection), exit, self.drafters, self.metrics)
        return self.batches[key]

    def close_idle_batches(self) -> None:
        """Frees the device buffers of batches without sequences. Must be called on the loop's thread."""
        for key in [key for key, batch in self.batches.items() if not batch.running and not batch.prefilling]:
            self.batches.pop(key).backend.close()

    def _join(self, batch: Batch, sequences: list[Sequence]) -> None:
        """Adds prefilled sequences to the batch, which decodes them from its next step on. If that fails, fails all
        requests of the batch."""
        try:
            batch.join(sequences)
        except Exception as error:
            self._fail_all(batch, error, sequences)

    # Prefill

    def _prefill(self, batch: Batch) -> None:
        """Runs one prefill pass, if a prompt of the batch is left to prefill. Then adds to the batch the sequences of
        requests whose admitted sequences all have their prompts in the cache."""
        prefilling = batch.prefilling
        started = time.perf_counter()
        if not self._prefill_prompts(batch):
            return
        self._join_prefilled(batch)
        seconds = time.perf_counter() - started
        for sequence in prefilling:
            sequence.elapsed_s += seconds

    def _prefill_prompts(self, batch: Batch) -> bool:
        """Runs one prefill pass: over one chunk of a long prompt, or over several short prompts, all of them with or
        all without the exit. Returns False if the pass failed."""
        prompts = [sequence for sequence in batch.prefilling if not sequence.is_prefilled and sequence.parent is None]
        if not prompts:
            return True
        uses_exit = prompts[0].request.exit is not None
        together = [sequence for sequence in prompts if (sequence.request.exit is not None) == uses_exit]
        exit = batch.base_exit if uses_exit else None
        for sequence in together:
            self.prompt_pages.reuse(batch.backend, sequence, exit)
        try:
            for sequence in self._prefill_pass(batch, together, exit):
                sequence.is_prefilled = True
                self.prompt_pages.register(batch.backend, sequence)
                self.metrics.add_prompt(len(sequence.prompt), sequence.cached_tokens)
        except Exception as error:
            if isinstance(error, CacheFull) and self._is_decoding:
                return False  # running sequences took pages that these prompts were admitted with; they will free some
            prompts[0].request.fail(_with_advice(error))
            self._remove(prompts[0].request)
            return False
        return True

    def _join_prefilled(self, batch: Batch) -> None:
        """Gives the other samples of a prefilled prompt (`num_return_sequences`) its pages, then adds to the batch the
        sequences of each request whose admitted sequences are all prefilled."""
        for sequence in batch.prefilling:
            if not sequence.is_prefilled and sequence.parent is not None and sequence.parent.is_prefilled:
                self.prompt_pages.share(sequence, sequence.parent)
        unready = {sequence.request for sequence in batch.prefilling if not sequence.is_prefilled}
        ready = [sequence for sequence in batch.prefilling if sequence.request not in unready]
        batch.prefilling = [sequence for sequence in batch.prefilling if sequence.request in unready]
        if ready:
            self.prompt_pages.hold_for_samples(ready)
            self._join(batch, ready)

    @staticmethod
    def _prefill_pass(batch: Batch, sequences: list[Sequence], exit: Exit | None) -> list[Sequence]:
        """Runs a prefill pass over some of these prompts. Returns those that are then prefilled. If the pass fails with
        several prompts, runs it for the first prompt alone, so that an error belongs to one request."""
        try:
            return batch.backend.prefill(sequences, exit)
        except Exception:
            if len(sequences) == 1:
                raise
            return batch.backend.prefill(sequences[:1], exit)

    # Decoding

    def _decode(self, batch: Batch) -> None:
        """Runs one step of the batch. While too few pages are free for the step, swaps the batch's newest sequence to
        host memory and tries again in the same pass of the loop, since admission at the end of the pass could swap the
        sequence back in before the step."""
        started, members = time.perf_counter(), list(batch.running)
        callbacks = {sequence.request: sequence.request.callback_s for sequence in members}
        has_stepped = False
        while batch.running and not has_stepped:
            try:
                batch.step()
                has_stepped = True
            except CacheFull as error:
                self._preempt(batch, error)
            except Exception as error:
                self._fail_all(batch, error)
        in_callbacks = sum(request.callback_s - before for request, before in callbacks.items())
        seconds = time.perf_counter() - started - in_callbacks
        for sequence in members:
            sequence.elapsed_s += seconds

    def _preempt(self, batch: Batch, error: CacheFull) -> None:
        """Swaps the batch's newest sequence to host memory and puts it first in the queue. If no other sequence is
        admitted, swaps the prompts that are held for waiting samples, and fails its request with `error` if that frees
        no page. Swaps none if the batch is empty once its step in flight is read."""
        batch.drain()
        self._finish(batch)
        if self.admitted < 2:  # no other sequence will free pages
            if self._swap_held_prompts():
                return
            for sequence in list(batch.running):
                sequence.request.fail(error)
                self._remove(sequence.request)
            return
        if not batch.running:
            return
        newest = batch.running[-1]
        try:
            batch.backend.suspend(newest)
            newest.swapped = self.cache.swap_out(newest.kv)
        except Exception as failed:
            newest.request.fail(_with_advice(failed))
            self._remove(newest.request)
            return
        batch.leave([newest])
        self.waiting.appendleft(newest)

    def _swap_held_prompts(self) -> bool:
        """Moves the prompts that are held for waiting samples to host memory; returns whether that freed pages."""
        free = self.cache.free_pages
        with suppress(Exception):  # too little host memory: the prompts stay
            self.prompt_pages.swap_out_held(self.waiting)
        return self.cache.free_pages > free

    def _fail_all(self, batch: Batch, error: Exception, joining: Seq[Sequence] = ()) -> None:
        """Fails all requests of a batch and of the `joining` sequences, some of which the batch may hold: the error of
        a step or join belongs to no single request."""
        batch.abort()
        for request in {sequence.request for sequence in (*batch.running, *joining)}:
            request.fail(_with_advice(error))
            with suppress(Exception):  # the backend may be broken too
                self._remove(request)

    def _finish(self, batch: Batch) -> None:
        """Removes finished sequences from the batch, ends finished requests, and reports new tokens to streams."""
        for request in {sequence.request for sequence in batch.running if sequence.request.error is not None}:
            self._remove(request)
        ended = [sequence for sequence in batch.running if sequence.is_finished]
        for sequence in ended:
            self.prompt_pages.register(batch.backend, sequence)
        if ended:
            batch.leave(ended)
        for sequence in ended:
            self.cache.close(sequence.kv)
        for request in dict.fromkeys(sequence.request for sequence in ended):
            if request.is_finished:
                self._end(request)
        for request in dict.fromkeys(sequence.request for sequence in batch.running):
            request.progress.update(request.sequences[0].new_tokens)

    def fail_everything(self, error: BaseException) -> None:
        """Fails every request after an error of the loop itself, so that every caller returns."""
        for request in list(self._requests):
            request.fail(error)
            with suppress(Exception):  # the backend may be broken too
                self._remove(request)
        for batch in self.batches.values():
            with suppress(Exception):
                batch.backend.close()
        self.waiting.clear()
        self.batches.clear()


def _with_advice(error: Exception) -> Exception:
    """Returns for an out-of-memory error one that says what to do; other errors unchanged."""
    if is_out_of_memory(error):
        return CacheFull(f"out of memory during a step ({error}): build the engine with a smaller kv_cache_gb")
    return error
