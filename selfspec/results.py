"""What a request gives back: statistics, outputs, completions and streams, made from a session's rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.runtime import Row, Session
from selfspec.text import Detokenizer


@dataclass(frozen=True)
class Stats:
    """What happened to one sequence."""

    new_tokens: int
    cycles: int
    drafted: int
    accepted: int
    accept_rate: float  # the chance that a reached depth held the target's token; 0 where nothing was drafted
    tokens_per_cycle: float
    plan: str  # the most used one
    exit_layer: int | None
    disabled_reason: str | None  # the first that held
    finish_reason: str
    elapsed_s: float


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns with return_dict_in_generate=True."""

    sequences: torch.Tensor  # [B * num_return_sequences, longest]
    stats: list[Stats]


@dataclass(frozen=True)
class Completion:
    """A completed prompt. `text` and `tokens` are the new ones only; `finish_reason` is 'stop' or 'length'."""

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats


class Stream(Iterator[str]):
    """Text pieces of one completion in progress. `completion` tells the rest once the pieces have run out."""

    def __init__(self, session: Session, tokenizer: Any) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._pieces = _pieces(session, tokenizer)

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops generating and frees the cache; harmless when already finished."""
        self._pieces.close()

    @property
    def completion(self) -> Completion | None:
        """The finished completion; None while there are pieces to come, and after an early close."""
        row = self._session.rows[0]
        return None if row.finish_reason is None else completion_of(row, self._session, self._tokenizer)


def _pieces(session: Session, tokenizer: Any) -> Generator[str, None, None]:
    """Not a method: a stream that is dropped must not be kept alive, cache and all, by its own generator."""
    detokenizer, row = Detokenizer(tokenizer), session.rows[0]
    shown = len(row.prompt)
    with closing(session.run()) as cycles:  # closing this generator alone leaves the inner one open on Python 3.12
        for _ in cycles:
            piece = detokenizer.add(row.tokens[shown:], last=row.finish_reason is not None)
            shown = len(row.tokens)
            if piece:
                yield piece


def completion_of(row: Row, session: Session, tokenizer: Any) -> Completion:
    tokens = row.tokens[len(row.prompt) :]
    assert row.finish_reason is not None
    text = Detokenizer(tokenizer).add(tokens, last=True)
    return Completion(text, tokens, row.finish_reason, stats_of(row, session))


def stats_of(row: Row, session: Session) -> Stats:
    reached = row.accepted + row.rejections
    assert row.finish_reason is not None
    return Stats(
        new_tokens=row.new_tokens,
        cycles=row.cycles,
        drafted=row.drafted,
        accepted=row.accepted,
        accept_rate=row.accepted / reached if reached else 0.0,
        tokens_per_cycle=row.new_tokens / row.cycles,
        plan=str(row.plans.most_common(1)[0][0]),
        exit_layer=session.exit.layer if session.exit is not None else None,
        disabled_reason=row.disabled_reason,
        finish_reason=row.finish_reason,
        elapsed_s=row.elapsed_s,
    )
