"""The optimizer of an exit: orthogonalised momentum for matrices, Adam for vectors.

Updates tensors in place, so that a step can be captured as a CUDA graph and saved without loss.
"""

from __future__ import annotations

import torch

_BETA1, _BETA2, _EPSILON = 0.9, 0.98, 1e-8
_MOMENTUM = 0.95
_WEIGHT_DECAY = 0.01
_MATRIX_SCALE = 0.2  # makes a matrix's update as large as Adam's, so that both share one learning rate


class Optimizer:
    """Updates parameters in place from their gradients."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters = parameters
        some = next(iter(parameters.values()))
        self.learning_rate = torch.zeros((), device=some.device)
        self.count = torch.zeros((), device=some.device)
        self.momentum = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
        self.square = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items() if p.ndim == 1}

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that the next step depends on, by name; the tensors change with it."""
        state = {"count": self.count}
        for kind in ("parameters", "momentum", "square"):
            state |= {f"{kind}.{name}": tensor.detach() for name, tensor in getattr(self, kind).items()}
        return state

    @torch.no_grad()
    def step(self, gradients: dict[str, torch.Tensor], rate: torch.Tensor | None = None) -> None:
        """rate: the learning rate; None: `learning_rate`. A rate of 0 keeps the parameters as they are; gradients of 0
        do not, since orthogonalising gives any momentum the same size."""
        rate = self.learning_rate if rate is None else rate
        self.count += 1
        for name, gradient in gradients.items():
            if self.parameters[name].ndim == 1:
                self._vector_step(name, gradient, rate)
        by_shape: dict[torch.Size, list[str]] = {}
        for name, gradient in gradients.items():
            if gradient.ndim == 2:
                by_shape.setdefault(gradient.shape, []).append(name)
        for names in by_shape.values():
            self._matrix_step(names, gradients, rate)

    def _vector_step(self, name: str, gradient: torch.Tensor, rate: torch.Tensor) -> None:
        parameter, momentum, square = self.parameters[name], self.momentum[name], self.square[name]
        momentum.lerp_(gradient, 1 - _BETA1)
        square.lerp_(gradient * gradient, 1 - _BETA2)
        mean = momentum / (1 - _BETA1**self.count)
        scale = (square / (1 - _BETA2**self.count)).sqrt() + _EPSILON
        parameter.sub_(rate * mean / scale)

    def _matrix_step(self, names: list[str], gradients: dict[str, torch.Tensor], rate: torch.Tensor) -> None:
        """All matrices of one shape at once."""
        directions = []
        for name in names:
            momentum = self.momentum[name].lerp_(gradients[name], 1 - _MOMENTUM)
            directions.append(gradients[name].lerp(momentum, _MOMENTUM))
        updates = orthogonalised(torch.stack(directions))
        size = _MATRIX_SCALE * max(updates.shape[1:]) ** 0.5
        for name, update in zip(names, updates, strict=True):
            parameter = self.parameters[name]
            parameter.mul_(1 - rate * _WEIGHT_DECAY)
            parameter.sub_(rate * size * update)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices [N, m, n] with their singular values moved close to one, by an odd polynomial applied five times."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x.to(torch.bfloat16) if x.is_cuda else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    # Slope 3.4445 at zero lifts small singular values fast; the rest keeps those near one between 0.7 and 1.2.
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrices.dtype)
