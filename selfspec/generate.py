"""`python -m selfspec.generate`: complete a prompt from the command line, stream the text, tell what it took."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from selfspec.cache import CacheFull
from selfspec.engine import Engine
from selfspec.results import Completion

PROMPT = "Write a Python function that returns the n-th Fibonacci number, and explain how it works."
MODES: dict[str, Any] = {"auto": None, "off": False, "force": "force"}


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        engine = Engine.from_pretrained(args.model, device=args.device, dtype=args.dtype, profile=args.profile)
        if args.compare:
            warm_up(engine, args)
        completion = stream(engine, args, MODES[args.speculative])
        report(console, completion)
        if args.compare:
            compare(console, engine, args, completion)
    except (ValueError, OSError, CacheFull) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m selfspec.generate",
        description="Complete a prompt with a model that drafts and verifies itself.",
    )
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="what to say; '-' reads standard input")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    model.add_argument("--device", default="auto", help="cpu, cuda, mps (default: the best there is)")
    model.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 (default: by device)")
    model.add_argument("--profile", default="auto", help="profile folder (default: the newest made for this model)")
    text = parser.add_argument_group("text")
    text.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    text.add_argument("--max-new-tokens", type=int, default=128)
    text.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    text.add_argument("--top-k", type=int, default=50, help="0 switches it off")
    text.add_argument("--top-p", type=float, default=1.0)
    text.add_argument("--seed", type=int, default=0)
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--speculative", choices=list(MODES), default="auto")
    speculation.add_argument("--exit-layer", type=int, help="draft with the first N layers")
    speculation.add_argument("--plan", help="none, chain:4, tree:4,2,2,1")
    speculation.add_argument("--domain", default="auto")
    speculation.add_argument("--compare", action="store_true", help="decode plainly too, and compare speed and tokens")
    return parser.parse_args(arguments)


def options(engine: Engine, args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The prompt in the form the engine wants, and the generation arguments."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    args.prompt = text
    chat = not args.raw and getattr(engine.tokenizer, "chat_template", None)
    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    speculation = {"exit_layer": args.exit_layer, "plan": args.plan, "domain": args.domain}
    settings = {"max_new_tokens": args.max_new_tokens, "seed": args.seed, **sampling, **speculation}
    return ([{"role": "user", "content": text}] if chat else text), settings


def warm_up(engine: Engine, args: argparse.Namespace) -> None:
    """Two tokens, so that whoever comes first does not pay for what happens once."""
    prompt, settings = options(engine, args)
    engine.complete(prompt, speculative_decoding=False, **{**settings, "max_new_tokens": 2})


def stream(engine: Engine, args: argparse.Namespace, mode: Any) -> Completion:
    """Prints the text as it comes."""
    prompt, settings = options(engine, args)
    with engine.stream(prompt, speculative_decoding=mode, **settings) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        assert pieces.completion is not None
        return pieces.completion


def report(console: Console, completion: Completion) -> None:
    stats = completion.stats
    speed = stats.new_tokens / stats.elapsed_s
    line = f"{stats.new_tokens} tokens in {stats.elapsed_s:.1f} s ({speed:.1f} tokens/s)"
    if stats.drafted:
        line += (
            f", plan {stats.plan} after layer {stats.exit_layer}: {stats.tokens_per_cycle:.2f} tokens per cycle, "
            f"{stats.accept_rate:.0%} of reached depths accepted"
        )
    else:
        line += f", plain decoding ({stats.disabled_reason})"
        if stats.disabled_reason == "goodput":
            line += ": its profile does not say that drafting pays here; --speculative force --plan chain:2 tries it"
    console.print(f"\n[dim]{line}[/]", soft_wrap=True)


def compare(console: Console, engine: Engine, args: argparse.Namespace, speculative: Completion) -> None:
    """Decodes the same request plainly and sets the two side by side."""
    prompt, settings = options(engine, args)
    plain = engine.complete(prompt, speculative_decoding=False, **settings)
    assert isinstance(plain, Completion)
    table = Table(title="Same model, same request", title_style="bold", title_justify="left")
    for heading in ("", "tokens/s", "tokens per cycle", "passes through the whole model"):
        table.add_column(heading, justify="left" if not heading else "right")
    speeds = []
    for name, completion in (("plain", plain), ("speculative", speculative)):
        stats = completion.stats
        speeds.append(stats.new_tokens / stats.elapsed_s)
        table.add_row(name, f"{speeds[-1]:.1f}", f"{stats.tokens_per_cycle:.2f}", str(stats.cycles))
    console.print(table)
    same = plain.tokens == speculative.tokens
    exact = engine.model.dtype.itemsize >= 4
    tie = "a rounding tie, or a fault: please report it" if exact else "16 bits round often; try --dtype float32"
    console.print(f"tokens: {'identical' if same else f'DIFFERENT ({tie})'}")
    console.print(verdict(speeds[1] / speeds[0], engine, speculative), soft_wrap=True)


def verdict(ratio: float, engine: Engine, speculative: Completion) -> str:
    """What the comparison means, in a sentence a newcomer can use."""
    if not speculative.stats.drafted:
        return f"nothing was drafted ({speculative.stats.disabled_reason}): both runs decoded plainly"
    if ratio >= 1:
        return f"speculation made this {ratio:.2f}x as fast"
    why = "drafts have to be right often, and checking several tokens at once has to cost about as much as one"
    if engine.model.device.type == "cpu":
        why += "; a CPU is already busy with one row, so every drafted token is paid for, right or wrong"
    if engine.profile is None:
        why += "; and this exit is untrained, so few of its drafts are right"
    return f"speculation made this {1 / ratio:.2f}x slower. That is expected here: {why}."


if __name__ == "__main__":
    sys.exit(main())
