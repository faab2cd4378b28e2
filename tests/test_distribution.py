"""Sampled tokens have the model's distribution: chi-square test of three tokens against exact probabilities.

transformers gives the probabilities of all texts of three tokens in float64, so the conditional distributions after
accepted and after rejected drafts are both tested. All seeds are fixed: a test passes always or never. Wrong acceptance
rules fail the same test.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

from selfspec.backends import torch_accept, torch_backend
from selfspec.backends.torch_backend import TorchBackend
from selfspec.batch import Batch
from selfspec.cache.kv_cache import Cache
from selfspec.drafters import Drafter, Drafters
from selfspec.governor.rules import Policy, Rules
from selfspec.metrics import Metrics
from selfspec.models import loading as weights
from selfspec.models.decoder import Decoder
from selfspec.sampling import ACCEPT, CHOICE, NoiseKey, SamplingParams, perturbed, uniform
from selfspec.sequence import Request
from selfspec.sequence import Sequence as Sequence_
from selfspec.speculation.draft_tree import Draft
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan
from tests.tiny import tiny_model

VOCABULARY = 8
NEW_TOKENS = 3
PROMPT = 3  # a single token: needs no prefill
DRAWS, FEWER_DRAWS = 4_000, 2_000
BATCH = 2_000  # sequences that decode together

RIGHT, WRONG = 1e-3, 1e-6  # p-values: a right rule stays above the first, a wrong one below the second

FULL = SamplingParams(do_sample=True)
TOP_K = SamplingParams(do_sample=True, top_k=4)
TOP_P = SamplingParams(do_sample=True, top_p=0.8)
EVERYTHING = SamplingParams(do_sample=True, temperature=1.2, top_k=6, top_p=0.95, min_p=0.04, repetition_penalty=1.3)
IRREGULAR = "nodes:0.0,0.2,1.1,2.0"  # ranks are skipped at both depths


@cache
def hf_model() -> Any:
    """Three layers and flat logits; an exit after the first accepts about 60% of its drafts."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model("llama", seed=4, num_hidden_layers=3, vocab_size=VOCABULARY, **shape)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.7)
    return model


@cache
def decoder() -> Decoder:
    return weights.adopt(hf_model())


@cache
def shared_cache() -> Cache:
    """One for all tests: a page for each sequence of a batch."""
    return Cache(decoder().config, decoder().device, decoder().dtype, num_pages=BATCH)


def whole_exit() -> Exit:
    return Exit(decoder(), layer=1)


def trimmed_exit() -> Exit:
    """Drafts four of the eight tokens; the most probable next token is not among them."""
    return Exit(decoder(), layer=1, head_rows=torch.tensor([1, 3, 5, 6]))


def overconfident_exit() -> Exit:
    """Gives nearly all probability to one token: in float32 the others' underflow to 0."""
    return Exit(decoder(), layer=1, norm=60 * decoder().norm)


@dataclass
class Drawn:
    counts: torch.Tensor  # [V ** 3]: number of draws of each text of three tokens
    accepted: int = 0
    rejections: int = 0


def draw(
    plan: str, rejection: bool, how: SamplingParams = FULL, exit: Exit | None = None, draws: int = FEWER_DRAWS
) -> Drawn:
    """Draws texts of three tokens, with the seeds from 0 on."""
    exit = exit or whole_exit()
    drawn = Drawn(torch.zeros(VOCABULARY**NEW_TOKENS, dtype=torch.long))
    place = torch.tensor([VOCABULARY**2, VOCABULARY, 1])
    for first in range(0, draws, BATCH):
        texts = [Sequence_([PROMPT], seed, 0, 1 + NEW_TOKENS, how) for seed in range(first, first + BATCH)]
        policy = Policy(Rules(), how, mode="force", plan=Plan.parse(plan))
        decode(Request(texts, policy=policy, drafter=Drafter(exit), rejection=rejection), exit)
        tokens = torch.tensor([text.tokens[1:] for text in texts])
        drawn.counts += (tokens * place).sum(1).bincount(minlength=VOCABULARY**NEW_TOKENS)
        drawn.accepted += sum(text.history.accepted for text in texts)
        drawn.rejections += sum(text.history.rejections for text in texts)
    return drawn


