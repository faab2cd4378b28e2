"""`generate` reads a request as transformers does: the same source of a setting wins, and the same tensor is returned.

The expected tensors are those of transformers' `generate` on tiny float64 models, where no rounding tie can hide or
cause a failure.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from selfspec import Engine, GenerateOutput
from tests.tiny import VOCABULARY, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

PROMPT = torch.tensor([[1, 5, 9, 33]])
PADDED = torch.tensor([[0, 0, 0, 17, 44], [8, 21, 60, 4, 90], [0, 0, 7, 12, 3]])
MASK = PADDED.ne(0).long()
ENDS = [81, 13, 24, 6]  # tokens that end the prompts' greedy sequences, each at another new token

pytestmark = pytest.mark.filterwarnings("ignore")  # both engines warn about profiles, lengths and flags


@cache
def two_layers(**config: Any) -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None, pad_token_id=None, num_hidden_layers=2, **config)


def pair(model_config: dict[str, Any] | None = None, **config: Any) -> tuple[PreTrainedModel, Engine]:
    """A transformers model and an engine on its weights, with these entries in the model's generation config."""
    model = two_layers(**config)
    model.generation_config = GenerationConfig(**(model_config or {}))
    return model, Engine.from_model(model)


def assert_same(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert theirs.dtype == ours.dtype
    assert theirs.tolist() == ours.tolist()


# The model's generation config, the GenerationConfig passed to the call, and the keyword arguments.
SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]] = {
    "nothing-said": ({}, None, {}),
    "model-only": ({"max_new_tokens": 3}, None, {}),
    "config-over-model": ({"max_new_tokens": 3}, {"max_new_tokens": 5}, {}),
    "kwargs-over-model": ({"max_new_tokens": 3}, None, {"max_new_tokens": 7}),
    "kwargs-over-config-over-model": ({"max_new_tokens": 3}, {"max_new_tokens": 5}, {"max_new_tokens": 7}),
    "config-without-the-entry-inherits-it": ({"max_new_tokens": 3}, {"repetition_penalty": 1.5}, {}),
    "entries-from-all-three": (
        {"eos_token_id": ENDS, "pad_token_id": 0},
        {"repetition_penalty": 1.5},
        {"max_new_tokens": 11},
    ),
    "kwarg-none-takes-an-entry-back": ({"max_new_tokens": 3}, None, {"max_new_tokens": None, "max_length": 30}),
    "max_new_tokens-beats-max_length": ({}, None, {"max_new_tokens": 4, "max_length": 9}),
    "model's-max_new_tokens-beats-max_length": ({"max_new_tokens": 6}, None, {"max_length": 30}),
    "max_new_tokens-beats-model's-max_length": ({"max_length": 8}, None, {"max_new_tokens": 6}),
    "config's-max_length-beats-model's": ({"max_length": 8}, {"max_length": 10}, {}),
    "model's-end": ({"eos_token_id": ENDS}, None, {}),
    "end-of-kwargs-replaces-model's": ({"eos_token_id": ENDS}, None, {"eos_token_id": 43}),
    "end-of-kwargs-none-switches-it-off": ({"eos_token_id": ENDS}, None, {"eos_token_id": None}),
    "end-of-config-none-inherits-model's": ({"eos_token_id": ENDS}, {"eos_token_id": None}, {}),
    "model's-penalty": ({"repetition_penalty": 1.7}, None, {}),
    "penalty-of-kwargs-replaces-model's": ({"repetition_penalty": 1.7}, None, {"repetition_penalty": 1.1}),
    "min_new_tokens": ({"eos_token_id": ENDS}, None, {"min_new_tokens": 9}),
    "model's-min_new_tokens": ({"eos_token_id": ENDS, "min_new_tokens": 9}, None, {}),
}


def test_an_entry_of_the_models_config_that_is_no_field_of_transformers_is_ignored():
    """As in transformers; the same entry from a caller is refused (test_bad_input)."""
    model, engine = pair({"chat_format": "chatml"})
    settings = {"max_new_tokens": 6, "do_sample": False}
    ids = torch.tensor([[5, 9, 33]])
    assert_same(model.generate(ids, **settings), engine.generate(ids, speculative_decoding=False, **settings))


