"""A tiny model in a folder and calls of commands on it, for tests of the command line."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from selfspec import Engine
from tests.tiny import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def save_model(folder: Path, chat_template: str | None = CHAT) -> Path:
    """Saves a model that never ends its text, with a tokenizer and possibly a chat template."""
    tiny_model("llama", torch.float32, eos_token_id=None).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def interruptible() -> None:
    """In a new process: Ctrl-C as in a terminal, also where the tests run in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def answer(engine: Engine, prompt: str, **kwargs) -> str:
    chat = [{"role": "user", "content": prompt}]
    return engine.complete(chat, **{"max_new_tokens": 12, "speculative_decoding": False, **kwargs}).text
