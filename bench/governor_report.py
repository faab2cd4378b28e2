"""Tables, summary and plot of the results of `bench.governor`. A cell holds those of one set and batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OOD_SETS = ("medical", "multilingual", "random", "noise")  # whose losing prompts are to be found out of distribution
DETAILS = ("governor_changes",)  # entries of a cell that are written to governor.json and not printed
_ENOUGH = 30  # losing prompts: the standard error of a share of 30 is at most 9 percentage points

Cell = dict[str, Any]


def show(console: Console, cell: Cell) -> None:
    """Prints a cell: one line for each mode. Ratios are speeds divided by plain speed."""
    table = Table(title=cell_name(cell), title_justify="left")
    headings = (
        "mode", "tokens/s", "speed / plain", "in steps", "worst call", "ms/token p50", "p99", "gap ms p50", "p99",
        "outside steps", "tokens per step", "ms before prefill", "same tokens",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=heading == "mode")
    for mode in cell["modes"]:
        table.add_row(
            mode["label"], f"{mode['tokens_per_s']:.1f}", _times(mode["against_plain"]),
            _times(mode["against_plain_in_steps"]), _times(mode["worst_call"]),
            f"{mode['ms_per_token']['p50']:.2f}", f"{mode['ms_per_token']['p99']:.2f}",
            f"{mode['gap_ms']['p50']:.2f}", f"{mode['gap_ms']['p99']:.2f}", f"{mode['outside_steps']:.1%}",
            f"{mode['tokens_per_step']:.2f}", f"{mode['prepare_ms']:.1f}", mode["same_tokens_as_plain"],
        )  # fmt: skip
    console.print(table)
    for part, found in cell.get("around_switch", {}).items():
        best, governor = found["best_fixed_against_plain"], found["governor_against_plain"]
        console.print(
            f"{part} token {cell['switch_at']}: governor {_times(governor)} plain, best fixed plan {_times(best)}"
        )


def cell_name(cell: Cell) -> str:
    temperature = f", temperature {cell['temperature']:g}" if cell["temperature"] else ""
    forced = ", forced texts" if cell["forced"] else ""
    calls = f"{cell['calls']} {'prompts' if cell['batch'] == 1 else 'batches'}"
    return f"{cell['set']}, batch {cell['batch']}{temperature}{forced}: {calls}, {cell['tokens']} tokens"


def summary(cells: list[Cell]) -> dict[str, Any]:
    """The worst figures of the in-domain and of the other sets, and counts of sequences out of distribution."""
    in_domain = [cell for cell in cells if cell["in_domain"]]
    others = [cell for cell in cells if not cell["in_domain"]]
    full = [cell["worst_full_length_call"] for cell in others if cell["worst_full_length_call"] is not None]
    same = [mode["same_tokens_as_plain"].split("/") for cell in cells for mode in cell["modes"]]
    return {
        "in_domain_min_against_best_fixed": _min(cell["governor_against_best_fixed"] for cell in in_domain),
        "in_domain_max_gap_p99_against_plain": max((c["gap_p99_against_plain"] or 0 for c in in_domain), default=None),
        "other_sets_min_against_plain": _min(cell["governor_against_plain"] for cell in others),
        "other_sets_worst_full_length_call": _min(full),
        # At batch 1 only: all sequences of a batch draft the same plan, so that only the batch can lose.
        "ood_sets": _sums([c for c in cells if c["set"] in OOD_SETS and c["batch"] == 1]),
        "in_domain_ood": _sums([cell for cell in in_domain if cell["batch"] == 1]),
        "all_tokens_same": all(equal == sequences for equal, sequences in same),
    }


def _min(values: Any) -> float | None:
    return min(values, default=None)


def _sums(cells: list[Cell]) -> dict[str, int]:
    names = ("sequences", "found", "losing", "losing_found_early")
    return {name: sum(cell["ood"][name] for cell in cells) for name in names}


def show_summary(console: Console, cells: list[Cell], found: dict[str, Any]) -> None:
    """Prints one line for each cell, and the counts of sequences out of distribution ("ood") at batch 1."""
    table = Table(title="The governor", title_justify="left")
    headings = (
        "set", "batch", "plain tokens/s", "best fixed plan", "best fixed / plain", "governor / plain",
        "with time before prefill", "governor / best fixed", "worst call", "gap p99 / plain", "ood", "at token",
        "losing", "losing, ood early", "tokens until drafting",
    )  # fmt: skip
    for heading in headings:
        is_name = heading in ("set", "best fixed plan")
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for cell in cells:
        table.add_row(*_columns(cell))
    console.print(table)
    ood_sets, in_domain = found["ood_sets"], found["in_domain_ood"]
    weak = f" (fewer than {_ENOUGH}: too few to judge)" if ood_sets["losing"] < _ENOUGH else ""
    console.print(
        f"{', '.join(OOD_SETS)} at batch 1: {ood_sets['losing']} of {ood_sets['sequences']} prompts lose{weak}, "
        f"{ood_sets['losing_found_early']} of these found out of distribution early; "
        f"in-domain at batch 1: {in_domain['found']} of {in_domain['sequences']} found out of distribution",
        soft_wrap=True,
    )


def _columns(cell: Cell) -> list[str]:
    found = cell["ood"]
    gap = cell["gap_p99_against_plain"]
    found_at = sorted(found["found_at"])
    return [
        cell["set"],
        str(cell["batch"]),
        f"{cell['modes'][0]['tokens_per_s']:.1f}",
        cell["best_fixed_label"],
        _times(cell["best_fixed_against_plain"]),
        _times(cell["governor_against_plain"]),
        _times(cell["governor_against_plain_with_preparation"]),
        _times(cell["governor_against_best_fixed"]),
        _times(cell["worst_call"]),
        "" if gap is None else _times(gap),
        f"{found['found']}/{found['sequences']}",
        "-".join(map(str, sorted({found_at[0], found_at[-1]}))) if found_at else "",
        str(found["losing"]),
        f"{found['losing_found_early']}/{found['losing']}" if found["losing"] else "",
        _resumption(cell.get("resumption")),
    ]


def _resumption(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    never = f"{found['never_resumed']}/{found['texts']} never" if found["never_resumed"] else ""
    tokens = "" if found["tokens_max"] is None else f"{found['tokens_median']:g}, at most {found['tokens_max']}"
    return "; ".join(part for part in (tokens, never) if part)


def _times(value: float) -> str:
    return f"{value:.3f}x"


def plot(path: Path, setup: dict[str, Any], cells: list[Cell]) -> str:
    """Plots each set's speeds divided by plain speed, one panel per batch size. Returns a line that names the file, or
    the reason why there is none."""
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
        panel.set_ylabel("speed / plain")
    panels[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    panels[-1].tick_params(axis="x", rotation=30)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return f"plot saved as {path}"


def _draw(panel: Any, names: list[str], cells: list[Cell]) -> None:
    """Draws the cells of one batch size; sets are on the x axis."""
    at = {name: index for index, name in enumerate(names)}
    plans = [(at[cell["set"]], mode["against_plain"]) for cell in cells for mode in cell["modes"][1:-1]]
    best = [(at[cell["set"]], cell["best_fixed_against_plain"]) for cell in cells]
    governor = [(at[cell["set"]], cell["governor_against_plain"]) for cell in cells]
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.scatter(*zip(*plans, strict=True), s=14, color="tab:gray", label="a fixed plan")
    panel.scatter(
        *zip(*best, strict=True), s=60, facecolors="none", edgecolors="tab:orange", label="the best fixed plan"
    )
    panel.scatter(*zip(*governor, strict=True), s=40, color="tab:blue", marker="D", label="governor")
    panel.set_xticks(range(len(names)), names)
    panel.margins(y=0.15)
