"""Hard rules end to end: when an engine drafts, and the reason in its statistics where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfspec import Engine, Rules
from tests.engines import SAMPLE, prompts, stats_of
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine.from_model(model)


DRAFTING = {"exit_layer": 2, "plan": "chain:2"}


@pytest.mark.filterwarnings("ignore:drafting only")
class TestRules:
    @pytest.mark.parametrize(
        ("kwargs", "reason"),
        [
            ({}, "no_profile"),
            ({"speculative_decoding": True}, "no_profile"),
            ({"speculative_decoding": False}, "request"),
            ({**DRAFTING, "speculative_decoding": False}, "request"),
            ({"plan": "none"}, "request"),
            ({"plan": "none", "speculative_decoding": "force"}, "request"),
            ({**DRAFTING, **SAMPLE, "temperature": 1.6}, "temperature"),
            ({**DRAFTING, **SAMPLE, "top_k": 201}, "top_k"),
            ({**DRAFTING, **SAMPLE, "top_k": 0, "temperature": 1.1}, "top_k"),
            ({**DRAFTING, "stateful_processors": True}, "processor"),
            ({**DRAFTING, "stateful_processors": True, "speculative_decoding": "force"}, "processor"),
            ({**DRAFTING, **SAMPLE, "temperature": 1.6, "speculative_decoding": False}, "request"),
            ({**SAMPLE, "temperature": 1.6}, "no_profile"),
        ],
        ids=lambda value: value if isinstance(value, str) else "+".join(map(str, value.values())) or "nothing",
    )
    def test_switched_off(self, engine, kwargs, reason):
        (stats,) = stats_of(engine, **kwargs)
        assert stats.disabled_reason == reason
        assert (stats.plan, stats.drafted, stats.accepted, stats.exit_layer) == ("none", 0, 0, None)
        assert (stats.cycles, stats.tokens_per_cycle, stats.accept_rate) == (4, 1.0, 0.0)

    @pytest.mark.parametrize(
        "kwargs",
        [
            DRAFTING,
            {**DRAFTING, "speculative_decoding": True},
            {**DRAFTING, **SAMPLE, "temperature": 1.5},
            {**DRAFTING, **SAMPLE, "top_k": 200},
            {**DRAFTING, **SAMPLE, "top_k": 0, "temperature": 1.0},
            {**DRAFTING, "temperature": 1.6},
            {**DRAFTING, "top_k": 500},
            {**DRAFTING, **SAMPLE, "temperature": 1.6, "speculative_decoding": "force"},
            {**DRAFTING, **SAMPLE, "top_k": 500, "speculative_decoding": "force"},
        ],
        ids=lambda value: "+".join(map(str, value.values())),
    )
    def test_left_on(self, engine, kwargs):
        (stats,) = stats_of(engine, **kwargs)
        assert stats.disabled_reason is None
        assert (stats.plan, stats.exit_layer) == ("chain:2", 2)
        assert stats.drafted > 0

    def test_a_request_may_bring_its_own_rules(self, engine):
        kwargs = {**DRAFTING, **SAMPLE, "temperature": 0.9}
        assert stats_of(engine, **kwargs)[0].disabled_reason is None
        assert stats_of(engine, **kwargs, rules=Rules(max_temperature=0.5))[0].disabled_reason == "temperature"

    def test_an_engine_may_have_its_own_rules(self, model):
        strict = Engine.from_model(model, rules=Rules(max_batch=1))
        assert stats_of(strict, **DRAFTING)[0].disabled_reason is None
        assert {stats.disabled_reason for stats in stats_of(strict, prompts(2), **DRAFTING)} == {"batch"}
        assert {stats.disabled_reason for stats in stats_of(strict, prompts(2), **DRAFTING, rules=Rules())} == {None}

    @pytest.mark.parametrize(("rows", "plan"), [(4, "tree:2,2"), (5, "chain:2"), (16, "chain:2"), (17, "none")])
    def test_a_larger_batch_narrows_an_explicit_tree(self, engine, rows, plan):
        every = stats_of(engine, prompts(rows), exit_layer=2, plan="tree:2,2", max_new_tokens=6)
        assert {stats.plan for stats in every} == {plan}
        assert {stats.disabled_reason for stats in every} == {"batch" if rows > 16 else None}

    def test_force_ignores_the_batch(self, engine):
        every = stats_of(
            engine, prompts(17), exit_layer=2, plan="tree:2,2", max_new_tokens=6, speculative_decoding="force"
        )
        assert {(stats.plan, stats.disabled_reason) for stats in every} == {("tree:2,2", None)}

    @pytest.mark.parametrize(("rows", "plan"), [(1, "tree:4,2,2,1"), (4, "tree:4,2,2,1"), (5, "chain:4")])
    def test_an_exit_without_a_plan_gets_the_default_for_its_batch(self, engine, rows, plan):
        every = stats_of(engine, prompts(rows), exit_layer=2, max_new_tokens=24)
        assert {stats.plan for stats in every} == {plan}

    @pytest.mark.parametrize(("layers", "expected"), [(2, 1), (4, 1), (8, 2)])
    def test_a_plan_without_an_exit_drafts_with_a_quarter_of_the_layers(self, layers, expected):
        engine = Engine.from_model(tiny_model("llama", num_hidden_layers=layers))
        assert stats_of(engine, plan="chain:1")[0].exit_layer == expected
        assert stats_of(engine, speculative_decoding="force")[0].exit_layer == expected

    def test_speculation_returns_when_the_batch_has_shrunk(self, engine):
        """17 rows decode plainly; one ends after 3 tokens, and the other 16 draft from there on."""
        ids = prompts(17)
        first = ids[0].tolist()

        def ends_the_first_row(prefix: torch.Tensor, _: Any) -> torch.Tensor:
            return torch.tensor([prefix[0, :3].tolist() == first and prefix.shape[1] >= 6])

        settings = {"max_new_tokens": 20, "stopping_criteria": [ends_the_first_row]}
        stopped, *others = stats_of(engine, ids, **settings, **DRAFTING)
        assert (stopped.new_tokens, stopped.cycles, stopped.drafted) == (3, 3, 0)
        assert {stats.disabled_reason for stats in (stopped, *others)} == {"batch"}, "the first reason stays"
        assert all(stats.drafted > 0 for stats in others)
        assert {stats.plan for stats in others} == {"chain:2"}, "the most used plan"

    def test_rows_of_a_shrinking_batch_keep_their_tokens(self, engine, model):
        ids = prompts(17)
        ends = {"eos_token_id": list(range(40, 60)), "pad_token_id": 0, "max_new_tokens": 12}
        ours = engine.generate(ids, attention_mask=torch.ones_like(ids), **ends, **DRAFTING)
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **ends)
        assert ours.tolist() == theirs.tolist()


class TestStats:
    def test_they_add_up(self, engine):
        (stats,) = stats_of(engine, plan="tree:3,2", exit_layer=3, max_new_tokens=40, speculative_decoding="force")
        assert stats.new_tokens == 40
        assert stats.new_tokens == stats.cycles + stats.accepted
        assert stats.tokens_per_cycle == stats.new_tokens / stats.cycles
        assert 0 < stats.accept_rate < 1
        assert stats.accepted <= 2 * stats.cycles <= stats.drafted <= 9 * stats.cycles
        assert stats.elapsed_s > 0

    def test_plain_decoding_takes_a_step_for_every_token(self, engine):
        (stats,) = stats_of(engine, speculative_decoding=False, max_new_tokens=7)
        assert (stats.new_tokens, stats.cycles, stats.drafted, stats.finish_reason) == (7, 7, 0, "length")
