"""Domains: named lists of prompts from JSON lines, each split into prompts for training and prompts for measuring."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.profiles.paths import shipped_dir
from selfspec.text import Message

SHIPPED = ("chat", "code", "math", "summarize", "extract", "write", "explain", "translate")
FEWEST_PROMPTS = 8
_MEASURED = 4  # every fourth prompt is for measuring

Prompt = str | list[Message]


@dataclass(frozen=True)
class Domain:
    """A kind of text, given by prompts."""

    name: str
    training: tuple[Prompt, ...]
    measuring: tuple[Prompt, ...]


def shipped_domains() -> list[Domain]:
    """The domains that ship with selfspec."""
    return [read_domain(name, shipped_dir() / "prompts" / f"{name}.jsonl") for name in SHIPPED]


def parse_domain(text: str) -> Domain:
    """Reads the domain of a command line argument NAME=PROMPTS.jsonl."""
    name, equals, path = (part.strip() for part in text.partition("="))
    if not equals or not name or not path:
        raise ValueError(f"--domain {text!r} must look like NAME=PROMPTS.jsonl")
    if name == "auto":
        raise ValueError(
            "a domain cannot be called 'auto', the name with which requests ask for routing; choose another"
        )
    return read_domain(name, Path(path).expanduser())


def read_domain(name: str, path: Path) -> Domain:
    """Reads and splits a file, without repeated prompts. Errors name the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # prompts may contain other line ends
    except FileNotFoundError:
        raise ValueError(f"domain {name!r}: there is no file {path}; correct the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"domain {name!r}: {path} cannot be read as UTF-8 text ({error})") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_read_line(line, f"{path}, line {number}"))
    unique = list({_same(prompt): prompt for prompt in prompts}.values())
    if len(unique) < FEWEST_PROMPTS:
        raise ValueError(
            f"domain {name!r}: {path} holds {len(unique)} different prompts; calibration needs at least "
            f"{FEWEST_PROMPTS}, and better 40 or more"
        )
    measuring = unique[_MEASURED - 1 :: _MEASURED]
    training = [prompt for index, prompt in enumerate(unique) if (index + 1) % _MEASURED]
    return Domain(name, tuple(training), tuple(measuring))


def _same(prompt: Prompt) -> str:
    """A key that is equal for equal prompts; a text equals a chat with that text as its only message."""
    return json.dumps([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, sort_keys=True)


def _read_line(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not a JSON object ({error})") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f'{where}: expected an object with either "prompt" or "messages"')
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str) or not entry["prompt"].strip():
            raise ValueError(f'{where}: "prompt" must be a text that is not empty')
        return entry["prompt"]
    return _read_messages(entry["messages"], where)


def _read_messages(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{where}: "messages" must be a list that is not empty')
    for message in messages:
        strings = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not strings:
            raise ValueError(f'{where}: every message needs "role" and "content" as texts')
    return messages
