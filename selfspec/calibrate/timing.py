"""Step costs on this device, measured with real steps of a batch."""

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
from selfspec.governor.rules import BATCHES, Policy, Rules
from selfspec.metrics import Metrics
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request, Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import NONE, Plan

_LARGEST_TREE_BATCH = Rules().max_tree_batch
_STARS = (1, 3, 8, 16, 32, 63)  # numbers of nodes that are timed, all children of the root
# Also timed with kernels: on both sides of the numbers of nodes at which batches of 1 or 4 need another tile.
_FULL_TILES = (3, 4, 7, 8, 11, 12, 15, 16, 31, 32)
_CHAIN, _STAR = Plan.parse("chain:3"), Plan.parse("tree:3")  # equal numbers of nodes, depths 3 and 1
_HEAD_STEP = 4  # the smaller head that is timed has every fourth row
_MOST_IN_LARGE_BATCHES = 8  # nodes that are timed for batches that draft chains only
_CONTEXT, _LONGEST = 128, 1024  # tokens of the prompt, and the most tokens of a sequence
_WARM_UP, _TIMED, _TIMED_ON_KERNELS = 2, 6, 24  # steps; more where a step takes less than a millisecond


def step_costs(
    engine: Engine, exits: list[Exit], batch: int, progress: Callable[[int], None] = lambda _: None
) -> dict[int, StepCost]:
    """Costs of the steps of a batch, by exit layer. The cost of a depth is measured for each exit; the costs of nodes
    and of head rows are about equal for all exits, and measured with the first."""
    plain = step_time(engine, None, NONE, batch)
    chains, depths = {}, {}
    for exit in exits:
        chains[exit.layer] = step_time(engine, exit, _CHAIN, batch)
        further = chains[exit.layer] - step_time(engine, exit, _STAR, batch)
        depths[exit.layer] = max(0.0, further / (_CHAIN.depth - _STAR.depth))
        progress(1)
    first = exits[0]
    stars = _star_sizes(batch, engine.has_kernels)
    times = [step_time(engine, first, Plan.tree((nodes,)), batch) - depths[first.layer] for nodes in stars]
    drafting = tuple((nodes, max(plain, seconds)) for nodes, seconds in zip(stars, times, strict=True))
    head_row = _head_row_cost(engine, first, batch, chains[first.layer])
    progress(1)
    return {
        exit.layer: StepCost(
            plain,
            depths[exit.layer],
            drafting,
            min(head_row, depths[exit.layer] / exit.vocabulary),  # a depth includes all rows of the head
            exit.vocabulary,
        )
        for exit in exits
    }


def passes_and_rows(exits: int, has_kernels: bool) -> tuple[float, float]:
    """Passes through the model, and tokens in them, that `step_costs` takes for all batches and this many exits."""
    steps = _WARM_UP + (_TIMED_ON_KERNELS if has_kernels else _TIMED)
    passes = rows = 0.0
    for batch in BATCHES.values():
        nodes = [0, *[len(_CHAIN), len(_STAR)] * exits, *_star_sizes(batch, has_kernels), len(_CHAIN)]
        passes += len(nodes) * steps
        rows += sum(batch * steps * (count + 1) + _CONTEXT for count in nodes)
    return passes, rows


def _star_sizes(batch: int, has_kernels: bool) -> list[int]:
    """The numbers of nodes that are timed."""
    wanted = sorted({*_STARS, *(_FULL_TILES if has_kernels else ())})
    return [nodes for nodes in wanted if batch <= _LARGEST_TREE_BATCH or nodes <= _MOST_IN_LARGE_BATCHES]


def step_time(engine: Engine, exit: Exit | None, plan: Plan, batch: int) -> float:
    """Seconds of a step of `batch` sequences, as the mean of the faster half: interruptions only make steps slower.
    Runs between the steps of other requests."""
    times = sorted(engine.scheduler.call(partial(_time_steps, engine, exit, plan, batch)))
    return mean(times[: len(times) // 2 + 1])


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
    """Seconds that a row of the trimmed head adds to a depth: compares a chain with all of the exit's rows, which takes
    `chain` seconds, and a chain with a quarter of them."""
    rows = torch.arange(exit.vocabulary, device=engine.model.device) if exit.head_rows is None else exit.head_rows
    fewer = replace(exit, head_rows=rows[::_HEAD_STEP], domain_rows=None)
    saved = exit.vocabulary - fewer.vocabulary
    if not saved:
        return 0.0
    return max(0.0, (chain - step_time(engine, fewer, _CHAIN, batch)) / (_CHAIN.depth * saved))
