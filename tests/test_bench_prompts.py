"""The benchmark's prompts: 16 different ones of each domain, none of which calibration or another measurement uses."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOMAINS = [
    "chat", "code", "extract", "legal", "math", "medical", "multilingual", "qa", "summarize", "translate",
]  # fmt: skip
WITH_PASSAGE = {"extract", "qa", "summarize"}
SHARED_WORDS = 10  # a run of so many equal words means that one text was made from the other


def prompts_in(path: Path) -> list[str]:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    return [entry.get("prompt") or " ".join(message["content"] for message in entry["messages"]) for entry in entries]


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    """All runs of SHARED_WORDS words; the whole text if it is shorter."""
    words = re.findall(r"\w+", text.lower())
    starts = range(max(1, len(words) - SHARED_WORDS + 1))
    return {tuple(words[start : start + SHARED_WORDS]) for start in starts}


def test_every_domain_has_16_different_prompts_of_sensible_length() -> None:
    files = {path.stem: prompts_in(path) for path in sorted((ROOT / "bench/prompts").glob("*.jsonl"))}
    assert list(files) == DOMAINS
    for domain, prompts in files.items():
        assert len(prompts) == len(set(prompts)) == 16, domain
        assert all(prompt == prompt.strip() and 25 <= len(prompt) <= 1500 for prompt in prompts), domain
        if domain in WITH_PASSAGE:
            assert all(80 <= len(prompt.split()) <= 250 for prompt in prompts), domain


@pytest.mark.parametrize("folder", ["calibration/prompts", "../shared/prompts"])
def test_no_prompt_shares_a_run_of_words_with_prompts_used_elsewhere(folder: str) -> None:
    paths = sorted((ROOT / folder).glob("*.jsonl"))
    if not paths and folder.startswith(".."):
        pytest.skip("these prompts are not part of the repository")
    assert paths
    elsewhere = set(chain.from_iterable(runs_of_words(text) for path in paths for text in prompts_in(path)))
    for domain in DOMAINS:
        for prompt in prompts_in(ROOT / f"bench/prompts/{domain}.jsonl"):
            assert not runs_of_words(prompt) & elsewhere, f"{domain}: {prompt[:60]}"
