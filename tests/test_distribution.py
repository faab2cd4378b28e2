"""Drawn texts have the model's distribution: chi-square of their first three tokens against exact probabilities.

Every possible text of three tokens is enumerated through transformers in float64, so the conditionals after accepted
and after refused drafts are both covered. All seeds are fixed: a test passes always or never. Wrong acceptance rules
must fail the same test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec import runtime, sampling, weights
from selfspec.cache import Cache
from selfspec.exits import Exit
from selfspec.kernels.noise import uniform_vocabulary
from selfspec.model import Decoder
from selfspec.policy import Policy, Rules
from selfspec.runtime import Draft, Row, Session
from selfspec.sampling import ACCEPT, CHILDREN, TARGET, NoiseKey, Sampling
from selfspec.tree import Plan
from tests.tiny import tiny_model

VOCABULARY = 8
NEW_TOKENS = 3
DRAWS = 20_000
BATCH = 4_000
PROMPT = 3  # one token, so that no row needs a prefill
EXIT_LAYER = 1

RIGHT, WRONG = 1e-3, 1e-6  # p-values: a right rule stays above the first, a wrong one below the second

FULL = Sampling(do_sample=True)
TOP_K = Sampling(do_sample=True, top_k=4)
TOP_P = Sampling(do_sample=True, temperature=1.2, top_p=0.8)
EVERYTHING = Sampling(do_sample=True, temperature=1.5, top_k=6, top_p=0.9, min_p=0.05, repetition_penalty=1.3)


@cache
def hf_model() -> Any:
    """Three layers; the last two add little enough that drafts are often right, and enough that they often are not."""
    shape = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    model = tiny_model("llama", seed=1, num_hidden_layers=3, vocab_size=VOCABULARY, **shape)
    with torch.no_grad():
        for layer in model.model.layers[EXIT_LAYER:]:
            layer.self_attn.o_proj.weight.mul_(0.8)
            layer.mlp.down_proj.weight.mul_(0.8)
    return model


@cache
def decoder() -> Decoder:
    return weights.adopt(hf_model())


@cache
def pages() -> Cache:
    """One cache for all tests: it grows once."""
    return Cache(decoder().config, decoder().device, decoder().dtype)


@cache
def noise() -> torch.Tensor:
    """Every uniform number that the draws may ask for, by stream, seed, position and token."""
    seeds, positions = DRAWS, 1 + NEW_TOKENS + 1
    key = torch.cartesian_prod(torch.arange(seeds), torch.arange(positions))
    key = key[:, 0], torch.zeros_like(key[:, 0]), key[:, 1]
    streams = [uniform_vocabulary(*key, VOCABULARY, stream) for stream in (TARGET, CHILDREN, ACCEPT)]
    return torch.stack(streams).view(3, seeds, positions, VOCABULARY)


@pytest.fixture(autouse=True)
def precomputed_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, looked up: the rejection rule asks for them one by one, which would take minutes."""

    def looked_up(seeds, copies, positions, tokens, stream):
        return noise()[stream, seeds[:, None], positions[:, None], tokens]

    def whole_rows(seeds, copies, positions, vocabulary, stream):
        assert vocabulary == VOCABULARY
        return noise()[stream, seeds, positions]

    monkeypatch.setattr(sampling, "uniform", looked_up)
    monkeypatch.setattr(sampling, "uniform_vocabulary", whole_rows)


@dataclass
class Drawn:
    counts: torch.Tensor  # [V, V, V]: how often each text of three tokens was drawn
    accepted: int
    rejections: int


