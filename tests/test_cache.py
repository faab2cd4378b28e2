"""The cache after any sequence of events: what a fresh prefill of the committed tokens would hold, in pages that no
one else writes to and that all come back."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from selfspec import cache as cache_module
from selfspec import weights
from selfspec.cache import PAGE_SIZE, Cache, CacheFull, Rows, Sequence
from selfspec.exits import Exit, ExitBlock
from selfspec.model import Decoder
from selfspec.policy import Policy, Rules
from selfspec.runtime import Draft, Row, Session
from selfspec.sampling import Sampling
from selfspec.tree import NONE, Plan
from tests.tiny import tiny_model

VOCABULARY = 23
TOKENS = st.integers(0, VOCABULARY - 1)
FAMILIES = ["llama", "mistral"]  # without and with a sliding window (of 6)
SETTINGS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def hf_model(family: str) -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model(family, num_hidden_layers=3, vocab_size=VOCABULARY, **shape)


@cache
def exit_of(family: str) -> Exit:
    """An exit after the first layer, with a block, so that all layers of the cache are in use."""
    model = weights.adopt(hf_model(family))
    size = model.config.hidden_size
    affine = 0.1 * torch.eye(size, dtype=model.dtype), torch.zeros(size, dtype=model.dtype)
    return Exit(model, layer=1, block=ExitBlock(model.layers[2], *affine))


def new_cache(model: Decoder, max_pages: int | None = None) -> Cache:
    return Cache(model.config, model.device, model.dtype, max_pages)


class Forced(Session):
    """A session that drafts the tokens it is told to."""

    def __init__(self, family: str, cache: Cache, rows: list[Row] | None = None) -> None:
        exit = exit_of(family)
        policy = Policy(Rules(), Sampling(), mode="force")
        super().__init__(exit.model, cache, rows or [], Sampling(), policy, exit=exit)
        self.forced: dict[int, torch.Tensor] = {}  # node -> [B] tokens

    def _children(self, draft: Draft, level: range) -> torch.Tensor:
        return torch.stack([self.forced[node] for node in level], dim=1)

    def write(self, rows: list[Row], plan: Plan, drafted: list[list[int]], verify: bool = True) -> None:
        """Drafts and, unless told not to, verifies; nothing is accepted yet. `drafted[b][i]` is node i + 1 of row b."""
        for row in rows:
            self.cache.reserve(row.sequence, row.sequence.length + len(plan) + 1)
        self.forced = {node + 1: torch.tensor([tokens[node] for tokens in drafted]) for node in range(len(plan))}
        with torch.inference_mode():
            draft = self.draft(rows, plan)
            if verify:
                self.verify(rows, draft)


def new_row(tokens: list[int]) -> Row:
    return Row(tokens, seed=0, copy=0, max_length=10**6)


def contents(cache: Cache, sequence: Sequence) -> torch.Tensor:
    """Keys and values at the committed positions of a sequence, in all layers: [2, layers + 1, length, Hkv, D]."""
    both = torch.stack((cache.keys, cache.values))[:, :, sequence.pages]
    return both.flatten(2, 3)[:, :, : sequence.length]


@cache
def fresh_prefill(family: str, tokens: tuple[int, ...]) -> torch.Tensor:
    session = Forced(family, new_cache(exit_of(family).model), [new_row([*tokens, 0])])
    session.prefill()
    return contents(session.cache, session.rows[0].sequence)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_holds_the_keys_and_values_that_transformers_computes(family: str) -> None:
    tokens = [token % VOCABULARY for token in range(0, 7 * 70, 7)]
    with torch.no_grad():
        # Without a config the cache keeps what has left the window too.
        theirs = hf_model(family)(torch.tensor([tokens]), past_key_values=DynamicCache()).past_key_values
    layers = [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in theirs.layers]
    expected = torch.stack([torch.stack(of_layer) for of_layer in layers], dim=1)
    # Their norms round to float32, whatever the model's dtype.
    assert_same(fresh_prefill(family, tuple(tokens))[:, :-1], expected, tolerance=1e-4)


class Life(RuleBasedStateMachine):
    """Sequences that are opened, forked, extended together, abandoned in mid-cycle, cut back and closed."""

    def __init__(self, family: str, page_size: int) -> None:
        super().__init__()
        self.family = family
        self.page_size = page_size
        self.patch = mock.patch.object(cache_module, "PAGE_SIZE", page_size)
        self.patch.start()
        self.session = Forced(family, new_cache(exit_of(family).model))
        self.cache = self.session.cache
        self.rows: list[Row] = []

    def teardown(self) -> None:
        for row in self.rows:
            self.cache.close(row.sequence)
        self.patch.stop()
        assert self.cache.free_pages == self.cache.num_pages

    def some_row(self, data: st.DataObject) -> Row:
        return data.draw(st.sampled_from(self.rows))

    def some_rows(self, data: st.DataObject) -> list[Row]:
        return data.draw(st.lists(st.sampled_from(self.rows), min_size=1, unique_by=id))

    @initialize(acceptance=st.sampled_from(["always", "never", "mostly", "at random"]), data=st.data())
    def start(self, acceptance: str, data: st.DataObject) -> None:
        self.acceptance = acceptance
        self.open(data)

    @precondition(lambda self: len(self.rows) < 4)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """Prompts end around the first two ends of a page."""
        length = data.draw(st.sampled_from([0, self.page_size, 2 * self.page_size])) + data.draw(st.integers(-3, 3))
        first, step = data.draw(TOKENS), data.draw(TOKENS)
        row = new_row([(first + i * step) % VOCABULARY for i in range(max(0, length) + 1)])
        self.rows.append(row)
        self.session.rows = [row]
        self.session.prefill()

    @precondition(lambda self: 0 < len(self.rows) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.some_row(data)
        child = new_row(parent.tokens)
        child.sequence = self.cache.fork(parent.sequence)
        self.rows.append(child)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), plan=plans())
    def cycle(self, data: st.DataObject, plan: Plan) -> None:
        rows = self.some_rows(data)
        drafted = self.write(rows, plan, data)
        accepted = [data.draw(paths(plan, self.acceptance)) for _ in rows]
        self.cache.commit([row.sequence for row in rows], accepted)
        for row, tokens, path in zip(rows, drafted, accepted, strict=True):
            row.tokens += [tokens[node - 1] for node in path[1:]] + [data.draw(TOKENS)]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), plan=plans(), verify=st.booleans())
    def abandoned_cycle(self, data: st.DataObject, plan: Plan, verify: bool) -> None:
        rows = self.some_rows(data)
        self.write(rows, plan, data, verify)
        self.cache.abort([row.sequence for row in rows])

    def write(self, rows: list[Row], plan: Plan, data: st.DataObject, verify: bool = True) -> list[list[int]]:
        nodes = st.lists(TOKENS, min_size=len(plan), max_size=len(plan))
        drafted = [data.draw(nodes) for _ in rows]
        self.session.write(rows, plan, drafted, verify)
        return drafted

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = self.some_row(data)
        length = data.draw(st.integers(0, row.sequence.length))
        self.cache.truncate(row.sequence, length)
        row.tokens = row.tokens[: length + 1]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        row = self.some_row(data)
        self.cache.close(row.sequence)
        self.rows.remove(row)

    @invariant()
    def every_sequence_holds_what_a_fresh_prefill_would(self) -> None:
        for row in self.rows:
            assert row.sequence.length == len(row.tokens) - 1
            expected = fresh_prefill(self.family, tuple(row.tokens[:-1]))
            assert_same(contents(self.cache, row.sequence), expected)

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        for row in self.rows:
            assert len(set(row.sequence.pages)) == len(row.sequence.pages)
        held = {page for row in self.rows for page in row.sequence.pages}
        assert len(held) + self.cache.free_pages == self.cache.num_pages

    @invariant()
    def only_full_pages_are_shared(self) -> None:
        for one, other in itertools.combinations(self.rows, 2):
            full = one.sequence.pages[: one.sequence.length // self.page_size]
            assert set(one.sequence.pages) & set(other.sequence.pages) <= set(full)


@pytest.mark.parametrize("page_size", [4, PAGE_SIZE])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_any_events_the_cache_equals_a_fresh_prefill(family: str, page_size: int) -> None:
    run_state_machine_as_test(
        lambda: Life(family, page_size), settings=settings(SETTINGS, max_examples=25, stateful_step_count=12)
    )
