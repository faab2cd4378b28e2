"""Markdown tables of the benchmarks, from their JSON results alone: printed by the commands, written to RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any

Result = dict[str, Any]


def table(headings: Sequence[str], lines: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table with aligned columns; the first one, and those with its heading, are flush left. None is an
    empty cell."""
    cells = [list(headings), *(["" if cell is None else str(cell) for cell in line] for line in lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    is_left = [heading == headings[0] for heading in headings]
    rule = [("-" if left else "-:").rjust(width, "-") for left, width in zip(is_left, widths, strict=True)]
    padded = [
        [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ]
        for line in cells
    ]
    return [f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:])]


def speed(value: float | None) -> str:
    """Tokens per second with three significant digits at least."""
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def milliseconds(value: float) -> str:
    """A number of milliseconds with three significant digits at least."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def spread(found: Result | None) -> str:
    """Median and range of a ratio; ratios below 1 in bold, so that losses are seen."""
    if found is None:
        return ""
    least, greatest = (f"{found[name]:.2f}" for name in ("min", "max"))
    text = f"{found['median']:.2f}x" + (f" ({least}-{greatest})" if found["min"] < found["max"] else "")
    return loss(text, found["median"] < 1)


def loss(text: str, is_loss: bool) -> str:
    """The text, in bold where it is worse than plain decoding."""
    return f"**{text}**" if is_loss else text


def after_table(lines: Sequence[str]) -> list[str]:
    """The lines behind an empty one, without which they would be rows of the table."""
    return ["", *lines] if lines else []


def beside(headings: Sequence[str], lines: Sequence[Sequence[Any]]) -> list[str]:
    """A table with the second half of its lines to the right of the first half."""
    half = -(-len(lines) // 2)
    empty = [None] * len(headings)
    pairs = zip_longest(lines[:half], lines[half:], fillvalue=empty)
    return table([*headings, *headings], [[*left, *right] for left, right in pairs])


def by_mode(results: Iterable[Result], *names: str) -> dict[tuple, dict[str, Result]]:
    """Results by the values of these names, then by mode."""
    found: dict[tuple, dict[str, Result]] = {}
    for of in results:
        found.setdefault(tuple(of[name] for name in names), {})[of["mode"]] = of
    return found


def temperature(value: float) -> str:
    return f"temperature {value:g}" if value else "greedy"


def setup(found: Result) -> list[str]:
    """The conditions in a few sentences."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    kernels = "Triton kernels" if found["kernels"] else f"PyTorch operations, {found['threads']} threads"
    bound = "" if found["memory_gb"] is None else f", bound to {found['memory_gb']:g} GB of GPU memory"
    lines = [
        f"{found['model']}, {found['dtype']} on {found['device']} ({kernels}{bound}), {found['exits']}; {versions}; "
        f"commit {found['commit']}, {found['date']}.",
        f"Ceiling of plain decoding: {speed(found['ceiling_tokens_per_s'])} tokens/s per sequence (all weights "
        f"are read once per step at {found['bandwidth_gb_s']:g} GB/s).",
    ]
    made = found["synthetic"]
    if made:
        lines.append(
            f"SYNTHETIC weights, the text is meaningless: layers after {made['exit_layer']} scaled by "
            f"{made['damping']:.4g}, {made['hard_share']:.1%} hard tokens; the exit agrees with the greedy text in "
            f"{made['top1']:.1%} top-1 (wanted {made['wanted_top1']:.0%}), {made['top4']:.1%} top-4 (wanted "
            f"{made['wanted_top4']:.0%}), with {made['draft_tokens']:,} tokens in its head."
        )
    return lines


# Decoding


def decode_modes(found: Result) -> list[str]:
    """One line for every cell and mode."""
    headings = (
        "domain", "batch", "temperature", "mode", "tokens/s", "against plain (range)", "of ceiling", "tokens per step",
        "same tokens as plain",
    )  # fmt: skip
    lines, failed = [], []
    for cell in found["cells"]:
        name = (cell["domain"], cell["batch"], f"{cell['temperature']:g}")
        for mode, of in cell["modes"].items():
            if "failed" in of:
                failed.append(f"{', '.join(map(str, name))}, {mode} failed: {of['failed']}")
                continue
            same = of["same_tokens"] and "{}/{}".format(*of["same_tokens"])
            lines.append(
                (*name, mode, speed(of["tokens_per_s"]["median"]), spread(of["against_plain"]),
                 f"{of['of_ceiling']:.0%}", of["tokens_per_step"], same)
            )  # fmt: skip
    return [*table(headings, lines), *failed]


