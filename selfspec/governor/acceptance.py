"""How likely drafts are to be right, by depth and rank, for kinds of text that an exit guesses better or worse.

A profile tells how often the model's own token had which rank in drafts of familiar text. Text of another *kind* is
missed more often, or less: with the familiar chance to the power of an exponent. Which kind a text is shows in its own
drafts, and a little in those of others beside it, so every sequence has a belief about it. What follows for the next
plan is the governor's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log, prod, sqrt

from selfspec.speculation.plan import MAX_NODES, Plan

EXPONENTS = (0.02, 0.1, 0.25, 0.5, 1.0, 2.0)  # 1 is the text that calibration saw; near 0, nothing can be guessed
FAMILIAR = (0.01, 0.03, 0.08, 0.25, 0.43, 0.20)  # how likely each kind is, for a prompt like those calibration saw
UNFAMILIAR = (0.20, 0.20, 0.20, 0.20, 0.15, 0.05)  # the same for one that lies far from all of them
STRANGE = 3  # kinds before this one are guessed far worse than anything calibration saw
_TURNING = 1 / 128  # chance that a text becomes another one, per token
_SUREST_MISS = 0.995  # nothing is ever missed less often than the rest of this
_LEAST = 1e-6
_ALONE = 4  # texts beside it that tell as much of a text as its prompt
_PLACES = 32  # at the end of a prompt that calibration looked at

Chances = tuple[float, ...]  # one for each kind


class Acceptance:
    """What plans can be expected to bring, for each kind of text."""

    def __init__(self, shares: Sequence[Sequence[float]]) -> None:  # [depth][rank] of familiar text
        if not shares or not any(map(sum, shares)):
            raise ValueError("how often drafts are right is not known: there are no shares by depth and rank")
        self._by_kind = [[_of_kind(of_depth, exponent) for of_depth in shares] for exponent in EXPONENTS]
        self.tokens = lru_cache(maxsize=256)(self._tokens)
        self.chances = lru_cache(maxsize=4096)(self._chances)
        self.score = lru_cache(maxsize=256)(self._score)
        self._scores = lru_cache(maxsize=1024)(self._all_scores)

    def chance(self, kind: int, depth: int, rank: int) -> float:
        """That the token after a node of this depth, right so far, has this rank in the draft there."""
        of_depth = self._by_kind[kind][min(depth, len(self._by_kind[kind]) - 1)]
        return of_depth[rank] if rank < len(of_depth) else 0.0

    def reach(self, kind: int, plan: Plan) -> list[float]:
        """The chance that each node is right, the root's 1 first."""
        reached = [1.0]
        for parent, rank in zip(plan.parents, plan.ranks, strict=True):
            reached.append(reached[parent] * self.chance(kind, plan.depths[parent], rank))
        return reached

    def _tokens(self, plan: Plan) -> Chances:
        """Expected tokens per cycle."""
        return tuple(sum(self.reach(kind, plan)) for kind in range(len(EXPONENTS)))

    def _chances(self, plan: Plan, last: int) -> Chances:
        """How likely it was that a cycle accepts the nodes down to `last` and none of that one's children."""
        steps = [(plan.depths[node] - 1, plan.ranks[node - 1]) for node in plan.path(last)[1:]]
        refused = [plan.ranks[child - 1] for child in plan.children[last]]
        found = []
        for kind in range(len(EXPONENTS)):
            missed = 1.0 - sum(self.chance(kind, plan.depths[last], rank) for rank in refused)
            found.append(max(_LEAST, prod(self.chance(kind, *step) for step in steps) * missed))
        return tuple(found)

    def _score(self, rank: int, offered: int) -> Chances:
        """How likely it was that a first draft token among `offered` had this rank; one beyond them is a miss."""
        kinds = range(len(EXPONENTS))
        if rank < offered:
            return tuple(max(_LEAST, self.chance(kind, 0, rank)) for kind in kinds)
        return tuple(max(_LEAST, 1 - sum(self.chance(kind, 0, r) for r in range(offered))) for kind in kinds)

    def scores(self, ranks: Sequence[int], offered: int) -> Chances:
        """How likely several of them were, in whatever order, next to the kind with which they were likeliest."""
        return self._scores(tuple(sorted(ranks)), offered)

    def _all_scores(self, ranks: tuple[int, ...], offered: int) -> Chances:
        logs = [0.0] * len(EXPONENTS)
        for rank, times in Counter(ranks).items():
            logs = [sum_ + times * log(chance) for sum_, chance in zip(logs, self.score(rank, offered), strict=True)]
        return tuple(max(_LEAST, exp(of_kind - max(logs))) for of_kind in logs)


