"""Parts of calibration: packed text, heads, prompts, the work folder, settings, sizes in memory, and the display."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from selfspec.calibrate import heads, resources
from selfspec.calibrate.corpus import Corpus, Document, hidden_states
from selfspec.calibrate.display import CalibrationDisplay
from selfspec.calibrate.prompts import SHIPPED, parse_domain, read_domain, shipped_domains
from selfspec.calibrate.resources import Resources, fit
from selfspec.calibrate.settings import CalibrationSettings
from selfspec.calibrate.training import Recipe
from selfspec.calibrate.work import Work
from selfspec.models.loading import adopt
from tests.calibrated import documents_of, random_documents, write_lines, write_prompts
from tests.tiny import FAMILIES, tiny_model

# Packing


@st.composite
def documents(draw: st.DrawFn) -> list[Document]:
    lengths = draw(st.lists(st.integers(2, 30), min_size=1, max_size=25))
    first = 1
    found = []
    for length in lengths:
        tokens = list(range(first, first + length))  # no token occurs twice
        first += length
        written = draw(st.integers(1, length))
        forced = range(written, draw(st.integers(written, length)))
        found.append(Document(tokens, written, draw(st.integers(0, 3)), forced))
    return found


@given(documents(), st.integers(0, 3), st.integers(1, 4))
def test_packing_keeps_every_document_in_one_piece(given_documents: list[Document], seed: int, open_rows: int) -> None:
    length = 20
    corpus = Corpus.pack(given_documents, length, seed, open_rows)
    packed = [document for row in range(len(corpus)) for document in documents_of(corpus, row)]
    by_first = {document.tokens[0]: document for document in given_documents}
    assert len(packed) == len(given_documents)
    for document in packed:
        source = by_first.pop(document.tokens[0])
        assert document.tokens == source.tokens[:length], "cut only where it is longer than a row"
        assert document.positions == list(range(len(document.tokens)))
        assert document.domains == {source.domain}
        chosen = [at >= source.written and at not in source.forced for at in range(len(document.tokens))]
        assert document.predicts == [*chosen[1:], False]
    padding = corpus.documents == 0
    assert not corpus.predicts[padding].any()
    used = (~padding).sum(1)
    assert (used > 0).all()
    assert (padding.int().diff(dim=1) >= 0).all(), "padding is at the end of a row"


def test_packing_depends_on_the_seed_and_fills_rows() -> None:
    given_documents = random_documents(*[5, 9, 14, 3, 20, 7] * 5)
    one, again, other = (Corpus.pack(given_documents, 20, seed) for seed in (0, 0, 1))
    assert torch.equal(one.tokens, again.tokens)
    assert one.tokens.shape != other.tokens.shape or not torch.equal(one.tokens, other.tokens)
    assert (one.documents > 0).float().mean() > 0.85


def test_a_corpus_in_small_types_has_the_same_values() -> None:
    corpus = Corpus.pack(random_documents(5, 9, 14, 3), 20)
    small = corpus.small()
    again = Corpus.from_small(small)
    for name, tensor in vars(corpus).items():
        assert torch.equal(getattr(again, name), tensor) and getattr(again, name).dtype == tensor.dtype
        assert small[name].nbytes <= tensor.nbytes
    both = Corpus.join([corpus, again])
    assert len(both) == 2 * len(corpus) and torch.equal(both.rows(slice(0, len(corpus))).tokens, corpus.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_attend_only_to_themselves(family: str) -> None:
    """All states equal transformers' of the document alone; sliding windows are shorter than the documents."""
    hf = tiny_model(family)
    corpus = Corpus.pack(random_documents(17, 6, 3, 11), 24)
    with torch.no_grad():
        states = list(hidden_states(adopt(hf), corpus))
    for row in range(len(corpus)):
        for document in documents_of(corpus, row):
            part = slice(document.start, document.start + len(document.tokens))
            with torch.no_grad():
                alone = hf.model(torch.tensor([document.tokens]), output_hidden_states=True).hidden_states
            for ours, theirs in zip(states[:-1], alone, strict=False):  # their last is normed
                torch.testing.assert_close(ours[row, part], theirs[0], rtol=1e-4, atol=1e-5)


# Heads


def test_uses_count_the_tokens_that_the_model_chose_by_domain() -> None:
    corpus = Corpus.pack([Document([5, 5, 7, 7, 7, 8], 3, 0), Document([9, 9, 9, 7], 2, 1)], 12)
    uses = heads.token_uses(corpus, 2, 10)
    assert uses.tolist() == [[0, 0, 0, 0, 0, 0, 0, 2, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1, 0, 1]]


