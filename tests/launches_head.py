"""Launches of the head's kernels at the sizes they are meant for, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from selfspec.kernels.best import Scores, top_merge
from selfspec.kernels.draw import Noise
from selfspec.kernels.head import head_logits, head_top

SIZES = {"smol": (49152, 576), "8b": (128256, 4096)}


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _noise(rows: int) -> Noise:
    seeds, copies = _empty(1, dtype=torch.int64), _empty(1, dtype=torch.int64)
    return Noise(seeds, copies, _empty(rows, dtype=torch.int32), _empty(1, dtype=torch.float32))


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for model, (vocabulary, hidden) in SIZES.items():
        for rows in (1, 64) if model == "smol" else (1, 32, 64):
            x, weight = _empty(rows, hidden), _empty(vocabulary, hidden)
            scores, many = (Scores.empty(rows, vocabulary, width, "meta") for width in (1, 20))
            noise, logits = _noise(rows), _empty(rows, vocabulary, dtype=torch.float32)
            at = f"{model} {rows} rows"
            yield f"greedy {at}", lambda x=x, weight=weight, scores=scores: head_top(x, weight, scores)
            yield f"sampled {at}", lambda x=x, w=weight, s=scores, n=noise: head_top(x, w, s, noise=n)
            yield f"logits {at}", lambda x=x, weight=weight, logits=logits: head_logits(x, weight, logits)
            yield f"scores {at}", lambda x=x, w=weight, s=many, n=noise: head_top(x, w, s, noise=n)
    yield from _trimmed()
    x, weight, scores = _empty(3, 576, dtype=torch.float32), _empty(1000, 576, dtype=torch.float32), None
    scores = Scores.empty(3, 1000, 1, "meta")
    yield "float32", lambda: head_top(x, weight, scores, softcap=30.0)


def _trimmed() -> Iterator[tuple[str, Callable[[], object]]]:
    count, rows = _empty(1, dtype=torch.int32), _empty(15872, dtype=torch.int32)
    x, whole, part, noise = _empty(16, 576), _empty(49152, 576), _empty(15872, 576), _noise(16)
    scores = Scores.empty(16, 15872, 20, "meta")
    yield "trimmed copy", lambda: head_top(x, part, scores, rows=rows, count=count, noise=noise)
    yield "trimmed gather", lambda: head_top(x, whole, scores, rows=rows, gather=True, noise=noise)
    for columns, width in ((15872, 20), (128256, 1), (128256, 64), (128256, 256)):
        found = Scores.empty(16, columns, width, "meta")
        out = _empty(16, width, dtype=torch.int64)
        yield f"merge {columns} {width}", lambda found=found, out=out: top_merge(found, out)
