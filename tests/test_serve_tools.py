"""Tools through OpenAI's own client: calls in the text of an answer become tool calls, whole and streamed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from selfspec import Engine
from selfspec.serve.tools import LLAMA, QWEN, ToolCallParser, ToolForm, tool_form
from tests.engines import save_profile
from tests.serving import CHAT, FORCED, Served, serving
from tests.tiny import tiny_model
from tests.tiny_tokenizer import JSON_TOKENS, json_tokenizer

QWENS = (
    "{% if tools %}{{ tools | tojson }} answer as <tool_call>{{ '{' }}name, arguments{{ '}' }}</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}={{ call.function.arguments | tojson }}"
    "{% endfor %}\n{% endfor %}a:"
)
LLAMAS = QWENS.replace("<tool_call>", "<|start_header_id|>").replace("</tool_call>", "")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "now": {"type": "boolean"}},
            "required": ["city", "now"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        },
    },
}
STOP: Any = {"type": "function", "function": {"name": "stop-it"}}
TEXT = (
    'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "now": true}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop-it", "arguments": {}}\n</tool_call>'
)
CALLS = [("get_weather", '{"city": "Rome", "now": true}'), ("stop-it", "{}")]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 1024}
    model = tiny_model("llama", vocab_size=len(JSON_TOKENS), **sizes)
    tokenizer = json_tokenizer()
    tokenizer.chat_template = QWENS
    profile = save_profile(model, tmp_path_factory.mktemp("profile"))
    with serving(Engine.from_model(model, tokenizer, profile=profile, max_batch=4)) as running:
        yield running


def ask(served: Served, **fields: Any) -> Any:
    fields = {"messages": CHAT, "tools": [WEATHER, STOP], "max_tokens": 300, "temperature": 0, **fields}
    return served.client.chat.completions.create(model=served.engine.name, **fields)


def say(served: Served, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Makes the model answer with this text."""
    build, said = served.engine.build_request, {"type": "regex", "regex": re.escape(text).replace("\\\n", "\\n")}
    monkeypatch.setattr(served.engine, "build_request", lambda *args, **of: build(*args, response_format=said, **of))


def pairs_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


def test_calls_become_tool_calls_and_the_text_before_stays_content(served, monkeypatch):
    say(served, monkeypatch, TEXT)
    choice = ask(served).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Sure.\n", "tool_calls")
    assert pairs_of(choice.message) == CALLS
    assert len({call.id for call in choice.message.tool_calls}) == 2
    plain = ask(served, tool_choice="none").choices[0]
    assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == (TEXT, None, "stop")
    cut = ask(served, max_tokens=60).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls[0].function.name == "get_weather"


def test_calls_are_streamed_as_indexed_deltas_with_names_before_arguments(served, monkeypatch):
    say(served, monkeypatch, TEXT)
    chunks = [chunk.choices[0] for chunk in ask(served, stream=True, logprobs=True, extra_body=FORCED)]
    deltas = [call for choice in chunks for call in choice.delta.tool_calls or ()]
    assert "".join(choice.delta.content or "" for choice in chunks) == "Sure.\n"
    found: list[list[str]] = []
    for delta in deltas:
        if delta.id is not None:
            assert delta.index == len(found) and delta.type == "function" and delta.function.arguments == ""
            found.append([delta.function.name, ""])
        else:
            assert delta.index == len(found) - 1 and delta.function.name is None
            found[-1][1] += delta.function.arguments
    assert [tuple(call) for call in found] == CALLS
    assert len(deltas) > 6, "arguments come in pieces"
    assert chunks[-1].finish_reason == "tool_calls"
    entries = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content]
    assert b"".join(bytes(entry.bytes) for entry in entries).startswith(TEXT.encode())


