"""Sequences end, and streams deliver text, as in transformers, also in the middle of an accepted path.

Most tests use a model that generates a fixed text and whose drafts are always right, so that an end token lies within a
path that would have been accepted whole.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)

from selfspec import Completion, Engine, GenerateOutput
from tests.scripted import endless, forced_text_model, left_padded, random_prompt
from tests.tiny import tiny_model
from tests.tiny_tokenizer import ids_of, spaced_tokenizer, tiny_tokenizer

TEXT = [*"bcd", "stop", *"eéfg", "STOPPED", *"h€", "the", *"i😀j", "two", *"k日lm"]
FORCED = ids_of(*TEXT)
PROMPTS = [ids_of("a"), ids_of("x", "y", "c"), ids_of("p", "q", "r", "s", "f")]  # each continues at another token
LIMIT = 14
UNSAID = ids_of("</s>")  # transformers pads finished sequences only if there is an end token; the model never says it
DEEP = "tree:4,2,2,1"

plans = pytest.mark.parametrize("plan", ["none", DEEP])


@cache
def forced_model() -> PreTrainedModel:
    return forced_text_model(FORCED)


@cache
def engine() -> Engine:
    return Engine.from_model(forced_model(), tokenizer=tiny_tokenizer())


@cache
def random_engine() -> Engine:
    """Generates random tokens, some of them bytes that are no UTF-8 characters."""
    return Engine.from_model(endless(tiny_model("llama")), tokenizer=tiny_tokenizer())


def from_transformers(prompts: list[list[int]], **settings: Any) -> torch.Tensor:
    ids, mask = left_padded(prompts)
    return forced_model().generate(ids, attention_mask=mask, do_sample=False, **settings)


def from_selfspec(prompts: list[list[int]], plan: str, of: Engine | None = None, **settings: Any) -> GenerateOutput:
    ids, mask = left_padded(prompts)
    output = (of or engine()).generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        plan=plan,
        exit_layer=1,
        speculative_decoding="force",
        return_dict_in_generate=True,
        **settings,
    )
    assert isinstance(output, GenerateOutput)
    return output


def reasons(output: GenerateOutput) -> list[str]:
    return [stats.finish_reason for stats in output.stats]


def test_the_model_writes_its_forced_text_and_accepts_whole_paths() -> None:
    output = from_selfspec(PROMPTS[:1], "chain:4", max_new_tokens=10)
    assert output.sequences[0].tolist() == PROMPTS[0] + FORCED[:10]
    assert (output.stats[0].cycles, output.stats[0].accepted) == (2, 8)


# Tokens and strings that end a sequence


ENDS: dict[str, dict[str, Any]] = {
    "eos": {"eos_token_id": ids_of("STOPPED")},
    "several_eos": {"eos_token_id": ids_of("é", "h", "two")},
    "eos_half_never_said": {"eos_token_id": ids_of("g", "Z")},
    "string_of_a_token": {"stop_strings": "stop"},
    "string_inside_a_token": {"stop_strings": "OPP"},
    "string_across_tokens": {"stop_strings": "dsto"},
    "string_from_inside_a_token_on": {"stop_strings": "PPEDh"},
    "several_strings": {"stop_strings": ["two", "zzz", "gS"]},
    "string_begun_in_the_prompt": {"stop_strings": "ab"},
    "string_never_said": {"stop_strings": "bd"},
}


@cache
def ended_by_transformers(name: str) -> torch.Tensor:
    settings = {"max_new_tokens": LIMIT, "eos_token_id": UNSAID, **ENDS[name]}
    return from_transformers(PROMPTS, tokenizer=tiny_tokenizer(), **settings)


@pytest.mark.parametrize(("name", "plan"), [("several_strings", "none"), *((name, DEEP) for name in ENDS)])
def test_sequences_end_at_the_token_at_which_transformers_ends_them(name: str, plan: str) -> None:
    output = from_selfspec(PROMPTS, plan, max_new_tokens=LIMIT, **ENDS[name])
    assert torch.equal(output.sequences, ended_by_transformers(name))


@pytest.mark.parametrize("index", [0, 3, 4, 5, 10])
def test_eos_ends_a_sequence_at_any_node_of_an_accepted_path(index: int) -> None:
    output = from_selfspec(PROMPTS[:1], "chain:4", eos_token_id=FORCED[index], max_new_tokens=LIMIT)
    assert output.sequences[0].tolist() == PROMPTS[0] + FORCED[: index + 1]
    assert reasons(output) == ["stop"]


def test_an_eos_as_the_last_allowed_token_gives_the_reason_stop() -> None:
    output = from_selfspec(PROMPTS[:1], DEEP, eos_token_id=FORCED[7], max_new_tokens=8)
    assert reasons(output) == ["stop"]


def test_a_stop_string_in_the_middle_of_a_path_gives_the_reason_stop() -> None:
    output = from_selfspec(PROMPTS[:1], DEEP, stop_strings="dsto", max_new_tokens=LIMIT)
    assert output.sequences[0].tolist() == PROMPTS[0] + ids_of("b", "c", "d", "stop")
    assert reasons(output) == ["stop"]


@plans
def test_each_sequence_has_its_own_finish_reason(plan: str) -> None:
    output = from_selfspec(PROMPTS, plan, eos_token_id=ids_of("STOPPED"), max_new_tokens=7)
    assert reasons(output) == ["length", "length", "stop"]
    assert [stats.new_tokens for stats in output.stats] == [7, 7, 2]


# Lengths


@pytest.mark.parametrize("limit", [1, 4, 5, 6, 12])
def test_max_new_tokens_is_never_exceeded(limit: int) -> None:
    output = from_selfspec(PROMPTS[:1], DEEP, max_new_tokens=limit)
    assert output.sequences[0].tolist() == PROMPTS[0] + FORCED[:limit]
    assert reasons(output) == ["length"]


@plans
def test_max_length_counts_the_padded_prompt_as_transformers_does(plan: str) -> None:
    output = from_selfspec(PROMPTS, plan, max_length=LIMIT)
    assert torch.equal(output.sequences, from_transformers(PROMPTS, max_length=LIMIT))
    assert output.sequences.shape == (3, LIMIT)
    assert reasons(output) == ["length"] * 3


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_without_a_length_twenty_tokens_follow_as_in_transformers() -> None:
    output = from_selfspec(PROMPTS, "chain:4")
    assert torch.equal(output.sequences, from_transformers(PROMPTS))


CONTEXT = 40


def small_engine(limited_by: str) -> Engine:
    if limited_by == "model":
        return Engine.from_model(endless(tiny_model("llama", max_position_embeddings=CONTEXT)))
    return Engine.from_model(endless(tiny_model("llama")), max_length=CONTEXT)


@pytest.mark.parametrize(("limited_by", "plan"), [("model", DEEP), ("engine", DEEP), ("engine", "none")])
def test_every_sequence_ends_at_the_context_with_reason_length(limited_by: str, plan: str) -> None:
    prompts = [random_prompt(CONTEXT - 1), random_prompt(CONTEXT - 11), random_prompt(CONTEXT - 6)]
    output = from_selfspec(prompts, plan, of=small_engine(limited_by), max_new_tokens=1000)
    longer = from_selfspec(prompts, "none", of=random_engine(), max_new_tokens=11)
    assert [stats.new_tokens for stats in output.stats] == [1, 11, 6]
    assert reasons(output) == ["length"] * 3
    for tokens, expected, count in zip(output.sequences, longer.sequences, [1, 11, 6], strict=True):
        assert tokens[CONTEXT - 1 :][:count].tolist() == expected[CONTEXT - 1 :][:count].tolist()


# Criteria


class Recorder(StoppingCriteria):
    """Keeps the prefixes it is called with; stops after a token, if one is given."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        assert input_ids.ndim == 2
        self.prefixes += input_ids.tolist()
        return input_ids[:, -1] == (-1 if self.stop_after is None else self.stop_after)  # type: ignore[return-value]


