"""Many clients at once, clients that disconnect, the process and its signals, and the demo model."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from selfspec import Engine
from tests.serving import CHAT, Served, chat_tokenizer, eventually, serving, tiny_engine
from tests.tiny import tiny_model

URL = "/v1/completions"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    engine = tiny_engine(tmp_path_factory.mktemp("profile"), max_position_embeddings=2048)
    with serving(engine) as running:
        yield running


def random_body(index: int) -> dict[str, Any]:
    chance = random.Random(index)
    return {
        "prompt": "".join(chance.choice("abcdefgh ") for _ in range(chance.randint(1, 90))),
        "max_tokens": chance.randint(2, 24),
        "seed": index,
        "temperature": chance.choice([0, 0.7, 1.3]),
        "top_k": chance.choice([0, 5]),
        "stop": chance.choice([None, ["e", "th"]]),
        "speculative_decoding": chance.choice([None, False, "force"]),
        "stream": chance.random() < 0.5,
    }


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()["choices"][0]["text"]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def leave_early(served: Served, index: int) -> None:
    """Asks for a long answer and disconnects, while it waits or after some events."""
    body = {**random_body(index), "max_tokens": 1900, "stop": None}
    events = random.Random(index).randint(0, 4)
    with served.http as http:
        if not body["stream"]:
            with pytest.raises(httpx.ReadTimeout):
                http.post(URL, json=body, timeout=httpx.Timeout(60, read=0.02 + 0.05 * events))
            return
        with http.stream("POST", URL, json=body) as response:
            lines = response.iter_lines()
            for _ in range(events):
                next(lines)


def test_32_clients_get_what_they_would_alone_while_half_of_them_disconnect(served):
    with served.http as http:
        alone = {index: text_of(http.post(URL, json=random_body(index))) for index in range(0, 32, 2)}

    def ask(index: int) -> str | None:
        if index % 2:
            return leave_early(served, index)
        with served.http as http:
            return text_of(http.post(URL, json=random_body(index)))

    with ThreadPoolExecutor(32) as clients:
        together = dict(enumerate(clients.map(ask, range(32))))
    assert {index: text for index, text in together.items() if index % 2 == 0} == alone
    eventually(served.is_idle, seconds=5)
    streams = sum(random_body(index)["stream"] for index in range(1, 32, 2))  # others may leave before they are read
    assert 0 < streams <= served.service.counters.finished["abort"] <= 16


def test_a_failing_request_ends_alone(served, monkeypatch):
    """A fault of the engine is a 500 without its details, and the next request is answered."""
    from selfspec.serve import following

    def fail(*_: Any) -> None:
        raise RuntimeError("SECRET")

    body = random_body(0)
    with served.http as http:
        expected = text_of(http.post(URL, json=body))
        with monkeypatch.context() as patch:
            patch.setattr(following.ChoiceText, "advance", fail)
            failed = http.post(URL, json=body)
        assert failed.status_code == 500 and "SECRET" not in failed.text
        assert failed.json()["error"]["type"] == "server_error"
        assert text_of(http.post(URL, json=body)) == expected
    eventually(served.is_idle, seconds=5)


def test_health_is_red_until_the_engine_is_warm(served):
    served.service.state = "warming up"
    assert served.http.get("/health").status_code == 503
    served.service.state = "ready"
    assert served.http.get("/health").status_code == 200


def test_the_command_starts_serves_and_stops_within_its_grace(tmp_path):
    tiny_model("llama", max_position_embeddings=8192, eos_token_id=None).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    command = [sys.executable, "-m", "selfspec.serve", "--model", str(tmp_path), "--device", "cpu", "--port", "0"]
    options = ["--grace", "1", "--max-batch", "4", "--profile", "none"]
    environment = {**os.environ, "SELFSPEC_API_KEY": "k", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            printed = ""
            while "curl" not in printed:
                printed += process.stderr.readline()
                assert process.poll() is None, printed
            address = re.search(r"curl (http://127\.0\.0\.1:\d+)/v1/chat/completions", printed)[1]  # type: ignore[index]
            assert "GB KV cache" in printed and "8192 tokens" in printed and "Bearer KEY" in printed
            headers = {"authorization": "Bearer k"}
            with httpx.Client(base_url=address, headers=headers, timeout=30) as http:
                eventually(lambda: is_healthy(http))
                body = {"messages": CHAT, "stream": True}
                with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    lines = response.iter_lines()
                    assert "assistant" in next(lines)
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(10) == 0
                    assert "leaked" not in process.stderr.read()
        finally:
            process.kill()


def is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.ConnectError:
        return False


@pytest.mark.demo
@pytest.mark.xdist_group("demo")
def test_the_demo_model_answers_a_chat_as_its_engine_does():
    engine = Engine.from_pretrained("demo", device="cpu", dtype="float32", profile=None, max_length=256)
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    expected = engine.complete(question, max_new_tokens=8, do_sample=False).text
    with serving(engine) as served:
        create = served.client.chat.completions.create
        answer = create(model="demo", messages=question, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == expected and "Paris" in expected
