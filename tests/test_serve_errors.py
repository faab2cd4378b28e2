"""The server's refusals: errors in OpenAI's shape that name the field, limits, keys, and mutated bodies."""

from __future__ import annotations

import copy
import json
import logging
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from selfspec.serve.limits import Limits
from selfspec.serve.logs import JsonFormatter, TextFormatter
from tests.serving import CHAT, Served, eventually, serving, tiny_engine

LIMITS = Limits(body_bytes=20_000, samples=4, sequences=6)
KEY = "a key"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    engine = tiny_engine(tmp_path_factory.mktemp("profile"), max_position_embeddings=512)
    with serving(engine, limits=LIMITS, api_key=KEY, cors_origins=["http://page.example"]) as running:
        yield running
        eventually(running.is_idle)


def post(served: Served, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", **headers}
    with served.http as http:
        return http.post(path, content=content, headers=headers)


REFUSED = [
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, 400, "response_format"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, 400, "regex"),
    ({"regex": "(a"}, 400, "regex"),
    ({"grammar": "start: other"}, 400, "grammar"),
    ({"regex": "a", "min_tokens": 2}, 400, "regex"),
    ({"tool_choice": "auto"}, 400, "tool_choice"),
    ({"suffix": "end"}, 400, "suffix"),
    ({"best_of": 2}, 400, "best_of"),
    ({"n": 5}, 422, "n"),
    ({"stop": ["x"] * 17}, 422, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"temperature": 2.5}, 400, "temperature"),
    ({"temperature": True}, 400, "temperature"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"101": 1}}, 400, "logit_bias"),
    ({"domain": "none such"}, 400, "domain"),
    ({"speculative_decoding": "on"}, 400, "speculative_decoding"),
    ({"stop": 1}, 400, "stop"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"model": "another"}, 404, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "bad", "content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x" * 2048}]}, 422, "messages"),
    ({"messages": [{"role": "a", "content": "", "tool_calls": [1]}]}, 400, "messages.0.tool_calls"),
]