@plans
def test_a_stopping_criterion_ends_sequences_as_in_transformers(plan: str) -> None:
    criteria = [StoppingCriteriaList([Recorder(ids_of("g")[0]), Recorder(ids_of("h")[0])]) for _ in range(2)]
    settings: dict[str, Any] = {"eos_token_id": UNSAID, "max_new_tokens": LIMIT}
    output = from_selfspec(PROMPTS, plan, stopping_criteria=criteria[0], **settings)
    expected = from_transformers(PROMPTS, stopping_criteria=criteria[1], **settings)
    assert torch.equal(output.sequences, expected)
    assert reasons(output) == ["stop"] * 3


@plans
def test_a_criterion_is_called_after_every_token_as_in_transformers(plan: str) -> None:
    ours, theirs = Recorder(), Recorder()
    from_selfspec(PROMPTS[2:], plan, stopping_criteria=StoppingCriteriaList([ours]), max_new_tokens=LIMIT)
    from_transformers(PROMPTS[2:], stopping_criteria=StoppingCriteriaList([theirs]), max_new_tokens=LIMIT)
    assert ours.prefixes == theirs.prefixes
    assert len(ours.prefixes) == LIMIT


def test_in_a_batch_a_criterion_gets_each_sequence_without_padding() -> None:
    recorder = Recorder(ids_of("STOPPED")[0])
    output = from_selfspec(PROMPTS, DEEP, stopping_criteria=StoppingCriteriaList([recorder]), max_new_tokens=LIMIT)
    width = max(map(len, PROMPTS))
    for prompt, sequence, stats in zip(PROMPTS, output.sequences.tolist(), output.stats, strict=True):
        text = prompt + sequence[width : width + stats.new_tokens]
        seen = [prefix for prefix in recorder.prefixes if prefix[: len(prompt)] == prompt]
        assert seen == [text[:length] for length in range(len(prompt) + 1, len(text) + 1)]


