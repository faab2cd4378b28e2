"""Errors as OpenAI's clients read them: a status, and a JSON object with message, type, param and code."""

from __future__ import annotations

import logging
import re
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from selfspec.cache.kv_cache import CacheFull
from selfspec.grammar import ResponseFormatError
from selfspec.serve.logs import log_fields

_log = logging.getLogger(__name__)

RETRY_AFTER_S = 1  # seconds a client is asked to wait; a request of 100 tokens usually ends sooner

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Arguments of the engine that have another name as a field of a request.
_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}
_TYPE_NAMES = {"bool", "str", "NamedTool"}  # of fields that have one of several types, in pydantic's locations
_ARGUMENT = re.compile(r"(\w+)(=| or )")  # how the engine's messages begin


class ApiError(Exception):
    """Ends a request with a status of 400 or above; `param` names the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


def log_refusal(refusal: ApiError) -> None:
    """Logs the status and the field, and not the message, which can quote the request."""
    log_fields(_log, "refused", status=refusal.status, param=refusal.param, code=refusal.code)


def of_validation(error: ValidationError) -> ApiError:
    """Names the first field at fault, and says what it must be: one of several types, where the field may have them."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    path = _path(faults[0]["loc"])
    wanted = dict.fromkeys(fault["msg"] for fault in faults if _path(fault["loc"]) == path)
    param = ".".join(path[:3]) or None
    status = 422 if any(fault["type"] == "too_long" for fault in faults) else 400
    return ApiError(status, f"{param or 'the body'}: {', or '.join(wanted)}", param)


def _path(location: tuple[int | str, ...]) -> list[str]:
    """The field names and indices of a location, without the names of the types that were tried."""
    return [str(part) for part in location if str(part) not in _TYPE_NAMES and re.fullmatch(r"\w+", str(part))]


def of_engine(error: BaseException, format_field: str = "response_format") -> ApiError:
    """Returns the error of a request that the engine refused or could not finish; `format_field` is the field that the
    engine got as response_format. A ValueError is the request's fault; an unexpected error keeps its details out of the
    answer, since they may contain another request's text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CacheFull):
        return ApiError(503, f"the KV cache has no pages left for this request: {error}", code="cache_full")
    if isinstance(error, ResponseFormatError):
        return ApiError(400, str(error).replace("response_format", format_field, 1), format_field)
    if isinstance(error, ValueError):
        named = _ARGUMENT.match(str(error))
        return ApiError(400, str(error), _FIELDS.get(named[1], named[1]) if named else None)
    return ApiError(500, f"the engine failed with {type(error).__name__}: see the server's log")
