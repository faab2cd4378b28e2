"""The decode benchmark's own parts, on tiny models: what it says of times, tokens, failures and synthetic weights."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from bench import decode, exactness, kernels, report, synthetic
from bench.modes import Batch, Clock, Memory, Mode, Task, Written, in_bursts, per_token, percentile, until_end
from selfspec import Engine
from selfspec.models.decoder import model_parts
from tests.scripted import endless
from tests.tiny import tiny_model

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048, "rope_theta": 10000.0, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", TINY)
    return "tiny"


def batch(*prompts: list[int]) -> Batch:
    return Batch(prompts, list(range(len(prompts))), CPU)


def way(tokens: list[list[int]], passes: int) -> Any:
    return lambda batch, task: Written(tokens, passes)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_tokens_that_come_one_by_one_are_parted_at_the_widest_gaps() -> None:
    stamps = [1.0, 1.001, 1.002, 2.0, 3.0, 3.001]
    assert in_bursts(stamps, 3) == [(1.0, 3), (2.0, 1), (3.0, 2)]
    assert in_bursts(stamps, 6) == [(stamp, 1) for stamp in stamps]
    assert in_bursts(stamps, 1) == [(1.0, 6)]


def test_tokens_of_a_burst_share_its_time_and_the_prompt_is_left_out() -> None:
    written = Written([[1, 2, 3, 4]], 3, [(10.0, 1), (12.0, 2), (13.0, 1)])
    assert per_token(written, 99.0) == [1.0, 1.0, 1.0]
    assert per_token(Written([[1, 2], [3, 4]], 4), 2.0) == [0.5]


def test_a_clock_does_not_count_the_prompt() -> None:
    clock = Clock()
    clock.put(torch.zeros(1, 5))
    clock.put(torch.zeros(3))
    assert [count for _, count in clock.arrivals] == [3]


def test_a_row_ends_with_its_end_token() -> None:
    assert until_end([5, 2, 0, 0], {2}) == [5, 2]
    assert until_end([5, 2], set()) == [5, 2]


def test_prompts_of_a_batch_are_padded_on_the_left() -> None:
    ids, mask = batch([5], [6, 7]).tensors()
    assert ids.tolist() == [[0, 5], [6, 7]] and mask.tolist() == [[0, 1], [1, 1]]


def test_a_mode_that_fails_says_why_in_one_line_and_is_not_tried_again() -> None:
    calls = []

    def fails(batch: Batch, task: Task) -> Written:
        calls.append(batch)
        raise torch.OutOfMemoryError("no memory\nfor this")

    mode = Mode("peer", fails)
    mode.rehearse([batch([1])], Task(4))
    mode.measure(0, batch([1]), Task(4))
    assert len(calls) == 1
    assert mode.result(None, None, None) == {"mode": "peer", "failed": "OutOfMemoryError: no memory for this"}


def test_a_mode_past_its_time_measures_no_further_batch() -> None:
    mode = Mode("slow", way([[1]], 1), limit_s=0.0)
    for number in range(3):
        mode.measure(number, batch([1]), Task(1))
    assert list(mode.samples) == [0]


def test_modes_are_compared_on_the_batches_that_both_decoded() -> None:
    plain, other = Mode("plain", way([[1, 2], [3, 4]], 4)), Mode("other", way([[1, 2], [3, 5]], 2))
    for number in range(3):
        plain.measure(number, batch([1], [2]), Task(2))
    other.measure(1, batch([1], [2]), Task(2))
    result = other.result(None, plain, None)
    assert result["same_tokens_as_plain"] == "1/2" and result["same_tokens_as_transformers"] is None
    assert result["tokens_per_cycle"] == 2.0 and result["prompts"] == 2
    assert result["speedup_over_plain"] == pytest.approx(plain.samples[1].mean / other.samples[1].mean, rel=0.01)


def test_a_peak_leaves_out_what_only_others_hold() -> None:
    memory = Memory(CPU)
    held, exits = [100], [0]
    with mock.patch.object(memory, "now", lambda: held[0]):
        for name, gained, loaded in (("peer", 10, 0), ("selfspec plain", 1, 0), ("selfspec tree", 25, 20)):
            with memory.keeping(name, lambda: exits[0]):
                held[0] += gained
                exits[0] += loaded
    memory.engine, memory.device = 30, torch.device("cuda")
    assert memory.own_peak("peer", 200, is_ours=False, drafts=False) == 200 - 1 - 5 - 30 - 20
    assert memory.own_peak("selfspec plain", 200, is_ours=True, drafts=False) == 200 - 10 - 5 - 20
    assert memory.own_peak("selfspec tree", 200, is_ours=True, drafts=True) == 200 - 10 - 1


@pytest.mark.parametrize("size", [1, 2])
def test_all_modes_run_in_turn_and_peers_that_cannot_are_reported(size: int) -> None:
    hf: Any = endless(tiny_model("llama", dtype=torch.float32))
    prompts = [[3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14]]
    subject = decode.Subject("tiny", Engine.from_model(hf), prompts, Memory(CPU), exit_layer=2, hf=hf)
    args = decode.parse(["--max-new-tokens", "6"])
    ways = decode.ways_of(args, subject)
    results = decode.measure_cell(args, subject, ways, decode.batches_of(subject, size), Task(6))
    by_name = {result["mode"]: result for result in results}
    assert list(by_name) == [
        "transformers eager", "transformers static+compile", "transformers prompt lookup", "transformers early exit 3",
        "selfspec plain", "selfspec chain:2", "selfspec tree:4,2,2,1",
    ]  # fmt: skip
    assert "accelerators" in by_name["transformers static+compile"]["failed"]
    assert hf.config.num_hidden_layers == 4
    rows = size * -(-len(prompts) // size)
    for name, result in by_name.items():
        if name.startswith("selfspec") or name == "transformers eager":
            assert result["same_tokens_as_plain"] == result["same_tokens_as_transformers"] == f"{rows}/{rows}", name
    assisted = by_name["transformers prompt lookup"]
    assert ("failed" in assisted) == (size > 1)
    assert size == 1 or "batch" in assisted["failed"] and "\n" not in assisted["failed"]


def test_more_damping_makes_the_exit_agree_more(tiny_shape: str) -> None:
    model = synthetic.synthetic(tiny_shape, "cpu", torch.float32)
    engine, tunable = Engine(model), synthetic.Tunable(model, 2)
    found = []
    for damping in (4.0, 0.001):
        tunable.damp(damping)
        found.append(synthetic.own_text_agreement(engine, 2, texts=4, prompt=4, new=24))
    assert found[0].top1 < 0.7 < 0.95 < found[1].top1
    assert all(one.top1 <= one.top4 for one in found)


def test_damping_and_hard_tokens_are_found_for_the_agreement_asked_for(tiny_shape: str) -> None:
    model = synthetic.synthetic(tiny_shape, "cpu", torch.float32)
    engine, tunable = Engine(model), synthetic.Tunable(model, 2)

    def measure() -> synthetic.Agreement:
        return synthetic.own_text_agreement(engine, 2, texts=6, prompt=4, new=40)

    wanted = synthetic.Agreement(0.6, 0.8)
    found = synthetic.tune(tunable, wanted, measure, rounds=3, steps=5)
    assert abs(found.top1 - wanted.top1) < 0.08 and abs(found.top4 - wanted.top4) < 0.08
    again = measure()  # the weights are left as they were when that was found, up to rounding
    assert abs(again.top1 - found.top1) < 0.05 and abs(again.top4 - found.top4) < 0.05


def test_hard_tokens_come_and_go_without_rounding(tiny_shape: str) -> None:
    model = synthetic.synthetic(tiny_shape, "cpu", torch.bfloat16)
    before = model.embedding.clone()
    tunable = synthetic.Tunable(model, 2)
    for share in (0.3, 0.1, 0.6, 0.0):
        tunable.harden(share)
    assert torch.equal(model.embedding, before * synthetic.LONG)


def test_the_exactness_check_passes_an_engine_that_is_exact() -> None:
    engine = Engine.from_model(endless(tiny_model("llama")))
    write = exactness.writer(engine, 5, exit_layer=2)
    found = exactness.check(write, [[3, 4, 5], [6, 7], [8, 9, 10, 11]], 1, plans=["none", "tree:2,1"], batches=[1, 16])
    assert exactness.summary(found) == {"compared": 2 * 3 * 16 * 5, "differences": 0}


def test_the_exactness_check_finds_an_injected_difference() -> None:
    def write(prompts: Any, seeds: Any, temperature: float, plan: str) -> list[list[int]]:
        texts = [[seed, 1, 2, 3] for seed in seeds]
        if plan == "chain:2" and len(prompts) == 4 and temperature and 5 in seeds:
            texts[list(seeds).index(5)][2] = 9
        return texts

    found = exactness.check(write, [[1, 2, 3]], 1, plans=["none", "chain:2"], batches=[1, 4])
    parted = [one for one in found if one.differences]
    assert [(one.plan, one.batch, one.temperature, one.differences) for one in parted] == [("chain:2", 4, 0.7, 1)]
    assert parted[0].first == "text 5, token 2" and parted[0].compared == 15 * 4 + 3


def test_the_exactness_check_goes_on_until_enough_was_compared() -> None:
    seen = set()

    def write(prompts: Any, seeds: Any, temperature: float, plan: str) -> list[list[int]]:
        seen.update(tuple(prompt) for prompt in prompts)
        return [[1] * 10 for _ in prompts]

    found = exactness.check(write, [[1, 2, 3]], 2500, plans=["chain:1"], batches=[1], temperatures=[0.0])
    assert exactness.summary(found)["compared"] == 16 * 160
    assert len(seen) > 200  # every round has prompts of its own


@pytest.mark.parametrize(
    ("expected", "found", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)]
)
def test_texts_part_where_they_first_differ(expected: list[int], found: list[int], place: int | None) -> None:
    assert exactness.parting(expected, found) == place


def test_a_model_kept_to_some_tokens_writes_no_others(tiny_shape: str) -> None:
    model = synthetic.synthetic(tiny_shape, "cpu", torch.float32)
    prompts = synthetic.random_prompts(model, 4, 6)
    assert Engine(model).generate(prompts, max_new_tokens=24)[:, 6:].max() >= 10
    assert synthetic.keep_to(model, 10).tolist() == list(range(10))
    assert Engine(model).generate(prompts, max_new_tokens=24)[:, 6:].max() < 10


def test_the_shapes_have_the_sizes_they_are_named_after() -> None:
    sizes = {}
    for shape in synthetic.SHAPES:
        parts = [part for of_field in model_parts(synthetic.config_of(shape)).values() for part in of_field]
        sizes[shape] = sum(math.prod(part.shape) for part in parts)
    billions = {"llama-8b": 8.03, "llama-1.5b": 1.68, "qwen-1.5b": 1.54, "smollm2-135m": 0.135}
    assert sizes == pytest.approx({shape: size * 1e9 for shape, size in billions.items()}, rel=0.01)
    qwen = synthetic.config_of("qwen-1.5b")
    assert (qwen.model_type, qwen.qkv_bias, qwen.out_bias, qwen.tied_head) == ("qwen2", True, False, True)


class Allocations(TorchDispatchMode):
    """Adds up, by dtype, how many numbers new storages hold."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[torch.dtype] = Counter()
        self._held: list[torch.Tensor] = []  # so that no storage takes the place of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.data_ptr() not in {held.data_ptr() for held in self._held}:
            self._held.append(out)
            self.numbers[out.dtype] += out.numel()
        return out