def test_every_criterion_is_called_for_a_token_at_which_another_one_stops() -> None:
    first, second = Recorder(FORCED[5]), Recorder()
    criteria = StoppingCriteriaList([first, second])
    from_selfspec(PROMPTS[:1], DEEP, stopping_criteria=criteria, max_new_tokens=LIMIT)
    assert second.prefixes == first.prefixes
    assert len(second.prefixes) == 6


REPLACING: dict[str, list[Any]] = {
    "shorter": [MaxLengthCriteria(9)],
    "longer-than-max_new_tokens": [MaxLengthCriteria(25)],
    "shorter-than-the-prompt": [MaxLengthCriteria(2)],
    "two-lengths": [MaxLengthCriteria(12), MaxLengthCriteria(9)],
    "another-end": [EosTokenCriteria(ids_of("h")[0])],
    "two-ends": [EosTokenCriteria(ids_of("h")), EosTokenCriteria(torch.tensor(ids_of("g")))],
    "end-and-length": [EosTokenCriteria(ids_of("h")), MaxLengthCriteria(12)],
    "another-stop-string": [StopStringCriteria(tiny_tokenizer(), "PPEDh")],
}


@pytest.mark.parametrize("own", REPLACING.values(), ids=REPLACING.keys())
def test_a_callers_criterion_replaces_the_built_in_one_of_its_type(own: list[Any]) -> None:
    settings: dict[str, Any] = {
        "eos_token_id": ids_of("STOPPED"),
        "pad_token_id": UNSAID[0],
        "stop_strings": "i😀",
        "max_new_tokens": LIMIT,
        "stopping_criteria": StoppingCriteriaList(own),
    }
    expected = from_transformers(PROMPTS, tokenizer=tiny_tokenizer(), **settings)
    output = from_selfspec(PROMPTS, DEEP, **settings)
    assert torch.equal(output.sequences, expected)


def test_a_callers_max_length_criterion_gives_the_reason_length() -> None:
    output = from_selfspec(PROMPTS[:1], "chain:4", stopping_criteria=[MaxLengthCriteria(5)], max_new_tokens=LIMIT)
    assert reasons(output) == ["length"]


# Streamers


