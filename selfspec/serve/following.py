"""Follows the engine's requests from the event loop: the decoding loop calls a listener, no thread waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from selfspec.scheduler import Scheduler
from selfspec.sequence import Request
from selfspec.sequence import Sequence as Sequence_
from selfspec.serve.draft_info import DraftInfo
from selfspec.serve.errors import ApiError, of_engine
from selfspec.serve.logprobs import ChoiceLogprobs
from selfspec.serve.stops import find_stop
from selfspec.serve.tools import ToolCallParser
from selfspec.text import Detokenizer

PAUSE = 3  # seconds of pause per second of work: the event loop takes a quarter of the time while tokens arrive
LONGEST_PAUSE_S = 0.02  # seconds; some work, such as reading a long prompt, is not the tokens'


@dataclass(frozen=True)
class Piece:
    """Text that a step added to one choice; `finish_reason` is set in the choice's last piece."""

    index: int
    text: str
    finish_reason: str | None
    draft_info: dict[str, Any] | None = None  # where the call asks for it
    logprobs: dict[str, Any] | None = None  # of tokens whose text may be held back, where the call asks for them
    tool_calls: Sequence[dict[str, Any]] = ()  # deltas


class Wakeups:
    """Sets events of the event loop from the decoding loop's thread. One wake-up serves all events of a step. After it
    the event loop pauses PAUSE times as long as it was busy: both loops need the interpreter, and the tokens of the
    steps meanwhile are sent together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[asyncio.Event] = deque()
        self._is_scheduled = False

    def wake(self, event: asyncio.Event) -> None:
        self._events.append(event)
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the event loop is closed: the server has stopped
                self._loop.call_soon_threadsafe(self._set_events)

    def _set_events(self) -> None:
        started = self._loop.time()
        while self._events:
            self._events.popleft().set()
        self._loop.call_soon(self._pause, started)  # runs after the tasks that wait for the events

    def _pause(self, started: float) -> None:
        pause = min(PAUSE * (self._loop.time() - started), LONGEST_PAUSE_S)
        self._loop.call_later(pause, self._resume)

    def _resume(self) -> None:
        self._is_scheduled = False  # before events are looked for: one that is added from here on schedules again
        if self._events and not self._is_scheduled:
            self._is_scheduled = True
            self._set_events()


class ChoiceText:
    """The text of one sequence so far. Holds back as many characters as a stop text that has begun may have."""

    def __init__(
        self, sequence: Sequence_, tokenizer: Any, stops: Sequence[str], echo: str, draft_info: bool = False
    ) -> None:
        self._sequence, self._stops = sequence, stops
        self._describer = DraftInfo(sequence) if draft_info else None
        self._detokenizer = Detokenizer(tokenizer, sequence.prompt)
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._echo, self._text = echo, ""
        self._tokens = self._shown = 0  # new tokens in the text; characters that were returned
        self.is_finished = False
        self.draft_info: dict[str, Any] | None = None  # of the text that `advance` returned

    def advance(self, new_tokens: int, finish_reason: str | None) -> str:
        """Returns the text to show after a step that left the sequence with so many new tokens."""
        start = len(self._sequence.prompt)
        tokens = self._sequence.tokens[start + self._tokens : start + new_tokens]
        self._tokens, self.is_finished = new_tokens, finish_reason is not None
        if finish_reason == "stop" and self._stops:
            self._add_end(tokens)
        else:
            self._add(tokens, last=self.is_finished)
        shown = len(self._text) if self.is_finished else max(self._shown, len(self._text) - self._held)
        piece = self._echo + self._text[self._shown : shown]
        self.draft_info = None
        if self._describer is not None and new_tokens and (piece or self.is_finished):
            self.draft_info = self._describer.chunk(self._text, self._shown, shown, new_tokens)
        self._echo, self._shown = "", shown
        return piece

    def _add(self, tokens: list[int], last: bool = False) -> None:
        if self._describer is None:
            self._text += self._detokenizer.add(tokens, last)
            return
        for token in tokens:
            self._text += self._detokenizer.add([token])
            self._describer.add_token(len(self._text))
        if last:
            self._text += self._detokenizer.add([], last)

    def _add_end(self, tokens: list[int]) -> None:
        """Adds the last tokens, and cuts the text before a stop text that the very last one completed."""
        self._add(tokens[:-1])
        before = len(self._text)
        self._add(tokens[-1:], last=True)
        self._text = self._text[: find_stop(self._text, self._stops, before)]


@dataclass
class AnswerChoice:
    """One sequence as its client gets it."""

    text: ChoiceText
    logprobs: ChoiceLogprobs | None = None  # None: not asked for
    calls: ToolCallParser | None = None  # None: the model may call no tool

    def advance(self, index: int, new_tokens: int, finish_reason: str | None) -> Piece | None:
        """Returns the piece after a step that left the sequence with so many new tokens; None if nothing is shown."""
        text = self.text.advance(new_tokens, finish_reason)
        logprobs = None if self.logprobs is None else self.logprobs.advance(new_tokens)
        deltas: list[dict[str, Any]] = []
        if self.calls is not None:
            text, deltas = self.calls.add(text, last=finish_reason is not None)
            if self.calls.calls and finish_reason == "stop":
                finish_reason = "tool_calls"
        if not text and not deltas and finish_reason is None and logprobs is None:
            return None
        return Piece(index, text, finish_reason, self.text.draft_info, logprobs, deltas)


class RunningCall:
    """The engine's requests of one call, from submission to the last piece."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Sequence[Request],
        choices: Sequence[Sequence[AnswerChoice]],  # for each request those of its sequences
        wakeups: Wakeups,
        most: int | None = None,  # new tokens that are shown of each sequence; None: all
        format_field: str = "",  # of the call, that the engine got as response_format
    ) -> None:
        self._scheduler, self._wakeups, self._event = scheduler, wakeups, asyncio.Event()
        self.requests, self._choices, self._most, self._format_field = requests, choices, most, format_field
        self._states: list[list[tuple[int, str | None]]] = [[] for _ in requests]
        for number, request in enumerate(requests):
            request.progress.listener = partial(self._record, number)

    @property
    def sequences(self) -> list[Sequence_]:
        return [sequence for request in self.requests for sequence in request.sequences]

    @property
    def new_tokens(self) -> int:
        """Tokens that were shown."""
        return sum(new_tokens for states in self._states for new_tokens, _ in states)

    @property
    def is_finished(self) -> bool:
        """Whether the last pieces of all choices were made."""
        return all(choice.text.is_finished for choices in self._choices for choice in choices)

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Submits the requests and yields the pieces of each step; raises ApiError for a request that failed. Leaving
        early cancels the requests, whose pages the decoding loop frees in its next pass."""
        try:
            for request in self.requests:
                self._scheduler.submit(request)
            while not self.is_finished:
                await self._event.wait()
                self._event.clear()
                if pieces := self._advance():
                    yield pieces
        finally:
            for request in self.requests:
                if not request.progress.is_over:
                    self._scheduler.cancel(request, wait=False)

    def _record(self, number: int) -> None:
        """Notes the state of a request's sequences between two steps; called by the decoding loop, which changes them
        at other times."""
        self._states[number] = [self._state(sequence) for sequence in self.requests[number].sequences]
        self._wakeups.wake(self._event)

    def _state(self, sequence: Sequence_) -> tuple[int, str | None]:
        """New tokens to show, and the reason why there are no more."""
        if self._most is None or sequence.new_tokens <= self._most:
            return sequence.new_tokens, sequence.finish_reason
        return self._most, "length" if sequence.finish_reason in ("stop", "length") else sequence.finish_reason

    def _advance(self) -> list[Piece]:
        pieces, index = [], 0
        for request, choices, states in zip(self.requests, self._choices, self._states, strict=True):
            if request.error is not None:
                raise of_engine(request.error, self._format_field)
            for at, (choice, (new_tokens, reason)) in enumerate(zip(choices, states, strict=False)):
                if reason == "cancelled":
                    raise ApiError(503, "the server is stopping: try again soon")
                piece = None if choice.text.is_finished else choice.advance(index + at, new_tokens, reason)
                if piece is not None:
                    pieces.append(piece)
            index += len(choices)
        return pieces
