"""Step costs on this device, measured by running cycles of the real session."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from statistics import mean

import torch

from selfspec.costs import StepCost
from selfspec.engine import Engine
from selfspec.exits import Exit
from selfspec.policy import Policy, Rules
from selfspec.row import Row
from selfspec.sampling import Sampling
from selfspec.tree import NONE, Plan

_LARGEST_TREE_BATCH = Rules().max_tree_batch
_STARS = (1, 3, 8, 16, 32, 63)  # numbers of nodes that are timed, all children of the root
_CHAIN, _STAR = Plan.parse("chain:3"), Plan.parse("tree:3")  # as many nodes, two depths apart
_CONTEXT = 128  # tokens before the timed cycles
_WARM_UP, _TIMED = 2, 6


def step_costs(
    engine: Engine, exits: list[Exit], batch: int, progress: Callable[[int], None] = lambda _: None
) -> dict[int, StepCost]:
    """What cycles of a batch cost with each exit, by its layer. What a depth costs is the exit's own; how a cycle grows
    with its nodes is much the same for all, and measured with the first."""
    plain = _cycle_time(engine, None, NONE, batch)
    depths = {}
    for exit in exits:
        further = _cycle_time(engine, exit, _CHAIN, batch) - _cycle_time(engine, exit, _STAR, batch)
        depths[exit.layer] = max(0.0, further / (_CHAIN.depth - _STAR.depth))
        progress(1)
    first = exits[0]
    stars = [nodes for nodes in _STARS if batch <= _LARGEST_TREE_BATCH or nodes <= _CHAIN.depth + 2]
    times = [_cycle_time(engine, first, Plan.tree((nodes,)), batch) - depths[first.layer] for nodes in stars]
    drafting = tuple((nodes, max(plain, seconds)) for nodes, seconds in zip(stars, times, strict=True))
    progress(1)
    return {
        exit.layer: StepCost(plain, depths[exit.layer], drafting, _head_row_cost(engine, exit, batch), exit.vocabulary)
        for exit in exits
    }


def _cycle_time(engine: Engine, exit: Exit | None, plan: Plan, batch: int) -> float:
    sampling = Sampling()
    policy = Policy(Rules(), sampling, mode="force" if len(plan) else False, plan=plan)
    context = min(_CONTEXT, engine.context // 2)
    prompt = [token % engine.model.config.vocab_size for token in range(3, 3 + context)]
    rows = [Row(prompt, seed=0, copy=copy, max_length=engine.context) for copy in range(batch)]
    session = engine.open(rows, sampling, policy, exit)
    times = []
    with closing(session.run()) as cycles:
        started = time.perf_counter()
        for _ in islice(cycles, _WARM_UP + _TIMED):
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
    return _typical(times[_WARM_UP:] or times)


def _head_row_cost(engine: Engine, exit: Exit, batch: int) -> float:
    """Seconds that a row of the draft head adds to a depth."""
    whole, quarter = exit.vocabulary, exit.vocabulary // 4
    if whole == quarter:
        return 0.0
    head = engine.model.head[:whole]
    read = torch.zeros(batch, 8, engine.model.config.hidden_size, device=engine.model.device, dtype=engine.model.dtype)
    times = [_synchronised(partial(engine.model.project, read, head[:rows])) for rows in (whole, quarter)]
    return max(0.0, (times[0] - times[1]) / (whole - quarter))


def _synchronised(run: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(_WARM_UP + _TIMED):
        started = time.perf_counter()
        run()[0, 0, 0].item()
        times.append(time.perf_counter() - started)
    return _typical(times[_WARM_UP:])


def _typical(times: list[float]) -> float:
    """The mean of the faster half: what disturbs a step only ever makes it slower."""
    return mean(sorted(times)[: len(times) // 2 + 1])
