"""The text a model writes for its own exits: what a document consists of, whose tokens are whose, and which are chosen.

Documents are checked against their scripts and against transformers, each document alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfspec import Engine
from selfspec.calibrate import writing
from selfspec.calibrate.corpus import Corpus
from selfspec.calibrate.writing import Script, Template, Writer, write_answers
from selfspec.models.loading import adopt
from selfspec.text import encode
from tests.calibrated import Written, chat_tokenizer, documents_of
from tests.scripted import endless, left_padded, random_prompt
from tests.tiny import FAMILIES, tiny_model
from tests.tiny_tokenizer import ids_of, tiny_tokenizer

END, SEMICOLON = 2, ids_of(";")[0]
CHAT = Template((1, *ids_of("u", ":")), tuple(ids_of(";", "\n", "a", ":")))
BASE = Template((), ())
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def hf_model(family: str) -> PreTrainedModel:
    return tiny_model(family)


@cache
def eager_model() -> PreTrainedModel:
    """A llama that often ends its texts: the heads of both ends are made larger."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[[END, SEMICOLON]] *= 1.6
    return model


@torch.no_grad()
def hf_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


# The template


def test_a_chat_template_is_what_stands_around_a_users_text() -> None:
    template = Template.of(chat_tokenizer())
    assert template == CHAT
    whole = encode(chat_tokenizer(), [{"role": "user", "content": "abc"}])
    assert whole == [*template.before, *ids_of("a", "b", "c"), *template.after]


def test_a_base_model_has_nothing_around_a_text() -> None:
    assert Template.of(tiny_tokenizer()) == BASE


def test_a_base_model_keeps_the_token_every_text_begins_with() -> None:
    class Beginning:
        chat_template = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, *ids_of(*text)]}

    assert Template.of(Beginning()) == Template((1,), ())


@pytest.mark.parametrize("template", ["hello", "{{ messages[0].content }}"], ids=["hides the text", "no end"])
def test_a_template_without_a_users_text_or_an_end_is_refused(template: str) -> None:
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


@families
def test_greedy_answers_are_the_engines(family: str) -> None:
    """Prompts of different lengths, shorter and longer than sliding windows; nothing ends an answer but the limit."""
    engine = Engine.from_model(endless(tiny_model(family)))
    prompts = [random_prompt(length) for length in (1, 4, 9, 17)]
    corpus = write_answers(engine.model, BASE, [], prompts, [0.0] * 4, 24, seed=0)
    for row, (prompt, answer) in enumerate(zip(prompts, greedy_answers(prompts, engine, 24, []), strict=True)):
        (document,) = documents_of(corpus, row)
        assert len(answer) == 24
        assert document.tokens == prompt + answer
        assert document.predicts == [False] * (len(prompt) - 1) + [True] * 24 + [False]


@pytest.mark.parametrize("template", [BASE, CHAT], ids=["base", "chat"])
def test_answers_end_where_the_engines_do(template: Template) -> None:
    """With the model's own end, and with the one a chat template puts after a turn."""
    engine = Engine.from_model(eager_model())
    prompts = [random_prompt(length, seed) for length in (3, 8, 12) for seed in range(8)]
    limit = 12
    ends = [END, *template.after[:1]]
    corpus = write_answers(engine.model, template, [END], prompts, [0.0] * len(prompts), limit, seed=0)
    answers = greedy_answers(prompts, engine, limit, ends)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        (document,) = documents_of(corpus, row)
        assert document.tokens == prompt + answer
        assert document.predicts == [False] * (len(prompt) - 1) + [True] * len(answer) + [False]
        assert corpus.predicts[row].sum() == len(answer)
    lengths = {len(answer) for answer in answers}
    assert limit in lengths and min(lengths) < limit, "some end by themselves, some at the limit"
    assert {answer[-1] for answer in answers if len(answer) < limit} == set(ends)


def test_warm_answers_are_drawn_with_their_seed() -> None:
    model = adopt(hf_model("llama"))
    prompts = [random_prompt(6)] * 3
    first, again, other = (write_answers(model, BASE, [], prompts, [0.8, 0.8, 0.0], 20, seed) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens[0], other.tokens[0])
    assert torch.equal(first.tokens[2], other.tokens[2]), "the greedy one has no chance in it"
    assert not torch.equal(first.tokens[0], first.tokens[1]), "rows are drawn independently"


def test_drawing_leaves_torchs_generator_as_it_was() -> None:
    model = adopt(hf_model("llama"))  # first: whoever builds it draws its weights
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    write_answers(model, BASE, [], [random_prompt(3)], [1.0], 4, seed=0)
    assert torch.equal(torch.rand(3), expected)


# Chunks


@dataclass
class Recorded:
    """A chunk, and the scripts its rows were given."""

    corpus: Corpus
    scripts: list[list[Script]]


