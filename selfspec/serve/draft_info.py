"""What drafting did for a request, sent if it asks for it: the origin of each token, and totals of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from selfspec.sequence import Sequence


def speculation_metrics(sequences: Iterable[Sequence]) -> dict[str, Any]:
    """Returns totals over a request's sequences, by vLLM's names; `plans` counts steps by plan, and `off_reasons`
    sequences by their first reason for plain steps."""
    accepted: Counter[int] = Counter()  # steps that drafted, by accepted nodes
    plans: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    drafted = largest = 0
    for sequence in sequences:
        history = sequence.history
        drafted += history.drafted
        for (count, reached), steps in history.outcomes.items():
            if reached:
                accepted[count] += steps
        for plan, steps in history.plans.items():
            plans[str(plan)] += steps
            largest = max(largest, len(plan))
        if sequence.disabled_reason is not None:
            reasons[sequence.disabled_reason] += 1
    steps, total = accepted.total(), sum(count * steps for count, steps in accepted.items())
    return {
        "mean_acceptance_length": 1 + total / steps if steps else None,
        "draft_acceptance_rate": total / drafted if drafted else None,
        "acceptance_histogram": [accepted[count] for count in range(max(accepted, default=-1) + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": total,
        "num_draft_tokens": drafted,
        "num_spec_tokens": largest,  # nodes of the largest plan
        "plans": dict(plans),
        "off_reasons": dict(reasons),
    }


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
        history = self._sequence.history
        origins, tokens = history.origins, []
        for token_end in self._ends[self._tokens :]:
            if token_end > end:
                break
            tokens.append([text[start:token_end], origins[self._tokens]])
            start, self._tokens = max(start, token_end), self._tokens + 1
        if start < end:  # a part of the next token, or the incomplete character of the last one
            tokens.append([text[start:end], origins[min(self._tokens, new_tokens - 1)]])
        record = history.records[history.steps - 1]
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
