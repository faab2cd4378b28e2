"""Trains the block of an exit to predict the model's distribution. The model's weights do not change.

A step runs the layers below the exit over some rows of text, then drafts from random roots in it as the engine does:
the block computes the root's state after committed text, then the next token's state from its own state at the root in
place of the model's, and so on. The loss is the cross entropy with the model's distribution over the rows of the LM
head that drafts are chosen from, plus the squared error of the states that the head reads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch

from selfspec.calibrate.corpus import Corpus, hidden_states
from selfspec.calibrate.drafting import draft_head_inputs
from selfspec.calibrate.optimizer import Optimizer
from selfspec.models.decoder import Decoder, Layer, layer_parts
from selfspec.models.linear import Linear, expand
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock


@dataclass(frozen=True)
class Recipe:
    """Amounts and shapes of the training text, and hyperparameters of the training."""

    documents: int = 1024  # of a chunk of text
    length: int = 512  # tokens of a packed row
    rows: int = 32  # of a step
    roots: int = 64  # of drafts in each row
    depths: int = 3  # of a draft
    depth_weights: tuple[float, ...] = (1.0, 0.7, 0.5)  # of the loss at each depth
    error_weight: float = 1.0  # of the states' relative squared error, beside the cross entropy in nats
    learning_rate: float = 2e-3
    warmup: int = 100  # steps until the learning rate is reached
    seed: int = 0
    compiled: bool = False  # the loss is computed by torch.compile's kernels

    @classmethod
    def for_device(cls, device: torch.device, context: int, seed: int) -> Recipe:
        """The recipe for a GPU, or one with small steps for a CPU."""
        if device.type == "cuda":
            return cls(length=min(cls.length, context), seed=seed)
        return cls(documents=32, length=min(128, context), rows=8, roots=16, warmup=20, seed=seed)

    @property
    def least_steps(self) -> int:
        """The fewest steps that are trained: half of them at the full learning rate."""
        return 2 * self.warmup

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step: a linear warm-up, times a cosine that falls to 0 at the last step."""
        warm = min(1.0, (step + 1) / self.warmup)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


class Student:
    """The trainable copy of an exit: float32 parameters, fused and cast to the model's dtype where they are used."""

    def __init__(self, model: Decoder, layer: int) -> None:
        self.model, self.layer = model, layer
        self.pieces = {name: [part.shape[0] for part in parts] for name, parts in layer_parts(model.config, "").items()}
        hidden = model.config.hidden_size
        start, first = {"norm": model.norm}, model.layers[layer].tensors()
        for name, sizes in self.pieces.items():  # the block starts as the model's layer N, all else as zeros
            pieces = expand(first[name], torch.float32).split(sizes)
            start |= {f"{name}.{index}": piece for index, piece in enumerate(pieces)}
        zeros = {
            "affine_weight": (hidden, hidden),
            "affine_bias": (hidden,),
            "feature_weight": (hidden, FEATURE_STATES * hidden),
        }
        start |= {name: model.norm.new_zeros(shape) for name, shape in zeros.items()}
        self.parameters = {name: tensor.detach().clone().float().requires_grad_() for name, tensor in start.items()}

    def exit(self) -> Exit:
        """The exit with the current parameters, in the model's dtype, differentiable."""
        own = {name: tensor.to(self.model.dtype, copy=True) for name, tensor in self.parameters.items()}
        fused = {
            name: torch.cat([own[f"{name}.{index}"] for index in range(len(sizes))])
            for name, sizes in self.pieces.items()
        }
        block = ExitBlock(Layer.of(fused), own["affine_weight"], own["affine_bias"], own["feature_weight"])
        return Exit(self.model, self.layer, own["norm"], block)


