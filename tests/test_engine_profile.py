"""Profiles in an engine: the exit and plan they choose by batch, temperature and device, and how they are found."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfspec import Engine, Profile
from selfspec.profiles.profile import Device, DomainChoice, PlanChoice, Run
from tests.engines import PROMPT, SAMPLE, prompts, save_profile, stats_of
from tests.profiles import choice_of, edit_profile, profile_of, random_exit
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def answer(model) -> list[list[int]]:
    return model.generate(PROMPT, max_new_tokens=4).tolist()


@pytest.fixture(scope="module")
def profile_folder(model, tmp_path_factory) -> Path:
    return save_profile(model, tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def profiled(model, profile_folder) -> Engine:
    return Engine.from_model(model, profile=profile_folder)


class TestProfile:
    """A profile makes speculation the default; a request may overrule it."""

    @pytest.mark.parametrize(
        ("kwargs", "exit_layer", "plan"),
        [
            ({}, 2, "chain:3"),
            ({"speculative_decoding": True}, 2, "chain:3"),
            ({"speculative_decoding": "force"}, 2, "chain:3"),
            ({"domain": "auto"}, 2, "chain:3"),
            ({"domain": "chat"}, 2, "chain:3"),
            ({"domain": "code"}, 3, "tree:2,1"),
            ({"plan": "tree:3,1"}, 2, "tree:3,1"),
            ({"plan": "chain:1", "domain": "code"}, 3, "chain:1"),
            ({"exit_layer": 3, "plan": "chain:2"}, 3, "chain:2"),
            ({"exit_layer": 1}, 1, "tree:4,2,2,1"),
            ({"plan": "none"}, None, "none"),
            ({"speculative_decoding": False}, None, "none"),
        ],
        ids=lambda value: (
            str(value) if not isinstance(value, dict) else "+".join(map(str, value.values())) or "nothing"
        ),
    )
    def test_it_chooses_exit_and_plan(self, profiled, model, kwargs, exit_layer, plan):
        out = profiled.generate(PROMPT, max_new_tokens=24, return_dict_in_generate=True, **kwargs)
        assert (out.stats[0].exit_layer, out.stats[0].plan) == (exit_layer, plan)
        assert out.sequences.tolist() == model.generate(PROMPT, max_new_tokens=24).tolist()

    def test_it_silences_the_warning(self, profiled):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            profiled.generate(PROMPT, max_new_tokens=1)

    def test_the_rules_hold_for_it_too(self, profiled):
        assert stats_of(profiled, **SAMPLE, temperature=1.6)[0].disabled_reason == "temperature"
        assert stats_of(profiled, prompts(17))[0].disabled_reason == "batch"

    def test_it_may_be_given_loaded(self, model, profile_folder):
        engine = Engine.from_model(model, profile=Profile.load(profile_folder))
        assert stats_of(engine)[0].exit_layer == 2

    def test_a_trained_exit_is_used_and_changes_no_token(self, model, tmp_path):
        engine = Engine.from_model(model, profile=save_profile(model, tmp_path, block=True))
        out = engine.generate(PROMPT, max_new_tokens=24, return_dict_in_generate=True)
        raw = stats_of(Engine.from_model(model), max_new_tokens=24, exit_layer=2, plan="chain:3")[0]
        assert out.sequences.tolist() == model.generate(PROMPT, max_new_tokens=24).tolist()
        assert out.stats[0].cycles != raw.cycles, "a block drafts otherwise than none"

    def test_it_serves_the_same_weights_in_another_dtype(self, profile_folder):
        engine = Engine.from_model(tiny_model("llama", torch.bfloat16), profile=profile_folder)
        assert stats_of(engine)[0].exit_layer == 2


ELSEWHERE = Device(type="cuda", name="some GPU", dtype="bfloat16", torch="2.13.0")
HERE = Device(type="cpu", name="some CPU", dtype="float32", torch="2.13.0")


class TestPlans:
    """A profile's plans are for a batch and a temperature, and for the kind of device they were measured on."""

    @pytest.fixture
    def advised(self, model, tmp_path) -> Engine:
        by_batch = {"1": "none", "2-4": "tree:2,1", "5-16": "tree:3,1"}
        return Engine.from_model(model, profile=save_profile(model, tmp_path, block=True, plan=by_batch))

    @pytest.mark.parametrize(
        ("rows", "plan", "reason"),
        [
            (1, "none", "goodput"),
            (2, "tree:2,1", None),
            (4, "tree:2,1", None),
            (5, "chain:2", None),
            (16, "chain:2", None),
            (17, "none", "batch"),
        ],
    )
    def test_each_batch_has_its_own(self, advised, model, rows, plan, reason):
        ids = prompts(rows)
        out = advised.generate(ids, max_new_tokens=6, return_dict_in_generate=True)
        assert {(stats.changes[0].plan, stats.changes[0].reason) for stats in out.stats} == {(plan, reason)}
        assert out.sequences.tolist() == model.generate(ids, max_new_tokens=6).tolist()

    def test_a_batch_that_shrinks_takes_the_next(self, advised, model):
        """Two rows draft; one ends after 3 tokens, and the other goes on plainly."""
        ids = prompts(2)
        first = ids[0].tolist()

        def ends_the_first_row(prefix: torch.Tensor, _: Any) -> torch.Tensor:
            return torch.tensor([prefix[0, :3].tolist() == first and prefix.shape[1] >= 6])

        stopped, other = stats_of(advised, ids, max_new_tokens=24, stopping_criteria=[ends_the_first_row])
        assert (stopped.plan, stopped.disabled_reason) == ("tree:2,1", None)
        assert (other.plan, other.disabled_reason) == ("none", "goodput")
        assert 0 < other.drafted < other.cycles

    def test_a_forced_request_drafts_the_plan_that_was_measured_and_lost(self, model, tmp_path):
        lost = Run(plan="tree:2,1", tokens_per_cycle=1, accept_rate=0, tokens_per_second=1, plain_tokens_per_second=2)
        choice = DomainChoice(exit_layer=2, plans={"0": {"1": PlanChoice(plan="none", measured=lost)}})
        profile = profile_of(Engine.from_model(model).model, {"text": choice}, device=HERE)
        engine = Engine.from_model(
            model, profile=profile.save(tmp_path, [random_exit(Engine.from_model(model).model, 2)])
        )
        assert stats_of(engine)[0].disabled_reason == "goodput"
        assert stats_of(engine, speculative_decoding="force")[0].plan == "tree:2,1"

    @pytest.mark.parametrize(
        ("kwargs", "exit_layer", "plan", "reason"),
        [
            ({}, None, "none", "goodput"),
            ({"speculative_decoding": True}, None, "none", "goodput"),
            ({"speculative_decoding": False}, None, "none", "request"),
            ({"speculative_decoding": "force"}, 2, "tree:4,2,2,1", None),
            ({"plan": "chain:2"}, 2, "chain:2", None),
            ({"exit_layer": 1}, 1, "tree:4,2,2,1", None),
        ],
        ids=["default", "asked_for", "refused", "forced", "plan", "exit_layer"],
    )
    @pytest.mark.parametrize("why", ["plan_none", "another_device"])
    def test_where_no_plan_pays_only_a_request_that_asks_for_it_drafts(
        self, model, tmp_path, why, kwargs, exit_layer, plan, reason
    ):
        entries = {"plan": "none", "device": HERE} if why == "plan_none" else {"device": ELSEWHERE}
        engine = Engine.from_model(model, profile=save_profile(model, tmp_path, block=True, **entries))
        out = engine.generate(PROMPT, max_new_tokens=24, return_dict_in_generate=True, **kwargs)
        (stats,) = out.stats
        if why == "another_device" and kwargs == {"speculative_decoding": "force"}:
            plan = "chain:3"  # the profile's own: it was chosen elsewhere, but it was chosen
        assert (stats.exit_layer, stats.plan, stats.disabled_reason) == (exit_layer, plan, reason)
        assert (stats.drafted > 0) == (reason is None)
        assert out.sequences.tolist() == model.generate(PROMPT, max_new_tokens=24).tolist()

    @pytest.mark.parametrize("device", [None, HERE], ids=["nowhere", "here"])
    def test_measured_nowhere_or_on_this_kind_of_device_they_hold(self, model, tmp_path, device):
        engine = Engine.from_model(model, profile=save_profile(model, tmp_path, device=device))
        assert stats_of(engine, max_new_tokens=24)[0].plan == "chain:3"

    @pytest.mark.parametrize(
        ("sampling", "plan"),
        [
            ({"temperature": 0.9}, "chain:1"),
            ({**SAMPLE, "temperature": 0.2}, "chain:1"),
            ({**SAMPLE, "temperature": 0.5}, "chain:2"),
            ({**SAMPLE, "temperature": 0.84}, "chain:2"),
            ({**SAMPLE, "temperature": 0.86}, "chain:3"),
            ({**SAMPLE, "temperature": 1.5}, "chain:3"),
        ],
        ids=["greedy", "0.2", "0.5", "0.84", "0.86", "1.5"],
    )
    def test_the_nearest_temperature_has_its_own(self, model, sampling, plan):
        by_temperature = {"0": "chain:1", "0.7": "chain:2", "1": "chain:3"}
        plans = {name: {"1": PlanChoice(plan=plan)} for name, plan in by_temperature.items()}
        decoder = Engine.from_model(model).model
        profile = profile_of(decoder, {"chat": DomainChoice(exit_layer=2, plans=plans)})
        assert stats_of(Engine.from_model(model, profile=profile), max_new_tokens=24, **sampling)[0].plan == plan

    @pytest.mark.parametrize(
        "kwargs",
        [{"speculative_decoding": False}, {"plan": "none"}, {"stateful_processors": True}, {"domain": "code"}],
        ids=["request", "plan_none", "processor", "goodput"],
    )
    def test_a_request_that_never_drafts_reads_no_exit(self, model, answer, tmp_path, kwargs):
        folder = save_profile(model, tmp_path, block=True)
        (folder / "exits.safetensors").write_bytes(b"broken")
        domains = {"chat": choice_of(2, "chain:2"), "code": choice_of(3, "none")}
        edit_profile(folder, domains={name: choice.model_dump() for name, choice in domains.items()})
        engine = Engine.from_model(model, profile=folder)
        assert engine.generate(PROMPT, max_new_tokens=4, **kwargs).tolist() == answer
        with pytest.raises(ValueError, match="exits.safetensors.*python -m selfspec.calibrate"):
            engine.generate(PROMPT, max_new_tokens=4)


