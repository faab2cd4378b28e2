"""`selfspec generate`, or `python -m selfspec.generate`: completes prompts from the command line.

Standard output holds the text, or JSON with --json; everything about it goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from selfspec.commands import options
from selfspec.commands.running import note, run
from selfspec.models.names import check_path

if TYPE_CHECKING:
    from selfspec.commands.display import Display
    from selfspec.engine import Engine
    from selfspec.results import Completion
    from selfspec.text import Prompt

PROMPT = "Write a Python function that returns the n-th Fibonacci number, and explain how it works."
STANDARD_INPUT = "-"


def main(arguments: list[str] | None = None, prog: str = "python -m selfspec.generate") -> int:
    args = parse(arguments, prog)
    return run(partial(generate, args), args.verbose)


def parse(arguments: list[str] | None, prog: str = "python -m selfspec.generate") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog, description="Complete prompts with a model that drafts and verifies with itself."
    )
    add = parser.add_argument
    add("prompt", nargs="*", help="what to say (default: a question about Python); '-' reads standard input")
    add("--file", action="append", default=[], metavar="FILE", help="a prompt from a file, '-' for standard input")
    add("--raw", action="store_true", help="continue the text as it is, without the chat template")
    add("--json", action="store_true", help="print one JSON object per completion: text, tokens, finish_reason, stats")
    add("--show", action="store_true", help="colour tokens by origin, print every change of plan")
    add("--compare", action="store_true", help="measure plain, governed and forced decoding of the prompt")
    add("--plan-memory", action="store_true", help="load nothing; print the memory that the model will take")
    options.add_model_options(parser)
    options.add_text_options(parser, max_new_tokens=128)
    options.add_speculation_options(parser)
    args = parser.parse_args(arguments)
    if args.json and (args.show or args.compare):
        parser.error("--json prints no colours and no comparison: leave out --show and --compare")
    if args.compare and len(args.prompt) + len(args.file) > 1:
        parser.error("--compare takes one prompt; selfspec bench measures several")
    return args


def generate(args: argparse.Namespace) -> int:
    check_path(args.model)  # before torch is imported, which takes seconds
    if args.plan_memory:
        return print_memory_plan(args, args.json)
    from selfspec.commands.display import Display  # imports torch

    texts = read_prompts(args)
    engine = options.load_engine(args, prefix_reuse=not args.compare)  # compared calls shall all prefill
    prompts = options.as_prompts(engine, texts, args.raw)
    arguments = {**options.text_arguments(args), **options.speculation_arguments(args)}
    display = Display(args.show)
    if args.json:
        print_json(engine, texts, prompts, arguments)
    elif len(prompts) > 1 and not display.show:
        print_batch(display, engine, texts, prompts, arguments)
    else:
        for text, prompt in zip(texts, prompts, strict=True):
            if len(prompts) > 1:
                display.heading(text)
            print_stream(display, engine, prompt, arguments, args.show)
    if args.compare:
        compare(display, engine, prompts[0], args)
    return 0


def print_memory_plan(args: argparse.Namespace, as_json: bool = False) -> int:
    """Prints the memory that the model will take, as a table or as JSON; exit code 1 if it does not fit."""
    from rich.console import Console

    from selfspec.memory_plan import plan_memory, table  # these import torch
    from selfspec.models.loading import pick_device

    if pick_device(args.device).type != "cuda":
        note("planned for the CPU: on a GPU weights and cache take 16 bits or less, and CUDA itself 0.6 GB or more")
    plans = plan_memory(args.model, **options.model_arguments(args))
    if as_json:
        print(json.dumps([plan.to_json() for plan in plans]))
    else:
        Console().print(table(plans))
    return 0 if plans[0].fits else 1


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Returns the given prompts and files in this order, or the default prompt where none is given."""
    texts = [read_file(STANDARD_INPUT) if prompt == STANDARD_INPUT else prompt for prompt in args.prompt]
    texts += [read_file(path) for path in args.file]
    for text in texts:
        try:
            text.encode()  # fails on the surrogates that stand for bytes that Python could not read
        except UnicodeError:
            raise _not_utf_8() from None
    return texts or [PROMPT]


def read_file(path: str) -> str:
    try:
        return sys.stdin.read() if path == STANDARD_INPUT else Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeError:
        raise _not_utf_8() from None
    except OSError as error:
        raise ValueError(f"--file {path} cannot be read: {error.strerror}") from error


def _not_utf_8() -> ValueError:
    return ValueError("the prompt is not UTF-8 text: convert it first, for example with iconv -t UTF-8")


def print_stream(
    display: Display, engine: Engine, prompt: Prompt, arguments: dict[str, Any], with_origins: bool
) -> None:
    """Prints one completion as it is decoded, then its statistics."""
    from selfspec.commands.display import origins, summary

    with engine.stream(prompt, **arguments) as stream:
        display.legend()
        display.stream(stream)
        completion = stream.completion
    assert completion is not None
    display.line(f"\n{summary(completion)}")
    if with_origins:
        for line in origins(completion):
            display.line(line)


def complete(engine: Engine, prompts: list[Prompt], arguments: dict[str, Any]) -> list[Completion]:
    """Completes all prompts in one batch."""
    return engine.complete(cast(Any, prompts), **arguments)  # all are texts, or all are chats


def print_batch(
    display: Display, engine: Engine, texts: list[str], prompts: list[Prompt], arguments: dict[str, Any]
) -> None:
    """Completes all prompts in one batch and prints them in order, each between its prompt and its statistics."""
    from selfspec.commands.display import summary

    began = perf_counter()
    completions = complete(engine, prompts, arguments)
    seconds, count = perf_counter() - began, sum(len(completion.tokens) for completion in completions)
    for text, completion in zip(texts, completions, strict=True):
        display.heading(text)
        print(completion.text, flush=True)
        display.line(summary(completion))
    display.line(f"\n{count} tokens in {seconds:.1f} s ({count / seconds:.1f} tokens/s), one batch of {len(prompts)}")


def print_json(engine: Engine, texts: list[str], prompts: list[Prompt], arguments: dict[str, Any]) -> None:
    """Completes all prompts in one batch and prints a line of JSON for each."""
    for text, completion in zip(texts, complete(engine, prompts, arguments), strict=True):
        entry = {
            "prompt": text,
            "text": completion.text,
            "tokens": len(completion.tokens),
            "finish_reason": completion.finish_reason,
            "stats": asdict(completion.stats),
        }
        print(json.dumps(entry, ensure_ascii=False), flush=True)


def compare(display: Display, engine: Engine, prompt: Prompt, args: argparse.Namespace) -> None:
    """Shows the text once more with drafting forced, then measures plain, governed and forced decoding in turns."""
    from selfspec.commands.compare import measure, modes

    compared = modes(engine, args.exit_layer, args.plan, args.domain)
    arguments = options.text_arguments(args)
    if display.show:
        display.line("\nThe same prompt with drafting forced:\n", style="bold")
        print_stream(display, engine, prompt, {**arguments, **compared[-1].arguments}, with_origins=True)
    measure(display.about, engine, [prompt], compared, arguments)


if __name__ == "__main__":
    sys.exit(main())
