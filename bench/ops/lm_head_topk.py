"""The LM head with scoring, top-k tokens, and sampling with top-k and top-p, at the shapes of two models."""

from __future__ import annotations

import torch

from bench.ops import Case
from selfspec.kernels.lm_head_topk import lm_head_logits, lm_head_reference, lm_head_scores
from selfspec.kernels.logits_processing import Processing
from selfspec.kernels.noise import Noise, Truncation
from selfspec.kernels.sample import SampleWorkspace, sample, sample_scored
from selfspec.kernels.topk import Scores, topk_tokens

MODELS = {"SmolLM2": (49152, 576), "8B": (128256, 4096)}
TRIMMED, CHILDREN = 15872, 20  # tokens of the demo profile's trimmed head; ranked draft tokens per node


def cases(device: torch.device) -> list[Case]:
    found: list[Case] = []
    for model, (vocabulary, hidden) in MODELS.items():
        weight = torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16) / hidden**0.5
        for rows in (1, 16, 64):
            found += _head_cases(model, weight, rows)
            found += _sample_cases(model, vocabulary, rows, device)
        if model == "SmolLM2":
            for rows in (1, 16, 64):
                found += _trimmed_cases(weight, rows)
    return found


def _noise(rows: int, device: torch.device) -> Noise:
    """Noise of one sequence at temperature 1."""
    seeds, indices = torch.arange(1, device=device), torch.arange(1, device=device)
    return Noise(seeds, indices, torch.arange(rows, device=device, dtype=torch.int32), torch.ones(1, device=device))


def _truncation(device: torch.device, top_k: int = 0, top_p: float = 1.0) -> Truncation:
    k = torch.tensor([top_k], dtype=torch.int32, device=device)
    p, off = torch.tensor([top_p], device=device), torch.zeros(1, device=device)
    return Truncation(k, p, off, small_top_k=1 <= top_k <= 64)


def _processing(rows: int, vocabulary: int, device: torch.device) -> Processing:
    """All penalties on for one sequence, along a chain of `rows` nodes."""
    ones, ints = torch.ones(1, device=device), torch.arange(rows, dtype=torch.int32, device=device)
    counts = torch.randint(0, 3, (1, vocabulary), dtype=torch.int32, device=device)
    return Processing(
        1.1 * ones, 0.1 * ones, 0.1 * ones, torch.zeros(1, vocabulary, device=device), counts, ints[:1],
        ints[None, :1], ints, ints.repeat(1, rows, 1), ints, ints,
    )  # fmt: skip


def _head_cases(model: str, weight: torch.Tensor, rows: int) -> list[Case]:
    vocabulary, hidden = weight.shape
    x = torch.randn(rows, hidden, device=weight.device, dtype=weight.dtype)
    one, noise = Scores.empty(rows, vocabulary, 1, weight.device), _noise(rows, weight.device)
    many, truncation = Scores.empty(rows, vocabulary, CHILDREN, weight.device), _truncation(weight.device, 50)
    processing = _processing(rows, vocabulary, weight.device)
    logits = torch.empty(rows, vocabulary, device=weight.device)
    tokens = torch.empty(rows, 1, device=weight.device, dtype=torch.int64)
    size, at = weight.nbytes + x.nbytes, f"{model} {rows} rows"

    def compared() -> tuple[torch.Tensor, torch.Tensor]:
        lm_head_logits(x, weight, logits)
        return logits[:4], lm_head_reference(x[:4].double(), weight.double())

    def library() -> object:
        return torch.mm(x, weight.T).float().argmax(-1)

    lm_head_scores(x, weight, one, noise=noise)
    return [
        Case(f"head greedy {at}", lambda: lm_head_scores(x, weight, one), size, compared, library),
        Case(f"head sampled {at}", lambda: lm_head_scores(x, weight, one, noise=noise), size, None, library),
        Case(f"head truncated {at}", lambda: lm_head_scores(x, weight, many, noise=noise, truncation=truncation), size),
        Case(f"head processed {at}", lambda: lm_head_scores(x, weight, one, noise=noise, processing=processing), size),
        Case(f"head logits {at}", lambda: lm_head_logits(x, weight, logits), size + logits.nbytes),
        Case(f"top-k 1 {at}", lambda: topk_tokens(one, tokens), one.tile_keys.nbytes),
    ]


def _trimmed_cases(weight: torch.Tensor, rows: int) -> list[Case]:
    device, at = weight.device, f"trimmed SmolLM2 {rows} rows"
    x = torch.randn(rows, weight.shape[1], device=device, dtype=weight.dtype)
    ids = torch.randperm(weight.shape[0], device=device)[:TRIMMED].sort().values.int()
    copy, noise = weight[ids.long()], _noise(rows, device)
    scores = Scores.empty(rows, TRIMMED, CHILDREN, device)
    levels = scores.int_scores
    assert levels is not None
    tokens = torch.empty(rows, CHILDREN, device=device, dtype=torch.int64)
    count = torch.tensor([TRIMMED], device=device, dtype=torch.int32)
    lm_head_scores(x, copy, scores, token_ids=ids, noise=noise)
    return [
        Case(f"head greedy {at}", lambda: lm_head_scores(x, copy, scores, token_ids=ids, count=count), copy.nbytes),
        Case(
            f"head sampled {at}",
            lambda: lm_head_scores(x, copy, scores, token_ids=ids, count=count, noise=noise),
            copy.nbytes,
        ),
        Case(f"head gathered {at}", lambda: lm_head_scores(x, weight, scores, token_ids=ids, gather=True), copy.nbytes),
        Case(
            f"top-k {CHILDREN} {at}",
            lambda: topk_tokens(scores, tokens, token_ids=ids),
            scores.tile_keys.nbytes,
            library=lambda: torch.topk(levels, CHILDREN),
        ),
    ]


def _sample_cases(model: str, vocabulary: int, rows: int, device: torch.device) -> list[Case]:
    logits, noise = torch.randn(rows, vocabulary, device=device) * 3, _noise(rows, device)
    work, out = SampleWorkspace.empty(rows, vocabulary, device), torch.empty(rows, device=device, dtype=torch.int64)
    bounded, nucleus, large = (_truncation(device, top_k, 0.9) for top_k in (50, 0, 1000))
    at = f"{model} {rows} rows"
    sample(logits, out, work, noise=noise, truncation=bounded)
    size = logits.nbytes
    return [
        Case(
            f"sample top-k 50 top-p {at}",
            lambda: sample(logits, out, work, noise=noise, truncation=bounded),
            size,
            library=lambda: torch.topk(logits, 50),
        ),
        Case(
            f"sample scored top-k 50 {at}",
            lambda: sample_scored(vocabulary, out, work, noise=noise, truncation=bounded),
            work.scores.tile_keys.nbytes,
        ),
        Case(f"sample top-p {at}", lambda: sample(logits, out, work, noise=noise, truncation=nucleus), size),
        Case(f"sample any top-k {at}", lambda: sample(logits, out, work, noise=noise, truncation=large), size),
        Case(f"sample untruncated {at}", lambda: sample(logits, out, work, noise=noise), size),
    ]
