"""Drafts along given text against those of the engine, ranks against a naive ranking, and noise given its outcome."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import gumbel_r, kstest

from selfspec import Engine
from selfspec.backends.torch_backend import Draft, TorchBackend
from selfspec.calibrate.choice import MISSED
from selfspec.calibrate.corpus import Corpus, hidden_states, text_features
from selfspec.calibrate.drafting import draft_head_inputs, text_ranks
from selfspec.calibrate.measuring import DEPTHS, Measurement, measure, noise_behind
from selfspec.calibrate.writing import Template, Writer
from selfspec.models.decoder import Decoder
from selfspec.models.loading import adopt
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan
from tests.calibrated import documents_of, quieten, random_documents, random_exit
from tests.scripted import decoding, endless, new_cache, random_prompt
from tests.tiny import FAMILIES, VOCABULARY, tiny_model

DEPTH = 3
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def decoder(family: str) -> Decoder:
    return adopt(tiny_model(family))


class Following(TorchBackend):
    """Drafts the tokens of a given text."""

    text: list[int]
    root: int

    def _children(self, draft: Draft, level: range) -> torch.Tensor:
        return torch.tensor([[self.text[self.root + draft.plan.depths[level.start]]]])


@torch.inference_mode()
def engine_head_inputs(exit: Exit, text: list[int], root: int) -> list[torch.Tensor]:
    """What the LM head reads of the exit at the root and at the drafted tokens after it, in a real step."""
    sequence = Sequence(text[: root + 1], 0, 0, max_length=len(text) + DEPTH)
    backend = Following(exit.model, new_cache(exit.model))
    backend.text, backend.root = text, root
    while not backend.prefill([sequence], exit):
        pass
    backend.cache.reserve(sequence.kv, root + DEPTH + 1)
    draft = backend.draft([sequence], Plan.parse(f"chain:{DEPTH}"), exit)
    return [draft.head_inputs[depth][0, 0] for depth in range(DEPTH)]


@families
@pytest.mark.parametrize("layer", [1, 2])
def test_drafts_along_a_text_have_the_states_of_the_engines_drafts(family: str, layer: int) -> None:
    """Long and short documents in two rows; sliding windows are shorter than most of them."""
    model = decoder(family)
    exit = random_exit(model, layer)
    corpus = Corpus.pack(random_documents(26, 9, 4, 17, 11), 40)
    documents = [(row, document) for row in range(len(corpus)) for document in documents_of(corpus, row)]
    assert len(corpus) == 2 and len(documents) == 5
    places = {row: [] for row in range(len(corpus))}
    for row, document in documents:
        last = len(document.tokens) - DEPTH - 1
        places[row] += [(document, root) for root in (0, last // 2, last)]
    most = max(map(len, places.values()))
    starts = [[document.start + root for document, root in of_row] for of_row in places.values()]
    roots = torch.tensor([of_row + [0] * (most - len(of_row)) for of_row in starts])
    with torch.no_grad():
        features = text_features(model, corpus, 1, torch.device("cpu"))
        below = list(hidden_states(model, corpus))[layer]
        drafted = draft_head_inputs(exit, below, features, corpus, roots, DEPTH)
    for row, of_row in places.items():
        for index, (document, root) in enumerate(of_row):
            for depth, head_input in enumerate(engine_head_inputs(exit, document.tokens, root)):
                torch.testing.assert_close(drafted[depth][row, index], head_input, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("trimmed", [False, True], ids=["whole head", "trimmed head"])
def test_ranks_are_those_of_a_naive_ranking(trimmed: bool, drawn: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    places, temperature = 300, 0.7  # more than are ranked together
    model = decoder("llama")
    rows = torch.randperm(VOCABULARY, generator=generator)[:60].sort().values if trimmed else None
    exit = Exit(model, 2, head_rows=rows)
    head_input = torch.randn(places, 32, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, VOCABULARY, (places,), generator=generator)
    noise = torch.randn(places, VOCABULARY, generator=generator) if drawn else None
    offered = range(VOCABULARY) if rows is None else rows.tolist()
    expected = []
    for place, token in enumerate(tokens.tolist()):
        values = (head_input[place] @ model.head.weight.T).float()
        values = values / temperature + noise[place] if noise is not None else values
        better = sum(float(values[other]) > float(values[token]) for other in offered)
        expected.append(better if token in offered else MISSED)
    found = text_ranks(exit, head_input, tokens, noise, temperature if drawn else 1.0)
    assert found.tolist() == expected
    assert (MISSED in expected) == trimmed


def test_an_exit_whose_states_are_nan_ranks_no_token() -> None:
    exit = Exit(decoder("llama"), 2)
    head_input = torch.full((3, 32), torch.nan, dtype=torch.float64)
    assert text_ranks(exit, head_input, torch.tensor([0, 5, 9])).tolist() == [MISSED] * 3


# Noise under the condition that it gave the known tokens


def drawn_tokens(rows: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """Logits, and a token drawn from each of their rows."""
    generator = torch.Generator().manual_seed(1)
    logits = spread * torch.randn(rows, 12, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0], generator


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_the_noise_makes_the_known_tokens_the_argmax(spread: float) -> None:
    logits, _, generator = drawn_tokens(1000, spread)
    chosen = torch.arange(1000) % 12  # also unlikely tokens
    noise = noise_behind(logits, chosen, generator)
    assert ((logits + noise).argmax(-1) == chosen).all()
    assert torch.isfinite(noise).all()


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_over_drawn_tokens_the_noise_is_gumbel_noise(spread: float) -> None:
    """Of each entry by its logit's rank, and of the maximum."""
    logits, chosen, generator = drawn_tokens(4000, spread)
    noise = noise_behind(logits, chosen, generator)
    order = logits.argsort(dim=1)
    for of_rank in noise.gather(1, order).T:
        assert kstest(of_rank.numpy(), gumbel_r.cdf).pvalue > 1e-3
    largest = (logits + noise).amax(-1) - logits.logsumexp(-1)
    assert kstest(largest.numpy(), gumbel_r.cdf).pvalue > 1e-3
    pairs = np.corrcoef(noise.gather(1, order).T.numpy())[np.triu_indices(12, k=1)]
    assert np.abs(pairs).max() < 5 / 4000**0.5, "entries are independent"