def test_a_processor_replaces_the_setting_of_its_type():
    model, engine = pair()
    ids = torch.tensor([[5, 9, 33, 7]])

    def settings() -> dict[str, Any]:
        own = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.02)])
        return {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.9, "logits_processor": own}

    ours = engine.generate(ids, plan="chain:2", exit_layer=1, **settings())
    assert_same(model.generate(ids, **settings()), ours)
    assert not torch.equal(ours, model.generate(ids, **{**settings(), "logits_processor": None}))


# Options that change the greedy choice; words and biases name tokens that are generated without them.
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "min_length": {"min_length": 12},
    "min_length-counts-the-prompt": {"min_length": 3},
    "min_length-without-an-end": {"min_length": 12, "eos_token_id": None},
    "min_new_tokens": {"min_new_tokens": 9},
    "min_new_tokens-beats-min_length": {"min_new_tokens": 2, "min_length": 14},
    "bad_words_ids": {"bad_words_ids": [[37], [30], [83]]},
    "bad_words_ids-spare-the-ends": {"bad_words_ids": [[end] for end in ENDS]},
    "longer-bad_words_ids": {"bad_words_ids": [[37, 37], [68], [30, 40, 68], [16, 68]]},
    "suppress_tokens": {"suppress_tokens": [37, 30, 83]},
    "suppressed-end": {"suppress_tokens": ENDS},
    "sequence_bias": {"sequence_bias": {(37,): -6.0, (40,): 3.5}},
    "sequence_bias-as-lists": {"sequence_bias": [[[37], -6.0], [[40], 3.5]]},
    "longer-sequence_bias": {"sequence_bias": {(37,): -2.0, (30, 40): -9.0, (83, 16): -9.0}},
}
OPTIONS["all"] = {
    "repetition_penalty": 1.2,
    "min_length": 11,
    "bad_words_ids": [[30, 40], [16]],
    "suppress_tokens": [68],
    "sequence_bias": {(37,): -2.0, (25, 30): -9.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_greedy_tokens_of_every_option_are_those_of_transformers(options):
    model, engine = pair({"eos_token_id": ENDS, "pad_token_id": 0})
    inputs = {"input_ids": PADDED, "attention_mask": MASK, "max_new_tokens": 14}
    drafted = {"speculative_decoding": "force", "plan": "tree:3,2", "exit_layer": 1}
    assert_same(model.generate(**inputs, **options), engine.generate(**inputs, **options, **drafted))


def test_every_option_changes_some_tokens():
    """Otherwise the test above could not fail."""
    _, engine = pair({"eos_token_id": ENDS, "pad_token_id": 0})
    plain = engine.generate(PADDED, MASK, max_new_tokens=14).tolist()
    same = [
        name
        for name, options in OPTIONS.items()
        if engine.generate(PADDED, MASK, max_new_tokens=14, **options).tolist() == plain
    ]
    assert same == [
        "min_length-counts-the-prompt",
        "min_new_tokens-beats-min_length",
        "bad_words_ids-spare-the-ends",
    ]


class TestOwnOptions:
    """Options that transformers does not have."""

    def tokens(self, **options: Any) -> list[int]:
        _, engine = pair({"eos_token_id": ENDS})
        return engine.generate(PROMPT, max_new_tokens=20, **options)[0, PROMPT.shape[1] :].tolist()

    @pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 2}], ids=["greedy", "sampled"])
    def test_drafting_changes_no_token(self, sampling):
        options = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {7: 4.0, 30: -2.0}, **sampling}
        options |= {"allowed_token_ids": range(60), "stop_token_ids": [7], "min_new_tokens": 8}
        drafted = {"speculative_decoding": "force", "exit_layer": 1}
        plain = self.tokens(**options)
        for plan in ("chain:3", "tree:3,2"):
            assert self.tokens(**options, **drafted, plan=plan) == plain

    def test_logit_bias_is_a_sequence_bias_of_single_tokens(self):
        bias = dict.fromkeys(self.tokens()[:3], -6.0)
        biased = self.tokens(sequence_bias={(token,): value for token, value in bias.items()})
        assert self.tokens(logit_bias=bias) == biased != self.tokens()

    def test_logit_and_sequence_bias_add_up(self):
        first = self.tokens()[0]
        expected = self.tokens(logit_bias={first: -6.0})
        assert self.tokens(logit_bias={first: -2.0}, sequence_bias={(first,): -4.0}) == expected

    def test_only_allowed_tokens_are_generated(self):
        assert set(self.tokens(allowed_token_ids=range(40, 44))) <= {40, 41, 42, 43}

    def test_a_stop_token_ends_the_sequence_in_addition_to_end_tokens(self):
        tokens = self.tokens(eos_token_id=None)
        assert self.tokens(stop_token_ids=[tokens[2]]) == tokens[: tokens.index(tokens[2]) + 1]
        assert self.tokens(stop_token_ids=[100]) == self.tokens()

    def test_a_very_large_presence_penalty_prevents_every_repetition(self):
        tokens = self.tokens(eos_token_id=None, presence_penalty=1e6)
        assert len(set(tokens)) == len(tokens) == 20

    def test_a_very_negative_frequency_penalty_repeats_one_token(self):
        tokens = self.tokens(eos_token_id=None, frequency_penalty=-1e6)
        assert tokens == tokens[:1] * 20


