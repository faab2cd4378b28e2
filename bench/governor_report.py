"""Tables, summary and plot of `bench.governor`, from its results alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

DETECTION = ("medical", "multilingual", "random", "noise")  # sets whose losing prompts are to be found out
DETAILS = ("governor_changes",)  # of a cell, for the file alone
_EVIDENCE = 30  # losing prompts; fewer tell little

Cell = dict[str, Any]


def show(console: Console, cell: Cell) -> None:
    """The table of one set and batch."""
    table = Table(title=cell_name(cell), title_justify="left")
    headings = (
        "mode", "tokens/s", "against plain", "in cycles", "worst call", "ms/token p50", "p99", "gap ms p50", "p99",
        "not hidden", "tokens per cycle", "opening ms", "same as plain",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=heading == "mode")
    for mode in cell["modes"]:
        table.add_row(
            mode["shown"], f"{mode['tokens_per_s']:.1f}", _times(mode["against_plain"]),
            _times(mode["against_plain_in_cycles"]), _times(mode["worst_call"]),
            f"{mode['ms_per_token']['p50']:.2f}", f"{mode['ms_per_token']['p99']:.2f}",
            f"{mode['gap_ms']['p50']:.2f}", f"{mode['gap_ms']['p99']:.2f}", f"{mode['not_hidden']:.1%}",
            f"{mode['tokens_per_cycle']:.2f}", f"{mode['opening_ms']:.1f}", mode["same_tokens_as_plain"],
        )  # fmt: skip
    console.print(table)
    for part, found in cell.get("around_turn", {}).items():
        best, own = found["best_fixed_against_plain"], found["governor_against_plain"]
        console.print(f"{part} token {cell['turn']}: governor {_times(own)} plain, best fixed plan {_times(best)}")


def cell_name(cell: Cell) -> str:
    heat = f", temperature {cell['temperature']:g}" if cell["temperature"] else ""
    recited = ", recited" if cell["recited"] else ""
    calls = f"{cell['calls']} {'prompts' if cell['batch'] == 1 else 'batches'}"
    return f"{cell['set']}, batch {cell['batch']}{heat}{recited}: {calls}, {cell['tokens']} tokens"


def summary(cells: list[Cell]) -> dict[str, Any]:
    """What all cells come to."""
    familiar = [cell for cell in cells if not cell["hostile"]]
    hostile = [cell for cell in cells if cell["hostile"]]
    whole = [cell["worst_whole_call"] for cell in hostile if cell["worst_whole_call"] is not None]
    same = [mode["same_tokens_as_plain"].split("/") for cell in cells for mode in cell["modes"]]
    return {
        "in_domain_least_against_best_fixed": _least(cell["governor_against_best_fixed"] for cell in familiar),
        "in_domain_most_gap_p99_against_plain": max((c["gap_p99_against_plain"] or 0 for c in familiar), default=None),
        "hostile_least_against_plain": _least(cell["governor_against_plain"] for cell in hostile),
        "hostile_worst_whole_call": _least(whole),
        # A row of a larger batch has no plan of its own, so that it cannot be said to lose.
        "detected": _added([c for c in cells if c["set"] in DETECTION and c["batch"] == 1]),
        "in_domain_flagged": _added([cell for cell in familiar if cell["batch"] == 1]),
        "all_tokens_same": all(same == of for same, of in same),
    }


def _least(values: Any) -> float | None:
    return min(values, default=None)


def _added(cells: list[Cell]) -> dict[str, int]:
    names = ("rows", "flagged", "losing", "losing_flagged_early")
    return {name: sum(cell["detection"][name] for cell in cells) for name in names}


def show_summary(console: Console, cells: list[Cell], found: dict[str, Any]) -> None:
    """One line for each set and batch, and what they say together."""
    table = Table(title="The governor", title_justify="left")
    headings = (
        "set", "batch", "plain tokens/s", "best fixed plan", "against plain", "governor against plain",
        "with opening", "against best fixed", "worst call", "gap p99 against plain", "flagged", "at token", "losing",
        "of these flagged early", "back after",
    )  # fmt: skip
    for heading in headings:
        is_name = heading in ("set", "best fixed plan")
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for cell in cells:
        table.add_row(*_cells(cell))
    console.print(table)
    detected, flagged = found["detected"], found["in_domain_flagged"]
    weak = f" (under {_EVIDENCE}, which is no evidence)" if detected["losing"] < _EVIDENCE else ""
    console.print(
        f"{', '.join(DETECTION)} at batch 1: {detected['losing']} of {detected['rows']} prompts lose{weak}, "
        f"{detected['losing_flagged_early']} of them flagged early; "
        f"in-domain at batch 1: {flagged['flagged']} of {flagged['rows']} flagged",
        soft_wrap=True,
    )


def _cells(cell: Cell) -> list[str]:
    found = cell["detection"]
    gap = cell["gap_p99_against_plain"]
    flagged_at = sorted(found["flagged_at"])
    return [
        cell["set"],
        str(cell["batch"]),
        f"{cell['modes'][0]['tokens_per_s']:.1f}",
        cell["best_fixed_shown"],
        _times(cell["best_fixed_against_plain"]),
        _times(cell["governor_against_plain"]),
        _times(cell["governor_against_plain_with_opening"]),
        _times(cell["governor_against_best_fixed"]),
        _times(cell["worst_call"]),
        "" if gap is None else _times(gap),
        f"{found['flagged']}/{found['rows']}",
        "-".join(map(str, sorted({flagged_at[0], flagged_at[-1]}))) if flagged_at else "",
        str(found["losing"]),
        f"{found['losing_flagged_early']}/{found['losing']}" if found["losing"] else "",
        _back(cell.get("return")),
    ]


def _back(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    never = f"{found['never_back']}/{found['texts']} never" if found["never_back"] else ""
    most = "" if found["tokens_most"] is None else f"{found['tokens_median']:g}, at most {found['tokens_most']}"
    return "; ".join(part for part in (most, never) if part)


def _times(value: float) -> str:
    return f"{value:.3f}x"


def plot(path: Path, setup: dict[str, Any], cells: list[Cell]) -> str:
    """Speed over plain decoding for every set, a panel for each batch size; says where it is or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    if not cells:
        return "no plot: nothing was measured"
    sizes = sorted({cell["batch"] for cell in cells})
    names = list(dict.fromkeys(cell["set"] for cell in cells))
    figure = Figure(figsize=(3 + 0.8 * len(names), 1 + 2.8 * len(sizes)), layout="constrained")
    panels = figure.subplots(len(sizes), 1, squeeze=False, sharex=True)[:, 0]
    for size, panel in zip(sizes, panels, strict=True):
        _draw(panel, names, [cell for cell in cells if cell["batch"] == size])
        panel.set_title(f"{setup['model']} on {setup['device']}, batch {size}", loc="left")
        panel.set_ylabel("speed over plain")
    panels[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    panels[-1].tick_params(axis="x", rotation=30)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return f"plot saved as {path}"


def _draw(panel: Any, names: list[str], cells: list[Cell]) -> None:
    """Dots above the sets' names."""
    at = {name: place for place, name in enumerate(names)}
    plans = [(at[cell["set"]], mode["against_plain"]) for cell in cells for mode in cell["modes"][1:-1]]
    best = [(at[cell["set"]], cell["best_fixed_against_plain"]) for cell in cells]
    own = [(at[cell["set"]], cell["governor_against_plain"]) for cell in cells]
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.scatter(*zip(*plans, strict=True), s=14, color="tab:gray", label="a fixed plan")
    panel.scatter(*zip(*best, strict=True), s=60, facecolors="none", edgecolors="tab:orange", label="the best of them")
    panel.scatter(*zip(*own, strict=True), s=40, color="tab:blue", marker="D", label="governor")
    panel.set_xticks(range(len(names)), names)
    panel.margins(y=0.15)