def decode(found: Result) -> list[str]:
    """One table per temperature: a line per domain, plain and default speed per batch size; then the losses."""
    cells = measured(found["cells"])
    lines = [
        f"Whole calls, prompt included, up to {found['new_tokens']} new tokens, the model's end token ends a sequence. "
        f"{found['sequences']} prompts of each domain in batches; plain and default calls take turns. Tokens/s are "
        f"medians of {repeats(cells)}, after @: the accepted length (plain: 1). Ratios are medians (least-greatest) "
        "of the repeats' ratios; without brackets there was one repeat. all: all tokens by the sum of all times.",
    ]
    batches = sorted({cell["batch"] for cell in cells})
    heads = [head for size in batches for head in (f"batch {size}: plain", "default", "ratio")]
    for value in sorted({cell["temperature"] for cell in cells}):
        of_value = [cell for cell in cells if cell["temperature"] == value]
        domains = list(dict.fromkeys(cell["domain"] for cell in of_value))
        by_name = {(cell["domain"], cell["batch"]): cell for cell in of_value}
        body = [[domain, *cells_beside(by_name.get((domain, size)) for size in batches)] for domain in domains]
        summed = [_total([cell for cell in of_value if cell["batch"] == size]) for size in batches]
        lines += ["", *table([temperature(value), *heads], [*body, ["all", *chain.from_iterable(summed)]])]
    return [*lines, "", *_losses(cells), *missing(found["cells"])]


def repeats(cells: list[Result]) -> str:
    counts = sorted({cell["repeats"] for cell in cells}) or [0]
    return (
        f"{counts[0]} repeat{'s' * (counts[0] != 1)}"
        if len(counts) == 1
        else f"{counts[0]} to {counts[-1]} repeats (as time allowed)"
    )


def measured(cells: list[Result]) -> list[Result]:
    return [cell for cell in cells if all("failed" not in of for of in cell["modes"].values())]


def cells_beside(cells: Iterable[Result | None]) -> list[str | None]:
    """Three table cells for each: plain speed, default speed with the accepted length, and their ratio."""
    found: list[str | None] = []
    for cell in cells:
        plain, default = (cell["modes"][mode] for mode in ("plain", "speculation")) if cell else (None, None)
        found += [
            speed(plain and plain["tokens_per_s"]["median"]),
            default and f"{speed(default['tokens_per_s']['median'])} @ {default['tokens_per_step']}",
            spread(default and default["against_plain"]),
        ]
    return found


def _total(cells: list[Result]) -> list[str]:
    """Tokens per second over all domains, plainly and by default, and their ratio."""
    if not cells:
        return ["", "", ""]
    plain, default = totals(cells)
    return [speed(plain), speed(default), times(default / plain)]


def totals(cells: list[Result]) -> tuple[float, float]:
    """Tokens per second plainly and by default: all tokens by the sum of the median times."""
    tokens = sum(cell["tokens"] for cell in cells)
    plain, default = (
        sum(cell["tokens"] / cell["modes"][mode]["tokens_per_s"]["median"] for cell in cells)
        for mode in ("plain", "speculation")
    )
    return tokens / plain, tokens / default


def _losses(cells: list[Result]) -> list[str]:
    ratios = [(cell["modes"]["speculation"]["against_plain"]["median"], cell) for cell in cells]
    lost = [(ratio, cell) for ratio, cell in ratios if ratio < 1]
    named = "; ".join(
        f"{cell['domain']}, batch {cell['batch']}, {temperature(cell['temperature'])}: {ratio:.2f}x"
        for ratio, cell in sorted(lost, key=lambda pair: pair[0])[:8]
    )
    return [f"Below plain speed: {len(lost)} of {len(ratios)} cells" + (f" ({named})." if named else ".")]


