"""Parts of the server without a socket: stop texts, wake-ups, defaults, wrong bodies, and clients that stop reading."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import GenerationConfig

from selfspec.sequence import Request, Sequence
from selfspec.serve import generating
from selfspec.serve.errors import ApiError
from selfspec.serve.following import LONGEST_PAUSE_S, PAUSE, ChoiceText, Wakeups
from selfspec.serve.generating import Generating
from selfspec.serve.limits import Limits
from selfspec.serve.prompts import engine_options
from selfspec.serve.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, read_body
from selfspec.serve.service import Service
from selfspec.serve.stops import StopTexts
from tests.serving import eventually, tiny_engine
from tests.tiny_tokenizer import ids_of, spaced_tokenizer, tiny_tokenizer

PROMPT = ids_of("a", "s", "t")


def first_stop(tokenizer: Any, prompt: list[int], new: list[int], stops: list[str], min_tokens: int = 0) -> int | None:
    """The number of new tokens at which the criterion ends the sequence; None if it never does."""
    criterion = StopTexts(tokenizer, stops, len(prompt), min_tokens)
    ends = (count for count in range(1, len(new) + 1) if criterion(torch.tensor([prompt + new[:count]]), None))
    return next(ends, None)


def test_a_stop_text_counts_in_the_new_text_only():
    new = ids_of("o", "p", "x", "s", "t", "o", "p")
    assert first_stop(tiny_tokenizer(), PROMPT, new, ["stop"]) == 7, "the prompt's end is not part of it"
    assert first_stop(tiny_tokenizer(), PROMPT, ids_of("x", "STOPPED"), ["TOP"]) == 2, "within a token"
    assert first_stop(tiny_tokenizer(), PROMPT, ids_of("é", "€"), ["é€"]) == 5, "once its last byte is there"
    assert first_stop(tiny_tokenizer(), PROMPT, new, ["x", "stop"], min_tokens=4) == 7
    assert first_stop(tiny_tokenizer(), PROMPT, new, ["never"]) is None
    assert first_stop(spaced_tokenizer(), [4, 5], [6, 7], [" w6"]) == 1, "the space before the first new word"


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_the_shown_text_never_contains_a_part_of_the_stop_text(step):
    new = ids_of("x", "s", "t", "x", "é", "s", "t", "o", "p")
    sequence = Sequence(PROMPT, 0, 0, 99, None)  # type: ignore[arg-type]
    Request([sequence])
    choice = ChoiceText(sequence, tiny_tokenizer(), ["stop", "zz"], echo="echo ")
    shown = ""
    for count in [*range(step, len(new), step), len(new)]:
        sequence.tokens = PROMPT + new[:count]
        shown += choice.advance(count, "stop" if count == len(new) else None)
        assert "echo xstxé".startswith(shown)
    assert shown == "echo xstxé"


def test_fields_that_are_not_given_have_the_models_values_then_openais():
    body = CompletionBody(prompt="x", top_p=0.5)
    plain = engine_options(body, GenerationConfig(), 16)
    assert plain == {
        "max_new_tokens": 16,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 0,
        "min_p": 0.0,
    }
    of_model = engine_options(body, GenerationConfig(temperature=0.6, top_k=20, top_p=0.9), 16)
    assert of_model == {**plain, "temperature": 0.6, "top_k": 20}
    greedy = engine_options(CompletionBody(prompt="x", temperature=1e-9, ignore_eos=True), GenerationConfig(), 16)
    assert greedy == {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}


WRONG: list[tuple[type[Body], dict[str, Any]]] = [  # each with a long list or object of wrong values
    (CompletionBody, {"prompt": [{}] * 999}),
    (CompletionBody, {"prompt": [[{}] * 999]}),
    (CompletionBody, {"prompt": "a", "stop": [1] * 999}),
    (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * 999}),
    (ChatBody, {"messages": [1] * 999}),
    (ChatBody, {"messages": [{"role": "a", "content": [{"type": "text"}] * 999}]}),
    (ChatBody, {"messages": [{"role": "a", "tool_calls": [{}] * 999}]}),
    (ChatBody, {"messages": [{"role": "a"}], "tools": [{}] * 999}),
    (DetokenizeBody, {"tokens": ["a"] * 999}),
]


def test_a_long_list_of_wrong_items_is_refused_at_the_first():
    for kind, fields in WRONG:
        with pytest.raises(ValidationError) as refused:
            kind.model_validate(fields)
        assert refused.value.error_count() <= 4, fields.keys()


def test_a_wrong_bias_is_refused_by_name():
    for bias in ("1", None, True, [1], 100.5, -101, 10**400):
        with pytest.raises(ApiError, match="logit_bias: its values must be numbers from -100 to 100"):
            read_body(CompletionBody, json.dumps({"prompt": "a", "logit_bias": {"1": 1, "2": bias}}).encode())


def test_more_prompts_than_sequences_are_possible_are_refused_before_they_are_read():
    for prompt in ("a", [1]):
        with pytest.raises(ApiError, match=f"at most {Limits().sequences} items") as refused:
            read_body(CompletionBody, json.dumps({"prompt": [prompt] * 999}).encode())
        assert (refused.value.status, refused.value.param) == (422, "prompt")


class ScriptedLoop:
    """Keeps scheduled calls until a test runs them; `now` is its clock."""

    def __init__(self) -> None:
        self.now, self.calls, self.delays = 0.0, [], []

    def time(self) -> float:
        return self.now

    def call_soon(self, function: Any, *arguments: Any) -> None:
        self.calls.append(lambda: function(*arguments))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, function: Any) -> None:
        self.delays.append(delay)
        self.calls.append(function)

    def run_next(self) -> None:
        self.calls.pop(0)()


def test_a_wake_up_of_the_event_loop_sets_all_events_and_the_next_one_waits_until_it_has_paused():
    loop: Any = ScriptedLoop()
    wakeups, events = Wakeups(loop), [asyncio.Event() for _ in range(3)]
    for event in events:
        wakeups.wake(event)
    assert len(loop.calls) == 1
    loop.run_next()
    assert all(event.is_set() for event in events)
    loop.now += 0.001  # the tasks that waited for the events are busy
    events[0].clear()
    wakeups.wake(events[0])
    loop.run_next()
    assert loop.delays == [pytest.approx(0.001 * PAUSE)] and not events[0].is_set()
    loop.run_next()
    assert events[0].is_set()
    loop.now += 2.0
    loop.run_next()
    assert loop.delays[1] == LONGEST_PAUSE_S
    loop.run_next()
    wakeups.wake(events[1])
    assert len(loop.calls) == 1, "after a pause without events the next one wakes the loop at once"


@pytest.mark.parametrize("read", [0, 4])
def test_a_client_that_stops_reading_is_cancelled_and_its_pages_are_freed(tmp_path, monkeypatch, read):
    """Already at the response's head, or after some events."""
    monkeypatch.setattr(generating, "STALLED_S", 0.05)
    engine = tiny_engine(tmp_path, max_position_embeddings=2048)
    service = Service(engine)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > read:
            await asyncio.Event().wait()  # the buffers are full

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        async with service.running():
            body = CompletionBody(prompt="abc", stream=True, max_tokens=2000)
            await asyncio.wait_for(Generating(service, body)({"type": "http"}, receive, send), 20)

    asyncio.run(run())
    assert service.gate.sequences == 0 and service.counters.finished == {"abort": 1}
    eventually(lambda: engine.cache.free_pages == engine.cache.num_pages)
    assert engine.metrics().tokens < 1000


