"""Linear computes the same with a quantized weight as with its expanded one, whole and some rows at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.models import linear
from selfspec.models.linear import Linear, expand
from selfspec.models.quantized.rounding import quantize
from selfspec.models.quantized.tensor import QuantizedTensor, can_pack, join, pack


@st.composite
def quantized(draw: st.DrawFn) -> QuantizedTensor:
    rows, group, groups = draw(st.integers(1, 20)), draw(st.sampled_from([16, 32, 64])), draw(st.integers(1, 4))
    weight = torch.randn(rows, group * groups, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return quantize(weight, draw(st.sampled_from([4, 8])), group)


@settings(max_examples=40)
@given(quantized(), st.integers(1, 300))
def test_a_quantized_weight_computes_as_its_expanded_one(source: QuantizedTensor, together: int) -> None:
    """In float64, and for any number of weights that are expanded together."""
    weight, dense = pack([source]), source.dequantize()
    bias = torch.randn(dense.shape[0], dtype=torch.float64)
    x, ids = torch.randn(2, 3, dense.shape[1], dtype=torch.float64), torch.randint(dense.shape[0], (2, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "EXPANDED_TOGETHER", together)
        ours = Linear(weight, bias)
        torch.testing.assert_close(ours.apply(x), F.linear(x, dense.double(), bias), rtol=1e-12, atol=1e-12)
        assert torch.equal(expand(weight, torch.float32), dense)
    assert torch.equal(ours.rows(ids, torch.bfloat16), dense[ids].bfloat16())
    assert ours.shape == dense.shape and ours.nbytes == weight.nbytes + bias.nbytes
    assert torch.equal(expand(ours.part(slice(1, 3)).weight, torch.float32), dense[1:3])


@settings(max_examples=20)
@given(quantized(), st.integers(1, 19))
def test_a_weight_that_is_packed_by_rows_equals_the_whole(source: QuantizedTensor, rows: int) -> None:
    def part(some: slice) -> QuantizedTensor:
        return replace(
            source, **{name: tensor[some] for name, tensor in vars(source).items() if isinstance(tensor, torch.Tensor)}
        )

    parts = [pack([part(slice(start, start + rows))]) for start in range(0, source.shape[0], rows)]
    whole = join(parts, source.shape[0])
    assert torch.equal(whole.dequantize(), source.dequantize()) and whole.nbytes == pack([source]).nbytes


def test_only_weights_that_fit_the_layout_are_packed() -> None:
    def weight(columns: int, group: int) -> QuantizedTensor:
        return quantize(torch.randn(4, columns), 8, group)

    assert can_pack([weight(64, 64), weight(64, 16)]) and can_pack([weight(48, 48)])
    for fault in ([weight(40, 40)], [weight(64, 8)], [weight(64, 64), weight(32, 32)]):
        assert not can_pack(fault)
    with pytest.raises(TypeError, match="the weight is quantized"):
        _ = Linear(pack([weight(64, 64)])).dense
