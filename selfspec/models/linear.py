"""Linear: a weight and its bias, whatever format the weight is stored in. Also serves as embedding table and LM head.

The decoder and the exits compute with weights through `apply` and `rows` alone; the CUDA backend gives `weight` and
`bias` to its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Weight = torch.Tensor


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x @ weight.T + bias."""

    weight: Weight  # [N, K]
    bias: torch.Tensor | None = None  # [N]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N]."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight's rows that `index` [...] selects, dense: [..., K]."""
        return F.embedding(index, self.weight).to(dtype)

    def part(self, rows: slice) -> Linear:
        """Returns a range of output rows, without the bias, in the same format."""
        return Linear(self.weight[rows])
