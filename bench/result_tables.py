"""Markdown tables of `bench.all` alone, from its JSON results. A section whose figures are one line of text has no
table."""

from __future__ import annotations

from typing import Any

from bench import timing
from bench.tables import (
    Result,
    after_table,
    cells_beside,
    loss,
    measured,
    missing,
    repeats,
    second_turn,
    server,
    speed,
    spread,
    table,
    times,
    totals,
)


def startup(found: Result) -> list[str]:
    seconds = {
        name: f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
        for name, value in found.items()
        if name.endswith("_s")
    }
    return [
        f"{seconds['load_s']} to load weights and profile and to build the engine; kernel cache "
        f"{found['kernel_cache']}: {seconds['first_token_s']} to the first token of the first request, then "
        f"{seconds['warmup_s']} for `engine.warmup()` ({found['warmup_steps']} captured steps; again "
        f"{seconds['repeated_warmup_s']}); after it {seconds['warm_first_token_s']} to the first token of a request, "
        f"{seconds['warm_call_s']} for all of it."
    ]


def memory(found: Result) -> list[str]:
    """Bytes that the engine holds, by what holds them."""
    held = ", ".join(
        f"{name.replace('_', ' ')} {size / 2**20:,.1f} ({size / found['weights']:.0%})" for name, size in found.items()
    )
    return [f"in MiB (of the weights): {held}."]


def short_requests(found: Result) -> list[str]:
    """A line for each length: milliseconds of a request, and ratios over the domains."""
    lengths = [(of["new_tokens"], measured(of["cells"]), of["sequences"]) for of in found["lengths"]]
    cells = [cell for _, of_length, _ in lengths for cell in of_length]
    text = (
        f"One greedy sequence, whole calls, prompt included; {max(count for *_, count in lengths)} prompts of each of "
        f"{len({cell['domain'] for cell in cells})} domains, plain and default in turns, {repeats(cells)}. Ratios: "
        "median of the domains (least-greatest)."
    )
    headings = (
        "new tokens", "plain, ms per request", "default, ms per request", "speed, default / plain",
        "domains below plain", "same tokens",
    )  # fmt: skip
    lines = [_short_line(*of) for of in lengths if of[1]]
    absent = list(dict.fromkeys(line for of in found["lengths"] for line in missing(of["cells"])))
    return [text, "", *table(headings, lines), *after_table(absent)]


def _short_line(new_tokens: int, cells: list[Result], prompts: int) -> list[Any]:
    plain, default = (
        1e3 * sum(cell["tokens"] for cell in cells) / of_mode / (prompts * len(cells)) for of_mode in totals(cells)
    )
    default_cells = [cell["modes"]["speculation"] for cell in cells]
    ratios = {cell["domain"]: of["against_plain"]["median"] for cell, of in zip(cells, default_cells, strict=True)}
    lost = sorted((ratio, domain) for domain, ratio in ratios.items() if ratio < 1)
    named = ", ".join(f"{domain} **{ratio:.2f}x**" for ratio, domain in lost[:2])
    same, sequences = (sum(of["same_tokens"][part] for of in default_cells) for part in (0, 1))
    return [
        new_tokens, f"{plain:.2f}", loss(f"{default:.2f}", default > plain),
        spread(timing.spread(list(ratios.values()), 3)), f"{len(lost)}/{len(ratios)}" + (f": {named}" if named else ""),
        f"{same}/{sequences}",
    ]  # fmt: skip


def unprofiled(found: Result) -> list[str]:
    """A column for each domain."""
    cells = measured(found["cells"])
    text = (
        "The same weights with `profile=None`: no exit, drafts are copies of the text so far. One greedy sequence, up "
        f"to {found['new_tokens']} new tokens, {found['sequences']} prompts of each domain, {repeats(cells)}; after @: "
        "the accepted length."
    )
    if not cells:
        return missing(found["cells"])
    plain, default = totals(cells)
    total = [speed(plain), speed(default), loss(times(default / plain), default < plain)]
    columns = [cells_beside([cell]) for cell in cells] + [total]
    names = ("plain, tokens/s", "default, tokens/s", "ratio (range)")
    lines = [(name, *(column[row] for column in columns)) for row, name in enumerate(names)]
    headings = ("", *(cell["domain"] for cell in cells), "all")
    return [text, "", *table(headings, lines), *after_table(missing(found["cells"]))]


