"""The reference backend's promises on a CUDA device; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selfspec import Engine
from selfspec.calibrate.drafting import _attend
from selfspec.models import loading as weights
from tests.tiny import FAMILIES, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLANS = ["none", "chain:4", "tree:3,2,1", "nodes:0.0,0.2,1.0,1.1,2.0,4.1"]


def prompts(batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, 100, (batch, 11), generator=generator).cuda()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_for_every_plan(family: str) -> None:
    model = tiny_model(family).cuda()
    ids = prompts(3)
    settings = {"max_new_tokens": 70, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    engine = Engine.from_model(model)
    for plan in PLANS:
        actual = engine.generate(ids, speculative_decoding="force", plan=plan, exit_layer=2, **settings)
        assert torch.equal(actual, expected), plan


@pytest.mark.parametrize("keys", [512, 576, 640])
def test_gradients_of_training_attention_are_finite_for_very_negative_logits(keys: int) -> None:
    """Some attention kernels' 16-bit backward gives NaN for some numbers of keys."""
    rows, heads, size = 64, 2, 64
    random = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        0.1 * torch.randn(1, count, heads, size, device="cuda", generator=random, dtype=torch.bfloat16)
        for count in (rows, keys, keys)
    )
    q[..., 0], k[..., 0] = 1.0, -120.0
    mask = torch.ones(1, rows, keys, dtype=torch.bool, device="cuda")
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = _attend(q, q, q, seen=[(k, v)], root=True, mask=mask, scale=1.0)
    gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_one_seed_gives_the_same_tokens_for_every_plan() -> None:
    engine = Engine.from_model(tiny_model("llama").cuda())
    settings = {"max_new_tokens": 60, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": [1, 2, 3]}
    plain = engine.generate(prompts(3), speculative_decoding=False, **settings)
    for plan in PLANS[1:]:
        assert torch.equal(engine.generate(prompts(3), speculative_decoding="force", plan=plan, **settings), plain), (
            plan
        )


def test_loading_peaks_near_the_size_of_the_weights(tmp_path: Path) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
    tiny_model("llama", dtype=torch.float32, **wide).save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoder = weights.load_folder(tmp_path, weights.pick_device("cuda"), "bfloat16")
    peak = torch.cuda.max_memory_allocated() - before
    assert decoder.nbytes <= peak < 1.2 * decoder.nbytes


def test_out_of_memory_fails_the_request_and_not_the_engine() -> None:
    """The logits of 16 sequences take 64 MB, more than the allocator may have left in segments of 20 MB."""
    engine = Engine.from_model(tiny_model("llama", vocab_size=500_000).cuda())
    ids = prompts(1)
    expected = engine.generate(ids, max_new_tokens=8, speculative_decoding=False)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(RuntimeError, match="memory"):
            engine.generate(prompts(16), max_new_tokens=8, speculative_decoding=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.cache.free_pages == engine.cache.num_pages
    assert torch.equal(engine.generate(ids, max_new_tokens=8, speculative_decoding=False), expected)
