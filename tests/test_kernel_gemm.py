"""The fused matmuls and norms in Triton's interpreter, against their references.

The interpreter has no bfloat16 products: float16 and float32 stand for all dtypes; GPU tests use bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from selfspec.kernels import norm as norms  # noqa: E402
from selfspec.kernels.gate_up_gemm import gated_linear, gated_linear_reference  # noqa: E402
from selfspec.kernels.gemm import linear, linear_reference  # noqa: E402
from selfspec.kernels.gemm_common import TileConfig, choose_tile, launch_settings  # noqa: E402
from selfspec.kernels.qkv_rope_gemm import qkv_linear, qkv_linear_reference  # noqa: E402
from selfspec.kernels.triton_compat import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton does not interpret in this process")

HALF, FULL = torch.float16, torch.float32
TOLERANCE = {HALF: 3e-3, FULL: 2e-5}


def randn(*shape: int, dtype: torch.dtype = FULL, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale).to(dtype)


def nan(*shape: int, dtype: torch.dtype = FULL) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def normed(x: torch.Tensor, offset: float = 0.0, weight: torch.Tensor | None = None) -> dict[str, Any]:
    """The arguments of a product over the norm of x."""
    if weight is None:
        weight = (randn(x.shape[1], seed=5, scale=0.3) + (1 - offset)).to(x.dtype)
    return {
        "x": norms.scaled_reference(x, weight.to(x.dtype), offset),
        "norm": norms.Norm(1e-5, norms.squares_reference(x)),
    }


def next_norm_of(out: torch.Tensor) -> norms.NextNorm:
    rows, width = out.shape
    weight = randn(width, dtype=out.dtype, seed=6)
    return norms.NextNorm(weight, 1.0, nan(rows, norms.squares_per_row(width)), nan(rows, width, dtype=out.dtype))


def exact(value: Any) -> Any:
    """The same argument in float64."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def assert_close(actual: torch.Tensor, truth: torch.Tensor) -> None:
    """Within the dtype's usual error, measured against the size of the whole."""
    assert torch.isfinite(actual).all()
    error = (actual.double() - truth).norm() / truth.norm()
    assert error < TOLERANCE[actual.dtype], f"relative error {error:.1e}"
    assert ((actual.double() - truth).abs() < 20 * TOLERANCE[actual.dtype] * truth.abs().max()).all()


def assert_next_norm_reads(norm: norms.NextNorm, stored: torch.Tensor) -> None:
    torch.testing.assert_close(norm.squares, norms.squares_reference(stored), rtol=1e-5, atol=1e-6)
    assert torch.equal(norm.scaled, norms.scaled_reference(stored, norm.weight, norm.offset))


