"""`python -m bench.all` on a tiny saved model: every section, its tables, failures, peers and time budgets."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import all as bench_all
from bench import tables
from tests.calibrated import chat_tokenizer
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[1]
SECTIONS = list(bench_all.SECTIONS)

pytestmark = pytest.mark.filterwarnings("ignore:drafting only")


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
    for name, section in measured["sections"].items():
        assert "failed" not in section and section["seconds"] >= 0, section
        assert f"## {bench_all.SECTIONS[name].title}" in text
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
    domains = dict.fromkeys(cell["domain"] for cell in figures["cells"])
    figures["cells"] = [
        {**cell, "domain": domain, "batch": size, "temperature": value}
        for value in (0.0, 0.7) for size in (1, 4, 16) for domain in domains
    ]  # fmt: skip
    peer = {"case": "chat", "batch": 4, "temperature": 0.7, "tokens_per_s": 7.0}
    results["peers"] = [{"name": "another engine", "results": [peer] * 12}]
    assert bench_all.render(results).count("\n") <= 150


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

    monkeypatch.setattr(bench_all.serving, "measure", fails)
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


@pytest.mark.parametrize(
    "name", ["all", "decode", "exactness", "host", "kernels", "options", "parity", "passes", "serving"]
)
def test_help_says_in_two_sentences_what_is_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"bench.{name}").main(["--help"])
    description = " ".join(capsys.readouterr().out.split("\n\n")[1].split())
    assert description.startswith(f"`python -m bench.{name}`: ") and description.count(". ") == 1