def test_rows_are_ordered_by_use_in_the_domain_then_in_others_then_by_id() -> None:
    uses = torch.zeros(2, 8, dtype=torch.float64)
    uses[0, [6, 3]] = torch.tensor([5.0, 9.0], dtype=torch.float64)
    uses[1, [5, 1]] = torch.tensor([4.0, 2.0], dtype=torch.float64)
    order = heads.ordered_rows(uses)
    assert order.tolist() == [[3, 6, 5, 1, 0, 2, 4, 7], [5, 1, 3, 6, 0, 2, 4, 7]]
    assert heads.head_of(order[0], 3).tolist() == [3, 5, 6]


@given(st.integers(1, 3), st.integers(1, 40), st.integers(0, 5))
def test_an_order_has_every_token_once_and_heads_contain_smaller_ones(domains: int, size: int, seed: int) -> None:
    uses = torch.randint(0, 6, (domains, 40), generator=torch.Generator().manual_seed(seed)).double()
    for order, own in zip(heads.ordered_rows(uses), uses, strict=True):
        assert order.sort().values.tolist() == list(range(40))
        head = heads.head_of(order, size)
        assert len(head) == size and (head.diff() > 0).all()
        assert set(heads.head_of(order, size // 2).tolist()) <= set(head.tolist())
        if domains == 1:
            assert (own[order].diff() <= 0).all()


@pytest.mark.parametrize("vocabulary", [101, 2047, 2048, 32_000, 151_936])
def test_a_trimmed_head_has_at_most_a_third_of_a_large_vocabulary(vocabulary: int) -> None:
    largest = heads.largest_head(vocabulary)
    if vocabulary < 2048:
        assert largest == vocabulary
    else:
        assert 0 < largest <= vocabulary // 3 - 512


# Prompts


def lines_of(*entries: object, count: int = 8) -> list[str]:
    """Good lines, then these."""
    good = [json.dumps({"prompt": f"prompt {number}"}) for number in range(count)]
    return [*good, *(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries)]


BAD_LINES = {
    "broken": ("{broken", "not a JSON object"),
    "list": ("[1, 2]", "an object"),
    "text": ('"text"', "an object"),
    "nothing": ({}, 'either "prompt" or "messages"'),
    "neither": ({"text": "x"}, 'either "prompt" or "messages"'),
    "both": ({"prompt": "x", "messages": []}, 'either "prompt" or "messages"'),
    "number as prompt": ({"prompt": 3}, '"prompt" must be a text'),
    "empty prompt": ({"prompt": " "}, '"prompt" must be a text that is not empty'),
    "no messages": ({"messages": []}, '"messages" must be a list that is not empty'),
    "text as messages": ({"messages": "x"}, '"messages" must be a list'),
    "no content": ({"messages": [{"role": "user"}]}, '"role" and "content"'),
    "text as message": ({"messages": ["x"]}, '"role" and "content"'),
    "list as content": ({"messages": [{"role": "user", "content": [1]}]}, '"role" and "content" as texts'),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_an_error_names_the_bad_line(tmp_path: Path, case: str) -> None:
    entry, expected = BAD_LINES[case]
    path = write_lines(tmp_path / "bad.jsonl", [*lines_of(count=9), "", *lines_of(entry, count=0)])
    with pytest.raises(ValueError) as error:
        read_domain("mine", path)
    assert f"{path}, line 11:" in str(error.value) and expected in str(error.value)


@pytest.mark.parametrize(
    "lines", [[], [""], lines_of(count=7), lines_of(count=4) * 3], ids=["empty", "blank", "seven", "repeated"]
)
def test_too_few_prompts_are_refused(tmp_path: Path, lines: list[str]) -> None:
    path = write_lines(tmp_path / "few.jsonl", lines)
    different = len({line for line in lines if line})
    with pytest.raises(ValueError, match=f"{different} different prompts.*at least 8"):
        read_domain("mine", path)


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_a_file_that_is_not_text_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x80" * 10)
    with pytest.raises(ValueError, match="'mine'.*prompts.jsonl"):
        read_domain("mine", path)


@pytest.mark.parametrize("text", ["mine", "=a.jsonl", "mine=", " =a.jsonl", "auto=a.jsonl", " auto =a.jsonl"])
def test_a_domain_is_a_name_and_a_file(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=PROMPTS.jsonl|cannot be called 'auto'"):
        parse_domain(text)


def test_a_domain_of_the_command_line_has_the_prompts_of_its_file(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a=b.jsonl", "abc")
    assert parse_domain(f" mine = {path}") == read_domain("mine", path)


def test_other_line_ends_in_a_prompt_do_not_end_a_line(tmp_path: Path) -> None:
    odd = [f"one\u2028two\x85three {number}" for number in range(8)]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in odd]
    path = tmp_path / "odd.jsonl"
    path.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    domain = read_domain("mine", path)
    assert {*domain.training, *domain.measuring} == set(odd)


@given(st.lists(st.integers(0, 30), min_size=8, max_size=60).filter(lambda numbers: len(set(numbers)) >= 8))
def test_training_and_measuring_prompts_never_mix(tmp_path_factory: pytest.TempPathFactory, numbers: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "split.jsonl"
    write_lines(path, [json.dumps({"prompt": f"prompt {number}"}) for number in numbers])
    domain = read_domain("mine", path)
    training, measuring = set(domain.training), set(domain.measuring)
    assert not training & measuring
    assert training | measuring == {f"prompt {number}" for number in numbers}
    assert len(domain.training) + len(domain.measuring) == len(set(numbers))
    assert len(measuring) == len(set(numbers)) // 4


def test_every_fourth_prompt_is_for_measuring(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = lines_of({"messages": messages})
    domain = read_domain("mine", write_lines(tmp_path / "a.jsonl", lines))
    assert domain.measuring == ("prompt 3", "prompt 7")
    assert domain.training[-1] == messages


def test_eight_domains_are_shipped_and_share_no_prompt() -> None:
    domains = shipped_domains()
    assert [domain.name for domain in domains] == list(SHIPPED) and len(SHIPPED) == 8
    texts = [json.dumps(prompt) for domain in domains for prompt in (*domain.training, *domain.measuring)]
    assert len(texts) == len(set(texts)), "also across domains"
    for domain in domains:
        assert len(domain.training) + len(domain.measuring) >= 40, domain.name
        assert len(domain.measuring) >= 10


# The work folder


def test_a_resumed_run_finds_its_pieces(tmp_path: Path) -> None:
    work = Work(tmp_path / "work", {"a": 1, "b": (1, 2)})
    work.write_json("steps", 12)
    work.write_tensors("chunk", {"x": torch.arange(6).view(2, 3).T, "y": torch.tensor(3)})
    work.close()
    again = Work(tmp_path / "work", {"a": 1, "b": (1, 2)}, resume=True)
    assert again.resumed and again.read_json("steps") == 12
    stored = again.read_tensors("chunk")
    assert stored is not None and torch.equal(stored["x"], torch.arange(6).view(2, 3).T) and stored["y"] == 3
    assert again.read_json("other") is None and again.read_tensors("other") is None
    again.remove()
    assert not (tmp_path / "work").exists()


def test_a_stopped_run_is_dropped_only_with_restart(tmp_path: Path) -> None:
    Work(tmp_path, {"a": 1}).write_json("steps", 12)
    with pytest.raises(ValueError, match=rf"{tmp_path}: pass --resume to continue it, or --restart to drop it"):
        Work(tmp_path, {"a": 1})
    assert Work(tmp_path, {"a": 1}, resume=True).read_json("steps") == 12
    work = Work(tmp_path, {"a": 2}, restart=True)
    assert not work.resumed
    work.close()
    assert Work(tmp_path, {"a": 1}, resume=True).read_json("steps") == 12, "kept until the new run begins"
    work = Work(tmp_path, {"a": 2}, restart=True)
    work.begin()
    assert work.read_json("steps") is None
    work.write_json("other", 3)
    work.close()
    assert Work(tmp_path, {"a": 2}, resume=True).read_json("other") == 3


@pytest.mark.parametrize("options", [{"resume": True}, {"restart": True}], ids=str)
def test_a_run_is_neither_resumed_nor_dropped_while_another_process_runs_it(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    work = Work(tmp_path / "work", {"a": 1})
    work.begin()
    work.write_json("steps", 12)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"another calibration runs in .*work: wait.*--out"):
        Work(tmp_path / "work", {"a": 1}, **options)
    assert contents(tmp_path) == before
    work.close()
    stopped = Work(tmp_path / "work", {"a": 1}, **options)
    stopped.begin()
    stopped.remove()
    assert not (tmp_path / "work").exists()


def test_a_run_that_stopped_before_its_first_piece_needs_no_restart(tmp_path: Path) -> None:
    Work(tmp_path, {"a": 1})
    assert not Work(tmp_path, {"a": 2}).resumed


def test_resuming_without_a_stopped_run_starts_from_the_beginning(tmp_path: Path) -> None:
    assert not Work(tmp_path / "deep" / "work", {"a": 1}, resume=True).resumed
    assert (tmp_path / "deep" / "work").is_dir()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"restart": True}], ids=str)
@pytest.mark.parametrize("marker", ["none", "own", "foreign", "damaged"])
def test_a_folder_with_other_files_is_refused_and_not_changed(
    tmp_path: Path, options: dict[str, bool], marker: str
) -> None:
    folder = tmp_path / "work"
    if marker == "own":
        Work(folder, {"a": 1}).write_json("steps", 12)
    else:
        folder.mkdir()
    if marker in ("foreign", "damaged"):
        (folder / "made-by-selfspec.json").write_text('{"key": {}, "pieces": ["../x"]}' if marker == "foreign" else "{")
    (folder / "deep").mkdir()
    (folder / "deep" / "thesis.txt").write_text("years of work")
    (folder / "steps-of-mine.json").write_text("12")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf"{folder} holds files that selfspec did not write.*move them away.*--out"):
        Work(folder, {"a": 1}, **options)
    assert contents(tmp_path) == before


def test_removing_keeps_files_that_others_wrote_into_the_folder(tmp_path: Path) -> None:
    work = Work(tmp_path / "work", {})
    work.write_json("steps", 12)
    (tmp_path / "work" / "notes.txt").write_text("mine")
    work.remove()
    assert contents(tmp_path) == {"work/notes.txt": b"mine"}


def test_a_run_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    Work(tmp_path, {"minutes": 1, "seed": 0, "steps": None}).write_json("steps", 12)
    with pytest.raises(ValueError, match=r"other settings \(minutes, steps\).*--resume.*--restart"):
        Work(tmp_path, {"minutes": 2, "seed": 0, "steps": 5}, resume=True)
    assert json.loads((tmp_path / "steps.json").read_text()) == 12, "its pieces are kept"


def test_damaged_pieces_count_as_missing(tmp_path: Path) -> None:
    work = Work(tmp_path, {})
    work.write_json("steps", 12)
    work.write_tensors("chunk", {"x": torch.zeros(100)})
    for path in (tmp_path / "steps.json", tmp_path / "chunk.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "empty.safetensors").touch()
    assert work.read_json("chunk") is None
    assert work.read_tensors("chunk") is None and work.read_tensors("empty") is None
    (tmp_path / "steps.json").write_text("{")
    assert work.read_json("steps") is None


@pytest.mark.parametrize("kind", ["json", "tensors"])
def test_an_interrupted_write_keeps_the_piece_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    work = Work(tmp_path, {})
    write, read = getattr(work, f"write_{kind}"), getattr(work, f"read_{kind}")
    old, new = (12, 13) if kind == "json" else ({"x": torch.zeros(3)}, {"x": torch.ones(3)})
    write("piece", old)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("selfspec.calibrate.work.os.replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            write("piece", new)
    assert str(read("piece")) == str(old)
    write("piece", new)
    assert str(read("piece")) == str(new)


@pytest.mark.parametrize("resume", [False, True], ids=["start", "resume"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, resume: bool) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="cannot write to .*--out"):
        Work(file / "out" / "work", {}, resume)


# Settings


def test_by_default_there_is_one_exit_after_the_first_layer() -> None:
    assert CalibrationSettings().exit_layers(2) == CalibrationSettings().exit_layers(80) == [1]


def test_settings_name_the_arguments_that_load_the_same_weights() -> None:
    assert (
        CalibrationSettings(dtype="float32").loading == ""
        and CalibrationSettings(dtype="native").loading == ', dtype="native"'
    )
    assert CalibrationSettings(quantize="int4").loading == ', quantize="int4"'


def test_exits_asked_for_are_sorted_and_checked() -> None:
    assert CalibrationSettings(exits=(3, 0, 3)).exit_layers(6) == [0, 3]
    for layer in (-1, 4, 6):
        with pytest.raises(ValueError, match=f"--exits {layer} .*6 layers.* to 3 layers"):
            CalibrationSettings(exits=(1, layer)).exit_layers(6)


@pytest.mark.parametrize("exits", [(), (1,)])
def test_a_model_of_one_layer_is_refused(exits: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="1 layer"):
        CalibrationSettings(exits=exits).exit_layers(1)


@pytest.mark.parametrize("name", ["minutes", "tokens", "steps", "memory_gb"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_impossible_amounts_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be above 0"):
        CalibrationSettings(**{name: value})


def test_texts_that_are_missing_or_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--text .*no such file"):
        CalibrationSettings(text=(tmp_path / "missing.txt",))
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="--text .*bytes.txt cannot be read as UTF-8 text"):
        CalibrationSettings(text=(tmp_path / "bytes.txt",))


@pytest.mark.parametrize("seed", [-1, 2**62])
def test_seeds_that_measuring_could_not_use_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="--seed must be from 0 to"):
        CalibrationSettings(seed=seed)


# Memory

RECIPE = Recipe(length=128, rows=32, roots=16)


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch):
    """Sizes for a tiny model in some bytes of free memory."""
    model = adopt(tiny_model("llama", dtype=torch.float32))

    def fit_in(free: int) -> Resources:
        monkeypatch.setattr(resources, "free_device_bytes", lambda _: free)
        return fit(model, RECIPE, 101)

    return fit_in


def test_less_memory_gives_fewer_rows(fitted) -> None:
    found = []
    for free in (2**shift for shift in range(36, 18, -1)):
        try:
            found.append(fitted(free))
        except ValueError:
            break
    for more, less in zip(found, found[1:], strict=False):
        assert less.training_rows <= more.training_rows
        assert less.most_tokens <= more.most_tokens
    assert found[0].training_rows == 32 and len({part.training_rows for part in found}) > 2
    assert all(part.training_rows >= 4 and part.most_tokens >= 128 * part.training_rows for part in found)


@pytest.mark.parametrize("free", [0, 1000, 100_000])
def test_too_little_memory_is_an_error(fitted, free: int) -> None:
    with pytest.raises(ValueError, match="too little to train exits"):
        fitted(free)


def test_hidden_states_are_kept_in_host_memory_where_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = adopt(tiny_model("llama", dtype=torch.float32))
    gpu = SimpleNamespace(config=cpu.config, layers=cpu.layers, dtype=cpu.dtype, device=torch.device("cuda"))
    monkeypatch.setattr(resources, "free_host_bytes", lambda: 10**9)
    places = {}
    for free in (int(2**30 * 0.9**power) for power in range(40)):
        monkeypatch.setattr(resources, "free_device_bytes", lambda _, free=free: free)
        part = fit(gpu, RECIPE, 101)
        places[part.states_on] = part
        assert ("host memory" in part.describe()) == (part.states_on == "cpu")
    assert set(places) == {"cuda", "cpu"}
    assert places["cpu"].most_tokens == int(0.4 * 10**9 / (2 * 32 * 4))


def test_free_host_bytes_is_what_the_system_says_is_free() -> None:
    assert 2**20 < resources.free_host_bytes() < 2**50
    assert resources.free_device_bytes(torch.device("cpu")) == pytest.approx(resources.free_host_bytes(), rel=0.2)


def test_the_recipe_for_a_cpu_is_smaller_and_rows_fit_the_context() -> None:
    gpu, cpu = (Recipe.for_device(torch.device(kind), 4096, seed=3) for kind in ("cuda", "cpu"))
    assert gpu == replace(Recipe(), seed=3)
    assert cpu.length < gpu.length and cpu.rows < gpu.rows
    assert [Recipe.for_device(torch.device(kind), 64, 0).length for kind in ("cuda", "cpu")] == [64, 64]


# The display


@pytest.mark.parametrize("timed", [True, False])
def test_a_timed_stage_has_no_drawing_thread(timed: bool) -> None:
    seen, before = StringIO(), set(threading.enumerate())
    display = CalibrationDisplay(Console(file=seen, force_terminal=True, width=100))
    with display.stage("time", total=2, timed=timed) as stage:
        assert (set(threading.enumerate()) == before) == timed
        stage.advance(1, "half of it")
        if timed:
            assert "half of it" in seen.getvalue()
    assert "half of it" in seen.getvalue().splitlines()[-1]


def test_brackets_are_printed_as_they_are() -> None:
    seen = StringIO()
    display = CalibrationDisplay(Console(file=seen, force_terminal=True, width=100))
    display.say("Calibrating /tmp/[/x]")
    with display.stage("time", total=1, timed=True) as stage:
        stage.advance(1, "domain [/y]")
    assert "/tmp/[/x]" in seen.getvalue() and "domain [/y]" in seen.getvalue()