def test_a_minimum_length_bans_the_end_tokens_of_the_settings_and_not_those_of_a_criterion():
    """As in transformers."""
    model, engine = pair({"eos_token_id": ENDS, "pad_token_id": 0})
    own = {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria([29])]), "min_length": 14, "max_new_tokens": 16}
    for prompt in PADDED[1:2], PROMPT:
        assert_same(model.generate(prompt, **own), engine.generate(prompt, **own))


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES.keys())
def test_the_same_source_wins_as_in_transformers(sources):
    in_model, in_config, kwargs = sources
    model, engine = pair(in_model)
    config = None if in_config is None else GenerationConfig(**in_config)
    theirs = model.generate(PROMPT, generation_config=config, **kwargs)
    assert_same(theirs, engine.generate(PROMPT, generation_config=config, **kwargs))


def test_different_sources_give_different_tokens():
    """Otherwise the test above could not fail."""
    _, engine = pair()
    with_penalty = engine.generate(PROMPT, repetition_penalty=1.7).tolist()
    outputs = {str(engine.generate(PROMPT, **kwargs).tolist()) for _, _, kwargs in SOURCES.values()}
    outputs |= {str(with_penalty), str(engine.generate(PROMPT, eos_token_id=ENDS).tolist())}
    assert len(outputs) >= 8


def test_a_callers_config_is_left_as_it_was():
    _, engine = pair({"max_new_tokens": 3})
    config = GenerationConfig(repetition_penalty=1.5)
    before = config.to_dict()
    engine.generate(PROMPT, generation_config=config, max_new_tokens=2)
    assert config.to_dict() == before
    assert engine.generation_config.max_new_tokens == 3


def test_without_any_length_twenty_tokens_are_generated():
    model, engine = pair()
    assert engine.generate(PROMPT).shape[1] == PROMPT.shape[1] + 20
    assert_same(model.generate(PROMPT), engine.generate(PROMPT))


def test_the_default_length_stops_at_the_context():
    model, engine = pair(max_position_embeddings=16)
    assert_same(model.generate(PROMPT), engine.generate(PROMPT))
    assert engine.generate(PROMPT).shape[1] == 16


def test_max_length_counts_the_padding():
    model, engine = pair()
    inputs = {"input_ids": PADDED, "attention_mask": MASK, "max_length": 12}
    assert_same(model.generate(**inputs), engine.generate(**inputs))
    assert engine.generate(**inputs).shape[1] == 12