def test_a_synthetic_model_is_drawn_where_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", {**TINY, "model_type": "qwen2"})
    with Allocations() as allocations:
        model = synthetic.synthetic("tiny", "cpu", torch.bfloat16, exit_layer=2, damping=0.5)
    assert allocations.numbers.pop(torch.bfloat16) == model.nbytes // 2
    assert allocations.numbers.total() < 100  # the config's few
    bias = model.layers[0].qkv_bias
    assert bias is not None and 0.2 < bias.float().std() < 0.4 and (model.layers[0].attention_norm == 1).all()


def test_a_bound_on_memory_without_a_gpu_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "open_shape", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(SystemExit, match=r"--memory-gb: a limit of 24 GB .* CUDA device, and this runs on cpu"):
        decode.main("--memory-gb 24 --shape llama-8b --device cpu".split())


def test_a_bound_on_memory_stands_in_the_setup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    engine = Engine.from_model(tiny_model("llama", dtype=torch.float32))
    subject = decode.Subject("tiny", engine, [[3]], Memory(CPU), exit_layer=2)
    monkeypatch.setattr(decode, "read_bandwidth", lambda: 1e9)
    args = decode.parse(["--memory-gb", "24"])
    for allowed, told in ((24 * 10**9 - 1, ", bound to 24 GB of GPU memory"), (None, "")):
        monkeypatch.setattr(decode, "memory_limit", lambda _, allowed=allowed: allowed)
        setup = asdict(decode.describe(args, subject))
        assert setup["memory_gb"] == (allowed and 24.0)
        report.describe(Console(), setup)
        assert capsys.readouterr().out.endswith(f"exits untrained{told}\n")


