"""The calibration report: complete, self-contained, well-formed HTML for every profile, and the verdict."""

from __future__ import annotations

import re
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from selfspec.calibrate.drawing import draw_tree
from selfspec.calibrate.report import verdict, write_report
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.profiles.profile import (
    Device,
    DomainChoice,
    ExitRates,
    Expected,
    ModelIdentity,
    PlanChoice,
    Profile,
    Run,
    Spread,
)
from selfspec.speculation.plan import Plan

MODEL = ModelIdentity(model_type="qwen3", num_layers=28, hidden_size=2048, vocab_size=151936, fingerprint=[0.5, 1.5])
NAME = "models/<qwen3>"
FOLDER = Path("/home/me/<profiles>&/qwen3-28")
DEVICE = Device(type="cuda", name="NVIDIA H200", dtype="bfloat16", torch="2.13.0")
DOMAINS = {"chat": 0.62, "code": 0.78, "math": 0.74, "summarize": 0.58, "extract": 0.71, "write": 0.49}


@lru_cache
def tree_of(nodes: int, rate: float, depth: int = 3) -> Plan:
    """The tree of the most likely paths, where rank r of a node holds the model's token with rate * (1 - rate)^r."""
    paths = [(rank,) for rank in range(32)]
    for path in paths:
        if len(path) < depth:
            paths += [(*path, rank) for rank in range(8)]

    def chance(path: tuple[int, ...]) -> float:
        return rate ** len(path) * (1 - rate) ** sum(path)

    kept = sorted(paths, key=lambda path: (-chance(path), len(path), path))[:nodes]
    kept.sort(key=lambda path: (len(path), path))
    number = {(): 0} | {path: index for index, path in enumerate(kept, start=1)}
    return Plan.from_nodes((number[path[:-1]], path[-1]) for path in kept)


def plan_choice(name: str, rate: float, temperature: str, batch: str) -> PlanChoice:
    """A plan with the numbers a real calibration could have found."""
    warmth, rows = TEMPERATURES[temperature], BATCHES[batch]
    if name == "write" and rows == 1 and not warmth:
        return PlanChoice(plan="none", expected=Expected(tokens_per_cycle=1, accept_rate=0, speedup=1))
    plan = tree_of({1: 40 + round(rate * 29), 4: 14, 16: 3}[rows], rate - 0.1 * warmth, depth=3 if rows < 16 else 2)
    tokens = 1 + 2.6 * rate * (1 - 0.2 * warmth) * (1 if rows == 1 else 0.8 if rows == 4 else 0.5)
    predicted = tokens / (1.55 if rows == 1 else 1.6 if rows == 4 else 1.45)
    noise = 0.06 * ((len(name) * 7 + rows * 3 + int(10 * warmth)) % 5 - 2.4)
    plain = 61.3 * rows
    run = Run(
        plan=str(plan),
        tokens_per_cycle=tokens + noise,
        accept_rate=rate * (1 - 0.15 * warmth),
        tokens_per_second=plain * (predicted + noise),
        plain_tokens_per_second=plain,
    )
    expected = Expected(tokens_per_cycle=tokens, accept_rate=rate, speedup=predicted)
    return PlanChoice(plan=str(plan), expected=expected, measured=run)


def domain_choice(name: str, rate: float) -> DomainChoice:
    chosen = 1 if name in ("write", "chat") else 2
    exits = {
        layer: ExitRates(
            top1=rate - 0.25 + 0.05 * layer,
            top4=rate - 0.05 + 0.04 * layer,
            accept_rate=rate - 0.12 + 0.06 * layer - (0.08 if layer == 3 and name == "math" else 0),
            tokens_per_cycle=1 + rate * 2.2 + 0.15 * layer,
            speedup=(1 + rate * 2.2 + 0.15 * layer) / (1.75 - 0.15 * (layer == chosen) + 0.04 * layer),
        )
        for layer in (1, 2, 3)
    }
    chain = Run(
        plan="chain:4",
        tokens_per_cycle=1 + 1.9 * rate,
        accept_rate=rate - 0.12,
        tokens_per_second=61.3 * (0.72 + 0.62 * rate),
        plain_tokens_per_second=61.3,
    )
    return DomainChoice(
        exit_layer=chosen,
        plans={t: {b: plan_choice(name, rate, t, b) for b in BATCHES} for t in TEMPERATURES},
        head_rows=0 if name == "math" else 16384,
        head_coverage=1.0 if name == "math" else 0.95 + rate / 20,
        exits=exits,
        most_accepting_exit=2 if name == "math" else 3,
        chain=chain,
        prompt_agreement=Spread(mean=rate - 0.08, deviation=0.06),
        text_agreement=Spread(mean=rate - 0.1, deviation=0.04),
    )


def full_profile(folder: Path = FOLDER) -> Profile:
    return Profile(
        model=MODEL,
        domains={name: domain_choice(name, rate) for name, rate in DOMAINS.items()} | {"<b>&": domain_choice("b", 0.7)},
        device=DEVICE,
        created="2026-02-11",
        trained={"tokens": 4_200_000, "steps": 1500, "seconds": 1312.0, "router_accuracy": 0.87},
        folder=folder,
    )