@pytest.mark.parametrize("streams", [True, False])
def test_a_server_that_ends_tells_its_clients(tmp_path, streams):
    """It cancels the calls that are left after its grace."""
    engine = tiny_engine(tmp_path, max_position_embeddings=2048)
    service = Service(engine)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        async with service.running():
            body = CompletionBody(prompt="abc", stream=streams, max_tokens=2000)
            call = asyncio.create_task(Generating(service, body)({"type": "http"}, receive, send))
            while not (len(sent) > 1 if streams else service.gate.sequences):
                await asyncio.sleep(0.001)
            call.cancel()
            await call

    asyncio.run(run())
    error = sent[-1]["body"]
    if streams:
        error, done, _ = error.removeprefix(b"data: ").split(b"\n\n")
        assert done == b"data: [DONE]" and not sent[-1]["more_body"]
    assert json.loads(error)["error"]["message"] == "the server is shutting down: try again later"
    assert sent[0]["status"] == (200 if streams else 503)
    assert service.counters.finished == {"abort": 1}


@pytest.mark.parametrize("end", ["ready", "failed"])
def test_a_service_calls_after_warmup_once_before_it_is_ready_and_after_a_failure(tmp_path, monkeypatch, end):
    service, states = Service(tiny_engine(tmp_path)), list[str]()
    service.after_warmup = lambda: states.append(service.state)
    if end == "failed":
        monkeypatch.setattr(service.engine, "warmup", lambda *arguments: 1 / 0)

    async def run() -> None:
        async with service.running():
            while service.state == "warming up":
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert service.state == end and states == ["warming up" if end == "ready" else "failed"]