@pytest.fixture(autouse=True)
def no_limit_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets large batches draft whole plans: fewer steps take less time."""
    monkeypatch.setattr("selfspec.batch.MAX_STEP_ROWS", sys.maxsize)


@torch.inference_mode()
def decode(request: Request, exit: Exit) -> None:
    """Decodes the request's sequences in one batch until all have ended."""
    drafters = Drafters(decoder(), None, lambda *_: torch.empty(0))
    batch = Batch(TorchBackend(decoder(), shared_cache()), exit, drafters, Metrics())
    batch.join(request.sequences)
    while batch.running:
        batch.step()
        ended = [sequence for sequence in batch.running if sequence.is_finished]
        batch.leave(ended)
        for sequence in ended:
            shared_cache().close(sequence.kv)


def exact(how: SamplingParams) -> torch.Tensor:
    """Probabilities [V ** 3] of all texts of three tokens, by transformers' model and processors."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(how.repetition_penalty)])
    processors.append(TemperatureLogitsWarper(how.temperature))
    processors.append(TopKLogitsWarper(how.top_k or VOCABULARY))
    processors.append(TopPLogitsWarper(how.top_p))
    processors.append(MinPLogitsWarper(how.min_p))
    texts = torch.tensor([[PROMPT, *text] for text in itertools.product(range(VOCABULARY), repeat=NEW_TOKENS)])
    with torch.no_grad():
        logits = hf_model()(texts[:, :-1]).logits
    joint = torch.ones(len(texts), dtype=torch.float64)
    for step in range(NEW_TOKENS):
        conditional = processors(texts[:, : step + 1], logits[:, step]).softmax(-1)
        joint *= conditional.gather(1, texts[:, step + 1 : step + 2]).squeeze(1)
    return joint


def p_value(drawn: Drawn, how: SamplingParams = FULL) -> float:
    """The p-value of a chi-square test; pools texts expected fewer than 5 times; 0 if an impossible text was drawn."""
    probabilities = exact(how)
    if drawn.counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * drawn.counts.sum()
    rare = expected < 5
    cells = [(drawn.counts[~rare], expected[~rare]), (drawn.counts[rare].sum()[None], expected[rare].sum()[None])]
    observed, expected = (torch.cat(parts) for parts in zip(*cells, strict=True))
    possible = expected > 0
    return float(chisquare(observed[possible], expected[possible]).pvalue)


@pytest.mark.parametrize(
    ("plan", "how"), [pytest.param("chain:2", FULL, id="chain:2"), pytest.param("tree:2,2", TOP_K, id="tree:2,2-top-k")]
)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_speculation_draws_from_the_models_distribution(acceptance: str, plan: str, how: SamplingParams) -> None:
    drawn = draw(plan, acceptance == "rejection", how, draws=DRAWS)
    assert drawn.counts.sum() == DRAWS
    assert min(drawn.accepted, drawn.rejections) > DRAWS / 10, "too few draws to test both outcomes of a draft"
    assert p_value(drawn, how) > RIGHT


def test_plain_decoding_draws_from_the_models_distribution() -> None:
    assert p_value(draw("none", False, draws=DRAWS)) > RIGHT


@pytest.mark.parametrize(
    ("plan", "acceptance", "how"),
    [("tree:3,2", "coupled", TOP_P), ("tree:3,2", "rejection", EVERYTHING), ("beam:3,4", "coupled", FULL)],
)
def test_other_settings_keep_the_distribution(plan: str, acceptance: str, how: SamplingParams) -> None:
    drawn = draw(plan, acceptance == "rejection", how)
    assert min(drawn.accepted, drawn.rejections) > FEWER_DRAWS / 10
    assert p_value(drawn, how) > RIGHT


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_trimmed_head_and_a_tree_that_skips_ranks_keep_the_distribution(acceptance: str) -> None:
    drawn = draw(IRREGULAR, acceptance == "rejection", exit=trimmed_exit())
    assert min(drawn.accepted, drawn.rejections) > FEWER_DRAWS / 10
    assert p_value(drawn) > RIGHT


def test_rejection_with_copied_nodes_keeps_the_distribution() -> None:
    """A copied token is often one of the exit's too, in a text of few different tokens."""
    assert p_value(draw("tree:2,1+copy:2", rejection=True)) > RIGHT


def test_rejection_with_an_overconfident_exit_keeps_the_distribution() -> None:
    assert p_value(draw(IRREGULAR, rejection=True, exit=overconfident_exit())) > RIGHT


