"""Launches of sampling and acceptance at real sizes, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from selfspec.kernels.accept import TOKENS, TreeTensors, accept
from selfspec.kernels.sample import SampleWorkspace, sample
from tests.launches_lm_head_topk import META, sampling_of


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """A large vocabulary; `launches_step` has a small one."""
    vocabulary, rows, sequences = 128256, 16, 4
    noise, small_top_k, processing = sampling_of(rows, sequences, vocabulary, small_top_k=True)
    _, truncation, _ = sampling_of(rows, sequences, vocabulary)
    logits = torch.empty(rows, vocabulary, device=META)
    out = torch.empty(rows, dtype=torch.int32, device=META)
    small, large = (SampleWorkspace.empty(rows, vocabulary, META, bound) for bound in (True, False))
    yield "small top-k", partial(sample, logits, out, small, noise=noise, truncation=small_top_k)
    yield (
        "any parameters",
        partial(sample, logits, out, large, noise=noise, truncation=truncation, processing=processing),
    )
    yield "greedy", partial(sample, logits, out, large)
    yield "accept", partial(_accept, None, None)
    yield "accept and count", partial(_accept, _ints(4, 49152), _ints(4, 8))


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int32, device=META)


def _accept(counts: torch.Tensor | None, stops: torch.Tensor | None) -> None:
    per_sequence = (_ints(4) for _ in range(4))
    tree = TreeTensors(_ints(4, 5), _ints(4, 5).long(), _ints(5), _ints(4, 5, 3), 1)
    accept(_ints(20), _ints(20), tree, *per_sequence, _ints(4, 3), _ints(4, TOKENS + 3), _ints(4, 99), counts, stops)
