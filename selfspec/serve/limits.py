"""Limits on what one request may ask for and on how many sequences are in progress, and the key that clients send."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from selfspec.serve.errors import ApiError
from selfspec.serve.protocol import MOST_SEQUENCES, ChatBody, Generation

_OPEN_PATHS = ("/", "/health", "/version")  # need no key: the page asks for it, load balancers have none


@dataclass(frozen=True)
class Limits:
    """What a request may ask for at most; a request above a limit is answered with 413, 422 or 429."""

    body_bytes: int = 4 * 2**20  # 131072 token ids, written as JSON, take less than 1 MiB
    body_seconds: float = 30.0  # for a client to send its body
    samples: int = 64  # of one prompt, `n`
    stops: int = 16
    stop_characters: int = 256  # of one stop text; each new token's text is compared with that of 4 times as many
    stop_token_ids: int = 64
    tools: int = 128
    sequences: int = MOST_SEQUENCES  # in progress, over all requests: waiting and running


async def read_limited(request: Request, limits: Limits) -> bytes:
    """Reads a JSON body; raises ApiError for one that is too large, too slow, or of another type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also keeps web pages of other origins from posting without a preflight
        raise ApiError(415, "the body must be JSON: send the header Content-Type: application/json")
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body_bytes:
                    raise ApiError(413, f"the body is larger than {limits.body_bytes} bytes: shorten it")
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before its body arrived") from None
    return b"".join(chunks)


def check_limits(body: Generation, limits: Limits) -> None:
    """Raises ApiError 422 that names the field above its limit."""
    tools = len(body.tools or ()) if isinstance(body, ChatBody) else 0
    for name, value, most in (
        ("n", body.samples, limits.samples),
        ("stop", len(body.stops), limits.stops),
        ("stop_token_ids", len(body.stop_token_ids or ()), limits.stop_token_ids),
        ("tools", tools, limits.tools),
    ):
        if value > most:
            raise ApiError(422, f"{name}: at most {most} are possible, not {value}", name)
    if any(len(text) > limits.stop_characters for text in body.stops):
        raise ApiError(422, f"stop: a stop text may have at most {limits.stop_characters} characters", "stop")


class Gate:
    """Counts the sequences in progress, and refuses a request that would exceed the limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.sequences = limit, 0

    @contextmanager
    def admit(self, sequences: int, param: str) -> Iterator[None]:
        if sequences > self.limit:
            raise ApiError(422, f"{param} and n ask for {sequences} sequences, of at most {self.limit}", param)
        if self.sequences + sequences > self.limit:
            raise ApiError(429, f"{self.sequences} sequences are in progress, of at most {self.limit}: try again soon")
        self.sequences += sequences
        try:
            yield
        finally:
            self.sequences -= sequences


class KeyCheck:
    """Answers requests without the key with 401. Compares digests of equal length in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._digest = app, sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and not self._is_known(scope):
            wrong = ApiError(
                401, "wrong or missing key: send the header Authorization: Bearer KEY", None, "invalid_api_key"
            )
            await wrong.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        is_equal = hmac.compare_digest(sha256(key.strip()).digest(), self._digest)
        return is_equal and scheme.lower() == b"bearer"
