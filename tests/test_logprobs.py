"""Log probabilities of new tokens and of prompts: the model's own, whatever is drafted, sampled or processed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from selfspec import Engine
from selfspec.backends import torch_backend as torch_backend_module
from selfspec.backends.cuda import kernel_prefill
from selfspec.backends.cuda import prompts as prompts_module
from selfspec.logprobs import TokenLogprob, prompt_logprobs
from selfspec.sampling import SamplingParams
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan
from tests.interpreted import (
    ONLY_INTERPRETED,
    ScriptedBatch,
    accurate_exit,
    cuda_backend,
    new_graphs,
    prompt_of,
    sequence_of,
    torch_backend,
    trained_exit,
)
from tests.scripted import endless, left_padded, random_prompt
from tests.tiny import tiny_model

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.5}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return endless(tiny_model("llama"))


def assert_close(found: Seq[TokenLogprob], expected: Seq[TokenLogprob]) -> None:
    assert [token.token for token in found] == [token.token for token in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        values = [torch.tensor([token.logprob, *(value for _, value in token.top)]) for token in (ours, theirs)]
        torch.testing.assert_close(*values, atol=1e-5, rtol=0)


@torch.no_grad()
def of_transformers(model: PreTrainedModel, text: list[int], top: int) -> list[TokenLogprob]:
    """Those of all tokens of a text but the first."""
    logprobs = model(torch.tensor([text])).logits[0].float().log_softmax(-1)
    values, ids = logprobs.topk(top, dim=-1)
    likely = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(text[at + 1], float(logprobs[at, text[at + 1]]), likely[at]) for at in range(len(text) - 1)]


@pytest.mark.parametrize("plan", ["none", "chain:3", "tree:3,2,1"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_log_probabilities_are_those_of_transformers_for_any_plan_and_options(model, plan, options):
    engine = Engine.from_model(model, profile=None)
    texts = [random_prompt(70), random_prompt(1), random_prompt(9)]
    ids, mask = left_padded(texts)
    out = engine.generate(
        ids, mask, max_new_tokens=8, seed=3, exit_layer=2, plan=plan, speculative_decoding="force", logprobs=4,
        prompt_logprobs=2, return_dict_in_generate=True, **options,
    )  # fmt: skip
    for text, row, new, of_prompt in zip(texts, out.sequences.tolist(), out.logprobs, out.prompt_logprobs, strict=True):
        whole = [*text, *row[ids.shape[1] :]]
        assert_close(of_prompt, of_transformers(model, whole, 2)[: len(text) - 1])
        assert_close(new, of_transformers(model, whole, 4)[len(text) - 1 :])


def test_requests_with_and_without_log_probabilities_share_batches_and_samples_share_the_prompts(model, monkeypatch):
    monkeypatch.setattr(torch_backend_module, "PREFILL_CHUNK", 16)
    engine = Engine.from_model(model, profile=None)
    prompt = torch.tensor([random_prompt(40)])
    sampled: dict[str, Any] = {"do_sample": True, "seed": 1, "num_return_sequences": 3, "max_new_tokens": 5}
    plain = engine.generate(prompt, **sampled, return_dict_in_generate=True)
    assert plain.logprobs is None and plain.prompt_logprobs is None
    out = engine.generate(prompt, **sampled, logprobs=0, prompt_logprobs=0, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain.sequences)
    assert [len(tokens) for tokens in out.logprobs] == [5, 5, 5] and [
        len(tokens) for tokens in out.prompt_logprobs
    ] == [39, 39, 39]
    assert all(not token.top for new in out.logprobs for token in new)
    for value in (-1, 21, True, "x"):
        with pytest.raises(ValueError, match="logprobs="):
            engine.generate(prompt, logprobs=value)


def with_logprobs(sequence: Sequence, top: int | None = 3, prompt_top: int | None = None) -> Sequence:
    sequence.request.logprobs, sequence.request.prompt_logprobs = top, prompt_top
    return sequence


@torch.inference_mode()
def expected_of(sequence: Sequence) -> Sequence:
    """The same prompt, parameters and seed on the reference backend, alone and plain."""
    new_tokens = sequence.max_length - len(sequence.prompt)
    alone = with_logprobs(sequence_of(sequence.prompt, new_tokens, sequence.params, seed=sequence.seed), 3, 3)
    batch = ScriptedBatch(torch_backend(), None)
    batch.admit([alone])
    batch.run()
    return alone


@ONLY_INTERPRETED
@torch.inference_mode()
@pytest.mark.parametrize("callables", [[], [lambda _, logits: logits]], ids=["in flight", "with a callable"])
def test_kernels_give_the_log_probabilities_of_the_reference_backend(callables):
    """Beside a sequence without them; a sequence may end in the middle of a step."""
    exit, sampled = accurate_exit(), SamplingParams(do_sample=True, temperature=0.8, top_k=7)
    sequences = [
        with_logprobs(sequence_of(prompt_of(4, 3), 4, sampled, exit=exit, seed=2, processors=callables), top=2),
        sequence_of(prompt_of(3, 2), 2, exit=exit),
    ]
    batch = ScriptedBatch(cuda_backend(new_graphs(), overlaps=not callables), exit)
    batch.admit(sequences)
    batch.run([Plan.parse(plan) for plan in ("tree:2,1", "none", "chain:2")])
    found, expected = sequences[0], expected_of(sequences[0])
    assert len(found.logprobs) == 4 and not sequences[1].logprobs and found.history.accepted
    assert_close(
        found.logprobs, [TokenLogprob(token.token, token.logprob, token.top[:2]) for token in expected.logprobs]
    )


@torch.inference_mode()
def test_a_chunk_that_is_repeated_after_a_failure_adds_its_log_probabilities_once(monkeypatch):
    sequence, exit, backend = with_logprobs(sequence_of(prompt_of(9, 9), 1), None, 3), trained_exit(), torch_backend()
    with monkeypatch.context() as patch:
        patch.setattr(Exit, "fill", Mock(side_effect=torch.OutOfMemoryError("on purpose")))
        with pytest.raises(torch.OutOfMemoryError):
            backend.prefill([sequence], exit)
    assert backend.prefill([sequence], exit) == [sequence]
    assert_close(sequence.prompt_logprobs, expected_of(sequence).prompt_logprobs)


@ONLY_INTERPRETED
@torch.inference_mode()
@pytest.mark.parametrize("drafting", [False, True])
def test_prompts_of_all_lengths_get_the_log_probabilities_of_the_reference_backend(drafting, monkeypatch):
    """One token, two prompts that share a pass, and one that runs in two padded chunks. The first pass fails at the log
    probabilities and runs again; every pass computes those of all of its prompts at once."""
    monkeypatch.setattr(kernel_prefill, "SEGMENT", 8)
    monkeypatch.setattr(kernel_prefill, "SHORTEST_SEGMENT", 8)
    for module in (torch_backend_module, prompts_module):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 16)
    graphs, exit = new_graphs(), trained_exit() if drafting else None
    graphs.max_kernel_prompt = 12
    sequences = [with_logprobs(sequence_of(prompt_of(length, length), 1), None, 3) for length in (4, 10, 1, 18)]
    backend, waiting, calls = cuda_backend(graphs, overlaps=True), list(sequences), count(1)

    def fail_once(*arguments):
        if next(calls) == 1:
            raise torch.OutOfMemoryError("on purpose")
        return prompt_logprobs(*arguments)

    monkeypatch.setattr(prompts_module, "prompt_logprobs", fail_once)
    with pytest.raises(torch.OutOfMemoryError):
        backend.prefill(waiting, exit)
    while waiting:
        ready = backend.prefill(waiting, exit)
        waiting = [sequence for sequence in waiting if sequence not in ready]
    assert next(calls) == 1 + len(["failed", "together", "chunk", "chunk"])
    for sequence in sequences:
        assert_close(sequence.prompt_logprobs, expected_of(sequence).prompt_logprobs)
