"""The choice of exit, head and plans, against brute force; the costs of steps that it uses; the trials of plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.calibrate import timing
from selfspec.calibrate.choice import MISSED, Choice, Paths, candidates, choose, rank_paths
from selfspec.calibrate.trial import Setting, Trials
from selfspec.engine import Engine
from selfspec.governor.costs import StepCost
from selfspec.governor.rules import BATCHES, DEFAULT_TREE, TEMPERATURES
from selfspec.results import GenerateOutput
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_NODES, NONE, Plan
from tests.calibrated import linear_cost
from tests.strategies import plans
from tests.tiny import VOCABULARY, tiny_model

WIDEST = 32  # plans use no rank from here on
FREE = linear_cost(plain=1.0, cycle=0.0, depth=0.0, node=0.0)
CHEAP = linear_cost(plain=1.0, cycle=0.05, depth=0.05, node=0.01)
DEAR = linear_cost(plain=1.0, cycle=1.0, depth=1.0, node=1.0)


def rank_arrays(most_paths: int, depths: tuple[int, int] = (1, 3), highest: int = 2) -> st.SearchStrategy[np.ndarray]:
    """Rank paths of up to three depths; ranks are low, MISSED, or too high for a plan."""
    rank = st.sampled_from([*range(highest + 1), 0, 0, MISSED, WIDEST])
    return st.integers(*depths).flatmap(
        lambda depth: st.lists(st.lists(rank, min_size=depth, max_size=depth), min_size=1, max_size=most_paths).map(
            lambda rows: np.array(rows).reshape(-1, depth)
        )
    )


costs = st.builds(
    linear_cost,
    plain=st.just(1.0),
    cycle=st.sampled_from([0.0, 0.1, 0.4]),
    depth=st.sampled_from([0.0, 0.05, 0.3]),
    node=st.sampled_from([0.001, 0.01, 0.1]),
    head_row=st.sampled_from([0.0, 0.001]),
    head_rows=st.just(100),
)


def walk(plan: Plan, path: np.ndarray) -> tuple[int, int]:
    """How many tokens of a path the nodes of a plan carry, and how many depths were reached."""
    node, accepted, asked = 0, 0, 0
    for rank in [*path.tolist(), None]:
        if not plan.children[node]:
            break
        asked += 1
        node = next((child for child in plan.children[node] if plan.ranks[child - 1] == rank), 0)
        if not node:
            break
        accepted += 1
    return accepted, asked


def accepted_by(tree: frozenset[tuple[int, ...]], ranks: np.ndarray) -> int:
    """Tokens of all paths that a tree, as a set of rank paths, carries."""
    return sum(tuple(path[:depth]) in tree for path in ranks.tolist() for depth in range(1, len(path) + 1))


def all_trees(nodes: list[tuple[int, ...]], size: int) -> list[frozenset[tuple[int, ...]]]:
    """Every set of so many nodes that holds the parents of all of them."""
    sets = map(frozenset, combinations(nodes, size))
    return [tree for tree in sets if all(node[:-1] in tree or len(node) == 1 for node in tree)]


@given(rank_arrays(most_paths=10, depths=(1, 2)), st.integers(1, 4))
def test_the_most_reached_nodes_are_the_best_tree_of_their_number(ranks: np.ndarray, size: int) -> None:
    depth = ranks.shape[1]
    nodes = list(chain(*(product(range(3), repeat=count) for count in range(1, depth + 1))))
    best = max(accepted_by(tree, ranks) for tree in all_trees(nodes, min(size, len(nodes))))
    found = Paths(ranks).most_reached(depth)[:size]
    assert all(node[:-1] in found or len(node) == 1 for node in found), "it is a tree"
    assert accepted_by(frozenset(found), ranks) == best


def test_a_tree_has_no_more_nodes_than_a_plan_may_have() -> None:
    ranks = np.array(list(product(range(10), repeat=2)))
    assert len(Paths(ranks).most_reached(2)) == MAX_NODES
    assert len(Paths(ranks).best(FREE).plan) <= MAX_NODES


@given(rank_arrays(most_paths=20, depths=(3, 3)), plans())
def test_expected_tokens_and_accept_rate_are_those_of_walking_the_tree(ranks: np.ndarray, plan: Plan) -> None:
    walked = [walk(plan, path) for path in ranks]
    accepted, asked = sum(a for a, _ in walked), sum(b for _, b in walked)
    paths = Paths(ranks)
    assert paths.tokens_per_cycle(plan) == pytest.approx(1 + accepted / len(ranks))
    assert paths.accept_rate(plan) == pytest.approx(accepted / asked if asked else 0.0)


# Shares of ranks


@given(rank_arrays(most_paths=20))
def test_shares_are_of_the_positions_that_a_draft_reaches(ranks: np.ndarray) -> None:
    """A position is reached where all ranks before it are low enough for a plan."""
    shares = Paths(ranks).shares()
    for depth in range(ranks.shape[1]):
        reached = [path[depth] for path in ranks.tolist() if all(0 <= rank < WIDEST for rank in path[:depth])]
        assert bool(reached) == (depth < len(shares)), "depths that are never reached are left out"
        if reached:
            expected = [reached.count(rank) / len(reached) for rank in range(3)]
            assert shares[depth] == pytest.approx(expected[: len(shares[depth])], abs=1.001e-4)
            assert not any(expected[len(shares[depth]) :]) and [*shares[depth], 1][-1 - bool(shares[depth])]


def test_the_shares_of_eight_paths() -> None:
    ranks = [[0, 0], [0, 1], [0, MISSED], [2, 0], [31, WIDEST], [WIDEST, 0], [MISSED, 0], [0, 0]]
    first, second = Paths(np.array(ranks)).shares()
    assert first == [0.5, 0, 0.125, *[0] * 28, 0.125]
    assert second == [0.5, 0.1666]


@pytest.mark.parametrize("equal", [1, 3, 6, 7, 32])
def test_rounded_shares_never_add_up_to_more_than_one(equal: int) -> None:
    (shares,) = Paths(np.arange(equal)[:, None]).shares()
    assert len(shares) == equal and len(set(shares)) == 1
    assert 1 - 32e-4 < sum(shares) <= 1 + 1e-9


@pytest.mark.parametrize("ranks", [[[MISSED, 0]] * 5, np.zeros((0, 3), dtype=int)], ids=["missed", "no paths"])
def test_no_rank_has_a_share_where_every_token_is_missed(ranks: object) -> None:
    assert Paths(np.array(ranks)).shares() == [[]]


@given(rank_arrays(most_paths=4), costs, st.sampled_from([None, 40, 100, 160]), st.booleans())
def test_the_best_plan_is_the_best_of_all_trees(
    ranks: np.ndarray, cost: StepCost, head_rows: int | None, as_chain: bool
) -> None:
    nodes = sorted({tuple(path[:end]) for path in ranks.tolist() for end in range(1, len(path) + 1)})
    nodes = [node for node in nodes if all(0 <= rank < WIDEST for rank in node) and not (as_chain and any(node))]
    speeds = [1.0]
    for size in range(1, len(nodes) + 1):
        for tree in all_trees(nodes, size):
            tokens = 1 + accepted_by(tree, ranks) / len(ranks)
            speeds.append(tokens * cost.plain / cost.seconds(max(map(len, tree)), size, head_rows))
    best = Paths(ranks).best(cost, head_rows, as_chain)
    assert best.speedup == pytest.approx(max(speeds))
    own = cost.seconds(best.plan.depth, len(best.plan), head_rows)
    tokens = 1 + np.mean([walk(best.plan, path)[0] for path in ranks])
    assert best.tokens_per_cycle == pytest.approx(tokens)
    assert tokens * cost.plain / own == pytest.approx(best.speedup), "the plan has its expected speed-up"
    assert not as_chain or best.plan.is_chain
    assert max(speeds) > 1 or best.plan == NONE


@pytest.mark.parametrize(
    "ranks",
    [[[MISSED, 0]] * 5, [[WIDEST, 0]] * 5, np.zeros((0, 3), dtype=int)],
    ids=["missed", "rank too high", "no paths"],
)
def test_the_plan_is_none_where_no_token_would_be_accepted(ranks: object) -> None:
    best = Paths(np.array(ranks)).best(FREE)
    assert (best.plan, best.tokens_per_cycle, best.accept_rate, best.speedup) == (NONE, 1.0, 0.0, 1.0)


def test_the_plan_is_none_where_drafting_costs_more_than_it_saves() -> None:
    always_right = Paths(np.zeros((10, 3), dtype=int))
    assert always_right.best(CHEAP).plan == Plan.parse("chain:3")
    assert always_right.best(DEAR).plan == NONE


@given(plans())
def test_a_plan_can_be_rebuilt_from_its_rank_paths(plan: Plan) -> None:
    again = Plan.from_paths(rank_paths(plan)[1:][::-1])
    assert sorted(rank_paths(again)) == sorted(rank_paths(plan))


def test_a_step_costs_the_sum_of_its_parts() -> None:
    cost = linear_cost(plain=10.0, cycle=1.0, depth=2.0, node=0.5, head_row=0.01, head_rows=100)
    assert cost.seconds(0, 0) == 10
    assert cost.seconds(0, 0, 30) == 10
    assert cost.seconds(3, 7) == pytest.approx(10 + 1 + 3 * 2 + 7 * 0.5)
    assert cost.seconds(3, 7, 100) == cost.seconds(3, 7)
    assert cost.seconds(3, 7, 40) == pytest.approx(cost.seconds(3, 7) - 3 * 60 * 0.01)
    assert cost.seconds(3, 7, 150) == pytest.approx(cost.seconds(3, 7) + 3 * 50 * 0.01)


def test_costs_between_measured_numbers_of_nodes_are_interpolated() -> None:
    cost = StepCost(plain=1.0, depth=0.5, drafting=((1, 2.0), (3, 3.0), (11, 4.0)))
    assert [cost.seconds(1, nodes) for nodes in (1, 2, 3, 7, 11)] == pytest.approx([2.5, 3.0, 3.5, 4.0, 4.5])
    assert cost.seconds(2, 61) == pytest.approx(1.0 + 4.0 + 50 * 0.2), "0.2 s a node in the mean"


# Choosing for a domain

LAYERS, HEADS = (1, 2, 3), (50, 100)


@lru_cache(maxsize=100)
def measured_domain(seed: int) -> tuple[dict, dict]:
    """Rank paths of every exit, head and temperature, and costs of every exit and batch."""
    random = np.random.default_rng(seed)
    measured = {
        (layer, head, temperature): Paths(random.choice([0, 0, 0, 1, 2, 3, MISSED], size=(8, 2)))
        for layer in LAYERS
        for head in HEADS
        for temperature in TEMPERATURES
    }
    dearest = random.choice([0.05, 0.5, 2.0])
    costs = {
        (layer, batch): linear_cost(1.0, *(random.random(3) * (dearest, dearest, dearest / 10)), 0.0005, 100)
        for layer in LAYERS
        for batch in BATCHES.values()
    }
    return measured, costs


domains = st.integers(0, 30).map(measured_domain)


def speed(choice: Choice | dict) -> float:
    chosen = choice.plans if isinstance(choice, Choice) else choice
    return float(np.prod([of_batch["1"].speedup for of_batch in chosen.values()])) ** (1 / len(chosen))


@given(domains)
def test_the_fastest_exit_and_head_are_chosen(domain: tuple[dict, dict]) -> None:
    choice = choose(*domain)
    assert speed(choice) == pytest.approx(max(speed(plans) for plans in candidates(*domain).values()))
    for temperature, of_batch in choice.plans.items():
        paths = domain[0][choice.exit_layer, choice.head_rows, temperature]
        for band, batch in BATCHES.items():
            cost = domain[1][choice.exit_layer, batch]
            assert of_batch[band] == paths.best(cost, choice.head_rows, chain=batch > 4)


@given(domains)
def test_large_batches_draft_chains(domain: tuple[dict, dict]) -> None:
    for of_key in candidates(*domain).values():
        assert all(of_batch["5-16"].plan.is_chain for of_batch in of_key.values())


def test_small_batches_may_draft_trees_where_large_ones_draft_chains() -> None:
    paths = Paths(np.array([[0, 0], [1, 0], [2, 1]] * 4))
    measured = {(1, 100, temperature): paths for temperature in TEMPERATURES}
    plans = choose(measured, {(1, batch): CHEAP for batch in BATCHES.values()}).plans["0"]
    assert [plans[band].plan.is_chain for band in BATCHES] == [False, False, True]
    assert len(plans["5-16"].plan) > 0


@given(domains)
def test_the_objective_accept_takes_the_highest_accept_rate_of_faster_exits(
    domain: tuple[dict, dict],
) -> None:
    measured, _ = domain
    greedy = next(iter(TEMPERATURES))
    paying = [key for key, plans in candidates(*domain).items() if len(plans[greedy]["1"].plan)]
    rates = {key: measured[*key, greedy].accept_rate(DEFAULT_TREE) for key in paying}
    choice = choose(*domain, "accept")
    if paying:
        assert rates.get((choice.exit_layer, choice.head_rows)) == max(rates.values())
    else:
        assert choice.plans[greedy]["1"].plan == NONE


def test_an_exit_that_is_slower_than_plain_is_not_taken_for_its_accept_rate() -> None:
    sure, unsure = Paths(np.zeros((4, 2), dtype=int)), Paths(np.array([[0, 0], [0, 0], [0, MISSED], [MISSED, 0]]))
    measured = {(layer, 100, name): paths for layer, paths in ((1, unsure), (2, sure)) for name in TEMPERATURES}
    costs = {(layer, batch): cost for layer, cost in ((1, CHEAP), (2, DEAR)) for batch in BATCHES.values()}
    assert choose(measured, costs, "accept").exit_layer == 1
    assert choose(measured, costs | {(2, batch): CHEAP for batch in BATCHES.values()}, "accept").exit_layer == 2


@given(domains, st.sampled_from(["throughput", "accept"]), st.randoms(use_true_random=False))
def test_the_choice_ignores_the_order_of_measurements(domain: tuple[dict, dict], objective: str, random) -> None:
    measured, costs = domain
    keys = [(layer, head) for layer in LAYERS for head in HEADS]
    random.shuffle(keys)
    shuffled = {(*key, name): measured[*key, name] for key in keys for name in TEMPERATURES}
    again = choose(shuffled, dict(reversed(costs.items())), objective)
    assert again == choose(measured, costs, objective)


def test_the_domains_of_these_tests_include_both_cases() -> None:
    """In some an exit is faster than plain decoding, in some none is; exits of every layer are chosen."""
    choices = [choose(*measured_domain(seed)) for seed in range(31)]
    assert {choice.exit_layer for choice in choices} == set(LAYERS)
    assert {len(choice.plans["0"]["1"].plan) > 0 for choice in choices} == {True, False}


# Costs of steps

PLAIN, DRAFTING, NODE, LAYER, HEAD_ROW = 7.0, 2.0, 0.25, 1.5, 0.03
StepTime = Callable[[Exit | None, Plan, int], float]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_model(tiny_model("llama", torch.float32))


@dataclass
class Timed:
    """Times steps by a rule instead of the clock, and records them."""

    engine: Engine
    rule: StepTime
    steps: list[tuple[Exit | None, Plan, int]] = field(default_factory=list)
    ticks: int = 0

    def costs(self, exits: list[Exit], batch: int) -> dict[int, StepCost]:
        def step_time(engine: Engine, exit: Exit | None, plan: Plan, batch: int) -> float:
            assert engine is self.engine
            self.steps.append((exit, plan, batch))
            return self.rule(exit, plan, batch)

        def advance(ticks: int) -> None:
            self.ticks += ticks

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timing, "step_time", step_time)
            return timing.step_costs(self.engine, exits, batch, advance)


def sum_of_parts(exit: Exit | None, plan: Plan, batch: int) -> float:
    if exit is None:
        return PLAIN * batch
    of_depth = exit.layer * LAYER + exit.vocabulary * HEAD_ROW
    return batch * (PLAIN + DRAFTING + len(plan) * NODE + plan.depth * of_depth)


def exits_over(engine: Engine, *rows: int | None) -> list[Exit]:
    """Exits after layers 1, 2, ..., each over so many of the head's last rows."""
    tokens = torch.arange(VOCABULARY)
    heads = [None if count is None else tokens[VOCABULARY - count :] for count in rows]
    return [Exit(engine.model, layer, head_rows=head) for layer, head in enumerate(heads, start=1)]


