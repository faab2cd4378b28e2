"""`selfspec serve`: an OpenAI-compatible server over one model."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import signal
import socket
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from selfspec.commands import options
from selfspec.commands.running import end_at_once, note, run
from selfspec.generate import print_memory_plan
from selfspec.models.names import check_path

if TYPE_CHECKING:
    import uvicorn

    from selfspec.engine import Engine

KEY_VARIABLE = "SELFSPEC_API_KEY"
LEVELS = ("debug", "info", "warning", "error")


def main(arguments: list[str] | None = None, prog: str = "selfspec serve") -> int:
    args = parse(arguments, prog)
    return run(partial(serve, args))


def parse(arguments: list[str] | None, prog: str = "selfspec serve") -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description="Serve a model over HTTP, with OpenAI's API.")
    options.add_model_options(parser)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=port, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--api-key", metavar="KEY", help=f"clients must send it (default: the environment's {KEY_VARIABLE})")
    of_pages = "of web pages that may call, as http://localhost:3000, or *; repeatable"
    add("--cors-origin", metavar="ORIGIN", type=origin, action="append", default=[], help=of_pages)
    add("--log-level", choices=LEVELS, default="info", help="(default: %(default)s)")
    add("--log-format", choices=("text", "json"), default="text", help="json: one object per line (default: text)")
    add("--plan-memory", action="store_true", help="load and serve nothing; print the memory that the model will take")
    add("--grace", metavar="S", type=int, default=10, help="seconds for requests to end on SIGTERM (default: 10)")
    return parser.parse_args(arguments)


def port(text: str) -> int:
    """Reads a port number; the socket would take the remainder of a larger one."""
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"{number} is not possible: ports are 0 to 65535")
    return number


def origin(text: str) -> str:
    """Reads an origin; browsers send exactly scheme, host and port."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} must look like http://localhost:3000, without a path, or be *")
    return text


def serve(args: argparse.Namespace) -> int:
    check_path(args.model)  # before torch is imported, which takes seconds
    if args.plan_memory:
        return print_memory_plan(args)
    try:
        import uvicorn

        from selfspec.serve.app import create_app
        from selfspec.serve.logs import FORMATTERS
    except ImportError as error:
        packages = "starlette uvicorn httptools llguidance"
        raise ValueError(f"serving needs the packages of the extra serve: pip install {packages} ({error})") from None
    key = read_key(args.api_key)
    level = "debug" if args.verbose else args.log_level
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATTERS[args.log_format]())
    logging.basicConfig(handlers=[handler], level=level.upper())
    listener = listen(args.host, args.port)  # before the weights: a port in use must not cost their loading
    note(f"loading {args.model}")
    engine = options.load_engine(args)
    app = create_app(engine, key, args.cors_origin)
    app.state.service.after_warmup = freeze_objects
    config = uvicorn.Config(
        app,
        log_level=level,
        log_config=None,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=args.grace,
    )
    describe(engine, args.host, listener.getsockname()[1], key is not None)
    run_server(config, listener)
    return 0


def run_server(config: uvicorn.Config, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, then waits at most `timeout_graceful_shutdown` seconds for running requests; a
    SIGINT during that wait ends the process at once."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit and sig == signal.SIGINT:
                end_at_once()
            super().handle_exit(sig, frame)

    # uvicorn stops on a signal and then raises it again, for these handlers: SIGTERM ends with exit code 0.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, end_at_once)
    try:
        Server(config).run(sockets=[listener])
    finally:
        gc.unfreeze()  # what is still frozen at exit, Triton prints as leaks


def freeze_objects() -> None:
    """Collects garbage, then excludes all present objects from later collections: a full one of what is loaded,
    compiled and captured would stall all streams for 0.25 s."""
    gc.collect()
    gc.freeze()


def read_key(given: str | None) -> str | None:
    """The option's key or else that of the environment, without white space around it, which no HTTP header has."""
    key = given if given is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        place = "--api-key" if given is not None else KEY_VARIABLE
        raise ValueError(f"the API key of {place} is empty: give one, or leave {place} out to serve everybody")
    return key and key.strip()


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket: one that is only bound leaves the port to another server. It names its protocol,
    without which asyncio leaves the delay of small packets on: every event of a stream would wait up to 40 ms for the
    client's acknowledgement."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise OSError(f"cannot listen on {host} port {port} ({reason}): choose another --port or --host") from None
    return listener


def describe(engine: Engine, host: str, port: int, has_key: bool) -> None:
    """Prints what was loaded, its memory, the page's address, and a first request to try."""
    memory = {name: size / 1e9 for name, size in engine.memory().items()}
    profile = "drafting with its profile" if engine.profile else "no profile: drafting only what a text repeats"
    note(f"{engine.name} in {str(engine.dtype).removeprefix('torch.')} on {engine.device}, {profile}")
    note(
        f"{memory['weights']:.2f} GB weights, {memory['cache']:.2f} GB KV cache; "
        f"up to {engine.context} tokens in a sequence, {engine.max_batch} sequences at once"
    )
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    header = " -H 'Authorization: Bearer KEY'" if has_key else ""
    path, body = "completions", '{"prompt": "Once upon a time", "max_tokens": 80, "temperature": 0}'
    if options.has_chat_template(engine):
        path = "chat/completions"
        body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 80, "temperature": 0}'
    note(
        f"serving on {address}: open it in a browser to chat, or try:\n"
        f"curl {address}/v1/{path}{header} -H 'Content-Type: application/json' -d '{body}'"
    )