def test_without_parallel_calls_an_answer_has_the_first_call_only(served, monkeypatch):
    say(served, monkeypatch, TEXT)
    choice = ask(served, parallel_tool_calls=False).choices[0]
    assert (pairs_of(choice.message), choice.message.content) == (CALLS[:1], "Sure.\n")
    assert choice.finish_reason == "tool_calls"
    chunks = [chunk.choices[0] for chunk in ask(served, parallel_tool_calls=False, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0} and chunks[-1].finish_reason == "tool_calls"
    assert "".join(delta.function.arguments for delta in deltas) == CALLS[0][1]
    assert pairs_of(ask(served, parallel_tool_calls=True).choices[0].message) == CALLS


@pytest.mark.parametrize("template", [QWENS, LLAMAS], ids=["qwen", "llama"])
def test_required_and_named_functions_are_called_by_any_model(served, template, monkeypatch):
    """The model's weights are random."""
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", template)
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for tool_choice, length in (("required", 110), (named, 200)):
        fields = {"tool_choice": tool_choice, "max_tokens": length}
        answers = [
            ask(served, **fields, extra_body={"speculative_decoding": mode}).choices[0] for mode in (False, "force")
        ]
        calls = pairs_of(answers[0].message)
        assert calls == pairs_of(answers[1].message) and calls
        assert answers[0].finish_reason in ("tool_calls", "length")
        complete = calls if answers[0].finish_reason == "tool_calls" else calls[:-1]
        for name, arguments in complete:
            given = json.loads(arguments)
            assert list(given) == ([] if name == "stop-it" else ["city", "now"])
            assert name == "stop-it" or (given["city"] in ("Paris", "Rome") and isinstance(given["now"], bool))
        if tool_choice is named:
            assert [name for name, _ in calls] == ["get_weather"]


def test_tools_calls_and_their_answers_reach_the_template(served):
    from selfspec.serve.prompts import tokenize_chat
    from selfspec.serve.protocol import Message, Tool

    called = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    without_arguments = {"id": "c2", "type": "function", "function": {"name": "stop-it", "arguments": ""}}
    history: list[Any] = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [called, without_arguments]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    messages, tools = [Message(**message) for message in history], [Tool(**WEATHER)]
    text = served.engine.tokenizer.decode(tokenize_chat(served.engine, messages, tools))
    assert json.dumps([WEATHER]) in text and 'assistant:get_weather={"city": "Rome"}stop-it={}tool:raina:' in text
    assert ask(served, messages=history, max_tokens=2).usage.prompt_tokens > len(text) // 2


def test_tools_that_cannot_be_served_are_refused(served, monkeypatch):
    bad = {**WEATHER["function"], "parameters": {"type": "object", "properties": {"x": {"type": "nothing"}}}}
    nested = '{"a":' * 600 + "1" + "}" * 600
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [STOP], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": bad}], "tool_choice": "required"}, "tools"),
        ({"tools": [STOP], "parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
         "messages.0.tool_calls.0.function.arguments"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested}}]}]},
         "messages"),
    ]  # fmt: skip
    for fields, param in cases:
        response = served.http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", "{{ messages[0].content }}")
    response = served.http.post("/v1/chat/completions", json={"messages": CHAT, "tools": [STOP], "max_tokens": 2})
    assert response.status_code == 400 and "chat template has no tools" in response.json()["error"]["message"]


NAMES = ("f", "get_weather")
ANSWERS: list[tuple[ToolForm, str, str, list[tuple[str, str]]]] = [
    (QWEN, "hello", "hello", []),
    (QWEN, " \n hello", " \n hello", []),
    (QWEN, '\n<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>{", "b": [1, {"c": "\\""}]}}</tool_call>\n',
     "", [("f", '{"a": "}</tool_call>{", "b": [1, {"c": "\\""}]}')]),
    (QWEN, 'a <tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call> b', "a b", [("f", '{"x": 1}')]),
    (QWEN, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
    (QWEN, '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    (QWEN, "a<tool_call> no JSON</tool_call>", "a<tool_call> no JSON</tool_call>", []),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"a": "tru', "", [("f", '{"a": "tru')]),
    (QWEN, '<tool_call>{"na', '<tool_call>{"na', []),
    (QWEN, "a <tool_c", "a <tool_c", []),
    (LLAMA, '{"name": "get_weather", "parameters": {"city": "Rome"}}', "", [("get_weather", '{"city": "Rome"}')]),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"q": "{"}}', "", [("f", '{"q": "{"}')]),
    (LLAMA, 'a <|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"x": 1}} b', "a b",
     [("f", "{}"), ("f", '{"x": 1}')]),
    (LLAMA, '{"answer": 4} is it', '{"answer": 4} is it', []),
    (LLAMA, "{ code }", "{ code }", []),
    (LLAMA, ';{"name": "f", "parameters": {}}', ';{"name": "f", "parameters": {}}', []),
    (LLAMA, 'say {"name": "f", "parameters": {}}', 'say {"name": "f", "parameters": {}}', []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_a_text_gives_the_same_calls_however_it_is_cut_into_pieces(form, text, content, calls):
    for seed in range(40):
        dice, at, parser = random.Random(seed), 0, ToolCallParser(form, NAMES)
        said, found = "", []
        while at < len(text) or at == 0:
            end = len(text) if seed == 0 else at + dice.choice((1, 1, 2, 5, 20))
            more, deltas = parser.add(text[at:end], last=end >= len(text) and seed % 2 == 0)
            said, at = said + more, end
            found += deltas
        more, deltas = parser.add("", last=True)
        said, found = said + more, found + deltas
        merged: list[tuple[str, str]] = []
        for delta in found:
            if "id" in delta:
                merged.append((delta["function"]["name"], ""))
            else:
                merged[-1] = merged[-1][0], merged[-1][1] + delta["function"]["arguments"]
        assert (said, merged) == (content, calls), seed


def test_the_form_of_calls_follows_from_the_chat_template():
    assert (tool_form(QWENS), tool_form(LLAMAS)) == (QWEN, LLAMA)
    for template in ("{{ messages }}", "{{ tools }}", "{{ tools }}<tool_call><function=f>"):
        with pytest.raises(ValueError, match="chat template"):
            tool_form(template)
