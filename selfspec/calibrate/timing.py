"""Step costs on this device, measured by running real steps of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import mean

import torch

from selfspec.batch import Batch
from selfspec.drafters import Drafter
from selfspec.engine import Engine
from selfspec.governor.costs import StepCost
from selfspec.governor.rules import Policy, Rules
from selfspec.metrics import Metrics
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request, Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import NONE, Plan

_LARGEST_TREE_BATCH = Rules().max_tree_batch
_STARS = (1, 3, 8, 16, 32, 63)  # numbers of nodes that are timed, all children of the root
# Also, on kernels: before and after rows of 1 or 4 texts need another tile, those of 4 also where few kernels do.
_FULL_TILES = (3, 4, 7, 8, 11, 12, 15, 16, 31, 32)
_CHAIN, _STAR = Plan.parse("chain:3"), Plan.parse("tree:3")  # as many nodes, two depths apart
_HEAD_STEP = 4  # every fourth row makes the smaller head that is timed
_MOST_IN_LARGE_BATCHES = 8  # nodes that are timed where only chains are drafted
_CONTEXT, _LONGEST = 128, 1024  # tokens before the timed cycles, and what the texts are planned to grow to
_WARM_UP, _TIMED, _TIMED_ON_KERNELS = 2, 6, 24  # cycles; where they take less than a millisecond, more of them


def step_costs(
    engine: Engine, exits: list[Exit], batch: int, progress: Callable[[int], None] = lambda _: None
) -> dict[int, StepCost]:
    """What cycles of a batch cost with each exit, by its layer. What a depth costs is the exit's own; how a cycle grows
    with its nodes and the head's rows is much the same for all, and measured with the first."""
    plain = _cycle_time(engine, None, NONE, batch)
    chains, depths = {}, {}
    for exit in exits:
        chains[exit.layer] = _cycle_time(engine, exit, _CHAIN, batch)
        further = chains[exit.layer] - _cycle_time(engine, exit, _STAR, batch)
        depths[exit.layer] = max(0.0, further / (_CHAIN.depth - _STAR.depth))
        progress(1)
    first = exits[0]
    wanted = sorted({*_STARS, *(_FULL_TILES if engine.has_kernels else ())})
    stars = [nodes for nodes in wanted if batch <= _LARGEST_TREE_BATCH or nodes <= _MOST_IN_LARGE_BATCHES]
    times = [_cycle_time(engine, first, Plan.tree((nodes,)), batch) - depths[first.layer] for nodes in stars]
    drafting = tuple((nodes, max(plain, seconds)) for nodes, seconds in zip(stars, times, strict=True))
    head_row = _head_row_cost(engine, first, batch, chains[first.layer])
    progress(1)
    return {
        exit.layer: StepCost(
            plain,
            depths[exit.layer],
            drafting,
            min(head_row, depths[exit.layer] / exit.vocabulary),  # the whole head is a part of the depth
            exit.vocabulary,
        )
        for exit in exits
    }


def _cycle_time(engine: Engine, exit: Exit | None, plan: Plan, batch: int) -> float:
    """Seconds of a step of `batch` sequences, timed between the steps of other requests."""
    return _typical(engine.scheduler.call(partial(_time_steps, engine, exit, plan, batch)))


def _time_steps(engine: Engine, exit: Exit | None, plan: Plan, size: int) -> list[float]:
    policy = Policy(Rules(), SamplingParams(), mode="force" if len(plan) else False, plan=plan)
    context = min(_CONTEXT, engine.context // 2)
    prompt = [token % engine.model.config.vocab_size for token in range(3, 3 + context)]
    longest = min(engine.context, _LONGEST)
    sequences = [Sequence(prompt, seed=0, sample_index=index, max_length=longest) for index in range(size)]
    request = Request(sequences, engine.model.device, policy=policy, drafter=None if exit is None else Drafter(exit))
    batch, times = Batch(engine.new_backend(), exit, engine.drafters, Metrics()), []
    try:
        while not batch.backend.prefill(sequences[:1], exit):
            pass
        for sequence in sequences[1:]:
            sequence.kv, sequence.previous_feature = engine.cache.fork(sequences[0].kv), sequences[0].prompt_feature
        batch.join(sequences)
        for _ in range(_WARM_UP + (_TIMED_ON_KERNELS if engine.has_kernels else _TIMED)):
            if request.is_finished:
                break
            started = time.perf_counter()
            batch.step()
            times.append(time.perf_counter() - started)
    finally:
        batch.drain()
        batch.leave(list(batch.running))
        for sequence in sequences:
            engine.cache.close(sequence.kv)
        batch.backend.close()
    return times[_WARM_UP:] or times


def _head_row_cost(engine: Engine, exit: Exit, batch: int, chain: float) -> float:
    """Seconds that a row of the draft head adds to a depth: a chain over all of the exit's rows takes `chain`, and is
    compared with one over a quarter of them."""
    rows = torch.arange(exit.vocabulary, device=engine.model.device) if exit.head_rows is None else exit.head_rows
    fewer = replace(exit, head_rows=rows[::_HEAD_STEP], domain_rows=None, prompt_rows=0)
    saved = exit.vocabulary - fewer.vocabulary
    if not saved:
        return 0.0
    return max(0.0, (chain - _cycle_time(engine, fewer, _CHAIN, batch)) / (_CHAIN.depth * saved))


def _typical(times: list[float]) -> float:
    """The mean of the faster half: what disturbs a step only ever makes it slower."""
    return mean(sorted(times)[: len(times) // 2 + 1])
