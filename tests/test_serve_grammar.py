"""Structured output through OpenAI's own client, over a socket."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from selfspec import Engine
from tests.engines import save_profile
from tests.serving import CHAT, FORCED, TEMPLATE, Served, eventually, serving
from tests.tiny import tiny_model
from tests.tiny_tokenizer import JSON_TOKENS, json_tokenizer


class Answer(BaseModel):
    kind: Literal["yes", "no"]
    count: int = Field(ge=0, le=99)
    flags: list[bool] = Field(max_length=2)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    model = tiny_model("llama", vocab_size=len(JSON_TOKENS))
    tokenizer = json_tokenizer()
    tokenizer.chat_template = TEMPLATE
    profile = save_profile(model, tmp_path_factory.mktemp("profile"))
    with serving(Engine.from_model(model, tokenizer, profile=profile, max_batch=8)) as running:
        yield running
        eventually(running.is_idle)


def fields(served: Served, **extra: Any) -> dict[str, Any]:
    return {"model": served.engine.name, "messages": CHAT, "max_tokens": 200, "seed": 3, "extra_body": extra}


def test_a_json_schema_gives_the_same_valid_answer_with_speculation_and_without(served):
    before = served.engine.metrics()
    answers = [
        served.client.chat.completions.parse(response_format=Answer, **fields(served, **mode))
        for mode in (FORCED, {"speculative_decoding": False})
    ]
    assert answers[0].choices[0].message.parsed == answers[1].choices[0].message.parsed is not None
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].choices[0].finish_reason == "stop"
    assert served.engine.metrics() != before


def test_regex_and_grammar_restrict_texts_and_streams(served):
    for form in ({"regex": "(ab|cd){2,4}"}, {"grammar": 'start: ("ab" | "cd"){2,4}'}):
        with served.client.chat.completions.create(stream=True, **fields(served, **form, **FORCED)) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert re.fullmatch("(ab|cd){2,4}", text)
    body = {"prompt": ["hi", "the"], "n": 2, "regex": "[0-9]{3}", "max_tokens": 20, "response_format": None}
    choices = served.http.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 4 and all(re.fullmatch("[0-9]{3}", choice["text"]) for choice in choices)


def test_a_grammar_that_exceeds_its_limits_while_decoding_is_named(served):
    doubled = "\n".join(f"x{depth}: x{depth + 1} x{depth + 1}" for depth in range(40))
    for start in ("x0", '"a" x0'):  # fails at the first mask, or at the second
        body = {"prompt": "hi", "grammar": f'start: {start}\n{doubled}\nx40: "a"', "max_tokens": 20}
        error = served.http.post("/v1/completions", json=body).json()["error"]
        assert error["param"] == "grammar" and error["message"].startswith("grammar cannot be followed")
