"""The training text that a model writes: what documents consist of, which tokens the model chose, and how.

Documents are checked against their scripts, against the engine, and against transformers, each document alone.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfspec import Engine
from selfspec.calibrate import writing
from selfspec.calibrate.corpus import Corpus
from selfspec.calibrate.writing import Script, Template, Writer
from selfspec.text import encode
from tests.calibrated import Written, chat_tokenizer, documents_of
from tests.scripted import endless, left_padded, random_prompt
from tests.tiny import FAMILIES, tiny_model
from tests.tiny_tokenizer import ids_of, tiny_tokenizer

END, SEMICOLON = 2, ids_of(";")[0]
CHAT = Template((1, *ids_of("u", ":")), tuple(ids_of(";", "\n", "a", ":")))
BASE = Template((), ())


@cache
def hf_model(family: str) -> PreTrainedModel:
    return tiny_model(family)


@cache
def ending_model() -> PreTrainedModel:
    """A llama that often ends its texts: the head rows of both end tokens are larger."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[[END, SEMICOLON]] *= 1.6
    return model


def writer(template: Template, model: PreTrainedModel | None = None, ends: bool = True) -> Writer:
    """A writer whose answers end with END, if at all, and with the first token after a turn of the template."""
    engine = Engine.from_model(model or ending_model())
    engine.generation_config.eos_token_id = END if ends else None
    return Writer(engine, template)


@torch.no_grad()
def hf_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


# The template


def test_the_template_is_what_a_chat_template_puts_around_a_users_text() -> None:
    template = Template.of(chat_tokenizer())
    assert template == CHAT
    whole = encode(chat_tokenizer(), [{"role": "user", "content": "abc"}])
    assert whole == [*template.before, *ids_of("a", "b", "c"), *template.after]


def test_a_base_model_has_an_empty_template() -> None:
    assert Template.of(tiny_tokenizer()) == BASE


def test_the_template_of_a_base_model_keeps_the_first_token_of_every_text() -> None:
    class FirstToken:
        chat_template = None

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [1, *ids_of(*text)]}

    assert Template.of(FirstToken()) == Template((1,), ())


@pytest.mark.parametrize("template", ["hello", "{{ messages[0].content }}"], ids=["hides the text", "no end"])
def test_a_chat_template_without_the_users_text_or_an_end_is_refused(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="chat template"):
        Template.of(tokenizer)


# Answers


