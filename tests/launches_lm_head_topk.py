"""Launches of the LM head and of top-k at real sizes, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_scores
from selfspec.kernels.logits_processing import Masks, Processing
from selfspec.kernels.noise import Noise, Truncation
from selfspec.kernels.topk import Scores, topk_tokens

META = torch.device("meta")
SIZES = {"smol": (49152, 576), "8b": (128256, 4096)}


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def sampling_of(
    rows: int, sequences: int, vocabulary: int, small_top_k: bool = False
) -> tuple[Noise, Truncation, Processing]:
    """Noise, truncation and processing of a tree with `rows` rows."""
    ints, floats = partial(_empty, dtype=torch.int32), partial(_empty, dtype=torch.float32)
    noise = Noise(_empty(sequences, dtype=torch.int64), ints(sequences), ints(rows), floats(sequences))
    truncation = Truncation(ints(sequences), floats(sequences), floats(sequences), small_top_k)
    nodes = rows // sequences
    processing = Processing(
        floats(sequences), floats(sequences), floats(sequences), floats(sequences, vocabulary),
        ints(sequences, vocabulary), ints(sequences), ints(sequences, 8), ints(rows),
        ints(nodes, 5).expand(sequences, -1, -1), ints(nodes), ints(rows),
    )  # fmt: skip
    return noise, truncation, processing


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each row tile, short and long sums, each feature of a head, and each way to find the best tokens."""
    for model, rows, names in (
        ("smol", 1, "processed"),
        ("smol", 64, "logits"),
        ("8b", 32, "sampled"),
        ("8b", 64, "processed"),
        ("8b", 16, "masked"),
    ):
        vocabulary, hidden = SIZES[model]
        x, weight = _empty(rows, hidden), _empty(vocabulary, hidden)
        noise, truncation, processing = sampling_of(rows, 1 if rows == 1 else 4, vocabulary)
        words = -(-vocabulary // 32)
        masks = Masks(_empty(rows, dtype=torch.int32), _empty(rows, words, dtype=torch.int32))
        one, many = (Scores.empty(rows, vocabulary, width, "meta") for width in (1, 20))
        logits = _empty(rows, vocabulary, dtype=torch.float32)
        calls: dict[str, Callable[[], object]] = {
            "sampled": partial(lm_head_scores, x, weight, one, noise=noise),
            "processed": partial(
                lm_head_scores, x, weight, many, noise=noise, truncation=truncation, processing=processing
            ),
            "masked": partial(lm_head_scores, x, weight, one, noise=noise, masks=masks),
            "logits": partial(lm_head_logits, x, weight, logits),
        }
        yield from ((f"{name}, {model}, {rows} rows", calls[name]) for name in names.split())
    yield from _trimmed()
    x, weight = _empty(3, 576, dtype=torch.float32), _empty(1000, 576, dtype=torch.float32)
    scores = Scores.empty(3, 1000, 1, "meta")
    yield "float32", lambda: lm_head_scores(x, weight, scores, softcap=30.0)


def _trimmed() -> Iterator[tuple[str, Callable[[], object]]]:
    count, rows = _empty(1, dtype=torch.int32), _empty(15872, dtype=torch.int32)
    x, whole = _empty(16, 576), _empty(49152, 576)
    noise, _, processing = sampling_of(16, 4, 49152)
    scores = Scores.empty(16, 15872, 20, "meta")
    yield (
        "trimmed processed",
        lambda: lm_head_scores(
            x, whole, scores, token_ids=rows, gather=True, count=count, noise=noise, processing=processing
        ),
    )
    masks = Masks(_empty(16, dtype=torch.int32), _empty(32, 1536, dtype=torch.int32))
    yield (
        "trimmed masked",
        lambda: lm_head_scores(x, whole, scores, token_ids=rows, gather=True, count=count, masks=masks),
    )
    for columns, width in ((128256, 1), (15872, 20), (128256, 256)):
        found = Scores.empty(16, columns, width, "meta")
        out = _empty(16, width, dtype=torch.int64)
        log_probs = _empty(16, width, dtype=torch.float32) if width == 20 else None
        options = {"finite": width == 1, "log_probs_out": log_probs}
        yield f"top-k {width} of {columns}", partial(topk_tokens, found, out, **options)
