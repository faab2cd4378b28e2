"""Profiles: what is saved comes back, what is broken says so and what to do, and each finds the weights it is for."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from functools import cache, reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from selfspec import Engine, Profile
from selfspec.governor.costs import StepCost
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.models.decoder import Decoder
from selfspec.models.loading import adopt, load_folder
from selfspec.profiles.paths import shipped_dir
from selfspec.profiles.profile import (
    HOW_TO_CALIBRATE,
    Device,
    DomainChoice,
    ExitRates,
    Expected,
    ModelIdentity,
    PlanChoice,
    Run,
    Spread,
)
from selfspec.speculation.exit import Exit
from tests.profiles import choice_of, edit_profile, profile_of, random_exit, random_rows
from tests.scripted import endless
from tests.tiny import FAMILIES, VOCABULARY, tiny_model

PROMPT = torch.tensor([[1, 5, 9, 33]])
CPU = torch.device("cpu")
ROWS = random_rows(40)


@cache
def model() -> Decoder:
    return adopt(tiny_model("llama"))


def full_profile() -> Profile:
    """Every entry differs from its default."""
    run = Run(
        plan="chain:4",
        tokens_per_cycle=2.5,
        accept_rate=1 / 3,
        tokens_per_second=150.0,
        plain_tokens_per_second=60.0,
    )
    plan = PlanChoice(
        plan="nodes:0.0,0.2,1.0",
        expected=Expected(tokens_per_cycle=2.0, accept_rate=0.6, speedup=1.5),
        measured=run,
    )
    choice = DomainChoice(
        exit_layer=2,
        plans={temperature: dict.fromkeys(BATCHES, plan) for temperature in TEMPERATURES},
        head_rows=40,
        head_coverage=0.97,
        exits={
            layer: ExitRates(top1=0.1, top4=0.4, accept_rate=0.3, tokens_per_cycle=1.2, speedup=1e-5)
            for layer in (1, 2, 3)
        },
        most_accepting_exit=3,
        chain=run,
        ranks={"0": [[0.5, 0.25], [0.4], []], "1": [[0.3, 0.0, 0.7]]},
        costs={"1": StepCost(plain=0.5, depth=1e-4, drafting=((1, 0.6), (8, 2.0)), head_row=1e-9, head_rows=40)},
        prompt_agreement=Spread(mean=0.5, deviation=0.1),
        text_agreement=Spread(mean=0.4, deviation=0.2),
        centroid=[0.1, -2.5e-7, 3.0],
        distance=Spread(mean=0.3, deviation=0.05),
        direction=[1.5, -2e-7, 4.0],
        offset=-0.5,
    )
    return profile_of(
        model(),
        {"text": choice, "code": choice.model_copy(update={"exit_layer": 3})},
        device=Device(type="cpu", name="a CPU [1, 2]", dtype="float32", torch="2.13.0", kernels=True),
        created="2026-02-11T14:05:33+00:00",
        objective="latency",
        trained={"tokens": 1e6, "seconds": 12.5},
        router_layer=2,
    )


def entries_of(entry: BaseModel) -> Iterator[BaseModel]:
    """An entry and all entries within it."""
    yield entry
    values = [value for _, value in entry]
    while values:
        value = values.pop()
        if isinstance(value, BaseModel):
            yield from entries_of(value)
        elif isinstance(value, dict):
            values += value.values()


# What is saved comes back


def test_a_saved_profile_loads_with_equal_entries(tmp_path: Path) -> None:
    profile = full_profile()
    saved = profile.save(tmp_path / "new" / "folder", [random_exit(model(), 2)], {"text": ROWS})
    loaded = Profile.load(tmp_path / "new" / "folder")
    assert loaded == saved == profile.model_copy(update={"folder": tmp_path / "new" / "folder"})
    assert "text" in repr(loaded) and len(repr(loaded)) < 200 + len(str(tmp_path)), "without the measurements"
    assert list(loaded.domains["text"].exits) == [1, 2, 3], "layers are numbers, though JSON has only text for keys"


def test_who_may_read_the_profile_may_read_its_exits(tmp_path: Path) -> None:
    full_profile().save(tmp_path, [random_exit(model(), 2)])
    modes = {(tmp_path / name).stat().st_mode for name in ("profile.json", "exits.safetensors")}
    assert len(modes) == 1


def test_a_profile_is_found_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    full_profile().save(tmp_path / "mine", [])
    assert Profile.load("~/mine").folder == tmp_path / "mine"


def test_the_full_profile_of_these_tests_leaves_no_entry_at_its_default() -> None:
    for entry in entries_of(full_profile()):
        left = {name for name, field in type(entry).model_fields.items() if getattr(entry, name) == field.default}
        assert left <= {"schema_version", "folder"}, type(entry).__name__


def test_a_list_of_numbers_is_on_one_line(tmp_path: Path) -> None:
    text = (full_profile().save(tmp_path, []).folder / "profile.json").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines()]
    for name in ("fingerprint", "centroid", "direction"):
        assert all(line.rstrip(",").endswith("]") for line in lines if line.startswith(f'"{name}"')), name
    assert not [line for line in lines if line.strip(",").replace(".", "").isdigit()]
    assert '"name": "a CPU [1, 2]"' in text


def test_saving_a_loaded_profile_writes_the_same_files(tmp_path: Path) -> None:
    exits, rows = [random_exit(model(), 2), Exit(model(), 3)], {"text": ROWS}
    full_profile().save(tmp_path / "a", exits, rows)
    loaded = Profile.load(tmp_path / "a")
    again = [loaded.exits_file.exit(model(), layer) for layer in (2, 3)]
    text = loaded.exits_file.head_rows(model(), "text")
    assert text is not None
    loaded.save(tmp_path / "b", again, {"text": text})
    for name in ("profile.json", "exits.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_head_rows_are_loaded_by_domain(tmp_path: Path) -> None:
    """Also where one domain's name starts with another's."""
    rows = {"code": ROWS, "code.old": random_rows(7, 1)}
    profile = profile_of(model(), {name: choice_of(2, "chain:2") for name in (*rows, "text")}).save(tmp_path, [], rows)
    for name in rows:
        assert torch.equal(profile.exits_file.head_rows(model(), name), rows[name])
    assert profile.exits_file.head_rows(model(), "text") is None


def test_trained_layers_are_those_with_a_block(tmp_path: Path) -> None:
    exits = [random_exit(model(), 3), Exit(model(), 2), random_exit(model(), 1)]
    profile = profile_of(model(), {"text": choice_of(2, "chain:2")})
    assert profile.exits_file.layers() == []
    assert profile.save(tmp_path / "none", [Exit(model(), 2)]).exits_file.layers() == []
    assert profile.save(tmp_path / "two", exits, {"text": ROWS}).exits_file.layers() == [1, 3]


def test_without_its_exits_file_a_profile_has_exits_without_blocks(tmp_path: Path) -> None:
    profile = full_profile().save(tmp_path, [random_exit(model(), 2)], {"text": ROWS})
    (tmp_path / "exits.safetensors").unlink()
    assert profile.exits_file.layers() == []
    assert profile.exits_file.exit(model(), 2).block is None
    assert profile.exits_file.head_rows(model(), "text") is None


def test_a_profile_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        full_profile().objective = "latency"  # type: ignore[misc]


# A broken profile.json


def plans(temperature: str = "0", batch: str = "1", plan: str = "chain:2", **entries: Any) -> dict[str, Any]:
    """The entries of a profile with a single plan, and more of its domain."""
    return {"domains": {"text": {"exit_layer": 2, "plans": {temperature: {batch: {"plan": plan}}}, **entries}}}


def costs(batch: str = "1", **entries: Any) -> dict[str, Any]:
    """The same with costs of steps."""
    return plans(costs={batch: {"plain": 1.0, "depth": 0.1, "drafting": [[1, 1.5], [63, 2.0]], **entries}})


BAD_ENTRIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "schema-older": ({"schema_version": 1}, ("schema version 1", "reads 2")),
    "schema-newer": ({"schema_version": 3}, ("schema version 3", "reads 2")),
    "schema-missing": ({"schema_version": None}, ("schema version None", "reads 2")),
    "schema-text": ({"schema_version": "2"}, ("schema version 2", "reads 2")),
    "temperature-unknown": (plans(temperature="0.5"), ("plans for 0.5", "0, 0.7, 1")),
    "temperature-spelled-otherwise": (plans(temperature="1.0"), ("plans for 1.0", "0, 0.7, 1")),
    "batch-unknown": (plans(batch="3"), ("plans for 3", "1, 2-4, 5-16")),
    "plan-malformed": (plans(plan="chain:x"), ("plan 'chain:x' is malformed",)),
    "plan-too-large": (plans(plan="tree:8,8"), ("more than 63 nodes",)),
    "plan-a-number": (plans(plan=4), ("plan", "string")),  # type: ignore[arg-type]
    "no-temperature": ({"domains": {"text": {"exit_layer": 2, "plans": {}}}}, ("no plans",)),
    "no-batch": ({"domains": {"text": {"exit_layer": 2, "plans": {"0": {}}}}}, ("no plans",)),
    "plans-missing": ({"domains": {"text": {"exit_layer": 2}}}, ("text.plans", "required")),
    "plan-of-schema-1": ({"domains": {"text": {"exit_layer": 2, "plan": "chain:2"}}}, ("text.plan", "not permitted")),
    "exits-not-by-layer": (
        {"domains": {"text": {**plans()["domains"]["text"], "exits": {"first": {}}}}},
        ("text.exits.first", "integer"),
    ),
    "exit-layer-a-fraction": ({"domains": {"text": {**plans()["domains"]["text"], "exit_layer": 1.5}}}, ("integer",)),
    "ranks-at-an-unknown-temperature": (plans(ranks={"0.5": [[0.5]]}), ("ranks for 0.5", "0, 0.7, 1")),
    "ranks-above-a-whole": (plans(ranks={"0": [[0.5], [0.6, 0.40001]]}), ("temperature 0, depth 1", "shares")),
    "ranks-below-nothing": (plans(ranks={"1": [[0.5, -0.1]]}), ("temperature 1, depth 0", "shares")),
    "ranks-not-a-number": (plans(ranks={"1": [[float("nan")]]}), ("text.ranks.1.0.0", "finite")),
    "ranks-of-no-depth": (plans(ranks={"0": [0.5]}), ("text.ranks.0.0", "list")),
    "costs-of-an-unknown-batch": (costs("3"), ("costs for 3", "1, 2-4, 5-16")),
    "costs-of-nothing": (costs(drafting=[]), ("text.costs.1.drafting", "at least 1")),
    "costs-free": (costs(plain=0.0), ("text.costs.1.plain", "greater than 0")),
    "costs-of-a-depth-negative": (costs(depth=-0.1), ("text.costs.1.depth", "greater than or equal to 0")),
    "no-domain": ({"domains": {}}, ("no domain",)),
    "domains-a-list": ({"domains": []}, ("domains", "dictionary")),
    "unknown-entry": ({"surprise": 1}, ("surprise", "not permitted")),
    "a-folder": ({"folder": "elsewhere"}, ("folder",)),
    "no-model": ({"model": None}, ("model",)),
    "fingerprint-of-words": ({"model": {"fingerprint": ["a"]}}, ("model.fingerprint", "number")),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid profile, to be damaged."""
    choice = choice_of(2, "chain:2")
    profile = profile_of(model(), {"text": choice, "code": choice})
    profile.save(tmp_path, [random_exit(model(), 2)], {"text": ROWS})
    return tmp_path


