"""QuantizedTensor refuses parts that do not fit together, and keeps its values in smaller groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    with pytest.raises(ValueError, match=f"groups of {group} columns cannot be divided into groups of 128"):
        smaller.regrouped(128)


@pytest.mark.parametrize("rows", [torch.tensor([4, 0, 0]), slice(2, 5)])
def test_rows_are_selected_from_every_part(rows):
    tensor = QuantizedTensor(**parts())
    assert torch.equal(tensor.rows(rows).dequantize(), tensor.dequantize()[rows])


def test_bits_per_weight_count_everything_that_is_stored():
    tensor = QuantizedTensor(**parts())
    assert tensor.bits_per_weight == 4 + 3 * 8 / GROUP + 2 * 16 / 256
    assert QuantizedTensor(tensor.q, 4, torch.ones(N, 1, dtype=torch.bfloat16), K, 8).bits_per_weight == 4 + 16 / K


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


def test_weights_of_different_widths_are_not_concatenated():
    wide = QuantizedTensor(**parts())
    narrow = QuantizedTensor(torch.zeros(2, 64, dtype=torch.uint8), 4, torch.ones(2, 1), 64, 8)
    with pytest.raises(ValueError, match=r"cannot be concatenated: \[6, 512\].*\[2, 64\]"):
        concatenate([wide, narrow])


def wrong(name: str, value: Any) -> dict[str, Any]:
    """The value of a field in forms that no tensor of these parts has."""
    if isinstance(value, int):
        return {"zero": 0, "negative": -1, "odd": 3, "other": 5}
    forms = {
        "short": value[:-1],
        "narrow": value[:, :-1],
        "empty": value[:, :0],
        "flat": value.flatten(),
        "double": value.double(),
        "wide": value.to(torch.int32),
    }
    if name in ("scale", "minimum", "super_scale", "super_minimum"):
        forms["exchanged"] = value.to(torch.int8 if value.is_floating_point() else torch.float16)
    return forms


@settings(max_examples=150, deadline=None)
@given(data=st.data(), bits=st.sampled_from([4, 8]))
def test_a_field_that_does_not_fit_is_refused(data, bits):
    fields = parts(bits)
    name = data.draw(st.sampled_from(sorted(fields)))
    forms = wrong(name, fields[name])
    fields[name] = forms[data.draw(st.sampled_from(sorted(forms)))]
    with pytest.raises(ValueError):
        QuantizedTensor(**fields)


def test_a_group_larger_than_what_a_super_scale_covers_is_refused():
    fields = parts()
    with pytest.raises(ValueError, match="super_scale is given, but no scale in groups that divide 256 columns"):
        QuantizedTensor(fields["q"], 4, fields["scale"][:, :1], K, 8, fields["super_scale"])


@pytest.mark.parametrize("name", ["super_scale", "super_minimum"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_refused_by_name(name, value):
    fields = parts()
    fields[name][3, 1] = value
    with pytest.raises(ValueError, match=f"up_proj is damaged: its {name} "):
        QuantizedTensor(**fields).check_values("up_proj")