def test_rejection_of_a_rank_that_the_drafts_top_k_has_cut_keeps_the_distribution() -> None:
    how = SamplingParams(do_sample=True, top_k=2)
    assert p_value(draw("nodes:0.2", rejection=True, how=how), how) > RIGHT


Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[bool], NoiseKey], torch.Tensor]


def classical(
    accepts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = lambda u, p, q: u * q < p,
    left: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda p, q: (p - q).clamp(min=0),
    draft_loses: Callable[[bool], bool] = lambda offered: True,
) -> Rule:
    """Rejection sampling with replaceable parts; a right rule by default."""

    def rule(
        p: torch.Tensor, draft: torch.Tensor, drafted: torch.Tensor, offered: Sequence[bool], key: NoiseKey
    ) -> torch.Tensor:
        p, q = p.double(), draft.double().softmax(-1)
        chosen = torch.full_like(drafted[:, :1], -1)
        for token, is_node in zip(drafted.split(1, dim=1), offered, strict=True):
            if is_node:
                u = uniform(key.seeds, key.sample_indices, key.positions, token, ACCEPT)
                fits = accepts(u, p.gather(1, token), q.gather(1, token))
                chosen = torch.where((chosen < 0) & fits, token, chosen)
                p = left(p, q) / left(p, q).sum(-1, keepdim=True)
            if draft_loses(is_node):
                q = q.scatter(1, token, 0)
                q = q / q.sum(-1, keepdim=True)
        rest = perturbed(p.log(), key, CHOICE).argmax(-1, keepdim=True)
        return torch.where(chosen < 0, rest, chosen).squeeze(1)

    return rule


def test_the_replaceable_rule_is_right_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_accept, "reject_or_accept", classical())
    assert p_value(draw(IRREGULAR, rejection=True)) > RIGHT


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        pytest.param(classical(accepts=lambda u, p, q: p >= 0), "chain:2", id="accepts always"),
        pytest.param(classical(accepts=lambda u, p, q: u * p < q), "chain:2", id="ratio inverted"),
        pytest.param(classical(accepts=lambda u, p, q: p < 0), "chain:2", id="accepts never"),
        pytest.param(classical(left=lambda p, q: p), "chain:2", id="leaves p as it is"),
        pytest.param(classical(left=lambda p, q: (q - p).clamp(min=0)), "chain:2", id="leaves q - p"),
        pytest.param(classical(draft_loses=lambda offered: False), "tree:4,2", id="draft loses no token"),
        pytest.param(classical(draft_loses=lambda offered: offered), IRREGULAR, id="draft keeps skipped tokens"),
    ],
)
def test_a_wrong_rejection_rule_fails(rule: Rule, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_accept, "reject_or_accept", rule)
    assert p_value(draw(plan, rejection=True, draws=FEWER_DRAWS if plan == "chain:2" else DRAWS)) < WRONG


def test_rejection_fails_if_children_and_residual_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "CHILDREN", CHOICE)
    assert p_value(draw("nodes:0.1,1.1", rejection=True)) < WRONG


def test_rejection_fails_if_children_and_acceptance_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "CHILDREN", ACCEPT)
    assert p_value(draw("chain:2", rejection=True)) < WRONG


def test_coupling_fails_if_it_emits_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def emit_first_child(
        sequences: list[Sequence_],
        indices: list[int],
        nodes: list[int],
        draft: Draft,
        logits: torch.Tensor,
    ) -> list[int]:
        tokens = right(sequences, indices, nodes, draft, logits)
        for place, (index, node) in enumerate(zip(indices, nodes, strict=True)):
            if draft.plan.children[node]:
                tokens[place] = int(draft.tokens[index, draft.plan.children[node][0]])
        return tokens

    right = torch_accept._choose
    monkeypatch.setattr(torch_accept, "_choose", emit_first_child)
    assert p_value(draw("tree:2,2", rejection=False)) < WRONG


def test_coupling_fails_if_all_positions_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_accept.noise_key

    def at_position_1(*arguments: Any, **options: Any) -> NoiseKey:
        key = right(*arguments, **options)
        return replace(key, positions=torch.ones_like(key.positions))

    for module in (torch_accept, torch_backend):
        monkeypatch.setattr(module, "noise_key", at_position_1)
    assert p_value(draw("chain:2", rejection=False)) < WRONG
