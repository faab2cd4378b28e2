"""Step costs on this device, measured by running cycles of the real session."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from statistics import median

import numpy as np
import torch

from selfspec.calibrate.choice import StepCost
from selfspec.engine import Engine
from selfspec.exits import Exit
from selfspec.policy import Policy, Rules
from selfspec.runtime import Row, Session
from selfspec.sampling import Sampling
from selfspec.tree import NONE, Plan

_PLANS = [Plan.parse(plan) for plan in ("chain:1", "chain:3", "tree:12", "tree:7,7")]
_CONTEXT = 128  # tokens before the timed cycles
_WARM_UP, _TIMED = 2, 5


def plain_cost(engine: Engine, batch: int) -> float:
    """Seconds of a cycle of plain decoding."""
    return _cycle_time(engine, None, NONE, batch)


def step_cost(engine: Engine, exit: Exit, batch: int, plain: float) -> StepCost:
    """What cycles with this exit cost. A straight line through a few plans: so much a cycle, a depth and a node."""
    extra = [_cycle_time(engine, exit, plan, batch) - plain for plan in _PLANS]
    shape = np.array([[1.0, plan.depth, len(plan)] for plan in _PLANS])
    solved = np.linalg.lstsq(shape, np.array(extra), rcond=None)[0].clip(min=0)
    cycle, depth, node = (float(value) for value in solved)
    return StepCost(plain, cycle, depth, node, _head_row_cost(engine, exit, batch), exit.vocabulary)


def _cycle_time(engine: Engine, exit: Exit | None, plan: Plan, batch: int) -> float:
    sampling = Sampling()
    policy = Policy(Rules(), sampling, mode="force" if len(plan) else False, plan=plan)
    context = min(_CONTEXT, engine.context // 2)
    prompt = [token % engine.model.config.vocab_size for token in range(3, 3 + context)]
    rows = [Row(prompt, seed=0, copy=copy, max_length=engine.context) for copy in range(batch)]
    session = Session(engine.model, engine.cache, rows, sampling, policy, exit)
    times = []
    with closing(session.run()) as cycles:
        started = time.perf_counter()
        for _ in islice(cycles, _WARM_UP + _TIMED):
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
    return median(times[_WARM_UP:] or times)


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
    return median(times[_WARM_UP:])
