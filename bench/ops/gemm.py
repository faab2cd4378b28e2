"""The fused matmuls and the norm at the shapes of two models; the library is cuBLAS without epilogue."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.ops import Case
from selfspec.kernels.gate_up_gemm import gated_linear, gated_linear_reference
from selfspec.kernels.gemm import linear, linear_reference
from selfspec.kernels.norm import NextNorm, Norm, rms_norm, squares_per_row, squares_reference
from selfspec.kernels.qkv_rope_gemm import qkv_linear

# hidden, intermediate, query heads, key heads, head size
MODELS = {"SmolLM2-135M": (576, 1536, 9, 3, 64), "Llama-8B": (4096, 14336, 32, 8, 128)}
ROWS = (1, 16, 64)
COPIES_BYTES = 200 << 20  # bytes of copies of a weight, used in turn, so that L2 (50 MB on an H200) never holds them


def cases(device: torch.device) -> list[Case]:
    found = []
    for model, shape in MODELS.items():
        for rows in ROWS:
            hidden, inner, heads, _, dim = shape
            found.append(_qkv_case(f"{model} qkv, {rows} rows", rows, shape, device))
            found.append(_linear_case(f"{model} out, {rows} rows", rows, hidden, heads * dim, device))
            found.append(_gated_case(f"{model} gate and up, {rows} rows", rows, inner, hidden, device))
            found.append(_linear_case(f"{model} down, {rows} rows", rows, hidden, inner, device))
        found.append(_normalise_case(f"{model} normalise, 16 rows", 16, shape[0], device))
    return found


class _Weights:
    """Copies of a weight, used in turn, so that each launch reads device memory."""

    def __init__(self, n: int, k: int, device: torch.device) -> None:
        count = max(1, min(64, COPIES_BYTES // (2 * n * k)))
        self.copies = [_randn(n, k, device=device, scale=k**-0.5) for _ in range(count)]
        self.turn = 0

    def next(self) -> torch.Tensor:
        self.turn += 1
        return self.copies[self.turn % len(self.copies)]


def _randn(*shape: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=device) * scale).bfloat16()


def _norm(x: torch.Tensor) -> Norm:
    return Norm(1e-5, squares_reference(x))


def _next_norm(out: torch.Tensor) -> NextNorm:
    rows, width = out.shape
    squares = torch.empty(rows, squares_per_row(width), device=out.device)
    return NextNorm(_randn(width, device=out.device), 0.0, squares, torch.empty_like(out))


def _exact(norm: Norm) -> Norm:
    return Norm(norm.eps, norm.squares.double())


def _linear_case(name: str, rows: int, n: int, k: int, device: torch.device) -> Case:
    weights, x = _Weights(n, k, device), _randn(rows, k, device=device)
    residual, out = _randn(rows, n, device=device), _randn(rows, n, device=device)
    next_norm = _next_norm(out)

    def run() -> None:
        linear(x, weights.next(), out, residual=residual, next_norm=next_norm)

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        weight = weights.copies[0]
        linear(x, weight, out, residual=residual, next_norm=next_norm)
        return out, linear_reference(x.double(), weight.double(), residual=residual.double())

    return Case(name, run, 2 * (n * k + rows * (k + 3 * n)), reference, lambda: F.linear(x, weights.next()))


def _gated_case(name: str, rows: int, inner: int, hidden: int, device: torch.device) -> Case:
    weights, x = _Weights(2 * inner, hidden, device), _randn(rows, hidden, device=device)
    norm, out = _norm(x), _randn(rows, inner, device=device)

    def run() -> None:
        gated_linear(x, weights.next(), out, norm=norm, activation="silu")

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        weight = weights.copies[0]
        gated_linear(x, weight, out, norm=norm, activation="silu")
        return out, gated_linear_reference(x.double(), weight.double(), norm=_exact(norm), activation="silu")

    return Case(
        name, run, 2 * (2 * inner * hidden + rows * (hidden + inner)), reference, lambda: F.linear(x, weights.next())
    )


def _qkv_case(name: str, rows: int, shape: tuple[int, int, int, int, int], device: torch.device) -> Case:
    hidden, _, heads, kv_heads, dim = shape
    n = (heads + 2 * kv_heads) * dim
    weights, x = _Weights(n, hidden, device), _randn(rows, hidden, device=device)
    norm, q = _norm(x), _randn(rows, heads * dim, device=device)
    keys, values = _randn(4, 64, kv_heads, dim, device=device), _randn(4, 64, kv_heads, dim, device=device)
    cos, sin = torch.ones(rows, dim // 2, device=device), torch.zeros(rows, dim // 2, device=device)  # no rotation
    slots = torch.arange(rows, device=device)

    def launch(weight: torch.Tensor) -> None:
        qkv_linear(x, weight, q, keys, values, norm=norm, cos=cos, sin=sin, slots=slots)

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        launch(weights.copies[0])
        truth = linear_reference(x.double(), weights.copies[0].double(), norm=_exact(norm))
        return torch.cat((q, keys.view(-1, kv_heads * dim)[:rows], values.view(-1, kv_heads * dim)[:rows]), 1), truth

    return Case(
        name,
        lambda: launch(weights.next()),
        2 * (n * hidden + rows * (hidden + n)),
        reference,
        lambda: F.linear(x, weights.next()),
    )


def _normalise_case(name: str, rows: int, hidden: int, device: torch.device) -> Case:
    x, weight = _randn(rows, hidden, device=device), _randn(hidden, device=device)
    out = torch.empty_like(x)
    next_norm = _next_norm(out)
    return Case(
        name,
        lambda: rms_norm(x, weight, 1e-5, 0.0, out, residual=x, next_norm=next_norm),
        8 * rows * hidden,
        None,
        lambda: F.rms_norm(x, (hidden,), weight, 1e-5),
    )