def refusal(call: Any) -> str:
    """The message of the error."""
    with pytest.raises(ValueError) as caught:
        call()
    assert type(caught.value) is ValueError, "not one of a library"
    return str(caught.value)


@pytest.mark.parametrize("kind", BAD_ENTRIES)
def test_bad_entries_are_refused_with_file_and_fix(folder: Path, kind: str) -> None:
    entries, words = BAD_ENTRIES[kind]
    edit_profile(folder, **entries)
    message = refusal(lambda: Profile.load(folder))
    assert all(word in message for word in (str(folder / "profile.json"), HOW_TO_CALIBRATE, *words)), message


def test_the_undamaged_profile_is_loaded(folder: Path) -> None:
    edit_profile(folder, **plans())
    assert Profile.load(folder).choice("text").plans == {"0": {"1": PlanChoice(plan="chain:2")}}
    edit_profile(folder, **plans(ranks={"0": [[0.6, 0.4000005], [1.0], []]}))
    assert Profile.load(folder).choice("text").ranks == {"0": [[0.6, 0.4000005], [1.0], []]}
    edit_profile(folder, **costs("5-16"))
    assert Profile.load(folder).choice("text").costs["5-16"].drafting == ((1, 1.5), (63, 2.0))


def test_entries_with_a_default_may_be_missing(folder: Path) -> None:
    edit_profile(folder, **plans())
    choice = Profile.load(folder).choice("text")
    assert (choice.ranks, choice.distance, choice.costs) == ({}, None, {})


