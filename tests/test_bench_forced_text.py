"""Forced texts on the device: the kernel against its reference, and steps that write the tokens a processor forces.

Without a GPU the kernels run in Triton's interpreter; with one, steps are captured.
"""

from __future__ import annotations

from functools import cache
from math import inf
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import governor
from bench.forced_text import FREE, ForcedTextEngine, ForcedTexts, force_tokens, force_tokens_reference
from bench.governor_calls import Call
from bench.governor_sets import PromptSet
from bench.modes import warm_up
from selfspec import Engine, Rules
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.step import DeviceStep
from selfspec.governor.governor import Governor
from selfspec.speculation.plan import NONE
from tests.calibrated import chat_tokenizer
from tests.compiling import compile_op
from tests.profiles import choice_of, profile_of
from tests.scripted import endless, silence
from tests.test_kernel_compile import check
from tests.tiny import tiny_model

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="in the interpreter, where there is no GPU")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]),
]
LAYER = 1
END = 2  # a token
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
FOREIGN = [90, 20, 70]
NEW_TOKENS = 6
RULES = Rules(max_step=inf, budget_refill=1.0)
RANKS = {"0": [[0.6, 0.2, 0.1], [0.5, 0.2]]}


# The kernel


@settings(max_examples=40)
@given(nodes=st.integers(1, 65), sequences=st.integers(1, 5), seed=st.integers(0, 2**20))
def test_forced_tokens_are_chosen(nodes: int, sequences: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    forced = torch.randint(FREE, 3, (6, 40), generator=generator, dtype=torch.int32).to(DEVICE)
    seeds = torch.randint(0, 6, (sequences,), generator=generator).to(DEVICE)
    following = torch.randint(0, 40, (nodes * sequences,), generator=generator, dtype=torch.int32).to(DEVICE)
    chosen = torch.arange(100, 100 + nodes * sequences, dtype=torch.int32, device=DEVICE)
    expected = force_tokens_reference(chosen, following, seeds, forced)
    force_tokens(chosen, following, seeds, forced)
    assert torch.equal(chosen, expected)


def test_other_seeds_and_later_positions_keep_their_choice() -> None:
    store = torch.full((5, 4), 9, dtype=torch.int32, device=DEVICE)  # forced tokens between others
    seeds = torch.tensor([0, 2, -1, 3], device=DEVICE)
    following = torch.tensor([3, 3, 3, 3, 4, 0, 0, 0], dtype=torch.int32, device=DEVICE)
    chosen = torch.arange(8, dtype=torch.int32, device=DEVICE)
    force_tokens(chosen, following, seeds, store[1:3])
    assert chosen.tolist() == [9, 1, 2, 3, 4, 5, 6, 7]


def test_choices_of_other_sequences_are_refused() -> None:
    ints = torch.zeros(6, dtype=torch.int32)
    with pytest.raises(ValueError, match="not those of 4 sequences"):
        force_tokens(ints, ints, torch.zeros(4, dtype=torch.int64), ints.view(2, 3))
    with pytest.raises(ValueError, match="contiguous"):
        force_tokens(ints, ints, torch.zeros(3, dtype=torch.int64), ints.view(2, 3).T)


@pytest.mark.xdist_group("compiling")
@pytest.mark.parametrize("arch", [90, 120])
def test_the_kernel_compiles_and_fits(arch: int) -> None:
    check(compile_op("forced_text", arch))


# Steps


@cache
def engine(device: str, kernels: bool = True) -> Engine:
    """A model whose exit is always right, so that drafts are accepted until another text is forced."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hf = tiny_model("llama", dtype=dtype, num_hidden_layers=2, head_dim=16, max_position_embeddings=64)
    model = Engine.from_model(endless(silence(hf, LAYER)).to(device)).model
    profile = profile_of(model, {"code": choice_of(LAYER, "chain:1", ranks=RANKS)})
    return Engine(model, chat_tokenizer(), None, profile, RULES, max_batch=4, kernels=kernels)


def bench_of(device: str, kernels: bool = True) -> governor.Bench:
    plans = governor.parse(["--plans", "chain:2"]).plans
    return governor.Bench(engine(device, kernels), governor.profile_of(engine(device, kernels)), plans=plans, limit=3)


def on_host(device: str) -> governor.Bench:
    """Where a processor forces the texts: without kernels on a CPU, since the interpreter is slow."""
    return bench_of(device, kernels=device == "cuda")


def call(bench: governor.Bench, name: str, prompts: PromptSet, size: int) -> Call:
    """One mode on the first so many prompts, after the bench's own preparations."""
    (batch,) = batches = bench.batches(prompts.prompts[:size], size)
    mode = next(mode for mode in bench.modes(prompts, size, "code") if mode.name == name)
    if bench.engine.has_kernels:
        warm_up(bench.engine, batches, prompts.temperature)
        if "plan" in mode.options:
            bench.engine.scheduler.call(lambda: bench._capture(mode, prompts, size))
    return bench.call(mode, prompts, batch)


@cache
def forced_set(device: str) -> PromptSet:
    """One text ends; the others differ from the model's own at once or later, and leave the last tokens to it."""
    free, bench = PromptSet("free", PROMPTS, NEW_TOKENS), on_host(device)
    own = call(bench, "plain", free, 3).tokens
    assert END not in own[0] and own[1][3] != FOREIGN[0] and own[2][0] != FOREIGN[0]
    texts = [[own[0][0], END], [*own[1][:3], FOREIGN[0]], FOREIGN]
    return PromptSet("forced", PROMPTS, NEW_TOKENS, forced=ForcedTexts(PROMPTS, texts))


def forced_texts(device: str) -> list[list[int]]:
    forced = forced_set(device).forced
    assert forced is not None
    return [forced.texts[tuple(prompt)] for prompt in PROMPTS]


@cache
def expected_tokens(device: str) -> list[list[int]]:
    """The tokens under the logits processor."""
    with mock.patch.object(on_host(device).engine.generation_config, "eos_token_id", END):
        return call(on_host(device), "plain", forced_set(device), 3).tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["plain", "chain:2"])
