"""The JSON of answers, whole and in chunks, of chat and text completions."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> Json:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


@dataclass(frozen=True)
class Answer:
    """One answer: its id, and the shapes of its choices."""

    kind: Literal["chat", "text"]
    model: str
    includes_usage: bool = False  # in chunks
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, texts: list[str], reasons: list[str | None], usage: Usage) -> Json:
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            content: Json = {"text": text}
            if self.kind == "chat":
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": reason})
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {**self._head(name), "choices": choices, "usage": usage.as_json()}

    def opening(self, count: int) -> list[Json]:
        """The chunks that come first: of a chat the role, for each choice."""
        if self.kind == "text":
            return []
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(count)]

    def delta(self, index: int, text: str, draft_info: Json | None = None) -> Json:
        return self._chunk(index, {"content": text} if self.kind == "chat" else text, draft_info=draft_info)

    def end(self, index: int, reason: str, draft_info: Json | None = None) -> Json:
        return self._chunk(index, {} if self.kind == "chat" else "", reason, draft_info)

    def usage(self, usage: Usage) -> Json:
        return {**self._head(self._chunk_name), "choices": [], "usage": usage.as_json()}

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _chunk(self, index: int, content: Any, reason: str | None = None, draft_info: Json | None = None) -> Json:
        key = "delta" if self.kind == "chat" else "text"
        choice = {"index": index, key: content, "logprobs": None, "finish_reason": reason}
        if draft_info is not None:
            choice["draft_info"] = draft_info
        chunk = {**self._head(self._chunk_name), "choices": [choice]}
        return {**chunk, "usage": None} if self.includes_usage else chunk

    def _head(self, name: str) -> Json:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": name, "created": self.created, "model": self.model}
