"""Measures plain, governed and forced decoding of the same prompts, taking turns, and says what differs.

Runs of a machine that others use too vary by more than most plans gain or lose, so a difference counts as measurable
only where it exceeds the spread of the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from selfspec.commands.display import reasons
from selfspec.metrics import short_plan_name
from selfspec.results import Completion

if TYPE_CHECKING:
    from selfspec.engine import Engine
    from selfspec.text import Prompt

TURNS = 3
# Without kernels each drafted node costs nearly as much time as a decoded token, so a short chain loses least.
PLAN_WITHOUT_KERNELS = "chain:2"


@dataclass(frozen=True)
class Mode:
    """One way to decode: its name, and the arguments of the engine's calls for it."""

    name: str
    arguments: dict[str, Any]


@dataclass
class Runs:
    """All runs of one mode over the same prompts."""

    mode: Mode
    turns: list[list[Completion]] = field(default_factory=list)  # completions of all prompts, by turn

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each turn."""
        return [sum(len(c.tokens) for c in turn) / sum(c.stats.elapsed_s for c in turn) for turn in self.turns]

    @property
    def speed(self) -> float:
        """Median tokens per second."""
        return median(self.speeds)

    @property
    def spread(self) -> float:
        """Tokens per second between the slowest and the fastest turn."""
        return max(self.speeds) - min(self.speeds)

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of every completion, in the order of the runs."""
        return [completion.tokens for turn in self.turns for completion in turn]

    @property
    def drafted(self) -> float:
        """Share of the tokens that were drafted."""
        origins = [origin for turn in self.turns for completion in turn for origin in completion.origins]
        return origins.count("drafted") / len(origins)

    @property
    def tokens_per_step(self) -> float:
        every = [completion.stats for turn in self.turns for completion in turn]
        return sum(stats.new_tokens for stats in every) / sum(stats.cycles for stats in every)


def modes(engine: Engine, exit_layer: int | None = None, plan: str | None = None, domain: str = "auto") -> list[Mode]:
    """Returns plain, governed, and forced decoding with the given plan or, without one, with the engine's usual."""
    if plan is None and not engine.has_kernels:
        plan = PLAN_WITHOUT_KERNELS
    forced = {"speculative_decoding": "force", "exit_layer": exit_layer, "plan": plan, "domain": domain}
    return [
        Mode("plain", {"speculative_decoding": False}),
        Mode("governed", {"speculative_decoding": None, "domain": domain}),
        Mode("forced", forced),
    ]


def take_turns(
    engine: Engine,
    prompts: Sequence[Prompt],
    modes: Sequence[Mode],
    arguments: dict[str, Any],
    before_run: Callable[[int, int], None],  # (runs before this one, runs in all)
) -> list[Runs]:
    """Completes every prompt in every mode, in turns, and returns the runs of each mode. On kernels each mode first
    runs once uncounted: a plan's first step compiles and captures it."""
    rounds = TURNS + engine.has_kernels
    runs, index, count = [Runs(mode) for mode in modes], 0, rounds * len(modes)
    for turn in range(rounds):
        for of_mode in runs:
            before_run(index, count)
            index += 1
            completions = [engine.complete(prompt, **arguments, **of_mode.mode.arguments) for prompt in prompts]
            if turn >= rounds - TURNS:
                of_mode.turns.append(completions)
    return runs


def measure(
    console: Console, engine: Engine, prompts: Sequence[Prompt], modes: Sequence[Mode], arguments: dict[str, Any]
) -> list[Runs]:
    """Takes turns, with a line of progress on a terminal, and prints the comparison."""
    with console.status("measuring") as status:
        runs = take_turns(
            engine,
            prompts,
            modes,
            arguments,
            lambda index, count: status.update(f"measuring: run {index + 1} of {count}"),
        )
    show(console, engine, runs)
    return runs


def show(console: Console, engine: Engine, runs: Sequence[Runs]) -> None:
    """Prints speeds, whether the tokens are the same, and a verdict on each mode against plain decoding."""
    plain, *others = runs
    title = f"Median of {TURNS} runs each, taking turns"
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for heading in ("", "tokens/s", "range", "tok/step", "drafted"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=bool(heading))
    for of_mode in runs:
        ends = f"{_digits(min(of_mode.speeds))}-{_digits(max(of_mode.speeds))}"
        per_step, drafted = f"{of_mode.tokens_per_step:.2f}", f"{of_mode.drafted:.0%}"
        table.add_row(name_of(of_mode), _digits(of_mode.speed), ends, per_step, drafted)
    console.print(table)
    differing = [of_mode.mode.name for of_mode in others if of_mode.tokens != plain.tokens]
    same = "identical in all runs"
    console.print(f"tokens: {same if not differing else f'DIFFERENT ({why_different(engine)})'}", soft_wrap=True)
    for of_mode in others:
        console.print(verdict(engine, plain, of_mode), soft_wrap=True)


def _digits(speed: float) -> str:
    return f"{speed:.1f}" if speed < 100 else f"{speed:.0f}"


def name_of(runs: Runs) -> str:
    """Returns the mode's name, with the plan that was forced."""
    return f"forced {short_plan_name(runs.turns[-1][0].stats.plan)}" if runs.mode.name == "forced" else runs.mode.name


def is_measurable(a: Runs, b: Runs) -> bool:
    """True if every run of one is faster than every run of the other, and the medians differ by more than either
    spread."""
    is_apart = max(a.speeds) < min(b.speeds) or max(b.speeds) < min(a.speeds)
    return is_apart and abs(a.speed - b.speed) > max(a.spread, b.spread)


def verdict(engine: Engine, plain: Runs, runs: Runs) -> str:
    """Returns a sentence on a mode's speed against plain decoding, and a tip where one helps on this machine."""
    stats = [completion.stats for turn in runs.turns for completion in turn]
    name = name_of(runs)
    if not any(each.drafted for each in stats):
        why = reasons(*stats)
        meaning = ": no plan was predicted to be faster here" if why.endswith("goodput") else ""
        return f"{name}: decoded plainly ({why}){meaning}"
    if not is_measurable(plain, runs):
        return f"{name}: no measurable difference from plain"
    if runs.speed > plain.speed:
        return f"{name}: {runs.speed / plain.speed:.2f}x as fast as plain"
    slower = f"{name}: {plain.speed / runs.speed:.2f}x slower than plain"
    return f"{slower}. {why_slower(engine)}" if runs.mode.name == "forced" else slower


def why_slower(engine: Engine) -> str:
    if engine.profile is None:
        return "Its exit is untrained, so few of its drafts are accepted: selfspec calibrate trains one."
    if engine.device.type == "cpu":
        return "A CPU needs nearly as much time for a drafted token as for a decoded one, accepted or not."
    return "Its drafts are accepted too rarely for their cost here; --plan tries another plan."


def why_different(engine: Engine) -> str:
    if engine.has_kernels:
        return "a fault: please report it"
    if engine.dtype.itemsize >= 4:
        return "a rounding tie, or a fault: please report it"
    return "16 bits round often; try --dtype float32"
