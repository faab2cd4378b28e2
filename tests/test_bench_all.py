"""`python -m bench.all` on a tiny saved model: every section, its tables, failures, peers and time budgets."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import all as bench_all
from bench import result_tables, sections, tables
from bench.timing import Limit
from tests.calibrated import chat_tokenizer
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[1]
SECTIONS = list(bench_all.SECTIONS)

pytestmark = [
    pytest.mark.filterwarnings("ignore:drafting only"),
    pytest.mark.xdist_group("bench_all"),  # one run of all sections serves most tests
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("llama", torch.float32, eos_token_id=None, max_position_embeddings=2048, num_hidden_layers=2)
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # restores the variable, which the command sets
    monkeypatch.setattr(bench_all.machine, "cpu_bandwidth", lambda: 1e9)


def run(folder: Path, out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, results.json and RESULTS.md of a quick run."""
    code = bench_all.main(["--quick", "--model", str(folder), "--device", "cpu", "--out", str(out), *arguments])
    return code, json.loads((out / "results.json").read_text()), (out / "RESULTS.md").read_text()


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of one quick run of all sections."""
    out = tmp_path_factory.mktemp("measured")
    code, results, _ = run(folder, out, "--commit", "abc123")
    assert code == 0
    return results


def test_every_section_is_measured_and_has_a_table(measured: dict[str, Any]) -> None:
    assert list(measured["sections"]) == SECTIONS and measured["setup"]["commit"] == "abc123"
    text = bench_all.render(measured)
    for name, of in measured["sections"].items():
        assert "failed" not in of and of["seconds"] >= 0, of
        title = bench_all.SECTIONS[name].title
        assert f"## {title}\n" in text or f"- {title}: " in text
    assert text.count("\n") <= 150 and "commit abc123" in text and "Ceiling of plain decoding" in text


def test_decoding_covers_all_domains_and_speculation_gives_plain_tokens(measured: dict[str, Any]) -> None:
    cells = measured["sections"]["decode"]["figures"]["cells"]
    assert {(cell["domain"], cell["batch"]) for cell in cells} == {
        (path.stem, size) for path in (ROOT / "bench/prompts").glob("*.jsonl") for size in (1, 2)
    }
    for cell in cells:
        same, count = cell["modes"]["speculation"]["same_tokens"]
        assert same == count, cell["domain"]


def test_exactness_compares_tokens_and_finds_no_difference(measured: dict[str, Any]) -> None:
    for check in measured["sections"]["exactness"]["figures"].values():
        assert check["compared"] >= 50 and check["differing"] == 0


def test_a_full_run_stays_within_150_lines(measured: dict[str, Any]) -> None:
    results = json.loads(json.dumps(measured))
    figures = results["sections"]["decode"]["figures"]
    (cell, *_) = figures["cells"]
    domains = dict.fromkeys(of["domain"] for of in figures["cells"])
    figures["cells"] = [
        {**cell, "domain": domain, "batch": size, "temperature": value}
        for value in (0.0, 0.7) for size in (1, 4, 16) for domain in domains
    ]  # fmt: skip
    short = results["sections"]["short"]["figures"]
    short["lengths"] = [{**short["lengths"][0], "new_tokens": length} for length in bench_all.Sizes.lengths]
    streams = results["sections"]["server"]["figures"]["streams"]
    streams["results"] = [
        {**of, "streams": count} for count in bench_all.Sizes.streams for of in streams["results"][:2]
    ]
    results["sections"]["quantized"]["figures"] = passes_of(*bench_all.Sizes.formats)
    peer = {"case": "chat", "batch": 4, "temperature": 0.7, "tokens_per_s": 7.0}
    results["peers"] = [{"name": "another engine", "results": [peer] * 11}]  # 17 lines in all are theirs
    text = bench_all.render(results)
    assert text[text.index("\n## Peers") :].count("\n") == 16 and text.count("\n") <= 145


def passes_of(*formats: str) -> dict[str, Any]:
    """Figures of passes with these formats of weights."""
    results = [
        {"context": 2048, "tokens": tokens, "ms": 4.0 * against, "against_one": against}
        for tokens, against in ((1, 1.0), (4, 1.01), (16, 1.05), (64, 1.5))
    ]
    each = {"gb": 8.0, "ceiling_ms": 2.0, "cards_ms": {"1 TB/s": 8.0, "0.36 TB/s": 22.2}, "results": results}
    return {"shape": "llama-8b", "bandwidth_gb_s": 4000.0, "formats": [{"format": name, **each} for name in formats]}


def test_results_of_another_run_are_completed_if_commit_and_machine_are_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured_after(*arguments: str) -> list[str]:
        _, results, text = run(folder, tmp_path, *arguments)
        assert f"{results['runs']} runs of one commit" in text or results["runs"] == 1
        return list(results["sections"])

    assert measured_after("--commit", "abc123", "--sections", "memory") == ["memory"]
    assert measured_after("--commit", "abc123", "--sections", "startup") == ["memory", "startup"]
    assert "will be replaced" not in capsys.readouterr().err
    assert measured_after("--commit", "def456", "--sections", "startup") == ["startup"]
    assert "is not of this commit and machine" in capsys.readouterr().err
    assert measured_after("--commit", "def456 + changes", "--sections", "memory") == ["memory"]
    assert measured_after("--commit", "def456 + changes", "--sections", "startup") == ["startup"]


def test_sections_added_by_another_run_stand_in_the_usual_order(measured: dict[str, Any]) -> None:
    reverse = dict(reversed(measured["sections"].items()))
    assert bench_all.render({**measured, "sections": reverse}) == bench_all.render(measured)


def test_results_without_the_newer_sections_are_rendered() -> None:
    results = json.loads((ROOT / "bench/results.json").read_text())
    for name in ("short", "server", "no_profile", "quantized"):
        results["sections"].pop(name, None)
    text = bench_all.render(results)
    assert "## Decoding" in text and "## Peers" in text and "## Server" not in text


def test_an_engine_without_a_profile_shares_the_weights(folder: Path) -> None:
    args = bench_all.parse(["--quick", "--model", str(folder), "--device", "cpu"])
    target = bench_all.open_target(bench_all.model_arguments(args, bench_all.QUICK), 2, 1408)
    domains = {"code": target.domains["code"]}
    other = sections.without_profile(target, domains)
    assert other.engine.model is target.engine.model and other.engine is not target.engine
    assert other.engine.profile is None and other.speculation == {} and other.domains == domains


def test_a_format_that_fails_is_named_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shape: str, format: str, *_: Any) -> dict[str, Any]:
        if format in ("bf16", "int8"):
            raise torch.OutOfMemoryError("no memory")
        if format == "q4_k":
            raise ValueError("not this\none")
        return passes_of(format)["formats"][0]

    monkeypatch.setattr(sections.passes, "measure", measure)
    monkeypatch.setattr(sections, "free_device_bytes", lambda _: 9 * 10**9)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    formats = [sections.measure_passes(bench_all.QUICK, name, 1e9, Limit()) for name in bench_all.QUICK.formats]
    spent = sections.measure_passes(bench_all.QUICK, "other", 1e9, Limit(0.0))
    lines = result_tables.quantized({**passes_of(), "formats": [*formats, spent]})
    assert [line.split()[1] for line in lines[2:5]] == ["weights", "-------", "int4"]
    assert lines[6:] == [
        "bf16, int8: needs more GPU memory than is free (9 GB).",
        "q4_k: ValueError: not this one.",
        "other: not reached within the time budget.",
    ]


def test_tables_are_rewritten_from_the_results_alone(measured: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "earlier.json"
    source.write_text(json.dumps(measured))
    out = tmp_path / "tables"
    assert bench_all.main(["--from", str(source), "--out", str(out)]) == 0
    assert (out / "RESULTS.md").read_text() == bench_all.render(measured)


def test_a_section_that_fails_is_reported_and_the_others_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the device\nis gone")

    monkeypatch.setattr(sections.serving, "measure", fails)
    code, results, text = run(folder, tmp_path, "--sections", "serving", "memory")
    assert code == 1 and results["sections"]["serving"]["failed"] == "RuntimeError: the device is gone"
    assert results["sections"]["memory"]["figures"]["weights"] > 0
    assert "FAILED: RuntimeError: the device is gone" in text
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["benchmark"] == "all"


def test_a_difference_is_a_fault_with_kernels_only(measured: dict[str, Any]) -> None:
    results = json.loads(json.dumps(measured))
    results["sections"]["exactness"]["figures"]["plans"]["differing"] = 1
    assert bench_all.faults(results) == []
    results["setup"]["kernels"] = True
    assert bench_all.faults(results) == ["plans"]


def test_cells_beyond_the_time_budget_are_listed(folder: Path, tmp_path: Path) -> None:
    code, results, text = run(folder, tmp_path, "--sections", "decode", "--limit", "1e-9")
    assert code == 0 and "not reached within the time budget: 40 measurements" in text
    assert "Below plain speed: 0 of 0 cells" in text


def test_peers_stand_beside_our_speeds(measured: dict[str, Any], tmp_path: Path) -> None:
    cell = measured["sections"]["decode"]["figures"]["cells"][0]
    source, own, decoded = (tmp_path / name for name in ("results.json", "own.json", "decoded.json"))
    source.write_text(json.dumps(measured))
    case = {"case": cell["domain"], "batch": 1, "temperature": 0.0, "tokens_per_s": 649.0}
    own.write_text(json.dumps({"name": "another engine", "results": [case]}))
    peer = {**cell, "modes": {**cell["modes"], "transformers eager": cell["modes"]["plain"]}}
    decoded.write_text("a table\n" + json.dumps({"cells": [peer]}) + "\n")
    missing = tmp_path / "missing.json"
    arguments = ["--from", source, "--out", tmp_path, "--peer", own, decoded, missing]
    assert bench_all.main(list(map(str, arguments))) == 0
    lines = (tmp_path / "RESULTS.md").read_text().split("## Peers")[1].splitlines()
    plain = tables.speed(cell["modes"]["plain"]["tokens_per_s"]["median"])
    assert any("another engine" in line and " 649 " in line and f" {plain} " in line for line in lines)
    assert any("transformers eager" in line and line.count(f" {plain} ") == 2 for line in lines)
    assert "missing.json: the file does not exist" in lines


def test_losses_are_counted_and_bold() -> None:
    ratio = {"median": 0.9, "min": 0.8, "max": 1.1}
    speed = {"tokens_per_s": {"median": 100.0}, "tokens_per_step": 1.0, "against_plain": None}
    modes = {"plain": speed, "speculation": {**speed, "against_plain": ratio}}
    cell = {"domain": "chat", "batch": 4, "temperature": 0.7, "repeats": 3, "tokens": 10, "modes": modes}
    text = "\n".join(tables.decode({"new_tokens": 8, "repeat": 3, "sequences": 1, "cells": [cell]}))
    assert "**0.90x (0.80-1.10)**" in text
    assert "Below plain speed: 1 of 1 cells (chat, batch 4, temperature 0.7: 0.90x)." in text


def test_passes_have_a_line_per_format_with_the_reading_of_the_weights_on_other_cards() -> None:
    text, _, head, _, line = result_tables.quantized(passes_of("int4"))
    assert "after 2048 tokens" in text and "4000 GB/s" in text
    cells = [[cell.strip() for cell in of.strip("|").split("|")] for of in (head, line)]
    assert dict(zip(*cells, strict=True)) == {
        "weights": "int4", "GB": "8.00", "1 token, ms": "4.00", "4 tokens, ms": "4.04 (1.01x)",
        "16 tokens, ms": "4.20 (1.05x)", "64 tokens, ms": "6.00 (1.50x)", "of bandwidth": "50%",
        "reading at 1 TB/s, ms": "8.0", "reading at 0.36 TB/s, ms": "22.2",
    }  # fmt: skip


def test_short_requests_have_a_line_per_length_with_the_domains_that_lose() -> None:
    def cell(domain: str, ratio: float) -> dict[str, Any]:
        plain = {"tokens_per_s": {"median": 100.0}, "against_plain": None, "same_tokens": None}
        against = {"median": ratio, "min": ratio, "max": ratio}
        default = {"tokens_per_s": {"median": 100.0 * ratio}, "against_plain": against, "same_tokens": [2, 2]}
        return {"domain": domain, "repeats": 3, "tokens": 16, "modes": {"plain": plain, "speculation": default}}

    cells = [cell("chat", 1.25), cell("code", 2.0), cell("qa", 0.8)]
    text, _, _, _, line = result_tables.short_requests({"lengths": [{"new_tokens": 8, "sequences": 2, "cells": cells}]})
    assert "2 prompts of each of 3 domains" in text and "3 repeats" in text
    cells_of_line = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells_of_line == ["8", "80.00", "68.00", "1.25x (0.80-2.00)", "1/3: qa **0.80x**", "6/6"]


def test_losses_of_serving_options_and_streams_are_bold() -> None:
    modes = [{"mode": "plain", "tokens_per_s": 100.0}, {"mode": "speculation", "tokens_per_s": 90.0}]
    found = tables.serving({"throughput": [{**of, "requests": 4, "decoding": 2} for of in modes]})
    assert any("**0.90x**" in line for line in found)
    option = {"plain_tokens_per_s": 100.0, "plain_against_greedy": 1.0, "same_tokens": 1, "sequences": 1}
    slow, fast = ({**option, "tokens_per_s": value, "against_greedy_plain": value / 100} for value in (90.0, 120.0))
    results = [{"option": name, **of} for name, of in (("greedy", fast), ("top-k", slow), ("bias", fast))]
    *_, first, second = tables.options({"new_tokens": 8, "prompts": 1, "results": results})
    assert "| bias " in first and "top-k" in second and "**90.0 (0.90x)**" in second and "**" not in first
    streams = [
        {"streams": 4, "mode": mode, "direct": direct, "server": 50.0, "first_token_ms": 5.0}
        for mode, direct in (("plain", 100.0), ("speculation", 80.0))
    ]
    found = tables.server({"new_tokens": 8, "results": streams, "not_reached": [16]})
    assert "**80.0**" in found[4] and found[4].count("**") == 2 and "16 streams" in found[-1]


@pytest.mark.parametrize(
    "name", ["all", "decode", "exactness", "host", "kernels", "options", "parity", "passes", "serving"]
)
def test_help_says_in_two_sentences_what_is_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"bench.{name}").main(["--help"])
    description = " ".join(capsys.readouterr().out.split("\n\n")[1].split())
    assert description.startswith(f"`python -m bench.{name}`: ") and description.count(". ") == 1
