"""Log lines of the server: text, or one JSON object per line for programs that collect logs."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

_ACCESS = ("client", "method", "path", "http_version", "status")  # the arguments of uvicorn's records of requests


def log_fields(log: logging.Logger, message: str, **fields: Any) -> None:
    """Logs a message with values by name, none of which may hold text of a prompt or an answer."""
    if log.isEnabledFor(logging.INFO):
        log.info(message, extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """Writes `time level logger: message name=value ...`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """Writes an object with the record's time (UTC), level, logger, message and fields, and an error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
            entry |= zip(_ACCESS, record.args, strict=True)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}
