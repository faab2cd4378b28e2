"""First half of a gated MLP: out = act(gate) * up, with gate and up in one matmul and the activation in its epilogue.

x [R, K], weight [2I, K] (the rows of gate, then those of up), out [R, I]. With a norm, x is a scaled stream (see
`norm`). Gate, up and activation are rounded to the model's dtype where an unfused model rounds them. The sum over K
runs in one program in fixed blocks (see `gemm_common`). The second half of the MLP is a `linear`.
"""

from __future__ import annotations

import torch

from selfspec.kernels.constants import ACTIVATIONS
from selfspec.kernels.gemm_common import TileConfig, check_matmul, matmul_reference, norm_squares
from selfspec.kernels.noise import check_tensor
from selfspec.kernels.norm import Norm
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.quantized_launch import Weight, choose_weight_tile, weight_arguments, weight_settings
from selfspec.kernels.quantized_tile import prefetch_tile, weight_tile
from selfspec.kernels.triton_compat import jit, tl


def gated_linear_reference(
    x: torch.Tensor, weight: Weight, *, bias: torch.Tensor | None = None, norm: Norm | None = None, activation: str
) -> torch.Tensor:
    """act(gate) * up, [R, I], of x [R, K] and weight [2I, K]."""
    gate, up = matmul_reference(x, weight, bias, norm).to(x.dtype).chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


@jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
        return x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))  # x * 0.5 (1 + tanh(inner)), without a tanh


@jit(do_not_specialize=["row_count"])
def _gated_kernel(
    x, weight, out, bias, squares, row_count,
    x_stride, weight_stride, out_stride, squares_stride,
    N: tl.constexpr, K: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr, ACTIVATION: tl.constexpr,
    EPS: tl.constexpr, SHRINK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SLICING: tl.constexpr, FORMAT: tl.constexpr, PREFETCH: tl.constexpr, RELEASE_EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row tile, column tile): out [BM, BN / 2]; N is the number of output columns.

    Rows of gate and up alternate in the tile's BN weight rows, so that both values of an output are in one thread.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * (BN // 2)
    column = first + tl.arange(0, BN // 2)
    index = tl.arange(0, BN)
    source = tl.minimum(row, row_count - 1).to(tl.int64)
    weight_rows = tl.minimum(first + index // 2, N - 1) + (index % 2) * N
    weight_offsets = weight_rows.to(tl.int64) * weight_stride
    prefetch_tile(weight, weight_rows, weight_offsets, weight_stride, BN, PREFETCH, PDL, FORMAT)
    wait(PDL)
    if RELEASE_EARLY:
        release(PDL)
    both = weight_tile(
        x, weight, squares, row < row_count, source * x_stride, weight_rows, weight_offsets,
        source * squares_stride, weight_stride, K, T, CHUNKS, EPS, SHRINK, BM, BN, BK, SLICING, FORMAT,
    )  # fmt: skip
    if not RELEASE_EARLY:
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
    x: torch.Tensor,  # [R, K]
    weight: Weight,  # [2I, K]
    out: torch.Tensor,  # [R, I]
    *,
    bias: torch.Tensor | None = None,  # [2I]
    norm: Norm | None = None,  # x is the scaled stream
    activation: str,
    config: TileConfig | None = None,
) -> None:
    """out = act(gate) * up, with gate and up the halves of bias + x @ weight^T."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; use one of {', '.join(ACTIVATIONS)}")
    check_matmul(x, weight, bias, norm)
    if weight.shape[0] % 2:
        raise ValueError(f"weight must hold as many rows for gate as for up, got {weight.shape[0]} in all")
    rows, n = x.shape[0], weight.shape[0] // 2
    check_tensor(out, "out", (rows, n), (x.dtype,), x.device)
    config = config or choose_weight_tile("gate_up", weight, rows)
    settings = weight_settings(x, weight, norm, config)
    squares, squares_stride = norm_squares(norm)
    tensors, weight_stride = weight_arguments(weight)
    _gated_kernel[(-(-rows // settings["BM"]), -(-n // (settings["BN"] // 2)))](
        x, tensors, out, bias, squares, rows,
        x.stride(0), weight_stride, out.stride(0), squares_stride,
        N=n, ACTIVATION=activation, RELEASE_EARLY=config.release_early, **settings,
    )  # fmt: skip
