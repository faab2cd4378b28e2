"""After any events the cache holds the keys and values that a prefill of the committed tokens writes, no sequence
writes to another's pages, and all pages are released."""

from __future__ import annotations

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
from transformers import DynamicCache

from selfspec.backends.torch_backend import TorchBackend
from selfspec.cache import kv_cache as cache_module
from selfspec.cache import layout
from selfspec.cache.kv_cache import PAGE_SIZE, Cache, CacheFull, KVPages
from selfspec.cache.layout import Rows
from selfspec.models import loading as weights
from selfspec.sequence import Sequence
from selfspec.speculation.draft_tree import Draft
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock
from selfspec.speculation.plan import Plan
from tests.scripted import new_cache
from tests.strategies import paths, plans
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
    """An exit after the first layer, with a block that reads features, so that all layers of the cache are used."""
    model = weights.adopt(hf_model(family))
    size = model.config.hidden_size
    affine = 0.1 * torch.eye(size, dtype=model.dtype), torch.zeros(size, dtype=model.dtype)
    recall = 0.3 * torch.randn(
        size, FEATURE_STATES * size, generator=torch.Generator().manual_seed(1), dtype=model.dtype
    )
    return Exit(model, layer=1, block=ExitBlock(model.layers[2], *affine, recall))


class Forced(TorchBackend):
    """A backend that drafts given tokens."""

    def __init__(self, family: str, cache: Cache) -> None:
        self.exit = exit_of(family)
        super().__init__(self.exit.model, cache)
        self.forced: dict[int, torch.Tensor] = {}  # node -> [B] tokens

    def _children(self, draft: Draft, level: range) -> torch.Tensor:
        return torch.stack([self.forced[node] for node in level], dim=1)

    def fill_prompt(self, sequence: Sequence) -> None:
        while not self.prefill([sequence], self.exit):
            pass

    def write(
        self, sequences: list[Sequence], plan: Plan, drafted: list[list[int]], verify: bool = True
    ) -> tuple[Draft, torch.Tensor] | None:
        """Drafts and, if `verify`, verifies; accepts nothing. `drafted[b][i]` is node i + 1 of sequence b."""
        for sequence in sequences:
            self.cache.reserve(sequence.kv, sequence.kv.length + len(plan) + 1)
        self.forced = {node + 1: torch.tensor([tokens[node] for tokens in drafted]) for node in range(len(plan))}
        draft = self.draft(sequences, plan, self.exit)
        return (draft, self.verify(sequences, draft, self.exit)) if verify else None

    def take(
        self, sequences: list[Sequence], written: tuple[Draft, torch.Tensor] | None, accepted: list[list[int]]
    ) -> None:
        """Commits these paths of the tree that `write` has written."""
        assert written is not None
        self.commit(sequences, *written, accepted, self.exit)
        self.fill_exit(sequences, self.exit, score=False, in_flight=None)


def new_sequence(tokens: list[int]) -> Sequence:
    return Sequence(tokens, seed=0, sample_index=0, max_length=10**6)


def fork(cache: Cache, parent: Sequence) -> Sequence:
    forked = new_sequence(parent.tokens)
    forked.kv, forked.previous_feature = cache.fork(parent.kv), parent.previous_feature
    return forked


def contents(cache: Cache, sequence: KVPages) -> torch.Tensor:
    """Keys and values at the committed positions of a sequence, in all layers: [2, layers + 1, length, Hkv, D]."""
    both = torch.stack((cache.keys, cache.values))[:, :, sequence.pages]
    return both.flatten(2, 3)[:, :, : sequence.length]


