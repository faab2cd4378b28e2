"""`python -m bench.http_load URL`: latency and throughput of any server with OpenAI's API, under the same load.

Sends chats with the shipped prompts and reads their streams: `--streams 16` sends a request whenever one of 16 ends,
`--rate 20` sends 20 requests per second at random (Poisson) times. Each prompt begins with a number of its own, so that
no server reuses more of it than the head of its chat template. Answers are greedy and have `--max-new-tokens` tokens
where the server knows `ignore_eos`, as selfspec's and vLLM's do. Time per token: from the first to the last event,
divided by the tokens after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.tables import table
from bench.timing import percentile

PROMPTS = Path(__file__).parent / "prompts"
DOMAINS = ("chat", "code", "extract", "legal")
TEXT = re.compile(rb'"content": ?"[^"]')  # in an event; the first event of a stream may have a role alone


@dataclass(frozen=True)
class Answer:
    """A stream that was read: times in seconds of one clock, and the number of new tokens."""

    sent: float  # before its connection is opened
    first: float  # first event with text
    last: float
    tokens: int

    @property
    def first_token_ms(self) -> float:
        return 1e3 * (self.first - self.sent)

    @property
    def per_token_ms(self) -> float:
        return 1e3 * (self.last - self.first) / max(1, self.tokens - 1)


@asynccontextmanager
async def posted(url: str, path: str, fields: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """Sends a request over a connection of its own, and gives the reader of its answer's headers and body. Raises
    RuntimeError for a status other than 200."""
    at, body = urlsplit(url), json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection(at.hostname, at.port or 80)
    try:
        head = f"POST {at.path}{path} HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(f"{head}{kind}".encode() + body)
        if b" 200 " not in (status := await reader.readline()):
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode().splitlines()[-1]}")
        yield reader
    finally:
        writer.close()


@dataclass(frozen=True)
class Server:
    """A server and the fields that every request to it has."""

    url: str
    fields: dict[str, Any]

    async def answer(self, prompt: str) -> Answer:
        """Sends a chat and reads its stream to the end."""
        sent, fields = time.perf_counter(), {**self.fields, "messages": [{"role": "user", "content": prompt}]}
        async with posted(self.url, "/v1/chat/completions", fields) as reader:
            first = last = 0.0
            usage = b""
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    last = time.perf_counter()
                    first = first or (last if TEXT.search(line) else 0.0)
                    usage = line if b'"completion_tokens"' in line else usage
        if not usage:
            raise RuntimeError(f"{self.url} does not send `usage` in streams (`stream_options.include_usage`)")
        tokens = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
        return Answer(sent, first or last, last, tokens)

    async def in_streams(self, prompts: list[str], streams: int) -> list[Answer]:
        """Answers of a load in which a request is sent whenever one of `streams` ends."""
        waiting = iter(prompts)

        async def one_after_the_other() -> list[Answer]:
            return [await self.answer(prompt) for prompt in waiting]

        return list(chain.from_iterable(await asyncio.gather(*(one_after_the_other() for _ in range(streams)))))

    async def at_random_times(self, prompts: list[str], rate: float, seed: int) -> list[Answer]:
        """Answers of a load with `rate` requests per second on average."""
        drawn, at, sent = random.Random(seed), time.perf_counter(), []
        for prompt in prompts:
            at += drawn.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            sent.append(asyncio.create_task(self.answer(prompt)))
        return list(await asyncio.gather(*sent))


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    load = f"{args.streams} streams" if args.streams else f"{args.rate:g} requests/s"
    try:
        found = figures(asyncio.run(measure(args)))
    except (OSError, RuntimeError) as error:
        print(f"{args.url}: {error}", file=sys.stderr)
        return 1
    print(*report(load, found), sep="\n")
    print(json.dumps({"benchmark": "http_load", "url": args.url, "load": load, "body": args.body, **found}))
    return 0


async def measure(args: argparse.Namespace) -> list[Answer]:
    """Answers of the load, after some requests that are not measured."""
    server = Server(args.url, {**fields(args.url, args.model, args.max_new_tokens), **args.body})
    at_once = args.streams or 8
    await server.in_streams(numbered_prompts(at_once), at_once)
    prompts = numbered_prompts(args.requests, start=1000)
    if args.streams:
        return await server.in_streams(prompts, args.streams)
    return await server.at_random_times(prompts, args.rate, args.seed)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.http_load", description=__doc__)
    add = parser.add_argument
    add("url", type=address, help="of the server, such as http://127.0.0.1:8000")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--streams", type=positive(int), help="requests at a time")
    load.add_argument("--rate", type=positive(float), help="requests per second, at random times")
    add("--model", help="(default: the first that the server lists)")
    add("--requests", type=positive(int), default=256, help="that are measured (default: 256)")
    add("--max-new-tokens", type=positive(int), default=128, help="of each request (default: 128)")
    add(
        "--body",
        type=json_object,
        default={},
        help="JSON of further fields, such as '{\"speculative_decoding\": false}'",
    )
    add("--seed", type=int, default=0, help="of the random times (default: 0)")
    return parser.parse_args(arguments)


def address(text: str) -> str:
    """The address of a server, without a path."""
    url = text.rstrip("/").removesuffix("/v1")
    if not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{text!r} must begin with http:// (this benchmark does not speak TLS)")
    return url


def positive(kind: type) -> Callable[[str], Any]:
    """Reads a number above 0."""

    def read(text: str) -> Any:
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    return read


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def fields(url: str, model: str | None, new_tokens: int) -> dict[str, Any]:
    """Fields of a greedy, streamed request to a model, by default the first that the server lists."""
    if model is None:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            model = json.load(answer)["data"][0]["id"]
    return {
        "model": model, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def numbered_prompts(count: int, start: int = 0) -> list[str]:
    """Prompts of all domains in turn, repeated, each beginning with its number."""
    texts = [[json.loads(line)["prompt"] for line in (PROMPTS / f"{name}.jsonl").open()] for name in DOMAINS]
    in_turn = [text for turn in zip(*texts, strict=True) for text in turn]
    return [f"{number}. {text}" for number, text in enumerate(islice(cycle(in_turn), count), start)]


def figures(answers: list[Answer]) -> dict[str, Any]:
    """Throughput from the first request to the last token, and percentiles of latencies."""
    tokens, seconds = sum(of.tokens for of in answers), max(of.last for of in answers) - min(of.sent for of in answers)
    found: dict[str, Any] = {"requests": len(answers), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}
    for name in ("first_token_ms", "per_token_ms"):
        values = [getattr(answer, name) for answer in answers]
        found |= {f"{name}_p{100 * part:.0f}": round(percentile(values, part), 3) for part in (0.5, 0.99)}
    return found


def report(load: str, found: dict[str, Any]) -> list[str]:
    names = ("first_token_ms_p50", "first_token_ms_p99", "per_token_ms_p50", "per_token_ms_p99")
    headings = ("load", "requests", "tokens/s", *(name.replace("_", " ") for name in names))
    return table(headings, [(load, found["requests"], found["tokens_per_s"], *(found[name] for name in names))])


if __name__ == "__main__":
    sys.exit(main())
