"""Markdown tables of the benchmarks, from their JSON results alone: printed by the commands, written to RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

Result = dict[str, Any]


def table(headings: Sequence[str], lines: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table with aligned columns; the first one is flush left. None is an empty cell."""
    cells = [list(headings), *(["" if cell is None else str(cell) for cell in line] for line in lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    rule = [("-" if column == 0 else "-:").rjust(width, "-") for column, width in enumerate(widths)]
    padded = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in cells
    ]
    return [f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:])]


def speed(value: float | None) -> str:
    """Tokens per second with three significant digits at least."""
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def spread(found: Result | None) -> str:
    """Median and range of a ratio; ratios below 1 in bold, so that losses are seen."""
    if found is None:
        return ""
    least, greatest = (f"{found[name]:.2f}" for name in ("min", "max"))
    text = f"{found['median']:.2f}x" + (f" ({least}-{greatest})" if found["min"] < found["max"] else "")
    return f"**{text}**" if found["median"] < 1 else text


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
        for mode, result in cell["modes"].items():
            if "failed" in result:
                failed.append(f"{', '.join(map(str, name))}, {mode} failed: {result['failed']}")
                continue
            same = result["same_tokens"] and "{}/{}".format(*result["same_tokens"])
            lines.append(
                (*name, mode, speed(result["tokens_per_s"]["median"]), spread(result["against_plain"]),
                 f"{result['of_ceiling']:.0%}", result["tokens_per_step"], same)
            )  # fmt: skip
    return [*table(headings, lines), *failed]


def decode(found: Result) -> list[str]:
    """One table per temperature: a line per domain, plain and default speed per batch size; then the losses."""
    cells = _measured(found["cells"])
    lines = [
        f"Whole calls, prompt included, up to {found['new_tokens']} new tokens, the model's end token ends a sequence. "
        f"{found['sequences']} prompts of each domain in batches; plain and default calls take turns. Tokens/s are "
        f"medians of {_repeats(cells)}, after @: the accepted length (plain: 1). Ratios are medians (least-greatest) "
        "of the repeats' ratios; without brackets there was one repeat. all: all tokens by the sum of all times.",
    ]
    batches = sorted({cell["batch"] for cell in cells})
    heads = [head for size in batches for head in (f"batch {size}: plain", "default", "ratio")]
    for value in sorted({cell["temperature"] for cell in cells}):
        of_value = [cell for cell in cells if cell["temperature"] == value]
        domains = list(dict.fromkeys(cell["domain"] for cell in of_value))
        by_name = {(cell["domain"], cell["batch"]): cell for cell in of_value}
        body = [[domain, *_speeds(by_name.get((domain, size)) for size in batches)] for domain in domains]
        totals = [_total([cell for cell in of_value if cell["batch"] == size]) for size in batches]
        lines += ["", *table([temperature(value), *heads], [*body, ["all", *chain.from_iterable(totals)]])]
    return [*lines, "", *_losses(cells), *_missing(found["cells"])]


def _repeats(cells: list[Result]) -> str:
    counts = sorted({cell["repeats"] for cell in cells}) or [0]
    return f"{counts[0]} repeats" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} repeats (as time allowed)"


def _measured(cells: list[Result]) -> list[Result]:
    return [cell for cell in cells if all("failed" not in result for result in cell["modes"].values())]


def _speeds(cells: Iterable[Result | None]) -> list[str | None]:
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
    plain, default = _totals(cells)
    return [speed(plain), speed(default), times(default / plain)]


def _totals(cells: list[Result]) -> tuple[float, float]:
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


def _missing(cells: list[Result]) -> list[str]:
    """The modes that failed, by error."""
    failed: dict[str, list[str]] = {}
    for cell in cells:
        for mode, result in cell["modes"].items():
            if "failed" in result:
                name = f"{mode} in {cell['domain']}, batch {cell['batch']}, {temperature(cell['temperature'])}"
                failed.setdefault(result["failed"], []).append(name)
    return [f"{error}: {len(names)} measurements, the first is {names[0]}." for error, names in failed.items()]


# Options, serving, exactness


def options(found: Result) -> list[str]:
    headings = ("option", "plain, tokens/s", "of greedy plain", "default, tokens/s", "of greedy plain", "same tokens")
    lines = (
        (
            result["option"], speed(result["plain_tokens_per_s"]), times(result["plain_against_greedy"]),
            speed(result["tokens_per_s"]), times(result["against_greedy_plain"]),
            f"{result['same_tokens']}/{result['sequences']}",
        )
        for result in found["results"]
    )  # fmt: skip
    text = (
        f"One sequence at a time, {found['new_tokens']} new tokens, end tokens ignored; medians of "
        f"{found['results'][0]['sequences']} runs on {found['prompts']} prompts. Same tokens: sequences that are equal "
        "plainly and by default."
    )
    return [text, "", *table(headings, lines)]