@cache
def fresh_prefill(family: str, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cache's contents after a prefill of these tokens, and the feature of the last one."""
    backend, sequence = Forced(family, new_cache(exit_of(family).model, 400)), new_sequence([*tokens, 0])
    backend.fill_prompt(sequence)
    return contents(backend.cache, sequence.kv), sequence.previous_feature


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_holds_the_keys_and_values_that_transformers_computes(family: str) -> None:
    tokens = [token % VOCABULARY for token in range(0, 7 * 70, 7)]
    # Without a config transformers' cache keeps positions outside of the window too.
    theirs = hf_model(family)(torch.tensor([tokens]), past_key_values=DynamicCache()).past_key_values
    layers = [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in theirs.layers]
    expected = torch.stack([torch.stack(of_layer) for of_layer in layers], dim=1)
    # transformers' norms round to float32 for any dtype of the model.
    assert_same(fresh_prefill(family, tuple(tokens))[0][:, :-1], expected, tolerance=1e-4)


class CacheEvents(RuleBasedStateMachine):
    """Sequences that are opened, forked, extended in batches, aborted within a step, truncated, swapped and closed."""

    def __init__(self, family: str, page_size: int) -> None:
        super().__init__()
        self.family = family
        self.page_size = page_size
        self.patches = [mock.patch.object(module, "PAGE_SIZE", page_size) for module in (cache_module, layout)]
        for patch in self.patches:
            patch.start()
        self.backend = Forced(family, new_cache(exit_of(family).model, 400 * 4 // page_size))
        self.cache = self.backend.cache
        self.sequences: list[Sequence] = []

    def teardown(self) -> None:
        for sequence in self.sequences:
            self.cache.close(sequence.kv)
        for patch in self.patches:
            patch.stop()
        assert self.cache.free_pages == self.cache.num_pages

    def some_sequence(self, data: st.DataObject) -> Sequence:
        return self.sequences[data.draw(st.integers(0, len(self.sequences) - 1), label="sequence")]

    def some_sequences(self, data: st.DataObject) -> list[Sequence]:
        indices = st.lists(st.integers(0, len(self.sequences) - 1), min_size=1, unique=True)
        return [self.sequences[index] for index in data.draw(indices, label="sequences")]

    @initialize(acceptance=st.sampled_from(["always", "never", "mostly", "at random"]), data=st.data())
    def start(self, acceptance: str, data: st.DataObject) -> None:
        self.acceptance = acceptance
        self.open(data)
        self.fork(data)

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """Prompts end within 3 positions of a page boundary, or have one token, which needs no prefill."""
        length = data.draw(st.sampled_from([2, 1, 3, 0])) * self.page_size + data.draw(st.integers(-3, 3))
        first, step = data.draw(TOKENS), data.draw(TOKENS)
        sequence = new_sequence([(first + i * step) % VOCABULARY for i in range(max(0, length) + 1)])
        self.sequences.append(sequence)
        self.backend.fill_prompt(sequence)

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.sequences.append(fork(self.cache, self.some_sequence(data)))

    @rule(data=st.data(), plan=plans())
    def step(self, data: st.DataObject, plan: Plan) -> None:
        sequences = self.some_sequences(data)
        drafted, written = self.write(sequences, plan, data)
        accepted = [data.draw(paths(plan, self.acceptance)) for _ in sequences]
        self.backend.take(sequences, written, accepted)
        for sequence, tokens, path in zip(sequences, drafted, accepted, strict=True):
            sequence.tokens += [tokens[node - 1] for node in path[1:]] + [data.draw(TOKENS)]

    @rule(data=st.data(), plan=plans(), verify=st.booleans())
    def aborted_step(self, data: st.DataObject, plan: Plan, verify: bool) -> None:
        sequences = self.some_sequences(data)
        self.write(sequences, plan, data, verify)

    def write(
        self, sequences: list[Sequence], plan: Plan, data: st.DataObject, verify: bool = True
    ) -> tuple[list[list[int]], tuple[Draft, torch.Tensor] | None]:
        nodes = st.lists(TOKENS, min_size=len(plan), max_size=len(plan))
        drafted = [data.draw(nodes) for _ in sequences]
        written = self.backend.write(sequences, plan, drafted, verify)
        for sequence in sequences:
            writable = set(sequence.kv.pages[sequence.kv.length // self.page_size :])
            assert all(writable.isdisjoint(other.kv.pages) for other in self.sequences if other is not sequence)
        return drafted, written

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        """Swaps a sequence out, lets another sequence take its pages, and swaps it in."""
        sequence, other = self.some_sequence(data), self.cache.open()
        swapped, free = self.cache.swap_out(sequence.kv), self.cache.free_pages
        assert not sequence.kv.pages
        self.cache.reserve(other, 3 * self.page_size)
        self.cache.swap_in(sequence.kv, swapped)
        self.cache.close(other)
        assert self.cache.free_pages == free - len(sequence.kv.pages)

    @precondition(lambda self: len(self.sequences) > 2)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = self.some_sequence(data)
        self.cache.close(sequence.kv)
        self.sequences.remove(sequence)

    @invariant()
    def every_sequence_has_the_contents_of_a_fresh_prefill(self) -> None:
        for sequence in self.sequences:
            assert sequence.kv.length == len(sequence.tokens) - 1
            expected, state = fresh_prefill(self.family, tuple(sequence.tokens[:-1]))
            assert_same(contents(self.cache, sequence.kv), expected)
            assert (sequence.previous_feature is None) == (state is None) == (sequence.kv.length == 0)
            if sequence.previous_feature is not None and state is not None:
                assert_same(sequence.previous_feature, state)

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        for sequence in self.sequences:
            assert len(set(sequence.kv.pages)) == len(sequence.kv.pages)
        held = {page for sequence in self.sequences for page in sequence.kv.pages}
        assert len(held) + self.cache.free_pages == self.cache.num_pages


@pytest.mark.parametrize(("family", "page_size", "examples"), [("mistral", 4, 25), ("llama", PAGE_SIZE, 8)])
def test_after_any_events_the_cache_equals_a_fresh_prefill(family: str, page_size: int, examples: int) -> None:
    """Small pages reach more page boundaries in as many steps."""
    run_state_machine_as_test(
        lambda: CacheEvents(family, page_size),
        settings=settings(max_examples=examples, stateful_step_count=12),
    )


def prefilled(cache: Cache, length: int, first: int = 0) -> Sequence:
    """A sequence of the llama model with `length` committed positions."""
    sequence = new_sequence([(first + 5 * i) % VOCABULARY for i in range(length + 1)])
    Forced("llama", cache).fill_prompt(sequence)
    return sequence


def extend(cache: Cache, sequence: Sequence, tokens: list[int]) -> None:
    """Appends the tokens in a step whose plan is a chain that is accepted whole."""
    plan, backend = Plan.tree((1,) * len(tokens)), Forced("llama", cache)
    backend.take([sequence], backend.write([sequence], plan, [tokens]), [list(range(len(tokens) + 1))])


def llama_cache(pages: int = 20) -> Cache:
    return new_cache(exit_of("llama").model, pages)


@pytest.mark.parametrize("writer", ["parent", "fork"])
@pytest.mark.parametrize("length", [PAGE_SIZE, PAGE_SIZE + 1])
def test_a_write_after_a_fork_does_not_change_the_other_sequence(length: int, writer: str) -> None:
    cache = llama_cache()
    parent = prefilled(cache, length)
    forked = fork(cache, parent)
    one, other = (parent, forked) if writer == "parent" else (forked, parent)
    before = contents(cache, other.kv)
    extend(cache, one, [1, 2, 3])
    assert torch.equal(contents(cache, other.kv), before)


def test_forks_share_their_full_pages() -> None:
    cache = llama_cache()
    parent = prefilled(cache, 3 * PAGE_SIZE)
    free = cache.free_pages
    forks = [cache.fork(parent.kv) for _ in range(5)]
    assert cache.free_pages == free
    for sequence in (parent.kv, *forks):
        assert cache.free_pages == free
        cache.close(sequence)
    assert cache.free_pages == cache.num_pages


def test_closing_twice_returns_a_page_once() -> None:
    cache = llama_cache()
    sequence = prefilled(cache, 10)
    cache.close(sequence.kv)
    cache.close(sequence.kv)
    assert cache.free_pages == cache.num_pages


def test_released_pages_are_taken_again_in_ascending_order() -> None:
    """Attention reads contiguous pages without a gather."""
    cache = llama_cache()
    for _ in range(3):
        sequence = prefilled(cache, 3 * PAGE_SIZE)
        first = sequence.kv.pages[0]
        assert sequence.kv.pages == [first, first + 1, first + 2]
        cache.close(sequence.kv)


def test_a_closed_sequence_takes_no_pages() -> None:
    cache = llama_cache()
    sequence = cache.open()
    cache.close(sequence)
    with pytest.raises(ValueError, match="closed"):
        cache.reserve(sequence, 1)


def test_a_reservation_that_does_not_fit_takes_no_page() -> None:
    cache = llama_cache(pages=20)
    first, second = cache.open(), cache.open()
    cache.reserve(first, 10 * PAGE_SIZE)
    before = cache.num_pages, cache.free_pages
    with pytest.raises(CacheFull, match="20 pages"):
        cache.reserve(second, 10 * PAGE_SIZE + 1)
    assert (cache.num_pages, cache.free_pages, second.pages) == (*before, [])
    cache.reserve(second, 10 * PAGE_SIZE)  # the other pages are still free
    cache.close(first)
    cache.close(second)
    assert cache.free_pages == cache.num_pages == 20


def test_a_fork_for_whose_last_page_no_copy_is_free_takes_no_page() -> None:
    cache = llama_cache(pages=3)
    parent = prefilled(cache, 2 * PAGE_SIZE + 1)
    forks: list[KVPages] = []
    with pytest.raises(CacheFull):
        forks.append(cache.fork(parent.kv))
        cache.reserve(forks[0], forks[0].length + 1)
    for sequence in (*forks, parent.kv):
        cache.close(sequence)
    assert cache.free_pages == cache.num_pages == 3


def test_a_cache_that_does_not_fit_into_memory_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(cache_module, "_zeros", fails)
    with pytest.raises(CacheFull, match="20 pages.*smaller kv_cache_gb, max_length or max_batch"):
        llama_cache()


def attends(plan: Plan, length: int, node: int, slot: int, window: int | None) -> bool:
    """The definition: a node attends to committed positions, its ancestors and itself within the window."""
    if slot < length:
        distance = length + plan.depths[node] - slot
        return window is None or distance < window
    distance, at = 0, node
    while at != slot - length:
        if at == 0:
            return False
        at, distance = plan.parents[at - 1], distance + 1
    return window is None or distance < window


@settings(max_examples=60)
@given(data=st.data(), plan=plans(max_nodes=9, max_copied=3), window=st.none() | st.integers(1, 30))
def test_the_mask_is_that_of_its_definition(data: st.DataObject, plan: Plan, window: int | None) -> None:
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3) | st.integers(0, 20).map(lambda n: [n, n]))
    nodes = data.draw(st.sampled_from([*plan.levels, range(len(plan) + 1)]))
    sequences = [KVPages(length=length) for length in lengths]
    ancestors = plan.ancestors[nodes.start : nodes.stop, : nodes.stop]
    rows = Rows(sequences, nodes, torch.tensor(plan.depths[: nodes.stop]), ancestors, torch.device("cpu"))
    mask = rows.mask(window)
    if mask is None:
        mask = torch.ones(len(lengths), len(nodes), rows.slots, dtype=torch.bool)
    expected = [
        [[attends(plan, length, node, slot, window) for slot in range(max(lengths) + nodes.stop)] for node in nodes]
        for length in lengths
    ]
    assert mask.tolist() == expected
