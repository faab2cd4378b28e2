"""Launches of the head's kernels at the sizes they are meant for, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from selfspec.kernels.lm_head_topk import head_logits, head_top
from selfspec.kernels.noise import Noise
from selfspec.kernels.topk import Scores, top_merge

SIZES = {"smol": (49152, 576), "8b": (128256, 4096)}


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _noise(rows: int) -> Noise:
    seeds, copies = _empty(1, dtype=torch.int64), _empty(1, dtype=torch.int64)
    return Noise(seeds, copies, _empty(rows, dtype=torch.int32), _empty(1, dtype=torch.float32))


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for model, rows, names in (
        ("smol", 1, "greedy sampled"),
        ("smol", 64, "sampled logits"),
        ("8b", 1, "sampled"),
        ("8b", 32, "greedy"),
        ("8b", 64, "greedy scores"),
    ):
        vocabulary, hidden = SIZES[model]
        x, weight, noise = _empty(rows, hidden), _empty(vocabulary, hidden), _noise(rows)
        one, many = (Scores.empty(rows, vocabulary, width, "meta") for width in (1, 20))
        logits = _empty(rows, vocabulary, dtype=torch.float32)
        calls: dict[str, Callable[[], object]] = {
            "greedy": partial(head_top, x, weight, one),
            "sampled": partial(head_top, x, weight, one, noise=noise),
            "scores": partial(head_top, x, weight, many, noise=noise),
            "logits": partial(head_logits, x, weight, logits),
        }
        yield from ((f"{name}, {model}, {rows} rows", calls[name]) for name in names.split())
    yield from _trimmed()
    x, weight = _empty(3, 576, dtype=torch.float32), _empty(1000, 576, dtype=torch.float32)
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
        yield f"merge {columns} {width}", partial(top_merge, found, out)
