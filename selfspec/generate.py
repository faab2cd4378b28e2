"""`python -m selfspec.generate`: complete a prompt from the command line, stream the text, tell what it took."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from selfspec.cache.kv_cache import CacheFull
from selfspec.engine import Engine
from selfspec.metrics import short
from selfspec.results import Completion, Stats

PROMPT = "Write a Python function that returns the n-th Fibonacci number, and explain how it works."
MODES: dict[str, Any] = {"auto": None, "off": False, "force": "force"}
STYLES = {"drafted": "green", "decoded": "bold", "plain": "cyan"}  # by a token's origin
LEGEND = {"drafted": "drafted and right", "decoded": "decoded after drafts", "plain": "decoded plainly"}


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        engine = Engine.from_pretrained(args.model, device=args.device, dtype=args.dtype, profile=args.profile)
        if args.compare:
            warm_up(console, engine, args)
        completion = stream(console, engine, args)
        report(console, completion)
        if args.show:
            recount(console, completion)
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
    parser.add_argument(
        "prompt",
        nargs="?",
        default=PROMPT,
        help="what to say (default: a question about Python); '-' reads standard input",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    model.add_argument("--device", default="auto", help="cpu, cuda, mps (default: the best there is)")
    model.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 (default: by device)")
    model.add_argument("--profile", default="auto", help="profile folder (default: the newest made for this model)")
    text = parser.add_argument_group("text")
    text.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    text.add_argument("--max-new-tokens", type=int, default=128, help="(default: 128)")
    text.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    text.add_argument("--top-k", type=int, default=50, help="0 switches it off (default: 50)")
    text.add_argument("--top-p", type=float, default=1.0, help="(default: 1, off)")
    text.add_argument("--seed", type=int, default=0, help="of what is drawn; the same one, the same text (default: 0)")
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--speculative", choices=list(MODES), default="auto", help="auto: where it pays (default)")
    speculation.add_argument("--exit-layer", type=int, help="draft with the first N layers")
    speculation.add_argument("--plan", help="none, chain:4, tree:4,2,2,1")
    speculation.add_argument("--domain", default="auto", help="one of the profile's (default: by the prompt)")
    speculation.add_argument("--show", action="store_true", help="colour tokens by origin, tell every change of plan")
    speculation.add_argument("--compare", action="store_true", help="decode plainly too, and compare speed and tokens")
    return parser.parse_args(arguments)


def read_prompt(given: str) -> str:
    """The prompt as given, or what standard input holds for '-'."""
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode()  # fails on the surrogates that stand for bytes Python could not read
    except UnicodeError:
        raise ValueError("the prompt is not UTF-8 text: convert it first, for example with iconv -t UTF-8") from None
    return text


def options(engine: Engine, args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The prompt in the form the engine wants, and the generation arguments."""
    text = args.prompt = read_prompt(args.prompt)
    chat = not args.raw and getattr(engine.tokenizer, "chat_template", None)
    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    speculation = {"exit_layer": args.exit_layer, "plan": args.plan, "domain": args.domain}
    settings = {"max_new_tokens": args.max_new_tokens, "seed": args.seed, **sampling, **speculation}
    return ([{"role": "user", "content": text}] if chat else text), settings


def warm_up(console: Console, engine: Engine, args: argparse.Namespace) -> None:
    """Two tokens, so that whoever comes first does not pay for what happens once; on kernels the whole request, since
    every plan it comes to is compiled and captured."""
    prompt, settings = options(engine, args)
    if not engine.has_kernels:
        engine.complete(prompt, speculative_decoding=False, **{**settings, "max_new_tokens": 2})
        return
    with console.status("compiling and capturing kernels for this request; what is compiled is kept for the next time"):
        for mode in (False, MODES[args.speculative]):
            engine.complete(prompt, speculative_decoding=mode, **settings)


def stream(console: Console, engine: Engine, args: argparse.Namespace) -> Completion:
    """Prints the text as it comes; coloured if that is wanted and possible."""
    prompt, settings = options(engine, args)
    paper = Console(highlight=False)
    coloured = args.show and paper.color_system is not None and not paper.no_color
    with engine.stream(prompt, speculative_decoding=MODES[args.speculative], **settings) as pieces:
        if coloured:
            console.print("   ".join(f"[{STYLES[origin]}]{meaning}[/]" for origin, meaning in LEGEND.items()) + "\n")
            for piece, origin in pieces.marked():
                paper.out(piece, style=STYLES[origin], end="")
        else:
            for piece in pieces:
                print(piece, end="", flush=True)
        print()
        assert pieces.completion is not None
        return pieces.completion


