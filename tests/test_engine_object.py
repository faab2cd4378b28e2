"""An engine as a Python object: its representation, copies, log, and warnings about arguments without effect."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch

from selfspec import Engine, plan_memory
from selfspec.request import SUPPORTED
from selfspec.speculation.exit import Exit
from tests.profiles import choice_of, profile_of
from tests.tiny import tiny_model

PROMPT = torch.tensor([[1, 5, 9, 33]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("llama", torch.float32, eos_token_id=None).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(saved) -> Engine:
    return Engine.from_pretrained(saved, device="cpu", dtype="bfloat16", profile=None, kv_cache_gb=0.01)


def test_device_and_dtype_are_the_models(engine):
    assert (engine.device, engine.dtype) == (torch.device("cpu"), torch.bfloat16)


def test_the_representation_names_model_device_dtype_profile_and_memory(engine, saved, tmp_path):
    for part in (repr(str(saved)), "device='cpu'", "dtype=bfloat16", "profile=None", "kv_cache=0.01 GB"):
        assert part in repr(engine)
    profile_of(engine.model, {"chat": choice_of(2, "chain:2")}).save(tmp_path / "mine", [Exit(engine.model, 2)])
    assert "profile='mine'" in repr(Engine(engine.model, profile=tmp_path / "mine"))


def test_the_representation_of_a_live_model_names_its_class():
    assert repr(Engine.from_model(tiny_model("qwen2"))).startswith("Engine('Qwen2ForCausalLM', ")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_with_what_to_do_instead(engine, duplicate):
    with pytest.raises(TypeError, match="cannot be copied or pickled.*Threads may share one.*from_pretrained"):
        duplicate(engine)


def test_a_16_bit_model_on_a_cpu_is_warned_of_with_the_dtype_to_pass(saved):
    with pytest.warns(UserWarning, match="bfloat16 is several times slower .* dtype='float32'") as caught:
        Engine.from_pretrained(saved, device="cpu", dtype="bfloat16", profile=None, kv_cache_gb=0.01)
    assert caught[0].filename == __file__


def test_a_misspelt_argument_is_refused_with_those_that_it_is_close_to(engine):
    misspelt = {"temprature": "temperature", "logit_processor": "logits_processor", "exits_layer": "exit_layer"}
    misspelt |= {"stop": "stop_strings"}
    for given, meant in misspelt.items():
        with pytest.raises(ValueError, match=rf"no argument '{given}': did you mean .*\b{meant}\b"):
            engine.generate(PROMPT, **{given: 1})
    for load in (Engine.from_pretrained, Engine.from_model):
        with pytest.raises(ValueError, match="no argument 'profil': did you mean profile"):
            load("demo", profil=None)
    arguments = inspect.signature(Engine.generate).parameters.keys() - {"self", "generation_kwargs"}
    for unknown in ({"xyzzy": 1}, {"num_beams": 4}):
        with pytest.raises(ValueError, match="supported are max_new_tokens") as refused:
            engine.generate(PROMPT, **unknown)
        assert all(f" {name}" in str(refused.value) for name in arguments)


def test_the_page_of_the_python_api_names_every_argument():
    page = (Path(__file__).parent.parent / "docs/python.md").read_text(encoding="utf-8")
    calls = Engine.from_pretrained, Engine.from_model, Engine.generate, Engine.warmup, plan_memory
    named = {name for call in calls for name in inspect.signature(call).parameters} - {"self", "generation_kwargs"}
    assert not [name for name in sorted({*named, *SUPPORTED}) if not re.search(rf"\b{name}\b", page)]


def test_loading_is_logged_and_prints_nothing(saved, caplog, capsys):
    with caplog.at_level(logging.INFO, logger="selfspec"):
        Engine.from_pretrained(saved, device="cpu", profile=None, max_length=128, kv_cache_gb=0.01)
    model, profile, cache = (record.getMessage() for record in caplog.records if record.name.startswith("selfspec"))
    assert str(saved) in model and "float32 on cpu" in model
    assert profile.startswith("no profile")
    assert cache.startswith("KV cache: 0.01 GB for ") and cache.endswith("at most 128 in a sequence")
    assert capsys.readouterr() == ("", "")


class TestArgumentsThatGreedyDecodingIgnores:
    @pytest.mark.parametrize("ignored", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}], ids=str)
    def test_each_is_named_once(self, saved, ignored):
        engine = Engine.from_pretrained(saved, device="cpu", profile=None)
        (name,) = ignored
        with pytest.warns(UserWarning, match=f"{name}=.* has no effect: do_sample is False") as caught:
            engine.generate(PROMPT, max_new_tokens=1, speculative_decoding=False, **ignored)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.generate(PROMPT, max_new_tokens=1, speculative_decoding=False, **ignored)

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"temperature": 0.7, "do_sample": True},
            {"temperature": 0.0},
            {"temperature": 1.0, "top_p": 1.0, "top_k": 50},
        ],
        ids=["sampled", "temperature 0", "defaults"],
    )
    def test_sampling_and_values_that_change_nothing_give_no_warning(self, engine, kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.generate(PROMPT, max_new_tokens=1, speculative_decoding=False, **kwargs)
