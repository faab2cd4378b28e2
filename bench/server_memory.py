"""`python -m bench.server_memory`: resident memory of a server process over many requests, which must stay flat.

Starts `selfspec serve` with all options but `--requests`, sends requests with random fields from several clients, some
of which disconnect early, and prints the process's resident memory after every part of them. Pages of the KV cache
become resident when they are first written: give the server a small one.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

PARTS = 10  # readings
CLIENTS = 8  # at a time
TEXTS = 100  # different prompts: tokenizers keep the tokens of up to 10,000 words, which is no leak
PATHS = {"text": "/v1/completions", "chat": "/v1/chat/completions"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.server_memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    args, options = parser.parse_known_args(arguments)
    size = args.requests // PARTS
    with server(options) as (process, address):
        print(f"     0 requests: {resident_mb(process.pid):8.1f} MB")
        for start in range(0, size * PARTS, size):
            statuses = Counter(send_all(address, range(start, start + size)))
            text = f"{start + size:6} requests: {resident_mb(process.pid):8.1f} MB, statuses {dict(statuses)}"
            print(text, flush=True)
    return 0


@contextmanager
def server(options: list[str]) -> Iterator[tuple[subprocess.Popen, str]]:
    command = [sys.executable, "-m", "selfspec.serve", "--port", "0", "--log-level", "warning", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            printed = ""
            while not (found := re.search(r"curl (http://\S+?)/v1/", printed)):
                printed += process.stderr.readline()
                if process.poll() is not None:
                    raise RuntimeError(f"the server did not start: {printed}")
            yield process, found[1]
        finally:
            process.terminate()


def send_all(address: str, numbers: range) -> list[int]:
    with httpx.Client(base_url=address, timeout=120) as http, ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda number: send(http, number), numbers))


def send(http: httpx.Client, number: int) -> int:
    """Sends one request; returns its status, 0 if the client left early."""
    dice = random.Random(number)
    kind = dice.choice(list(PATHS))
    words = random.Random(number % TEXTS)
    text = "".join(words.choice("abcdefgh ") for _ in range(words.randint(1, 60)))
    body: dict[str, Any] = {"max_tokens": dice.randint(1, 6), "seed": number, "temperature": dice.choice([0, 1.0])}
    body |= {"stream": dice.random() < 0.4, "stop": dice.choice([None, ["e"]]), "n": dice.choice([1, 1, 2])}
    logprobs = dice.random() < 0.3
    if kind == "text":
        body |= {"prompt": text, "echo": dice.random() < 0.3, "logprobs": 3 if logprobs else None}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": logprobs}
    if dice.random() < 0.1:
        with suppress(httpx.ReadTimeout):
            http.post(PATHS[kind], json={**body, "max_tokens": 200}, timeout=httpx.Timeout(120, read=0.01))
        return 0
    return http.post(PATHS[kind], json=body).status_code


def resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


if __name__ == "__main__":
    sys.exit(main())
