"""QuantizedTensor refuses parts that do not fit together, and keeps its values in smaller groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.models.quantized.tensor import QuantizedTensor, concatenate

N, K, GROUP = 6, 512, 64


def parts(bits: int = 4, **changed: Any) -> dict[str, Any]:
    """The fields of a tensor with every field given: scales and minimums of int8 with float16 numbers above them."""
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    generator = torch.Generator().manual_seed(0)

    def integers(least: int, end: int, columns: int, kind: torch.dtype) -> torch.Tensor:
        return torch.randint(least, end, (N, columns), generator=generator).to(kind)

    groups = K // GROUP
    return {
        "q": integers(low, high, K, dtype),
        "bits": bits,
        "scale": integers(0, 64, groups, torch.int8),
        "group": GROUP,
        "zero": integers(low, high, groups, dtype),
        "super_scale": torch.rand(N, 2, generator=generator).half(),
        "minimum": integers(0, 64, groups, torch.int8),
        "super_minimum": torch.rand(N, 2, generator=generator).half(),
    } | changed


def by_hand(fields: dict[str, Any]) -> torch.Tensor:
    weight = torch.empty(N, K)
    for row in range(N):
        for column in range(K):
            group, above = column // GROUP, column // 256
            scale = float(fields["scale"][row, group]) * float(fields["super_scale"][row, above])
            minimum = float(fields["minimum"][row, group]) * float(fields["super_minimum"][row, above])
            weight[row, column] = scale * (int(fields["q"][row, column]) - int(fields["zero"][row, group])) - minimum
    return weight


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_scale_times_distance_from_zero_less_minimum(bits):
    fields = parts(bits)
    assert torch.equal(QuantizedTensor(**fields).dequantize(), by_hand(fields))


@pytest.mark.parametrize("group", [8, 16, 32, 64])
def test_smaller_groups_keep_the_values(group):
    tensor = QuantizedTensor(**parts())
    smaller = tensor.regrouped(group)
    assert smaller.group == group and torch.equal(smaller.dequantize(), tensor.dequantize())


def test_zero_points_that_differ_are_kept_apart():
    scale = torch.ones(N, 1)
    four, eight = (QuantizedTensor(parts(bits)["q"], bits, scale, K, zero) for bits, zero in ((4, 8), (8, 0)))
    whole = concatenate([four, eight])
    assert torch.equal(whole.dequantize(), torch.cat([four.dequantize(), eight.dequantize()]))
    assert (whole.q.dtype, concatenate([four, four]).zero) == (torch.int8, 8)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_scales_of_different_dtypes_become_float32(dtypes):
    both = [QuantizedTensor(parts()["q"], 4, torch.rand(N, 8).to(dtype), GROUP, 8) for dtype in dtypes]
    whole = concatenate(both)
    assert whole.scale.dtype == torch.float32
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in both]))


@pytest.mark.parametrize("name", ["super_scale", "super_minimum"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_refused_by_name(name, value):
    fields = parts()
    fields[name][3, 1] = value
    with pytest.raises(ValueError, match=f"up_proj is damaged: its {name} "):
        QuantizedTensor(**fields).check_values("up_proj")
