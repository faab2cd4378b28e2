"""Failures stay alone: of swaps, joins, early cancellations, the loop, and of numbers that a slot cannot hold."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.host import IdleBackend, idle_scheduler
from selfspec import Engine, Rules
from selfspec.backends.cuda.decoder import Scratch
from selfspec.backends.cuda.slots import SlotStore, bucket, slot_values
from selfspec.backends.cuda.step import DeviceStep
from selfspec.backends.torch_backend import TorchBackend
from selfspec.batch import Batch
from selfspec.cache.kv_cache import Cache
from selfspec.governor.costs import Costs
from selfspec.request import SpeculationRequest, read_settings
from selfspec.results import Stream
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request, Sequence
from selfspec.speculation.plan import MAX_STEP_ROWS, Plan
from tests.serving import eventually
from tests.tiny import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer


def engine_of(pages: int = 40, **options: Any) -> Engine:
    engine = Engine.from_model(tiny_model("llama"), **options)
    engine.cache = engine.scheduler.cache = Cache(engine.model.config, engine.model.device, engine.model.dtype, pages)
    return engine


def request_of(engine: Engine, length: int = 8, new_tokens: int = 4, **kwargs: Any) -> Request:
    settings = read_settings(engine.generation_config, None, {"max_new_tokens": new_tokens, **kwargs})
    return engine._requests.build([[5] * length], length, settings, None, None, None, SpeculationRequest())


def test_a_request_cancelled_before_the_loop_has_taken_it_ends_at_once() -> None:
    engine = engine_of()
    request = request_of(engine, new_tokens=400)
    request.is_cancelled = True  # and the loop's flag was cleared before it was in any list
    engine.scheduler._thread._items.append(request)
    assert not engine.scheduler.step()
    assert request.progress.is_over and request.sequences[0].new_tokens == 0


class Late(threading.Thread):
    """Runs once `begin` is set."""

    begin = threading.Event()

    def run(self) -> None:
        self.begin.wait()
        super().run()


def test_of_several_threads_that_were_started_one_runs_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", Late)
    engine = engine_of()
    requests = [request_of(engine), request_of(engine)]
    for request in requests:
        engine.scheduler.submit(request)
    started = [thread for thread in threading.enumerate() if isinstance(thread, Late)]
    assert len(started) == 2
    Late.begin.set()
    for request in requests:
        engine.scheduler.wait(request)
    eventually(lambda: sum(thread.is_alive() for thread in started) == 1)


def test_an_interrupt_that_marks_the_loops_thread_as_ended_starts_no_second_loop() -> None:
    """As one within `Thread.is_alive` does: it gives the lock back by which Python knows that the thread lives."""
    engine = engine_of()
    prompt = torch.tensor([[5, 6]])
    expected = engine.generate(prompt, max_new_tokens=4)
    (thread,) = engine.scheduler._thread._threads.values()
    thread.is_alive = lambda: False  # type: ignore[method-assign]
    assert torch.equal(engine.generate(prompt, max_new_tokens=4), expected)
    assert list(engine.scheduler._thread._threads.values()) == [thread]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_generates_on_a_thread_of_its_own() -> None:
    engine = engine_of()
    prompt = torch.tensor([[5, 6]])
    expected = engine.generate(prompt, max_new_tokens=4)
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if torch.equal(engine.generate(prompt, max_new_tokens=4), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_stream_whose_thread_cannot_start_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        stream = Stream(request_of(engine), engine.scheduler, tiny_tokenizer())
        with pytest.raises(RuntimeError, match="start new thread"):
            next(stream)
    closing = threading.Thread(target=stream.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert engine.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)


def test_an_interrupt_while_a_request_is_queued_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    request = request_of(engine, new_tokens=400)

    def interrupt(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.scheduler.submit(request)
    assert engine.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)
    assert request.progress.is_over and request.sequences[0].new_tokens == 0


@pytest.mark.parametrize("where", ["metrics.add_request", "_admit"])
def test_an_error_of_the_loop_reaches_every_caller(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    engine = engine_of()
    scheduler, requests = engine.scheduler, [request_of(engine), request_of(engine)]

    def broken(*_: Any) -> None:
        raise RuntimeError("broken loop")

    with monkeypatch.context() as patch:
        owner, _, name = where.rpartition(".")
        patch.setattr(getattr(scheduler, owner) if owner else scheduler, name, broken)
        for request in requests:
            scheduler.submit(request)
        for request in requests:
            with pytest.raises(RuntimeError, match="broken loop"):
                scheduler.wait(request)
    assert engine.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)


def test_an_idle_batch_that_cannot_be_reset_fails_no_request_of_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    engine.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
    (idle,) = engine.scheduler.batches.values()
    monkeypatch.setattr(idle, "reset", lambda: 1 / 0)
    kinds = {"speculative_decoding": "force", "exit_layer": 1, "plan": "chain:2", "acceptance": "rejection"}
    out = engine.generate(torch.tensor([[7, 8]]), max_new_tokens=6, **kinds)
    assert out.shape == (1, 8)


def test_a_failing_swap_ends_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(pages=6)
    first, second = request_of(engine, 60, 200), request_of(engine, 60, 200)
    engine.scheduler.waiting.extend([*first.sequences, *second.sequences])

    def fail(*_: Any) -> None:
        raise MemoryError("no host memory")

    monkeypatch.setattr(Cache, "swap_out", fail)
    while engine.scheduler.step():
        pass
    assert first.error is None and first.sequences[0].new_tokens == 200
    assert second.error is not None and second.progress.is_over
    assert engine.cache.free_pages == engine.cache.num_pages


def test_a_failing_join_ends_the_requests_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    request = request_of(engine)
    monkeypatch.setattr(Batch, "_choose_governor", lambda self: (_ for _ in ()).throw(RuntimeError("broken")))
    engine.scheduler.submit(request)
    with pytest.raises(RuntimeError, match="broken"):
        engine.scheduler.wait(request)
    monkeypatch.undo()
    assert engine.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)


def test_a_step_that_fails_after_its_launch_gives_its_charge_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, request = idle_scheduler(IdleBackend(), Costs(), new_tokens=400)
    budget = scheduler.drafters.budget(Rules())

    def drafts() -> bool:
        return any(len(step.record.plan) for batch in scheduler.batches.values() for step in batch.unread)

    while not drafts():
        scheduler.step()
    monkeypatch.setattr(IdleBackend, "read", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    scheduler.step()
    assert request.error is not None and budget.left == budget.capacity


def test_a_join_that_fails_before_the_batch_holds_the_sequence_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Batch, sequences: Any) -> None:
        raise RuntimeError("the step in flight cannot be read")

    monkeypatch.setattr(Batch, "join", fail)
    engine = engine_of()
    with pytest.raises(RuntimeError, match="cannot be read"):
        engine.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    assert engine.cache.free_pages == engine.cache.num_pages


def test_a_prompt_that_cannot_be_prefilled_fails_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it shares a pass with the prompts of others."""
    prefill = TorchBackend.prefill

    def fail(self: TorchBackend, sequences: Any, exit: Any) -> Any:
        if any(len(sequence.prompt) == 9 for sequence in sequences):
            raise RuntimeError("this prompt cannot be prefilled")
        return prefill(self, sequences, exit)

    monkeypatch.setattr(TorchBackend, "prefill", fail)
    engine = engine_of()
    good, bad, other = requests = [request_of(engine, length) for length in (8, 9, 10)]
    for request in requests:
        engine.scheduler._requests.add(request)
        engine.scheduler.waiting.extend(request.sequences)
    while engine.scheduler.step():
        pass
    assert good.error is None and other.error is None and "cannot be prefilled" in str(bad.error)
    assert good.is_finished and other.is_finished
    assert engine.cache.free_pages == engine.cache.num_pages