# Measurements


@cache
def answering(family: str) -> tuple[Engine, Exit]:
    hf = endless(tiny_model(family))
    engine = Engine.from_model(quieten(hf, 2, 0.3) if family != "gemma3_text" else hf)
    return engine, random_exit(engine.model, 2, scale=0.03)


def answers_to(
    engine: Engine, prompts: list[list[int]], temperature: float, new_tokens: int = 40
) -> tuple[Corpus, float]:
    """Answers, and the temperature at which they are drawn: arguments of `measure`."""
    return Writer(engine, Template((), ())).answers(prompts, temperature, new_tokens, seed=3), temperature


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("trimmed", [False, True], ids=["whole head", "trimmed head"])
def test_measured_ranks_give_the_accepted_length_of_every_step(family: str, trimmed: bool) -> None:
    engine, exit = answering(family)
    prompt, plan = random_prompt(13), Plan.parse("tree:6,2,2")
    head_rows = torch.arange(0, VOCABULARY, 2) if trimmed else None
    (measured,) = measure(engine.model, [exit], head_rows, *answers_to(engine, [prompt], 0.0), seed=0)
    texts = decoding(engine, [prompt], str(plan), exit.with_head_rows(head_rows, [prompt]), new_tokens=40).prefill()
    row, advances = texts.sequences[0], []
    while row.new_tokens < len(measured.ranks):
        path, node, expected = measured.ranks[row.new_tokens].tolist(), 0, 1
        for rank in path[: plan.depth]:
            node = next((child for child in plan.children[node] if plan.ranks[child - 1] == rank), 0)
            if not node:
                break
            expected += 1
        before = row.new_tokens
        texts.step()
        advances.append((row.new_tokens - before, expected))
    texts.close()
    assert [real for real, _ in advances] == [expected for _, expected in advances]
    assert len({real for real, _ in advances}) > 1, "some drafts are accepted and some are not"


def test_a_smaller_head_misses_tokens_without_a_row_and_ranks_the_others_no_lower() -> None:
    engine, exit = answering("llama")
    answers = answers_to(engine, [random_prompt(6), random_prompt(9), random_prompt(1)], 0.7)
    small = torch.arange(0, VOCABULARY, 3)
    (whole,) = measure(engine.model, [exit], None, *answers, seed=0)
    (direct,) = measure(engine.model, [exit], small, *answers, seed=0)
    assert whole.paths(None) is whole.ranks and (whole.ranks != MISSED).all()
    predicted = whole.paths(small)
    assert (predicted == MISSED).any() and (predicted != MISSED).any()
    assert ((predicted == MISSED) == (direct.ranks == MISSED)).all()
    assert (direct.ranks <= predicted).all()
    assert (direct.ranks < predicted).any(), "fewer rows compete with a token"


def test_every_head_has_rows_for_the_prompts_tokens() -> None:
    ranks = np.array([[0, 1], [2, 3]])
    measured = Measurement(ranks, np.array([[10, 11], [12, 13]]), np.array([[False, True], [False, False]]), [], [])
    assert measured.paths(torch.tensor([12])).tolist() == [[MISSED, 1], [2, MISSED]]


def test_every_position_with_a_whole_rank_path_is_measured() -> None:
    engine, exit = answering("llama")
    prompts = [random_prompt(6), random_prompt(9)]
    (measured,) = measure(engine.model, [exit], None, *answers_to(engine, prompts, 0.0, new_tokens=20), seed=0)
    plain = {"max_new_tokens": 20, "do_sample": False, "speculative_decoding": False}
    answers = [engine.generate(torch.tensor([prompt]), **plain)[0, len(prompt) :] for prompt in prompts]
    windows = torch.cat([answer.unfold(0, DEPTHS, 1) for answer in answers])
    assert measured.tokens.tolist() == windows.tolist()
    owners = [prompts[0]] * (len(windows) // 2) + [prompts[1]] * (len(windows) // 2)
    allowed = [[t in prompt for t in path] for prompt, path in zip(owners, windows.tolist(), strict=True)]
    assert measured.allowed.tolist() == allowed
    assert measured.text_agreement == pytest.approx([(part[:, 0] == 0).mean() for part in np.split(measured.ranks, 2)])
    assert len(measured.prompt_agreement) == 2


def test_an_answer_too_short_for_a_rank_path_is_left_out() -> None:
    engine, exit = answering("llama")
    (measured,) = measure(engine.model, [exit], None, *answers_to(engine, [random_prompt(6)], 0.0, DEPTHS - 1), seed=0)
    assert measured.ranks.shape == (0, DEPTHS) and measured.text_agreement == []


def test_measurements_depend_on_the_seed() -> None:
    engine, exit = answering("llama")
    answers = answers_to(engine, [random_prompt(6)], 1.0)
    first, again, other = (measure(engine.model, [exit], None, *answers, seed=seed)[0].ranks for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any(), "the noise depends on the seed"
