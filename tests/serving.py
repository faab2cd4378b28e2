"""A server over a tiny random model on a real socket, and its clients, for tests."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from transformers import PreTrainedTokenizerFast

from selfspec import Engine
from selfspec.commands.serve import listen
from selfspec.serve.app import create_app
from tests.engines import save_profile
from tests.scripted import endless
from tests.tiny import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ message.role }}:{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
CHAT: list[Any] = [{"role": "user", "content": "hi there"}]
FORCED = {"speculative_decoding": "force"}


@dataclass
class Served:
    """A running server, its engine and its address."""

    engine: Engine
    service: Any
    address: str
    listener: socket.socket

    @cached_property
    def client(self) -> openai.OpenAI:
        return self.client_with("none")

    def client_with(self, key: str) -> openai.OpenAI:
        base = f"{self.address}/v1"
        return openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=60, http_client=self.http)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=60, verify=False)  # without certificates, which take 20 ms

    def is_idle(self) -> bool:
        """Whether no sequence is in progress and all pages are free."""
        return self.service.gate.sequences == 0 and self.engine.cache.free_pages == self.engine.cache.num_pages


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_engine(folder: Path, **overrides: Any) -> Engine:
    """An engine of a tiny random model without an end token, with a profile whose drafts are accepted now and then."""
    model = endless(tiny_model("llama", **overrides))
    profile = save_profile(model, folder)
    return Engine.from_model(model, chat_tokenizer(), profile=profile, max_batch=8, prefix_reuse=True)


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Served]:
    """Runs uvicorn in a thread while the block runs."""
    app = create_app(engine, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=5))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        eventually(lambda: server.started and app.state.service.state == "ready")
        try:
            yield Served(engine, app.state.service, f"http://127.0.0.1:{listener.getsockname()[1]}", listener)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.005)


def events_of(response: httpx.Response) -> list[Any]:
    """The data of server-sent events, parsed but for the last."""
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]
