"""Prefill attention by flash-attn gives what PyTorch's gives: a stand-in written from the package's documentation on a
CPU, the package itself on a GPU that has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from selfspec import Engine
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.cache.layout import Rows
from selfspec.models import attention
from tests.tiny import tiny_model


def varlen_attention(
    q: torch.Tensor,  # [M, Hq, D]
    k: torch.Tensor,  # [S, Hkv, D]
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """One sequence of flash-attn's varlen attention; the last query is aligned with the last of its keys."""
    rows, length = cu_seqlens_q.tolist()[1], cu_seqlens_k.tolist()[1]
    assert causal and rows == len(q) <= max_seqlen_q and length <= min(len(k), max_seqlen_k)
    group = q.shape[1] // k.shape[1]
    k, v = (x[:length].repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("mhd,shd->hms", q, k) * softmax_scale
    distance = torch.arange(length - rows, length)[:, None] - torch.arange(length)
    left, right = window_size
    visible = (distance >= 0) if left < 0 else (distance >= -right) & (distance <= left)
    return torch.einsum("hms,shd->mhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.fixture
def with_flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows of every call of the stand-in."""
    calls: list[int] = []

    def recorded(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(q))
        return varlen_attention(q, *args, **kwargs)

    monkeypatch.setattr(attention, "installed", lambda: recorded)
    monkeypatch.setattr(attention, "is_usable", lambda q: len(q) == 1)
    yield calls


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # the second has layers with a sliding window
def test_prefill_by_flash_attn_gives_the_tokens_of_pytorch(family: str, with_flash: list[int]) -> None:
    ids = torch.randint(1, 90, (1, 700))  # two chunks
    model = tiny_model(family, max_position_embeddings=1024)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "speculative_decoding": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "is_usable", lambda q: False)
        expected = Engine.from_model(model).generate(ids, **options)
    assert not with_flash
    assert torch.equal(Engine.from_model(model).generate(ids, **options), expected)
    assert max(with_flash) == 512, "no chunk went through flash-attn"


def test_flash_attention_reads_scattered_pages_and_skips_padding(with_flash: list[int]) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, values = random(6, PAGE_SIZE, 2, 8), random(6, PAGE_SIZE, 2, 8)
    table, q = torch.tensor([[4, 1, 3]]), random(1, 10, 4, 8)
    positions = torch.arange(100, 110)[None]
    keys[3], values[3] = torch.nan, torch.nan  # past the last position
    whole = attention.flash_attention(q, keys, values, table, positions, 3 * PAGE_SIZE, 40, 0.3)
    k, v = (pages[[4, 1]].flatten(0, 1)[:110].repeat_interleave(2, dim=1) for pages in (keys, values))
    distance = positions[0][:, None] - torch.arange(110)
    scores = torch.einsum("mhd,shd->hms", q[0], k) * 0.3
    scores = scores.masked_fill((distance < 0) | (distance >= 40), -torch.inf)
    torch.testing.assert_close(whole[0], torch.einsum("hms,shd->mhd", scores.softmax(-1), v))


def test_steps_that_decode_do_not_use_flash_attn(with_flash: list[int]) -> None:
    engine = Engine.from_model(tiny_model("llama"))
    tree = {"exit_layer": 1, "plan": "tree:2,1", "speculative_decoding": "force"}
    engine.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, **tree)
    assert set(with_flash) == {2}, "only the two prompt tokens are prefilled"


def test_float32_and_cpu_tensors_are_left_to_pytorch() -> None:
    assert not attention.is_usable(torch.zeros(1, 4, 2, 8))
    assert not attention.is_usable(torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_flash_attn_on_the_gpu_gives_what_pytorch_gives(window: int | None) -> None:
    if attention.installed() is None:
        pytest.skip("flash-attn is not installed")
    config = Engine.from_model(tiny_model("llama")).model.config
    device = torch.device("cuda")
    cache = Cache(config, device, torch.bfloat16, 12)
    kv = cache.open()
    cache.reserve(kv, 600)
    cache.keys.normal_()
    cache.values.normal_()
    kv.length += 300
    rows = Rows.causal([kv], 200, device)
    heads, dim = config.num_heads, config.head_dim
    q, k, v = (
        torch.randn(1, 200, count, dim, device=device, dtype=torch.bfloat16)
        for count in (heads, config.num_kv_heads, config.num_kv_heads)
    )
    assert attention.is_usable(q)
    flashed = attention.attend(q, k, v, cache, 0, rows, window, 0.3)
    rows.is_causal = False
    torch.testing.assert_close(flashed, attention.attend(q, k, v, cache, 0, rows, window, 0.3), atol=2e-2, rtol=2e-2)
