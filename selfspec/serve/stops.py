"""Stop texts: a criterion that ends a sequence when its new text contains one, and the position to cut the text at."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import torch

_CONTEXT = 8  # tokens of the prompt's end that text is decoded after: a first token may be spelled differently
_SPARE_TOKENS = 8  # more than the tokens of one character, whose text is incomplete until the last of them


class StopTexts:
    """A stopping criterion for the sequences of one prompt: the new tokens' text contains one of the texts."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], prompt_length: int, min_tokens: int) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._prompt_length, self._shortest = prompt_length, prompt_length + min_tokens
        # A token of text has at least one byte, a character at most four; special tokens have no text.
        self._window = 4 * max(map(len, texts)) + _SPARE_TOKENS

    def __call__(self, tokens: torch.Tensor, _: Any) -> bool:
        """Returns whether the last token completes a stop text. `tokens`: [1, length], the prompt included."""
        length = tokens.shape[1]
        if length < self._shortest:
            return False
        start = max(0, self._prompt_length - _CONTEXT, length - self._window)
        last = tokens[0, start:].tolist()
        old = self._decode(last[: self._prompt_length - start]) if start < self._prompt_length else ""
        before, after = self._decode(last[:-1]), self._decode(last)
        shown = len(commonprefix((before, after)))
        return find_stop(after, self._texts, shown, len(commonprefix((old, after)))) is not None

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def find_stop(text: str, stops: Sequence[str], shown: int, start: int = 0) -> int | None:
    """Returns where the first stop text begins that begins at `start` or later and ends behind `shown` characters; None
    if there is none."""
    found = (text.find(stop, max(start, shown - len(stop) + 1)) for stop in stops)
    return min((at for at in found if at >= 0), default=None)
