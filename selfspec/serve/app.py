"""The application: its endpoints, its errors, and the key and origins that it accepts."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from selfspec import __version__
from selfspec.engine import Engine
from selfspec.serve.errors import ApiError, log_refusal
from selfspec.serve.generating import Generating
from selfspec.serve.limits import KeyCheck, Limits, check_limits, read_limited
from selfspec.serve.metrics_text import metrics_text
from selfspec.serve.prompts import tokenize_chat, tokenize_text
from selfspec.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from selfspec.serve.service import Service


def create_app(
    engine: Engine, api_key: str | None = None, cors_origins: Sequence[str] = (), limits: Limits | None = None
) -> Starlette:
    """Returns the ASGI application that serves an engine with a tokenizer. Without `api_key` every client is served;
    `cors_origins` are those of web pages that may call it."""
    if engine.tokenizer is None:
        raise ValueError("serving needs a tokenizer: save the model's tokenizer.json beside its weights")
    service = Service(engine, limits or Limits())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    middleware = []
    if cors_origins:  # outermost: browsers send no key with a preflight
        origins, methods = list(cors_origins), ["GET", "POST"]
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
        middleware.append(cors)
    if api_key:
        middleware.append(Middleware(KeyCheck, key=api_key))
    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected}
    app = Starlette(routes=_routes(), middleware=middleware, exception_handlers=handlers, lifespan=lifespan)  # type: ignore[arg-type]
    app.state.service = service
    return app


def _routes() -> list[Route]:
    return [
        Route("/", _page),
        Route("/v1/chat/completions", _chat, methods=["POST"]),
        Route("/v1/completions", _completions, methods=["POST"]),
        Route("/v1/models", _models),
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        Route("/health", _health),
        Route("/metrics", _metrics),
        Route("/version", _version),
    ]


def _service(request: Request) -> Service:
    return request.app.state.service


async def _page(_: Request) -> Response:
    """Returns the page, one file, and a policy that lets the browser load and run nothing but its own style and
    script."""
    html = files("selfspec.serve").joinpath("page.html").read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "style-src": _digest("style", html),
        "script-src": _digest("script", html),
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


def _digest(tag: str, html: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


async def _chat(request: Request) -> Response:
    return await _generate(request, ChatBody)


async def _completions(request: Request) -> Response:
    return await _generate(request, CompletionBody)


async def _generate(request: Request, kind: type[ChatBody] | type[CompletionBody]) -> Response:
    service = _service(request)
    body = read_body(kind, await read_limited(request, service.limits))
    service.check_model(body.model)
    check_limits(body, service.limits)
    return Generating(service, body)


async def _models(request: Request) -> Response:
    service = _service(request)
    model = {"id": service.engine.name, "object": "model", "created": service.started, "owned_by": "selfspec"}
    extra = {
        "max_model_len": service.engine.context,
        "has_chat_template": bool(service.engine.tokenizer.chat_template),
    }
    return JSONResponse({"object": "list", "data": [{**model, **extra}]})


async def _tokenize(request: Request) -> Response:
    service = _service(request)
    body = read_body(TokenizeBody, await read_limited(request, service.limits))
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "pass either prompt or messages", "prompt")

    def tokenize() -> list[int]:
        if body.messages is not None:
            return tokenize_chat(service.engine, body.messages)
        assert body.prompt is not None
        if body.add_special_tokens:
            return tokenize_text(service.engine, body.prompt)
        return list(service.engine.tokenizer(body.prompt, add_special_tokens=False)["input_ids"])

    tokens = await asyncio.get_running_loop().run_in_executor(service.preparing, tokenize)
    return JSONResponse({"count": len(tokens), "max_model_len": service.engine.context, "tokens": tokens})


async def _detokenize(request: Request) -> Response:
    service = _service(request)
    body = read_body(DetokenizeBody, await read_limited(request, service.limits))
    service.check_model(body.model)
    last = service.engine.model.config.vocab_size - 1
    if body.tokens and max(body.tokens) > last:
        raise ApiError(400, f"tokens: {max(body.tokens)} is outside the vocabulary (0 to {last})", "tokens")
    decode = service.engine.tokenizer.decode
    text = await asyncio.get_running_loop().run_in_executor(service.preparing, decode, body.tokens)
    return JSONResponse({"prompt": text})


async def _health(request: Request) -> Response:
    state = _service(request).state
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


async def _metrics(request: Request) -> Response:
    service = _service(request)
    text = metrics_text(service.engine, service.counters)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def _version(_: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _api_error(_: Request, error: ApiError) -> Response:
    log_refusal(error)
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    message, headers = error.detail, error.headers or {}
    if error.status_code == 404:
        message = f"there is no such endpoint; those of this server are {', '.join(route.path for route in _routes())}"
    elif error.status_code == 405:
        message = f"{request.method} is not possible here: use {headers['Allow']}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(headers)
    return response


async def _unexpected(_: Request, error: Exception) -> Response:
    return ApiError(500, f"the server failed with {type(error).__name__}: see its log").response()