def test_a_refusal_names_the_field_in_openais_shape(served):
    for fields, status, param in REFUSED:
        for stream in (False, True):
            options = {} if "stream_options" in fields else {"stream": stream}
            response = post(served, {"messages": CHAT, "max_tokens": 2, **options, **fields})
            assert response.status_code == status, (fields, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"] and error["param"] == param, (fields, error)


def test_a_refusal_says_what_to_use_instead(served):
    image = [{"role": "user", "content": [{"type": "image_url"}]}]
    for fields, said in (
        ({"guided_json": {}}, "use response_format"),
        ({"prompt_logprobs": 1}, "use echo with logprobs"),
        ({"messages": image}, "Only parts of type text are supported"),
        ({"messages": [{"role": "user"}]}, "A message without tool_calls needs content"),
        ({"regex": "(a"}, "regex cannot be followed"),
    ):
        assert said in post(served, {"messages": CHAT, **fields}).json()["error"]["message"], fields
    assert "/v1/chat/completions" in post(served, {}, "/v1/embeddings").json()["error"]["message"]


def test_another_method_is_refused_with_those_that_are_possible(served):
    refused = served.http.get("/v1/completions", headers={"authorization": f"Bearer {KEY}"})
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["message"] == "GET is not possible here: use POST"


def test_a_refusal_lists_every_type_that_a_field_may_have(served):
    message = post(served, {"messages": CHAT, "speculative_decoding": "on"}).json()["error"]["message"]
    assert "boolean" in message and "'force'" in message


def test_values_that_ask_for_nothing_are_accepted_and_unknown_fields_are_logged_by_name(served, caplog):
    nothing = {"logprobs": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1}
    with caplog.at_level(logging.INFO, logger="selfspec"):
        response = post(served, {"messages": CHAT, "max_tokens": 2, **nothing, "store": "SECRET", "suffix": None})
    assert response.status_code == 200, response.text
    assert post(served, {"messages": CHAT, "regex": "a", "max_tokens": 2, **nothing}).status_code == 200
    assert "store" in caplog.text
    assert "SECRET" not in caplog.text and CHAT[0]["content"] not in caplog.text


def test_log_lines_describe_requests_by_values_and_hold_none_of_their_text(served, caplog):
    said = {"messages": [{"role": "user", "content": "SECRET"}], "max_tokens": 3, "speculative_decoding": "force"}
    with caplog.at_level(logging.INFO, logger="selfspec"):
        answer = post(served, said).json()
        post(served, {**said, "domain": "SECRET"})
        post(served, {**said, "temperature": "SECRET"})
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    answered, *refused = [line for line in lines if line["logger"].startswith("selfspec.serve")]
    assert (answered["message"], answered["kind"], answered["stream"]) == ("answered", "chat", False)
    assert answer["id"].endswith(answered["id"]) and answered["level"] == "INFO" and answered["time"].endswith("Z")
    assert (answered["new_tokens"], answered["prompt_tokens"]) == (3, answer["usage"]["prompt_tokens"])
    assert answered["drafted_tokens"] >= answered["accepted_tokens"] >= 0 < answered["drafted_tokens"]
    assert 0 < answered["first_token_s"] <= answered["seconds"]
    assert [(line["message"], line["status"], line["param"]) for line in refused] == [
        ("refused", 400, "domain"),
        ("refused", 400, "temperature"),
    ]
    text = "\n".join(TextFormatter().format(record) for record in caplog.records)
    assert "answered id=" in text and "new_tokens=3" in text and "refused status=400 param=domain" in text
    assert "SECRET" not in text + json.dumps(lines)


def test_json_lines_hold_the_parts_of_access_records_and_tracebacks_of_errors():
    access = '127.0.0.1:1 - "GET / HTTP/1.1" 200', ("127.0.0.1:1", "GET", "/", "1.1", 200)
    line = json.loads(JsonFormatter().format(logging.LogRecord("uvicorn.access", 20, "", 1, access[0], None, None)))
    assert line["message"] == access[0] and "path" not in line
    record = logging.LogRecord("uvicorn.access", 20, "", 1, '%s - "%s %s HTTP/%s" %d', access[1], None)
    line = json.loads(JsonFormatter().format(record))
    assert (line["method"], line["path"], line["status"], line["message"]) == ("GET", "/", 200, access[0])
    try:
        raise ValueError("x\ny")
    except ValueError:
        failed = logging.LogRecord("selfspec", 40, "", 1, "failed", None, sys.exc_info())
    lines = JsonFormatter().format(failed).splitlines()
    assert len(lines) == 1 and "ValueError: x\ny" in json.loads(lines[0])["traceback"]


def test_the_openai_client_raises_its_own_errors(served):
    client = served.client_with(KEY)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=served.engine.name, messages=CHAT, top_logprobs=3)
    assert refused.value.param == "top_logprobs"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=CHAT)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_only_the_right_key_is_served(served):
    for given in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"):
        response = post(served, {"messages": CHAT}, authorization=given)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), given
    assert served.http.get("/metrics").status_code == 401
    assert served.http.get("/health").status_code == 200


def test_web_pages_of_allowed_origins_may_call(served):
    names = "authorization,content-type,x-stainless-lang"  # the last one is of OpenAI's client for JavaScript
    asked = {"access-control-request-method": "POST", "access-control-request-headers": names}
    for origin, allowed in (("http://page.example", True), ("http://other.example", False)):
        response = served.http.options("/v1/chat/completions", headers={"origin": origin, **asked})
        assert ("access-control-allow-origin" in response.headers) is allowed
        assert response.is_success is allowed


