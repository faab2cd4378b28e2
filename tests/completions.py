"""Completions made up for tests of what is printed about them."""

from __future__ import annotations

from selfspec import Completion, Stats
from selfspec.history import Change


def completed(
    origins: str,
    *changes: Change,
    plan: str = "tree:4",
    ood: bool = False,
    disabled_reason: str | None = None,
    elapsed_s: float = 2.0,
) -> Completion:
    """Returns one of tokens with these origins: d for drafted, e for decoded, p for plain."""
    names = [{"d": "drafted", "e": "decoded", "p": "plain"}[letter] for letter in origins]
    steps = len(origins) - origins.count("d")
    stats = Stats(
        new_tokens=len(origins),
        cycles=steps,
        drafted=4 * origins.count("e"),
        accepted=origins.count("d"),
        accept_rate=0.4,
        tokens_per_cycle=len(origins) / steps,
        plan=plan,
        exit_layer=3,
        disabled_reason=disabled_reason,
        finish_reason="length",
        elapsed_s=elapsed_s,
        changes=list(changes),
        ood=ood,
        accepted_by_depth=[],
        reached_by_depth=[],
    )
    return Completion("text", [5] * len(origins), "length", stats, names)