def greedy_answers(prompts: list[list[int]], engine: Engine, new_tokens: int, ends: list[int]) -> list[list[int]]:
    ids, mask = left_padded(prompts)
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "speculative_decoding": False}
    out = engine.generate(ids, mask, eos_token_id=ends or None, return_dict_in_generate=True, **settings)
    new = [row[ids.shape[1] :].tolist() for row in out.sequences]
    return [row[: stats.new_tokens] for row, stats in zip(new, out.stats, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate(family: str) -> None:
    """For prompts shorter and longer than sliding windows; only the limit ends an answer."""
    one = writer(BASE, endless(tiny_model(family)), ends=False)
    prompts = [random_prompt(length) for length in (1, 4, 9, 17)]
    corpus = one.answers(prompts, 0.0, 24, seed=0)
    for row, (prompt, answer) in enumerate(zip(prompts, greedy_answers(prompts, one.engine, 24, []), strict=True)):
        (document,) = documents_of(corpus, row)
        assert len(answer) == 24
        assert document.tokens == prompt + answer
        assert document.predicts == [False] * (len(prompt) - 1) + [True] * 24 + [False]


@pytest.mark.parametrize("template", [BASE, CHAT], ids=["base", "chat"])
def test_answers_end_with_the_models_end_token_or_the_templates(template: Template) -> None:
    one = writer(template)
    prompts = [random_prompt(length, seed) for length in (3, 8, 12) for seed in range(8)]
    limit, ends = 12, [END, *template.after[:1]]
    corpus = one.answers(prompts, 0.0, limit, seed=0)
    answers = greedy_answers(prompts, one.engine, limit, ends)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        (document,) = documents_of(corpus, row)
        assert document.tokens == prompt + answer
        assert corpus.predicts[row].sum() == len(answer)
    lengths = {len(answer) for answer in answers}
    assert limit in lengths and min(lengths) < limit, "some answers end by themselves, some at the limit"
    assert {answer[-1] for answer in answers if len(answer) < limit} == set(ends)


def test_sampled_answers_depend_on_the_seed() -> None:
    one = writer(BASE, hf_model("llama"), ends=False)
    prompts = [random_prompt(6)] * 2
    first, again, other = (one.answers(prompts, 0.8, 20, seed) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens[0], other.tokens[0])
    assert not torch.equal(first.tokens[0], first.tokens[1]), "equal prompts get different noise"


def test_an_interrupt_cancels_all_requests_and_frees_their_pages() -> None:
    one = writer(BASE, hf_model("llama"), ends=False)
    free = one.engine.cache.free_pages

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.answers([random_prompt(6)] * 100, 0.0, 30, 0, interrupt)
    assert one.engine.cache.free_pages == free
    assert not one.engine.scheduler.waiting


# Chunks


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns and answers have low limits, so that some end at the limit and some before."""
    monkeypatch.setattr(writing, "_TURN_TOKENS", 9)
    monkeypatch.setattr(writing, "_ANSWER_TOKENS", 13)


def domain_prompts(template: Template) -> list[list[list[int]]]:
    """The prompts of three domains."""
    return [
        [[*template.before, *random_prompt(length, domain), *template.after] for length in (6, 15, 30)]
        for domain in range(3)
    ]


def write(one: Writer, documents: int = 60, number: int = 0, length: int = 150, seed: int = 0) -> Corpus:
    return one.chunk(domain_prompts(one.template), number, documents, length, seed)


def scripted_documents(one: Writer, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[Script, Written]]:
    """The documents of a chunk, each with its script, which is found by its first tokens and its domain."""
    scripts: list[Script] = []

    class Recording(Writer):
        def script(self, *arguments: Any) -> Script:
            scripts.append(super().script(*arguments))
            return scripts[-1]

    monkeypatch.setattr(writing.Corpus, "pack", lambda documents, length: Corpus.one_per_row(documents))
    corpus = write(Recording(one.engine, one.template), **options)
    return [(script, documents_of(corpus, row)[0]) for row, script in enumerate(scripts)]


def expected_owners(document: Written, script: Script, template: Template, ends: set[int]) -> list[str]:
    """The part of the document that each token must belong to. Checks that scripts and the template's tokens are
    unchanged, and that turns and answers end where they must."""
    tokens, owners = document.tokens, ["script"] * len(script.tokens)
    assert tokens[: len(owners)] == list(script.tokens)
    if not script.is_whole:
        while owners.count("turn") < writing._TURN_TOKENS and tokens[len(owners)] not in ends:
            owners.append("turn")
        closing = tokens[len(owners) : len(owners) + len(template.after)]
        assert closing == list(template.after)
        owners += ["template"] * len(template.after)
    while len(owners) < len(tokens) and owners.count("answer") < writing._ANSWER_TOKENS:
        owners.append("answer")
        if tokens[len(owners) - 1] in ends:
            break
    assert len(owners) == len(tokens), "nothing follows an answer"
    assert tokens[-1] in ends or owners.count("answer") == writing._ANSWER_TOKENS
    return owners


@pytest.mark.parametrize("template", [BASE, Template((1,), ()), CHAT], ids=["base", "base with a first token", "chat"])
def test_a_document_is_its_script_a_turn_and_an_answer(
    template: Template, short_texts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, seen = {END, *template.after[:1]}, set()
    for script, document in scripted_documents(writer(template), monkeypatch):
        owners = expected_owners(document, script, template, ends)
        seen |= {(script.is_whole, owner) for owner in owners}
        assert document.domains == {script.domain}
        chosen = [owner in ("turn", "answer") for owner in owners]
        assert document.predicts == [*chosen[1:], False]
    invented = [(False, owner) for owner in ("script", "turn", "template", "answer")]
    assert seen >= {(True, "script"), (True, "answer"), *(invented if template.after else [])}


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_greedy_documents_are_those_of_transformers(
    family: str, short_texts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checked = hf_model(family), 0
    for script, document in scripted_documents(writer(CHAT, model), monkeypatch):
        owners = expected_owners(document, script, CHAT, {END, SEMICOLON})
        if script.temperature:
            continue
        best = hf_logits(model, document.tokens).argmax(-1).tolist()
        places = [place for place, owner in enumerate(owners) if owner == "answer"]
        assert [document.tokens[place] for place in places] == [best[place - 1] for place in places]
        checked += len(places)
    assert checked > 30


def test_sampled_tokens_have_their_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean surprise of turns and of sampled answers is that of their temperature, within four deviations."""
    monkeypatch.setattr(writing, "_TURN_TOKENS", 30)
    monkeypatch.setattr(writing, "_ANSWER_TOKENS", 60)
    flat = tiny_model("llama")
    with torch.no_grad():
        flat.lm_head.weight.mul_(0.5)  # a distribution with many likely tokens
    excess: dict[float, list[torch.Tensor]] = {0.9: [], 0.8: [], 0.4: []}
    for script, document in scripted_documents(writer(CHAT, flat), monkeypatch, documents=100, length=500):
        owners = expected_owners(document, script, CHAT, {END, SEMICOLON})
        logits, tokens = hf_logits(flat, document.tokens), torch.tensor(document.tokens)
        drawn = (tokens != END) & (tokens != SEMICOLON)
        for part, temperature in (("turn", 0.9), ("answer", script.temperature)):
            places = torch.tensor([owner == part for owner in owners]).logical_and(drawn).nonzero()[:, 0]
            if temperature:
                chances = logits[places - 1] / temperature
                chances[:, [END, SEMICOLON]] -= torch.inf  # the template's tokens replace the end of a turn
                chances = chances.softmax(-1)
                surprise = -chances.clamp(min=1e-30).log()
                mean = (chances * surprise).sum(-1)
                deviation = (chances * (surprise - mean[:, None]) ** 2).sum(-1)
                found = surprise.gather(1, tokens[places, None])[:, 0]
                excess[temperature] += torch.stack((found - mean, deviation), dim=1)
    for found in excess.values():
        sums = torch.stack(found).sum(0)
        assert len(found) > 100
        assert abs(sums[0]) < 4 * sums[1].sqrt()


def test_a_chunk_depends_only_on_its_number_and_the_seed() -> None:
    chunks = [write(writer(CHAT), 4, number, 60) for number in range(2)]
    again = write(writer(CHAT), 4, 1, 60)
    assert all(torch.equal(getattr(again, name), tensor) for name, tensor in vars(chunks[1]).items())
    assert not torch.equal(chunks[0].tokens[0], chunks[1].tokens[0])
    assert not torch.equal(write(writer(CHAT), 4, 1, 60, seed=1).tokens[0], again.tokens[0])


def test_a_quarter_of_the_scripts_are_prompts_and_the_others_start_turns() -> None:
    one, source = writer(CHAT), random.Random(0)
    prompts = domain_prompts(CHAT)
    scripts = [one.script(prompts, 64, source) for _ in range(512)]
    flat = [tuple(prompt) for of_domain in prompts for prompt in of_domain]
    whole, started = ([script for script in scripts if script.is_whole is kind] for kind in (True, False))
    assert 0.15 < len(whole) / len(scripts) < 0.3, "a quarter, but for prompts longer than half a row"
    assert {script.tokens for script in whole} == {prompt for prompt in flat if len(prompt) <= 32}
    assert {script.temperature for script in whole} == {0.4, 0.8}
    assert {script.temperature for script in started} == {0.0, 0.8}
    assert {script.domain for script in scripts} == {0, 1, 2}
    for script in started:
        assert script.tokens[: len(CHAT.before)] == CHAT.before
        assert any(prompt[: len(script.tokens)] == list(script.tokens) for prompt in prompts[script.domain])
        assert len(script.tokens) - len(CHAT.before) <= 12
    assert len({len(script.tokens) for script in started}) > 8


def test_a_script_of_a_base_model_is_never_empty() -> None:
    one, source = writer(BASE), random.Random(0)
    scripts = [one.script(domain_prompts(BASE), 64, source) for _ in range(64)]
    assert all(script.is_whole and script.tokens for script in scripts)


def test_a_turn_leaves_space_in_the_row_for_its_answer() -> None:
    """Also after a system prompt longer than half a row."""
    for template in (CHAT, Template(tuple(random_prompt(50, 9)), CHAT.after)):
        corpus = write(writer(template, endless(tiny_model("llama")), ends=False), documents=16, length=90)
        for row in range(len(corpus)):
            for document in documents_of(corpus, row):
                assert document.predicts[-2], "the last token is of an answer"
                assert len(document.tokens) <= 90


def test_progress_counts_every_token_that_the_model_chose() -> None:
    counts: list[int] = []
    one = writer(BASE, endless(tiny_model("llama")), ends=False)
    corpus = one.chunk(domain_prompts(BASE), 0, 8, 64, progress=counts.append)
    assert sum(counts) == corpus.predicts.sum()
