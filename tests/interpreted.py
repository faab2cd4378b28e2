"""One tiny model behind both backends, for tests of the CUDA backend in Triton's interpreter.

Batches are driven step by step, without the scheduler's thread. On a CPU a CUDA backend does not overlap steps by
itself; `overlaps` makes it launch a step before it reads the one before, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from selfspec.backends.base import Backend
from selfspec.backends.cuda.backend import CudaBackend
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.torch_backend import TorchBackend
from selfspec.batch import Batch
from selfspec.batch_scoring import BatchScoring
from selfspec.cache.kv_cache import Cache, flat_slot
from selfspec.drafters import Drafter, Drafters
from selfspec.governor.governor import Governor
from selfspec.governor.rules import Mode, Policy, Rules
from selfspec.kernels.triton_compat import triton
from selfspec.metrics import Metrics
from selfspec.models import loading
from selfspec.models.decoder import Decoder
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request, Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import NONE, Plan
from tests.profiles import random_exit, random_rows
from tests.tiny import tiny_model

ONLY_INTERPRETED = pytest.mark.skipif(
    triton is None or torch.cuda.is_available(), reason="in Triton's interpreter, where there is no GPU"
)
LAYER = 1  # exit layer N of the tests' exits: half of the model
CONTEXT = 192  # tokens per sequence at most; every further range of attention is one more interpreted program
SLOTS = 4  # sequences of a batch at most


@cache
@torch.inference_mode(False)
def decoder(family: str = "llama") -> Decoder:
    """A model of two layers in float32, whose logits differ clearly."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": CONTEXT}
    return loading.adopt(tiny_model(family, dtype=torch.float32, **sizes))


@cache
def trained_exit(family: str = "llama", layer: int = LAYER) -> Exit:
    """An exit with a block that recalls, a norm, and a trimmed head."""
    return replace(random_exit(decoder(family), layer), head_rows=random_rows(40))


@cache
def accurate_exit() -> Exit:
    """An exit so close to the model that most drafts are accepted; its head has 85 of 101 tokens."""
    return replace(random_exit(decoder(), LAYER, scale=0.01), head_rows=random_rows(85))


def new_cache(model: Decoder, pages: int = 32) -> Cache:
    return Cache(model.config, model.device, model.dtype, pages)


def new_graphs(family: str = "llama", pages: int = 32) -> Graphs:
    model = decoder(family)
    return Graphs(model, new_cache(model, pages), CONTEXT, SLOTS)


def cuda_backend(graphs: Graphs, overlaps: bool = False) -> CudaBackend:
    backend = CudaBackend(graphs)
    backend.overlaps = overlaps
    return backend


def torch_backend(family: str = "llama") -> TorchBackend:
    return TorchBackend(decoder(family), new_cache(decoder(family)))


class RecordedScoring(BatchScoring):
    """Keeps the exit scores of every sequence; updates no skill."""

    def __init__(self, backend: Backend, drafters: Drafters) -> None:
        super().__init__(backend, drafters)
        self.scores: dict[Sequence, list[bool]] = {}

    def apply_scores(self, governor: Governor | None) -> None:
        self.scores |= self._backend.exit_scores()


class ScriptedBatch(Batch):
    """Its plans come from `plan`, which a test sets between steps; sequences' own rules still decide for whom it
    drafts."""

    def __init__(self, backend: Backend, exit: Exit | None) -> None:
        super().__init__(backend, exit, Drafters(backend.model, None, lambda *_: torch.empty(0)), Metrics())
        self.plan = NONE
        self.scoring = scoring = RecordedScoring(backend, self.drafters)
        self.scores = scoring.scores

    def _choose_plan(self) -> tuple[Plan, str | None]:
        rule = self._rule()
        return (self.plan, None) if rule is None else (NONE, rule)

    def admit(self, sequences: Seq[Sequence]) -> None:
        """Prefills sequences and lets them join together."""
        waiting = list(sequences)
        while waiting:
            ready = self.backend.prefill(waiting, self.base_exit)
            waiting = [sequence for sequence in waiting if sequence not in ready]
        self.join(sequences)

    def fill_exit(self, score: bool = False) -> None:
        """Fills the exit's KV now; with `score` also scores the exit."""
        assert self.exit is not None
        self.scoring.fill_exit(self.running, self.exit, score, self.unread[-1] if self.unread else None)

    def dismiss(self, sequence: Sequence) -> None:
        """Removes a sequence, finished or not, and frees its pages."""
        self.leave([sequence])
        self.backend.cache.close(sequence.kv)
        sequence.finish_reason = sequence.finish_reason or "cancelled"

    def dismiss_finished(self) -> None:
        for sequence in [sequence for sequence in self.running if sequence.is_finished]:
            self.dismiss(sequence)

    def run(self, plans: Iterable[Plan] = (), after_step: Callable[[], None] = lambda: None) -> None:
        """Steps until every sequence has finished; takes the plans in turn, the last one for all further steps."""
        left = list(plans)
        while self.running:
            self.plan = left.pop(0) if len(left) > 1 else left[0] if left else NONE
            self.step()
            after_step()
            self.dismiss_finished()


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(3, 100, (length,), generator=generator).tolist()


def sequence_of(
    prompt: Seq[int],
    new_tokens: int,
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    exit: Exit | None = None,
    mode: Mode = "force",
    processors: Seq[Callable] = (),
    criteria: Seq[Callable] = (),
) -> Sequence:
    """One sequence in a request of its own; with an exit it drafts, unless the mode is False."""
    params = params or SamplingParams()
    sequence = Sequence(list(prompt), seed, 0, len(prompt) + new_tokens, params)
    policy = Policy(Rules(), params, mode=mode, plan=Plan.parse("chain:1") if mode == "force" else None)
    drafter = None if exit is None or mode is False else Drafter(exit)
    Request([sequence], processors=tuple(processors), criteria=tuple(criteria), policy=policy, drafter=drafter)
    return sequence


@torch.inference_mode()
def plain_tokens(sequence: Sequence, family: str = "llama", processors: Seq[Callable] = ()) -> list[int]:
    """The tokens of the reference backend for the same prompt, parameters and seed, alone and without an exit."""
    alone = sequence_of(
        sequence.prompt, sequence.max_length - len(sequence.prompt), sequence.params, seed=sequence.seed,
        processors=processors,
    )  # fmt: skip
    batch = ScriptedBatch(torch_backend(family), None)
    batch.admit([alone])
    batch.run()
    return alone.tokens


def exit_keys(cache: Cache, sequence: Sequence, length: int | None = None) -> torch.Tensor:
    """The exit block's keys of a sequence's committed positions, [positions, Hkv, D]."""
    count = sequence.kv.length if length is None else length
    slots = [flat_slot(sequence.kv, slot) for slot in range(count)]
    return cache.keys[cache.exit_layer_index].flatten(0, 1)[slots].clone()
