"""The cache after any sequence of events: what a fresh prefill of the committed tokens would hold, in pages that no
one else writes to and that all come back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
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

from selfspec.backends.torch_backend import Draft, Session
from selfspec.cache import kv_cache as cache_module
from selfspec.cache.kv_cache import PAGE_SIZE, Cache, CacheFull, Rows, Sequence
from selfspec.governor.rules import Policy, Rules
from selfspec.models import loading as weights
from selfspec.models.decoder import Decoder
from selfspec.sampling import Sampling
from selfspec.sequence import Row
from selfspec.speculation.exit import RECALLED, Exit, ExitBlock
from selfspec.speculation.plan import Plan
from tests.strategies import SETTINGS, paths, plans
from tests.tiny import tiny_model

VOCABULARY = 23
TOKENS = st.integers(0, VOCABULARY - 1)
FAMILIES = ["llama", "mistral"]  # without and with a sliding window (of 6)


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@cache
@torch.inference_mode(False)
def hf_model(family: str) -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model(family, num_hidden_layers=3, vocab_size=VOCABULARY, **shape)


@cache
@torch.inference_mode(False)
def exit_of(family: str) -> Exit:
    """An exit after the first layer, with a block that recalls, so that all layers of the cache are in use."""
    model = weights.adopt(hf_model(family))
    size = model.config.hidden_size
    affine = 0.1 * torch.eye(size, dtype=model.dtype), torch.zeros(size, dtype=model.dtype)
    recall = 0.3 * torch.randn(size, RECALLED * size, generator=torch.Generator().manual_seed(1), dtype=model.dtype)
    return Exit(model, layer=1, block=ExitBlock(model.layers[2], *affine, recall))


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

    def write(
        self, rows: list[Row], plan: Plan, drafted: list[list[int]], verify: bool = True
    ) -> tuple[Draft, torch.Tensor] | None:
        """Drafts and, unless told not to, verifies; nothing is accepted yet. `drafted[b][i]` is node i + 1 of row b."""
        for row in rows:
            self.cache.reserve(row.sequence, row.sequence.length + len(plan) + 1)
        self.forced = {node + 1: torch.tensor([tokens[node] for tokens in drafted]) for node in range(len(plan))}
        draft = self.draft(rows, plan)
        return (draft, self.verify(rows, draft)) if verify else None

    def take(self, rows: list[Row], written: tuple[Draft, torch.Tensor] | None, accepted: list[list[int]]) -> None:
        """Accepts these nodes of what `write` has written."""
        assert written is not None
        self.commit(rows, *written, accepted)
        for row in rows:
            self.catch_up([row])


def new_row(tokens: list[int]) -> Row:
    return Row(tokens, seed=0, copy=0, max_length=10**6)


def fork_row(cache: Cache, parent: Row) -> Row:
    fork = new_row(parent.tokens)
    fork.sequence, fork.known = cache.fork(parent.sequence), parent.known
    return fork


def contents(cache: Cache, sequence: Sequence) -> torch.Tensor:
    """Keys and values at the committed positions of a sequence, in all layers: [2, layers + 1, length, Hkv, D]."""
    both = torch.stack((cache.keys, cache.values))[:, :, sequence.pages]
    return both.flatten(2, 3)[:, :, : sequence.length]


@cache
def fresh_prefill(family: str, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the cache holds for a text, and what is known at its end."""
    session = Forced(family, new_cache(exit_of(family).model), [new_row([*tokens, 0])])
    session.prefill()
    return contents(session.cache, session.rows[0].sequence), session.rows[0].known


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_holds_the_keys_and_values_that_transformers_computes(family: str) -> None:
    tokens = [token % VOCABULARY for token in range(0, 7 * 70, 7)]
    # Without a config their cache keeps what has left the window too.
    theirs = hf_model(family)(torch.tensor([tokens]), past_key_values=DynamicCache()).past_key_values
    layers = [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in theirs.layers]
    expected = torch.stack([torch.stack(of_layer) for of_layer in layers], dim=1)
    # Their norms round to float32, whatever the model's dtype.
    assert_same(fresh_prefill(family, tuple(tokens))[0][:, :-1], expected, tolerance=1e-4)


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
        return self.rows[data.draw(st.integers(0, len(self.rows) - 1), label="row")]

    def some_rows(self, data: st.DataObject) -> list[Row]:
        indices = st.lists(st.integers(0, len(self.rows) - 1), min_size=1, unique=True)
        return [self.rows[index] for index in data.draw(indices, label="rows")]

    @initialize(acceptance=st.sampled_from(["always", "never", "mostly", "at random"]), data=st.data())
    def start(self, acceptance: str, data: st.DataObject) -> None:
        self.acceptance = acceptance
        self.open(data)
        self.fork(data)

    @precondition(lambda self: len(self.rows) < 4)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """Prompts end around the ends of the first three pages, or have nothing to prefill."""
        length = data.draw(st.sampled_from([2, 1, 3, 0])) * self.page_size + data.draw(st.integers(-3, 3))
        first, step = data.draw(TOKENS), data.draw(TOKENS)
        row = new_row([(first + i * step) % VOCABULARY for i in range(max(0, length) + 1)])
        self.rows.append(row)
        self.session.rows = [row]
        self.session.prefill()

    @precondition(lambda self: len(self.rows) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.rows.append(fork_row(self.cache, self.some_row(data)))

    @rule(data=st.data(), plan=plans())
    def cycle(self, data: st.DataObject, plan: Plan) -> None:
        rows = self.some_rows(data)
        drafted, written = self.write(rows, plan, data)
        accepted = [data.draw(paths(plan, self.acceptance)) for _ in rows]
        self.session.take(rows, written, accepted)
        for row, tokens, path in zip(rows, drafted, accepted, strict=True):
            row.tokens += [tokens[node - 1] for node in path[1:]] + [data.draw(TOKENS)]

    @rule(data=st.data(), plan=plans(), verify=st.booleans())
    def abandoned_cycle(self, data: st.DataObject, plan: Plan, verify: bool) -> None:
        rows = self.some_rows(data)
        self.write(rows, plan, data, verify)
        self.cache.abort([row.sequence for row in rows])

    def write(
        self, rows: list[Row], plan: Plan, data: st.DataObject, verify: bool = True
    ) -> tuple[list[list[int]], tuple[Draft, torch.Tensor] | None]:
        nodes = st.lists(TOKENS, min_size=len(plan), max_size=len(plan))
        drafted = [data.draw(nodes) for _ in rows]
        written = self.session.write(rows, plan, drafted, verify)
        for row in rows:
            writable = set(row.sequence.pages[row.sequence.length // self.page_size :])
            assert all(writable.isdisjoint(other.sequence.pages) for other in self.rows if other is not row)
        return drafted, written

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = self.some_row(data)
        length = max(0, row.sequence.length - data.draw(st.integers(0, 2 * self.page_size)))
        self.cache.truncate(row.sequence, length)
        row.tokens = row.tokens[: length + 1]
        row.known = fresh_prefill(self.family, tuple(row.tokens[:-1]))[1]  # the cache cannot give it back

    @precondition(lambda self: len(self.rows) > 2)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        row = self.some_row(data)
        self.cache.close(row.sequence)
        self.rows.remove(row)

    @invariant()
    def every_sequence_holds_what_a_fresh_prefill_would(self) -> None:
        for row in self.rows:
            assert row.sequence.length == len(row.tokens) - 1
            expected, known = fresh_prefill(self.family, tuple(row.tokens[:-1]))
            assert_same(contents(self.cache, row.sequence), expected)
            assert (row.known is None) == (known is None) == (row.sequence.length == 0)
            if row.known is not None and known is not None:
                assert_same(row.known, known)

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        for row in self.rows:
            assert len(set(row.sequence.pages)) == len(row.sequence.pages)
        held = {page for row in self.rows for page in row.sequence.pages}
        assert len(held) + self.cache.free_pages == self.cache.num_pages


@pytest.mark.parametrize("page_size", [4, PAGE_SIZE])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_any_events_the_cache_equals_a_fresh_prefill(family: str, page_size: int) -> None:
    run_state_machine_as_test(
        lambda: Life(family, page_size), settings=settings(SETTINGS, max_examples=25, stateful_step_count=12)
    )


def prefilled(cache: Cache, length: int, first: int = 0) -> Row:
    """A row of llama whose cache holds `length` positions."""
    row = new_row([(first + 5 * i) % VOCABULARY for i in range(length + 1)])
    Forced("llama", cache, [row]).prefill()
    return row


def extend(cache: Cache, row: Row, tokens: list[int]) -> None:
    """Appends the tokens, by a chain all of whose nodes are accepted."""
    plan, session = Plan.tree((1,) * len(tokens)), Forced("llama", cache)
    session.take([row], session.write([row], plan, [tokens]), [list(range(len(tokens) + 1))])


def llama_cache(max_pages: int | None = None) -> Cache:
    return new_cache(exit_of("llama").model, max_pages)


@pytest.mark.parametrize("writer", ["parent", "fork"])
@pytest.mark.parametrize("length", [PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1])
def test_what_one_writes_after_a_fork_the_other_never_sees(length: int, writer: str) -> None:
    cache = llama_cache()
    parent = prefilled(cache, length)
    fork = fork_row(cache, parent)
    one, other = (parent, fork) if writer == "parent" else (fork, parent)
    before = contents(cache, other.sequence)
    extend(cache, one, [1, 2, 3])
    assert torch.equal(contents(cache, other.sequence), before)


@pytest.mark.parametrize("writer", ["parent", "fork"])
def test_cut_back_into_a_shared_page_one_does_not_write_over_the_other(writer: str) -> None:
    cache = llama_cache()
    parent = prefilled(cache, 2 * PAGE_SIZE)
    fork = fork_row(cache, parent)
    one, other = (parent, fork) if writer == "parent" else (fork, parent)
    before = contents(cache, other.sequence)
    cache.truncate(one.sequence, PAGE_SIZE + 10)
    extend(cache, one, [1, 2, 3])
    assert torch.equal(contents(cache, other.sequence), before)


def test_forks_share_their_full_pages() -> None:
    cache = llama_cache()
    parent = prefilled(cache, 3 * PAGE_SIZE)
    free = cache.free_pages
    forks = [cache.fork(parent.sequence) for _ in range(5)]
    assert cache.free_pages == free
    for sequence in (parent.sequence, *forks):
        assert cache.free_pages == free
        cache.close(sequence)
    assert cache.free_pages == cache.num_pages


def test_the_cache_grows_only_when_no_page_is_free() -> None:
    cache = llama_cache()
    row = prefilled(cache, 10)
    pages = cache.num_pages
    cache.fork(row.sequence)
    cache.reserve(cache.open(), (cache.free_pages - 1) * PAGE_SIZE)
    cache.reserve(cache.open(), 1)
    assert (cache.num_pages, cache.free_pages) == (pages, 0)
    cache.reserve(cache.open(), 1)
    assert cache.num_pages > pages


def test_closing_twice_returns_a_page_once() -> None:
    cache = llama_cache()
    row = prefilled(cache, 10)
    cache.close(row.sequence)
    cache.close(row.sequence)
    assert cache.free_pages == cache.num_pages


def test_pages_that_come_back_are_taken_again_one_behind_the_other() -> None:
    """However often: a text on pages in a row is read without being gathered."""
    cache = llama_cache()
    for _ in range(3):
        row = prefilled(cache, 3 * PAGE_SIZE)
        first = row.sequence.pages[0]
        assert row.sequence.pages == [first, first + 1, first + 2]
        cache.truncate(row.sequence, PAGE_SIZE)
        cache.reserve(row.sequence, 3 * PAGE_SIZE)
        assert row.sequence.pages == [first, first + 1, first + 2]
        cache.close(row.sequence)


def test_a_closed_sequence_takes_no_pages() -> None:
    cache = llama_cache()
    sequence = cache.open()
    cache.close(sequence)
    with pytest.raises(ValueError, match="closed"):
        cache.reserve(sequence, 1)


def test_a_cut_returns_the_pages_behind_it() -> None:
    cache = llama_cache()
    row = prefilled(cache, 3 * PAGE_SIZE)
    free = cache.free_pages
    cache.truncate(row.sequence, PAGE_SIZE)
    assert cache.free_pages == free + 2


@pytest.mark.parametrize("length", [-1, 11])
def test_a_cut_to_an_impossible_length_is_refused(length: int) -> None:
    cache = llama_cache()
    row = prefilled(cache, 10)
    with pytest.raises(ValueError, match=rf"10 positions to {length}"):
        cache.truncate(row.sequence, length)


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    cache = llama_cache(max_pages=20)
    first, second = cache.open(), cache.open()
    cache.reserve(first, 10 * PAGE_SIZE)
    before = cache.num_pages, cache.free_pages
    with pytest.raises(CacheFull, match="20 pages"):
        cache.reserve(second, 10 * PAGE_SIZE + 1)
    assert (cache.num_pages, cache.free_pages, second.pages) == (*before, [])
    cache.reserve(second, 10 * PAGE_SIZE)  # what is left is still there to be had
    cache.close(first)
    cache.close(second)
    assert cache.free_pages == cache.num_pages == 20


def test_a_fork_without_a_page_to_write_to_takes_nothing() -> None:
    cache = llama_cache(max_pages=3)
    parent = prefilled(cache, 2 * PAGE_SIZE + 1)
    forks: list[Sequence] = []
    with pytest.raises(CacheFull):
        forks.append(cache.fork(parent.sequence))
        cache.reserve(forks[0], forks[0].length + 1)
    for sequence in (*forks, parent.sequence):
        cache.close(sequence)
    assert cache.free_pages == cache.num_pages == 3


def test_a_cut_without_a_page_for_its_copy_leaves_no_shared_page_to_write_to() -> None:
    cache = llama_cache(max_pages=2)
    parent = prefilled(cache, 2 * PAGE_SIZE)
    fork = cache.fork(parent.sequence)
    with pytest.raises(CacheFull):
        cache.truncate(fork, PAGE_SIZE + 10)
        cache.reserve(fork, fork.length + 1)
    with pytest.raises(CacheFull):
        cache.reserve(fork, fork.length + 1)


class OutOfMemoryAt(TorchDispatchMode):
    """Lets some operations of torch pass, and fails the next."""

    def __init__(self, operation: int) -> None:
        super().__init__()
        self.left = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("simulated")
        return func(*args, **(kwargs or {}))


def test_out_of_memory_at_any_moment_of_growing_changes_nothing() -> None:
    cache = llama_cache()
    row = prefilled(cache, 10)
    before, pages, free = contents(cache, row.sequence), cache.num_pages, cache.free_pages
    other = cache.open()
    for operation in itertools.count():
        try:
            with OutOfMemoryAt(operation):
                cache.reserve(other, (pages + 1) * PAGE_SIZE)
            break
        except RuntimeError:
            assert (cache.num_pages, cache.free_pages, other.pages) == (pages, free, [])
            assert torch.equal(contents(cache, row.sequence), before)
    assert operation >= 2, "keys and values were to be allocated"
    assert len(other.pages) == pages + 1
    assert torch.equal(contents(cache, row.sequence), before)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param([1, 0], id="descends"),
        pytest.param([0, 0], id="repeats"),
        pytest.param([-1, 0], id="negative"),
        pytest.param([0, 4], id="past the nodes"),
    ],
)
def test_commit_refuses_an_impossible_path_and_changes_no_sequence(path: list[int]) -> None:
    cache = llama_cache()
    rows = [prefilled(cache, 10), prefilled(cache, 20)]
    sequences = [row.sequence for row in rows]
    Forced("llama", cache).write(rows, Plan.tree((3,)), [[1, 2, 3], [4, 5, 6]])
    keys = cache.keys.clone()
    with pytest.raises(ValueError, match="path"):
        cache.commit(sequences, [[0, 2], path])
    assert torch.equal(cache.keys, keys)
    assert [sequence.length for sequence in sequences] == [10, 20]


@pytest.mark.parametrize("path", [[0], [0, 1]], ids=["root", "child"])
def test_commit_refuses_what_only_the_draft_partition_has_written(path: list[int]) -> None:
    cache = llama_cache()
    row = prefilled(cache, 10)
    Forced("llama", cache).write([row], Plan.tree((3,)), [[1, 2, 3]], verify=False)
    with pytest.raises(ValueError, match="0 slots written"):
        cache.commit([row.sequence], [path])


@pytest.mark.parametrize(("drafted", "verified"), [(3, 2), (2, 3)], ids=["draft ahead", "verify ahead"])
def test_commit_goes_as_far_as_both_partitions_have_written(drafted: int, verified: int) -> None:
    cache = llama_cache()
    row = prefilled(cache, 10)
    cache.reserve(row.sequence, 13)
    row.sequence.drafted, row.sequence.verified = drafted, verified
    with pytest.raises(ValueError, match="2 slots written"):
        cache.commit([row.sequence], [[0, 1, 2]])
    cache.commit([row.sequence], [[0, 1]])
    assert row.sequence.length == 12


@pytest.mark.parametrize("ending", ["commit", "abort"])
def test_a_path_is_accepted_only_in_the_cycle_that_wrote_it(ending: str) -> None:
    cache = llama_cache()
    row = prefilled(cache, 10)
    Forced("llama", cache).write([row], Plan.tree((3,)), [[1, 2, 3]])
    cache.commit([row.sequence], [[0, 1]]) if ending == "commit" else cache.abort([row.sequence])
    with pytest.raises(ValueError, match="0 slots written"):
        cache.commit([row.sequence], [[0]])


def sees(plan: Plan, length: int, node: int, slot: int, window: int | None) -> bool:
    """The definition: a node sees committed positions, its ancestors and itself, if they lie in the window."""
    if slot < length:
        distance = length + plan.depths[node] - slot
        return window is None or distance < window
    distance, at = 0, node
    while at != slot - length:
        if at == 0:
            return False
        at, distance = plan.parents[at - 1], distance + 1
    return window is None or distance < window


@settings(SETTINGS, max_examples=150)
@given(data=st.data(), plan=plans(max_nodes=9), window=st.none() | st.integers(1, 30))
def test_the_mask_shows_each_row_what_its_definition_says(data: st.DataObject, plan: Plan, window: int | None) -> None:
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3) | st.integers(0, 20).map(lambda n: [n, n]))
    nodes = data.draw(st.sampled_from([*plan.levels, range(len(plan) + 1)]))
    sequences = [Sequence(length=length) for length in lengths]
    ancestors = plan.ancestors[nodes.start : nodes.stop, : nodes.stop]
    rows = Rows(sequences, nodes, torch.tensor(plan.depths[: nodes.stop]), ancestors, torch.device("cpu"))
    mask = rows.mask(window)
    if mask is None:
        mask = torch.ones(len(lengths), len(nodes), rows.slots, dtype=torch.bool)
    expected = [
        [[sees(plan, length, node, slot, window) for slot in range(max(lengths) + nodes.stop)] for node in nodes]
        for length in lengths
    ]
    assert mask.tolist() == expected
