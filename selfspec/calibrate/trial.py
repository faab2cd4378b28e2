"""Runs the choice: real generation on measuring prompts, with speculation and without, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.engine import Engine
from selfspec.policy import BATCHES, TEMPERATURES
from selfspec.profile import Run
from selfspec.results import GenerateOutput
from selfspec.tree import Plan


@dataclass(frozen=True)
class Setting:
    """What a trial generates: how many prompts at once, at which temperature."""

    temperature: str
    batch: str
    prompts: int
    new_tokens: int


# The settings that are run: a single row at every temperature, and the other batches greedily.
SETTINGS = (
    Setting("0", "1", 3, 64),
    Setting("0.7", "1", 1, 64),
    Setting("1", "1", 1, 64),
    Setting("0", "2-4", 4, 32),
    Setting("0", "5-16", 16, 32),
)


def trial(
    engine: Engine, domain: str, exit_layer: int, plan: str, prompts: list[list[int]], setting: Setting
) -> Run | None:
    """The plan against plain decoding on the same prompts; None for the plan that drafts nothing."""
    if not len(Plan.parse(plan)) or not prompts:
        return None
    size = BATCHES[setting.batch]
    chosen = [prompts[index % len(prompts)] for index in range(max(setting.prompts, size))]
    batches = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    temperature = TEMPERATURES[setting.temperature]
    kwargs = {"max_new_tokens": setting.new_tokens, "seed": 0, "top_k": 0, "domain": domain}
    kwargs |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False, "top_k": None}
    drafting = {"exit_layer": exit_layer, "plan": plan, "speculative_decoding": "force"}
    plain = _generate(engine, batches, {**kwargs, "speculative_decoding": False})
    drafted = _generate(engine, batches, {**kwargs, **drafting})
    stats = [stats for output in drafted for stats in output.stats]
    accepted, cycles = sum(s.accepted for s in stats), sum(s.cycles for s in stats)
    asked = sum(s.accepted / s.accept_rate for s in stats if s.accept_rate)
    asked += sum(s.cycles for s in stats if not s.accept_rate)
    return Run(
        plan=plan,
        tokens_per_cycle=sum(s.new_tokens for s in stats) / cycles,
        accept_rate=accepted / asked if asked else 0.0,
        tokens_per_second=_speed(drafted),
        plain_tokens_per_second=_speed(plain),
    )


def _generate(engine: Engine, batches: list[list[list[int]]], kwargs: dict) -> list[GenerateOutput]:
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
