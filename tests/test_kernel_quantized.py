"""Matmuls with 4-bit and 8-bit weights in Triton's interpreter, against the dequantized weight.

The interpreter has no bfloat16 products: float16 and float32 stand for all dtypes; GPU tests use bfloat16.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from selfspec.kernels import norm as norms  # noqa: E402
from selfspec.kernels.dequantize import dequantize, dequantize_reference
from selfspec.kernels.embed_rope import RowMetadata, embed_rope, embed_rope_reference  # noqa: E402
from selfspec.kernels.gate_up_gemm import gated_linear, gated_linear_reference  # noqa: E402
from selfspec.kernels.gemm import linear, linear_reference  # noqa: E402
from selfspec.kernels.gemm_common import TileConfig  # noqa: E402
from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_reference, lm_head_scores  # noqa: E402
from selfspec.kernels.qkv_rope_gemm import qkv_linear, qkv_linear_reference  # noqa: E402
from selfspec.kernels.quantized_launch import choose_weight_tile, weight_settings  # noqa: E402
from selfspec.kernels.quantized_weight import QuantizedWeight  # noqa: E402
from selfspec.kernels.topk import Scores, topk_tokens  # noqa: E402
from selfspec.kernels.triton_compat import INTERPRETED  # noqa: E402
from selfspec.models.quantized.tensor import QuantizedTensor  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton does not interpret in this process")

KINDS = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
OFFSETS = ["none", "constant", "zeros", "minimums", "zeros and minimums", "super"]


def quantized(n: int, k: int, kind: str = "int4", group: int = 32, offsets: str = "none") -> QuantizedTensor:
    """A random weight; "super": scales and minimums of 8 bits with those of 256 columns."""
    generator = torch.Generator().manual_seed(n + k)

    def integers(low: int, high: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (n, width), generator=generator).to(dtype)

    def floats(width: int) -> torch.Tensor:
        return (torch.rand(n, width, generator=generator) * 0.1 + 0.01).half()

    low, high = {"int4": (0, 16), "int8": (-128, 128), "fp8": (-40, 40)}[kind]
    extra: dict[str, Any] = {}
    if offsets == "constant":
        extra["zero"] = 8 if kind == "int4" else 3
    if "zeros" in offsets:
        extra["zero"] = integers(low, high, k // group, KINDS[kind])
    if "minimums" in offsets:
        extra["minimum"] = floats(k // group)
    if offsets == "super":
        extra["minimum"] = integers(0, 64, k // group, torch.uint8)
        extra |= {"super_scale": floats(k // 256), "super_minimum": floats(k // 256)}
    if offsets == "super":  # scales of Q6_K have signs, those of Q4_K and Q5_K have none
        scale = integers(0, 64, k // group, torch.uint8) if n % 2 else integers(-32, 64, k // group, torch.int8)
    else:
        scale = floats(k // group)
    return QuantizedTensor(integers(low, high, k, KINDS[kind]), 4 if kind == "int4" else 8, scale, group, **extra)


def pack(tensor: QuantizedTensor) -> QuantizedWeight:
    return QuantizedWeight.pack(**vars(tensor))


@st.composite
def tensors(draw: st.DrawFn) -> QuantizedTensor:
    kind = draw(st.sampled_from(list(KINDS)))
    offsets = draw(st.sampled_from(OFFSETS if kind != "fp8" else ["none", "minimums"]))
    group = draw(st.sampled_from([16, 32, 64, 128, 0]))  # 0: one scale per row
    if offsets == "super":
        k, group = 256 * draw(st.integers(1, 2)), group or 256
    else:
        k = group * draw(st.integers(1, 640 // group)) if group else 16 * draw(st.integers(1, 20))
    return quantized(draw(st.integers(1, 40)), k, kind, group or k, offsets)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_close(actual: torch.Tensor, truth: torch.Tensor) -> None:
    error = (actual.double() - truth).norm() / truth.norm()
    assert error < (2e-3 if actual.dtype == torch.float16 else 2e-6), f"relative error {error:.1e}"


def normed(x: torch.Tensor) -> dict[str, Any]:
    """x as a scaled stream."""
    weight = torch.ones(x.shape[1], dtype=x.dtype)
    return {"x": norms.scaled_reference(x, weight, 0.0), "norm": norms.Norm(1e-5, norms.squares_reference(x))}


@settings(max_examples=60)
@given(tensors())
def test_a_packed_weight_has_the_values_of_the_tensor(tensor: QuantizedTensor) -> None:
    weight = pack(tensor)
    assert weight.shape == tensor.shape and weight.bits == tensor.bits
    assert torch.equal(weight.dequantize(), tensor.dequantize())
    some = torch.tensor([tensor.shape[0] - 1, 0])
    assert torch.equal(weight.rows(some).dequantize(), tensor.dequantize()[some])


def test_a_packed_weight_takes_the_memory_of_its_bits_and_scales() -> None:
    assert pack(quantized(64, 1024, "int4", 128)).nbytes == 64 * 1024 * (4 + 16 / 128) / 8
    assert pack(quantized(64, 1024, "int4", 32, "super")).nbytes == 64 * 1024 * (4 + 16 / 32 + 32 / 256) / 8
    assert pack(quantized(64, 1024, "int8", 1024)).nbytes == 64 * 1024 * (8 + 16 / 1024) / 8


@settings(max_examples=20)
@given(tensors(), st.integers(0, 2))
def test_rows_are_dequantized_to_the_values_of_the_tensor(tensor: QuantizedTensor, tile: int) -> None:
    weight, rows = pack(tensor), slice(16 * tile, min(16 * tile + 20, tensor.shape[0]))
    if rows.start < rows.stop:
        out = nan(rows.stop - rows.start, tensor.shape[1])
        dequantize(weight, rows, out)
        assert torch.equal(out, dequantize_reference(weight, rows, torch.float32))
        assert torch.equal(out, tensor.dequantize()[rows])


@settings(max_examples=25)
@given(tensors(), st.integers(1, 40), st.sampled_from([torch.float16, torch.float32]))
def test_linear_equals_the_matmul_with_the_dequantized_weight(
    tensor: QuantizedTensor, rows: int, dtype: torch.dtype
) -> None:
    n, k = tensor.shape
    x, weight, out = randn(rows, k), pack(tensor), nan(rows, n, dtype=dtype)
    x = x.to(dtype)
    linear(x, weight, out)
    truth = x.double() @ tensor.dequantize().double().T
    bound = (x.double().abs() @ tensor.dequantize().double().abs().T).amax()
    if dtype == torch.float32:
        assert ((out - truth).abs() <= 4e-6 * bound).all()
    else:
        assert_close(out, truth.to(dtype).double())


@pytest.mark.parametrize(
    ("kind", "k", "group", "offsets"),
    [
        ("int4", 384, 128, "constant"),
        ("int4", 512, 32, "super"),
        ("int8", 288, 32, "zeros"),
        ("int8", 256, 16, "super"),
        ("int4", 272, 272, "minimums"),
    ],
)
def test_a_row_has_the_same_bits_with_any_number_of_rows_and_any_tile(
    kind: str, k: int, group: int, offsets: str
) -> None:
    n = 48
    weight, x = pack(quantized(n, k, kind, group, offsets)), randn(64, k, dtype=torch.float16)
    splits = choose_weight_tile("linear", weight, 1).warps

    def run(rows: torch.Tensor, config: TileConfig | None) -> torch.Tensor:
        out = nan(len(rows), n)
        linear(rows.float(), weight, out, config=config)
        return out

    together = run(x, None)
    for count in (1, 2, 7, 8, 9, 16, 17, 33):
        assert torch.equal(run(x[-count:], None), together[-count:]), count
    for block_m, block_n in ((8, 64), (16, 32), (32, 16), (64, 32)):
        config = TileConfig(block_n, 0, 1, splits, block_m)
        assert torch.equal(run(x, config), together), (block_m, block_n)


def test_the_order_of_sums_depends_on_the_weight_alone() -> None:
    for kind, (n, k) in product(["linear", "gate_up", "qkv", "qkv_norm", "head"], [(576, 576), (4096, 4096)]):
        weight, found = pack(quantized(n, k, "int4", 32)).to("meta"), set()
        for rows in (1, 8, 9, 16, 17, 33, 64, 65, 1024):
            x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
            config = choose_weight_tile(kind, weight, rows)
            launch = weight_settings(x, weight, None, config, 128 if kind == "qkv_norm" else None)
            assert launch["FORMAT"].splits * launch["BK"] == launch["num_warps"] <= 16
            assert launch["BN"] % (16 * launch["BK"]) == 0
            found.add(launch["FORMAT"])
        assert len(found) == 1, kind


@pytest.mark.parametrize("offsets", ["constant", "super"])
def test_linear_with_norm_bias_residual_gathered_rows_and_next_norm(offsets: str) -> None:
    n, k, dtype = 80, 256, torch.float16
    weight, stream = pack(quantized(n, k, "int4", 32, offsets)), normed(randn(9, k, dtype=dtype))
    extra: dict[str, Any] = {"bias": randn(n, dtype=dtype), "gather": torch.tensor([3, 8, 0, 3, 1])}
    out = randn(5, n, dtype=dtype, seed=1)
    norm = norms.NextNorm(randn(n, dtype=dtype), 1.0, nan(5, norms.squares_per_row(n)), nan(5, n, dtype=dtype))
    expected = linear_reference(weight=weight, residual=out, **stream, **extra)
    linear(weight=weight, out=out, residual=out, next_norm=norm, **stream, **extra)
    assert_close(out, expected.double())
    torch.testing.assert_close(norm.squares, norms.squares_reference(out), rtol=1e-5, atol=1e-6)
    assert torch.equal(norm.scaled, norms.scaled_reference(out, norm.weight, norm.offset))


def test_gated_linear_matches_the_reference() -> None:
    weight = pack(quantized(88, 192, "int4", 64, "constant"))  # 44 outputs: the last tile is not full
    stream, bias, out = normed(randn(3, 192)), randn(88), nan(3, 44)
    gated_linear(weight=weight, out=out, bias=bias, **stream, activation="silu")
    assert_close(out, gated_linear_reference(weight=weight, bias=bias, **stream, activation="silu").double())


@pytest.mark.parametrize("head_norms", [False, True])
def test_qkv_linear_matches_the_reference(head_norms: bool) -> None:
    rows, heads, kv_heads, dim, k = 5, 2, 1, 64, 160
    weight = pack(quantized((heads + 2 * kv_heads) * dim, k, "int4", 32, "minimums"))
    arguments: dict[str, Any] = {
        **normed(randn(rows, k)),
        "weight": weight,
        "q_norm": randn(dim) if head_norms else None,
        "k_norm": randn(dim, seed=1) if head_norms else None,
        "cos": randn(rows, dim // 2),
        "sin": randn(rows, dim // 2, seed=1),
        "slots": torch.tensor([5, 70, 0, 127, 64]),
    }
    q, cache, true_cache = nan(rows, heads * dim), torch.zeros(2, 2, 64, 1, dim), torch.zeros(2, 2, 64, 1, dim)
    qkv_linear(q_out=q, keys=cache[0], values=cache[1], **arguments)
    assert_close(q, qkv_linear_reference(keys=true_cache[0], values=true_cache[1], **arguments).double())
    assert_close(cache, true_cache.double())


def test_the_head_of_a_quantized_weight_gives_its_logits_whole_and_trimmed() -> None:
    weight, x = pack(quantized(150, 160, "int8", 32)), randn(3, 160)
    truth, logits = lm_head_reference(x, weight, 30.0), nan(3, 150)
    lm_head_logits(x, weight, logits, softcap=30.0)
    assert_close(logits, truth.double())
    ids = torch.tensor([149, 3, 77, 12, 100, 8] * 12 + [5], dtype=torch.int32)  # two tiles
    for count in (None, torch.tensor([4], dtype=torch.int32)):  # 4: the second tile has no columns
        scores, best = Scores.empty(3, len(ids), 1, "cpu"), torch.empty(3, 1, dtype=torch.int64)
        lm_head_scores(x, weight, scores, token_ids=ids, gather=True, count=count, softcap=30.0)
        topk_tokens(scores, best, finite=True)
        taken = ids.long() if count is None else ids[:4].long()
        assert torch.equal(best[:, 0], taken[truth[:, taken].argmax(1)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 24, "q": torch.zeros(2, 48, dtype=torch.uint8), "scale": torch.ones(2, 2)}, "multiples of 16"),
        ({"bits": 8}, "no weight of 8 bits"),
        ({"scale": torch.ones(2, 3)}, "scale must be"),
        ({"zero": 16}, "zero of 16"),
        ({"scale": torch.ones(2, 2, dtype=torch.int32)}, "scales are torch.int32"),
        ({"super_scale": torch.ones(2, 1).half(), "minimum": torch.ones(2, 2)}, "must both have super values"),
        ({"zero": torch.zeros(2, 2, dtype=torch.int8)}, "zeros are"),
        ({"q": torch.zeros(2, 64).to(torch.float8_e4m3fn), "bits": 8, "zero": 1}, "no zero points"),
    ],
)
def test_pack_refuses_weights_that_the_kernels_cannot_read(change: dict[str, Any], message: str) -> None:
    arguments = {"q": torch.zeros(2, 64, dtype=torch.uint8), "scale": torch.ones(2, 2), "group": 32, "bits": 4}
    with pytest.raises(ValueError, match=message):
        QuantizedWeight.pack(**(arguments | change))


@pytest.mark.parametrize(
    ("kind", "hidden", "group", "offsets"),
    [
        ("int4", 96, 32, "constant"),
        ("int4", 256, 32, "super"),
        ("int8", 80, 16, "zeros and minimums"),
        ("fp8", 48, 48, "none"),
    ],
)
def test_the_embedding_of_a_quantized_weight_is_its_dequantized_row(
    kind: str, hidden: int, group: int, offsets: str
) -> None:
    embedding, dtype = pack(quantized(50, hidden, kind, group, offsets)), torch.float16
    tokens, scale = torch.tensor([49, 0, 17]), torch.tensor(2.5, dtype=dtype)
    place = {
        "lengths": torch.tensor([0, 61, 130], dtype=torch.int32),
        "page_table": torch.arange(12, dtype=torch.int32).view(3, 4),
        "depths": torch.zeros(1, dtype=torch.int32),
        "inv_freq": torch.rand(1, 12),
        "rope_scaling": torch.ones(1),
    }
    states, metadata = nan(3, hidden, dtype=dtype), RowMetadata.empty(3, 1, 12, dtype, "cpu")
    squares, scaled = nan(3, norms.squares_per_row(hidden)), nan(3, hidden, dtype=dtype)
    next_norm = norms.NextNorm(torch.ones(hidden, dtype=dtype), 0.0, squares, scaled)
    embed_rope(metadata, states, next_norm, embedding, scale, **place, first_node=0, given_tokens=tokens)
    expected, _ = embed_rope_reference(
        tokens, embedding, scale, **place, nodes=torch.zeros(1, dtype=torch.int32), dtype=dtype
    )
    assert torch.equal(states, expected)