def http(found: Result) -> list[str]:
    """Streams over HTTP, then the second turn of a chat."""
    streams = [found["failed"]] if "failed" in found else server(found["streams"])
    turn = second_turn(found["second_turn"]) or ["The second turn of a chat was not reached within the time budget."]
    return [*streams, "", *turn]


def quantized(found: Result) -> list[str]:
    """A line for each format of weights."""
    if "skipped" in found:
        return [found["skipped"]]
    formats = [of for of in found["formats"] if "failed" not in of]
    failed: dict[str, list[str]] = {}
    for of in found["formats"]:
        if "failed" in of:
            failed.setdefault(of["failed"], []).append(of["format"])
    absent = [f"{', '.join(names)}: {error}." for error, names in failed.items()]
    if not formats:
        return absent
    counts = [of["tokens"] for of in formats[0]["results"]]
    cards = list(formats[0]["cards_ms"])
    text = (
        f"Milliseconds of a pass over {', '.join(map(str, counts))} tokens of one sequence after "
        f"{formats[0]['results'][0]['context']} tokens, random weights of the shape {found['shape']} (in brackets: "
        "against one token). Of bandwidth: the time to read all weights at the measured "
        f"{found['bandwidth_gb_s']:g} GB/s, by that of the pass over one token. {' and '.join(cards)}: the time to "
        "read the weights there, by arithmetic."
    )
    headings = (
        "weights", "GB", *(f"{count} token{'s' * (count > 1)}, ms" for count in counts), "of bandwidth",
        *(f"reading at {card}, ms" for card in cards),
    )  # fmt: skip
    lines = [
        (
            of["format"], f"{of['gb']:.2f}",
            *map(_pass_cell, of["results"]),
            f"{of['ceiling_ms'] / of['results'][0]['ms']:.0%}", *(f"{ms:.1f}" for ms in of["cards_ms"].values()),
        )
        for of in formats
    ]  # fmt: skip
    return [text, "", *table(headings, lines), *after_table(absent)]


def _pass_cell(of: Result) -> str:
    return f"{of['ms']:.2f}" + (f" ({times(of['against_one'])})" if of["tokens"] > 1 else "")


def peers(found: list[Result], ours: Result) -> list[str]:
    """Other engines' speeds beside ours in the same batch and temperature: of the same domain, else of all domains."""
    headings = (
        "peer", "case", "batch", "temperature", "tokens/s", "selfspec plain", "selfspec default", "default / peer",
    )  # fmt: skip
    lines = []
    for of in found:
        for one in of.get("results", []):
            cells = [
                cell for cell in measured(ours["cells"])
                if (cell["batch"], cell["temperature"]) == (one["batch"], one["temperature"])
            ]  # fmt: skip
            alike = [cell for cell in cells if cell["domain"] in one["case"].split(", ")] or cells
            name = one.get("name", of["name"])
            value = f"{one['temperature']:g}"
            lines.append([name, one["case"], one["batch"], value, *_beside(one["tokens_per_s"], alike)])
    failed = [f"{of['name']}: {of['failed']}" for of in found if "failed" in of]
    return [*(table(headings, lines) if lines else []), *_peers_serving(found), *failed]


def _beside(peer: float, cells: list[Result]) -> list[str]:
    """A peer's tokens per second, ours, and the ratio of ours by default to the peer's."""
    if not cells:
        return [speed(peer), "", "", ""]
    plain, default = totals(cells)
    return [speed(peer), speed(plain), speed(default), times(default / peer)]


def _peers_serving(found: list[Result]) -> list[str]:
    """Other engines' `serving` rows: requests at once, and at shares of the engine's own throughput."""
    names = (
        "requests_per_s",
        "tokens_per_s",
        *(f"{of}_ms_p{p}" for of in ("first_token", "per_token") for p in (50, 99)),
    )
    rows = [
        [of["name"], one["case"], one["load"], *(one.get(name, "") for name in names)]
        for of in found
        for one in of.get("serving", [])
    ]
    headings = (
        "peer (loads: shares of its throughput)",
        "case",
        "load",
        *(name.replace("_", " ").replace(" per s", "/s") for name in names),
    )
    return ["", *table(headings, rows)] if rows else []