def test_bodies_that_are_too_large_or_no_json_are_refused(served):
    assert post(served, {"messages": CHAT, "user": "x" * 20_001}).status_code == 413
    assert post(served, {"messages": CHAT}, **{"content-type": "text/plain"}).status_code == 415
    for body in (b"", b"{", b"[]", b"null", b"\xff", b"[" * 9_999, b'{"seed": NaN}', b'{"user": "\\ud800"}'):
        assert post(served, body).status_code == 400, body[:20]


def test_too_many_sequences_are_refused_until_some_have_ended(served):
    body = {"messages": CHAT, "max_tokens": 480, "n": 4}
    headers = {"authorization": f"Bearer {KEY}"}
    with (
        served.http as http,
        http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers),
    ):
        eventually(lambda: served.service.gate.sequences == 4)
        busy = post(served, body)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        assert post(served, {**body, "n": 2, "max_tokens": 2}).status_code == 200
    eventually(served.is_idle)
    assert post(served, {"prompt": ["a"] * 7}, "/v1/completions").status_code == 422


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3.5,
    -0.0,
    1e308,
    1e-308,
    2**31,
    2**63,
    10**400,
    "",
    "x",
    "\x00",
    "日😀",
]
VALUES += [
    "\ud800",
    "x" * 3000,
    [],
    [[]],
    [None],
    ["a", 1],
    {},
    {"a": {}},
    {"type": "text"},
    [1, 2],
    [-1],
    [100],
    [101],
    json.loads("[" * 200 + "]" * 200),
    json.loads('{"a": ' * 200 + "1" + "}" * 200),
]
SAID: list[Any] = [{"role": "user", "content": "hi"}]
LIKELY: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": SAID, "temperature": 0.5, "stop": ["a", "b"], **LIKELY}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 2}),
    ("/v1/chat/completions", {"messages": [*SAID, CALLED], "tools": [FUNCTION], "tool_choice": "none"}),
    ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 2, "logit_bias": {"5": 1.0}, "top_p": 0.9}),
    ("/v1/completions", {"prompt": [[4, 5], [6]], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": ["a", "b"], "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1}),
    ("/tokenize", {"prompt": "abc", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [3, 4, 5]}),
]
EXTRA = (
    "domain speculative_decoding stop_token_ids ignore_eos presence_penalty best_of user model logprobs suffix".split()
)


def mutated(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy with one to three places, at any depth, replaced, removed or added."""
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = chance.choice(keys) if keys else None
            if key is None or not isinstance(place[key], dict | list) or chance.random() < 0.5:
                break
            place = place[key]
        if isinstance(place, dict) and (key is None or chance.random() < 0.3):
            place[chance.choice(EXTRA)] = chance.choice(VALUES)
        elif key is not None and chance.random() < 0.2:
            del place[key]
        elif key is not None:
            place[key] = copy.deepcopy(chance.choice(VALUES))
    return body


def test_mutated_requests_are_answered_or_refused(tmp_path):
    """1,000 of them, by 8 clients at a time."""
    chance, requests = random.Random(0), []
    for _ in range(1000):
        path, body = chance.choice(SEEDS)
        requests.append((path, mutated({"max_tokens": 2, **body} if path.startswith("/v1") else body, chance)))
    engine = tiny_engine(tmp_path, max_position_embeddings=32)  # short answers, also to a request without a length
    with (
        serving(engine, limits=replace(LIMITS, sequences=64)) as served,
        served.http as http,
        ThreadPoolExecutor(8) as clients,
    ):

        def send(request: tuple[str, dict[str, Any]]) -> int:
            path, body = request
            headers = {"content-type": "application/json"}
            response = http.post(path, content=json.dumps(body), headers=headers)
            assert response.status_code in (200, 400, 404, 413, 422), (path, body, response.text)
            assert response.status_code == 200 or response.json()["error"]["message"], body
            return response.status_code

        statuses = list(clients.map(send, requests))
        eventually(served.is_idle)
    assert min(statuses.count(200), statuses.count(400)) > 100
