"""Plans: the nodes that strings describe, refused plans, and properties of every valid plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfspec.speculation.plan import MAX_NODES, NONE, Plan

few = settings(max_examples=30)  # of each property


@st.composite
def node_lists(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(parent, rank) of the nodes of any valid plan: levels of any width, parents in any order, ranks with gaps."""
    ranks = st.one_of(st.integers(0, 3), st.integers(0, 300))
    nodes: list[tuple[int, int]] = []
    level = [0]
    while level:
        pairs = st.tuples(st.sampled_from(level), ranks)
        most = min(MAX_NODES - len(nodes), draw(st.sampled_from([1, 3, 12, MAX_NODES])))
        chosen = draw(st.lists(pairs, unique=True, max_size=most))
        first = len(nodes) + 1
        nodes += chosen
        level = list(range(first, len(nodes) + 1))
    return nodes


@st.composite
def widths(draw: st.DrawFn) -> tuple[int, ...]:
    """Children per node at each depth, of regular trees of at most 63 nodes."""
    chosen: list[int] = []
    nodes, level = 0, 1
    while nodes + level <= MAX_NODES and (not chosen or draw(st.booleans())):
        chosen.append(draw(st.integers(1, (MAX_NODES - nodes) // level)))
        level *= chosen[-1]
        nodes += level
    return tuple(chosen)


plans = st.one_of(node_lists().map(Plan.from_nodes), widths().map(Plan.tree))


def path_to_root(plan: Plan, node: int) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(plan.parents[path[-1] - 1])
    return path


# Strings


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("none", []),
        ("chain:1", [(0, 0)]),
        ("chain:3", [(0, 0), (1, 0), (2, 0)]),
        ("tree:3", [(0, 0), (0, 1), (0, 2)]),
        ("tree:2,1", [(0, 0), (0, 1), (1, 0), (2, 0)]),
        ("tree:2,2", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        ("nodes:0.0,0.2,2.1", [(0, 0), (0, 2), (2, 1)]),
        ("nodes:0.1,0.0,2.0,1.0", [(0, 1), (0, 0), (2, 0), (1, 0)]),
        ("copy:2", [(0, 0), (1, 0)]),
        ("tree:2,1+copy:2", [(0, 0), (1, 0), (0, 0), (0, 1), (3, 0), (4, 0)]),
    ],
)
def test_a_string_describes_its_nodes(text: str, nodes: list[tuple[int, int]]) -> None:
    plan = Plan.parse(text)
    assert list(zip(plan.parents, plan.ranks, strict=True)) == nodes


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("tree:1,1,1", "chain:3"),
        ("nodes:0.0,1.0", "chain:2"),
        ("nodes:0.0,0.1", "tree:2"),
        ("tree:4,2", "tree:4,2"),
        ("tree:1,1+copy:2", "chain:2+copy:2"),
        ("copy:3", "copy:3"),
    ],
)
def test_str_is_the_shortest_form(text: str, shortest: str) -> None:
    assert str(Plan.parse(text)) == shortest


