"""Rounding a 16-bit weight: no group has a larger error than with the scale that cuts nothing off; memory is small."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.models.quantized import rounding
from selfspec.models.quantized.rounding import quantize


def group_errors(weight: torch.Tensor, fitted: torch.Tensor, group: int) -> torch.Tensor:
    return (weight.float() - fitted).square().unflatten(1, (-1, group)).sum(-1)


def plainly_rounded(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Rounds to nearest with the scale, in bfloat16, at which the largest weight of a group is not cut off."""
    values = weight.float().unflatten(1, (-1, group))
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15 if bits == 4 else values.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
    scale[scale == 0] = 1
    zero = (-low / scale).round() if bits == 4 else torch.zeros_like(scale)
    q = ((values / scale).round() + zero).clamp(*((0, 15) if bits == 4 else (-128, 127)))
    return ((q - zero) * scale).flatten(1)


@settings(max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([16, 32, 64, 192]),
    n=st.integers(1, 9),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    size=st.sampled_from([1e-4, 0.02, 30.0]),
    offset=st.sampled_from([0.0, 1.0, -4.0]),
    seed=st.integers(0, 2**32),
)
def test_no_group_is_worse_than_rounded_plainly(bits, group, n, dtype, size, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = ((torch.randn(n, 192, generator=generator) + offset) * size).to(dtype)
    tensor = quantize(weight, bits, None if group == 192 else group)
    ours = group_errors(weight, tensor.dequantize(), group)
    theirs = group_errors(weight, plainly_rounded(weight, bits, group), group)
    assert (ours <= theirs * (1 + 1e-5)).all()
    assert (tensor.bits, tensor.group, tensor.scale.dtype) == (bits, group, torch.bfloat16)


def test_the_search_lowers_the_error_of_4_bits():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    ours = group_errors(weight, quantize(weight, 4, 128).dequantize(), 128).sum()
    theirs = group_errors(weight, plainly_rounded(weight, 4, 128), 128).sum()
    assert ours < 0.95 * theirs


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_on_the_grid_is_kept_exactly(bits):
    least, most = (0, 15) if bits == 4 else (-127, 127)
    q = torch.randint(least, most + 1, (8, 128), generator=torch.Generator().manual_seed(0))
    q[:, ::64], q[:, 1::64] = least, most
    weight = (q - (5 if bits == 4 else 0)) * 0.125
    tensor = quantize(weight, bits, 64)
    assert torch.equal(tensor.dequantize(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_too_small_for_a_scale_become_zero(bits):
    assert quantize(torch.full((2, 32), 1e-39), bits, 32).dequantize().abs().max() == 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.5, -0.25, 1e-35, 3e38])
def test_a_group_of_equal_weights_is_kept_within_the_precision_of_its_scale(bits, value):
    fitted = quantize(torch.full((2, 32), value), bits, 32).dequantize()
    assert torch.allclose(fitted, torch.full((2, 32), value), rtol=2**-8, atol=0)


class LargestResult(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_quantized_in_chunks_with_the_same_result(bits, monkeypatch):
    weight = torch.randn(70, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = quantize(weight, bits, 32)
    monkeypatch.setattr(rounding, "_CHUNK_VALUES", 8 * 64)
    with LargestResult() as largest:
        chunked = quantize(weight, bits, 32)
    assert largest.nbytes == max(weight.numel(), 4 * 8 * 64)  # q, or a chunk in float32
    assert torch.equal(whole.q, chunked.q) and torch.equal(whole.scale, chunked.scale)
    assert torch.equal(whole.dequantize(), chunked.dequantize())


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="rows from 0 on .* not finite"):
        quantize(torch.full((2, 32), torch.nan), 8, 32)
