"""The first half of a gated MLP: gate, up and the activation between them in one launch. The loop itself is in
`product`; the second half is a `linear`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from selfspec.kernels.gemm_common import (
    Config,
    check_product,
    check_rows,
    choose,
    launch_settings,
    norm_squares,
    product,
    product_reference,
)
from selfspec.kernels.norm import Norm
from selfspec.kernels.pdl import fetch, release, wait
from selfspec.kernels.triton_compat import jit, tl

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gated_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: str,
) -> torch.Tensor:
    """act(gate) * up, [R, I], where weight [2I, K] holds the rows of gate, then those of up."""
    gate, up = product_reference(x, weight, bias, norm).to(x.dtype).chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


@jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))  # 0.5 (1 + tanh(u)) without a tanh


@jit(do_not_specialize=["row_count"])
def _gated_kernel(
    x, weight, out, bias, squares, row_count,
    x_stride, weight_stride, out_stride, squares_stride,
    N: tl.constexpr, K: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr, ACTIVATION: tl.constexpr,
    EPS: tl.constexpr, SHRINK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N counts outputs. Gate and up rows alternate in the tile, so both values of an output meet in one thread."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * (BN // 2)
    column = first + tl.arange(0, BN // 2)
    turn = tl.arange(0, BN)
    source = tl.minimum(row, row_count - 1).to(tl.int64)
    weight_rows = (tl.minimum(first + turn // 2, N - 1) + (turn % 2) * N).to(tl.int64) * weight_stride
    fetch(weight, weight_rows, BN, AHEAD, PDL)
    wait(PDL)
    if EARLY:
        release(PDL)
    both = product(
        x, weight, squares, row < row_count, source * x_stride, weight_rows, source * squares_stride,
        K, T, CHUNKS, EPS, SHRINK, BM, BN, BK,
    )  # fmt: skip
    if not EARLY:
        release(PDL)
    gate, up = tl.split(tl.reshape(both, (BM, BN // 2, 2)))
    if bias is not None:
        gate += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    active = _activate(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    tl.store(
        out + row.to(tl.int64)[:, None] * out_stride + column[None, :],
        (active * up.to(dtype).to(tl.float32)).to(dtype),
        mask=(row < row_count)[:, None] & (column < N)[None, :],
    )


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: str,
    config: Config | None = None,
) -> None:
    """out [R, I] = act(gate) * up, with gate and up the halves of bias + x [R, K] @ weight [2I, K]^T. With a norm x
    is the scaled stream."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; there are {', '.join(_ACTIVATIONS)}")
    check_product(x, weight, bias, norm)
    if weight.shape[0] % 2:
        raise ValueError(f"weight must hold as many rows for gate as for up, got {weight.shape[0]} in all")
    n = weight.shape[0] // 2
    check_rows("out", out, x, n)
    config = config or choose("gated", 2 * n, x.shape[1], x.shape[0])
    squares, squares_stride = norm_squares(norm)
    shape, options = launch_settings(x, weight, norm, config)
    _gated_kernel[(-(-x.shape[0] // shape["BM"]), -(-n // (shape["BN"] // 2)))](
        x, weight, out, bias, squares, x.shape[0],
        x.stride(0), weight.stride(0), out.stride(0), squares_stride,
        N=n, ACTIVATION=activation, EARLY=config.early, **shape, **options,
    )  # fmt: skip