BAD_FILES = {
    "empty": b"",
    "cut": b'{"schema_version": 2, "model": {',
    "not-json": b"schema_version: 2",
    "not-text": b"\xff\xfe\x00",
    "a-list": b"[2]",
    "a-number": b"2",
    "lists-too-deep": b"[" * 100_000,
    "objects-too-deep": b'{"a":' * 100_000,
    "an-entry-too-deep": b'{"schema_version": 2, "domains": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_a_corrupt_file_is_refused_with_file_and_fix(folder: Path, content: bytes) -> None:
    (folder / "profile.json").write_bytes(content)
    message = refusal(lambda: Profile.load(folder))
    assert str(folder / "profile.json") in message and HOW_TO_CALIBRATE in message


@pytest.mark.parametrize("what", ["missing", "a_folder"])
def test_a_missing_file_is_refused_with_file_and_fix(folder: Path, what: str) -> None:
    (folder / "profile.json").unlink()
    if what == "a_folder":
        (folder / "profile.json").mkdir()
    message = refusal(lambda: Profile.load(folder))
    assert str(folder) in message and "profile.json" in message and HOW_TO_CALIBRATE in message


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to the values in a JSON value; of a list, only to its first."""
    if path:
        yield path
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if type(value) is list else []
    alike = type(value) is list or {"plans", "exits", "ranks", "costs", "domains"} & {*path[-1:], *path[-2:-1]}
    for name, entry in entries[:1] if alike else entries:
        yield from places(entry, (*path, name))


BAD_VALUES = {"negative": "-5", "zero": "0", "2^31": "2147483648", "10^400": f"1{'0' * 400}", "nan": "NaN"}
BAD_VALUES |= {"infinite": "1e999", "text": '"x"', "null": "null", "list": "[]", "missing": ""}
SIGNED = {"mean", "offset", "head_row", "trained", "centroid", "direction"}
OF_TEXT = {"created", "objective", "type", "name", "dtype", "torch"}


def test_an_engine_refuses_or_runs_with_any_changed_entry(hf: PreTrainedModel, tmp_path: Path) -> None:
    """An impossible value is refused when the engine is built; with any other the engine generates."""
    source = torch.Generator().manual_seed(0)
    vectors = {name: torch.randn(32, generator=source).tolist() for name in ("centroid", "direction")}
    domains = {name: choice.model_copy(update=vectors) for name, choice in full_profile().domains.items()}
    exits = [random_exit(model(), layer) for layer in (1, 2, 3)]
    full_profile().model_copy(update={"domains": domains}).save(tmp_path, exits, {"text": ROWS, "code": ROWS})
    file = tmp_path / "profile.json"
    content, decoder = file.read_text(), adopt(hf)
    expected = hf.generate(PROMPT, max_new_tokens=3).tolist()
    for path, (kind, value) in product(places(json.loads(content)), BAD_VALUES.items()):
        mutant = json.loads(content)
        holder = reduce(getitem, path[:-1], mutant)
        holder[path[-1]] = "MUTATED"
        if kind == "missing":
            del holder[path[-1]]
        file.write_text(json.dumps(mutant).replace('"MUTATED"', value))
        try:
            engine = Engine(decoder, profile=tmp_path)
        except ValueError as error:
            assert str(tmp_path) in str(error) and HOW_TO_CALIBRATE in str(error), f"{path} {kind}: {error}"
            continue
        assert kind not in ("10^400", "nan", "infinite"), f"{path} was accepted though {kind}"
        assert kind != "negative" or SIGNED & {*path}, f"{path} was accepted though {kind}"
        assert kind != "text" or path[-1] in OF_TEXT, f"{path} was accepted though {kind}"
        assert engine.generate(PROMPT, max_new_tokens=3, speculative_decoding="force").tolist() == expected
        engine.generate(PROMPT, max_new_tokens=3, do_sample=True, temperature=1.2)


def test_how_to_calibrate_names_the_command() -> None:
    assert "python -m selfspec.calibrate" in HOW_TO_CALIBRATE and "profile=None" in HOW_TO_CALIBRATE


# Broken exits


def cut(share: float) -> Any:
    return lambda file: file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def changed(**tensors: torch.Tensor) -> Any:
    """Tensors by name, two underscores for each dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return lambda file: save_file({**load_file(file), **named}, file)


BAD_EXITS: dict[str, tuple[Any, str]] = {
    "cut-at-its-end": (cut(0.99), "cannot be read"),
    "cut-in-its-header": (cut(0.001), "cannot be read"),
    "empty": (cut(0), "cannot be read"),
    "not-safetensors": (lambda file: file.write_text("not safetensors" * 100), "cannot be read"),
    "rows-past-the-vocabulary": (changed(head_rows__text=torch.tensor([5, 9, VOCABULARY])), "head_rows.text"),
    "rows-negative": (changed(head_rows__text=torch.tensor([-1, 5, 9])), "head_rows.text"),
    "rows-descending": (changed(head_rows__text=torch.tensor([9, 5])), "head_rows.text"),
    "rows-twice": (changed(head_rows__text=torch.tensor([5, 5, 9])), "head_rows.text"),
    "rows-none": (changed(head_rows__text=torch.tensor([], dtype=torch.int32)), "head_rows.text"),
    "rows-of-two-dimensions": (changed(head_rows__text=torch.tensor([[5, 9], [11, 12]])), "head_rows.text"),
    "rows-a-number": (changed(head_rows__text=torch.tensor(5)), "head_rows.text"),
    "norm-misshapen": (changed(**{"2__norm": torch.zeros(31)}), "norm is [31] instead of [32]"),
    "block-misshapen": (changed(**{"2__block__down": torch.zeros(32, 47)}), "block.down is [32, 47] instead of"),
}


@pytest.fixture(scope="module")
def hf() -> PreTrainedModel:
    return endless(tiny_model("llama"))


@pytest.mark.parametrize("kind", BAD_EXITS)
def test_damaged_exits_are_refused_with_file_and_fix_by_requests_that_draft(
    folder: Path, hf: PreTrainedModel, kind: str
) -> None:
    damage, words = BAD_EXITS[kind]
    damage(folder / "exits.safetensors")
    engine = Engine.from_model(hf, profile=folder)
    plain = engine.generate(PROMPT, max_new_tokens=2, speculative_decoding=False)
    assert plain.tolist() == hf.generate(PROMPT, max_new_tokens=2).tolist()
    for mode in (None, True, "force"):
        message = refusal(lambda mode=mode: engine.generate(PROMPT, max_new_tokens=2, speculative_decoding=mode))
        assert all(word in message for word in (str(folder / "exits.safetensors"), HOW_TO_CALIBRATE, words)), message


@pytest.mark.parametrize("kind", ["cut-at-its-end", "cut-in-its-header", "empty", "not-safetensors"])
def test_the_layers_of_a_damaged_exits_file_are_an_error(folder: Path, kind: str) -> None:
    BAD_EXITS[kind][0](folder / "exits.safetensors")
    message = refusal(Profile.load(folder).exits_file.layers)
    assert str(folder / "exits.safetensors") in message and HOW_TO_CALIBRATE in message


# Whose profile it is


@pytest.mark.parametrize("family", FAMILIES)
def test_the_identity_is_equal_in_every_file_format_and_dtype(family: str, tmp_path: Path) -> None:
    live = tiny_model(family, torch.float32)
    models = {"live": Engine.from_model(live).model}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype)
        tiny_model(family, dtype).save_pretrained(folder)
        models[f"{dtype} folder"] = load_folder(folder, CPU, "auto")
        models[f"folder as {dtype}"] = load_folder(tmp_path / str(torch.float32), CPU, dtype)
    assert {model.dtype for model in models.values()} == {torch.float32, torch.bfloat16, torch.float16}
    identities = {name: ModelIdentity.of(model) for name, model in models.items()}
    for first in identities:
        profile = Profile(model=identities[first], domains={"text": choice_of(2, "chain:2")})
        for second, model in models.items():
            assert identities[first].matches(identities[second]), f"{first} and {second}"
            profile.check(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_identity_differs_after_three_training_steps(family: str) -> None:
    """No weight has moved by more than a few thousandths."""
    hf = tiny_model(family, torch.float32)
    before = ModelIdentity.of(adopt(hf))
    optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(3):
        hf(PROMPT, labels=PROMPT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = ModelIdentity.of(adopt(hf))
    moved = max(abs(x - y) for x, y in zip(before.fingerprint, after.fingerprint, strict=True))
    assert 0 < moved < 4e-3
    assert not before.matches(after) and not after.matches(before)
    profile = Profile(model=before, domains={"text": choice_of(2, "chain:2")})
    with pytest.raises(ValueError, match="other weights.*different values.*selfspec.calibrate"):
        profile.check(adopt(hf))


@pytest.mark.parametrize("entry", ["model_type", "num_layers", "hidden_size", "vocab_size"])
def test_the_identity_differs_with_the_models_shape(entry: str) -> None:
    own = ModelIdentity.of(model())
    other = own.model_copy(update={entry: "qwen3" if entry == "model_type" else 7})
    assert own.matches(own) and not own.matches(other)


# Finding a profile


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The folders in which profiles are searched."""
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("selfspec.profiles.profile.shipped_dir", lambda: tmp_path / "shipped")
    return {"own": tmp_path / "home" / "profiles", "shipped": tmp_path / "shipped" / "profiles"}


def put(folder: Path, age: int = 0, of: Decoder | None = None, plan: str = "chain:2") -> Path:
    profile_of(of or model(), {"text": choice_of(2, plan)}).save(folder, [])
    os.utime(folder / "profile.json", (1e9 - age, 1e9 - age))
    return folder


def found() -> Path | None:
    profile = Profile.find(model())
    return profile.folder if profile else None


def test_no_profile_is_found_in_empty_folders(folders: dict[str, Path]) -> None:
    assert found() is None


def test_a_shipped_profile_is_found(folders: dict[str, Path]) -> None:
    put(folders["shipped"] / "another", of=adopt(tiny_model("llama", seed=1)))
    assert found() is None
    shipped = put(folders["shipped"] / "tiny")
    assert found() == shipped


def test_a_profile_under_selfspec_home_is_preferred_to_a_shipped_one(folders: dict[str, Path]) -> None:
    put(folders["shipped"] / "a")
    own = put(folders["own"] / "b", age=1000)
    assert found() == own


def test_the_newest_profile_under_selfspec_home_is_preferred(folders: dict[str, Path]) -> None:
    put(folders["own"] / "a", age=20)
    newest = put(folders["own"] / "b", age=10)
    put(folders["own"] / "c", age=30)
    put(folders["own"] / "d", age=0, of=adopt(tiny_model("llama", seed=1)))
    assert found() == newest


def test_a_profile_whose_plans_are_all_none_is_used_only_where_no_other_drafts(folders: dict[str, Path]) -> None:
    plain = put(folders["own"] / "plain", plan="none")
    assert found() == plain
    shipped = put(folders["shipped"] / "tiny")
    assert found() == shipped
    older = put(folders["own"] / "older", age=1000)
    assert found() == older


def nested(file: Path) -> None:
    file.write_text("[" * 100_000)


def entries(kind: str) -> Any:
    return lambda file: edit_profile(file.parent, **BAD_ENTRIES[kind][0])


UNUSABLE: dict[str, Any] = {kind: entries(kind) for kind in ("schema-older", "plan-malformed", "temperature-unknown")}
UNUSABLE |= {"too-deep": nested}
UNUSABLE |= {
    "an-exit-that-is-not-there": lambda file: edit_profile(
        file.parent, domains={"a": choice_of(9, "none").model_dump()}
    )
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_unusable_profile_is_skipped_with_a_warning_that_names_it(folders: dict[str, Path], kind: str) -> None:
    broken = put(folders["own"] / "a")
    UNUSABLE[kind](broken / "profile.json")
    shipped = put(folders["shipped"] / "b")
    with pytest.warns(UserWarning, match=rf"skipped: .*{broken}.*calibrate"):
        assert found() == shipped


@pytest.mark.parametrize("target", ["nowhere", "profile.json"])
@pytest.mark.filterwarnings("ignore:a profile is skipped")  # whether such a link is listed at all depends on Python
def test_a_dangling_link_is_skipped(folders: dict[str, Path], target: str) -> None:
    file = put(folders["own"] / "a") / "profile.json"
    file.unlink()
    file.symlink_to(file.parent / target)
    shipped = put(folders["shipped"] / "b")
    assert found() == shipped


def test_profiles_of_other_models_are_skipped_without_a_warning(folders: dict[str, Path]) -> None:
    put(folders["own"] / "another", of=adopt(tiny_model("llama", seed=1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() is None


def test_weights_that_are_not_finite_have_no_profile(folders: dict[str, Path]) -> None:
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    put(folders["own"] / "a")
    assert Engine.from_model(broken, profile="auto").profile is None


def test_folder_names_depend_on_the_weights_and_not_on_the_dtype(tmp_path: Path) -> None:
    """A model of the same shape that differs only in its upper layers has another name."""
    original = tiny_model("llama", torch.float32)
    original.save_pretrained(tmp_path)
    names = {ModelIdentity.of(load_folder(tmp_path, CPU, dtype)).name for dtype in (torch.float32, torch.bfloat16)}
    assert len(names) == 1
    with torch.no_grad():
        for layer in original.model.layers[2:]:
            layer.mlp.down_proj.weight.mul_(1.5)
    assert ModelIdentity.of(adopt(original)).name not in names


def test_an_engine_uses_the_profile_it_finds(folders: dict[str, Path], hf: PreTrainedModel, tmp_path: Path) -> None:
    put(folders["shipped"] / "tiny")
    hf.save_pretrained(tmp_path / "model")
    for engine in (Engine.from_model(hf, profile="auto"), Engine.from_pretrained(tmp_path / "model", device="cpu")):
        out = engine.generate(PROMPT, max_new_tokens=4, return_dict_in_generate=True)
        assert (out.stats[0].exit_layer, out.stats[0].plan) == (2, "chain:2")


def test_shipped_profiles_are_valid() -> None:
    for path in shipped_dir().glob("profiles/*/profile.json"):
        profile = Profile.load(path.parent)
        assert set(profile.exits_file.layers()) >= {choice.exit_layer for choice in profile.domains.values()}


def test_ranks_above_the_highest_temperature_are_extrapolated_from_the_two_highest() -> None:
    def choice(ranks: dict[str, list[list[float]]]) -> DomainChoice:
        return DomainChoice.model_validate(plans(ranks=ranks)["domains"]["text"])

    known = choice({"0": [[0.9]], "0.7": [[0.75]], "1": [[0.5]]})
    assert (known.ranks_at(0.6), known.ranks_at(1.0)) == ([[0.75]], [[0.5]])
    assert known.ranks_at(1.3)[0][0] == pytest.approx(1 - 0.5**0.5)
    assert known.ranks_at(1.15)[0][0] > known.ranks_at(1.3)[0][0] > known.ranks_at(1.5)[0][0] > 0
    assert choice({"0": [[0.9]], "1": [[]]}).ranks_at(1.4) == [[]], "no depth to extrapolate from"
