"""Which tokens of a streamed text were drafted, the accepted lengths of its steps, and the plan; sent on request."""

from __future__ import annotations

from typing import Any

from selfspec.sequence import Sequence


class DraftInfo:
    """Describes the chunks of one sequence's text."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._ends: list[int] = []  # of each new token, the length of the text up to its end
        self._tokens = self._in_steps = 0  # tokens described so far, by their text and in accepted lengths

    def add_token(self, end: int) -> None:
        self._ends.append(end)

    def chunk(self, text: str, start: int, end: int, new_tokens: int) -> dict[str, Any]:
        """Describes the chunk `text[start:end]`, sent after a step that left the sequence with so many new tokens. A
        token whose text is partly held back, because a stop text may have begun, is listed once for each part."""
        origins, tokens = self._sequence.origins, []
        for token_end in self._ends[self._tokens :]:
            if token_end > end:
                break
            tokens.append([text[start:token_end], origins[self._tokens]])
            start, self._tokens = max(start, token_end), self._tokens + 1
        if start < end:  # a part of the next token, or the incomplete character of the last one
            tokens.append([text[start:end], origins[min(self._tokens, new_tokens - 1)]])
        record = self._sequence.records[self._sequence.steps - 1]
        return {
            "tokens": tokens,
            "accepted_lengths": self._accepted_lengths(origins, new_tokens),
            "plan": str(record.chosen),
            "off_reason": record.reason,
            "elapsed_s": round(self._sequence.elapsed_s, 6),  # in prefill and steps
        }

    def _accepted_lengths(self, origins: list[str], new_tokens: int) -> list[int]:
        """Returns the accepted lengths of the steps since the last chunk: a step ends with the one token that was not
        drafted, or with the end of the text."""
        lengths, length = [], 0
        for origin in origins[self._in_steps : new_tokens]:
            length += 1
            if origin != "drafted":
                lengths.append(length)
                length = 0
        self._in_steps = new_tokens
        return [*lengths, length] if length else lengths
