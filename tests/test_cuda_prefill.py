"""Prefill on the CUDA backend, in Triton's interpreter: the same KV and features as the reference backend's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec import Engine
from selfspec.backends import torch_backend as torch_backend_module
from selfspec.backends.cuda import exit as exit_module
from selfspec.backends.cuda import kernel_prefill
from selfspec.backends.cuda import prompts as prompts_module
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.kernel_prefill import (
    LONGEST,
    MAX_SEGMENTS,
    MAX_TOKENS,
    SHORT,
    KernelPrefill,
    PromptEmbedding,
    PromptPart,
    groups_per_pass,
    next_part,
    pass_size,
    segments,
    sizes_to_capture,
)
from selfspec.cache.kv_cache import PAGE_SIZE, Cache, CacheFull, KVPages, flat_slot
from selfspec.cache.prefixes import PageKeys
from selfspec.profiles.router import prompt_embeddings
from selfspec.speculation.exit import Exit
from selfspec.speculation.exit_scoring import PROMPT_END
from selfspec.speculation.plan import NONE, Plan
from tests.interpreted import (
    LAYER,
    ONLY_INTERPRETED,
    ScriptedBatch,
    accurate_exit,
    cuda_backend,
    new_graphs,
    plain_tokens,
    prompt_of,
    sequence_of,
    torch_backend,
    trained_exit,
)
from tests.tiny import tiny_model

pytestmark = ONLY_INTERPRETED

COUNT, SEGMENT, END = 4, 4, 6  # small ones: interpreted kernels are slow
TEXTS = [prompt_of(9, 1), prompt_of(3, 2)]  # three segments, and one


@given(st.lists(st.integers(1, MAX_TOKENS), max_size=40))
def test_prompts_are_grouped_in_order_into_passes_that_are_as_full_as_they_can_be(lengths: list[int]) -> None:
    groups = list(groups_per_pass(lengths))
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    for group in groups:
        inside = [lengths[index] for index in group]
        count, segment, longest = pass_size(inside)
        assert sum(map(segments, inside)) <= count <= MAX_SEGMENTS
        assert max(inside) <= segment or segment == 64
        assert max(inside) <= longest
    fuller = [
        sum(segments(lengths[i]) for i in (*one, other[0])) for one, other in zip(groups, groups[1:], strict=False)
    ]
    assert all(taken > MAX_SEGMENTS for taken in fuller)  # the next prompt would not fit


@given(st.integers(1, LONGEST), st.integers(0, LONGEST // PAGE_SIZE))
def test_every_pass_over_a_prompt_has_a_size_that_warm_up_captures(tokens: int, reused: int) -> None:
    start = min(reused * PAGE_SIZE, max(0, tokens - PROMPT_END) // PAGE_SIZE * PAGE_SIZE)
    captured = {pass_size(*size) for size in sizes_to_capture(1, LONGEST)}
    while start < tokens:
        part = next_part(tokens - start)
        assert pass_size([part], start + part) in captured or start + part <= kernel_prefill.SHORTEST_SEGMENT
        assert part >= PROMPT_END or part == tokens  # the exit is scored there
        start += part
    assert start == tokens


def run(graphs: Graphs, made: Any, texts: list[list[int]]) -> list[KVPages]:
    """Runs one pass over prompts; returns their pages."""
    held = [graphs.cache.open() for _ in texts]
    for kv, text in zip(held, texts, strict=True):
        graphs.cache.reserve(kv, len(text))
    made.load([PromptPart(text, kv.pages) for text, kv in zip(texts, held, strict=True)])
    with torch.inference_mode():
        made.launch()
    return held


def small(graphs: Graphs) -> tuple:
    return graphs.model, graphs.cache, graphs.scratch, COUNT, SEGMENT, SHORT, graphs.idle_page


def left_in_cache(cache: Cache, kv: KVPages, count: int) -> list[torch.Tensor]:
    slots = [flat_slot(kv, slot) for slot in range(count)]
    return [tensor.flatten(1, 2)[:, slots].clone() for tensor in (cache.keys, cache.values)]


@torch.inference_mode()
def of_reference(exit: Exit | None, text: list[int], family: str) -> list[torch.Tensor]:
    """Keys, values, last feature and prompt end of a prompt that the reference backend has prefilled."""
    backend = torch_backend(family)
    backend._scored_positions = END
    sequence = sequence_of([*text, 5], 1)
    while not backend.prefill([sequence], exit):
        pass
    left = left_in_cache(backend.cache, sequence.kv, len(text))
    if exit is None:
        return [tensor[:-1] for tensor in left]
    assert sequence.previous_feature is not None
    hidden, previous, features = (states[0] for states in backend._prompt_ends[sequence])
    return [*left, sequence.previous_feature, torch.cat((hidden, previous, features[:, : hidden.shape[1]]), dim=1)]


def assert_alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=5e-4, rtol=5e-4)


def test_short_prompts_in_one_pass_equal_those_of_the_reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel_prefill, exit_module):
        monkeypatch.setattr(module, "PROMPT_END", END)
    family = "gemma3_text"  # windows, and norms of queries and updates
    graphs, exit = new_graphs(family), trained_exit(family)
    made = KernelPrefill(*small(graphs), exit=exit)
    held = run(graphs, made, TEXTS)
    for number, (text, kv) in enumerate(zip(TEXTS, held, strict=True)):
        ends = made.prompt_end[number, : min(len(text), END)]
        found = [*left_in_cache(graphs.cache, kv, len(text)), made.features[number], ends]
        assert_alike(found, of_reference(exit, text, family))


def test_a_prompts_kv_does_not_depend_on_other_prompts_or_on_an_exit() -> None:
    graphs, exit = new_graphs(), trained_exit()
    layers, found = graphs.model.config.num_layers, []
    for of_exit, texts in ((exit, TEXTS), (exit, TEXTS[::-1]), (None, TEXTS[:1])):
        held = run(graphs, KernelPrefill(*small(graphs), exit=of_exit), texts)
        found.append(left_in_cache(graphs.cache, held[texts.index(TEXTS[0])], len(TEXTS[0])))
    for other in found[1:]:
        assert all(torch.equal(a[:layers], b[:layers]) for a, b in zip(found[0], other, strict=True))
    assert torch.equal(found[0][0][layers], found[1][0][layers])  # the exit's own keys


def test_prompt_embeddings_equal_the_routers() -> None:
    graphs = new_graphs()
    made = PromptEmbedding(*small(graphs), layer=LAYER)
    run(graphs, made, TEXTS)
    sums = torch.stack([of_text.sum(0) for of_text in made.sums.split([3, 1])])
    found = sums / torch.tensor([[len(text)] for text in TEXTS])
    torch.testing.assert_close(found, prompt_embeddings(graphs.model, graphs.cache, TEXTS, LAYER), atol=1e-5, rtol=1e-5)


def test_prompt_embeddings_return_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = new_graphs()
    monkeypatch.setattr(graphs, "max_kernel_prompt", LONGEST)
    monkeypatch.setattr(kernel_prefill, "SEGMENT", 8)
    free, texts = graphs.cache.free_pages, [prompt_of(3, 1), prompt_of(5, 2)]
    found = graphs.embed_prompts(texts, LAYER).read()
    torch.testing.assert_close(found, prompt_embeddings(graphs.model, graphs.cache, texts, LAYER), atol=1e-5, rtol=1e-5)
    assert graphs.cache.free_pages == free


@torch.inference_mode()
@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("overlaps", [False, True], ids=["pytorch", "padded"])
def test_long_prompts_in_chunks_equal_those_of_the_reference_backend(
    overlaps: bool, drafting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 16 tokens, padded to 32 rows in the pass that a GPU captures."""
    for module in (torch_backend_module, prompts_module):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 16)
    graphs, exit = new_graphs(), trained_exit() if drafting else None
    for length in (1, 16, 33, 70):
        text = prompt_of(length, 3)
        backend, sequence = cuda_backend(graphs, overlaps), sequence_of([*text, 5], 1)
        passes = 1
        while not backend.prefill([sequence], exit):
            passes += 1
        assert passes == -(-length // 16)
        found = left_in_cache(graphs.cache, sequence.kv, length)
        if drafting:
            assert (sequence in backend._prompts.prompt_ends) == overlaps and sequence.previous_feature is not None
            assert_alike([*found, sequence.previous_feature], of_reference(exit, text, "llama")[:3])
        else:
            assert_alike([tensor[:-1] for tensor in found], of_reference(None, text, "llama"))
        backend.release(sequence)
        assert not backend._prompts.prompt_ends and not backend._prompts._torch._prompt_ends
        graphs.cache.close(sequence.kv)


@torch.inference_mode()
def test_prompts_of_all_lengths_in_one_batch_get_the_tokens_they_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token, two prompts that share a pass, and one too long for that."""
    monkeypatch.setattr(kernel_prefill, "SEGMENT", 8)
    monkeypatch.setattr(kernel_prefill, "SHORTEST_SEGMENT", 8)
    graphs, exit = new_graphs(), trained_exit()
    graphs.max_kernel_prompt = 12
    batch = ScriptedBatch(cuda_backend(graphs), exit)
    sequences = [sequence_of(prompt_of(length, length), 3, exit=exit) for length in (4, 10, 1, 20)]
    batch.admit(sequences)
    batch.run()
    assert [sequence.tokens for sequence in sequences] == [plain_tokens(sequence) for sequence in sequences]
    assert graphs.cache.free_pages == graphs.cache.num_pages - 1


@torch.inference_mode()
def test_a_pass_without_free_pages_raises_and_keeps_none() -> None:
    graphs = new_graphs(pages=3)  # one of them is the idle page
    graphs.max_kernel_prompt = LONGEST
    backend = cuda_backend(graphs)
    sequences = [sequence_of(prompt_of(length, 1), 1) for length in (60, 100)]
    with pytest.raises(CacheFull):
        backend.prefill(sequences, None)
    for sequence in sequences:
        graphs.cache.close(sequence.kv)
    assert graphs.cache.free_pages == 2


def test_a_model_that_the_kernels_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="kernels need"):
        Engine.from_model(tiny_model("llama"), kernels=True)  # float64


@torch.inference_mode()
def test_prefill_in_parts_and_decoding_leave_the_bits_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of all layers and of the exit: of tokens that were decoded with and without drafts, and of a
    prompt of the same tokens, prefilled in parts of one segment, after another one in the same pass."""
    monkeypatch.setattr(kernel_prefill, "SEGMENT", 8)
    for module in (kernel_prefill, exit_module):
        monkeypatch.setattr(module, "PROMPT_END", 2)
    graphs, exit = new_graphs(), accurate_exit()
    graphs.max_kernel_prompt = LONGEST
    decoded = sequence_of(prompt_of(8, 1), 8, exit=exit)
    batch = ScriptedBatch(cuda_backend(graphs), exit)
    batch.admit([decoded])
    for plan in (NONE, Plan.tree((2, 1))):
        batch.plan = plan
        batch.step()
    assert decoded.history.accepted > 0
    ours = left_in_cache(graphs.cache, decoded.kv, decoded.kv.length)
    monkeypatch.setattr(kernel_prefill, "MAX_TOKENS", 8)
    backend = cuda_backend(graphs)
    other, parts = sequence_of(prompt_of(4, 1), 1), sequence_of([*decoded.tokens[: decoded.kv.length], 5], 1)
    finished = [backend.prefill([other, parts], exit)]
    while parts not in finished[-1]:
        finished.append(backend.prefill([parts], exit))
    assert finished[0] == [other] and len(finished) == 2
    theirs = left_in_cache(graphs.cache, parts.kv, decoded.kv.length)
    assert all(torch.equal(one, another) for one, another in zip(ours, theirs, strict=True))


@torch.inference_mode()
def test_a_prompt_that_reuses_whole_chunks_gets_the_bits_of_a_fresh_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model's layers: the exit's first position after the reused ones lacks the feature of the one before."""
    for module in (torch_backend_module, prompts_module):
        monkeypatch.setattr(module, "PREFILL_CHUNK", PAGE_SIZE)
    graphs, exit = new_graphs(), trained_exit()
    backend, shared = cuda_backend(graphs, overlaps=True), prompt_of(2 * PAGE_SIZE, 1)
    prompt = [*shared, *prompt_of(PROMPT_END + 1, 2)]
    other, fresh, reusing = (sequence_of(text, 1) for text in ([*shared, 7, 8], prompt, prompt))
    keys = PageKeys(backend.prefill_kind(len(prompt)), exit.layer).first(2, shared)
    for sequence in (other, fresh, reusing):
        if sequence is reusing:
            graphs.cache.register(other.kv, keys)
            graphs.cache.close(other.kv)
            sequence.kv = graphs.cache.open_with(keys, 1)
            assert sequence.kv.length == 2 * PAGE_SIZE and graphs.cache.reusable_pages == 0
        while not backend.prefill([sequence], exit):
            pass
    ours, theirs = (left_in_cache(graphs.cache, sequence.kv, len(prompt) - 1) for sequence in (reusing, fresh))
    assert all(torch.equal(one[:-1], another[:-1]) for one, another in zip(ours, theirs, strict=True))
    assert torch.equal(backend._prompts.prompt_ends[reusing][1:], backend._prompts.prompt_ends[fresh][1:])
