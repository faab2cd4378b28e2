"""The CUDA backend runs quantized weights: interpreted kernels give the tokens of PyTorch's operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import Engine
from tests.interpreted import ONLY_INTERPRETED
from tests.tiny import tiny_model

pytestmark = ONLY_INTERPRETED


@pytest.mark.parametrize(
    ("family", "quantize", "overrides"),
    [("llama", "int4", {}), ("qwen3", "int8", {}), ("gemma3_text", "int4", {})],
    ids=["llama int4", "qwen3 int8", "gemma3 int4"],
)
def test_kernels_give_the_tokens_of_pytorch_for_every_plan(
    tmp_path: Path, family: str, quantize: Any, overrides: dict[str, Any]
) -> None:
    model = tiny_model(family, torch.float32, num_hidden_layers=2, head_dim=16, max_position_embeddings=64, **overrides)
    model.save_pretrained(tmp_path)
    loaded: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantize": quantize, "max_batch": 1}
    kernels = Engine.from_pretrained(tmp_path, kernels=True, **loaded)
    assert kernels.model.is_quantized
    prompt, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = Engine.from_pretrained(tmp_path, kernels=False, **loaded).generate(prompt, **options)
    assert torch.equal(kernels.generate(prompt, **options), expected)
    assert torch.equal(kernels.generate(prompt, exit_layer=1, plan="tree:2,1", **options), expected)
