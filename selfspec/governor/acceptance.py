"""The acceptance model: how many tokens a step of a plan is expected to emit for a sequence.

The profile has the chance that the model's token has each rank among the drafts, by depth. Each sequence has a skill s:
where the profile's chance that the best k drafts miss the token is m, the sequence's is m**s. Skill 1 is text as in
calibration; near 0 no draft is accepted. A skill is updated with drafted steps and with exit scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log, log2
from typing import NamedTuple

import numpy as np

from selfspec.speculation.plan import Plan

MEMORY = 12  # tokens after which an observation counts 1/e
PRIOR_WEIGHT = 4.0  # exposure of the skill that a sequence begins with: about 4 tokens of text
UNFAMILIAR = 0.25  # skill of a prompt unlike every domain; below it a text is out of distribution
_KEPT = 1 - 1 / MEMORY  # factor of both sums of a skill for each observed token
_PER_OCTAVE, _LOWEST = 8, -6  # levels of skill for which expected lengths are tabulated: 2**-6 .. 2**2, 9% apart
LEVELS = tuple(2 ** (_LOWEST + level / _PER_OCTAVE) for level in range(8 * _PER_OCTAVE + 1))
_LEAST = 0.005  # chances stay within 0.005 and 0.995: smaller ones rest on too few calibrated tokens


class Evidence(NamedTuple):
    """The outcome of one step for one sequence, as input of `Skill.observe`."""

    observed: list[float]  # by level of skill: what the step adds to `Skill.observed`
    expected: float  # what the step adds to `Skill.expected`
    tokens: int  # that the step emitted


class Skill:
    """How well the drafts for one sequence are accepted, compared with those that calibration saw: observed / expected.

    Each rank that was compared with the model's token adds its exposure x, by which it raises -ln(chance to miss), to
    `expected`. A rank that was the token adds y / (1 - exp(-y)) with y = s * x to `observed`: the mean of a Poisson
    variable of rate y that is at least 1. The ratio approaches the s whose chances m**s explain the outcomes best. Each
    observed token first multiplies both sums by 1 - 1/MEMORY."""

    def __init__(self, prior: float = 1.0) -> None:
        self.was_ood = False  # the skill was below UNFAMILIAR at some time
        self.copying_level = 0  # index into `copying.REACH`: how often copied nodes would be accepted
        self._prior_left = PRIOR_WEIGHT  # exposure of the prior that still counts
        self.observed = self.expected = 0.0
        self._add(PRIOR_WEIGHT * prior, PRIOR_WEIGHT, tokens=0)

    @property
    def is_ood(self) -> bool:
        return self.value < UNFAMILIAR

    def observe(self, step: Evidence) -> None:
        """Updates the skill with a step."""
        self._add(step.observed[self.level], step.expected, step.tokens)

    def observe_share(self, accepted: float, positions: int, exposure: float) -> None:
        """Updates the skill with exit scores: the exit's best token was the model's at `accepted` of the `positions`.
        `exposure`: that of the best draft token."""
        self._add(accepted * float(_observed(exposure, self.value)), positions * exposure, positions)

    def observe_prompt(self, agreement: float, positions: int, calibrated: float) -> None:
        """Updates the skill with the share of a prompt's last positions at which exit and model agree; `calibrated`
        is the mean of this share in calibration. A prompt is another text than its answer: it counts as MEMORY
        positions at most."""
        counted = min(positions, MEMORY)
        self.observe_share(counted * agreement, counted, exposure_of([calibrated]))

    def begin_unfamiliar(self) -> None:
        """Lowers the prior from 1 to UNFAMILIAR, for a prompt unlike every domain; may be called after steps."""
        self._add(-(1 - UNFAMILIAR) * self._prior_left, 0.0, tokens=0)

    def _add(self, observed: float, expected: float, tokens: int) -> None:
        kept = _KEPT**tokens
        self._prior_left *= kept
        self.observed, self.expected = kept * self.observed + observed, kept * self.expected + expected
        self.value = value = min(max(LEVELS[0], self.observed / self.expected), LEVELS[-1])
        self.level = round(_PER_OCTAVE * (log2(value) - _LOWEST))  # index of the nearest of LEVELS
        if value < UNFAMILIAR:
            self.was_ood = True


class Acceptance:
    """The chances of one domain and temperature."""

    def __init__(self, shares: Sequence[Sequence[float]]) -> None:  # [depth][rank]: how often the token had that rank
        if not shares or not any(map(sum, shares)):
            raise ValueError("a profile without shares by depth and rank cannot be governed; calibrate the model again")
        self._shares, skills = shares, np.array(LEVELS)
        self._chances = [_at_skill(by_rank, skills) for by_rank in shares]  # by depth: [rank, level]
        self.evidence = lru_cache(maxsize=256)(self._evidence)
        self.first_exposure = exposure_of(shares[0][:1])  # of the best draft token after the root

    def chance(self, depth: int, rank: int, level: int) -> float:
        """Probability that the token after a node of this depth has this rank among the drafts, at a level of skill."""
        by_rank = self._chances[min(depth, len(self._chances) - 1)]
        return float(by_rank[rank, level]) if rank < len(by_rank) else 0.0

    def reach(self, plan: Plan) -> np.ndarray:
        """[depth + 1, levels]: the chance that the accepted path of a plan without copied nodes reaches each depth, at
        each level of skill."""
        reached = [np.ones(len(LEVELS))]
        by_depth = np.zeros((plan.depth + 1, len(LEVELS)))
        by_depth[0] = 1.0
        for depth, parent, rank in zip(plan.depths[1:], plan.parents, plan.ranks, strict=True):
            chances = self._chances[min(depth, len(self._chances)) - 1]
            reached.append(reached[parent] * (chances[rank] if rank < len(chances) else 0.0))
            by_depth[depth] += reached[-1]
        return by_depth

    def _evidence(self, plan: Plan) -> list[Evidence]:
        """Evidence of a step, by its last node. At accepted depths the rank of the token was observed, and the better
        ranks missed; below the last node all drafted ranks missed."""
        found, skills = [], np.array(LEVELS)
        for last in range(len(plan) + 1):
            observed, expected = np.zeros(len(LEVELS)), 0.0
            for node in plan.path(last)[1:]:
                shares, rank = self._at(plan.depths[node] - 1), plan.ranks[node - 1]
                upto = exposure_of(shares[: rank + 1])
                observed += _observed(max(_LEAST, upto - exposure_of(shares[:rank])), skills)
                expected += upto
            shares, ranks = self._at(plan.depths[last]), [plan.ranks[child - 1] for child in plan.children[last]]
            expected += exposure_of([shares[rank] for rank in ranks if rank < len(shares)])
            found.append(Evidence(observed.tolist(), expected, plan.depths[last] + 1))
        return found

    def _at(self, depth: int) -> Sequence[float]:
        return self._shares[min(depth, len(self._shares) - 1)]


def exposure_of(shares: Sequence[float]) -> float:
    """-ln of the chance that none of the draft tokens with these shares is the model's token; 0 without shares."""
    return -log(1 - min(max(_LEAST, sum(shares)), 1 - _LEAST)) if shares else 0.0


