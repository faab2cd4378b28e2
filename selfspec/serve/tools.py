"""Tool calls in the text of an answer: finds and parses them, piece by piece, in the forms of the supported families.

Qwen writes `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with text before, between and after calls. Llama
writes `{"name": ..., "parameters": {...}}` at the beginning of an answer or after `<|python_tag|>`, and `;` between
calls. A call of a function that the request does not list stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from selfspec.grammar import JSON_OPTIONS

Json = dict[str, Any]

# A call up to its arguments. Calls written in another order are parsed once they are complete.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OBJECT = re.compile(r'\s*(?=\{\s*("|$))')  # up to a JSON object, or the beginning of one
_SPACE = " \t\n\r;"  # between calls
_DECODER = json.JSONDecoder(strict=False)  # takes line breaks in strings


@dataclass(frozen=True)
class ToolForm:
    """How a family writes tool calls."""

    opening: str  # text before a call
    closing: str  # text after a call
    begins_answer: bool  # a call at the beginning of an answer, or after another one, lacks the opening
    key: str  # of the arguments


QWEN = ToolForm("<tool_call>", "</tool_call>", begins_answer=False, key="arguments")
LLAMA = ToolForm("<|python_tag|>", "", begins_answer=True, key="parameters")


def tool_form(template: str) -> ToolForm:
    """Returns the form in which a chat template asks for calls; raises ValueError for a template without tools."""
    if "tools" not in template:
        raise ValueError("this model's chat template has no tools: leave tools out, or serve a model that calls them")
    if QWEN.opening in template and "<function=" not in template:
        return QWEN
    if "<|start_header_id|>" in template:
        return LLAMA
    raise ValueError("this model's chat template asks for tool calls in a form that is not supported: leave tools out")


def call_grammar(form: ToolForm, parameters: Mapping[str, Json | None], several: bool) -> str:
    """Returns a Lark grammar of an answer that calls one of the functions, whose JSON schemas are given by name; with
    `several` one call or more, where the form has an opening for each."""
    rules = [
        f'call_{number}: {json.dumps(_call_head(form, name))} %json {json.dumps(_schema(schema))} "}}"'
        for number, (name, schema) in enumerate(parameters.items())
    ]
    choice = " | ".join(f"call_{number}" for number in range(len(rules)))
    if form.begins_answer:
        return "\n".join([f"start: {choice}", *rules])
    call = f"call: {json.dumps(form.opening + chr(10))} ({choice}) {json.dumps(chr(10) + form.closing)}"
    return "\n".join([r'start: call ("\n" call)*' if several else "start: call", call, *rules])


def _call_head(form: ToolForm, name: str) -> str:
    return f'{{"name": {json.dumps(name)}, {json.dumps(form.key)}: '


def _schema(schema: Json | None) -> Json:
    """The schema of a function's arguments, none by default, with the white space of structured output."""
    given = {"additionalProperties": False} if schema is None else schema
    return {"x-guidance": JSON_OPTIONS, "type": "object", **given}


