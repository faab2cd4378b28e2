"""`python -m bench.server`: tokens per second of streams over HTTP, against the engine called directly.

The server runs in this process as `selfspec serve` does, the clients in another one. Both ways decode the same greedy
requests, as many at once as there are streams, in turns: plainly, and with the defaults of a request (a shape then
drafts copies alone). Needs the extra `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, cycle, islice
from statistics import median
from typing import Any

from bench import machine, tables
from bench.http_load import posted
from bench.requests import GREEDY, Options, Target, TimedRequest, add_arguments, open_target, run_together
from bench.timing import Limit

Result = dict[str, Any]
MODES: dict[str, Options] = {"plain": {"speculative_decoding": False}, "speculation": {}}
Send = Callable[[list[dict[str, Any]]], Result]  # bodies of requests that are sent at once -> their times in seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.server", description=__doc__)
    add_arguments(parser, new_tokens=128, prompts=4)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32], help="at once (default: 1 4 16 32)")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each way (default: 3)")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.client:
        return asyncio.run(run_clients())
    target = open_target(args, max(args.streams))
    setup = machine.describe(target.engine, target.name, target.synthetic)
    print(*tables.setup(setup), "", sep="\n")
    found = measure(target, args.streams, args.max_new_tokens, args.repeat, Limit(args.seconds))
    print(*tables.server(found), sep="\n")
    print(json.dumps({"benchmark": "server", "setup": setup, **found}))
    return 0


def measure(target: Target, streams: Sequence[int], new_tokens: int, repeat: int, limit: Limit) -> Result:
    """Both modes with each number of streams; after the first, until the budget is spent."""
    with serving(target.engine) as port, clients(port) as send:
        results = [
            compare(target, send, mode, count, new_tokens, repeat)
            for count in chain(streams[:1], limit.over(streams[1:]))
            for mode in MODES
        ]
    measured = {of["streams"] for of in results}
    not_reached = [count for count in streams if count not in measured]
    return {"new_tokens": new_tokens, "results": results, "not_reached": not_reached}


def compare(target: Target, send: Send, mode: str, streams: int, new_tokens: int, repeat: int) -> Result:
    """Medians of both ways, which take turns; the first turn is not timed."""
    prompts = list(islice(cycle(target.prompts), streams))
    body = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True, **MODES[mode]}
    direct, served = [], []
    for turn in range(repeat + 1):
        requests = [TimedRequest(target.engine, prompt, 0, new_tokens, {**GREEDY, **MODES[mode]}) for prompt in prompts]
        speed, answer = run_together(requests), send([{"prompt": prompt, **body} for prompt in prompts])
        if turn:
            direct.append(speed)
            served.append(answer)
    return {
        "streams": streams,
        "mode": mode,
        "direct": median(direct),
        "server": streams * new_tokens / median(of["seconds"] for of in served),
        "first_token_ms": 1e3 * median(median(of["first"]) for of in served),
    }


@contextmanager
def serving(engine: Any) -> Iterator[int]:
    """Runs uvicorn in a thread, waits until the engine is warm, and gives the port."""
    import uvicorn

    from selfspec.commands.serve import listen
    from selfspec.serve.app import create_app

    app = create_app(engine)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started or app.state.service.state == "warming up":
                if not thread.is_alive():
                    raise RuntimeError("the server ended while it started: see its log")
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)


@contextmanager
def clients(port: int) -> Iterator[Send]:
    """Starts the process of clients, and gives a function that sends requests at once and returns their times."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-m", "bench.server", "--client"], stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    to, answers = process.stdin, process.stdout

    def send(bodies: list[dict[str, Any]]) -> Result:
        print(json.dumps({"port": port, "bodies": bodies}), file=to, flush=True)
        answer = answers.readline()
        if not answer:
            raise RuntimeError("a request failed: the process of clients ended with the error above")
        return json.loads(answer)

    try:
        yield send
    finally:
        to.close()
        process.wait(10)


async def run_clients() -> int:
    """Reads requests from standard input, one group per line, and prints their times in seconds."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        group = json.loads(line)
        start = time.perf_counter()
        firsts = await asyncio.gather(*(stream(group["port"], body) for body in group["bodies"]))
        print(json.dumps({"seconds": time.perf_counter() - start, "first": firsts}), flush=True)
    return 0


async def stream(port: int, body: dict[str, Any]) -> float:
    """Reads a stream to its end; returns the seconds to its first event with text."""
    start, first = time.perf_counter(), 0.0
    async with posted(f"http://127.0.0.1:{port}", "/v1/completions", body) as reader:
        while line := await reader.readline():
            if line.startswith(b"data: {") and not first:
                first = time.perf_counter() - start
    return first


if __name__ == "__main__":
    sys.exit(main())
