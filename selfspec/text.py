"""Between text and tokens: prompts in their accepted forms, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def is_messages(prompt: Any) -> bool:
    """Whether this is one chat: a list of {'role': ..., 'content': ...}."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def encode(tokenizer: Any, prompt: str | list[Message]) -> list[int]:
    """Token ids of a text as it is, or of a chat through the tokenizer's template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not is_messages(prompt):
        raise ValueError(f"a prompt must be a string or a list of messages with 'role' and 'content', not {prompt!r}")
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"a message needs 'role' and 'content', got {message!r}")
    if not tokenizer.chat_template:
        raise ValueError(
            "this model's tokenizer has no chat template: pass the prompt as one string instead of messages"
        )
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class Detokenizer:
    """Turns a growing list of tokens into text pieces whose concatenation is the decoded whole.

    A piece is held back while the text ends in an incomplete character. Each decoding starts a few tokens back, because
    the first token of a text may be spelled differently from the same token in its middle.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0  # decode from here, for context
        self._shown = 0  # tokens before here are already in the text

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that these tokens add; `last` gives out even an incomplete character."""
        self._tokens += tokens
        before = self._decode(self._tokens[self._start : self._shown])
        after = self._decode(self._tokens[self._start :])
        if not last and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
