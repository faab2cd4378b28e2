"""Structured output: every finished text follows its grammar, and is the same whichever drafts were made."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec import Engine
from selfspec.grammar import MAX_BYTES, Grammar, Grammars, ResponseFormatError
from selfspec.sequence import Sequence
from selfspec.speculation.plan import Plan
from tests.tiny import tiny_model
from tests.tiny_tokenizer import JSON_TOKENS, json_tokenizer

FORCED = {"speculative_decoding": "force", "exit_layer": 1}
END, OTHER_END = JSON_TOKENS.index("</s>"), JSON_TOKENS.index("<end>")


@cache
def engine() -> Engine:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 512}
    model = tiny_model("llama", vocab_size=len(JSON_TOKENS), **sizes)
    return Engine.from_model(model, json_tokenizer(), profile=None, max_batch=64)


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of objects, arrays and leaves in `depth` levels; strings and arrays are short, so that texts end."""
    kinds = ["object", "array", "anyOf"] if depth else []
    kind = dice.choice([*kinds, "string", "pattern", "integer", "boolean", "enum", "null", "const"])
    if kind == "object":
        names = dice.sample(["a", "key", "x y", "é", "t"], dice.randint(0, 3))
        properties = {name: random_schema(dice, depth - 1) for name in names}
        required = [name for name in names if dice.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = dice.randint(0, 1)
        items = random_schema(dice, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + dice.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(dice, 0), random_schema(dice, depth - 1)]}
    leaves: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "maxLength": dice.randint(0, 4)},
        "pattern": {"type": "string", "pattern": "^[a-c]{1,3}(x|true)$"},
        "integer": {"type": "integer", "minimum": dice.randint(-50, 0), "maximum": dice.randint(1, 2000)},
        "boolean": {"type": "boolean"},
        "enum": {"enum": dice.sample(["the", "thing", 10, 1.5, None, True], 3)},
        "null": {"type": "null"},
        "const": {"const": dice.choice(['a"b', [1, 2], {"k": False}])},
    }
    return leaves[kind]


def run_all(formats: list[Any], **options: Any) -> list[Sequence]:
    """Completes a prompt with each format, all in one batch: greedily and sampled, some with penalties."""
    requests = []
    for index, form in enumerate(formats):
        own: dict[str, Any] = {"do_sample": index % 3 > 0, "seed": index, "max_new_tokens": 40}
        own |= {"top_p": 0.9} if own["do_sample"] else {}
        own |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2} if index % 20 == 0 else {}
        requests.append(engine().build_request([1, 40 + index % 7], response_format=form, **own, **options))
    for request in requests:
        engine().scheduler.submit(request)
    for request in requests:
        engine().scheduler.wait(request)
    return [request.sequences[0] for request in requests]


def text_of(sequence: Sequence) -> str:
    return engine().tokenizer.decode(sequence.tokens[len(sequence.prompt) :], skip_special_tokens=True)


def test_texts_of_random_schemas_are_valid_and_do_not_depend_on_drafts() -> None:
    """Every eighth sequence of the batches has no grammar."""
    dice = random.Random(0)
    finished = drafts = 0
    for plan in ("chain:3", "beam:3,2", "tree:2,1+copy:3", "chain:1"):
        schemas = [random_schema(dice) if index % 8 else None for index in range(58)]  # 50 of them schemas
        formats = [None if schema is None else json_format(schema) for schema in schemas]
        plain, drafted = run_all(formats, speculative_decoding=False), run_all(formats, plan=plan, **FORCED)
        assert [sequence.tokens for sequence in plain] == [sequence.tokens for sequence in drafted]
        drafts += sum(sequence.history.accepted for sequence in drafted)
        for schema, sequence in zip(schemas, plain, strict=True):
            assert sequence.request.error is None
            if schema is not None and sequence.finish_reason == "stop":
                finished += 1
                jsonschema.validate(json.loads(text_of(sequence)), schema)
    assert finished > 140 and drafts > 500, (finished, drafts)


WORDS = ["abcde", "the thing", "10 true", '"key": ', "x"]
literals = st.sampled_from(WORDS)
choices = st.lists(literals, min_size=2, max_size=3).map(lambda words: f"({'|'.join(words)})")
regexes = st.lists(literals | choices, min_size=1, max_size=4).map("".join)


