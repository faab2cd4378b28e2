"""Sessions on the device's kernels, in Triton's interpreter: the tokens and accounts of PyTorch sessions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from selfspec import Engine
from selfspec.exits import Exit
from tests.profiles import random_exit, random_rows
from tests.scripted import endless
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter, where there is no GPU")

LAYER = 1
GREEDY = {"do_sample": False, "pad_token_id": 0}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 4, "pad_token_id": 0}


@cache
def engines(family: str) -> tuple[Engine, Engine]:
    """One model behind kernels and behind PyTorch, with an exit that has everything an exit can have."""
    model = endless(tiny_model(family, dtype=torch.float32, num_hidden_layers=3, head_dim=16))
    pair = Engine.from_model(model, kernels=True), Engine.from_model(model)
    trained = random_exit(pair[0].model, LAYER)
    trimmed = replace(trained, head_rows=random_rows(40))
    for engine in pair:
        engine._exits = {LAYER: Exit(trimmed.model, LAYER, trimmed.norm, trimmed.block, trimmed.head_rows)}
    return pair


def prompts(count: int) -> torch.Tensor:
    return torch.randint(3, 100, (count, 5), generator=torch.Generator().manual_seed(7))


def generate(engine: Engine, plan: str, batch: int, count: int, **settings: Any) -> Any:
    return engine.generate(
        prompts(batch), speculative_decoding="force", plan=plan, exit_layer=LAYER, max_new_tokens=count,
        return_dict_in_generate=True, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_gives_the_tokens_of_pytorch(family: str) -> None:
    ours, theirs = engines(family)
    expected = generate(theirs, "tree:2,1", 1, 3, **GREEDY)
    assert torch.equal(generate(ours, "tree:2,1", 1, 3, **GREEDY).sequences, expected.sequences)