def missing(cells: list[Result]) -> list[str]:
    """The modes that failed, by error."""
    failed: dict[str, list[str]] = {}
    for cell in cells:
        for mode, of in cell["modes"].items():
            if "failed" in of:
                name = f"{mode} in {cell['domain']}, batch {cell['batch']}, {temperature(cell['temperature'])}"
                failed.setdefault(of["failed"], []).append(name)
    return [f"{error}: {len(names)} measurements, the first is {names[0]}." for error, names in failed.items()]


# Options, serving, exactness


def options(found: Result) -> list[str]:
    """Two options per line: speeds, and their ratios to greedy plain decoding."""
    headings = ("option", "plain, tokens/s", "default, tokens/s", "same tokens")
    lines = [
        (
            of["option"],
            f"{speed(of['plain_tokens_per_s'])} ({times(of['plain_against_greedy'])})",
            loss(
                f"{speed(of['tokens_per_s'])} ({times(of['against_greedy_plain'])})",
                of["tokens_per_s"] < of["plain_tokens_per_s"],
            ),
            f"{of['same_tokens']}/{of['sequences']}",
        )
        for of in found["results"]
    ]
    text = (
        f"One sequence at a time, {found['new_tokens']} new tokens, end tokens ignored; medians of "
        f"{found['results'][0]['sequences']} runs on {found['prompts']} prompts, in brackets against greedy plain "
        "decoding. Same tokens: sequences that are equal plainly and by default. Bold: below plain with this option."
    )
    return [text, "", *beside(headings, lines)]


def serving(found: Result) -> list[str]:
    """The parts that were measured: a table of speeds, one of latencies, and lines of text."""
    groups = [
        _together(found.get("throughput", []), found.get("settings", [])),
        _latency(found.get("latency", [])),
        [*_joining(found.get("joining", [])), *second_turn(found.get("second_turn", []))],
    ]
    captured = ", ".join(f"{of['part']} {of['graphs']}" for of in found.get("captured", []))
    absent = [part for part, results in found.items() if not results and part != "captured"]
    if captured:
        fastest = found["captured"][-1].get("fastest_ms", 0.0)
        wait = f" (all sequences wait for each, {fastest:.0f} ms for the fastest)" if fastest else ""
        groups[-1].append(f"Graphs captured while it was measured{wait}: {captured}.")
    if absent:
        groups[-1].append(f"Not reached within the time budget: {', '.join(absent)}.")
    return [line for lines in groups if lines for line in ("", *lines)][1:]


def _together(throughput: Sequence[Result], settings: Sequence[Result]) -> list[str]:
    """Speeds of requests that are submitted at once."""
    groups = {
        f"{count} greedy requests, {decoding} at a time": modes
        for (count, decoding), modes in by_mode(throughput, "requests", "decoding").items()
    } | {f"{count}, settings: {name}": of for (count, name), of in by_mode(settings, "sequences", "settings").items()}
    if not groups:
        return []
    lines = [
        (
            name, *(_speed_and_ratio(of[mode]) for mode in ("plain", "speculation")),
            _ratio(of["speculation"]["tokens_per_s"], of["plain"]["tokens_per_s"]),
        )
        for name, of in groups.items()
    ]  # fmt: skip
    headings = ("requests submitted at once", "plain, tokens/s", "default, tokens/s", "default / plain")
    text = (
        "End tokens ignored; in brackets against the same mode with equal, greedy requests, and for different settings "
        "against batches of equal ones, one of each setting."
    )
    return [text, "", *table(headings, lines)]


def _speed_and_ratio(of: Result) -> str:
    against = of.get("against_equal")
    return speed(of["tokens_per_s"]) + ("" if against is None else f" ({times(against)})")


def _ratio(default: float, plain: float) -> str:
    return loss(times(default / plain), default < plain)


def _latency(results: Sequence[Result]) -> list[str]:
    """Median and 99th percentile of latencies with random arrivals."""
    if not results:
        return []
    headings = (
        "load",
        "requests/s",
        *(f"{mode}: {name}, ms" for mode in MODES for name in ("first token", "per token")),
    )
    lines = [
        (
            load,
            f"{rate:g}",
            *(_percentiles(of, mode, name) for mode in MODES.values() for name in ("first_token_ms", "per_token_ms")),
        )
        for (load, rate), of in by_mode(results, "load", "requests_per_s").items()
    ]
    text = "Random (Poisson) arrivals at shares of the plain throughput; median / 99th percentile; bold: above plain."
    return [text, "", *table(headings, lines)]


