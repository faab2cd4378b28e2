"""`selfspec chat`: a conversation with a model, in the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from selfspec.commands import options
from selfspec.commands.running import for_command, note, run
from selfspec.models.names import check_path

if TYPE_CHECKING:
    from selfspec.commands.display import Display
    from selfspec.engine import Engine
    from selfspec.text import Message

USAGE = "/new starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def main(arguments: list[str] | None = None, prog: str = "selfspec chat") -> int:
    args = parse(arguments, prog)
    return run(partial(chat, args), args.verbose)


def parse(arguments: list[str] | None, prog: str = "selfspec chat") -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=f"Talk with a model. In the chat, {USAGE}.")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--show", action=argparse.BooleanOptionalAction, default=True, help="colour tokens by origin (default: yes)"
    )
    options.add_model_options(parser)
    options.add_text_options(parser, max_new_tokens=512)
    options.add_speculation_options(parser)
    return parser.parse_args(arguments)


def chat(args: argparse.Namespace) -> int:
    check_path(args.model)  # before torch is imported, which takes seconds
    from selfspec.commands.display import Display

    engine = options.load_engine(args)
    if not options.has_chat_template(engine):
        raise ValueError(
            f"{args.model} has no chat template: it is a base model, which continues text and answers no questions. "
            "Use selfspec generate, or give an instruct model"
        )
    conversation = Conversation(engine, Display(args.show), args)
    note(f"{engine.name} on {engine.device}; {USAGE}")
    conversation.display.legend()
    while (text := read_line()) is not None:
        if text == "/exit":
            break
        if text == "/new":
            conversation.start()
        elif text.startswith("/") and len(text.split()) == 1:
            note(f"{text} is no command: {USAGE}")
        elif text:
            conversation.answer(text)
    return 0


def read_line() -> str | None:
    """Reads one line of the user; None at the end of input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    with suppress(ImportError):  # not on Windows
        import readline  # noqa: F401  # gives input() its line editing and history
    try:
        return input("\n> ").strip()
    except EOFError:
        print(file=sys.stderr)
        return None


class Conversation:
    """Messages so far, and how the next one is answered."""

    def __init__(self, engine: Engine, display: Display, args: argparse.Namespace) -> None:
        self.engine, self.display, self._system = engine, display, args.system
        self._arguments: dict[str, Any] = {**options.text_arguments(args), **options.speculation_arguments(args)}
        self.start()

    def start(self) -> None:
        """Forgets all messages but the system's."""
        self.messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []

    def answer(self, text: str) -> None:
        """Streams the answer to a message. An interrupt ends the answer; a message that cannot be answered, for example
        because the context is full, is dropped and the error printed."""
        from selfspec.commands.display import summary

        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            with self.engine.stream(asked, **self._arguments) as stream:
                self.display.stream(stream, pieces.append)
                completion = stream.completion
        except KeyboardInterrupt:
            completion = None
            self.display.line("\nstopped")
        except ValueError as error:
            note(f"{for_command(str(error))}; /new starts over")
            return
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        if completion is not None:
            self.display.line(summary(completion))