@pytest.mark.parametrize("batch", BATCHES.values())
@pytest.mark.parametrize("rows", [(None, None), (80, 80, 80), (64, None), (7,)], ids=str)
def test_the_costs_of_parts_follow_from_the_times_of_whole_steps(engine: Engine, rows: tuple, batch: int) -> None:
    exits, timed = exits_over(engine, *rows), Timed(engine, sum_of_parts)
    costs = timed.costs(exits, batch)
    assert list(costs) == [exit.layer for exit in exits]
    for exit in exits:
        cost = costs[exit.layer]
        assert cost.head_row == pytest.approx(batch * HEAD_ROW) and cost.head_rows == exit.vocabulary
        assert cost.seconds(0, 0) == PLAIN * batch
        for plan, head in product(map(Plan.parse, ("chain:1", "chain:3", "tree:1,2")), (1, 25, 101)):
            offered = Exit(engine.model, exit.layer, head_rows=torch.arange(head))
            assert cost.seconds(plan.depth, len(plan), head) == pytest.approx(sum_of_parts(offered, plan, batch))


@pytest.mark.parametrize("rows", [(None, None), (80, 80, 80)], ids=str)
def test_head_rows_are_timed_with_a_quarter_of_the_head(engine: Engine, rows: tuple) -> None:
    exits, timed = exits_over(engine, *rows), Timed(engine, sum_of_parts)
    timed.costs(exits, 4)
    assert timed.ticks == len(exits) + 1
    known = [None, *exits]
    (fewer,) = [exit for exit, _, _ in timed.steps if exit not in known]
    assert fewer is not None and fewer.layer == exits[0].layer and fewer.head_rows is not None
    own = range(VOCABULARY) if exits[0].head_rows is None else exits[0].head_rows.tolist()
    assert set(fewer.head_rows.tolist()) < set(own) and fewer.vocabulary == -(-len(own) // 4)
    assert {batch for _, _, batch in timed.steps} == {4}


@pytest.mark.parametrize("batch", [1, 4])
def test_with_kernels_steps_on_both_sides_of_full_tiles_are_timed(engine: Engine, batch: int) -> None:
    def by_tiles(exit: Exit | None, plan: Plan, batch: int) -> float:
        rows = batch * (len(plan) + 1)
        return 1.0 + (16 if rows <= 16 else 32 if rows <= 32 else 64) / 16 + plan.depth

    def timed(kernels: bool) -> StepCost:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "has_kernels", kernels)
            (cost,) = Timed(engine, by_tiles).costs(exits_over(engine, None), batch).values()
            return cost

    exit = exits_over(engine, None)[0]
    for nodes in (16 // batch - 1, 16 // batch, 32 // batch - 1, 32 // batch):
        exact = by_tiles(exit, Plan.tree((nodes,)), batch)
        assert timed(True).seconds(1, nodes) == pytest.approx(exact)
    assert timed(False).seconds(1, 32 // batch - 1) > by_tiles(exit, Plan.tree((32 // batch - 1,)), batch)


def test_the_cost_of_a_head_row_is_never_negative(engine: Engine) -> None:
    def disturbed(exit: Exit | None, plan: Plan, batch: int) -> float:
        return sum_of_parts(exit, plan, batch) + (100 if exit is not None and exit.vocabulary < 80 else 0)

    costs = Timed(engine, disturbed).costs(exits_over(engine, 80, 80), 1)
    assert [cost.head_row for cost in costs.values()] == [0, 0]


def test_all_head_rows_cost_at_most_a_depth(engine: Engine) -> None:
    def disturbed(exit: Exit | None, plan: Plan, batch: int) -> float:
        return 0.0 if exit is not None and exit.vocabulary < 80 else sum_of_parts(exit, plan, batch)

    costs = Timed(engine, disturbed).costs(exits_over(engine, 80, 80), 1)
    for layer, cost in costs.items():
        assert cost.depth == pytest.approx(layer * LAYER + 80 * HEAD_ROW)
        assert cost.head_row == pytest.approx(cost.depth / 80)


def test_the_row_of_a_head_with_one_row_costs_nothing(engine: Engine) -> None:
    (cost,) = Timed(engine, sum_of_parts).costs(exits_over(engine, 1), 1).values()
    assert cost.head_row == 0 and cost.head_rows == 1


@pytest.mark.parametrize("batch", BATCHES.values())
def test_the_expected_passes_are_those_that_are_timed(engine: Engine, batch: int) -> None:
    exits, timed = exits_over(engine, 80, 80), Timed(engine, sum_of_parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "BATCHES", {"one": batch})
        passes, rows = timing.passes_and_rows(len(exits), has_kernels=False)
    timed.costs(exits, batch)
    steps = timing._WARM_UP + timing._TIMED
    assert passes == steps * len(timed.steps)
    assert rows == sum(batch * steps * (len(plan) + 1) + timing._CONTEXT for _, plan, _ in timed.steps)


def test_real_steps_are_timed_with_any_head(engine: Engine) -> None:
    costs = timing.step_costs(engine, exits_over(engine, None, 80), 2)
    assert [cost.head_rows for cost in costs.values()] == [VOCABULARY, 80]
    assert all(cost.plain > 0 and 0 <= cost.head_row * cost.head_rows <= cost.depth + 1e-12 for cost in costs.values())


# Trials

CAPTURE = 100.0  # seconds; a step takes one


@dataclass
class SlowAtFirst:
    """Stands in for an engine that captures each step of a new plan, batch shape and length."""

    has_kernels: bool
    lengths: list[int] = field(default_factory=list)  # of the answers asked for
    known: set = field(default_factory=set)
    model: Any = field(default_factory=lambda: SimpleNamespace(device="cpu"))

    def generate(self, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> GenerateOutput:
        self.lengths.append(options["max_new_tokens"])
        cycles = options["max_new_tokens"]
        met = {(options.get("plan"), ids.shape, options["do_sample"], cycle) for cycle in range(cycles)}
        seconds, self.known = cycles + CAPTURE * len(met - self.known), self.known | met
        stats = SimpleNamespace(new_tokens=cycles, cycles=cycles, accepted=0, accept_rate=0.0, elapsed_s=seconds)
        return GenerateOutput(ids, [stats] * len(ids))  # type: ignore[list-item]


PROMPTS = [[5], [5, 6], [5, 6, 7], [5, 6, 7, 8, 9]]
ONE, FOUR = Setting("0.7", "1", 3, 1.0), Setting("0", "2-4", 4, 0.5)


def trials_of(has_kernels: bool) -> tuple[SlowAtFirst, Trials]:
    stand_in: Any = SlowAtFirst(has_kernels)
    return stand_in, Trials(stand_in, "code", 1, PROMPTS, 20)


@pytest.mark.parametrize("setting", [ONE, FOUR], ids=["one by one", "four at once"])
def test_with_kernels_nothing_is_captured_while_a_trial_is_timed(setting: Setting) -> None:
    _, trials = trials_of(has_kernels=True)
    for plan in ("chain:2", "tree:3"):
        run = trials.run(plan, setting)
        assert run is not None
        assert run.tokens_per_second == run.plain_tokens_per_second == BATCHES[setting.batch]


def test_without_kernels_a_few_tokens_warm_up() -> None:
    engine, trials = trials_of(has_kernels=False)
    trials.run("chain:2", ONE)
    assert engine.lengths == 2 * [4, 20, 20, 20], "plain decoding, then the plan"
    trials.run("tree:3", ONE)
    assert engine.lengths[8:] == [4, 20, 20, 20], "plain decoding is timed once"
    trials.run("tree:3", FOUR)
    assert engine.lengths[12:] == 2 * [4, 10]