@settings(max_examples=30)
@given(regex=regexes, plan=st.sampled_from(["copy:3", "copy:15", "chain:2+copy:4"]), seed=st.integers(0, 3))
def test_drafts_of_forced_tokens_change_no_token(regex: str, plan: str, seed: int) -> None:
    options = {"response_format": {"type": "regex", "regex": regex}, "max_new_tokens": 60, "do_sample": seed > 0}
    plain = engine().build_request([1, 40], speculative_decoding=False, seed=seed, **options)
    drafted = engine().build_request([1, 40], plan=plan, seed=seed, **FORCED, **options)
    for request in (plain, drafted):
        engine().scheduler.submit(request)
        engine().scheduler.wait(request)
    ours, (theirs,) = drafted.sequences[0], plain.sequences
    assert ours.tokens == theirs.tokens and re.fullmatch(regex, text_of(ours))
    if regex in WORDS:  # the whole text is forced: a step accepts all copied nodes and emits one more token
        copied = Plan.parse(plan).copied
        assert ours.history.steps == -(-ours.new_tokens // (copied + 1))


@pytest.mark.parametrize("plan", ["none", "tree:3,2"])
def test_texts_match_a_regex_or_a_grammar(plan: str) -> None:
    regex, lark = r"(foo|ba+r){2}[0-9]{1,4}x", 'start: "[" item ("," item)* "]"\nitem: "ab" | /[0-9]{2}/'
    options = {"plan": plan, **FORCED, "max_new_tokens": 200, "do_sample": True, "seed": 3}
    found = engine().complete("hi", response_format={"type": "regex", "regex": regex}, **options)
    assert found.finish_reason == "stop" and re.fullmatch(regex, found.text)
    found = engine().complete("hi", response_format={"type": "grammar", "grammar": lark}, **options)
    assert found.finish_reason == "stop" and re.fullmatch(r"\[(ab|[0-9]{2})(,(ab|[0-9]{2}))*\]", found.text)
    flags = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    compact = json_format({**flags, "x-guidance": {"whitespace_flexible": False}})
    found = engine().complete("hi", response_format=compact, **options)
    assert re.fullmatch(r"\[(true|false)(,(true|false)){2}\]", found.text)
    whole = engine().complete("hi", response_format={"type": "json_object"}, **options)
    assert whole.text.startswith("{") and (whole.finish_reason == "length" or json.loads(whole.text))


def test_the_end_tokens_of_a_request_end_the_text_where_the_grammar_allows_it() -> None:
    words = {"type": "regex", "regex": "(the|ing){2,30}"}
    for ends in ([OTHER_END], [END, OTHER_END], None):
        found = engine().complete("hi", response_format=words, eos_token_id=ends, do_sample=True, seed=1)
        assert found.finish_reason == "stop" and re.fullmatch("(the|ing){2,30}", found.text)
        assert found.tokens[-1] in (ends or [END]), "the tokenizer's end token where the request has none"


def test_samples_stop_texts_callables_and_both_acceptance_rules_follow_the_grammar() -> None:
    digits = {"type": "regex", "regex": "[0-9]{6}x"}
    options = {"response_format": digits, "do_sample": True, "seed": 5, "plan": "tree:2,2", **FORCED}
    samples = engine().complete("hi", num_return_sequences=3, **options)
    assert len({completion.text for completion in samples}) == 3 and all(
        re.fullmatch("[0-9]{6}x", completion.text) for completion in samples
    )
    first = samples[0].text[2]
    stopped = engine().complete("hi", stop_strings=first, **options)
    assert stopped.finish_reason == "stop" and stopped.text == samples[0].text[: samples[0].text.index(first) + 1]
    letter = JSON_TOKENS.index("A")
    liked = [lambda prefix, scores: scores.index_fill(1, torch.tensor([letter]), 1e4)]
    assert engine().complete("hi", logits_processor=liked, **options).text == samples[0].text, "a banned token stays"
    assert re.fullmatch("[0-9]{6}x", engine().complete("hi", acceptance="rejection", **options).text)
    assert "".join(engine().stream("hi", **options)) == samples[0].text
    ids = torch.tensor([[1, 40]])
    text = engine().tokenizer.decode(engine().generate(ids, **options)[0, 2:], skip_special_tokens=True)
    assert re.fullmatch("[0-9]{6}x", text)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"type": "xml"}, "one of text, json_object"),
        ("json", "pass an object"),
        ({"type": "json_schema"}, "json_schema.schema must be"),
        (json_format({"type": "object", "x": {1, 2}}), "not JSON"),
        (json_format({"type": "thing"}), "Invalid type"),
        (json_format({"not": {}}), "Unimplemented keys"),
        (json_format({"$ref": "file:///etc/hostname"}), "does not fetch"),
        (json_format({"$ref": "http://127.0.0.1:9/schema.json"}), "does not fetch"),
        (
            json_format({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"anyOf": [{}, {"not": {}}]}}}),
            r"Unimplemented keys: ..not.., in \$defs.b.anyOf.1 of the schema",
        ),
        (json_format({"type": "object", "x-guidance": {"nothing": 1}}), "unknown field"),
        ({"type": "regex", "regex": "(a"}, "unclosed group"),
        ({"type": "regex", "regex": "(a", "json_schema": 1}, "unclosed group"),
        ({"type": "regex", "regex": ""}, "not empty"),
        ({"type": "regex", "regex": "(.{1,1000}){1,1000}x"}, "too many"),
        ({"type": "grammar", "grammar": "start: other"}, "unknown name"),
        ({"type": "grammar", "grammar": "start: other", "json_schema": {"a": 1}}, "unknown name"),
        ({"type": "grammar", "grammar": '{"grammars": []}'}, "cannot be followed"),
        (json_format({"enum": ["x" * MAX_BYTES]}), "shorten it"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(ResponseFormatError, match=message):
        engine().complete("hi", response_format=asked)


@pytest.mark.parametrize(("properties", "searches"), [(60, True), (70, False), (2000, False)])
def test_the_failing_part_of_a_schema_is_searched_by_a_bounded_number_of_checks(
    properties: int, searches: bool
) -> None:
    """The last of many properties fails."""
    schema = {"properties": {f"p{index}": {} for index in range(properties)} | {"last": {"not": {}}}}
    with pytest.raises(ResponseFormatError, match="Unimplemented keys") as refused:
        engine().complete("hi", response_format=json_format(schema))
    assert ("in properties.last of the schema" in str(refused.value)) == searches


def test_a_grammar_is_compiled_once_for_equal_formats_tokenizers_and_ends() -> None:
    grammars, tokenizer = Grammars(len(JSON_TOKENS)), json_tokenizer()
    first = grammars.compile(json_format({"type": "integer"}), tokenizer, [END])
    assert grammars.compile(json_format({"type": "integer"}), tokenizer, [END]) is first
    assert grammars.compile(json_format({"type": "number"}), tokenizer, [END]) is not first
    assert grammars.compile(json_format({"type": "integer"}), tokenizer, [OTHER_END]) is not first
    assert grammars.compile(json_format({"type": "integer"}), json_tokenizer(), [END]) is not first


def test_a_format_needs_llguidance_a_tokenizer_and_no_minimum_length(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"type": "regex", "regex": "(the|ing){2}"}
    with pytest.raises(ResponseFormatError, match="minimum length"):
        engine().complete("hi", response_format=words, min_new_tokens=3)
    without = Engine.from_model(tiny_model("llama"), profile=None)
    with pytest.raises(ResponseFormatError, match="a tokenizer that has an end token"):
        without.generate(torch.tensor([[1, 5]]), response_format=words)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match="pip install llguidance"):
        engine().complete("hi", response_format=words)


