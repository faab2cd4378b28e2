"""Requests in a scheduler whose steps a test runs itself, without the loop's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec import Engine
from selfspec.request import SpeculationRequest, read_settings
from selfspec.sequence import Request


def enqueue(
    engine: Engine,
    prompts: Sequence[list[int]],
    exit_layer: int | None = None,
    plan: str = "none",
    seed: int = 0,
    **settings: Any,
) -> Request:
    """Adds a request to the scheduler's waiting sequences. The test calls `engine.scheduler.step()`."""
    speculation = SpeculationRequest(
        speculative_decoding="force" if exit_layer is not None else False, exit_layer=exit_layer, plan=plan
    )
    wanted = read_settings(engine.generation_config, None, {"do_sample": False, **settings})
    width = max(map(len, prompts))
    request = engine._requests.build([list(prompt) for prompt in prompts], width, wanted, seed, None, None, speculation)
    engine.scheduler.waiting.extend(request.sequences)
    return request


def finish(engine: Engine) -> None:
    """Steps until every request has ended."""
    while engine.scheduler.step():
        pass
