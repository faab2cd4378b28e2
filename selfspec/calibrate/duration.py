"""Estimates how long a calibration takes on this machine, from a few timed steps, and refuses a time that is too short.

Counts the passes through the model in each stage and the rows (tokens) of these passes. On a GPU the stages that
`--minutes` does not bound take seconds, and the time asked for is the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import torch

from selfspec.calibrate import heads, timing, trial
from selfspec.calibrate.corpus import Corpus
from selfspec.calibrate.settings import TRAINING_SHARE, TRYING_SHARE, WRITING_SHARE
from selfspec.calibrate.setup import Setup
from selfspec.calibrate.training import Trainer
from selfspec.governor.rules import TEMPERATURES
from selfspec.speculation.exit import FEATURE_STATES
from selfspec.speculation.plan import NONE

_TIMED_BATCHES = (1, 16)  # sequences of the plain steps that are timed
_WRITTEN_ROWS = 1.5  # rows for each token of text: an invented turn passes twice, when written and when answered


@dataclass(frozen=True)
class Duration:
    """Expected seconds of a calibration."""

    stages: dict[str, float]  # by name
    least: dict[str, tuple[float, float]]  # of the stages that --minutes bounds: least seconds, share of --minutes

    @property
    def minutes(self) -> float:
        return sum(self.stages.values()) / 60

    def describe(self) -> str:
        minutes = max(1, round(self.minutes))
        return f"{minutes} minute{'s' * (minutes > 1)}"

    @property
    def least_minutes(self) -> float:
        """The smallest --minutes with enough time for the least amounts, rounded up to a tenth."""
        return ceil(max((seconds / share for seconds, share in self.least.values()), default=0.0) / 6) / 10

    def check(self, minutes: float) -> None:
        """Raises ValueError for a time that is too short for one chunk of text and the least training steps."""
        if minutes < self.least_minutes:
            least = " and ".join(
                f"{seconds:.0f} s to {name}, within {share:.0%} of the time"
                for name, (seconds, share) in self.least.items()
            )
            raise ValueError(
                f"--minutes {minutes:g} is too short for this machine, loaded as it is now: pass --minutes "
                f"{self.least_minutes:g} or more, better a third more (the least amounts take {least}), or give "
                "amounts with --tokens and --steps"
            )


@dataclass(frozen=True)
class PassCost:
    """Seconds of a pass through the whole model: `fixed`, and `row` for each token in it."""

    fixed: float
    row: float

    def of(self, passes: float, rows: float) -> float:
        return passes * self.fixed + rows * self.row


def expected_duration(setup: Setup) -> Duration:
    settings, recipe, cost = setup.settings, setup.recipe, pass_cost(setup)
    given = 60 * settings.minutes
    stages, least = {}, {}
    if settings.train:
        tokens = max(settings.tokens or 0, recipe.length * recipe.documents)  # at least one chunk
        write = cost.of(tokens / setup.engine.max_batch, _WRITTEN_ROWS * tokens)
        train = (settings.steps or recipe.least_steps) * training_step_seconds(setup) * len(setup.layers)
        stages = {"write": write, "read": cost.of(0, tokens), "train": train}
        if settings.tokens is None:
            least["write"] = write, WRITING_SHARE
            stages["write"] = max(write, WRITING_SHARE * given)
            stages["read"] *= stages["write"] / write
        if settings.steps is None:
            least["train"] = train, TRAINING_SHARE
            stages["train"] = max(train, TRAINING_SHARE * given)
    prompts = [setup.measuring_prompts(domain) for domain in setup.domains]
    answers = len(TEMPERATURES) * sum(map(len, prompts))
    prompt_tokens = sum(len(prompt) for of_domain in prompts for prompt in of_domain)
    rows = 2 * (len(TEMPERATURES) * prompt_tokens + answers * setup.answer_tokens)  # written, then read
    stages["measure"] = cost.of(answers * setup.answer_tokens / setup.engine.max_batch, rows)
    stages["time"] = cost.of(*timing.passes_and_rows(len(setup.layers), setup.engine.has_kernels))
    length = trial.trial_length(TRYING_SHARE * given / len(prompts), cost.of(1, 1))
    stages["try"] = sum(cost.of(*trial.passes_and_rows(of_domain, length)) for of_domain in prompts)
    if setup.model.device.type == "cuda":
        stages = {"all": max(given, sum(stages.values()))}
    return Duration(stages, least)


def pass_cost(setup: Setup) -> PassCost:
    """From the times of plain steps of two batch sizes."""
    one, many = (timing.step_time(setup.engine, None, NONE, batch) for batch in _TIMED_BATCHES)
    row = max(0.0, many - one) / (_TIMED_BATCHES[1] - _TIMED_BATCHES[0])
    return PassCost(max(0.0, one - row), row)


def training_step_seconds(setup: Setup) -> float:
    """Seconds of a training step of the deepest exit, on text of zeros."""
    recipe, model = setup.recipe, setup.model
    corpus = Corpus.empty(recipe.rows, recipe.length)
    corpus.documents.fill_(1)
    corpus.predicts.fill_(True)
    shape = *corpus.tokens.shape, FEATURE_STATES * model.config.hidden_size
    features = torch.zeros(shape, dtype=model.dtype, device=setup.resources.states_on)
    head_rows = torch.arange(heads.largest_head(setup.vocabulary), device=model.device)
    recipe = replace(recipe, warmup=1)
    return Trainer(model, setup.layers[-1], corpus, features, head_rows, recipe, steps=4).seconds_per_step()