def test_forced_tokens_are_computed_only_where_drafting_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forced = Grammar.forced
    monkeypatch.setattr(Grammar, "forced", lambda self, tokens: calls.append(len(tokens)) or forced(self, tokens))
    for options, computes in ((FORCED, True), ({"speculative_decoding": False}, False)):
        calls.clear()
        run_all([{"type": "regex", "regex": "[a-z]{9}"}], **options)
        assert bool(calls) == computes


def test_a_request_whose_grammar_takes_too_much_work_fails_alone() -> None:
    """The grammar's lexer exceeds a limit while the text is generated, in a batch with a request without a grammar."""
    costly = engine().build_request([1, 40], response_format={"type": "regex", "regex": "[a-z]{4}"}, max_new_tokens=9)
    beside = engine().build_request([1, 41], max_new_tokens=9)
    sequence = costly.sequences[0]
    assert sequence.grammar is not None
    sequence.grammar._matcher.consume_token(JSON_TOKENS.index("A"))  # leaves the matcher in an error state
    for request in (costly, beside):
        engine().scheduler.submit(request)
    with pytest.raises(ResponseFormatError, match="cannot be followed"):
        engine().scheduler.wait(costly)
    engine().scheduler.wait(beside)
    assert beside.sequences[0].new_tokens == 9
