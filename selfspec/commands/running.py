"""Runs a command: warnings and errors become one line each, an interrupt becomes exit code 130."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, NoReturn

FAILED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141  # exit codes; the last two are 128 + the signal's number
STOPPED = "\nselfspec: stopped"

# Arguments of Python calls that errors and warnings name, and the options of commands that set them.
_OPTIONS = {
    "speculative_decoding": "speculative",
    **{name: name.replace("_", "-") for name in "exit_layer max_new_tokens max_length max_batch top_k top_p".split()},
    **{name: name.replace("_", "-") for name in "kv_cache_gb memory_gb".split()},
    **{name: name for name in "plan temperature seed domain device dtype profile quantize".split()},
}
_NAMED = re.compile(rf"(?<![\w-])({'|'.join(_OPTIONS)})=(?=([^\s,.;:)])?)")


def run(command: Callable[[], int], verbose: bool = False) -> int:
    """Runs a command and returns its exit code. `verbose` prints what the engine logs."""
    try:
        with _interruptible(), one_line_warnings(), _log_lines() if verbose else nullcontext():
            return command()
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes standard output once more
        return PIPE_CLOSED
    except Exception as error:
        if not isinstance(error, ValueError | OSError) and not isinstance(error, _errors_of_memory()):
            raise  # a fault, with its traceback; the messages of the others say what to do
        print(f"error: {for_command(str(error))}", file=sys.stderr)
        return FAILED


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, or ends the process if a module is being imported: libraries swallow that
    exception, raise others in its place, or abort. Leaves handlers of the caller, and SIGINT that it ignores, alone."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    below = frame
    while below is not None:
        if below.f_code.co_filename == "<frozen importlib._bootstrap>":
            end_at_once()
        below = below.f_back
    signal.default_int_handler(number, frame)


def end_at_once(*_: object) -> NoReturn:
    """A handler of SIGINT: ends the process without waiting for its threads."""
    os.write(2, f"{STOPPED}\n".encode())  # print would raise if the signal interrupted another one
    os._exit(INTERRUPTED)


def _errors_of_memory() -> tuple[type[Exception], ...]:
    import torch  # takes seconds: only for errors of other classes

    from selfspec.cache.kv_cache import CacheFull

    return CacheFull, torch.OutOfMemoryError


def note(text: str) -> None:
    print(f"selfspec: {text}", file=sys.stderr)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Prints warnings without a file and line of Python, and with options of the command instead of arguments."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        note(for_command(" ".join(str(message).split())))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def for_command(text: str) -> str:
    """Replaces Python arguments in a message by the command's options: `exit_layer=9` by `--exit-layer 9`."""
    text = text.replace("profile=None", "--profile none").replace("do_sample=False", "--temperature 0")
    text = text.replace("python -m selfspec.calibrate", "selfspec calibrate")
    return _NAMED.sub(lambda match: f"--{_OPTIONS[match[1]]}{' ' if match[2] else ''}", text)


@contextmanager
def _log_lines() -> Iterator[None]:
    """Prints the engine's log to standard error."""
    logger, handler = logging.getLogger("selfspec"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("selfspec: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
