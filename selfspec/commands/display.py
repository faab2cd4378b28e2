"""Prints completions for a person: text by the origin of its tokens, speed, and changes of plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console

from selfspec.metrics import short_plan_name
from selfspec.results import Completion, Stats, Stream

STYLES = {"drafted": "green", "decoded": "bold", "plain": "cyan"}  # by a token's origin
LEGEND = {"drafted": "drafted", "decoded": "decoded after drafts", "plain": "decoded plainly"}
PLAIN = "plain"  # the plan `none`, for a reader


class Display:
    """Text goes to standard output, everything about it to standard error."""

    def __init__(self, show: bool = False) -> None:
        self.out = Console(highlight=False)
        self.about = Console(stderr=True, highlight=False)
        self.has_colour = self.out.color_system is not None and not self.out.no_color
        self.show = show and self.has_colour  # whether tokens are coloured by origin

    def legend(self) -> None:
        if self.show:
            meanings = (f"[{STYLES[origin]}]{meaning}[/]" for origin, meaning in LEGEND.items())
            self.about.print("   ".join(meanings) + "\n")

    def stream(self, stream: Stream, keep: Callable[[str], object] = lambda piece: None) -> None:
        """Prints the pieces of a stream as they come, and hands each to `keep`."""
        if self.show:
            for piece, origin in stream.marked():
                self.out.out(piece, style=STYLES[origin], end="")
                keep(piece)
        else:
            for piece in stream:
                print(piece, end="", flush=True)
                keep(piece)
        print(flush=True)

    def heading(self, prompt: str) -> None:
        """Prints the first line of a prompt above its completion."""
        width = max(20, self.about.width - 4)
        first = prompt.strip().split("\n")[0]
        self.about.print(
            f"\n> {first if len(first) <= width else first[: width - 3] + '...'}", style="bold", markup=False
        )

    def line(self, text: str, style: str = "dim") -> None:
        """Prints a line about the text; the terminal wraps it."""
        self.about.print(text, style=style, markup=False, soft_wrap=True)


def summary(completion: Completion) -> str:
    """Returns one line: tokens, seconds, speed, and how the tokens were decoded."""
    stats = completion.stats
    speed = f"{stats.new_tokens / stats.elapsed_s:.1f} tokens/s"
    return f"{stats.new_tokens} tokens in {stats.elapsed_s:.1f} s ({speed}), {how_decoded(completion)}"


def how_decoded(completion: Completion) -> str:
    stats = completion.stats
    if not stats.drafted:
        return f"plain decoding ({reasons(stats)})"
    plans = {change.plan for change in stats.changes} - {"none"}
    plan = f"plan {short_plan_name(stats.plan)}" if len(plans) <= 1 else f"mostly plan {short_plan_name(stats.plan)}"
    only_copies = all(plan.startswith("copy:") for plan in plans)
    layer = stats.exit_layer
    after = "" if layer is None or only_copies else f" after {layer} layer{'' if layer == 1 else 's'}"
    return (
        f"{'drafting at times' if stats.plan == 'none' else plan}{after}: "
        f"{stats.tokens_per_cycle:.2f} tokens per step, {stats.accept_rate:.0%} of reached depths accepted"
        f"{plain_part(completion)}"
    )


def plain_part(completion: Completion) -> str:
    """Returns how many tokens of a drafted text were decoded plainly, and why; nothing where there was no reason to."""
    why, origins = reasons(completion.stats), completion.origins
    return f"; {origins.count('plain')} of {len(origins)} tokens decoded plainly ({why})" if why else ""


def reasons(*stats: Stats) -> str:
    """Returns why tokens were decoded plainly, each reason once, in the order in which the reasons held."""
    every = [reason for each in stats for reason in (*(change.reason for change in each.changes), each.disabled_reason)]
    return ", ".join(dict.fromkeys(reason for reason in every if reason))


def origins(completion: Completion) -> Iterator[str]:
    """Yields lines: how many tokens were drafted, and every change of plan."""
    drafted, count = completion.origins.count("drafted"), len(completion.origins)
    yield f"{drafted} of {count} tokens were drafted ({drafted / count:.0%})"
    yield from changes(completion.stats)
    if completion.stats.ood:
        yield "ood: this text is unlike the texts that the exit was calibrated on"


def changes(stats: Stats) -> Iterator[str]:
    """Yields a line for each change to another plan; a change of the reason alone is none."""
    before = None
    for change in stats.changes:
        plan = PLAIN if change.plan == "none" else short_plan_name(change.plan)
        if plan != before:
            how = f"after token {change.token}: {before} -> {plan}" if before else f"from the start: {plan}"
            yield f"{how} ({change.reason})" if change.reason else how
        before = plan
