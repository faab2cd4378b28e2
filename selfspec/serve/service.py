"""The state of a running server: the engine, its limits and counters, and whether the engine is warm."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from selfspec.engine import Engine
from selfspec.serve.errors import ApiError
from selfspec.serve.following import Wakeups
from selfspec.serve.limits import Gate, Limits
from selfspec.serve.logprobs import TokenBytes
from selfspec.serve.metrics_text import ServerCounters

_log = logging.getLogger(__name__)


@dataclass
class Service:
    """One engine behind the endpoints."""

    engine: Engine
    limits: Limits = field(default_factory=Limits)
    counters: ServerCounters = field(default_factory=ServerCounters)
    started: int = field(default_factory=lambda: int(time.time()))
    state: str = "warming up"  # then "ready", or "failed"
    after_warmup: Callable[[], object] = lambda: None  # called once, also if the warm-up failed

    def __post_init__(self) -> None:
        self.gate = Gate(self.limits.sequences)
        self.token_bytes = TokenBytes(self.engine.tokenizer)
        # One thread: tokenizers are not made for several threads that encode at a time.
        self.preparing = ThreadPoolExecutor(1, "selfspec-prepare")
        self.wakeups: Wakeups | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Warms the engine up while the server answers; ends with the server."""
        self.wakeups = Wakeups(asyncio.get_running_loop())
        warming = asyncio.create_task(self._warm_up())
        try:
            yield
        finally:
            warming.cancel()
            self.preparing.shutdown(wait=False, cancel_futures=True)

    async def _warm_up(self) -> None:
        engine, started = self.engine, time.monotonic()
        temperature = getattr(engine.generation_config, "temperature", None) or 1.0
        try:
            steps = await asyncio.to_thread(engine.warmup, engine.max_batch, None, (0.0, temperature))
        except Exception:
            self.state = "failed"
            _log.exception("the warm-up failed: requests will be tried, and /health stays at status 503")
            self.after_warmup()
            return
        self.after_warmup()
        self.state = "ready"
        _log.info("warm after %.1f s, %d steps captured", time.monotonic() - started, steps)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for any model but the one that is served."""
        if name is not None and name != self.engine.name:
            message = f"the model {name[:100]!r} is not served here: use {self.engine.name!r}, or leave it out"
            raise ApiError(404, message, "model", "model_not_found")
