"""Warm-up captures the steps that requests replay."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from selfspec import Engine, Rules
from selfspec.warmup import ExpectedRequests, expected_steps
from tests.tiny import tiny_model


def test_a_warm_up_after_a_request_captures_the_steps_of_the_next_one() -> None:
    hf = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, head_dim=16, max_position_embeddings=64)
    engine = Engine.from_model(hf, max_batch=2, kernels=True)
    prompt, settings = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 2, "do_sample": False}
    engine.generate(prompt, **settings)  # type: ignore[arg-type]
    assert engine.warmup(2) == 6 and engine._graphs is not None, "two sizes, each plain, copy:3 and copy:15"
    captured = len(engine._graphs.captured.entries)
    engine.generate(prompt.repeat(2, 1), **settings)  # type: ignore[arg-type]
    assert len(engine._graphs.captured.entries) == captured, "the request captured steps of its own"


def test_warm_up_and_first_request_prepare_steps_of_at_most_max_batch_sequences() -> None:
    """By a warm-up, and by an engine's first request, whose kernels an engine on a GPU compiles ahead."""
    hf = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1, head_dim=16, max_position_embeddings=64)
    first, warmed = (Engine.from_model(hf, max_batch=1, kernels=True) for _ in range(2))
    assert first._graphs is not None
    first._graphs.max_kernel_prompt = 2  # as on a GPU: more than 0
    output: Any = first.generate(torch.tensor([[5], [6]]), max_new_tokens=1, speculative_decoding=False)
    assert output.shape == (2, 2)
    assert warmed.warmup(4) == warmed.warmup(1)


def test_batches_that_may_not_draft_expect_plain_steps_alone() -> None:
    engine = Engine.from_model(tiny_model("llama", num_hidden_layers=2))
    expected = ExpectedRequests(batch=32, domain=None, temperatures=(0.0,), max_length=64)
    steps = expected_steps(engine.drafters, Rules(), GenerationConfig(), expected)
    assert {step.sequences for step in steps if len(step.plan)} == {1, 2, 4, 8, 16}


def test_passes_over_prompts_are_captured_with_the_largest_first() -> None:
    """Then no scratch buffer of a captured pass is outgrown by that of a later one."""
    pytest.importorskip("triton")
    from selfspec.backends.cuda.kernel_prefill import LONGEST, pass_size
    from selfspec.backends.cuda.warmup import WarmUp

    captured: list[int] = []

    class Graphs:
        max_kernel_prompt = context = LONGEST

        def kernel_prefill(self, exit: None, lengths: Sequence[int], end: int) -> None:
            captured.append(prod(pass_size(lengths, end)))

    graphs: Any = Graphs()
    WarmUp(graphs, LONGEST, 0).prepare_prompts(None, 4, None)
    assert len(set(captured)) > 3 and captured == sorted(captured, reverse=True)