HARMLESS: dict[str, dict[str, Any]] = {
    "use_cache": {"use_cache": True},
    "no-cache": {"use_cache": False},
    "one-beam": {"num_beams": 1, "early_stopping": True, "length_penalty": 2.0},
    "bos": {"bos_token_id": 1},
    "cache_implementation": {"cache_implementation": "static"},
    "nothing-forbidden": {"bad_words_ids": None, "suppress_tokens": None, "no_repeat_ngram_size": 0},
    "no-outputs": {"output_scores": False, "output_attentions": False, "output_hidden_states": False},
    "outputs-that-are-not-returned": {"output_scores": True, "output_logits": True, "output_attentions": True},
    "assistant-defaults": {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4},
    "neutral-warpers": {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0},
    "sampling-settings-while-greedy": {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    "temperature-0-while-greedy": {"do_sample": False, "temperature": 0.0},
    "sampling-settings-taken-back": {"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
}


@pytest.mark.parametrize("entries", HARMLESS.values(), ids=HARMLESS.keys())
def test_arguments_that_cannot_change_greedy_tokens_are_accepted(entries):
    _, engine = pair()
    plain = engine.generate(PROMPT, max_new_tokens=6)
    assert_same(plain, engine.generate(PROMPT, max_new_tokens=6, **entries))


@pytest.mark.parametrize("where", ["model", "config"])
def test_entries_of_configs_that_cannot_change_greedy_tokens_are_accepted(where):
    plain = pair()[1].generate(PROMPT, max_new_tokens=6)
    entries = {name: value for of_case in HARMLESS.values() for name, value in of_case.items()}
    _, engine = pair(entries if where == "model" else {})
    config = GenerationConfig(**entries) if where == "config" else None
    assert_same(plain, engine.generate(PROMPT, generation_config=config, max_new_tokens=6))


def test_inputs_is_another_name_for_input_ids():
    model, engine = pair()
    assert_same(model.generate(inputs=PROMPT, max_new_tokens=4), engine.generate(inputs=PROMPT, max_new_tokens=4))


def test_a_tokenizer_may_be_passed_with_stop_strings():
    """This engine has no tokenizer."""
    model, engine = pair({"eos_token_id": 2})
    tokenizer = tiny_tokenizer()
    token = model.generate(PROMPT, max_new_tokens=9)[0, -1]
    settings = {"max_new_tokens": 20, "tokenizer": tokenizer, "stop_strings": [tokenizer.decode(token)]}
    ours = engine.generate(PROMPT, **settings)
    assert_same(model.generate(PROMPT, **settings), ours)
    assert ours.shape[1] < PROMPT.shape[1] + 20
    assert_same(model.generate(PROMPT, tokenizer=tokenizer), engine.generate(PROMPT, tokenizer=tokenizer))


@pytest.mark.parametrize("number", [np.int64, torch.tensor], ids=lambda number: number.__name__)
def test_integers_of_numpy_and_torch_are_accepted(number):
    _, engine = pair()
    said = {"max_new_tokens": 5, "num_return_sequences": 2, "seed": 7, "top_k": 9, "eos_token_id": 6}
    settings = {"do_sample": True, "temperature": np.float32(0.5)}
    assert_same(
        engine.generate(PROMPT, **settings, **said),
        engine.generate(PROMPT, **settings, **{name: number(value) for name, value in said.items()}),
    )
    two = torch.cat((PROMPT, PROMPT))
    assert_same(
        engine.generate(two, seed=7, do_sample=True, max_new_tokens=3),
        engine.generate(two, seed=number(7), do_sample=True, max_new_tokens=3),
    )


@pytest.mark.parametrize("pad", [0, 99])
def test_finished_sequences_are_padded_to_the_longest(pad):
    model, engine = pair({"eos_token_id": ENDS, "pad_token_id": pad})
    inputs = {"input_ids": PADDED, "attention_mask": MASK, "max_new_tokens": 15}
    theirs = model.generate(**inputs)
    lengths = [tokens.ne(pad).sum().item() for tokens in theirs[:, PADDED.shape[1] :]]
    assert len(set(lengths)) == 3, "the sequences must end at different tokens, or no padding is tested"
    assert_same(theirs, engine.generate(**inputs, speculative_decoding="force", plan="tree:3,2"))


def test_the_tensor_is_as_wide_as_its_longest_sequence():
    _, engine = pair({"eos_token_id": ENDS, "pad_token_id": 0})
    out = engine.generate(PADDED, MASK, max_new_tokens=200)
    assert out.shape[1] < PADDED.shape[1] + 200
    assert out[:, -1].ne(0).any()


def test_without_a_pad_token_sequences_are_padded_with_the_first_end_token():
    model, engine = pair({"eos_token_id": ENDS})
    inputs = {"input_ids": PADDED, "attention_mask": MASK, "max_new_tokens": 15}
    theirs = model.generate(**inputs)
    assert (theirs[:, -1] == ENDS[0]).any()
    assert_same(theirs, engine.generate(**inputs))


MASK_CASES: dict[str, dict[str, Any]] = {
    "pad-known": {"pad_token_id": 0},
    "pad-known-other-end": {"pad_token_id": 0, "eos_token_id": 2},
    "pad-is-the-end": {"pad_token_id": 0, "eos_token_id": 0},
    "pad-is-one-of-the-ends": {"pad_token_id": 0, "eos_token_id": [2, 0]},
    "no-pad-but-an-end-of-that-value": {"eos_token_id": 0},
    "no-pad-no-end": {},
    "pad-of-another-value": {"pad_token_id": 99},
}


@pytest.mark.parametrize("tokens", MASK_CASES.values(), ids=MASK_CASES.keys())
def test_a_missing_mask_is_inferred_exactly_when_transformers_infers_it(tokens):
    model, engine = pair(tokens)
    assert_same(model.generate(PADDED, max_new_tokens=8), engine.generate(PADDED, max_new_tokens=8))


def test_an_inferred_mask_changes_the_tokens():
    """Otherwise the test above could not fail."""
    _, engine = pair()
    as_padding = engine.generate(PADDED, pad_token_id=0, max_new_tokens=8)
    as_tokens = engine.generate(PADDED, max_new_tokens=8)
    assert as_padding.tolist() != as_tokens.tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_may_have_any_dtype(dtype):
    model, engine = pair()
    inputs = {"input_ids": PADDED, "max_new_tokens": 5}
    assert_same(model.generate(attention_mask=MASK, **inputs), engine.generate(attention_mask=MASK.to(dtype), **inputs))


def test_the_prompts_are_not_changed_and_begin_the_returned_tensor():
    _, engine = pair()
    ids, mask = PADDED.clone(), MASK.clone()
    out = engine.generate(ids, mask, max_new_tokens=4)
    assert ids.tolist() == PADDED.tolist() and mask.tolist() == MASK.tolist()
    assert out[:, : PADDED.shape[1]].tolist() == PADDED.tolist()


def test_processors_may_return_half_precision():
    _, engine = pair()

    def halved(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.half()

    options = {"max_new_tokens": 12, "do_sample": True, "seed": 3}
    expected = engine.generate(PROMPT, **options, logits_processor=[lambda tokens, scores: scores.half().to(scores)])
    drafted = {"plan": "tree:3,2", "exit_layer": 1, "speculative_decoding": "force"}
    assert_same(expected, engine.generate(PROMPT, **options, logits_processor=[halved], **drafted))


def test_autocast_changes_no_token():
    """A processor may compute in 16 bits under autocast; the model does not."""
    model = tiny_model("llama", torch.float32, num_hidden_layers=2, eos_token_id=None)
    engine = Engine.from_model(model)
    mix = torch.eye(VOCABULARY) + 0.01
    options = {"max_new_tokens": 12, "logits_processor": [lambda tokens, scores: (scores @ mix).to(torch.bfloat16)]}
    expected = engine.generate(PROMPT, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(expected, engine.generate(PROMPT, plan="chain:2", exit_layer=1, **options))


class TestCompletions:
    def test_an_empty_list_of_prompts_gives_an_empty_list_of_completions(self):
        assert Engine.from_model(two_layers(), tokenizer=tiny_tokenizer()).complete([]) == []

    def test_messages_of_text_parts_are_messages(self):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}"
        engine = Engine.from_model(two_layers(), tokenizer=tokenizer)
        parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
        tokens = [
            engine.complete([{"role": "user", "content": content}], max_new_tokens=5).tokens
            for content in (parts, "one two", "one")
        ]
        assert tokens[0] == tokens[1] != tokens[2]

    def test_complete_refuses_token_ids(self):
        engine = Engine.from_model(two_layers(), tokenizer=tiny_tokenizer())
        with pytest.raises(ValueError, match="inputs goes with generate"):
            engine.complete("a", inputs=PROMPT)


class TestReturnDict:
    def test_its_sequences_are_the_tensor_that_is_returned_without_it(self):
        _, engine = pair({"eos_token_id": ENDS, "pad_token_id": 0})
        inputs = {"input_ids": PADDED, "attention_mask": MASK, "max_new_tokens": 15}
        out = engine.generate(**inputs, return_dict_in_generate=True)
        assert isinstance(out, GenerateOutput)
        assert_same(engine.generate(**inputs), out.sequences)

    def test_there_are_statistics_for_every_sequence(self):
        _, engine = pair({"eos_token_id": ENDS, "pad_token_id": 0})
        out = engine.generate(PADDED, MASK, max_new_tokens=15, return_dict_in_generate=True)
        new = out.sequences[:, PADDED.shape[1] :]
        assert [stats.new_tokens for stats in out.stats] == new.ne(0).sum(1).tolist()
        assert [stats.finish_reason for stats in out.stats] == [
            "stop" if tokens[count - 1] in ENDS else "length"
            for tokens, count in zip(new.tolist(), new.ne(0).sum(1).tolist(), strict=True)
        ]

    def test_there_are_statistics_for_every_sequence_of_a_prompt(self):
        _, engine = pair()
        out = engine.generate(
            PADDED, MASK, do_sample=True, num_return_sequences=2, max_new_tokens=3, return_dict_in_generate=True
        )
        assert len(out.stats) == len(out.sequences) == 6

    def test_a_generation_config_may_ask_for_it(self):
        _, engine = pair()
        out = engine.generate(PROMPT, generation_config=GenerationConfig(return_dict_in_generate=True))
        assert isinstance(out, GenerateOutput)


class TestSeveralSequencesPerPrompt:
    settings = {"do_sample": True, "max_new_tokens": 8}

    def test_the_sequences_of_a_prompt_are_adjacent(self):
        _, engine = pair()
        out = engine.generate(PADDED, MASK, num_return_sequences=3, seed=1, **self.settings)
        prompts = out[:, : PADDED.shape[1]]
        assert prompts.tolist() == [PADDED[row].tolist() for row in (0, 0, 0, 1, 1, 1, 2, 2, 2)]

    def test_all_sequences_of_a_prompt_draw_with_its_seed(self):
        _, engine = pair()
        together = engine.generate(PADDED, MASK, num_return_sequences=2, seed=[3, 4, 5], **self.settings)
        for row, seed in enumerate((3, 4, 5)):
            alone = engine.generate(
                PADDED[row : row + 1], MASK[row : row + 1], num_return_sequences=2, seed=seed, **self.settings
            )
            assert together[2 * row : 2 * row + 2].tolist() == alone.tolist()

    def test_they_differ_and_the_first_one_does_not_depend_on_their_number(self):
        _, engine = pair()
        several = engine.generate(PROMPT, num_return_sequences=4, seed=1, **self.settings).tolist()
        assert several[:1] == engine.generate(PROMPT, seed=1, **self.settings).tolist()
        assert len({tuple(tokens) for tokens in several}) == 4

    def test_they_are_padded_to_the_longest(self):
        _, engine = pair({"eos_token_id": ENDS, "pad_token_id": 0})
        out = engine.generate(
            PROMPT, num_return_sequences=6, seed=2, do_sample=True, max_new_tokens=30, return_dict_in_generate=True
        )
        lengths = [stats.new_tokens for stats in out.stats]
        assert len(set(lengths)) > 1
        assert out.sequences.shape == (6, PROMPT.shape[1] + max(lengths))
        for tokens, length in zip(out.sequences.tolist(), lengths, strict=True):
            assert not any(tokens[PROMPT.shape[1] + length :])


class TestSeeds:
    settings = {"do_sample": True, "max_new_tokens": 10}

    def draw(self, engine: Engine, ids: torch.Tensor = PROMPT, **kwargs: Any) -> list[list[int]]:
        return engine.generate(ids, **{**self.settings, **kwargs}).tolist()

    def test_a_seed_fixes_the_tokens(self):
        _, engine = pair()
        assert self.draw(engine, seed=7) == self.draw(engine, seed=7)

    @pytest.mark.parametrize("other", [8, -7, 7 + 2**32], ids=["next", "negative", "high-word"])
    def test_another_seed_gives_other_tokens(self, other):
        _, engine = pair()
        assert self.draw(engine, seed=7) != self.draw(engine, seed=other)

    @pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1], ids=["least", "greatest"])
    def test_the_smallest_and_the_largest_seed_are_accepted_in_any_form(self, seed):
        _, engine = pair()
        assert (
            self.draw(engine, seed=seed)
            == self.draw(engine, seed=[seed])
            == self.draw(engine, seed=torch.tensor([seed]))
        )

    def test_without_a_seed_torchs_generator_fixes_the_tokens(self):
        _, engine = pair()
        torch.manual_seed(5)
        first, second = self.draw(engine), self.draw(engine)
        torch.manual_seed(5)
        assert (first, second) == (self.draw(engine), self.draw(engine))
        assert first != second

    def test_without_a_seed_sequences_of_equal_prompts_differ(self):
        _, engine = pair()
        first, second = self.draw(engine, PROMPT.repeat(2, 1))
        assert first != second

    def test_one_seed_is_used_for_all_prompts(self):
        _, engine = pair()
        first, second = self.draw(engine, PROMPT.repeat(2, 1), seed=7)
        assert first == second == self.draw(engine, seed=7)[0]

    def test_greedy_decoding_neither_reads_a_seed_nor_torchs_generator(self):
        _, engine = pair()
        state = torch.get_rng_state()
        assert self.draw(engine, do_sample=False) == self.draw(engine, do_sample=False, seed=7)
        assert torch.equal(state, torch.get_rng_state())


class TestSamplingDefaults:
    """Compares tokens drawn with a default with those drawn with the same value passed: transformers' noise differs."""

    def same(self, left: dict[str, Any], right: dict[str, Any], model: dict[str, Any] | None = None) -> bool:
        _, engine = pair(model)
        prompts = torch.arange(1, 9)[:, None]
        outputs = [engine.generate(prompts, seed=3, max_new_tokens=12, **kwargs) for kwargs in (left, right)]
        return torch.equal(*outputs)

    def test_top_k_is_50_when_sampling(self):
        hot = {"do_sample": True, "temperature": 10.0}
        assert self.same(hot, {**hot, "top_k": 50})
        assert not self.same(hot, {**hot, "top_k": 45})
        assert not self.same(hot, {**hot, "top_k": 55})

    def test_top_k_none_switches_it_off(self):
        hot = {"do_sample": True, "temperature": 3.0}
        assert self.same({**hot, "top_k": None}, {**hot, "top_k": 0})

    def test_temperature_is_1(self):
        assert self.same({"do_sample": True}, {"do_sample": True, "temperature": 1.0})
        assert not self.same({"do_sample": True}, {"do_sample": True, "temperature": 1.2})

    def test_a_models_generation_config_can_ask_for_sampling(self):
        said = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.8}
        assert self.same({}, said, model=said)
        assert not self.same({}, {"do_sample": False}, model=said)

    def test_do_sample_false_overrides_a_sampling_model(self):
        model, engine = pair({"do_sample": True, "temperature": 0.7, "top_p": 0.8})
        assert_same(model.generate(PROMPT, do_sample=False), engine.generate(PROMPT, do_sample=False))