class Page(HTMLParser):
    """Reads a page, insists on balanced tags, and keeps its text and tags."""

    VOID = ("meta", "wbr")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(self.html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of_class(self, name: str) -> list[str]:
        return [tag for tag, attributes in self.tags if name in (attributes.get("class") or "").split()]


def page_of(profile: Profile, folder: Path) -> Page:
    path = folder / "report.html"
    write_report(profile, path, NAME)
    return Page(path)


def profile_of(**domains: DomainChoice) -> Profile:
    return Profile(model=MODEL, domains=domains)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(full_profile(), tmp_path_factory.mktemp("report"))


def test_the_page_loads_no_other_file(page):
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", page.html)


def test_the_head_names_model_device_objective_amounts_and_verdict(page):
    model = (f"Calibration of {NAME}", f"{NAME}: qwen3", "28 layers", "2,048", "151,936")
    for fact in (*model, "NVIDIA H200", "bfloat16", "2026-02-11", "throughput"):
        assert fact in page.text
    assert "4,200,000 tokens of text, 1,500 training steps, 21.9 minutes, 87% of the measuring prompts" in page.text
    assert verdict(full_profile()) in page.text


def test_every_exit_is_in_the_table_and_both_choices_are_marked(page):
    profile = full_profile()
    for name, choice in profile.domains.items():
        assert name in page.text
        for layer, rates in choice.exits.items():
            shares = (f"<td>{share:.1%}" for share in (rates.top1, rates.top4, rates.accept_rate))
            assert f"<td>{layer}</td>" + "</td>".join(shares) in page.html
    assert len(page.of_class("chosen")) == len(page.of_class("most")) == len(profile.domains)


def test_every_measured_plan_is_listed_and_slower_ones_are_marked(page):
    by_batch = [plans for choice in full_profile().domains.values() for plans in choice.plans.values()]
    runs = [choice.measured for plans in by_batch for choice in plans.values() if choice.measured]
    losses = [run for run in runs if run.speedup < 1]
    assert losses and len(page.of_class("loss")) == len(losses)
    for run in runs:
        assert f"{run.speedup:.2f}×" in page.text
        assert f"<td>{run.tokens_per_second:,.1f}</td>" in page.html


def test_every_node_of_the_chosen_trees_is_drawn(page):
    plans = {choice.plans["0"]["1"].plan for choice in full_profile().domains.values()}
    assert len(page.of_class("node")) == sum(len(Plan.parse(plan)) for plan in plans)
    for plan in plans:
        assert plan in page.text


@pytest.mark.parametrize("plan", ["chain:1", "chain:63", "tree:63", "tree:2,3,1", str(tree_of(63, 0.6))])
def test_nodes_of_a_tree_are_in_columns_by_depth_and_do_not_overlap(plan):
    plan = Plan.parse(plan)
    tree = draw_tree(plan)
    places = [(node.x, node.y) for node in tree.nodes]
    assert len(set(places)) == len(plan)
    assert len({x for x, _ in places}) == plan.depth
    assert all(0 < x < tree.width and 0 < y < tree.height for x, y in places)
    assert all(node.x > node.parent_x and node.y >= node.parent_y for node in tree.nodes)


def test_the_page_ends_with_the_lines_of_python_that_use_the_profile(page):
    assert f'Engine.from_pretrained("{NAME}", profile="auto")' in page.text
    assert f'Engine.from_pretrained("{NAME}", profile="{FOLDER}")' in page.text


def test_text_is_escaped(page):
    assert "b" not in {tag for tag, _ in page.tags[page.tags.index(("section", {"id": "exits"})) :]}
    assert "<b>&" in page.text


def greedy_only(plan: str, measured: float) -> DomainChoice:
    """A domain with one plan, and a chain that is 0.8 times as fast as plain decoding."""
    rates = {"tokens_per_cycle": 2.0, "accept_rate": 0.5}
    run = {"plain_tokens_per_second": 100.0, **rates}
    choice = PlanChoice(plan=plan, measured=Run(plan="tree:4,2", tokens_per_second=100 * measured, **run))
    chain = Run(plan="chain:4", tokens_per_second=80.0, **run)
    return DomainChoice(exit_layer=1, plans={"0": {"1": choice}}, chain=chain)


def test_the_verdict_gives_the_measured_speed_of_each_domain_that_drafts():
    told = verdict(profile_of(code=greedy_only("tree:4,2", 1.42), write=greedy_only("none", 0.9)))
    assert told == (
        "For one greedy sequence, drafting is faster than plain decoding: 1.42x as fast on code; no plan is faster on "
        "write."
    )


def test_the_verdict_of_a_profile_without_a_faster_plan_names_the_fastest_that_was_tried():
    told = verdict(profile_of(code=greedy_only("none", 0.9), write=greedy_only("none", 0.7)))
    tried = "the fastest that was tried, tree:4,2 on code, is 0.90x as fast"
    assert told == f"No plan is faster than plain decoding: {tried}."


if __name__ == "__main__":  # writes a page to view: python -m tests.test_report page.html
    import sys

    write_report(full_profile(), Path(sys.argv[1]), "Qwen/Qwen3-1.7B")
