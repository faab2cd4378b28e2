"""Converts prompts to tokens, and tokens to text piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]
Prompt = str | list[Message]  # a text to continue, or a chat to answer

# Tokens of the prompt's end that text is decoded after, and tokens that may wait for the rest of their last character,
# which has 4 bytes at most.
_CONTEXT = 8


def is_messages(prompt: Any) -> bool:
    """Returns whether this is one chat: a list of {'role': ..., 'content': ...}."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def encode(tokenizer: Any, prompt: Prompt, tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
    """Returns the token ids of a text as it is, or of a chat by the tokenizer's chat template, with `tools` in it."""
    if isinstance(prompt, str):
        return _tokens(tokenizer, prompt)
    if not is_messages(prompt):
        raise ValueError(f"a prompt must be a string or a list of messages with 'role' and 'content', not {prompt!r}")
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"a message needs 'role' and 'content', got {message!r}")
    if not tokenizer.chat_template:
        raise ValueError(
            "this model's tokenizer has no chat template: pass the prompt as one string instead of messages"
        )
    messages = [{**message, "content": _plain(message["content"])} for message in prompt]
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError, RecursionError) as error:  # templates refuse some orders of roles
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    return _tokens(tokenizer, text, add_special_tokens=False)


def _tokens(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Without the tokenizer's warning of a text longer than the context: requests refuse it with a better message."""
    try:
        text.encode()
    except UnicodeError as error:
        raise ValueError(f"the text is not Unicode: {error}; decode its bytes as UTF-8") from None
    return list(tokenizer(text, verbose=False, **options)["input_ids"])


def _plain(content: Any) -> Any:
    """Joins the text parts of a message's content; content that is not a list stays as it is."""
    if not isinstance(content, list | tuple):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            given = repr(part) if kind in (None, "text") else f"one of type {kind!r}"
            raise ValueError(f"a message's content parts must be {{'type': 'text', 'text': ...}}, not {given}")
    return "".join(part["text"] for part in content)


class Detokenizer:
    """Turns tokens that follow a prompt into text pieces; together these are what the tokens add to the prompt's text.

    A piece is held back while the text ends in an incomplete character. Each decoding starts a few tokens back, because
    the first token of a text may be spelled differently from the same token in its middle.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = self._end_of(prompt)
        self._start = 0  # decode from here, for context
        self._shown = len(self._tokens)  # tokens before here are already in the text

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """Returns the text that these tokens add; with `last` also an incomplete character."""
        count = len(self._tokens)
        self._tokens += tokens
        after = self._decode(self._tokens[self._start :])
        if len(tokens) > 1 and "\ufffd" in after:  # some decoders also replace whole characters beside a cut one
            del self._tokens[count:]
            return "".join(self.add(tokens[i : i + 1], last and i == len(tokens) - 1) for i in range(len(tokens)))
        before = self._decode(self._tokens[self._start : self._shown])
        is_cut = after.endswith("\ufffd") and len(self._tokens) - self._shown < _CONTEXT
        if not last and (after == before or is_cut):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        if after.startswith(before):
            return after[len(before) :]
        if not before.endswith("\ufffd"):
            return self._decode(self._tokens[self._start :])
        return after[len(commonprefix((before, after))) :]  # a character begun in the prompt is in neither as a whole

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Returns the last tokens of the prompt, at least 8 and enough to have text, which special tokens have not, and
        to begin with a whole character."""
        count = _CONTEXT
        while count < len(prompt) and self._decode(list(prompt[-count:]))[:1] in ("", "\ufffd"):
            count *= 2
        return list(prompt[-count:])

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
