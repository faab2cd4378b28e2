"""Trains the blocks of several exits at once to read what the whole model's head reads, the model itself untouched.

The teacher's states are given. A step runs the layers below the exits over some rows of text, then rehearses drafts
from random places of it, the roots: a block reads the root with verified text behind it, then the token after it with
its own last state in place of the model's, and so on. All go through the rows of the head that drafts may use; the loss
is the divergence from the model's own distribution there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from selfspec.calibrate.corpus import Corpus, hidden_states
from selfspec.calibrate.graphs import captured
from selfspec.calibrate.optimizer import Optimizer
from selfspec.calibrate.rehearsal import drafted_reads
from selfspec.models.decoder import Decoder, Layer, layer_parts
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock


@dataclass(frozen=True)
class Recipe:
    """How exits are trained."""

    length: int = 512  # tokens of a packed row
    rows: int = 32  # rows of a step
    roots: int = 64  # drafts rehearsed in each row
    depths: int = 3  # how deep drafts are rehearsed
    depth_weights: tuple[float, ...] = (1.0, 0.7, 0.5)
    learning_rate: float = 2e-3
    warmup: int = 100
    seed: int = 0

    @classmethod
    def for_device(cls, device: torch.device, context: int, seed: int) -> Recipe:
        """The recipe as it is on a GPU; small steps elsewhere, where it is for trying things out."""
        if device.type == "cuda":
            return cls(length=min(cls.length, context), seed=seed)
        return cls(length=min(128, context), rows=8, roots=16, warmup=20, seed=seed)

    def rate_at(self, step: int, steps: int) -> float:
        """Linear warm-up, then a cosine to nothing."""
        warm = min(1.0, (step + 1) / self.warmup)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


class Student:
    """The trainable copy of one exit: float32 parameters, fused and cast where they are used."""

    def __init__(self, model: Decoder, layer: int) -> None:
        self.model, self.layer = model, layer
        self.spec = model.config.layers[layer]
        self.pieces = {name: [part.shape[0] for part in parts] for name, parts in layer_parts(model.config, "").items()}
        hidden = model.config.hidden_size
        start = {"norm": model.norm}
        for name, sizes in self.pieces.items():  # a decoder layer as the model has it here; the rest starts as nothing
            tensor = getattr(model.layers[layer], name)
            start |= {f"{name}.{index}": piece for index, piece in enumerate(tensor.split(sizes))}
        zeros = {"affine_weight": (hidden, hidden), "affine_bias": (hidden,), "recall": (hidden, FEATURE_STATES * hidden)}
        start |= {name: model.norm.new_zeros(shape) for name, shape in zeros.items()}
        self.parameters = {name: tensor.detach().clone().float().requires_grad_() for name, tensor in start.items()}

    def exit(self) -> Exit:
        """The exit as it stands, in the model's dtype, differentiable."""
        own = {name: tensor.to(self.model.dtype, copy=True) for name, tensor in self.parameters.items()}
        fused = {
            name: torch.cat([own[f"{name}.{index}"] for index in range(len(sizes))])
            for name, sizes in self.pieces.items()
        }
        block = ExitBlock(Layer(**fused), own["affine_weight"], own["affine_bias"], own["recall"])
        return Exit(self.model, self.layer, own["norm"], block)


