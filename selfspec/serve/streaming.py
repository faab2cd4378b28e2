"""Server-sent events, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message, Receive, Send

STALLED_S = 1.0  # seconds that a write may wait for a client that reads nothing, once all buffers are full


class Stalled(Exception):
    """The client has stopped reading."""


class Events:
    """A response of server-sent events; its headers go out with the first event. Writes raise Stalled."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False

    async def write(self, *events: dict[str, Any]) -> None:
        """Sends the events in one write."""
        if events:
            await self._write(b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events), True)

    async def end(self) -> None:
        await self._write(b"data: [DONE]\n\n", False)

    async def _write(self, data: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(STALLED_S):
                await self._start()
                message: Message = {"type": "http.response.body", "body": data, "more_body": more}
                await self._send(message)
        except TimeoutError:
            raise Stalled from None

    async def _start(self) -> None:
        """Sends the headers, once. The server first waits for the client to read what went before on its connection."""
        if not self.is_started:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.is_started = True


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work; cancels it when the client disconnects, or when this call is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