def linear_arguments(rows: int, n: int, k: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": randn(rows, k, dtype=dtype), "weight": randn(n, k, dtype=dtype, scale=k**-0.5)}


@pytest.mark.parametrize(
    ("rows", "n", "k", "dtype"),
    [(1, 48, 64, HALF), (5, 80, 144, FULL), (17, 16, 16, FULL), (33, 40, 400, HALF)],
)
def test_linear_with_norm_bias_residual_and_next_norm(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = linear_arguments(rows, n, k, dtype).values()
    extra = {"bias": randn(n, dtype=dtype), "residual": randn(rows, n, dtype=dtype, seed=1)}
    norm_weight = randn(k, dtype=dtype, seed=5)
    out = nan(rows, n, dtype=dtype)
    next_norm = next_norm_of(out)
    linear(weight=weight, out=out, **normed(x, 1.0, norm_weight), **extra, next_norm=next_norm)
    exact_extra = {name: exact(value) for name, value in extra.items()}
    truth = linear_reference(weight=weight.double(), **normed(x.double(), 1.0, norm_weight), **exact_extra)
    assert_close(out, truth)
    assert_close(out, linear_reference(weight=weight, **normed(x, 1.0, norm_weight), **extra).double())
    assert_next_norm_reads(next_norm, out)


def test_a_scaled_stream_gives_the_matmul_of_its_norm() -> None:
    x, norm_weight, weight = randn(4, 64).double(), randn(64).double(), randn(32, 64).double()
    expected = norms.rms_norm_reference(x, norm_weight, 1e-5, 1.0) @ weight.T
    torch.testing.assert_close(linear_reference(weight=weight, **normed(x, 1.0, norm_weight)), expected)


@pytest.mark.parametrize("width", [16, 272, 2064])
def test_every_entry_of_the_squares_counts(width: int) -> None:
    """Also where they fill no whole chunk of 16, or no power of two of chunks. Row r has only its entry r."""
    entries = norms.squares_per_row(width)
    x, out = torch.ones(entries, width), nan(entries, 16)
    linear(x, torch.eye(16, width), out, norm=norms.Norm(0.0, 4.0 * width * torch.eye(entries)))
    torch.testing.assert_close(out, torch.full((entries, 16), 0.5))


def test_linear_takes_views_of_wider_tensors_and_a_residual_that_is_its_output() -> None:
    wide_x, wide_weight = randn(3, 128), randn(32, 160)
    x, weight = wide_x[:, 32:112], wide_weight[:, :80]
    stream = randn(3, 64)
    expected = linear_reference(x.double(), weight.double(), residual=stream[:, 16:48].double())
    before = stream.clone()
    linear(x, weight, stream[:, 16:48], residual=stream[:, 16:48])
    assert_close(stream[:, 16:48], expected)
    assert torch.equal(stream[:, :16], before[:, :16]) and torch.equal(stream[:, 48:], before[:, 48:])


def test_linear_gathers_its_input_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight, residual = (torch.randn(*shape, generator=generator) for shape in ((40, 64), (48, 64), (21, 48)))
    gather = torch.randint(0, 40, (21,), generator=generator)
    out = torch.full((21, 48), torch.nan)
    linear(x, weight, out, residual=residual, gather=gather)
    torch.testing.assert_close(out, linear_reference(x, weight, residual=residual, gather=gather), atol=1e-4, rtol=1e-4)
    scaled = normed(x * torch.logspace(-2, 2, 40)[:, None])
    linear(weight=weight, out=out, gather=gather, **scaled)
    torch.testing.assert_close(out, linear_reference(weight=weight, gather=gather, **scaled), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="gathered rows"):
        linear(x, weight, out, gather=gather.int())


def test_a_large_stream_does_not_overflow_half_precision() -> None:
    x = randn(2, 64, dtype=HALF, scale=4000.0)
    weight = randn(16, 64, dtype=HALF, scale=0.1)
    norm_weight = torch.full((64,), 50.0, dtype=HALF)
    out = nan(2, 16, dtype=HALF)
    linear(weight=weight, out=out, **normed(x, weight=norm_weight))
    assert_close(out, linear_reference(weight=weight.double(), **normed(x.double(), weight=norm_weight)))


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("silu", FULL), ("silu", HALF), ("gelu", FULL), ("gelu_pytorch_tanh", FULL), ("relu", FULL)],
)
def test_gated_linear_matches_the_reference(activation: str, dtype: torch.dtype) -> None:
    x, weight = linear_arguments(3, 88, 96, dtype).values()  # 44 outputs: the last tile is not full
    bias, norm_weight = randn(88, dtype=dtype, scale=3.0), randn(96, dtype=dtype, scale=0.3)
    out = nan(3, 44, dtype=dtype)
    gated_linear(weight=weight, out=out, bias=bias, **normed(x, 1.0, norm_weight), activation=activation)
    truth = gated_linear_reference(
        weight=weight.double(), bias=bias.double(), **normed(x.double(), 1.0, norm_weight), activation=activation
    )
    assert_close(out, truth)


def test_gate_up_and_activation_are_rounded_where_the_model_rounds_them() -> None:
    arguments = linear_arguments(16, 128, 96, HALF)
    out = nan(16, 64, dtype=HALF)
    gated_linear(**arguments, out=out, activation="silu")
    expected = gated_linear_reference(**arguments, activation="silu")
    assert (out != expected).float().mean() < 0.05  # only where sums in another order round differently


