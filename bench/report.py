"""Tables and the plot of `bench.decode`, from its results alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HEADINGS = (
    "mode", "tokens/s", "ms/token p50", "p99", "against transformers", "against plain", "of ceiling",
    "tokens per cycle", "peak GB", "same as plain", "same as transformers",
)  # fmt: skip


def describe(console: Console, setup: dict[str, Any]) -> None:
    kernels = "kernels" if setup["kernels"] else "PyTorch operations"
    bound = "" if setup["memory_gb"] is None else f", bound to {setup['memory_gb']:g} GB of GPU memory"
    console.print(
        f"{setup['model']}, {setup['dtype']} on {setup['device']} ({kernels}, {setup['threads']} threads), "
        f"torch {setup['torch']}, transformers {setup['transformers']}, {setup['max_new_tokens']} new tokens, "
        f"{setup['exits']}{bound}",
        soft_wrap=True,
    )
    synthetic = setup["synthetic"]
    if synthetic:
        console.print(
            f"SYNTHETIC weights: the text is nonsense. Layers after {synthetic['exit_layer']} damped by "
            f"{synthetic['damping']:.4g}, {synthetic['hard_share']:.1%} hard tokens; the raw exit there agrees "
            f"{synthetic['top1']:.1%} top-1 (wanted {synthetic['wanted_top1']:.0%}) and {synthetic['top4']:.1%} top-4 "
            f"(wanted {synthetic['wanted_top4']:.0%}) with greedy text of the model, which it drafts from "
            f"{synthetic['draft_rows']:,} rows of the head; the model writes no other tokens",
            soft_wrap=True,
        )


def show(console: Console, setup: dict[str, Any], batch: int, temperature: float, results: list[dict]) -> None:
    """The table of one cell: a batch size and a temperature."""
    table = Table(title=cell_name(batch, temperature), title_justify="left")
    for heading in HEADINGS:
        is_name = heading == "mode"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    ceiling = setup["ceiling_tokens_per_s"]
    if batch == 1:
        table.add_row(f"ceiling ({setup['bandwidth_gb_s']} GB/s)", f"{ceiling:.1f}", f"{1e3 / ceiling:.2f}")
    failed = [row for row in results if "failed" in row]
    for row in results:
        if row not in failed:
            table.add_row(*_cells(row))
    console.print(table)
    for row in failed:
        console.print(f"{row['mode']} failed: {row['failed']}", markup=False)


def cell_name(batch: int, temperature: float) -> str:
    return f"batch {batch}, {f'temperature {temperature:g}' if temperature else 'greedy'}"


def _cells(row: dict[str, Any]) -> list[str]:
    def times(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}x"

    peak = row["peak_bytes"]
    return [
        row["mode"],
        f"{row['tokens_per_s']:.1f}",
        f"{row['ms_per_token_p50']:.2f}",
        f"{row['ms_per_token_p99']:.2f}",
        times(row["speedup_median"]),
        times(row["speedup_over_plain"]),
        f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else "",
        f"{row['tokens_per_cycle']:.2f}",
        "" if peak is None else f"{peak / 1e9:.2f}",
        row["same_tokens_as_plain"] or "",
        row["same_tokens_as_transformers"] or "",
    ]


def plot(path: Path, runs: list[dict[str, Any]]) -> str:
    """Bars of tokens per second, a panel for every cell; says where it is or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    cells = [(run["setup"], cell) for run in runs for cell in run["cells"]]
    if not cells:
        return "no plot: nothing was timed"
    rows = [[row for row in cell["results"] if "failed" not in row] for _, cell in cells]
    heights = [0.6 + 0.3 * max(1, len(row)) for row in rows]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    panels = figure.subplots(len(cells), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for (setup, cell), bars, panel in zip(cells, rows, panels, strict=True):
        names, speeds = [bar["mode"] for bar in bars], [bar["tokens_per_s"] for bar in bars]
        colours = ["tab:blue" if name.startswith("selfspec") else "tab:gray" for name in names]
        panel.bar_label(panel.barh(names, speeds, color=colours), fmt="%.0f", padding=3)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        weights = " (synthetic weights)" if setup["synthetic"] else ""
        panel.set_title(f"{setup['model']}{weights}, {cell_name(cell['batch'], cell['temperature'])}", loc="left")
    panels[-1].set_xlabel("tokens per second")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return f"plot saved as {path}"
