"""Answers one chat or text completion, whole or in server-sent events; ends it when its client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.sequence import Sequence
from selfspec.serve.answers import Answer, Collected, Usage
from selfspec.serve.draft_info import speculation_metrics
from selfspec.serve.errors import ApiError, log_refusal, of_engine
from selfspec.serve.following import AnswerChoice, ChoiceText, RunningCall
from selfspec.serve.logprobs import ChoiceLogprobs, Json
from selfspec.serve.logs import log_fields
from selfspec.serve.prompts import count_sequences, prepare
from selfspec.serve.protocol import ChatBody, CompletionBody
from selfspec.serve.service import Service
from selfspec.serve.tools import ToolCallParser, ToolForm

_log = logging.getLogger(__name__)

STALLED_S = 1.0  # seconds that a write may wait for room in the buffers


class Generating(Response):
    """The response to a checked body; generates when it is called to send."""

    def __init__(self, service: Service, body: ChatBody | CompletionBody) -> None:
        super().__init__()
        self._service, self._body = service, body
        kind = "chat" if isinstance(body, ChatBody) else "text"
        self._answer = Answer(kind, service.engine.name, body.includes_usage)  # type: ignore[arg-type]
        self._first_s: float | None = None  # seconds to the first piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = Events(send)
        try:
            await unless_disconnected(receive, self._respond(events, scope, receive, send))
        except asyncio.CancelledError:  # the server ends, and its grace for running calls is over
            stopped = ApiError(503, "the server is shutting down: try again later")
            with suppress(Stalled, RuntimeError):  # RuntimeError: a whole answer was being sent
                await _refusal(stopped, events)(scope, receive, send)

    async def _respond(self, events: Events, scope: Scope, receive: Receive, send: Send) -> None:
        count = count_sequences(self._body)
        param = "messages" if isinstance(self._body, ChatBody) else "prompt"
        started = time.monotonic()
        try:
            with self._service.gate.admit(count, param):
                run, prompt_tokens = await self._prepare()
                whole = await self._generate(run, prompt_tokens, events, started)
        except Stalled:  # the server closes the connection of an unfinished response
            self._add_abort(count)
            return
        except Exception as error:
            await _refuse(error, events)(scope, receive, send)
            return
        except asyncio.CancelledError:
            self._add_abort(count)
            raise
        if whole is not None:
            await whole(scope, receive, send)

    def _add_abort(self, count: int) -> None:
        """Counts and logs a call of so many sequences that ends without its whole answer."""
        self._service.counters.add_abort(count)
        log_fields(_log, "aborted", id=self._answer.id, sequences=count)

    async def _prepare(self) -> tuple[RunningCall, int]:
        service = self._service
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(service.preparing, prepare, service.engine, self._body)
        assert service.wakeups is not None
        choices = [
            [self._choice(sequence, echo, prepared.form) for sequence in request.sequences]
            for request, echo in zip(prepared.requests, prepared.echoes, strict=True)
        ]
        run = RunningCall(
            service.engine.scheduler,
            prepared.requests,
            choices,
            service.wakeups,
            self._body.new_tokens,
            self._body.format_field,
        )
        return run, prepared.prompt_tokens

    def _choice(self, sequence: Sequence, echo: str, form: ToolForm | None) -> AnswerChoice:
        body, service = self._body, self._service
        choice = AnswerChoice(
            ChoiceText(sequence, service.engine.tokenizer, body.stops, echo, bool(body.return_draft_info))
        )
        if body.top is not None:
            choice.logprobs = ChoiceLogprobs(sequence, service.token_bytes, self._answer.kind, echo)
        if form is not None and isinstance(body, ChatBody):
            names = {tool.function.name for tool in body.callable_tools}
            choice.calls = ToolCallParser(form, names, body.may_call_several)
        return choice

    async def _generate(self, run: RunningCall, prompt_tokens: int, events: Events, started: float) -> Response | None:
        """Runs the requests; sends events, or returns the whole answer."""
        last: list[Json] = []
        response = None
        if self._body.stream:
            last = await self._stream(run, events, started)
        else:
            response = await self._collect(run, started)
        seconds = time.monotonic() - started
        self._service.counters.add(run.sequences, prompt_tokens, self._first_s or seconds, seconds)
        cached = sum(sequence.cached_tokens for sequence in run.sequences)
        usage = Usage(prompt_tokens, run.new_tokens, min(cached, prompt_tokens))
        self._log_answer(run.sequences, usage, seconds)
        metrics = {}
        if self._body.return_metrics:
            metrics = {"metrics": {"speculative_decoding": speculation_metrics(run.sequences)}}
        if response is not None:
            return JSONResponse(self._answer.whole(response, usage, metrics))
        if (totals := self._answer.totals(usage, metrics)) is not None:
            last.append(totals)
        await events.end(*last)
        return None

    def _log_answer(self, sequences: list[Sequence], usage: Usage, seconds: float) -> None:
        log_fields(
            _log,
            "answered",
            id=self._answer.id,
            kind=self._answer.kind,
            stream=bool(self._body.stream),
            sequences=len(sequences),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            new_tokens=usage.completion_tokens,
            drafted_tokens=sum(sequence.history.drafted for sequence in sequences),
            accepted_tokens=sum(sequence.history.accepted for sequence in sequences),
            first_token_s=round(self._first_s or seconds, 4),
            seconds=round(seconds, 4),
        )

    async def _stream(self, run: RunningCall, events: Events, started: float) -> list[Json]:
        """Sends the chunks of each step; returns those of the last one, which are sent with the end of the stream."""
        async with aclosing(run.pieces()) as steps:
            async for pieces in steps:
                opening = [] if events.is_started else self._answer.opening(len(run.sequences))
                self._first_s = self._first_s or time.monotonic() - started
                chunks = [*opening, *(chunk for piece in pieces for chunk in self._answer.chunks(piece))]
                if run.is_finished:
                    return chunks
                await events.write(*chunks)
        return []

    async def _collect(self, run: RunningCall, started: float) -> list[Collected]:
        choices = [Collected() for _ in run.sequences]
        async with aclosing(run.pieces()) as steps:
            async for pieces in steps:
                self._first_s = self._first_s or time.monotonic() - started
                for piece in pieces:
                    choices[piece.index].add(piece)
        return choices


def _refuse(error: Exception, events: Events) -> ASGIApp:
    """Returns what sends an error of the engine, and logs faults."""
    refusal = of_engine(error)
    if refusal.status >= 500:
        _log.error("a request failed with status %d", refusal.status, exc_info=error)
    else:
        log_refusal(refusal)
    return _refusal(refusal, events)


def _refusal(refusal: ApiError, events: Events) -> ASGIApp:
    """Returns what sends a refusal: a response, or an event where the response has begun."""

    async def send_event(*_: Any) -> None:
        await events.end(refusal.body)

    return send_event if events.is_started else refusal.response()


class Stalled(Exception):
    """The client does not read, or more slowly than its text is generated."""


class Events:
    """A response of server-sent events; its headers go out with the first event. Writes raise Stalled."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False

    async def write(self, *events: Json) -> None:
        """Sends the events in one write."""
        await self._write(_encoded(events), True)

    async def end(self, *events: Json) -> None:
        """Sends the last events and the end of the stream in one write."""
        await self._write(_encoded(events) + b"data: [DONE]\n\n", False)

    async def _write(self, data: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(STALLED_S):
                await self._start()
                message: Message = {"type": "http.response.body", "body": data, "more_body": more}
                await self._send(message)
        except TimeoutError:
            raise Stalled from None

    async def _start(self) -> None:
        """Sends the headers, once. The server first waits for the client to read what went before on its connection."""
        if not self.is_started:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.is_started = True


def _encoded(events: Iterable[Json]) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work in the calling task; cancels it when the client disconnects."""
    task, is_working = asyncio.current_task(), True
    assert task is not None

    def cancel(_: Any) -> None:
        if is_working:
            task.cancel()

    gone = asyncio.ensure_future(_disconnection(receive))
    gone.add_done_callback(cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not gone.done():
            raise  # the task was cancelled
        task.uncancel()
    finally:
        is_working = False
        gone.cancel()


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
