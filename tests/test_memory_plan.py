"""Plans of memory, made from headers alone, are what the engine then allocates; models that do not fit are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import Engine, generate, plan_memory
from selfspec.cache.kv_cache import page_nbytes
from selfspec.commands import serve
from selfspec.engine import slow_weights
from selfspec.memory_plan import MemoryPlan, graphs_nbytes, limit_to_plan
from selfspec.models import loading, pretrained
from selfspec.models.decoder import Decoder
from selfspec.profiles.profile import Profile
from tests.profiles import choice_of, profile_of, random_exit
from tests.test_native_gguf import ENCODINGS, written
from tests.test_quantized_checkpoint import BUILDERS
from tests.test_quantized_loading import CONFIGS, write
from tests.tiny import tiny_model

OPTIONS: dict[str, Any] = {"device": "cpu", "max_length": 256, "max_batch": 2}


def dense(folder: Path) -> Path:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}  # rows that packing pads
    tiny_model("qwen2", torch.float32, **sizes).to(torch.bfloat16).save_pretrained(folder)
    return folder


def packed(folder: Path, name: str) -> Path:
    return write(folder, BUILDERS[name], CONFIGS[name]).path


SOURCES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "float32": (dense, {}),
    "bfloat16": (dense, {"dtype": "bfloat16"}),
    "int8": (dense, {"quantize": "int8"}),
    "int4": (dense, {"quantize": "int4"}),
    "GGUF like Q4_K_M": (lambda folder: written(folder, ENCODINGS["like Q4_K_M"]), {"dtype": "native"}),
    "GGUF expanded": (lambda folder: written(folder, ENCODINGS["Q4_1"]), {}),
    "GGUF expanded, then int4": (lambda folder: written(folder, ENCODINGS["Q4_1"]), {"quantize": "int4"}),
    **{name: (lambda folder, name=name: packed(folder, name), {}) for name in CONFIGS},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_plan_is_what_the_engine_allocates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))
    make, how = SOURCES[name]
    source = make(tmp_path)
    plan, *others = plan_memory(source, profile=None, **OPTIONS, **how)
    engine = Engine.from_pretrained(source, profile=None, **OPTIONS, **how)
    memory = engine.memory()
    assert (plan.weights, plan.exits, plan.cache) == (memory["weights"], memory["exits"], memory["cache"])
    assert plan.context == engine.context == 256 and plan.fits and plan.cuda == 0
    assert plan.total == plan.weights + plan.cache + plan.buffers
    logits = 64 * 4 * engine.model.config.vocab_size
    assert plan.buffers >= 2 * logits, "logits and log probabilities of 64 positions"
    if name in ("bfloat16", "GGUF like Q4_K_M"):  # the other ways to hold the same weights
        assert [plan.weights_as for plan in others][-2:] == ["int8", "int4"]
        dtype = "bfloat16" if name == "bfloat16" else "auto"
        rounded = Engine.from_pretrained(source, profile=None, quantize="int4", dtype=dtype, **OPTIONS)
        assert others[-1].weights == rounded.memory()["weights"]


def test_the_plan_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = dense(tmp_path)
    file = source / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    expected = plan_memory(source, profile=None, quantize="int8", **OPTIONS)[0].weights
    file.write_bytes(file.read_bytes()[:header] + b"\xff" * (file.stat().st_size - header))  # NaN
    assert plan_memory(source, profile=None, quantize="int8", **OPTIONS)[0].weights == expected
    with pytest.raises(ValueError, match="not finite"):
        Engine.from_pretrained(source, quantize="int8", **OPTIONS)


def test_a_folder_whose_name_ends_like_a_gguf_file_is_planned_as_it_is_loaded(tmp_path: Path) -> None:
    folder = dense(tmp_path / "tiny.gguf")
    weights = Engine.from_pretrained(folder, profile=None, **OPTIONS).memory()["weights"]
    assert plan_memory(folder, profile=None, **OPTIONS)[0].weights == weights


def save_profile(folder: Path, model: Decoder) -> Profile:
    """A profile with one exit and a trimmed head of 24 rows."""
    plans = {"1": "tree:2,1", "2-4": "chain:2", "5-16": "none"}
    profile = profile_of(model, {"all": choice_of(1, plans, head_rows=24)})
    return profile.save(folder, [random_exit(model, 1)], {"all": torch.arange(24)})


def test_the_exits_of_a_profile_are_planned_by_the_models_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))
    source = dense(tmp_path / "model")
    model = loading.load_folder(source, torch.device("cpu"))
    save_profile(tmp_path / "home" / "profiles" / "own", model)
    plan = plan_memory(source, **OPTIONS)[0]
    engine = Engine.from_pretrained(source, **OPTIONS)
    engine.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, speculative_decoding="force", pad_token_id=0)
    assert engine.memory()["exits"] == pytest.approx(plan.exits, rel=0.02) and plan.exits > 0


def on_meta(model: Decoder) -> Decoder:
    """Returns a model's shapes, on PyTorch's meta device."""
    tensors = {"embedding": model.embedding.weight, "norm": model.norm}
    if model.head is not model.embedding:
        tensors["head"] = model.head.weight
    for index, layer in enumerate(model.layers):
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
    return Decoder(model.config, {name: tensor.to("meta") for name, tensor in tensors.items()})


@pytest.mark.parametrize("has_profile", [True, False])
def test_kernel_buffers_are_planned_as_a_warm_up_allocates_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_profile: bool
) -> None:
    from selfspec.kernels.triton_compat import INTERPRETED

    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr("selfspec.backends.cuda.kernel_prefill.longest_kernel_prompt", lambda _: 0)  # not interpreted
    model = loading.adopt(tiny_model("llama", torch.float32, num_hidden_layers=2, head_dim=16))
    profile = save_profile(tmp_path, model) if has_profile else None
    engine = Engine(model, profile=profile, kernels=True, max_length=256, max_batch=2)
    engine.warmup(batch=2, max_length=256)
    for entry in list(engine._graphs.captured.entries.values()):  # type: ignore[union-attr]
        entry[0].launch()  # takes scratch memory
    planned, graphs = graphs_nbytes(on_meta(model), profile, 256, 2, 2)
    assert graphs == len(engine._graphs.captured.entries)  # type: ignore[union-attr]
    assert planned == pytest.approx(engine.memory()["graphs"], rel=0.05)


def test_slow_quantized_weights_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    text = slow_weights(loading.adopt(tiny_model("llama", torch.float16)))
    assert "hidden size 32, MLP 48, heads of 8, in float16 on sm_75" in text


def refuse(*_: Any) -> Any:
    raise AssertionError("weights were read")


def test_a_model_that_does_not_fit_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dense(tmp_path)
    weights = plan_memory(source, profile=None, device="cpu")[0].weights
    size = page_nbytes(loading.load_folder(source, torch.device("cpu")).config, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "load_folder", refuse)
        with pytest.raises(ValueError, match="does not fit 0.00 GB") as raised:
            Engine.from_pretrained(source, device="cpu", memory_gb=weights / 2e9)
        assert "weights" in str(raised.value) and "int4" in str(raised.value)
        with pytest.raises(ValueError, match="pass max_length=64 or less"):
            Engine.from_pretrained(source, device="cpu", max_length=512, kv_cache_gb=5.5 * size / 1e9, memory_gb=1)
        with pytest.raises(ValueError, match="memory_gb=-1 is not possible"):
            Engine.from_pretrained(source, device="cpu", memory_gb=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_gb", "2"), ("memory_gb", float("inf")), ("kv_cache_gb", float("inf")), ("max_length", 0)]
    + [("max_length", "5"), ("max_batch", 0), ("max_batch", 1.5)],
)
def test_a_plan_refuses_the_limits_that_an_engine_refuses(tmp_path: Path, name: str, value: Any) -> None:
    folder = dense(tmp_path)
    for call in plan_memory, Engine.from_pretrained:
        with pytest.raises(ValueError, match=f"{name}=.* is not possible"):
            call(folder, "cpu", **{name: value})


def test_the_error_names_the_ways_that_fit() -> None:
    def plan(weights_as: str, weights: int, exits: int = 0) -> MemoryPlan:
        fits = weights + exits < 10
        return MemoryPlan(weights_as, weights, exits, 1, 0, 0, 10, 64, dict.fromkeys((1, 4, 16), 64), fits)

    with pytest.raises(ValueError, match="settings: pass quantize='int8', or pass dtype='native'\n"):
        limit_to_plan([plan("bfloat16", 16), plan("int8", 8), plan("native", 5)], torch.device("cpu"))
    with pytest.raises(ValueError, match="settings: pass profile=None and quantize='int4'\n"):
        limit_to_plan([plan("bfloat16", 16, 6), plan("int4", 4, 6)], torch.device("cpu"))
    assert limit_to_plan([plan("native", 5)], torch.device("cpu")) == 1e-9


def test_a_limit_makes_the_cache_smaller_by_the_one_rule(tmp_path: Path) -> None:
    source = dense(tmp_path)
    free = plan_memory(source, profile=None, device="cpu")[0]
    limit = (free.total - free.cache / 2) / 1e9
    plan = plan_memory(source, profile=None, device="cpu", memory_gb=limit)[0]
    engine = Engine.from_pretrained(source, profile=None, device="cpu", memory_gb=limit)
    assert engine.memory()["cache"] == plan.cache < free.cache and engine.context == plan.context
    assert plan.fits and plan.total <= limit * 1e9
    # Half of what is left beside the weights, but not more than buffers leave.
    tight = plan_memory(source, profile=None, device="cpu", memory_gb=(free.total - 0.9 * free.cache) / 1e9)[0]
    assert tight.fits and 0.05 * free.cache < tight.cache < 0.2 * free.cache


def test_the_command_prints_the_plan_and_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", refuse)
    command = ["--plan-memory", "--model", str(dense(tmp_path)), "--device", "cpu", "--profile", "none"]
    assert generate.main([*command, "--json", "--quantize", "int4", "--max-batch", "2"]) == 0
    first, *others = json.loads(capsys.readouterr().out)
    assert first["weights_as"] == "int4" and [plan["weights_as"] for plan in others] == ["float32", "int8"]
    assert first["total"] == MemoryPlan(**{k: v for k, v in first.items() if k != "total"}).total
    assert generate.main([*command, "--memory-gb", "0.0001"]) == 1
    shown = capsys.readouterr().out
    assert "int8" in shown and "no" in shown and "cache" in shown
    assert serve.main([*command, "--memory-gb", "0.0001"]) == 1 and capsys.readouterr().out == shown
