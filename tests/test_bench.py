"""Benchmarks of decoding on tiny models: modes, ratios, failures, time budgets, ceilings and synthetic weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import decode, exactness, machine, synthetic
from bench.modes import Batch, Task, Written, until_end
from bench.requests import Target
from bench.timing import Limit, percentile, rotated, spread
from selfspec import Engine
from selfspec.models.decoder import model_parts
from tests.scripted import endless
from tests.tiny import tiny_model

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048, "rope_theta": 10000.0, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", TINY)
    return "tiny"


def batch(*prompts: list[int]) -> Batch:
    return Batch(prompts, list(range(len(prompts))), CPU)


def run(tokens: list[list[int]], seconds: float, steps: int | None = None) -> decode.Run:
    return decode.Run([Written(tokens, steps)], seconds)


# Timing


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_a_spent_budget_ends_the_items() -> None:
    now = [0.0]
    with mock.patch("time.perf_counter", lambda: now[0]):
        limit, seen = Limit(3.0), []
        for item in limit.over(range(9)):
            seen.append(item)
            now[0] += 1.5
        assert seen == [0, 1] and limit.is_spent and not Limit().is_spent
        assert limit.part(0.5).is_spent and not Limit(1.0).part(0.5).is_spent


def test_turns_start_with_each_item_once() -> None:
    assert [rotated("abc", turn) for turn in range(-1, 3)] == [list("cab"), list("abc"), list("bca"), list("cab")]
    assert spread([3.0, 1.0, 2.04], 1) == {"median": 2.0, "min": 1.0, "max": 3.0}


# Modes


def test_a_sequence_ends_with_its_end_token() -> None:
    assert until_end([5, 2, 0, 0], {2}) == [5, 2]
    assert until_end([5, 2], set()) == [5, 2]


def test_prompts_of_a_batch_are_padded_on_the_left() -> None:
    ids, mask = batch([5], [6, 7]).tensors()
    assert ids.tolist() == [[0, 5], [6, 7]] and mask.tolist() == [[0, 1], [1, 1]]


# Cells


def test_a_mode_that_fails_keeps_its_error_in_one_line_and_is_not_run_again() -> None:
    calls = []

    def fails(batch: Batch, task: Task) -> Written:
        calls.append(batch)
        raise torch.OutOfMemoryError("no memory\nfor this")

    cell = decode.Cell("chat", 0.0, [batch([1]), batch([2])])
    ways = {"plain": lambda batch, task: Written([[1]], 1), "peer": fails}
    for turn in range(2):
        cell.repeats.append(cell.run(ways, 4, turn))
    modes = cell.result(["plain", "peer"])["modes"]
    assert len(calls) == 1 and modes["peer"] == {"failed": "OutOfMemoryError: no memory for this"}
    assert modes["plain"]["tokens_per_s"]["median"] > 0


def test_ratios_are_taken_repeat_by_repeat_against_plain() -> None:
    cell = decode.Cell("chat", 0.0, [batch([1], [2])])
    texts, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    for plain, fast in ((4.0, 2.0), (8.0, 2.0), (4.0, 5.0)):
        cell.repeats.append({"plain": run(texts, plain, 4), "chain:2": run(other, fast, 2)})
    found = cell.result(["plain", "chain:2", "absent"])
    modes = found["modes"]
    assert modes["chain:2"]["against_plain"] == {"median": 2.0, "min": 0.8, "max": 4.0}
    assert modes["plain"]["tokens_per_s"] == {"median": 1.0, "min": 0.5, "max": 1.0}
    assert modes["chain:2"]["same_tokens"] == [1, 2] and modes["chain:2"]["tokens_per_step"] == 2.0
    assert modes["absent"] == {"failed": "not reached within the time budget"}
    assert (found["tokens"], found["batch"], found["repeats"]) == (4, 2, 3)


def test_samples_of_transformers_are_not_compared_since_its_noise_differs() -> None:
    for temperature, same in ((0.0, [1, 1]), (0.7, None)):
        cell = decode.Cell("chat", temperature, [batch([1])])
        cell.repeats.append({"plain": run([[1]], 1.0, 1), "transformers eager": run([[1]], 2.0)})
        (_, eager) = cell.result(["plain", "transformers eager"])["modes"].values()
        assert eager["same_tokens"] == same and eager["tokens_per_step"] is None


def test_a_spent_budget_leaves_cells_without_figures_and_says_so() -> None:
    target = Target("tiny", Engine.from_model(tiny_model("llama", dtype=torch.float32)), {"a": [[3]], "b": [[4]]}, {})
    ways = {"plain": lambda batch, task: Written([[1]], 1)}
    found = decode.measure(target, ways, decode.cells_of(target, [1], [0.0]), 4, 2, Limit(0.0))
    assert [cell["repeats"] for cell in found["cells"]] == [0, 0]
    assert all("time budget" in cell["modes"]["plain"]["failed"] for cell in found["cells"])


@pytest.mark.parametrize("size", [1, 2])
def test_all_modes_give_plain_decodings_tokens_and_unsupported_ones_are_reported(size: int) -> None:
    hf: Any = endless(tiny_model("llama", dtype=torch.float32))
    prompts = [[3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14]]
    engine = Engine.from_model(hf, tokenizer=mock.Mock(pad_token_id=None))
    target = Target("tiny", engine, {"any": prompts}, {"plan": "chain:2", "exit_layer": 2}, hf=hf)
    args = decode.parse("--modes plain eager compile lookup early-exit --plans chain:2 tree:4,2,2,1".split())
    ways = decode.ways_of(target, args.modes, args.plans)
    found = decode.measure(target, ways, decode.cells_of(target, [size], [0.0]), 6, 1, Limit())
    (cell,) = found["cells"]
    modes = cell["modes"]
    assert list(modes) == [
        "plain", "chain:2", "tree:4,2,2,1", "transformers eager", "transformers static+compile",
        "transformers prompt lookup", "transformers early exit 3",
    ]  # fmt: skip
    assert "accelerators" in modes["transformers static+compile"]["failed"]
    assert hf.config.num_hidden_layers == 4
    sequences = size * -(-len(prompts) // size)
    for name in ("chain:2", "tree:4,2,2,1", "transformers eager"):
        assert modes[name]["same_tokens"] == [sequences, sequences], name
    assisted = modes["transformers prompt lookup"]
    assert ("failed" in assisted) == (size > 1)
    assert size == 1 or "batch" in assisted["failed"] and "\n" not in assisted["failed"]


# The command


def test_a_shape_is_measured_and_reported_as_synthetic(tiny_shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "--shape tiny --dtype float32 --limit 2 --prompt-tokens 5 --max-new-tokens 6 --batch 1 2 --temperature 0 0.7 "
        "--plans tree:4,2 --repeat 1 --device cpu"
    )
    with mock.patch.object(synthetic, "own_text_agreement", lambda *_: synthetic.Agreement(0.5, 0.6)):
        assert decode.main(command.split()) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert "SYNTHETIC" in out and "50.0% top-1" in out and "Ceiling of plain decoding" in out
    assert result["setup"]["synthetic"]["top1"] == 0.5 and result["setup"]["memory_gb"] is None
    assert result["setup"]["synthetic"]["draft_tokens"] == TINY["vocab_size"] // 4
    assert [(cell["batch"], cell["temperature"]) for cell in result["cells"]] == [(1, 0), (2, 0), (1, 0.7), (2, 0.7)]
    for cell in result["cells"]:
        assert list(cell["modes"]) == ["plain", "speculation", "tree:4,2"]
        ceiling = cell["batch"] * result["setup"]["ceiling_tokens_per_s"]
        for mode in cell["modes"].values():
            assert mode["of_ceiling"] == pytest.approx(mode["tokens_per_s"]["median"] / ceiling, abs=1e-3)


def test_a_memory_limit_without_a_gpu_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "open_target", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit, match=r"--memory-gb: .*24 GB .* CUDA device, and this runs on cpu"):
        decode.main("--memory-gb 24 --shape llama-8b --device cpu".split())


# The machine


def test_the_setup_names_commit_versions_and_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.from_model(tiny_model("llama", dtype=torch.float32))
    monkeypatch.setattr(machine, "cpu_bandwidth", lambda: 1e9)
    monkeypatch.setattr(machine, "memory_limit", lambda _: 24 * 10**9 - 1)
    setup = machine.describe(engine, "tiny")
    assert setup["memory_gb"] == 24.0 and setup["bandwidth_gb_s"] == 1.0
    assert setup["ceiling_tokens_per_s"] == pytest.approx(1e9 / machine.bytes_per_step(engine), rel=1e-3)
    assert setup["versions"]["torch"] == torch.__version__ and setup["commit"]
    assert machine.version("a package that is not there") == "not installed"


def test_an_embedding_that_is_not_the_head_is_not_read_by_a_step() -> None:
    for family, is_tied in (("llama", False), ("qwen2", True)):
        engine = Engine.from_model(tiny_model(family, dtype=torch.float32))
        unread = engine.model.nbytes - machine.bytes_per_step(engine)
        assert unread == (0 if is_tied else 101 * 32 * 4)


@pytest.mark.parametrize(("free", "count"), [(0, 2**15), (10**9, 2**26), (4 * 10**9, 2**28), (10**11, 2**30)])
def test_a_long_read_takes_at_most_half_of_the_free_memory(free: int, count: int) -> None:
    assert machine.read_count(free) == count
    assert count == 2**15 or 4 * count <= free / 2


# Exactness


def test_the_exactness_check_passes_an_engine_that_is_exact() -> None:
    engine = Engine.from_model(endless(tiny_model("llama")))
    write = exactness.writer(engine, 5, exit_layer=2)
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
    found = exactness.check_plans(write, prompts, 1, Limit(), plans=["none", "tree:2,1"], batches=[1, 16])
    told = exactness.summary(found)
    assert (told["compared"], told["differing"], told["first"]) == (2 * 3 * 16 * 5, 0, "")


def test_the_exactness_check_finds_an_injected_difference() -> None:
    def write(prompts: Any, seeds: Any, temperature: float, plan: str) -> list[list[int]]:
        texts = [[seed, 1, 2, 3] for seed in seeds]
        if plan == "chain:2" and len(prompts) == 4 and temperature and 5 in seeds:
            texts[list(seeds).index(5)][2] = 9
        return texts

    found = exactness.check_plans(write, [[1, 2, 3]], 1, Limit(), plans=["none", "chain:2"], batches=[1, 4, 16])
    differing = {name: tally for name, tally in found.items() if tally.differing}
    (name, tally), *others = differing.items()
    assert not others and name == "chain:2, batch 4, temperature 0.7"
    assert (tally.differing, tally.first, tally.compared) == (1, "sequence 5, token 2", 15 * 4 + 3)
    assert exactness.summary(found)["first"] == f"{name}: {tally.first}"


def test_the_exactness_check_ends_when_enough_was_compared_or_time_is_up() -> None:
    seen = set()

    def write(prompts: Any, seeds: Any, temperature: float, plan: str) -> list[list[int]]:
        seen.update(tuple(prompt) for prompt in prompts)
        return [[1] * 10 for _ in prompts]

    options: Any = {"plans": ["chain:1"], "batches": [1, 16], "temperatures": [0.0]}
    found = exactness.check_plans(write, [[1, 2, 3]], 2500, Limit(), **options)
    assert exactness.compared(found) == 8 * 320
    assert len(seen) > 100  # every round has prompts of its own
    assert exactness.check_plans(write, [[1, 2, 3]], 2500, Limit(0.0), **options) == {}


@pytest.mark.parametrize(
    ("expected", "found", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)]
)
def test_the_first_difference_may_be_the_end_of_the_shorter_sequence(
    expected: list[int], found: list[int], place: int | None
) -> None:
    assert exactness.first_difference(expected, found) == place


def test_differences_are_a_failure_of_the_command(tiny_shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "--shape tiny --dtype float32 --device cpu --limit 2 --prompt-tokens 5 --max-new-tokens 4 --tokens 1 "
        "--checks plans"
    )
    with (
        mock.patch.object(synthetic, "own_text_agreement", lambda *_: synthetic.Agreement(0.5, 0.6)),
        mock.patch.object(exactness, "writer", lambda *_: lambda p, seeds, t, plan: [[plan != "none"] for _ in seeds]),
    ):
        assert exactness.main(command.split()) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["plans"]["differing"] == 16 * 24


# Synthetic weights


def test_more_damping_makes_the_exit_agree_more(tiny_shape: str) -> None:
    model = synthetic.synthetic(tiny_shape, "cpu", torch.float32)
    engine, tunable = Engine(model), synthetic.Tunable(model, 2)
    found = []
    for damping in (4.0, 0.001):
        tunable.damp(damping)
        found.append(synthetic.own_text_agreement(engine, 2, texts=4, prompt=4, new=24))
    assert found[0].top1 < 0.7 < 0.95 < found[1].top1
    assert all(one.top1 <= one.top4 for one in found)


def test_damping_and_hard_tokens_are_found_for_the_wanted_agreement(tiny_shape: str) -> None:
    model = synthetic.synthetic(tiny_shape, "cpu", torch.float32)
    engine, tunable = Engine(model), synthetic.Tunable(model, 2)

    def measure() -> synthetic.Agreement:
        return synthetic.own_text_agreement(engine, 2, texts=6, prompt=4, new=40)

    wanted = synthetic.Agreement(0.6, 0.8)
    found = synthetic.tune(tunable, wanted, measure, rounds=3, steps=5)
    assert abs(found.top1 - wanted.top1) < 0.08 and abs(found.top4 - wanted.top4) < 0.08
    again = measure()  # the weights stay as they were when that was found, up to rounding
    assert abs(again.top1 - found.top1) < 0.05 and abs(again.top4 - found.top4) < 0.05


def test_hard_tokens_come_and_go_without_rounding(tiny_shape: str) -> None:
    model = synthetic.synthetic(tiny_shape, "cpu", torch.bfloat16)
    before = model.embedding.weight.clone()
    tunable = synthetic.Tunable(model, 2)
    for share in (0.3, 0.1, 0.6, 0.0):
        tunable.harden(share)
    assert torch.equal(model.embedding.weight, before * synthetic.LONG)


def test_a_model_restricted_to_some_tokens_writes_no_others(tiny_shape: str) -> None:
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
        self._held: list[torch.Tensor] = []  # so that no storage is freed and reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.data_ptr() not in {held.data_ptr() for held in self._held}:
            self._held.append(out)
            self.numbers[out.dtype] += out.numel()
        return out


def test_synthetic_weights_are_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", {**TINY, "model_type": "qwen2"})
    with Allocations() as allocations:
        model = synthetic.synthetic("tiny", "cpu", torch.bfloat16, exit_layer=2, damping=0.5)
    assert allocations.numbers.pop(torch.bfloat16) == model.nbytes // 2
    assert allocations.numbers.total() < 100  # the config's few
    bias = model.layers[0].qkv.bias
    assert bias is not None and 0.2 < bias.float().std() < 0.4 and (model.layers[0].attention_norm == 1).all()