def _of_kind(shares: Sequence[float], exponent: float) -> list[float]:
    """Shares by rank of a text that misses with the familiar chance to the power of `exponent`."""
    found, total, missed_before = [], 0.0, 1.0
    for share in shares:
        total = min(_SUREST_MISS, total + share)
        missed = (1 - total) ** exponent
        found.append(missed_before - missed)
        missed_before = missed
    return found


def hotter(cool: Sequence[Sequence[float]], hot: Sequence[Sequence[float]], steps: float) -> list[list[float]]:
    """Shares [depth][rank] at a temperature so many times as far above that of `hot` as that is above `cool`'s: each
    step makes texts harder to guess by as much."""
    missed = [1 - min(_SUREST_MISS, max(1 - _SUREST_MISS, shares[0][0])) for shares in (cool, hot)]
    exponent = min(1.0, log(missed[1]) / log(missed[0])) ** steps
    return [_of_kind(of_depth, exponent) for of_depth in hot]


def _turned(tokens: int) -> float:
    """The chance that a text has become another one after so many tokens."""
    return 1 - (1 - _TURNING) ** tokens


_TURNED = [_turned(tokens) for tokens in range(MAX_NODES + 2)]  # of as many as a cycle can bring


@dataclass
class Belief:
    """Which kind of text a sequence is: a weight for each kind."""

    prior: Chances = FAMILIAR  # what is believed of a text when nothing is known yet
    home: Sequence[float] = field(init=False)  # and of one that has just become another one
    _weights: list[float] = field(init=False)
    _faded: int = field(default=0, init=False)  # tokens that have gone by since the weights were looked at

    def __post_init__(self) -> None:
        self.home, self._weights = self.prior, list(self.prior)

    @property
    def weights(self) -> list[float]:
        if self._faded:
            turned, self._faded = _turned(self._faded), 0
            self._weights = [own + turned * (home - own) for own, home in zip(self._weights, self.home, strict=True)]
        return self._weights

    @property
    def strangeness(self) -> float:
        """The chance that this is text of which almost nothing can be guessed."""
        return sum(self.weights[:STRANGE])

    def fade(self, tokens: int) -> None:
        """Some tokens have gone by: the text may have become another one."""
        self._faded += tokens

    def learn(self, chances: Chances, tokens: int = 0) -> None:
        """Something happened that had this chance with each kind, after some tokens had gone by."""
        turned = _TURNED[tokens]
        self._become(
            [
                (weight + turned * (home - weight)) * chance
                for weight, home, chance in zip(self.weights, self.home, chances, strict=True)
            ]
        )

    @staticmethod
    def learn_together(beliefs: Sequence[Belief], chances: Sequence[Chances], tokens: Sequence[int]) -> None:
        """Each of many learns its own. But texts of one request are often of one kind: what each might be, before it
        has shown anything itself, follows what all of them have come to."""
        for belief, of_text, new in zip(beliefs, chances, tokens, strict=True):
            belief.learn(of_text, new)
        if len(beliefs) == 1 and beliefs[0].home is beliefs[0].prior:  # nobody to compare with, nor has there been
            return
        of_all = [sum(of_kind) for of_kind in zip(*(belief._weights for belief in beliefs), strict=True)]
        whole, homes = _ALONE + len(beliefs), dict[Chances, list[float]]()
        for belief in beliefs:
            home = homes.get(belief.prior)
            if home is None:
                home = [(_ALONE * own + all_) / whole for own, all_ in zip(belief.prior, of_all, strict=True)]
                homes[belief.prior] = home
            belief._expect(home)

    def _expect(self, home: Sequence[float]) -> None:
        """Of a text that has shown nothing yet something else; what it has shown counts as before."""
        self._become([own * new / old for own, new, old in zip(self._weights, home, self.home, strict=True)])
        self.home = home

    def _become(self, parts: Sequence[float]) -> None:
        """The weights are in the proportion of these."""
        total = sum(parts)
        self._weights = [part / total for part in parts]

    def learn_agreement(self, agreement: float, places: int, usual: float, deviation: float) -> None:
        """The exit agreed with the model on this share of a prompt's last positions; `usual` and its deviation are
        those of familiar prompts that were long enough. Fewer places leave more to chance."""
        chance = usual * (1 - usual) * max(0.0, 1 / places - 1 / _PLACES)
        spread = sqrt(max(deviation, 0.05) ** 2 + chance)
        expected = [1 - (1 - min(usual, _SUREST_MISS)) ** exponent for exponent in EXPONENTS]
        self.learn(tuple(0.01 + exp(-0.5 * ((agreement - value) / spread) ** 2) for value in expected))
