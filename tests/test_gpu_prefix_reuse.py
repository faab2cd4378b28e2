"""Prefix reuse on a GPU: reused pages hold the bits of a fresh prefill, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.synthetic import synthetic
from selfspec import Engine
from selfspec.backends.torch_backend import PREFILL_CHUNK
from selfspec.cache.kv_cache import PAGE_SIZE
from selfspec.models.decoder import Decoder
from selfspec.sequence import Sequence
from selfspec.speculation.exit_scoring import PROMPT_END

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DRAFTING: dict[str, Any] = {"speculative_decoding": "force", "plan": "tree:3,2,1", "exit_layer": 2}
PLAIN: dict[str, Any] = {"speculative_decoding": False}


@pytest.fixture(scope="module")
def small() -> Decoder:
    """The demo model's shape; the exit after 2 layers is often right."""
    return synthetic("smollm2-135m", "cuda", torch.bfloat16, exit_layer=2, damping=0.2)


def engine_of(model: Decoder, prefix_reuse: bool, longest_kernel_prompt: int | None) -> Engine:
    """`longest_kernel_prompt`: tokens of the longest prompt that the kernels prefill; None: as usual."""
    engine = Engine(model, kernels=True, max_length=4096, max_batch=4, prefix_reuse=prefix_reuse)
    assert engine._graphs is not None
    engine._graphs.max_kernel_prompt = longest_kernel_prompt or engine._graphs.max_kernel_prompt
    return engine


def answered(engine: Engine, prompt: list[int], count: int, **options: Any) -> Sequence:
    settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count}
    request = engine.build_request(prompt, **settings, **options)
    engine.scheduler.submit(request)
    engine.scheduler.wait(request)
    return request.sequences[0]


def kv_of(engine: Engine, sequence: Sequence, positions: int) -> list[torch.Tensor]:
    """Keys and values of the model's layers in the registered pages of a sequence's first positions."""
    assert sequence.page_keys is not None
    keys = sequence.page_keys.first(positions // PAGE_SIZE, sequence.tokens)
    pages = engine.cache._prefixes.find(keys)
    assert len(pages) == len(keys)
    torch.cuda.synchronize()
    return [tensor[:-1, pages].clone() for tensor in (engine.cache.keys, engine.cache.values)]


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 40000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("options", [PLAIN, DRAFTING], ids=["plain", "drafting"])
@pytest.mark.parametrize(
    ("length", "longest_kernel_prompt"),
    [(100, None), (700, None), (2000, None), (1500, 256)],
    ids=["one pass", "many segments", "several passes", "chunks"],
)
def test_a_second_turn_gets_the_bits_and_tokens_of_a_fresh_prefill(
    small: Decoder, length: int, longest_kernel_prompt: int | None, options: dict[str, Any]
) -> None:
    reusing, fresh = (engine_of(small, reuse, longest_kernel_prompt) for reuse in (True, False))
    first = answered(reusing, random_tokens(length, 1), 100, **options)
    prompt = first.tokens + random_tokens(PROMPT_END, 2)
    second = answered(reusing, prompt, 100, **options)
    end = length // PREFILL_CHUNK * PREFILL_CHUNK if longest_kernel_prompt else (length + 99) // PAGE_SIZE * PAGE_SIZE
    assert second.cached_tokens == end
    assert second.tokens == answered(fresh, prompt, 100, **PLAIN).tokens
    other = engine_of(small, True, longest_kernel_prompt)
    alone = answered(other, prompt, 1, **options)
    assert alone.cached_tokens == 0
    whole = (len(prompt) - 1) // (PREFILL_CHUNK if longest_kernel_prompt else PAGE_SIZE)
    positions = whole * (PREFILL_CHUNK if longest_kernel_prompt else PAGE_SIZE)
    for ours, theirs in zip(kv_of(reusing, second, positions), kv_of(other, alone, positions), strict=True):
        assert torch.equal(ours, theirs)


def test_prompts_that_share_a_system_prompt_get_the_tokens_that_they_get_without_reuse(small: Decoder) -> None:
    reusing, fresh = (engine_of(small, reuse, None) for reuse in (True, False))
    system = random_tokens(500, 3)
    prompts = [system + random_tokens(count, seed=count) for count in (40, 100, 600)]
    answered(reusing, system, 4, **DRAFTING)
    for prompt in prompts:
        found = answered(reusing, prompt, 60, **DRAFTING)
        assert found.cached_tokens == 448 and found.tokens == answered(fresh, prompt, 60, **PLAIN).tokens