class ToolCallParser:
    """Splits the text of one choice into content and tool calls, as it arrives. Drops all calls but the first unless
    `several`."""

    def __init__(self, form: ToolForm, names: Collection[str], several: bool = True) -> None:
        self._form, self._names, self._several = form, names, several
        self._held = ""  # text that is neither content nor sent yet: the call in progress, or what may begin one
        self._opened: str | None = None  # text before the call in progress that belongs to it; None: no call
        self._sent: int | None = None  # characters of the call up to the arguments sent so far; None: no name was sent
        self._is_fresh = True  # only white space since the beginning or the last call
        self.calls = 0  # whose names were sent

    def add(self, text: str, last: bool) -> tuple[str, list[Json]]:
        """Returns the content and the deltas of tool calls that the text adds. `last`: the choice has ended."""
        self._held += text
        content, deltas = "", list[Json]()
        goes_on = True
        while goes_on:
            if self._opened is None:
                content += self._take_content(last)
                goes_on = self._opened is not None
            else:
                goes_on, returned = self._take_call(deltas, last)
                content += returned
        return content, deltas if self._several else [delta for delta in deltas if delta["index"] == 0]

    def _take_content(self, last: bool) -> str:
        """Takes the text before the next call, or all of it that can belong to none."""
        if self._is_fresh and self.calls and not self._drop_closing(last):
            return ""
        held = self._held
        end, start = self._find_call(held)
        if start is None:
            end = len(held) if last else len(held) - _common_end(held, self._form.opening)
        content = held[:end]
        if self._is_fresh and not content.strip():
            if start is None and not last:
                return ""  # until it is clear that no call follows the white space
            content = content if start is None else ""
        else:
            self._is_fresh = False
        self._opened, self._held = (None, held[end:]) if start is None else (held[end:start], held[start:])
        return content

    def _drop_closing(self, last: bool) -> bool:
        """Drops white space and closing after a call; returns False if a part of the closing may follow."""
        closing, held = self._form.closing, self._held.lstrip(_SPACE)
        if not last and held != closing and closing.startswith(held):
            return False
        self._held = held.removeprefix(closing).lstrip(_SPACE)
        return True

    def _find_call(self, held: str) -> tuple[int, int | None]:
        """Where the text before a call ends, and where the call's JSON begins; None: there is no call."""
        if self._form.begins_answer and self._is_fresh and (found := _OBJECT.match(held)):
            return found.end(), found.end()
        at = held.find(self._form.opening)
        return at, None if at < 0 else at + len(self._form.opening)

    def _take_call(self, deltas: list[Json], last: bool) -> tuple[bool, str]:
        """Sends what is new of the call in progress. Returns whether the call is over, and its text if it is none."""
        form, call = self._form, self._held.lstrip()
        end = _end_of_value(call, 0) if call.startswith("{") else 0 if call else None
        if end is None and last:
            end = len(call.partition(form.closing)[0]) if form.closing else len(call)
        self._send(call[:end], deltas, end is not None)
        if end is None:
            return False, ""
        opened, self._opened = self._opened or "", None
        if self._sent is None:
            self._is_fresh, end = False, end + len(self._held) - len(call) if end else 0
            content, self._held = opened + self._held[:end], self._held[end:]
            return True, content
        self._is_fresh, self._sent, self._held = True, None, call[end:]
        return True, ""

    def _send(self, call: str, deltas: list[Json], is_over: bool) -> None:
        """Appends the deltas of a call's text so far: name and id first, then the arguments as the model wrote them."""
        if self._sent is None:
            head = _HEAD.match(call)
            if head is not None and (name := _value_of(head[1])) in self._names:
                deltas.append(self._named(name))
                self._sent = head.end()
            elif is_over and isinstance(value := _value_of(call), dict) and value.get("name") in self._names:
                given = value.get("arguments", value.get("parameters")) or {}
                deltas.append(self._named(value["name"]))
                self._add_arguments(deltas, given if isinstance(given, str) else json.dumps(given))
                self._sent = len(call)
                return
        if self._sent is not None:
            start = _HEAD.match(call)
            end = None if start is None else _end_of_value(call, start.end())
            if end is None and start is not None:
                end = len(call) if is_over else self._end_of_arguments(call)
            if end is not None and end > self._sent:
                self._add_arguments(deltas, call[self._sent : end])
                self._sent = end

    def _end_of_arguments(self, call: str) -> int:
        """The end of the text of a call in progress that belongs to its arguments in any case: without the last braces,
        and without what may be the closing."""
        closing = self._form.closing
        if closing:
            call = call.partition(closing)[0]
            call = call[: len(call) - _common_end(call, closing)]
        return len(call.rstrip(" \t\n\r}"))

    def _named(self, name: str) -> Json:
        index, self.calls = self.calls, self.calls + 1
        function = {"name": name, "arguments": ""}
        return {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

    def _add_arguments(self, deltas: list[Json], text: str) -> None:
        deltas.append({"index": self.calls - 1, "function": {"arguments": text}})


def _end_of_value(text: str, start: int) -> int | None:
    """The end of the JSON value that begins at `start`; None if it is incomplete or not JSON."""
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _value_of(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _common_end(text: str, opening: str) -> int:
    """The number of characters at the end of the text with which the opening begins."""
    counts = range(min(len(text), len(opening) - 1), 0, -1)
    return next((count for count in counts if opening.startswith(text[-count:])), 0)
