"""Many clients at once, clients that disconnect, the process and its signals, and the demo model."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from bench.server_memory import resident_mb
from selfspec import Engine
from tests.commanding import interruptible
from tests.scripted import endless
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
    """A fault of the engine is a 500 without its details; a request that streams meanwhile gets all of its text."""
    from selfspec.serve import following

    advance, beside = following.ChoiceText.advance, {**random_body(0), "max_tokens": 200, "stop": None}

    def fail(choice: Any, *arguments: Any) -> str:
        if choice._sequence.seed == 99:
            raise RuntimeError("SECRET")
        return advance(choice, *arguments)

    monkeypatch.setattr(following.ChoiceText, "advance", fail)
    with served.http as http:
        expected = text_of(http.post(URL, json={**beside, "stream": False}))
        with http.stream("POST", URL, json={**beside, "stream": True}) as response:
            lines = response.iter_lines()
            first = next(lines)
            failed = http.post(URL, json={**random_body(0), "seed": 99})
            assert served.service.gate.sequences == 1, "the stream has ended before the failure"
            events = [line.removeprefix("data: ") for line in [first, *lines] if line]
        assert failed.status_code == 500 and "SECRET" not in failed.text
        assert failed.json()["error"]["type"] == "server_error"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected
    eventually(served.is_idle, seconds=5)


@pytest.mark.parametrize("reads", [True, False], ids=["disconnects", "stops reading"])
def test_a_client_that_leaves_or_stops_reading_is_cancelled_and_its_pages_are_freed(served, reads):
    """Soon (0.1 s where nothing else runs), or a second after the buffers between it and the server are full."""
    address = urlsplit(served.address)
    body = json.dumps({"prompt": "abc", "max_tokens": 2000, "n": 8, "stream": True, "logprobs": 20, "temperature": 1})
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    aborts, tokens = served.service.counters.finished["abort"], served.engine.metrics().tokens
    served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of connections from here on
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        client.sendall((head + body).encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        if reads:
            for _ in range(5):
                client.recv(4096)
            assert not served.is_idle()
            client.close()
            eventually(served.is_idle, seconds=2)
        else:
            eventually(served.is_idle, seconds=15)
    assert served.service.counters.finished["abort"] == aborts + 8
    assert served.engine.metrics().tokens - tokens < 8 * 1000


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_resident_memory_stays_flat_over_2000_requests():
    """Of this process, which holds the server and its clients: a leak of 4 kB per request would exceed the limit."""

    def ask(numbers: range) -> None:
        http = HTTPConnection(urlsplit(served.address).netloc)
        for number in numbers:
            prompt = [5 + number % 80] if number % 4 else "abcdefgh"  # that of one token needs no prefill pass
            body = {**random_body(number), "prompt": prompt, "max_tokens": 1}
            http.request("POST", URL, json.dumps(body), {"content-type": "application/json"})
            if number % 10 == 9:
                http.close()  # leaves before its answer
            else:
                assert http.getresponse().read()
        http.close()

    def ask_all(numbers: range) -> float:
        """Returns the resident memory afterwards, in MB."""
        list(clients.map(ask, (numbers[start::8] for start in range(8))))
        eventually(served.is_idle)
        gc.collect()
        return resident_mb(os.getpid())

    model = endless(tiny_model("llama", num_hidden_layers=2))
    engine = Engine.from_model(model, chat_tokenizer(), profile=None, max_batch=8, prefix_reuse=True)
    with serving(engine) as served, ThreadPoolExecutor(8) as clients:
        before = ask_all(range(500))
        assert ask_all(range(500, 2000)) - before < 6


def test_health_is_red_until_the_engine_is_warm(served):
    served.service.state = "warming up"
    assert served.http.get("/health").status_code == 503
    served.service.state = "ready"
    assert served.http.get("/health").status_code == 200


@contextmanager
def command_serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, str]]:
    """Starts the command with a tiny model and the key `k`; gives its process, a client, and what it printed."""
    tiny_model("llama", max_position_embeddings=8192, eos_token_id=None).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    command = [sys.executable, "-m", "selfspec.serve", "--model", str(folder), "--device", "cpu", "--port", "0"]
    command += ["--max-batch", "4", "--profile", "none", "--log-format", "json", *options]
    environment = {**os.environ, "SELFSPEC_API_KEY": "k", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=interruptible
    ) as process:
        try:
            assert process.stderr is not None
            printed = ""
            while "curl" not in printed:
                printed += process.stderr.readline()
                assert process.poll() is None, printed
            address = re.search(r"curl (http://127\.0\.0\.1:\d+)/v1/chat/completions", printed)[1]  # type: ignore[index]
            with httpx.Client(base_url=address, headers={"authorization": "Bearer k"}, timeout=30) as http:
                eventually(lambda: is_healthy(http))
                yield process, http, printed
        finally:
            process.kill()


STREAM = {"messages": CHAT, "stream": True}


def test_the_command_starts_serves_and_stops_within_its_grace(tmp_path):
    with command_serving(tmp_path, "--grace", "1") as (process, http, printed):
        assert "GB KV cache" in printed and "8192 tokens" in printed and "Bearer KEY" in printed
        with http.stream("POST", "/v1/chat/completions", json=STREAM) as response:
            lines = response.iter_lines()
            assert "assistant" in next(lines)
            process.send_signal(signal.SIGTERM)
            *_, error, done = [line.removeprefix("data: ") for line in lines if line]
            assert "shutting down" in json.loads(error)["error"]["message"] and done == "[DONE]"
            assert process.wait(10) == 0
            printed = process.stderr.read()
            assert "leaked" not in printed
            entries = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
            assert "aborted" in [entry["message"] for entry in entries]


def test_a_second_interrupt_ends_the_command_at_once(tmp_path):
    with command_serving(tmp_path, "--grace", "600") as (process, http, _):
        with http.stream("POST", "/v1/chat/completions", json=STREAM) as response:
            lines = response.iter_lines()
            assert "assistant" in next(lines)
            process.send_signal(signal.SIGINT)
            while "Waiting for connections" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
        printed = process.stderr.read()
        assert "Traceback" not in printed and printed.endswith("\nselfspec: stopped\n")


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
