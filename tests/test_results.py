"""What becomes of a session's rows: statistics, completions, and streams of text with each token's origin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from selfspec.governor.governor import Change
from selfspec.results import Completion, Stream, completion_of, stats_of
from selfspec.speculation.plan import NONE, Plan
from tests.tiny_tokenizer import ids_of, tiny_tokenizer

TREE = Plan.parse("tree:4,2")

Cycle = list[tuple[str, int]]  # origins and tokens


class Script:
    """Stands in for a session of one row: each cycle brings the tokens that it is told to bring."""

    def __init__(self, *cycles: Cycle, exit_layer: int | None = 3, fails: bool = False) -> None:
        self.script, self.fails, self.closed = cycles, fails, 0
        self.owed: list[str] = []
        self.exit = None if exit_layer is None else SimpleNamespace(layer=exit_layer)
        prompt = ids_of("a", "b")
        self.row = SimpleNamespace(
            prompt=prompt,
            tokens=list(prompt),
            new_tokens=0,
            finish_reason=None,
            cycles=0,
            drafted=0,
            accepted=0,
            rejections=0,
            plans=Counter(),
            disabled_reason=None,
            elapsed_s=0.5,
            origins=[],
            changes=[],
            ood=False,
            accepted_by_depth=[],
            reached_by_depth=[],
        )
        self.rows: Any = [self.row]

    def run(self) -> Iterator[None]:
        try:
            for index, cycle in enumerate(self.script):
                self.tell()
                for origin, token in cycle:
                    self.row.tokens.append(token)
                    self.owed.append(origin)
                    self.row.new_tokens += 1
                if self.fails:
                    raise ZeroDivisionError
                self.row.cycles += 1
                self.row.plans[NONE if cycle[0][0] == "plain" else TREE] += 1
                if index == len(self.script) - 1:
                    self.row.finish_reason = "length"
                yield
        finally:
            self.tell()
            self.closed += 1

    def tell(self) -> None:
        """Where tokens come from is known when somebody asks, or later."""
        self.row.origins += self.owed
        self.owed = []


def cycle(origins: str, *pieces: str) -> Cycle:
    """Origins by their letters: two drafted tokens and the model's own are 'dde', a plain one is 'p'."""
    names = {"d": "drafted", "e": "decoded", "p": "plain"}
    return list(zip([names[letter] for letter in origins], ids_of(*pieces), strict=True))


def stream_of(*cycles: Cycle, **options: Any) -> Stream:
    return Stream(Script(*cycles, **options), tiny_tokenizer())  # type: ignore[arg-type]


CYCLES = [cycle("dde", "the", "x", "and"), cycle("p", "y"), cycle("e", "z"), cycle("de", "one", "two")]
MARKED = [
    ("the", "drafted"),
    ("x", "drafted"),
    ("and", "decoded"),
    ("y", "plain"),
    ("z", "decoded"),
    ("one", "drafted"),
    ("two", "decoded"),
]
TEXT = "thexandyzonetwo"


