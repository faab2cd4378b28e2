"""Hypothesis strategies: plans, and accepted paths through them."""

from __future__ import annotations

from hypothesis import strategies as st

from selfspec.speculation.plan import Plan


@st.composite
def plans(draw: st.DrawFn, max_nodes: int = 7, max_copied: int = 0) -> Plan:
    """Any plan: parents ascend, so that nodes are listed depth by depth; ranks may be skipped. `max_copied` nodes are
    copied at most."""
    parents: list[int] = []
    for node in range(draw(st.integers(0, max_nodes))):
        parents.append(draw(st.integers(parents[-1] if parents else 0, node)))
    ranks: list[int] = []
    for node, parent in enumerate(parents):
        siblings = [rank for rank, other in zip(ranks, parents[:node], strict=True) if other == parent]
        ranks.append((siblings[-1] + 1 if siblings else 0) + draw(st.integers(0, 1)))
    return Plan(tuple(parents), tuple(ranks)).with_copy(draw(st.integers(0, max_copied)))


@st.composite
def paths(draw: st.DrawFn, plan: Plan, acceptance: str) -> list[int]:
    """A path from the root: at each node with children `acceptance` ("always", "never", "mostly", or any other word for
    one half) is the chance that a child is accepted."""
    stops = {"always": st.just(False), "never": st.just(True), "mostly": st.integers(0, 9).map(lambda n: n == 7)}
    path = [0]
    while plan.children[path[-1]] and not draw(stops.get(acceptance, st.booleans())):
        path.append(draw(st.sampled_from(plan.children[path[-1]])))
    return path
