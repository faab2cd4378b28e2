"""Log probabilities through OpenAI's own client: the engine's values in the shapes of chats and of text completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from selfspec.logprobs import TokenLogprob
from selfspec.sequence import Request, Sequence
from selfspec.serve.logprobs import ChoiceLogprobs, TokenBytes
from tests.serving import CHAT, FORCED, Served, serving, tiny_engine
from tests.tiny_tokenizer import ids_of, spaced_tokenizer, tiny_tokenizer

SETTINGS: dict[str, Any] = {"max_tokens": 12, "seed": 5}
AS_OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "seed": 5, "do_sample": True, "temperature": 1.0, "top_k": 0}
OFF = {"speculative_decoding": False}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    with serving(tiny_engine(tmp_path_factory.mktemp("profile"), max_position_embeddings=128)) as running:
        yield running


def chat(served: Served, **fields: Any) -> Any:
    return served.client.chat.completions.create(model=served.engine.name, messages=CHAT, **{**SETTINGS, **fields})


def complete(served: Served, prompt: Any, **fields: Any) -> Any:
    return served.client.completions.create(model=served.engine.name, prompt=prompt, **{**SETTINGS, **fields})


@pytest.mark.parametrize("mode", [OFF, FORCED], ids=["off", "forced"])
def test_a_chats_log_probabilities_are_the_engines(served, mode):
    expected = served.engine.complete(CHAT, **AS_OPTIONS, logprobs=3)
    answer = chat(served, logprobs=True, top_logprobs=3, extra_body=mode)
    found = answer.choices[0].logprobs.content
    assert [token.logprob for token in found] == pytest.approx([token.logprob for token in expected.logprobs], abs=1e-5)
    assert b"".join(bytes(token.bytes) for token in found).decode(errors="replace") == expected.text
    for ours, theirs in zip(found, expected.logprobs, strict=True):
        assert [token.logprob for token in ours.top_logprobs] == pytest.approx(
            [value for _, value in theirs.top], abs=1e-5
        )
    assert answer.usage.completion_tokens == len(found) == 12
    streamed = [chunk.choices[0].logprobs for chunk in chat(served, logprobs=True, stream=True, extra_body=mode)]
    entries = [entry for logprobs in streamed if logprobs is not None for entry in logprobs.content]
    assert [token.logprob for token in entries] == pytest.approx([token.logprob for token in found], abs=1e-5)
    assert all(not token.top_logprobs for token in entries)
    assert chat(served).choices[0].logprobs is None


def test_a_texts_log_probabilities_are_the_engines_with_the_prompts(served):
    expected = served.engine.complete("abc", **AS_OPTIONS, logprobs=2, prompt_logprobs=2)
    whole = complete(served, "abc", logprobs=2, echo=True).choices[0]
    found = whole.logprobs
    values = [token.logprob for token in [*expected.prompt_logprobs, *expected.logprobs]]
    assert found.token_logprobs == [None, *(pytest.approx(value, abs=1e-5) for value in values)]
    assert found.top_logprobs[0] is None and all(len(likely) in (2, 3) for likely in found.top_logprobs[1:])
    for token, value, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[1:]:
        assert top[token] == value
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or whole.text.startswith(token, offset)
    without = complete(served, "abc", logprobs=2).choices[0]
    assert without.logprobs.token_logprobs == found.token_logprobs[3:] and without.logprobs.text_offset[0] == 0
    chunks = list(complete(served, "abc", logprobs=2, echo=True, stream=True, extra_body=OFF))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    for name in ("tokens", "token_logprobs", "text_offset"):
        streamed = [value for part in parts for value in getattr(part, name)]
        assert streamed == [value if isinstance(value, str) else pytest.approx(value) for value in getattr(found, name)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_no_new_tokens_with_echo_score_the_prompts(served, stream):
    prompts = [served.engine.tokenizer("the end").input_ids, [5]]
    answer = complete(served, prompts, max_tokens=0, echo=True, logprobs=1, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer if chunk.choices[0].logprobs is not None]
    else:
        choices = answer.choices
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (0, "length")
    assert [choice.text for choice in choices] == [served.engine.tokenizer.decode(prompt) for prompt in prompts]
    expected = served.engine.complete("the end", max_new_tokens=1, prompt_logprobs=1).prompt_logprobs
    assert choices[0].logprobs.token_logprobs[1:] == pytest.approx([token.logprob for token in expected], abs=1e-5)
    assert choices[1].logprobs.token_logprobs == [None]


def test_log_probabilities_that_are_not_possible_are_refused(served):
    for path, fields, param in (
        ("chat/completions", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"messages": CHAT, "logprobs": 1}, "logprobs"),
        ("chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "logprobs": -1}, "logprobs"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ):
        response = served.http.post(f"/v1/{path}", json=fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields


def test_offsets_count_the_special_tokens_of_the_prompts_text():
    tokenizer = tiny_tokenizer()
    prompt = tokenizer("<s>hi</s>")["input_ids"]
    sequence = Sequence(prompt, 0, 0, 99)
    sequence.prompt_logprobs = [TokenLogprob(token, -1.0, ()) for token in prompt[1:]]
    sequence.logprobs = [TokenLogprob(token, -1.0, ()) for token in ids_of("a", "</s>")]
    shaped = ChoiceLogprobs(sequence, TokenBytes(tokenizer), "text", "<s>hi</s>").advance(2)
    assert shaped is not None and shaped["tokens"] == ["<s>", "h", "i", "</s>", "a", "</s>"]
    assert shaped["text_offset"] == [0, 3, 4, 5, 9, 10]


def test_parts_of_characters_are_named_by_their_bytes_and_specials_have_no_text():
    tokens = ids_of("a", "é", "ten")
    sequence = Sequence([1, *tokens[:1]], 0, 0, 99)
    Request([sequence], logprobs=1, prompt_logprobs=1)
    sequence.prompt_logprobs = [TokenLogprob(tokens[0], -0.5, ((7, -0.25),))]
    sequence.logprobs = [TokenLogprob(token, float("-inf"), ()) for token in tokens[1:]]
    shaped = ChoiceLogprobs(sequence, TokenBytes(tiny_tokenizer()), "text", "a").advance(3)
    assert shaped is not None
    assert shaped["tokens"] == ["<s>", "a", "bytes:\\xc3", "bytes:\\xa9", "ten"]
    assert shaped["text_offset"] == [0, 0, 1, 1, 2]
    assert shaped["token_logprobs"] == [None, -0.5, -9999.0, -9999.0, -9999.0]
    spaced = TokenBytes(spaced_tokenizer())
    sequence = Sequence([4, 5], 0, 0, 99)
    sequence.prompt_logprobs = [TokenLogprob(5, -1.0, ())]
    shaped = ChoiceLogprobs(sequence, spaced, "text", "w4 w5").advance(0)
    assert shaped is not None and (shaped["tokens"], shaped["text_offset"]) == ([" w4", " w5"], [0, 2])