def serving(found: Result) -> list[str]:
    """The parts that were measured, each a short table."""
    lines: list[str] = []
    captured = ", ".join(f"{part['part']} {part['graphs']}" for part in found.get("captured", []))
    found = {part: results for part, results in found.items() if part != "captured"}
    for part, results in found.items():
        if not results:
            continue
        names = list(results[0])
        headings = [name.replace("_", " ").replace(" per s", "/s").replace(" ms", ", ms") for name in names]
        lines += [f"{PARTS.get(part, part)}:", "", *table(headings, [list(result.values()) for result in results]), ""]
    missing = [part for part, results in found.items() if not results]
    if captured:
        lines += [f"Graphs captured while it was measured (each stalls all sequences for about 55 ms): {captured}."]
    return [*lines, f"Not reached within the time budget: {', '.join(missing)}."] if missing else lines


PARTS = {
    "throughput": "Throughput, all requests submitted at once, end tokens ignored",
    "latency": "Latency with random (Poisson) arrivals at shares of the plain throughput",
    "joining": "A long prompt joins running sequences (longest gap: between tokens of a running sequence)",
    "settings": "Sequences with equal and with different sampling parameters in one batch",
    "second_turn": "Second turn of a chat: time to the first token with prefix reuse and without",
}


def exactness(found: Result) -> list[str]:
    headings = ("check", "conditions", "tokens compared", "sequences that differ", "first difference")
    lines = [
        (
            check,
            f"{len(result['by_condition'])}",
            f"{result['compared']:,}",
            result["differing"],
            result["first"] or None,
        )
        for check, result in found.items()
    ]
    text = "Each sequence is compared with the same request alone, decoded plainly."
    return [text, "", *table(headings, lines)]


def exactness_conditions(found: Result) -> list[str]:
    """One line for every condition of every check."""
    headings = ("check", "condition", "tokens compared", "sequences that differ", "first difference")
    lines = [
        (check, condition, f"{tally['compared']:,}", tally["differing"], tally["first"] or None)
        for check, result in found.items()
        for condition, tally in result["by_condition"].items()
    ]
    return table(headings, lines)


# Parts of `bench.all` alone


def startup(found: Result) -> list[str]:
    names = {
        "load_s": "loading weights and profile, building the engine",
        "first_token_s": "first token of the first request, kernels compiled on the way",
        "warmup_s": "engine.warmup()",
        "repeated_warmup_s": "engine.warmup() again",
        "warm_first_token_s": "first token of a request after it",
        "warm_call_s": "that whole request",
    }
    lines = [(text, f"{found[name]:.3f}") for name, text in names.items()]
    text = f"Seconds; kernel cache {found['kernel_cache']}; the warm-up captured {found['warmup_steps']} steps."
    return [text, "", *table(("", "seconds"), lines)]


def memory(found: Result) -> list[str]:
    weights = found["weights"]
    lines = [(name.replace("_", " "), f"{size / 2**20:,.1f}", f"{size / weights:.1%}") for name, size in found.items()]
    return table(("", "MiB", "of the weights"), lines)


def peers(found: list[Result], ours: Result) -> list[str]:
    """Other engines' speeds beside ours in the same batch and temperature: of the same domain, else of all domains."""
    headings = (
        "peer",
        "case",
        "batch",
        "temperature",
        "tokens/s",
        "selfspec plain",
        "selfspec default",
        "default / peer",
    )
    lines = []
    for peer in found:
        for one in peer.get("results", []):
            cells = [
                cell for cell in _measured(ours["cells"])
                if (cell["batch"], cell["temperature"]) == (one["batch"], one["temperature"])
            ]  # fmt: skip
            alike = [cell for cell in cells if cell["domain"] in one["case"].split(", ")] or cells
            name = one.get("name", peer["name"])
            value = f"{one['temperature']:g}"
            lines.append([name, one["case"], one["batch"], value, *_beside(one["tokens_per_s"], alike)])
    failed = [f"{peer['name']}: {peer['failed']}" for peer in found if "failed" in peer]
    return [*(table(headings, lines) if lines else []), *_peers_serving(found), *failed]


def _beside(peer: float, cells: list[Result]) -> list[str]:
    """A peer's tokens per second, ours, and the ratio of ours by default to the peer's."""
    if not cells:
        return [speed(peer), "", "", ""]
    plain, default = _totals(cells)
    return [speed(peer), speed(plain), speed(default), times(default / peer)]


def _peers_serving(found: list[Result]) -> list[str]:
    """Other engines' `serving` rows: requests at once, and at shares of the engine's own throughput."""
    names = (
        "requests_per_s",
        "tokens_per_s",
        *(f"{time}_ms_p{p}" for time in ("first_token", "per_token") for p in (50, 99)),
    )
    rows = [
        [peer["name"], one["case"], one["load"], *(one.get(name, "") for name in names)]
        for peer in found
        for one in peer.get("serving", [])
    ]
    headings = (
        "peer (loads: shares of its throughput)",
        "case",
        "load",
        *(name.replace("_", " ").replace(" per s", "/s") for name in names),
    )
    return ["", *table(headings, rows)] if rows else []