@pytest.mark.parametrize(("room", "count"), [(0, 2**15), (10**9, 2**26), (4 * 10**9, 2**28), (10**11, 2**30)])
def test_a_long_read_takes_at_most_half_of_the_room(room: int, count: int) -> None:
    assert kernels.read_count(room) == count
    assert count == 2**15 or 4 * count <= room / 2


def test_a_shape_is_measured_and_said_to_be_synthetic(
    tiny_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        "--shape tiny --dtype float32 --limit 2 --prompt-tokens 5 --max-new-tokens 6 --batch 1 2 --temperature 0 0.7"
    )
    plot = tmp_path / "plot.svg"
    with mock.patch.object(synthetic, "own_text_agreement", lambda *_: synthetic.Agreement(0.5, 0.6)):
        assert decode.main([*command.split(), "--device", "cpu", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])["runs"][0]
    assert "SYNTHETIC" in out and "50.0% top-1" in out
    assert result["setup"]["synthetic"]["top1"] == 0.5
    assert result["setup"]["memory_gb"] is None
    assert result["setup"]["synthetic"]["draft_rows"] == TINY["vocab_size"] // 4
    assert [(cell["batch"], cell["temperature"]) for cell in result["cells"]] == [(1, 0), (1, 0.7), (2, 0), (2, 0.7)]
    for cell in result["cells"]:
        assert [row["mode"] for row in cell["results"]] == [
            "selfspec plain",
            "selfspec chain:2",
            "selfspec tree:4,2,2,1",
        ]


def test_differences_are_a_failure_of_the_command(tiny_shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = "--shape tiny --dtype float32 --device cpu --limit 2 --prompt-tokens 5 --max-new-tokens 4 --exactness 1"
    with (
        mock.patch.object(synthetic, "own_text_agreement", lambda *_: synthetic.Agreement(0.5, 0.6)),
        mock.patch.object(exactness, "writer", lambda *_: lambda p, seeds, t, plan: [[plan != "none"] for _ in seeds]),
    ):
        assert decode.main(command.split()) == 1
    told = capsys.readouterr().out
    assert json.loads(told.splitlines()[-1])["runs"][0]["exactness"]["differences"] == 16 * 24
    assert "16 tokens compared so far, 16 texts differ" in told, "if it were cut off, that much would be known"


def test_without_matplotlib_there_is_a_message_in_place_of_the_plot(tmp_path: Path) -> None:
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        assert "matplotlib" in report.plot(tmp_path / "plot.svg", [])
    assert not list(tmp_path.iterdir())