def report(console: Console, completion: Completion) -> None:
    stats = completion.stats
    speed = stats.new_tokens / stats.elapsed_s
    line = f"{stats.new_tokens} tokens in {stats.elapsed_s:.1f} s ({speed:.1f} tokens/s), {manner(completion)}"
    console.print(f"\n[dim]{line}[/]", soft_wrap=True)


def manner(completion: Completion) -> str:
    """How the tokens were made."""
    stats = completion.stats
    if not stats.drafted:
        told = f"plain decoding ({reasons(stats)})"
        if stats.disabled_reason == "goodput":
            told += ": drafting is not expected to pay here; --speculative force --plan chain:2 tries it"
        return told
    plans = {change.plan for change in stats.changes} - {"none"}
    named = f"plan {short(stats.plan)}" if len(plans) <= 1 else f"mostly plan {short(stats.plan)}"
    told = "drafting at times" if stats.plan == "none" else named
    return (
        f"{told} after layer {stats.exit_layer}: {stats.tokens_per_cycle:.2f} tokens per cycle, "
        f"{stats.accept_rate:.0%} of reached depths accepted{plain_part(completion)}"
    )


def plain_part(completion: Completion) -> str:
    """What was decoded plainly, and why, of a text that was drafted otherwise; nothing where there was no reason to."""
    why, origins = reasons(completion.stats), completion.origins
    return f"; {origins.count('plain')} of {len(origins)} tokens decoded plainly ({why})" if why else ""


def reasons(stats: Stats) -> str:
    """Why tokens were decoded plainly, in the order in which the reasons held."""
    told = [*(change.reason for change in stats.changes), stats.disabled_reason]
    return ", ".join(dict.fromkeys(reason for reason in told if reason))


def recount(console: Console, completion: Completion) -> None:
    """Where the tokens came from, and every change of plan on the way."""
    stats, origins = completion.stats, completion.origins
    drafted = origins.count("drafted")
    lines = [f"{drafted} of {len(origins)} tokens were drafted ({drafted / len(origins):.0%})", *changes(stats)]
    if stats.ood:
        lines.append("ood: this text is unlike what the exit was calibrated on")
    console.print("\n".join(f"[dim]{line}[/]" for line in lines), soft_wrap=True)


def changes(stats: Stats) -> Iterator[str]:
    before = "none"
    for change in stats.changes:
        plan = short(change.plan)
        how = f"after token {change.token}: {before} -> {plan}" if change.token else f"from the start: {plan}"
        yield f"{how} ({change.reason})" if change.reason else how
        before = plan


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
    console.print(f"tokens: {'identical' if same else f'DIFFERENT ({why_different(engine)})'}")
    console.print(verdict(speeds[1] / speeds[0], engine, speculative), soft_wrap=True)


def why_different(engine: Engine) -> str:
    if engine.has_kernels:
        return "a fault: please report it"
    if engine.model.dtype.itemsize >= 4:
        return "a rounding tie, or a fault: please report it"
    return "16 bits round often; try --dtype float32"


def verdict(ratio: float, engine: Engine, speculative: Completion) -> str:
    """What the comparison means, in a sentence a newcomer can use."""
    if not speculative.stats.drafted:
        return f"nothing was drafted ({reasons(speculative.stats)}): both runs decoded plainly"
    stepped_aside = plain_part(speculative)
    if ratio >= 1:
        return f"speculation made this {ratio:.2f}x as fast{stepped_aside}"
    slower = f"speculation made this {1 / ratio:.2f}x slower{stepped_aside}"
    if stepped_aside:
        return f"{slower}. That is what it took to find out where drafting does not pay, or noise."
    why = "drafts have to be right often, and checking several tokens at once has to cost about as much as one"
    if engine.model.device.type == "cpu":
        why += "; a CPU is already busy with one row, so every drafted token is paid for, right or wrong"
    if engine.profile is None:
        why += "; and this exit is untrained, so few of its drafts are right"
    return f"{slower}. That is expected here: {why}."


if __name__ == "__main__":
    sys.exit(main())