def test_a_cancelled_request_leaves_no_prompt_states_behind() -> None:
    engine = engine_of()
    request = request_of(engine, 200)
    scheduler = engine.scheduler
    scheduler.waiting.extend(request.sequences)
    scheduler._admit()
    (batch,) = scheduler.batches.values()
    backend: Any = batch.backend
    backend._prompt_ends[request.sequences[0]] = [torch.zeros(1)]
    scheduler._remove(request)
    assert not backend._prompt_ends


def test_slots_hold_any_parameters_that_a_request_may_have() -> None:
    params = SamplingParams(do_sample=True, top_k=2**40, min_new_tokens=2**40, stop_token_ids=(2**40, 7))
    values = slot_values(Sequence([0, 0, 0, 5], 0, 0, 9, params))
    store = SlotStore(4, 2, 50, torch.device("cpu"), idle_page=0)
    store.write([1], [values], [2**60], [[3]])
    slots = store.first(2)
    assert slots.top_k.tolist()[1] == slots.min_length.tolist()[1] == 2**31 - 1
    assert slots.stops[1, :2].tolist() == [7, -1]


def test_banning_tokens_that_the_model_does_not_have_changes_nothing() -> None:
    store = SlotStore(2, 2, 50, torch.device("cpu"), idle_page=0)
    store.write_processing(1, SamplingParams(banned_token_ids=(3, 10**5)), [1], [2])
    assert store.bias[1].isinf().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("sequences", [1, 16, 17, 33, 64])
def test_a_forced_plan_fits_the_buffers_of_all_slots(sequences: int) -> None:
    batch: Any = Batch.__new__(Batch)
    batch.running, batch.backend = [None] * sequences, type("Backend", (), {"slots_for": staticmethod(bucket)})
    plan = batch._bounded(Plan.parse("tree:4,2,2,1"))
    assert (len(plan) + 1) * bucket(sequences) <= MAX_STEP_ROWS
    assert len(plan) or sequences > 16


def test_a_step_with_callables_keeps_its_logits_at_one_address() -> None:
    """Captured launches hold that address, and scratch moves when another step asks for more rows."""
    step: Any = DeviceStep.__new__(DeviceStep)
    step.chosen = torch.zeros(1, 1)
    step.decoder = SimpleNamespace(scratch=Scratch(torch.device("cpu")))
    step.model = SimpleNamespace(config=SimpleNamespace(vocab_size=8))
    before = step.logits.data_ptr()
    moved = step.decoder.scratch.take("logits", 4, 8, dtype=torch.float32)
    assert moved.data_ptr() != before
    assert step.logits.data_ptr() == before