def draw(plan: str, rejection: bool, how: Sampling, exit: Exit | None = None) -> Drawn:
    """Draws texts of three tokens with the seeds 0 to DRAWS - 1."""
    exit = exit or Exit(decoder(), EXIT_LAYER)
    drawn = Drawn(torch.zeros(VOCABULARY**NEW_TOKENS, dtype=torch.long), 0, 0)
    for first in range(0, DRAWS, BATCH):
        rows = [Row([PROMPT], seed, copy=0, max_length=1 + NEW_TOKENS) for seed in range(first, first + BATCH)]
        policy = Policy(Rules(), how, mode="force", plan=Plan.parse(plan))
        session = Session(decoder(), pages(), rows, how, policy, exit=exit, rejection=rejection)
        for _ in session.run():
            pass
        texts = torch.tensor([row.tokens[1:] for row in rows])
        place = torch.tensor([VOCABULARY**2, VOCABULARY, 1])
        drawn.counts += (texts * place).sum(1).bincount(minlength=VOCABULARY**NEW_TOKENS)
        drawn.accepted += sum(row.accepted for row in rows)
        drawn.rejections += sum(row.rejections for row in rows)
    return drawn


def exact(how: Sampling) -> torch.Tensor:
    """Probabilities of all texts of three tokens, in the order of `Drawn.counts`, by transformers' own processors."""
    processors = LogitsProcessorList()
    if how.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(how.repetition_penalty))
    processors.append(TemperatureLogitsWarper(how.temperature))
    if how.top_k:
        processors.append(TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        processors.append(TopPLogitsWarper(how.top_p))
    if how.min_p:
        processors.append(MinPLogitsWarper(how.min_p))
    texts = torch.tensor([[PROMPT, *text] for text in itertools.product(range(VOCABULARY), repeat=NEW_TOKENS)])
    with torch.no_grad():
        logits = hf_model()(texts[:, :-1]).logits
    joint = torch.ones(len(texts), dtype=torch.float64)
    for step in range(NEW_TOKENS):
        conditional = processors(texts[:, : step + 1], logits[:, step]).softmax(-1)
        joint *= conditional.gather(1, texts[:, step + 1 : step + 2]).squeeze(1)
    return joint


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square test of the counts; cells expected fewer than 5 times are pooled. Impossible draws have p = 0."""
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed_cells = [*counts[common].tolist(), counts[~common].sum().item()]
    expected_cells = [*expected[common].tolist(), expected[~common].sum().item()]
    if expected_cells[-1] == 0:
        observed_cells.pop(), expected_cells.pop()
    return float(chisquare(observed_cells, expected_cells).pvalue)


if __name__ == "__main__":
    import time

    mp = pytest.MonkeyPatch()
    precomputed_noise.__pytest_wrapped__.obj(mp) if hasattr(precomputed_noise, "__pytest_wrapped__") else precomputed_noise._get_wrapped_function()(mp)
    t = time.time(); noise(); print("noise", time.time() - t)
    for rej in (False, True):
        for name, how in (("full", FULL), ("topk", TOP_K), ("topp", TOP_P), ("all", EVERYTHING)):
            for plan in ("none", "chain:2", "tree:2,2", "tree:3,2", "nodes:0.0,0.2,1.1,2.0", "nodes:0.1,1.1"):
                t = time.time()
                d = draw(plan, rej, how)
                e = exact(how)
                print(rej, name, plan, d.accepted, d.rejections, (e > 0).sum().item(), p_value(d.counts, e), round(time.time() - t, 2), flush=True)
    for plan, how, ex in (
        ("tree:3", FULL, Exit(decoder(), 1, norm=decoder().norm * 60)),
        ("tree:3,2", FULL, Exit(decoder(), 1, norm=decoder().norm * 60)),
        ("nodes:0.2", Sampling(do_sample=True, top_k=2), None),
        ("chain:2", FULL, Exit(decoder(), 1, head_rows=torch.tensor([0, 1, 4, 6]))),
        ("tree:3,2", FULL, Exit(decoder(), 1, head_rows=torch.tensor([0, 1, 4, 6]))),
        ("nodes:0.0,0.2,1.1,2.0", TOP_K, Exit(decoder(), 1, head_rows=torch.tensor([0, 1, 4, 6]))),
    ):
        d = draw(plan, True, how, ex)
        print(plan, how, d.accepted, d.rejections, p_value(d.counts, exact(how)))
