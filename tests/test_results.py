"""What a request returns: statistics, completions, and streams of text with each token's origin."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from selfspec.drafters import Drafter
from selfspec.history import Change, StepRecord
from selfspec.results import Completion, Stream, completion_of, stats_of
from selfspec.sequence import Request, Sequence
from selfspec.speculation.plan import NONE, Plan
from tests.tiny_tokenizer import ids_of, tiny_tokenizer

TREE = Plan.parse("tree:4,2")
FIRST_OF_DEPTH = [0, 1, 5]  # nodes of that tree

Cycle = list[tuple[str, int]]  # origins and tokens of a step


class Script:
    """Stands in for a scheduler with one request: each step brings the tokens that the test lists."""

    def __init__(self, *cycles: Cycle, exit_layer: int | None = 3, fails: bool = False) -> None:
        self.script, self.fails, self.ended = cycles, fails, 0
        prompt = ids_of("a", "b")
        self.sequence = Sequence(prompt, 0, 0, max_length=len(prompt) + sum(map(len, cycles)))
        exit: Any = SimpleNamespace(layer=exit_layer)
        self.request = Request([self.sequence], drafter=None if exit_layer is None else Drafter(exit))

    def submit(self, request: Request) -> None:
        assert request is self.request

    def follow(self, request: Request) -> Iterator[int]:
        try:
            for cycle in self.script:
                if self.fails:
                    raise ZeroDivisionError
                self.step(cycle)
                if self.sequence.is_finished:
                    request.progress.end(self.sequence.new_tokens)
                yield self.sequence.new_tokens
        except GeneratorExit:
            request.is_cancelled = True
            raise
        finally:
            self.ended += 1

    def cancel(self, request: Request) -> None:
        request.finish("cancelled")

    def step(self, cycle: Cycle) -> None:
        for origin, token in cycle:
            self.sequence.append(token, origin == "drafted")
        drafted = sum(origin == "drafted" for origin, _ in cycle)
        last = drafted - 1 if cycle[-1][0] == "drafted" else drafted  # an end that was drafted too is no node's
        plan = NONE if cycle[0][0] == "plain" else TREE
        record = StepRecord.of(plan, plan, "goodput" if plan is NONE else None)
        self.sequence.history.add(record, FIRST_OF_DEPTH[last])

    def run(self) -> Sequence:
        for _ in self.follow(self.request):
            pass
        return self.sequence


def cycle(origins: str, *pieces: str) -> Cycle:
    """Origins by their letters: two drafted tokens and the model's own are 'dde', a plain one is 'p'."""
    names = {"d": "drafted", "e": "decoded", "p": "plain"}
    return list(zip([names[letter] for letter in origins], ids_of(*pieces), strict=True))


def stream_of(*cycles: Cycle, **options: Any) -> Stream:
    script: Any = Script(*cycles, **options)
    return Stream(script.request, script, tiny_tokenizer())


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

    def test_there_is_no_completion_while_pieces_of_an_ended_request_are_to_come(self):
        stream = stream_of(*CYCLES)
        next(stream)
        for ahead in CYCLES[1:]:  # the loop goes on while the stream's reader does something else
            stream._scheduler.step(ahead)  # type: ignore[attr-defined]
        assert stream._sequence.is_finished and stream.completion is None

    def test_closing_early_ends_the_request_and_leaves_no_completion(self):
        stream = stream_of(*CYCLES)
        pieces = stream.marked()
        next(pieces)
        stream.close()
        assert stream.completion is None and stream._sequence.finish_reason == "cancelled"

    def test_dropping_the_marks_and_the_stream_ends_the_request_at_once(self):
        stream = stream_of(*CYCLES)
        script: Any = stream._scheduler
        pieces = stream.marked()
        next(pieces)
        del stream
        assert (script.ended, script.request.is_cancelled) == (0, False)
        del pieces
        assert (script.ended, script.request.is_cancelled) == (1, True)

    @pytest.mark.parametrize("marked", [False, True], ids=["pieces", "marked"])
    def test_a_failing_request_raises_and_shows_nothing_more(self, marked: bool):
        stream = stream_of(*CYCLES, fails=True)
        with pytest.raises(ZeroDivisionError):
            next(stream.marked() if marked else stream)
        assert list(stream) == list(stream.marked()) == []


def completion(*cycles: Cycle, **options: Any) -> Completion:
    return completion_of(Script(*cycles, **options).run(), tiny_tokenizer())


class TestCompletions:
    def test_every_token_has_an_origin(self):
        made = completion(*CYCLES)
        assert made.text == TEXT
        assert len(made.tokens) == len(made.origins) == made.stats.new_tokens == 7
        assert made.origins == [origin for _, origin in MARKED]

    def test_statistics_list_every_change_and_acceptance_by_depth(self):
        """Steps accept 2, none (plain), 0 and 1 nodes of a tree of depth 2."""
        stats = completion(*CYCLES).stats
        tree = "tree:4,2"
        changes = [Change(0, 0, tree, None), Change(1, 3, "none", "goodput"), Change(2, 4, tree, None)]
        assert (stats.changes, stats.ood, stats.disabled_reason) == (changes, False, "goodput")
        assert (stats.accepted_by_depth, stats.reached_by_depth) == ([2, 1], [3, 2])
        assert (stats.drafted, stats.accepted, stats.accept_rate) == (3 * 12, 3, 3 / 5)
        assert (stats.plan, stats.cycles, stats.tokens_per_cycle, stats.exit_layer) == (tree, 4, 7 / 4, 3)

    def test_results_do_not_change_with_the_sequence(self):
        script = Script(*CYCLES)
        made = completion_of(script.run(), tiny_tokenizer())
        script.step(cycle("dde", "the", "x", "and"))
        script.sequence.history.origins.append("plain")
        assert (len(made.origins), len(made.stats.changes)) == (7, 3)
        assert (made.stats.accepted_by_depth, made.stats.reached_by_depth) == ([2, 1], [3, 2])

    def test_without_an_exit_there_is_no_layer(self):
        stats = stats_of(Script(cycle("p", "x"), exit_layer=None).run())
        assert (stats.exit_layer, stats.plan, stats.accept_rate) == (None, "none", 0)
        assert (stats.ood, stats.accepted_by_depth, stats.reached_by_depth) == (False, [], [])