class StreamRecorder:
    """Keeps the calls of a streamer in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


@plans
def test_a_streamer_gets_the_prompt_then_one_token_at_a_time_then_the_end(plan: str) -> None:
    recorder = StreamRecorder()
    from_selfspec(PROMPTS[2:], plan, streamer=recorder, eos_token_id=FORCED[0], max_new_tokens=7)
    tokens = (FORCED * 2)[FORCED.index(PROMPTS[2][-1]) + 1 :][:7]
    assert recorder.calls == [[PROMPTS[2]], *([token] for token in tokens), "end"]


@plans
def test_a_streamer_gets_the_calls_that_transformers_makes(plan: str) -> None:
    ours, theirs = StreamRecorder(), StreamRecorder()
    from_selfspec(PROMPTS[:1], plan, streamer=ours, eos_token_id=FORCED[9], max_new_tokens=LIMIT)
    from_transformers(PROMPTS[:1], streamer=theirs, eos_token_id=FORCED[9], max_new_tokens=LIMIT)
    assert ours.calls == theirs.calls


def test_transformers_text_streamer_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    from_selfspec(PROMPTS[:1], DEEP, streamer=TextStreamer(tiny_tokenizer()), max_new_tokens=len(FORCED))
    assert capsys.readouterr().out == "a" + "".join(TEXT) + "\n"


# Text


def complete(prompt: str, of: Engine | None = None, **options: Any) -> Completion:
    settings = {"do_sample": False, "exit_layer": 1, "speculative_decoding": "force", **options}
    completion = (of or engine()).complete(prompt, **settings)
    assert isinstance(completion, Completion)
    return completion


def pieces_of(prompt: str, of: Engine | None = None, **options: Any) -> list[str]:
    settings = {"do_sample": False, "exit_layer": 1, "speculative_decoding": "force", **options}
    return list((of or engine()).stream(prompt, **settings))


def test_a_completion_has_the_text_tokens_and_reason_of_its_sequence() -> None:
    completion = complete("a", plan=DEEP, max_new_tokens=len(FORCED))
    assert (completion.text, completion.tokens) == ("".join(TEXT), FORCED)
    assert completion.finish_reason == "length"


def test_a_completion_ends_with_its_stop_string() -> None:
    completion = complete("a", plan=DEEP, stop_strings=["dsto"])
    assert (completion.text, completion.finish_reason) == ("bcdstop", "stop")


def test_an_end_token_is_in_the_tokens_and_not_in_the_text() -> None:
    end = tiny_tokenizer().eos_token_id
    other_engine = Engine.from_model(forced_text_model([*FORCED[:6], end]), tokenizer=tiny_tokenizer())
    completion = complete("a", of=other_engine, plan=DEEP, eos_token_id=end)
    assert (completion.text, completion.tokens) == ("bcdstope\ufffd", [*FORCED[:6], end])


@plans
def test_pieces_of_a_stream_are_whole_characters_and_make_up_the_text(plan: str) -> None:
    pieces = pieces_of("a", plan=plan, max_new_tokens=len(FORCED))
    assert "".join(pieces) == "".join(TEXT)
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 1


@pytest.mark.parametrize("shown", range(4))
def test_a_stream_that_ends_inside_a_character_has_the_completions_text(shown: int) -> None:
    whole = FORCED.index(ids_of("€")[0])  # tokens before the three of this character
    options: dict[str, Any] = {"plan": DEEP, "max_new_tokens": whole + shown}
    text = complete("a", **options).text
    assert (
        "".join(pieces_of("a", **options)) == text == "bcdstopeéfgSTOPPEDh" + ["", "\ufffd", "\ufffd\ufffd", "€"][shown]
    )


@pytest.mark.parametrize("seed", range(2))
def test_pieces_of_a_stream_with_invalid_bytes_make_up_the_completion(seed: int) -> None:
    options: dict[str, Any] = {"do_sample": True, "seed": seed, "top_k": 0, "max_new_tokens": 40}
    text = complete("abc", of=random_engine(), plan="none", **options).text
    assert "".join(pieces_of("abc", of=random_engine(), plan="tree:3,2,1", **options)) == text
    assert "\ufffd" in text


def test_pieces_of_a_stream_keep_the_spaces_between_words() -> None:
    other_engine = Engine.from_model(forced_model(), tokenizer=spaced_tokenizer())
    options: dict[str, Any] = {"of": other_engine, "plan": "chain:4", "max_new_tokens": 7}
    text = "".join(f" w{token}" for token in FORCED[:7])  # with the first word's space: it follows the prompt's word
    assert "".join(pieces_of("w3", **options)) == text
    assert complete("w3", **options).text == text


def test_a_stream_has_its_completion_once_it_is_exhausted() -> None:
    stream = engine().stream("a", max_new_tokens=9, plan="chain:4", exit_layer=1, do_sample=False)
    assert stream.completion is None
    text = "".join(stream)
    assert stream.completion is not None
    assert (stream.completion.text, stream.completion.tokens) == (text, FORCED[:9])
    assert (stream.completion.finish_reason, stream.completion.stats.cycles) == ("length", 2)


def test_two_interleaved_streams_of_one_engine_each_give_their_own_text() -> None:
    shared: dict[str, Any] = {"do_sample": True, "exit_layer": 2, "speculative_decoding": "force"}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("abc", {**shared, "seed": 1, "max_new_tokens": 24, "plan": "tree:3,2,1"}),
        ("the quick brown fox", {**shared, "seed": 2, "max_new_tokens": 16, "plan": "chain:4"}),
    ]
    expected = [complete(prompt, of=random_engine(), **options).text for prompt, options in requests]
    streams = [random_engine().stream(prompt, **options) for prompt, options in requests]
    texts = ["", ""]
    running = [0, 1, 1]  # reads the second stream twice as often
    while running:
        for index in list(running):
            piece = next(streams[index], None)
            if piece is None:
                running = [other for other in running if other != index]
            else:
                texts[index] += piece
    assert texts == expected
