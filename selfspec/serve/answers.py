"""The JSON of answers, whole and in chunks, of chat and text completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from selfspec.serve.following import Piece
from selfspec.serve.logprobs import Json, joined


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, whose KV pages were reused

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class Collected:
    """One choice of a whole answer, collected from its pieces."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[Json] = field(default_factory=list)
    tool_calls: list[Json] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.finish_reason = piece.finish_reason
        if piece.logprobs is not None:
            self.logprobs.append(piece.logprobs)
        for delta in piece.tool_calls:
            if "id" in delta:
                self.tool_calls.append({name: delta[name] for name in ("id", "type", "function")})
            else:
                self.tool_calls[-1]["function"]["arguments"] += delta["function"]["arguments"]

    @property
    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": self.text, "refusal": None}
        return {**message, "content": self.text or None, "tool_calls": self.tool_calls} if self.tool_calls else message


@dataclass(frozen=True)
class Answer:
    """One answer: its id, and the shapes of its choices."""

    kind: Literal["chat", "text"]
    model: str
    includes_usage: bool = False  # in chunks
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, collected: list[Collected], usage: Usage, metrics: Json) -> Json:
        choices = []
        for index, answer in enumerate(collected):
            content: Json = {"message": answer.message} if self.kind == "chat" else {"text": answer.text}
            choices.append(
                {"index": index, **content, "logprobs": joined(answer.logprobs), "finish_reason": answer.finish_reason}
            )
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {**self._head(name), "choices": choices, "usage": usage.as_json(), **metrics}

    def opening(self, count: int) -> list[Json]:
        """The chunks that come first: of a chat the role, for each choice."""
        if self.kind == "text":
            return []
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(count)]

    def chunks(self, piece: Piece) -> Iterator[Json]:
        """The chunks of a piece: its text, then tool calls, then the finish reason."""
        draft_info = piece.draft_info
        if piece.text or piece.logprobs is not None:
            content = {"content": piece.text} if self.kind == "chat" else piece.text
            yield self._chunk(piece.index, content, None, draft_info, piece.logprobs)
            draft_info = None
        for delta in piece.tool_calls:
            yield self._chunk(piece.index, {"tool_calls": [delta]})
        if piece.finish_reason is not None:
            yield self._chunk(piece.index, {} if self.kind == "chat" else "", piece.finish_reason, draft_info)

    def totals(self, usage: Usage, metrics: Json) -> Json | None:
        """The last chunk: usage and metrics, as far as they were asked for; None: neither was."""
        asked = {"usage": usage.as_json(), **metrics} if self.includes_usage else metrics
        return {**self._head(self._chunk_name), "choices": [], **asked} if asked else None

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _chunk(
        self,
        index: int,
        content: Any,
        reason: str | None = None,
        draft_info: Json | None = None,
        logprobs: Json | None = None,
    ) -> Json:
        key = "delta" if self.kind == "chat" else "text"
        choice = {"index": index, key: content, "logprobs": logprobs, "finish_reason": reason}
        if draft_info is not None:
            choice["draft_info"] = draft_info
        chunk = {**self._head(self._chunk_name), "choices": [choice]}
        return {**chunk, "usage": None} if self.includes_usage else chunk

    def _head(self, name: str) -> Json:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": name, "created": self.created, "model": self.model}
