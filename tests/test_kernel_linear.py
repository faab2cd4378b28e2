"""The fused products and norms against their references, in Triton's interpreter. It has no bfloat16 products: float16
and float32 stand for all dtypes here, bfloat16 is for the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from selfspec.kernels import linear as ops  # noqa: E402
from selfspec.kernels import norm as norms  # noqa: E402
from selfspec.kernels.triton_or_none import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton does not interpret in this process")

HALF, FULL = torch.float16, torch.float32
TOLERANCE = {HALF: 3e-3, FULL: 2e-5}


def randn(*shape: int, dtype: torch.dtype = FULL, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale).to(dtype)


def nan(*shape: int, dtype: torch.dtype = FULL) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def norm_of(x: torch.Tensor, offset: float = 0.0) -> norms.Norm:
    weight = randn(x.shape[1], dtype=x.dtype, seed=5, scale=0.3) + (1 - offset)
    return norms.Norm(weight.to(x.dtype), 1e-5, offset, norms.squares_reference(x))


def exact(value: Any) -> Any:
    """The same argument in float64."""
    if isinstance(value, norms.Norm):
        return replace(value, weight=value.weight.double(), squares=value.squares.double())
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def assert_close(actual: torch.Tensor, truth: torch.Tensor) -> None:
    """Within the dtype's usual error, measured against the size of the whole."""
    assert torch.isfinite(actual).all()
    error = (actual.double() - truth).norm() / truth.norm()
    assert error < TOLERANCE[actual.dtype], f"relative error {error:.1e}"
    assert ((actual.double() - truth).abs() < 20 * TOLERANCE[actual.dtype] * truth.abs().max()).all()


def assert_squares(squares: torch.Tensor, stored: torch.Tensor) -> None:
    torch.testing.assert_close(squares, norms.squares_reference(stored), rtol=1e-5, atol=1e-6)


def linear_arguments(rows: int, n: int, k: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": randn(rows, k, dtype=dtype), "weight": randn(n, k, dtype=dtype, scale=k**-0.5)}


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 64), (5, 80, 144), (17, 16, 16), (33, 40, 400)])
def test_linear_with_everything(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    arguments = linear_arguments(rows, n, k, dtype)
    extra = {
        "bias": randn(n, dtype=dtype),
        "norm": norm_of(arguments["x"]),
        "residual": randn(rows, n, dtype=dtype, seed=1),
    }
    out, squares = nan(rows, n, dtype=dtype), nan(rows, norms.tiles(n))
    ops.linear(**arguments, out=out, **extra, squares_out=squares)
    truth = ops.linear_reference(
        **{name: exact(value) for name, value in arguments.items()},
        **{name: exact(value) for name, value in extra.items()},
    )
    assert_close(out, truth)
    assert_close(out, ops.linear_reference(**arguments, **extra).double())
    assert_squares(squares, out)


def test_linear_takes_views_of_wider_tensors_and_a_residual_that_is_its_output() -> None:
    wide_x, wide_weight = randn(3, 128), randn(32, 160)
    x, weight = wide_x[:, 32:112], wide_weight[:, :80]
    stream = randn(3, 64)
    expected = ops.linear_reference(x.double(), weight.double(), residual=stream[:, 16:48].double())
    before = stream.clone()
    ops.linear(x, weight, stream[:, 16:48], residual=stream[:, 16:48])
    assert_close(stream[:, 16:48], expected)
    assert torch.equal(stream[:, :16], before[:, :16]) and torch.equal(stream[:, 48:], before[:, 48:])


def test_a_large_stream_does_not_overflow_half_precision() -> None:
    x = randn(2, 64, dtype=HALF, scale=4000.0)
    weight = randn(16, 64, dtype=HALF, scale=0.1)
    norm = replace(norm_of(x), weight=torch.full((64,), 50.0, dtype=HALF))
    out = nan(2, 16, dtype=HALF)
    ops.linear(x, weight, out, norm=norm)
    assert_close(out, ops.linear_reference(x.double(), weight.double(), norm=exact(norm)))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_gated_linear(activation: str, dtype: torch.dtype) -> None:
    arguments = linear_arguments(3, 88, 96, dtype)  # 44 outputs: the last tile is not full
    extra = {"bias": randn(88, dtype=dtype, scale=3.0), "norm": norm_of(arguments["x"], offset=1.0)}
    out = nan(3, 44, dtype=dtype)
    ops.gated_linear(**arguments, out=out, **extra, activation=activation)
    truth = ops.gated_linear_reference(
        **{name: exact(value) for name, value in (arguments | extra).items()}, activation=activation
    )
    assert_close(out, truth)


def test_gate_up_and_activation_are_rounded_where_the_model_rounds_them() -> None:
    arguments = linear_arguments(16, 128, 96, HALF)
    out = nan(16, 64, dtype=HALF)
    ops.gated_linear(**arguments, out=out, activation="silu")
    expected = ops.gated_linear_reference(**arguments, activation="silu")
    assert (out != expected).float().mean() < 0.05  # only where sums in another order round differently


def qkv_arguments(
    rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, *, head_norms: bool = False, bias: bool = False
) -> dict[str, Any]:
    x = randn(rows, 80, dtype=dtype)
    n = (heads + 2 * kv_heads) * dim
    slots = torch.randperm(4 * 64, generator=torch.Generator().manual_seed(rows))[:rows]
    return {
        "x": x,
        "weight": randn(n, 80, dtype=dtype, scale=0.1),
        "bias": randn(n, dtype=dtype) if bias else None,
        "norm": norm_of(x, offset=float(head_norms)),
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
    ops.qkv_linear(q_out=q if queries else None, keys=stack[0, 1], values=stack[1, 1], **arguments)
    assert stack[:, 0].isnan().all()
    return q, stack[0, 1], stack[1, 1]


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "head_norms", "bias"),
    [(3, 1, 64, False, True), (2, 2, 96, True, False), (2, 1, 96, False, False), (1, 1, 256, True, True)],
)
def test_qkv_linear(heads: int, kv_heads: int, dim: int, head_norms: bool, bias: bool, dtype: torch.dtype) -> None:
    arguments = qkv_arguments(5, heads, kv_heads, dim, dtype, head_norms=head_norms, bias=bias)
    q, keys, values = run_qkv(arguments, kv_heads, dim)
    true_keys, true_values = (nan(*keys.shape, dtype=torch.float64) for _ in range(2))
    truth = ops.qkv_linear_reference(
        **{name: exact(value) for name, value in arguments.items()}, keys=true_keys, values=true_values
    )
    assert_close(q, truth)
    written = torch.zeros(4, 64, dtype=torch.bool)
    written.view(-1)[arguments["slots"]] = True
    for cached, true in ((keys, true_keys), (values, true_values)):
        assert_close(cached[written], true[written])
        assert cached[~written].isnan().all()