MODES = {"plain": "plain", "default": "speculation"}  # names in tables and in results


def _percentiles(of: dict[str, Result], mode: str, name: str) -> str:
    pairs = [(of[mode][f"{name}_{part}"], of["plain"][f"{name}_{part}"]) for part in ("p50", "p99")]
    return " / ".join(loss(milliseconds(value), value > plain) for value, plain in pairs)


def _joining(results: Sequence[Result]) -> list[str]:
    """A line about a long prompt that joins running sequences; none where it was not measured."""
    if not results:
        return []
    of = {one["mode"]: one for one in results}
    plain, default = of["plain"], of["speculation"]

    def both(name: str) -> str:
        return f"{milliseconds(plain[name])} ms plain, {milliseconds(default[name])} ms by default"

    return [
        f"A prompt of {plain['prompt_tokens']:,} tokens ({plain['chunks']} passes) joins {plain['running']} sequences: "
        f"longest gap between tokens of one of them {both('longest_gap_ms')} (bounds, the last pass and two steps: "
        f"{both('bound_ms')}; a step: {both('step_ms')}); its first token after {both('first_token_ms')} (alone: "
        f"{both('first_token_alone_ms')})."
    ]


def second_turn(results: Sequence[Result]) -> list[str]:
    """A line about the first token of a chat's second turn; none where it was not measured."""
    if not results:
        return []
    names = {mode: name for name, mode in MODES.items()}
    found = "; ".join(
        f"{names[of['mode']]} {milliseconds(of['first_token_ms'])} ms with prefix reuse, "
        f"{milliseconds(of['without_reuse_ms'])} ms without ({times(of['ratio'])})"
        for of in results
    )
    prompt, reused = results[0]["prompt_tokens"], results[0]["reused_tokens"]
    return [f"First token of a chat's second turn ({prompt:,} tokens of prompt, {reused:,} of them reused): {found}."]


def server(found: Result) -> list[str]:
    """A line per number of streams: both modes, directly and over HTTP."""
    headings = (
        "streams at once",
        *(
            f"{mode}: {name}"
            for mode in MODES
            for name in ("direct, tokens/s", "HTTP, tokens/s", "ratio", "first token, ms")
        ),
    )
    lines = [
        (count, *chain.from_iterable(_stream_cells(of[mode], of["plain"]) for mode in MODES.values()))
        for (count,), of in by_mode(found["results"], "streams").items()
    ]
    text = (
        f"Greedy streams of {found['new_tokens']} new tokens from a client in another process, against the engine "
        "called directly, in turns; first token: over HTTP; bold: below plain."
    )
    counts = ", ".join(map(str, found["not_reached"]))
    absent = [f"Not reached within the time budget: {counts} streams."] if counts else []
    return [text, "", *table(headings, lines), *after_table(absent)]


def _stream_cells(of: Result, plain: Result) -> list[str]:
    return [
        *(loss(speed(of[way]), of[way] < plain[way]) for way in ("direct", "server")),
        times(of["server"] / of["direct"]), milliseconds(of["first_token_ms"]),
    ]  # fmt: skip


def exactness(found: Result) -> list[str]:
    """One line: tokens that were compared by each check, and sequences that differ."""
    checks = "; ".join(
        f"{check}: {of['compared']:,} tokens under {len(of['by_condition'])} conditions, "
        + (f"**{of['differing']} sequences differ**, first {of['first']}" if of["differing"] else "no sequence differs")
        for check, of in found.items()
    )
    return [f"each sequence is compared with the same request alone, decoded plainly; {checks}."]


def exactness_conditions(found: Result) -> list[str]:
    """One line for every condition of every check."""
    headings = ("check", "condition", "tokens compared", "sequences that differ", "first difference")
    lines = [
        (check, condition, f"{of['compared']:,}", of["differing"], of["first"] or None)
        for check, result in found.items()
        for condition, of in result["by_condition"].items()
    ]
    return table(headings, lines)