@few
@given(plans)
@example(Plan.from_nodes([(0, 63)]))
@example(Plan.from_nodes([(0, 1), (0, 0)]))
@example(Plan.from_nodes([(0, 0), (0, 1), (2, 0), (1, 0)]))
@example(Plan.from_nodes([(0, rank) for rank in range(9)] + [(1, rank) for rank in range(9)]))
def test_str_reads_back_as_the_same_plan(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@few
@given(node_lists())
def test_node_list_keeps_parents_and_ranks(nodes: list[tuple[int, int]]) -> None:
    plan = Plan.parse(nodes)
    assert list(zip(plan.parents, plan.ranks, strict=True)) == nodes


def test_plan_parses_as_itself() -> None:
    plan = Plan.parse("tree:2,1")
    assert Plan.parse(plan) is plan


def test_empty_plan_is_none() -> None:
    assert Plan.parse("none") == NONE == Plan.parse([])
    assert (len(NONE), NONE.depth, str(NONE)) == (0, 0, "none")


def test_equal_plans_hash_alike() -> None:
    assert len({Plan.parse("tree:1,1"), Plan.parse("chain:2"), Plan.from_nodes([(0, 0), (1, 0)])}) == 1


# Refused plans


@pytest.mark.parametrize(
    "text",
    [
        "",
        " none",
        "chain:",
        "chain:0",
        "chain:2.5",
        "chain:4,2",
        "chain:4\n",
        "tree:0",
        "tree:4,",
        "tree:4,0,2",
        "tree:4, 2",
        "nodes:",
        "nodes:0",
        "nodes:0.0,",
        "nodes:0.0.0",
        "beam:",
        "beam:0",
        "beam:4,",
        "copy:",
        "copy:0",
        "+copy:2",
        "tree:2copy:2",
        "copy:2+tree:2",
        "copy:2+copy:2",
    ],
)
def test_malformed_string_is_refused_with_the_forms_to_write(text: str) -> None:
    with pytest.raises(ValueError, match=r"'chain:4', 'tree:4,2,2,1'"):
        Plan.parse(text)


@pytest.mark.parametrize("plan", [None, 4, [0, 1], [(0,)], [(0, 0, 0)], [("a", "b")]], ids=str)
def test_plan_of_another_type_is_refused_with_the_forms_to_write(plan: object) -> None:
    with pytest.raises(ValueError, match=r"'chain:4', 'tree:4,2,2,1'"):
        Plan.parse(plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([(1, 0)], "node 1 of the plan has parent 1"),
        ([(0, 0), (3, 0), (1, 0)], "node 2 of the plan has parent 3"),
        ([(-1, 0)], "node 1 of the plan has parent -1"),
        ([(0, 0), (0, -1)], "node 2 of the plan has rank -1"),
        ([(0, 0), (0, 0)], "two children of the same rank"),
        ([(0, 0), (1, 0), (0, 1)], "depth by depth"),
    ],
    ids=["own parent", "parent after child", "negative parent", "negative rank", "twin ranks", "depths mixed"],
)
def test_impossible_nodes_are_refused(nodes: list[tuple[int, int]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Plan.from_nodes(nodes)


@pytest.mark.parametrize(
    ("nodes", "copied", "problem"),
    [([(0, 0), (0, 0)], 2, "chain of rank 0"), ([(0, 0)], 2, "chain"), ([(0, 0), (1, 0)], 1, "a child of the exit's")],
)
def test_impossible_copied_nodes_are_refused(nodes: list[tuple[int, int]], copied: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Plan(tuple(parent for parent, _ in nodes), tuple(rank for _, rank in nodes), copied)


def test_different_numbers_of_parents_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 parents and 1 ranks"):
        Plan((0, 0), (0,))


@pytest.mark.parametrize("plan", ["chain:63", "tree:63", "tree:1,62", "tree:3,5,3", [(0, rank) for rank in range(63)]])
def test_63_nodes_are_allowed(plan: str | list[tuple[int, int]]) -> None:
    assert len(Plan.parse(plan)) == 63


@pytest.mark.parametrize(
    "plan",
    [
        "chain:64",
        "tree:64",
        "tree:1,63",
        "tree:8,7",
        "tree:4,4,4",
        [(0, rank) for rank in range(64)],
        "chain:62+copy:2",
        "copy:64",
        "chain:99999999999999999999",
        "tree:99999999999999999999",
    ],
    ids=lambda plan: plan if isinstance(plan, str) else f"{len(plan)} nodes",
)
def test_more_than_63_nodes_are_refused(plan: str | list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="63"):
        Plan.parse(plan)


# Properties of every plan


@few
@given(plans)
def test_depth_counts_the_steps_to_the_root(plan: Plan) -> None:
    assert plan.depths == tuple(len(path_to_root(plan, node)) - 1 for node in range(len(plan) + 1))
    assert plan.depth == max(plan.depths)


@few
@given(plans)
def test_levels_hold_every_node_once_in_order_of_depth(plan: Plan) -> None:
    assert [node for level in plan.levels for node in level] == list(range(len(plan) + 1))
    assert [{plan.depths[node] for node in level} for level in plan.levels] == [{d} for d in range(plan.depth + 1)]


@few
@given(plans)
def test_children_are_the_nodes_of_a_parent_best_rank_first(plan: Plan) -> None:
    for parent, children in enumerate(plan.children):
        assert set(children) == {n for n in range(1, len(plan) + 1) if plan.parents[n - 1] == parent}
        ranks = [plan.ranks[child - 1] for child in children]
        assert ranks == sorted(ranks)


@few
@given(plans)
def test_ancestors_are_the_path_to_the_root(plan: Plan) -> None:
    assert plan.ancestors.shape == (len(plan) + 1, len(plan) + 1)
    assert plan.ancestors.dtype == torch.bool
    for node, row in enumerate(plan.ancestors):
        assert set(row.nonzero().flatten().tolist()) == set(path_to_root(plan, node))


@few
@given(plans)
def test_width_is_the_number_of_ranks_a_level_must_offer(plan: Plan) -> None:
    for depth, level in enumerate(plan.levels):
        ranks = [plan.ranks[n - 1] for n in range(1, len(plan) + 1) if plan.depths[n] == depth + 1]
        assert plan.width(level) == (max(ranks) + 1 if ranks else 0)


@few
@given(plans, st.integers(0, MAX_NODES))
def test_truncated_plan_keeps_exactly_the_nodes_down_to_the_depth(plan: Plan, depth: int) -> None:
    pairs = zip(plan.depths[1:], plan.parents, plan.ranks, strict=True)
    kept = [(parent, rank) for d, parent, rank in pairs if d <= depth]
    assert plan.truncated(depth) == Plan.from_nodes(kept)


@few
@given(plans)
def test_first_chain_is_as_long_as_the_path_through_the_best_children(plan: Plan) -> None:
    chain, node = plan.first_chain(), 0
    for _ in range(chain.depth):
        node = min((n for n in range(1, len(plan) + 1) if plan.parents[n - 1] == node), key=lambda n: plan.ranks[n - 1])
    assert node not in plan.parents  # the path ends at a leaf
    assert chain == (Plan.parse(f"chain:{chain.depth}") if chain.depth else NONE)


@few
@given(plans)
def test_a_chain_has_one_node_at_every_depth(plan: Plan) -> None:
    assert plan.is_chain == all(len(children) <= 1 for children in plan.children)


@few
@given(plans, st.integers(1, MAX_NODES), st.integers(0, MAX_NODES))
def test_copied_nodes_are_a_chain_that_leaves_the_others_as_they_are(plan: Plan, count: int, depth: int) -> None:
    count = min(count, MAX_NODES - len(plan))
    copying = plan.with_copy(count)
    assert copying.without_copy == plan and Plan.parse(str(copying)) == copying
    assert copying.path(count) == list(range(count + 1))
    for node in range(1, len(plan) + 1):
        assert copying.path(node + count) == [0, *(ancestor + count for ancestor in plan.path(node)[1:])]
    assert copying.levels[0] == range(count + 1)
    assert [len(level) for level in copying.levels[1:]] == [len(level) for level in plan.levels[1:]]
    assert [copying.width(level) for level in copying.levels] == [plan.width(level) for level in plan.levels]
    assert copying.truncated(depth) == plan.truncated(depth).with_copy(min(count, depth))


@few
@given(widths())
def test_tree_gives_every_node_of_a_depth_the_same_ranks_of_children(chosen: tuple[int, ...]) -> None:
    plan = Plan.tree(chosen)
    for node, children in enumerate(plan.children):
        width = chosen[plan.depths[node]] if plan.depths[node] < len(chosen) else 0
        assert [plan.ranks[child - 1] for child in children] == list(range(width))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 9), st.integers(0, 5))
def test_a_beam_has_its_number_of_nodes_at_each_depth(widths: list[int], copied: int, depth: int) -> None:
    plan = Plan(beam=tuple(widths)).with_copy(copied)
    assert Plan.parse(str(plan)) == plan and plan.without_copy.with_copy(copied) == plan
    assert [len(level) for level in plan.levels] == [copied + 1, *widths] and len(plan) == copied + sum(widths)
    assert plan.depth == max(len(widths), copied) and plan.first_chain() == Plan.tree((1,) * len(widths))
    assert [plan.width(level) for level in plan.levels] == [*widths, 0]
    assert plan.truncated(depth).without_copy.beam == tuple(widths[:depth])
    firsts = [0, *(level.start for level in plan.levels[1:])]
    tree = plan.of_sequence([*range(copied), *(firsts[depth - 1] for depth in plan.depths[copied + 1 :])])
    assert (tree.depths, tree.levels, tree.copied) == (plan.depths, plan.levels, copied)
    last = len(plan)
    assert tree.path(last)[1:] == [plan.node_at(last, at) for at in range(1, len(widths))] + [last]
    assert tree.is_leaf(last) and plan.is_leaf(last) and not plan.is_leaf(0)
    assert plan.is_leaf(copied) == (tree.is_leaf(copied))


def test_the_parents_of_a_beams_nodes_are_not_asked_of_the_plan() -> None:
    plan = Plan.parse("beam:3,2")
    for ask in (lambda: plan.children, lambda: plan.ancestors, lambda: plan.path(1)):
        with pytest.raises(ValueError, match="differ by sequence"):
            ask()
    with pytest.raises(ValueError, match="at most 63"):
        Plan.parse("beam:32,32")