class Trainer:
    """An exit in training. Which text a step sees depends only on its number, so training continues from a checkpoint
    as if it had not stopped."""

    def __init__(
        self,
        model: Decoder,
        layer: int,
        corpus: Corpus,
        features: torch.Tensor,  # [R, T, 2 * hidden] the LM head's input, and the state after half of the layers
        head_rows: torch.Tensor,
        recipe: Recipe,
        steps: int,
    ) -> None:
        self.model, self.corpus, self.features, self.recipe, self.steps = model, corpus, features, recipe, steps
        self.head = model.head.rows(head_rows, model.dtype)  # [K, hidden]
        self.student = Student(model, layer)
        self.optimizer = Optimizer(self.student.parameters)
        self.step = 0
        self._places = _Places(corpus, recipe.depths)
        rows, device = min(recipe.rows, len(corpus)), model.device
        self._batch = Corpus(*(tensor[:rows].to(device, copy=True) for tensor in vars(corpus).values()))
        self._features = features[:rows].to(device, copy=True)
        self._roots = torch.zeros(rows, recipe.roots, dtype=torch.int64, device=device)
        # [2, depths] of the last step: the loss, and the share of positions with the model's best token.
        self.seen = torch.zeros(2, recipe.depths, device=device)
        self.left_out = torch.zeros((), device=device)  # steps with infinite gradients
        self._replay: Callable[[], None] | None = None
        self._steps_here = 0

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint; they change with the next step."""
        own = {"step": torch.tensor(self.step), "seen": self.seen, "left_out": self.left_out}
        return own | self.optimizer.state()

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        self.step = int(state["step"])
        for name, tensor in self.state().items():
            if name != "step":
                tensor.copy_(state[name])

    @torch.no_grad()
    def exit(self) -> Exit:
        """A copy of the exit with its current parameters."""
        return self.student.exit()

    def note(self) -> str:
        """Loss and agreement of the last step at the first depth, and how many steps were left out."""
        loss, agreement = self.seen[:, 0].tolist()
        left_out = int(self.left_out)
        note = f"; {left_out} steps with infinite gradients were left out" if left_out else ""
        return f"loss {loss:.3f}, agreement with the model {agreement:.2f}{note}"

    def seconds_per_step(self) -> float:
        """Measures the time of a step by training some steps; then restores the state before them."""
        before = {name: tensor.clone() for name, tensor in self.state().items()}
        warmup, timed = (6, 16) if self.model.device.type == "cuda" else (1, 2)  # the graph is captured after 3 steps
        for _ in range(warmup):
            self.train_step()
        self.seen.cpu()  # waits for the device
        started = time.perf_counter()
        for _ in range(timed):
            self.train_step()
        self.seen.cpu()
        seconds = time.perf_counter() - started
        self.restore(before)
        return seconds / timed

    def train_step(self) -> None:
        self._load_batch()
        self.optimizer.learning_rate.fill_(self.recipe.rate_at(self.step, self.steps))
        if self._replay is None and self._steps_here >= 3:  # libraries allocate their workspaces in the first steps
            self._replay = captured(self._compute, self.model.device)
        (self._replay or self._compute)()
        self.step += 1
        self._steps_here += 1

    def _load_batch(self) -> None:
        """Copies this step's rows of text, and draws roots in them; both depend only on the step's number. Waits for
        the device only where features are in host memory, so that the host prepares a step while another runs."""
        random = np.random.default_rng((self.recipe.seed, self.step))
        rows = self._places.some_rows(random, len(self._batch))
        self._roots.copy_(self._sent(self._places.some(random, rows, self.recipe.roots)))
        on_host, on_device = torch.from_numpy(rows), self._sent(rows)
        copies = [(static, getattr(self.corpus, name)) for name, static in vars(self._batch).items()]
        for static, source in [*copies, (self._features, self.features)]:
            static.copy_(source[on_host if source.device.type == "cpu" else on_device], non_blocking=True)

    def _sent(self, values: np.ndarray) -> torch.Tensor:
        """Copies values to the device without waiting for it."""
        tensor, device = torch.from_numpy(values), self.model.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def _compute(self) -> None:
        names, tensors = zip(*self.student.parameters.items(), strict=True)
        gradients = torch.autograd.grad(self._loss(), tensors)
        finite = torch.stack(torch._foreach_norm(gradients)).isfinite().all()  # else the exit stays as it is
        self.left_out += ~finite
        usable = {name: torch.where(finite, tensor, 0) for name, tensor in zip(names, gradients, strict=True)}
        self.optimizer.step(usable, torch.where(finite, self.optimizer.learning_rate, 0))

    def _loss(self) -> torch.Tensor:
        recipe, states = self.recipe, hidden_states(self.model, self._batch)
        with torch.no_grad():
            below = next(islice(states, self.student.layer, None))
        drafted = draft_head_inputs(self.student.exit(), below, self._features, self._batch, self._roots, recipe.depths)
        compute, cap = fused_head_loss() if recipe.compiled else head_loss, self.model.config.logit_softcap
        total = torch.zeros((), device=self.model.device)
        for depth in range(recipe.depths):
            wanted = self._wanted(depth)
            head_input = drafted[depth].flatten(0, 1)
            loss, right = HeadLoss.apply(head_input, Linear(self.head).apply(wanted), self.head, cap, compute)
            error = relative_error(head_input, wanted)
            total = total + recipe.depth_weights[depth] * (loss + recipe.error_weight * error)
            self.seen[0, depth] = loss.detach()
            self.seen[1, depth] = right
        return total

    def _wanted(self, depth: int) -> torch.Tensor:
        """The model's LM head input `depth` tokens after each root: [B * n, hidden]."""
        hidden = self.model.config.hidden_size  # `features` begin with the LM head's input
        at = (self._roots + depth)[..., None].expand(-1, -1, hidden)
        return self._features[..., :hidden].gather(1, at).flatten(0, 1)