def test_captured_steps_write_the_tokens_that_the_processor_forces(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences in four slots; when one has ended, the others move to the first two."""
    expected, bench = expected_tokens(device), bench_of(device).for_set(forced_set(device))
    monkeypatch.setattr(ForcedTexts, "__call__", None)  # the processor is not called
    monkeypatch.setattr(bench.engine.generation_config, "eos_token_id", END)
    counts: list[int] = []
    step = Graphs.step
    monkeypatch.setattr(
        Graphs, "step", lambda self, table, count, *rest: counts.append(count) or step(self, table, count, *rest)
    )
    found = call(bench, name, forced_set(device), 3)
    texts = forced_texts(device)
    assert [tokens[: len(text)] for tokens, text in zip(found.tokens, texts, strict=True)] == texts
    assert [len(tokens) for tokens in found.tokens] == [2, NEW_TOKENS, NEW_TOKENS]
    assert found.tokens == expected
    assert list(dict.fromkeys(counts))[-3:] in ([4, 2], [4, 2, 1])
    assert (found.steps < found.count) == (name != "plain")  # forced tokens may have been drafted


@pytest.mark.parametrize("device", DEVICES)
def test_exit_scores_compare_drafts_with_the_forced_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit drafts the model's own tokens, not forced ones."""
    right: list[bool] = []
    monkeypatch.setattr(Governor, "choose", lambda *_, **__: (NONE, "goodput"))
    monkeypatch.setattr(Governor, "observe_score", lambda self, skill, found: right.extend(found))
    prompts = PromptSet("forced", PROMPTS[2:], 10, forced=ForcedTexts(PROMPTS[2:], [FOREIGN]))
    found = call(bench_of(device).for_set(prompts), "governor", prompts, 1)
    assert found.tokens[0][:3] == FOREIGN and len(found.tokens[0]) == 10
    assert len(right) > 3 and right == [False] * 3 + [True] * (len(right) - 3)


# The second engine


@pytest.mark.parametrize("device", DEVICES)
def test_the_second_engine_decodes_forced_texts_with_kernels_only(device: str) -> None:
    bench, without = bench_of(device), bench_of(device, kernels=False)
    given, free = forced_set(device), PromptSet("free", PROMPTS, NEW_TOKENS)
    assert bench.for_set(free) is bench and without.for_set(given) is without
    second = bench.for_set(given)
    assert second.engine is not bench.engine and second.engine is bench.for_set(given).engine
    for name in ("model", "profile", "rules", "context", "max_batch", "generation_config"):
        assert getattr(second.engine, name) == getattr(bench.engine, name), name
    made = [target.engine._graphs and target.engine._graphs.step_class for target in (bench, second)]
    assert made[0] is DeviceStep and made[1] is not DeviceStep


def test_texts_replace_those_set_before() -> None:
    second, prompts = ForcedTextEngine(engine(DEVICE), 3), [[5, 6], [7, 8, 9]]
    address = second.forced.data_ptr()
    second.set_texts(prompts, ForcedTexts(prompts, [[10, 11], list(range(12, 92))]))
    assert second.forced[0].tolist() == [FREE, FREE, 10, 11] + [FREE] * 60
    assert second.forced[1].tolist() == [FREE] * 3 + list(range(12, 73))  # cut to the context
    second.set_texts(prompts[:1], ForcedTexts(prompts, [[13], [14]]))
    assert second.forced[0].tolist() == [FREE, FREE, 13] + [FREE] * 61
    assert (second.forced[1:] == FREE).all() and second.forced.data_ptr() == address
    with pytest.raises(ValueError, match="4 texts do not fit an engine made for 3"):
        second.set_texts(prompts * 2, ForcedTexts(prompts, [[13], [14]]))