def qkv_arguments(
    rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, *, head_norms: bool = False, bias: bool = False
) -> dict[str, Any]:
    n = (heads + 2 * kv_heads) * dim
    slots = torch.randperm(4 * 64, generator=torch.Generator().manual_seed(rows))[:rows]
    return {
        **normed(randn(rows, 80, dtype=dtype)),
        "weight": randn(n, 80, dtype=dtype, scale=0.1),
        "bias": randn(n, dtype=dtype) if bias else None,
        "head_offset": float(head_norms),
        "q_norm": randn(dim, dtype=dtype) if head_norms else None,
        "k_norm": randn(dim, dtype=dtype, seed=1) if head_norms else None,
        "cos": randn(rows, dim // 2),
        "sin": randn(rows, dim // 2, seed=1),
        "slots": slots,
    }


def run_qkv(arguments: dict[str, Any], kv_heads: int, dim: int, *, queries: bool = True) -> tuple[torch.Tensor, ...]:
    x = arguments["x"]
    rows, q_width = x.shape[0], arguments["weight"].shape[0] - 2 * kv_heads * dim
    q = nan(rows, q_width, dtype=x.dtype)
    stack = nan(2, 2, 4, 64, kv_heads, dim, dtype=x.dtype)  # keys and values of two layers; only the second is written
    qkv_linear(q_out=q if queries else None, keys=stack[0, 1], values=stack[1, 1], **arguments)
    assert stack[:, 0].isnan().all()
    return q, stack[0, 1], stack[1, 1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "head_norms", "bias", "dtype"),
    [
        (3, 1, 64, False, True, HALF),
        (2, 2, 96, True, False, FULL),  # a whole head per program, padded
        (2, 1, 96, False, False, HALF),  # parts of a head
        (1, 1, 256, True, True, HALF),
    ],
)
def test_qkv_linear_matches_the_reference(
    heads: int, kv_heads: int, dim: int, head_norms: bool, bias: bool, dtype: torch.dtype
) -> None:
    arguments = qkv_arguments(5, heads, kv_heads, dim, dtype, head_norms=head_norms, bias=bias)
    q, keys, values = run_qkv(arguments, kv_heads, dim)
    true_keys, true_values = (nan(*keys.shape, dtype=torch.float64) for _ in range(2))
    exact_arguments = {name: exact(value) for name, value in arguments.items()}
    exact_arguments["x"] /= norms.shrink(dtype)
    truth = qkv_linear_reference(**exact_arguments, keys=true_keys, values=true_values)
    assert_close(q, truth)
    written = torch.zeros(4, 64, dtype=torch.bool)
    written.view(-1)[arguments["slots"]] = True
    for cached, true in ((keys, true_keys), (values, true_values)):
        assert_close(cached[written], true[written])
        assert cached[~written].isnan().all()


def test_keys_and_values_that_are_not_finite_are_stored_as_0() -> None:
    """A later sequence that gets the page has these slots masked, and 0 * nan is nan. The query is not changed."""
    arguments = qkv_arguments(3, 2, 1, 64, FULL)
    arguments["x"][1] = torch.nan
    q, keys, values = run_qkv(arguments, 1, 64)
    at = arguments["slots"]
    for cached in (keys, values):
        assert (cached.view(-1, 64)[at[1]] == 0).all() and cached.view(-1, 64)[at[[0, 2]]].isfinite().all()
    assert q[1].isnan().all() and q[[0, 2]].isfinite().all()


def test_without_queries_the_same_keys_and_values_are_written() -> None:
    arguments = qkv_arguments(3, 2, 1, 64, FULL)
    _, keys, values = run_qkv(arguments, 1, 64)
    q, only_keys, only_values = run_qkv(arguments, 1, 64, queries=False)
    assert q.isnan().all()
    assert torch.equal(keys.nan_to_num(), only_keys.nan_to_num())
    assert torch.equal(values.nan_to_num(), only_values.nan_to_num())


def test_a_negative_slot_stores_nothing_but_its_query() -> None:
    arguments = qkv_arguments(3, 2, 1, 64, FULL)
    q, keys, _ = run_qkv(arguments, 1, 64)
    dropped = arguments["slots"][1].item()
    arguments["slots"] = arguments["slots"].clone()
    arguments["slots"][1] = -1
    same_q, fewer, _ = run_qkv(arguments, 1, 64)
    assert torch.equal(q, same_q)
    keys.view(-1, 1, 64)[dropped] = float("nan")
    assert torch.equal(keys.isnan(), fewer.isnan())


@pytest.mark.parametrize("rows", [17, 70])
def test_a_row_has_the_same_bits_alone_and_among_others(rows: int) -> None:
    x, weight = linear_arguments(rows, 48, 96, HALF).values()
    arguments = normed(x)
    residual = randn(rows, 48, dtype=HALF)

    def run(here: slice) -> tuple[torch.Tensor, ...]:
        out = nan(*residual[here].shape, dtype=HALF)
        norm, next_norm = norms.Norm(1e-5, arguments["norm"].squares[here]), next_norm_of(out)
        linear(arguments["x"][here], weight, out, norm=norm, residual=residual[here], next_norm=next_norm)
        return out, next_norm.squares, next_norm.scaled

    together = run(slice(0, rows))
    for row in {0, rows // 2, rows - 1}:
        for alone, all_rows in zip(run(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], all_rows[row])


def test_a_row_has_the_same_bits_however_four_slices_of_k_are_summed() -> None:
    x, weight = linear_arguments(80, 64, 1280, FULL).values()
    found = {}
    for rows, block_m, block_n in ((1, 16, 16), (16, 16, 32), (80, 64, 32), (80, 128, 64)):
        tile = replace(choose_tile("linear", 64, 1280, rows), block_m=block_m, block_n=block_n)
        settings, out = launch_settings(x[:rows], weight, None, tile), nan(rows, 64)
        linear(x[:rows], weight, out, config=tile)
        found[settings["SLICING"], rows] = out
    assert {slicing for slicing, _ in found} == {"warps", "loop", "passes"}
    assert all(torch.equal(out, found["passes", 80][: len(out)]) for out in found.values())
    torch.testing.assert_close(found["passes", 80], linear_reference(x, weight), atol=1e-3, rtol=1e-4)


def test_a_row_has_the_same_bits_in_all_tiles_of_a_large_gated_matmul() -> None:
    """Tiles for one row are low and wide, for many rows high. The weight is small, with the tiles of a large one."""
    x, weight = linear_arguments(130, 320, 80, HALF).values()
    arguments = normed(x)

    def run(here: slice) -> torch.Tensor:
        out = nan(*x[here].shape[:1], 160, dtype=HALF)
        norm = norms.Norm(1e-5, arguments["norm"].squares[here])
        config = choose_tile("gate_up", 16384, 80, len(out))
        gated_linear(arguments["x"][here], weight, out, norm=norm, activation="silu", config=config)
        return out

    together = run(slice(0, 130))
    for row in (0, 129):
        assert torch.equal(run(slice(row, row + 1))[0], together[row])
    assert torch.equal(run(slice(20, 80)), together[20:80])


@pytest.mark.parametrize(("width", "dtype"), [(48, HALF), (2064, FULL)])
def test_rms_norm_matches_the_reference(width: int, dtype: torch.dtype) -> None:
    x, weight, residual = (randn(3, width, dtype=dtype, seed=seed) for seed in range(3))
    out = nan(3, width, dtype=dtype)
    next_norm = next_norm_of(out)
    norms.rms_norm(x, weight[0], 1e-5, 1.0, out, residual=residual, next_norm=next_norm)
    truth = norms.rms_norm_reference(x.double(), weight[0].double(), 1e-5, 1.0, residual.double())
    assert_close(out, truth)
    assert_next_norm_reads(next_norm, out)
    norms.rms_norm(x, None, 1e-5, 0.0, out)
    assert_close(out, norms.rms_norm_reference(x.double(), None, 1e-5, 0.0))


def test_the_reference_norm_equals_that_of_pytorch() -> None:
    x, weight = randn(4, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)
    assert torch.equal(norms.rms_norm_reference(x, weight, 1e-5, 0.0), expected)


def test_every_column_belongs_to_one_entry_of_squares() -> None:
    for width in (16, 576, 2048, 2064, 4096, 4112, 8192):
        block = norms.columns_per_square(width)
        assert (norms.squares_per_row(width) - 1) * block < width <= norms.squares_per_row(width) * block
        for k, rows in product((64, 1536, 4096), (1, 17, 33, 65, 129, 257)):
            assert choose_tile("linear", width, k, rows).block_n % block == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": nan(2, 40)}, "x .* and weight"),
        ({"x": nan(2, 24), "weight": nan(32, 24)}, "multiples of 16"),
        ({"weight": nan(32, 48, dtype=HALF)}, "one dtype"),
        ({"x": nan(48, 2).T}, "contiguous"),
        ({"out": nan(2, 31)}, "out must have"),
        ({"residual": nan(3, 32)}, "residual must have"),
        ({"bias": nan(31)}, "bias must be"),
        ({"next_norm": norms.NextNorm(nan(32), 0.0, nan(2, 3), nan(2, 32))}, "squares must have"),
        ({"next_norm": norms.NextNorm(nan(31), 0.0, nan(2, 2), nan(2, 32))}, "as many weights"),
        ({"next_norm": norms.NextNorm(nan(32), 0.0, nan(2, 2), nan(2, 31))}, "scaled must have"),
        ({"norm": norms.Norm(1e-5, nan(2, 2))}, "squares must have"),
        (
            {
                "next_norm": norms.NextNorm(nan(32), 0.0, nan(2, 2), nan(2, 32)),
                "config": TileConfig(24, 16, 2, 4),
            },
            "tiles of 24",
        ),
    ],
)
def test_linear_refuses_tensors_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    arguments = {"x": nan(2, 48), "weight": nan(32, 48), "out": nan(2, 32)} | change
    with pytest.raises(ValueError, match=message):
        linear(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots must be"),
        ({"cos": nan(3, 31)}, "cos and sin"),
        ({"q_norm": nan(64)}, "come together"),
        ({"q_norm": nan(60), "k_norm": nan(60)}, "norms of heads"),
        ({"keys": nan(4, 32, 1, 64)}, "keys must be"),
        ({"values": nan(4, 64, 1, 64, dtype=HALF)}, "values are"),
        ({"weight": nan(100, 80), "bias": None}, "not heads of 64"),
        ({"q_out": nan(3, 64)}, "q_out must have"),
    ],
)
def test_qkv_linear_refuses_tensors_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    cache = {"q_out": nan(3, 128), "keys": nan(4, 64, 1, 64), "values": nan(4, 64, 1, 64)}
    with pytest.raises(ValueError, match=message):
        qkv_linear(**(qkv_arguments(3, 2, 1, 64, FULL) | cache | change))