def test_refilling_writes_the_same_keys_and_values_and_no_queries() -> None:
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


@pytest.mark.parametrize("rows", [2, 17, 40, 70])
def test_a_row_has_the_same_bits_in_any_company(rows: int) -> None:
    arguments = linear_arguments(rows, 48, 96, HALF)
    norm = norm_of(arguments["x"])
    residual = randn(rows, 48, dtype=HALF)
    out, squares = nan(rows, 48, dtype=HALF), nan(rows, 3)
    ops.linear(**arguments, out=out, norm=norm, residual=residual, squares_out=squares)
    for row in {0, rows // 2, rows - 1}:
        here = slice(row, row + 1)
        alone, its_squares = nan(1, 48, dtype=HALF), nan(1, 3)
        ops.linear(
            arguments["x"][here],
            arguments["weight"],
            alone,
            norm=replace(norm, squares=norm.squares[here]),
            residual=residual[here],
            squares_out=its_squares,
        )
        assert torch.equal(alone[0], out[row])
        assert torch.equal(its_squares[0], squares[row])


@pytest.mark.parametrize("width", [48, 144, 2064])
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_normalise(width: int, dtype: torch.dtype) -> None:
    x, weight, residual = (randn(3, width, dtype=dtype, seed=seed) for seed in range(3))
    out, squares = nan(3, width, dtype=dtype), nan(3, norms.tiles(width))
    norms.normalise(x, weight[0], 1e-5, 1.0, out, residual=residual, squares_out=squares)
    truth = norms.normalise_reference(x.double(), weight[0].double(), 1e-5, 1.0, residual.double())
    assert_close(out, truth)
    assert_squares(squares, out)
    norms.normalise(x, None, 1e-5, 0.0, out)
    assert_close(out, norms.normalise_reference(x.double(), None, 1e-5, 0.0))


def test_the_reference_norms_as_the_model_does() -> None:
    x, weight = randn(4, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)
    assert torch.equal(norms.normalise_reference(x, weight, 1e-5, 0.0), expected)


def test_every_column_belongs_to_one_entry_of_squares() -> None:
    for width in (16, 576, 2048, 2064, 4096, 4112, 8192):
        block = norms.block_width(width)
        assert (norms.tiles(width) - 1) * block < width <= norms.tiles(width) * block
        assert ops.choose("linear", width, 4096).block_n % block == 0
        assert ops.choose("linear", width, 64).block_n % block == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": nan(2, 40)}, "x .* and weight"),
        ({"x": nan(2, 24), "weight": nan(32, 24)}, "multiples of 16"),
        ({"weight": nan(32, 48, dtype=HALF)}, "one dtype"),
        ({"x": nan(48, 2).T}, "contiguous"),
        ({"out": nan(2, 31)}, "out must be"),
        ({"residual": nan(3, 32)}, "residual must be"),
        ({"bias": nan(31)}, "bias must be"),
        ({"squares_out": nan(2, 3)}, "squares of 2 rows"),
        ({"norm": norms.Norm(nan(40), 1e-5, 0.0, nan(2, 3))}, "as many weights"),
        ({"norm": norms.Norm(nan(48), 1e-5, 0.0, nan(2, 2))}, "squares of 2 rows"),
        ({"squares_out": nan(2, 2), "config": ops.Config(24, 16, 2, 4)}, "tiles of 24"),
    ],
)
def test_linear_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    arguments = {"x": nan(2, 48), "weight": nan(32, 48), "out": nan(2, 32)} | change
    with pytest.raises(ValueError, match=message):
        ops.linear(**arguments)


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
        ({"q_out": nan(3, 64)}, "q_out must be"),
    ],
)
def test_qkv_linear_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    cache = {"q_out": nan(3, 128), "keys": nan(4, 64, 1, 64), "values": nan(4, 64, 1, 64)}
    with pytest.raises(ValueError, match=message):
        ops.qkv_linear(**(qkv_arguments(3, 2, 1, 64, FULL) | cache | change))


def test_gated_linear_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="unknown activation"):
        ops.gated_linear(nan(1, 16), nan(32, 16), nan(1, 16), activation="tanh")
    with pytest.raises(ValueError, match="as many rows for gate"):
        ops.gated_linear(nan(1, 16), nan(31, 16), nan(1, 16), activation="silu")
    with pytest.raises(ValueError, match="x must be|weights|out must"):
        norms.normalise(nan(2, 16), nan(15), 1e-5, 0.0, nan(2, 16))