def relative_error(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The squared error of states over the mean square of the wanted ones."""
    return (states.float() - wanted.float()).square().mean() / wanted.float().square().mean()


def head_loss(
    logits: torch.Tensor, goal: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy of the distributions of logits with those of `goal`, both [P, K] before the soft cap; the share of
    positions with the goal's best token; and the gradient by the logits, in their dtype."""
    capped, wanted = logits.float(), goal.float()
    if cap is not None:
        capped, wanted = torch.tanh(capped / cap) * cap, torch.tanh(wanted / cap) * cap
    right = (capped.argmax(-1) == wanted.argmax(-1)).float().mean()
    wanted, log_q = wanted.softmax(-1), capped.log_softmax(-1)
    loss = -(wanted * log_q).sum(-1).mean()
    gradient = log_q.exp().sub_(wanted).div_(len(logits))
    if cap is not None:
        gradient = gradient * (1 - (capped / cap) ** 2)
    return loss, right, gradient.to(logits.dtype)


@cache
def fused_head_loss() -> Callable[..., Any]:
    """`head_loss` in a few kernels. Without it, reading and writing logits takes a third of a training step."""
    return torch.compile(head_loss, dynamic=False)


class HeadLoss(torch.autograd.Function):
    """The loss of the head's input [P, hidden], given the goal's logits [P, K]. Forms the gradient in the forward
    pass, so that no logits are kept: they are the largest tensors of a step."""

    @staticmethod
    def forward(
        ctx: Any,
        head_input: torch.Tensor,
        goal: torch.Tensor,
        head: torch.Tensor,
        cap: float | None,
        compute: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = head_loss,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # the loss, and the share of positions with the goal's best token
        loss, right, gradient = compute(Linear(head).apply(head_input), goal, cap)
        ctx.save_for_backward(gradient @ head)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_input,) = ctx.saved_tensors
        return of_input * gradients[0].to(of_input.dtype), None, None, None, None


class _Places:
    """The possible roots of drafts: positions after which the model chose as many tokens as a draft is deep."""

    def __init__(self, corpus: Corpus, depths: int) -> None:
        predicts = corpus.predicts.cpu().numpy()
        whole = np.logical_and.reduce([np.roll(predicts, -depth, axis=1) for depth in range(depths)])
        whole[:, predicts.shape[1] - depths :] = False
        self.counts = whole.sum(1)
        if not self.counts.any():
            raise ValueError("the training text is too short to draft in: write more with --tokens or --minutes")
        self.rows = np.flatnonzero(self.counts)
        self.starts = np.concatenate(([0], self.counts.cumsum()[:-1]))
        self.places = np.nonzero(whole)[1]

    def some_rows(self, random: np.random.Generator, count: int) -> np.ndarray:
        """`count` rows with roots, different ones while there are enough."""
        return np.sort(np.resize(random.permutation(self.rows), count))

    def some(self, random: np.random.Generator, rows: np.ndarray, count: int) -> np.ndarray:
        """`count` roots of each row, drawn with replacement: [rows, count]."""
        drawn = (random.random((len(rows), count)) * self.counts[rows][:, None]).astype(np.int64)
        return self.places[self.starts[rows][:, None] + drawn]


def captured(compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns a function that replays the computation on the same tensors in one CUDA graph, since launching small
    kernels from Python dominates; without a GPU, the computation itself. It must have run before; capturing does not
    run it."""
    if device.type != "cuda":
        return compute
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        compute()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay
