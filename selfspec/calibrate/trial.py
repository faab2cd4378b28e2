"""Runs chosen plans: generates on measuring prompts with the plan and plainly, and compares the speeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from selfspec.engine import Engine
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.profiles.profile import Run
from selfspec.results import GenerateOutput
from selfspec.speculation.plan import Plan


@dataclass(frozen=True)
class Setting:
    """The temperature and batch size of a trial, and how much it generates."""

    temperature: str  # a key of TEMPERATURES
    batch: str  # a key of BATCHES
    sequences: int  # to generate, in batches of that size
    length: float  # new tokens of a sequence, as a share of `Trials.new_tokens`


# A single sequence at every temperature, and the larger batches greedily.
SETTINGS = (
    Setting("0", "1", 2, 1.0),
    Setting("0.7", "1", 1, 1.0),
    Setting("1", "1", 1, 1.0),
    Setting("0", "2-4", 4, 0.5),
    Setting("0", "5-16", 16, 0.5),
)
COMPARED_CHAIN = "chain:4"  # tried beside the chosen plan of one greedy sequence
_SHORTEST, _LONGEST = 16, 96  # tokens of an answer
_WARM_UP_TOKENS = 4  # generated before a timed run where no step is captured
_PLAIN_STEPS = 11.0  # plain steps that all trials of a domain take, for each token of an answer


class Trials:
    """Trials of one domain. Plain decoding is timed once for each batch and temperature."""

    def __init__(self, engine: Engine, domain: str, exit_layer: int, prompts: list[list[int]], new_tokens: int) -> None:
        self.engine, self.domain, self.exit_layer, self.prompts = engine, domain, exit_layer, prompts
        self.new_tokens = new_tokens
        self._plain: dict[tuple[str, str], float] = {}  # tokens per second by temperature and batch

    def run(self, plan: str, setting: Setting) -> Run | None:
        """Measures a plan and plain decoding on the same prompts; None for the plan `none`."""
        if not len(Plan.parse(plan)):
            return None
        batches, at = self._batches(setting), (setting.temperature, setting.batch)
        if at not in self._plain:
            self._plain[at] = _speed(self._generate_warm(batches, self._arguments(None, setting)))
        outputs = self._generate_warm(batches, self._arguments(plan, setting))
        tokens_per_cycle, accept_rate = acceptance(outputs)
        return Run(
            plan=plan,
            tokens_per_cycle=rounded(tokens_per_cycle),
            accept_rate=rounded(accept_rate),
            tokens_per_second=rounded(_speed(outputs)),
            plain_tokens_per_second=rounded(self._plain[at]),
        )

    def _batches(self, setting: Setting) -> list[list[list[int]]]:
        size = BATCHES[setting.batch]
        chosen = [self.prompts[index % len(self.prompts)] for index in range(setting.sequences)]
        return [chosen[start : start + size] for start in range(0, len(chosen), size)]

    def _arguments(self, plan: str | None, setting: Setting) -> dict[str, Any]:
        """Of `generate`; without a plan those of plain decoding."""
        temperature = TEMPERATURES[setting.temperature]
        kwargs: dict[str, Any] = {"max_new_tokens": _answer_tokens(setting, self.new_tokens), "seed": 0}
        kwargs |= {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        if plan is None:
            return kwargs | {"speculative_decoding": False}
        how = {"exit_layer": self.exit_layer, "plan": plan, "domain": self.domain, "speculative_decoding": "force"}
        return kwargs | how

    def _generate_warm(self, batches: list[list[list[int]]], kwargs: dict[str, Any]) -> list[GenerateOutput]:
        """Generates after a warm-up, so that the times exclude what is done once. With kernels the warm-up generates
        everything: each plan, prompt length and number of running sequences is captured at its first use."""
        if self.engine.has_kernels:
            generate_batches(self.engine, batches, kwargs)
        else:
            generate_batches(self.engine, batches[:1], kwargs | {"max_new_tokens": _WARM_UP_TOKENS})
        return generate_batches(self.engine, batches, kwargs)


def trial_length(seconds: float, plain_step: float) -> int:
    """Tokens of an answer with which a domain's trials take about `seconds`, where a plain step takes `plain_step`."""
    return int(min(_LONGEST, max(_SHORTEST, seconds / (_PLAIN_STEPS * plain_step))))


def passes_and_rows(prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """Passes through the model, and tokens in them, of a domain's trials: all settings and a chain, each plainly and
    with a plan that needs two tokens in its passes for each new one."""
    passes = rows = 0.0
    for setting in (*SETTINGS, SETTINGS[0]):
        tokens = _answer_tokens(setting, new_tokens) + _WARM_UP_TOKENS
        passes += 2 * tokens * setting.sequences / BATCHES[setting.batch]
        rows += setting.sequences * (3 * tokens + 4 * len(prompts[0]))
    return passes, rows


def _answer_tokens(setting: Setting, usual: int) -> int:
    return max(8, int(setting.length * usual))


def rounded(value: float) -> float:
    """The value with the digits that a profile keeps."""
    return float(f"{float(value):.5g}")


def acceptance(outputs: list[GenerateOutput]) -> tuple[float, float]:
    """Tokens per step and accept rate over all sequences."""
    stats = [stats for output in outputs for stats in output.stats]
    reached = sum(s.accepted / s.accept_rate if s.accept_rate else s.cycles for s in stats)
    return sum(s.new_tokens for s in stats) / sum(s.cycles for s in stats), sum(s.accepted for s in stats) / reached


def generate_batches(engine: Engine, batches: list[list[list[int]]], kwargs: dict[str, Any]) -> list[GenerateOutput]:
    """Generates for batches of prompts of any lengths, padded on the left."""
    outputs = []
    for batch in batches:
        longest = max(len(prompt) for prompt in batch)
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in batch]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]
        ids = torch.tensor(rows, device=engine.model.device)
        output = engine.generate(
            ids, torch.tensor(mask, device=ids.device), return_dict_in_generate=True, pad_token_id=0, **kwargs
        )
        assert isinstance(output, GenerateOutput)
        outputs.append(output)
    return outputs


def _speed(outputs: list[GenerateOutput]) -> float:
    """Tokens per second, prefill included."""
    tokens = sum(stats.new_tokens for output in outputs for stats in output.stats)
    return tokens / sum(max(stats.elapsed_s for stats in output.stats) for output in outputs)