class TestStreams:
    def test_pieces_come_cycle_by_cycle(self):
        assert list(stream_of(*CYCLES)) == ["thexand", "y", "z", "onetwo"]

    def test_marked_pieces_come_token_by_token_with_their_origin(self):
        assert list(stream_of(*CYCLES).marked()) == MARKED

    @pytest.mark.parametrize("taken", range(len(MARKED) + 1))
    def test_one_may_go_on_without_marks(self, taken: int):
        stream = stream_of(*CYCLES)
        marked = list(islice(stream.marked(), taken))
        assert marked == MARKED[:taken]
        assert "".join(piece for piece, _ in marked) + "".join(stream) == TEXT

    @pytest.mark.parametrize("taken", range(5))
    def test_one_may_go_on_with_marks(self, taken: int):
        stream = stream_of(*CYCLES)
        assert "".join(islice(stream, taken)) + "".join(piece for piece, _ in stream.marked()) == TEXT

    def test_a_character_of_several_tokens_comes_with_the_last_of_them(self):
        first, second = ids_of("é")
        over_two_cycles = [("plain", first)], [("drafted", second), *cycle("e", "b")]
        assert list(stream_of(*over_two_cycles).marked()) == [("é", "drafted"), ("b", "decoded")]
        at_the_end = cycle("p", "x"), cycle("dde", "€")
        assert list(stream_of(*at_the_end).marked()) == [("x", "plain"), ("€", "decoded")]

    def test_a_character_cut_short_at_the_end_is_shown_as_in_the_completion(self):
        cut = cycle("de", "x", "y"), [("drafted", token) for token in ids_of("€")[:2]]
        stream = stream_of(*cut)
        assert "".join(piece for piece, _ in stream.marked()) == "xy\ufffd\ufffd"
        assert stream.completion is not None and stream.completion.text == "xy\ufffd\ufffd"

    def test_the_completion_is_there_once_the_pieces_have_run_out(self):
        stream = stream_of(*CYCLES)
        seen = [stream.completion is None for _ in stream.marked()]
        assert seen == [True] * 6 + [False]
        assert stream.completion is not None
        assert stream.completion.origins == [origin for _, origin in MARKED]

    def test_closing_early_ends_the_session_and_leaves_no_completion(self):
        stream = stream_of(*CYCLES)
        pieces = stream.marked()
        next(pieces)
        stream.close()
        assert stream.completion is None and stream._session.closed == 1  # type: ignore[attr-defined]

    def test_dropping_the_marks_and_the_stream_ends_the_session_at_once(self):
        stream = stream_of(*CYCLES)
        session: Any = stream._session
        pieces = stream.marked()
        next(pieces)
        del stream
        assert session.closed == 0
        del pieces
        assert session.closed == 1

    @pytest.mark.parametrize("marked", [False, True], ids=["pieces", "marked"])
    def test_tokens_of_a_cycle_that_failed_are_never_shown(self, marked: bool):
        stream = stream_of(*CYCLES, fails=True)
        with pytest.raises(ZeroDivisionError):
            next(stream.marked() if marked else stream)
        assert list(stream) == list(stream.marked()) == []


class TestCompletions:
    def finished(self, *cycles: Cycle, exit_layer: int | None = 3, **row: Any) -> tuple[Any, Script]:
        session = Script(*cycles, exit_layer=exit_layer)
        for _ in session.run():
            pass
        vars(session.row).update(row)
        return session.row, session

    def completion(self, *cycles: Cycle, **row: Any) -> Completion:
        return completion_of(*self.finished(*cycles, **row), tiny_tokenizer())  # type: ignore[arg-type]

    def test_every_token_has_an_origin(self):
        completion = self.completion(*CYCLES)
        assert completion.text == TEXT
        assert len(completion.tokens) == len(completion.origins) == completion.stats.new_tokens == 7
        assert completion.origins == [origin for _, origin in MARKED]

    def test_statistics_tell_every_change_and_acceptance_by_depth(self):
        changes = [Change(0, 0, "tree:4,2", None), Change(2, 5, "none", "goodput")]
        row = {"changes": changes, "ood": True, "accepted_by_depth": [3, 1], "reached_by_depth": [4, 3]}
        stats = self.completion(*CYCLES, **row, accepted=4, rejections=3, disabled_reason="goodput").stats
        assert (stats.changes, stats.ood, stats.disabled_reason) == (changes, True, "goodput")
        assert (stats.accepted_by_depth, stats.reached_by_depth) == ([3, 1], [4, 3])
        assert stats.accept_rate == 4 / 7
        assert (stats.plan, stats.cycles, stats.tokens_per_cycle) == ("tree:4,2", 4, 7 / 4)

    def test_results_do_not_change_with_the_row(self):
        row, session = self.finished(*CYCLES, accepted_by_depth=[1], reached_by_depth=[1])
        completion = completion_of(row, session, tiny_tokenizer())  # type: ignore[arg-type]
        for grows in (row.origins, row.changes, row.accepted_by_depth, row.reached_by_depth):
            grows.append(None)
        stats = completion.stats
        assert (len(completion.origins), len(stats.changes)) == (7, 0)
        assert (stats.accepted_by_depth, stats.reached_by_depth) == ([1], [1])

    def test_without_an_exit_there_is_no_layer(self):
        stats = stats_of(*self.finished(cycle("p", "x"), exit_layer=None))  # type: ignore[arg-type]
        assert (stats.exit_layer, stats.plan, stats.accept_rate) == (None, "none", 0)
        assert (stats.ood, stats.changes, stats.accepted_by_depth, stats.reached_by_depth) == (False, [], [], [])
