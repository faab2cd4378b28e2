"""What cycles cost on a device: from what they consist of and, once they have run, as measured.

Whoever runs cycles tells how long they took; an engine keeps the costs for all its requests. What is gained by a cycle
is unknown here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, inf, log
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from selfspec.speculation.plan import Plan

Found = TypeVar("Found")
Guess = Callable[[int, int], float]  # (depth, nodes) -> what a cycle costs, in plain steps, before anybody ran one
OfRows = Callable[[int], float]  # rows -> what a pass over them takes, in passes over one

_SHORT = 64  # texts up to this length cost about the same; a second page takes kernels a step more, so does a third
_ROW = 0.008  # passes over one row that a row more takes on a GPU
_TICK = 1e-7  # seconds: a clock that stands still shall not divide by zero
_SETTLED = 4  # measurements after which it changes slowly
_MEMORY, _MEMORY_OF_PLAIN = 0.1, 0.25  # weight of the newest measurement; plain steps may be rare
_OUTLIER = 1.1  # times as long as usual is believed at once; more if the next one takes as long
_KNOWN = 3  # measurements after which something is known
_NEWS, _SILENCE = 0.01, 64  # by what share a mean changes, or measurements go by, before it is worth looking at again
_MANY = 16  # measurements after which more of them tell nothing new
_OUTDATED = 1024  # cycles, with as many texts of such lengths, after which what a plan took is no longer known
_BORROWED, _OWN = 16, 128  # cycles that drafted before a plain step is measured again: another batch's, this one's
_FIRST_TIME = 2.5  # how far above the guess a single measurement is believed where nothing else tells how far off it is
_UNTRIED = 0.95  # a plan that nobody has run yet, nor anything like it here, gets the benefit of the doubt


@dataclass(frozen=True)
class StepCost:
    """Seconds of a cycle of some batch on this device, by what it consists of."""

    plain: float  # a cycle that drafts nothing
    depth: float  # each depth of a draft: the layers below the exit and the exit itself
    drafting: tuple[tuple[int, float], ...]  # the rest of a cycle that drafts so many nodes, for some numbers of nodes
    head_row: float = 0.0  # each row of the draft head, at each depth; part of `depth` for the head measured with
    head_rows: int = 0  # the head that `depth` was measured with

    def of(self, depth: int, nodes: int, head_rows: int | None = None, tiled: int | None = None) -> float:
        """A cycle that drafts so many nodes; between the measured numbers of nodes, and after the last, on a straight
        line. Of kernels, for `tiled` sequences, half of the way lies where their rows fill a tile and need another. No
        head is so small that a depth gives time back."""
        if not nodes:
            return self.plain
        rows = 0 if head_rows is None else head_rows - self.head_rows
        numbers, seconds = zip(*self.drafting, strict=True)
        rest = float(np.interp(nodes, numbers, seconds))
        if nodes > numbers[-1] and len(numbers) > 1:
            rest += (nodes - numbers[-1]) * (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2])
        if tiled is not None and nodes < numbers[-1] and nodes not in numbers:
            after = min(bisect_left(numbers, nodes), len(numbers) - 1)
            before = max(0, after - 1)
            here, low, high = (_tiles(tiled * (n + 1)) for n in (nodes, numbers[before], numbers[after]))
            rest = (rest + seconds[before if here == low else after]) / 2 if low < high else rest
        return rest + depth * max(0.0, self.depth + rows * self.head_row)


def _tiles(rows: int) -> int:
    """Rows that most kernels compute for so many: where a pass begins to take longer."""
    return 16 if rows <= 16 else 32 if rows <= 32 else -(-rows // 64) * 64


def almost_free(rows: int) -> float:
    """What a pass over so many rows takes on a GPU, which waits for the weights, in passes over one."""
    return 1 + (rows - 1) * _ROW


def guessed_cost(exit_layer: int, num_layers: int, batch: int = 1, of_rows: OfRows = almost_free) -> Guess:
    """Where nobody has measured a cycle: a depth is the layers below the exit, its block and head; a node is a row more
    for each sequence."""
    of_depth, of_pass = (exit_layer + 2) / num_layers, cache(of_rows)
    return lambda depth, nodes: of_pass(batch * (nodes + 1)) / of_pass(batch) + depth * of_depth


def measured_cost(cost: StepCost, head_rows: int | None = None, tiled: int | None = None) -> Guess:
    """From what calibration measured on this kind of device; `tiled` as in `StepCost.of`."""
    return cache(lambda depth, nodes: max(1.0, cost.of(depth, nodes, head_rows, tiled) / cost.plain))


def doubled(guess: Guess) -> Guess:
    """For twice as many sequences as a guess is for: with as many rows a cycle costs about as much."""
    return lambda depth, nodes: guess(depth, 2 * nodes + 1)


class Setting(NamedTuple):
    """What the cost of a plan depends on."""

    exit_layer: int
    batch: int
    length: int  # of the longest text: 0 for a short one, one more for each doubling

    @classmethod
    def of(cls, exit_layer: int, batch: int, context: int) -> Setting:
        return cls(exit_layer, batch, _length(context))


def _length(context: int) -> int:
    """As a `Setting` tells lengths apart."""
    return 0 if context <= _SHORT else (context - 1).bit_length() - _SHORT.bit_length() + 1


class _Measured:
    """A running mean of how long something takes."""

    def __init__(self, memory: float) -> None:
        self.memory = memory  # weight of the newest measurement
        self.times = 0
        self.seconds = 0.0
        self.beside = 0.0  # what a plain step took at that time; 0 where nobody knew
        self.newest = 0.0
        self.told = 0.0  # the level when it was last said to be worth looking at
        self.latest = self.latest_of_all = 0  # the cycle of its newest measurement: among those like it, and all

    def add(self, seconds: float, plain: float = 0.0) -> None:
        """The first few give their fastest, since what disturbs a cycle, and what is done only once, make it slower;
        then the mean follows, slowly, and hardly to a single outlier: of plain steps it might be the last for long."""
        self.times += 1
        if self.times == 1 or (self.times <= _SETTLED and seconds < self.seconds):
            self.seconds, self.beside = seconds, plain
        elif self.times > _SETTLED:
            believed = min(seconds, max(_OUTLIER * self.seconds, self.newest))
            self.seconds += self.memory * (believed - self.seconds)
            self.beside += self.memory * (plain - self.beside) if self.beside else plain
        self.newest = min(seconds, 2 * self.seconds)

    def ratio(self, plain: float) -> float:
        """Over the plain steps of its own time, or else those of today: the device may have become faster or slower
        since, and texts a little longer or shorter."""
        return self.seconds / (self.beside or plain)

    def has_news(self) -> bool:
        """Whether it is worth looking at again: the first few always are, later ones when the mean has changed, and
        now and then, since others may be outdated by then."""
        is_settled, level = self.times > _SETTLED and self.times % _SILENCE, self.ratio(1.0)
        if is_settled and abs(level - self.told) <= _NEWS * self.told:
            return False
        self.told = level
        return True


class Costs:
    """What cycles of an engine cost, for every plan, exit, batch and length of text that it has met."""

    def __init__(self, in_seats: bool = False, guessed_here: bool = False) -> None:
        # Cycles are graphs with seats for a power of two of rows, whether somebody sits there or not.
        self.in_seats = in_seats
        self.guessed_here = guessed_here  # guesses come from passes that were timed on this very machine
        # By batch and length: what follows from the costs there, until they change.
        self._found: dict[tuple[int, int], dict[Hashable, Any]] = {}
        self._cycles: Counter[tuple[int, int]] = Counter()  # (batch, length): that were measured
        self._all_cycles = 0
        self._plain: dict[tuple[int, int], _Measured] = {}  # (batch, length)
        self._since_plain: Counter[tuple[int, int]] = Counter()  # cycles that drafted, since the last plain one
        self._drafting: dict[Setting, dict[Plan, _Measured]] = {}

    def observe(self, at: Setting, plan: Plan, seconds: float) -> None:
        """A cycle took this long."""
        key = at.batch, at.length
        own, plain = self._plain.get(key), 0.0
        if not len(plan):
            measured = own or self._plain.setdefault(key, _Measured(_MEMORY_OF_PLAIN))
            self._since_plain[key] = 0
        else:
            plain = own.seconds if own is not None and own.times >= _KNOWN else 0.0
            here = self._drafting.setdefault(at, {})
            measured = here.get(plan) or here.setdefault(plan, _Measured(_MEMORY))
            self._since_plain[key] += 1
            if measured.times and self._is_outdated(at, measured):
                measured.times = 1  # as if it had been measured once: what is faster now is believed at once
        self._cycles[key] += 1
        self._all_cycles += 1
        measured.latest, measured.latest_of_all = self._cycles[key], self._all_cycles
        measured.add(max(seconds, _TICK), plain)
        # Well known plain steps change nothing but what is outdated by then: plans remember those of their own time.
        if measured.has_news() and (len(plan) or measured.times <= _MANY or not measured.times % _SILENCE):
            self._forget(at, is_plain=not len(plan))

    def once(self, at: Setting, key: Hashable, find: Callable[[], Found]) -> Found:
        """What follows from the costs in a setting, found once until they have changed by something worth looking at.
        What is borrowed from texts of other lengths may be older than what is known of these."""
        found = self._found.setdefault((at.batch, at.length), {})
        if key not in found:
            found[key] = find()
        return cast(Found, found[key])

    def _forget(self, at: Setting, is_plain: bool) -> None:
        """What was found in a setting, and for batches that know nothing better than what it tells."""
        near = (at.batch // 2, at.batch, 2 * at.batch) if is_plain else (at.batch,)
        for place in [(batch, at.length) for batch in near] if self.in_seats else tuple(self._found):
            self._found.pop(place, None)

    def is_known(self, at: Setting, plan: Plan) -> bool:
        """Whether the plan has been run here often enough, and not too long ago, to be judged by what it took."""
        measured = self._drafting.get(at, {}).get(plan)
        return measured is not None and measured.times >= _KNOWN and not self._is_outdated(at, measured)

    def knows_any(self, at: Setting) -> bool:
        """Whether it can be said what any plan takes: plans have been run often enough, and of late, here or where it
        is much alike, or guesses are this machine's own. What was learned elsewhere, or timed at first, becomes old by
        cycles of all kinds."""
        ran = [of for like in (at, *self._near(at)) for of in self._drafting.get(like, {}).values()]
        recent = sum(of.times for of in ran if self._all_cycles - of.latest_of_all <= _OUTDATED)
        return recent >= _KNOWN or (self.guessed_here and self._all_cycles <= _OUTDATED)

    def _is_outdated(self, at: Setting, measured: _Measured) -> bool:
        return self._cycles[at.batch, at.length] - measured.latest > _OUTDATED

    def size(self, batch: int) -> int:
        """The batch by which cycles of this one are known."""
        return 1 << (batch - 1).bit_length() if self.in_seats else batch

    def plain(self, batch: int, context: int) -> float | None:
        """Seconds of a plain step; None where none like it was measured."""
        measured = self._nearest_plain(self.size(batch), _length(context))
        return None if measured is None else measured.seconds

    def _nearest_plain(self, batch: int, length: int) -> _Measured | None:
        """This batch's, or that of the one most like it, up to twice or half as large."""
        own = self._plain.get((batch, length))
        if own is not None and own.times >= _KNOWN:
            return own
        like = [size for size, of in self._plain if of == length and batch <= 2 * size <= 4 * batch]
        known = [size for size in like if self._plain[size, length].times >= _KNOWN]
        return self._plain[min(known, key=lambda size: abs(log(size / batch))), length] if known else None

    def wants_plain(self, batch: int, context: int, in_flight: int = 0) -> bool:
        """Whether it is time for a plain step: none is known, or not this batch's own, or not of late; so many that
        will be known soon are in flight."""
        key = self.size(batch), _length(context)
        own, since = self._plain.get(key), self._since_plain[key]
        times = 0 if own is None else own.times
        if times >= _KNOWN:
            return since >= _OWN and not in_flight
        if times + in_flight >= _KNOWN:
            return False
        begun = times > 0 and since == 0
        return begun or self._nearest_plain(*key) is None or since >= _BORROWED

    def ratio(self, at: Setting, plan: Plan, guess: Guess) -> float:
        """What a cycle costs in plain steps."""
        return self.ratios(at, [plan], guess)[plan] if len(plan) else 1.0

    def ratios(self, at: Setting, plans: Sequence[Plan], guess: Guess) -> dict[Plan, float]:
        """What cycles of at least these plans, all of which draft, cost in plain steps: measured here; or where it is
        most alike, and as much more or less as plans that ran in both; or guessed, as right as guesses have been for
        other plans."""
        here = self._measured(at, guess)
        ratios, missing = dict(here), [plan for plan in plans if plan not in here]
        if not missing:
            return ratios
        near = self._near(at)
        known = next((setting for setting in (at, *near) if self._measured(setting, guess)), None)
        correction = 1.0 if known is None else self._error(known, self._measured(known, guess), guess)
        correction *= 1.0 if self.guessed_here else _UNTRIED
        for plan in missing:
            there, ratio = self._elsewhere(plan, near)
            if there is None:
                ratios[plan] = correction * guess(plan.depth, len(plan))
            else:
                ratios[plan] = ratio * self._change(there, at)
        return ratios

    def _elsewhere(self, plan: Plan, near: Sequence[Setting]) -> tuple[Setting | None, float]:
        """The first of these settings in which a plan is known well enough to tell of others, and what it costs."""
        for setting in near:
            ratio = self._known_ratio(setting, plan)
            if ratio is not None:
                return setting, ratio
        return None, inf

    def _known_ratio(self, at: Setting, plan: Plan) -> float | None:
        """Of a plan that ran often enough."""
        measured = self._drafting.get(at, {}).get(plan)
        if measured is None or measured.times < _KNOWN:
            return None
        plain = self._nearest_plain(at.batch, at.length)
        return None if plain is None else measured.ratio(plain.seconds)

    def _change(self, there: Setting, here: Setting) -> float:
        """How much more cycles cost here than there, on the mean, by plans that are known in both; found once."""

        def find() -> float:
            plans = self._drafting.get(here, ())
            pairs = [(self._known_ratio(here, plan), self._known_ratio(there, plan)) for plan in plans]
            changes = [log(own / other) for own, other in pairs if own is not None and other is not None]
            return exp(sum(changes) / len(changes)) if changes else 1.0

        return self.once(here, there, find)

    def _measured(self, at: Setting, guess: Guess) -> dict[Plan, float]:
        """Of every plan that ran in a setting where plain steps are known; found once, for whoever asks."""
        return self.once(at, (at, guess), lambda: self._measure(at, guess))

    def _measure(self, at: Setting, guess: Guess) -> dict[Plan, float]:
        """After a single time, which may have been slow for its own reasons, not too far from what it took where it is
        known, or from a guess that is as right as for plans that are known. One that ran too rarely to be known, and
        long ago, may as well not have."""
        ran = self._drafting.get(at, {})
        here = {plan: of for plan, of in ran.items() if of.times >= _KNOWN or not self._is_outdated(at, of)}
        plain = self._nearest_plain(at.batch, at.length) if here else None
        if plain is None:
            return {}
        ratios = {plan: measured.ratio(plain.seconds) for plan, measured in here.items()}
        once = [plan for plan, measured in here.items() if measured.times == 1]
        known = {plan: ratio for plan, ratio in ratios.items() if here[plan].times >= _KNOWN} if once else {}
        most = _OUTLIER * self._error(at, known, guess) if known else _FIRST_TIME
        near = self._near(at) if once else []
        for plan in once:
            limits = _OUTLIER * self._elsewhere(plan, near)[1], most * guess(plan.depth, len(plan))
            ratios[plan] = min(ratios[plan], *limits)
        return ratios

    def _near(self, at: Setting) -> list[Setting]:
        """Other settings with the same exit and a batch up to twice or half as large, the nearest first. Of kernels, to
        which another batch is another number of tiles, only with the same batch."""
        others = [s for s in self._drafting if s.exit_layer == at.exit_layer and s != at]
        alike = [
            s for s in others if at.batch == s.batch or (not self.in_seats and at.batch <= 2 * s.batch <= 4 * at.batch)
        ]
        return sorted(alike, key=lambda s: (abs(s.length - at.length), abs(log(s.batch / at.batch))))

    def _error(self, at: Setting, ratios: dict[Plan, float], guess: Guess) -> float:
        """How far off guesses were there, on the mean: of plans that ran a few times only, few cycles count."""
        times = {plan: min(self._drafting[at][plan].times, _MANY) for plan in ratios}
        errors = {plan: log(ratio / guess(plan.depth, len(plan))) for plan, ratio in ratios.items()}
        return exp(sum(times[plan] * error for plan, error in errors.items()) / sum(times.values()))