class TestAutomaticProfile:
    """profile='auto' looks under SELFSPEC_HOME."""

    @pytest.fixture
    def home(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))
        return tmp_path / "home" / "profiles"

    @pytest.fixture
    def folder(self, tmp_path, model) -> Path:
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def test_the_models_profile_is_found(self, home, model, folder):
        save_profile(model, home / "some-name")
        save_profile(tiny_model("llama", seed=1), home / "another-model's")
        engine = Engine.from_pretrained(folder, device="cpu")
        assert engine.profile.folder == home / "some-name"
        assert stats_of(engine)[0].exit_layer == 2

    @pytest.mark.filterwarnings("ignore:drafting only")
    @pytest.mark.parametrize("what", ["no-home", "another-model's", "broken"])
    def test_without_one_the_engine_decodes_plainly(self, home, folder, what):
        if what == "another-model's":
            save_profile(tiny_model("llama", seed=1), home / "other")
        if what == "broken":
            (home / "broken").mkdir(parents=True)
            (home / "broken" / "profile.json").write_text("{")
        engine = Engine.from_pretrained(folder, device="cpu")
        assert engine.profile is None
        assert stats_of(engine)[0].disabled_reason == "no_profile"

    def test_a_live_models_profile_is_found(self, home, model):
        save_profile(model, home / "some-name")
        assert Engine.from_model(model).profile.folder == home / "some-name"
        assert Engine.from_model(model, profile=None).profile is None

    def test_without_a_profile_none_is_searched(self, home, model, folder):
        save_profile(model, home / "some-name")
        assert Engine.from_pretrained(folder, device="cpu", profile=None).profile is None