def test_gated_linear_and_rms_norm_refuse_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="unknown activation"):
        gated_linear(nan(1, 16), nan(32, 16), nan(1, 16), activation="tanh")
    with pytest.raises(ValueError, match="as many rows for gate"):
        gated_linear(nan(1, 16), nan(31, 16), nan(1, 16), activation="silu")
    with pytest.raises(ValueError, match="x must be|weights|out must"):
        norms.rms_norm(nan(2, 16), nan(15), 1e-5, 0.0, nan(2, 16))


@pytest.mark.parametrize(
    ("rows", "heights"),
    [(16, (16,) * 4), (17, (64, 32, 16, 16)), (33, (64,) * 4), (65, (64, 128, 64, 64)), (129, (128, 128, 64, 64))],
)
def test_the_height_of_tiles_depends_on_rows_and_weight(rows: int, heights: tuple[int, ...]) -> None:
    """Of a long matmul_tile, a wide one, and two so small that low tiles leave SMs free."""
    found = []
    for kind, n, k in (("linear", 4096, 4096), ("gate_up", 16384, 64), ("linear", 32, 64), ("linear", 32, 4096)):
        x, weight = torch.empty(rows, k), torch.empty(1, k).expand(n, k)
        found.append(launch_settings(x, weight, None, choose_tile(kind, n, k, rows))["BM"])
    assert tuple(found) == heights


def test_the_block_of_the_sum_over_k_depends_on_weight_and_dtype_alone() -> None:
    sizes = [(576, 576), (3072, 576), (576, 1536), (4096, 2048), (8192, 2048), (28672, 4096)]
    for kind, (n, k), dtype in product(["linear", "gate_up", "qkv", "qkv_norm"], sizes, [HALF, FULL]):
        weight, blocks = torch.empty(1, k, dtype=dtype).expand(n, k), set()
        for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1024):
            x, config = torch.empty(1, k, dtype=dtype).expand(rows, k), choose_tile(kind, n, k, rows)
            blocks.add(launch_settings(x, weight, None, config, 64 if kind == "qkv_norm" else None)["BK"])
        assert len(blocks) == 1, (kind, n, k, dtype)
