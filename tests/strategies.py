"""Random plans, and random walks down them, for hypothesis."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from selfspec.speculation.plan import Plan

SETTINGS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def plans(draw: st.DrawFn, max_nodes: int = 7) -> Plan:
    """Any tree: parents ascend, so that nodes are listed depth by depth; ranks may skip some."""
    parents: list[int] = []
    for node in range(draw(st.integers(0, max_nodes))):
        parents.append(draw(st.integers(parents[-1] if parents else 0, node)))
    ranks: list[int] = []
    for node, parent in enumerate(parents):
        elder = [rank for rank, other in zip(ranks, parents[:node], strict=True) if other == parent]
        ranks.append((elder[-1] + 1 if elder else 0) + draw(st.integers(0, 1)))
    return Plan(tuple(parents), tuple(ranks))


@st.composite
def paths(draw: st.DrawFn, plan: Plan, acceptance: str) -> list[int]:
    """A walk down from the root that goes on at a node as `acceptance` says."""
    stops = {"always": st.just(False), "never": st.just(True), "mostly": st.integers(0, 9).map(lambda n: n == 7)}
    path = [0]
    while plan.children[path[-1]] and not draw(stops.get(acceptance, st.booleans())):
        path.append(draw(st.sampled_from(plan.children[path[-1]])))
    return path