def _observed(exposure: float, skill: float | np.ndarray) -> float | np.ndarray:
    """The mean of a Poisson variable of rate skill * exposure that is at least 1."""
    rate = skill * exposure
    return rate / -np.expm1(-rate)


def _at_skill(shares: Sequence[float], skills: np.ndarray) -> np.ndarray:
    """Returns shares [rank, skill] for the profile's shares [rank]: chances to miss are raised to the power of the
    skill."""
    missed = np.maximum(_LEAST, 1 - np.cumsum([0.0, *shares]))
    return -np.diff(missed[:, None] ** skills, axis=0)


def extrapolated(cool: Sequence[Sequence[float]], hot: Sequence[Sequence[float]], steps: float) -> list[list[float]]:
    """Returns shares [depth][rank] at a temperature above both measured ones. `cool` and `hot`: shares at the lower and
    the higher measured temperature; `steps`: distance from the higher one, in units of the distance between the two. In
    each step the logarithm of the chance to miss shrinks by the factor by which it shrinks from `cool` to `hot`."""
    missed = [1 - min(1 - _LEAST, max(_LEAST, shares[0][0])) for shares in (cool, hot)]
    skill = min(1.0, log(missed[1]) / log(missed[0])) ** steps
    return [_at_skill(by_rank, np.array([skill]))[:, 0].tolist() for by_rank in hot]