class Trainer:
    """Several exits of one model in training. A step is a function of its number, so a stopped run can go on."""

    def __init__(
        self,
        model: Decoder,
        layers: list[int],
        corpus: Corpus,
        recalled: torch.Tensor,  # [R, T, 2 * hidden] the teacher: what the model leaves to recall at each token
        head_rows: torch.Tensor,
        recipe: Recipe,
        steps: int,
    ) -> None:
        self.model, self.corpus, self.recalled, self.recipe, self.steps = model, corpus, recalled, recipe, steps
        self.head = model.head[head_rows]  # [K, hidden]
        self.students = [Student(model, layer) for layer in sorted(layers)]
        named = {f"{s.layer}.{name}": tensor for s in self.students for name, tensor in s.parameters.items()}
        self.optimizer = Optimizer(named)
        self.step = 0
        self._places = _Places(corpus, recipe.depths)
        rows, device = min(recipe.rows, len(corpus)), model.device
        self._batch = Corpus(*(tensor[:rows].to(device, copy=True) for tensor in vars(corpus).values()))
        self._recalled = recalled[:rows].to(device, copy=True)
        self._roots = torch.zeros(rows, recipe.roots, dtype=torch.int64, device=device)
        # What the last step saw, for each exit and depth: loss and share of positions with the model's best token.
        self.seen = torch.zeros(2, len(self.students), recipe.depths, device=device)
        self.left_out = torch.zeros(len(self.students), device=device)  # steps of each exit whose gradients overflowed
        self._replay: Callable[[], None] | None = None
        self._steps_here = 0

    def state(self) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(self.step), "left_out": self.left_out, **self.optimizer.state()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        self.step = int(state["step"])
        self.left_out.copy_(state.get("left_out", self.left_out))
        for name, tensor in self.optimizer.state().items():
            tensor.copy_(state[name])

    @torch.no_grad()
    def exits(self) -> list[Exit]:
        """The exits as they stand, free of the trainer."""
        return [student.exit() for student in self.students]

    def seconds_per_step(self, steps: int = 16) -> float:
        """How long a step takes, found by taking some; afterwards everything is as before."""
        before = {name: tensor.clone() for name, tensor in self.state().items()}
        for _ in range(6):
            self.train_step()
        self.seen.cpu()  # waits for the device
        began = time.perf_counter()
        for _ in range(steps):
            self.train_step()
        self.seen.cpu()
        took = time.perf_counter() - began
        self.restore(before)
        return took / steps

    def train_step(self) -> None:
        self._load_batch()
        self.optimizer.learning_rate.fill_(self.recipe.rate_at(self.step, self.steps))
        if self._replay is None and self._steps_here >= 3:  # after a few to warm up
            self._replay = captured(self._compute, self.model.device)
        (self._replay or self._compute)()
        self.step += 1
        self._steps_here += 1

    def _load_batch(self) -> None:
        """The rows and positions of this step, from its number alone."""
        random = np.random.default_rng((self.recipe.seed, self.step))
        rows = self._places.some_rows(random, len(self._batch))
        roots = self._places.some(random, rows, self.recipe.roots)
        index = torch.from_numpy(rows)
        for name, static in vars(self._batch).items():
            static.copy_(getattr(self.corpus, name)[index.to(self.corpus.tokens.device)], non_blocking=True)
        self._recalled.copy_(self.recalled[index.to(self.recalled.device)], non_blocking=True)
        self._roots.copy_(torch.from_numpy(roots), non_blocking=True)

    def _compute(self) -> None:
        names, tensors = zip(*self.optimizer.parameters.items(), strict=True)
        gradients = dict(zip(names, torch.autograd.grad(self._loss(), tensors), strict=True))
        rates: dict[str, torch.Tensor] = {}
        for index, student in enumerate(self.students):  # one bad step must not spoil all later ones
            own = [f"{student.layer}.{name}" for name in student.parameters]
            finite = torch.stack(torch._foreach_norm([gradients[name] for name in own])).isfinite().all()
            gradients |= {name: torch.where(finite, gradients[name], 0) for name in own}
            rates |= dict.fromkeys(own, torch.where(finite, self.optimizer.learning_rate, 0))
            self.left_out[index] += ~finite
        self.optimizer.step(gradients, rates)

    def _loss(self) -> torch.Tensor:
        recipe, states = self.recipe, hidden_states(self.model, self._batch)
        with torch.no_grad():
            below = [next(states) for _ in range(self.students[-1].layer + 1)]
        drafts = [
            drafted_reads(student.exit(), below[student.layer], self._recalled, self._batch, self._roots, recipe.depths)
            for student in self.students
        ]
        total = torch.zeros((), device=self.model.device)
        for depth in range(recipe.depths):
            target = self._target(depth)
            best = target.argmax(-1)
            for index, drafted in enumerate(drafts):
                loss, right = HeadLoss.apply(drafted[depth].flatten(0, 1), self.head, target, best, self.model)
                total = total + recipe.depth_weights[depth] * loss
                self.seen[0, index, depth] = loss.detach()
                self.seen[1, index, depth] = right
        return total

    @torch.no_grad()
    def _target(self, depth: int) -> torch.Tensor:
        """The model's own distribution over the head's rows, so many tokens after each root: [B * n, K]."""
        hidden = self.model.config.hidden_size  # the first of what is recalled is what the head read
        at = (self._roots + depth)[..., None].expand(-1, -1, hidden)
        return self.model.project(self._recalled[..., :hidden].gather(1, at).flatten(0, 1), self.head).softmax(-1)


class HeadLoss(torch.autograd.Function):
    """Cross entropy of what a head makes of `read` against a target distribution. The gradient is formed at once, so
    that no logits are kept: they are the largest tensors of a step by far."""

    @staticmethod
    def forward(
        ctx: Any, read: torch.Tensor, head: torch.Tensor, target: torch.Tensor, best: torch.Tensor, model: Decoder
    ) -> tuple[torch.Tensor, torch.Tensor]:  # the loss, and the share of places with the target's best token
        logits = model.project(read, head)  # [P, K]
        log_q = logits.log_softmax(-1)
        loss = -(target * log_q).sum(-1).mean()
        right = (logits.argmax(-1) == best).float().mean()
        gradient = log_q.exp_().sub_(target).div_(len(read))
        cap = model.config.logit_softcap
        if cap is not None:
            gradient = gradient * (1 - (logits / cap) ** 2)
        ctx.save_for_backward(gradient.to(read.dtype) @ head)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_read,) = ctx.saved_tensors
        return of_read * gradients[0].to(of_read.dtype), None, None, None, None


class _Places:
    """Where drafts can be rehearsed: the places from which several tokens in a row are the model's own."""

    def __init__(self, corpus: Corpus, depths: int) -> None:
        predicts = corpus.predicts.cpu().numpy()
        whole = np.logical_and.reduce([np.roll(predicts, -depth, axis=1) for depth in range(depths)])
        whole[:, predicts.shape[1] - depths :] = False
        self.counts = whole.sum(1)
        if not self.counts.any():
            raise ValueError("the training text has no place to draft from: it is too short")
        self.rows = np.flatnonzero(self.counts)
        self.starts = np.concatenate(([0], self.counts.cumsum()[:-1]))
        self.places = np.nonzero(whole)[1]

    def some_rows(self, random: np.random.Generator, count: int) -> np.ndarray:
        """`count` different rows that have places, as far as there are so many."""
        return np.sort(np.resize(random.permutation(self.rows), count))

    def some(self, random: np.random.Generator, rows: np.ndarray, count: int) -> np.ndarray:
        """`count` places of each row, drawn with replacement: [rows, count]."""
        drawn = (random.random((len(rows), count)) * self.counts[rows][:, None]).astype(np.int64)
        return self.places[self.starts[rows][:, None] + drawn]