class Recording(Writer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given: list[Script] = []

    def _script(self, source: Any) -> Script:
        script = super()._script(source)
        self.given.append(script)
        return script

    def record(self, number: int) -> Recorded:
        self.given.clear()
        corpus = self.chunk(number)
        of_row = len(self.given) // self.rows
        rows = [self.given[start : start + of_row] for start in range(0, len(self.given), of_row)]
        return Recorded(corpus, rows)


def writer(template: Template, rows: int = 8, length: int = 150, seed: int = 0, model: Any = None) -> Recording:
    prompts = [
        [[*template.before, *random_prompt(length, domain), *template.after] for length in (6, 15, 30)]
        for domain in range(3)
    ]
    return Recording(adopt(model or eager_model()), prompts, template, [END], rows, length, seed)


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns and answers are cut early, so that every kind of end is met."""
    monkeypatch.setattr(writing, "_TURN_TOKENS", 9)
    monkeypatch.setattr(writing, "_ANSWER_TOKENS", 13)


def expected_owners(document: Written, script: Script, template: Template, ends: set[int]) -> tuple[list[str], bool]:
    """Whose each token of a document must be, by reading along; and whether the document is complete.

    Checks on the way that scripts and closings are placed as they are, and that turns and answers end where they must.
    """
    tokens, owners = document.tokens, ["script"] * len(script.tokens)
    assert tokens[: len(owners)] == list(script.tokens)[: len(tokens)]
    if not script.whole:
        while len(owners) < len(tokens) and owners.count("turn") < writing._TURN_TOKENS:
            if tokens[len(owners)] in ends:
                break
            owners.append("turn")
        closing = tokens[len(owners) : len(owners) + len(template.after)]
        assert closing == list(template.after)[: len(closing)]
        owners += ["closing"] * len(template.after)
    while len(owners) < len(tokens) and owners.count("answer") < writing._ANSWER_TOKENS:
        owners.append("answer")
        if tokens[len(owners) - 1] in ends:
            break
    assert len(owners) >= len(tokens), "nothing follows an answer"
    complete = owners[-1] == "answer" and (tokens[-1] in ends or owners.count("answer") == writing._ANSWER_TOKENS)
    return owners[: len(tokens)], complete


@pytest.mark.parametrize("template", [BASE, Template((1,), ()), CHAT], ids=["base", "base with a beginning", "chat"])
def test_a_row_is_documents_and_each_what_its_script_asks_for(template: Template, short_texts: None) -> None:
    length = 150
    recorded = writer(template, length=length).record(0)
    ends, seen = {END, *template.after[:1]}, set()
    for row, scripts in enumerate(recorded.scripts):
        documents = documents_of(recorded.corpus, row)
        assert sum(len(document.tokens) for document in documents) == length, "no place is left empty"
        for index, document in enumerate(documents):
            script = scripts[index % len(scripts)]
            owners, complete = expected_owners(document, script, template, ends)
            seen |= {(script.whole, owner) for owner in owners}
            assert complete or index == len(documents) - 1
            assert document.positions == list(range(len(document.tokens)))
            assert document.domains == {script.domain}
            own = [owner in ("turn", "answer") for owner in owners]
            assert document.predicts == [*own[1:], False]
    given = [(False, owner) for owner in ("script", "turn", "closing", "answer")]
    assert seen >= {(True, "script"), (True, "answer"), *(given if template.after else [])}
    assert {script.domain for scripts in recorded.scripts for script in scripts} == {0, 1, 2}


def test_the_last_token_of_a_row_is_judged_by_itself() -> None:
    """Not by the one that would come next: rows that end with a script's last token, and with an answer's."""
    template = Template((), ())
    hand = writing._Hand(adopt(hf_model("llama")), template, [], rows=1, length=8, longest=8)
    whole = [[Script(tuple(random_prompt(8)), True, 0.0, 0)] * 8]
    assert not hand.write(whole, lambda _: None).predicts.any()
    short = [[Script(tuple(random_prompt(5)), True, 0.0, 0)] * 8]
    assert hand.write(short, lambda _: None).predicts[0].tolist() == [False] * 4 + [True] * 3 + [False]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_greedy_documents_are_those_of_the_model_alone_with_them(family: str, short_texts: None) -> None:
    """What comes earlier in the row, whatever it is, plays no part."""
    model = hf_model(family)
    recorded = writer(CHAT, model=model).record(0)
    checked = 0
    for row, scripts in enumerate(recorded.scripts):
        for index, document in enumerate(documents_of(recorded.corpus, row)):
            script = scripts[index % len(scripts)]
            owners, _ = expected_owners(document, script, CHAT, {END, SEMICOLON})
            if script.temperature:
                continue
            best = hf_logits(model, document.tokens).argmax(-1).tolist()
            places = [place for place, owner in enumerate(owners) if owner == "answer"]
            assert [document.tokens[place] for place in places] == [best[place - 1] for place in places]
            checked += len(places) if index else 0
    assert checked > 30, "documents that are not the first of their row"


def test_another_first_document_does_not_change_the_second(short_texts: None) -> None:
    hand = writing._Hand(adopt(hf_model("mistral")), BASE, [END], rows=2, length=80, longest=20)
    second = Script(tuple(random_prompt(7)), True, 0.0, 1)
    rows = [[Script(tuple(random_prompt(length, 5)), True, 0.0, 0), *[second] * 7] for length in (4, 20)]
    corpus = hand.write(rows, lambda _: None)
    one, other = (documents_of(corpus, row)[1] for row in range(2))
    assert one.tokens == other.tokens and len(one.tokens) > 7
    assert one.start != other.start


def test_drawn_tokens_have_their_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean surprise of turns and of warm answers is what their temperature makes it, within four deviations."""
    monkeypatch.setattr(writing, "_TURN_TOKENS", 30)
    flat = tiny_model("llama")
    with torch.no_grad():
        flat.lm_head.weight.mul_(0.5)  # so that there is something to draw
    recorded = writer(CHAT, rows=32, model=flat).record(0)
    excess: dict[float, list[torch.Tensor]] = {0.9: [], 0.8: [], 0.4: []}
    for row, scripts in enumerate(recorded.scripts):
        for index, document in enumerate(documents_of(recorded.corpus, row)):
            script = scripts[index % len(scripts)]
            owners, _ = expected_owners(document, script, CHAT, {END, SEMICOLON})
            logits = hf_logits(flat, document.tokens)
            for place, owner in enumerate(owners):
                temperature = {"turn": 0.9, "answer": script.temperature}.get(owner, 0)
                if temperature and document.tokens[place] not in (END, SEMICOLON):
                    chances = logits[place - 1] / temperature
                    chances[[END, SEMICOLON]] -= torch.inf  # ends of turns are replaced
                    chances = chances.softmax(-1)
                    surprise = -chances.clamp(min=1e-30).log()
                    mean = (chances * surprise).sum()
                    deviation = (chances * (surprise - mean) ** 2).sum()
                    excess[temperature].append(torch.stack((surprise[document.tokens[place]] - mean, deviation)))
    for found in excess.values():
        sums = torch.stack(found).sum(0)
        assert len(found) > 100
        assert abs(sums[0]) < 4 * sums[1].sqrt()


def test_a_chunk_depends_on_its_number_and_the_seed_alone() -> None:
    one = writer(CHAT, rows=4, length=60)
    chunks = [one.chunk(number) for number in range(3)]
    again = writer(CHAT, rows=4, length=60).chunk(1)  # without writing the first before it
    assert all(torch.equal(getattr(again, name), tensor) for name, tensor in vars(chunks[1]).items())
    assert len({tuple(chunk.tokens.flatten().tolist()) for chunk in chunks}) == 3
    other = writer(CHAT, rows=4, length=60, seed=1).chunk(1)
    assert not torch.equal(other.tokens, again.tokens)


def test_chunks_do_not_share_memory() -> None:
    one = writer(CHAT, rows=2, length=40)
    chunk = one.chunk(0)
    kept = {name: tensor.clone() for name, tensor in vars(chunk).items()}
    one.chunk(1)
    assert all(torch.equal(getattr(chunk, name), tensor) for name, tensor in kept.items())


def test_scripts_ask_prompts_as_they_are_and_begin_turns_like_them() -> None:
    one = writer(CHAT, rows=64, length=64)
    one.record(0)
    prompts = [tuple(prompt) for of_domain in one.prompts for prompt in of_domain]
    whole, begun = ([script for script in one.given if script.whole is kind] for kind in (True, False))
    assert 0.15 < len(whole) / len(one.given) < 0.3, "a quarter of them, but for those longer than half a row"
    assert {script.tokens for script in whole} == {prompt for prompt in prompts if len(prompt) <= 32}
    assert {script.temperature for script in whole} == {0.4, 0.8}
    assert {script.temperature for script in begun} == {0.0, 0.8}
    for script in begun:
        turn = script.tokens[len(CHAT.before) :]
        assert script.tokens[: len(CHAT.before)] == CHAT.before
        assert any(prompt[: len(script.tokens)] == list(script.tokens) for prompt in one.prompts[script.domain])
        assert len(turn) <= 12
    assert len({len(script.tokens) for script in begun}) > 8


def test_a_base_models_script_is_never_empty() -> None:
    one = writer(BASE, rows=16, length=64)
    one.record(0)
    assert all(script.whole and script.tokens for script in one.given)


def test_a_long_system_prompt_leaves_room_for_the_turn(short_texts: None) -> None:
    """Templates may put more before a turn than half a row holds."""
    template = Template(tuple(random_prompt(50, 9)), CHAT.after)
    recorded = writer(template, rows=4, length=90).record(0)
    assert recorded.corpus.predicts.any()
    for row, scripts in enumerate(recorded.scripts):
        first = documents_of(recorded.corpus, row)[0]
        assert first.tokens[: len(scripts[0].tokens)] == list(scripts[0].tokens)


def test_progress_counts_every_token_written() -> None:
    counts: list[int] = []
    writer(BASE, rows=4, length=64).chunk(0, counts.append)
    assert sum(counts) == 4 * 64
