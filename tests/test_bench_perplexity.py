"""The perplexity benchmark: its losses are those of transformers, and its ways to hold weights are compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import perplexity
from selfspec import Engine
from selfspec.models.quantized import rounding
from tests.test_native_gguf import ENCODINGS, written
from tests.tiny import VOCABULARY, tiny_model


def test_the_mean_loss_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "WINDOW", 16)
    hf: Any = tiny_model("llama", torch.float32)
    tokens = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    loss, count = perplexity.mean_loss(Engine.from_model(hf, profile=None), tokens)
    windows = [torch.tensor([tokens[start : start + 16]]) for start in (0, 16, 32)]
    losses = [hf(window, labels=window).loss.item() * (window.shape[1] - 1) for window in windows]
    assert count == 37 and loss == pytest.approx(math.fsum(losses) / 37, rel=1e-5)


def test_ways_to_hold_the_weights_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(rounding, "_FACTORS", [1.0])  # to save time
    path = written(tmp_path, ENCODINGS["Q8_0"])
    command = ["--model", str(path), "--device", "cpu", "--tokens", "100", "--ways"]
    assert perplexity.main([*command, "expanded", "native", "int4", "int4-all"]) == 0
    found = {result["way"]: result for result in json.loads(capsys.readouterr().out.splitlines()[-1])["results"]}
    assert found["native"]["against_first"] == pytest.approx(0, abs=0.1)  # expanding rounds to bfloat16
    sizes = [found[way]["weights_mb"] for way in ("expanded", "native", "int4", "int4-all")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
