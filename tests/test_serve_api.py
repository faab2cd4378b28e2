"""The server through OpenAI's own client, over a socket: answers equal the engine's, whole and streamed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import CHAT, FORCED, Served, events_of, eventually, serving, tiny_engine

SETTINGS: dict[str, Any] = {"max_tokens": 12, "seed": 5}  # with OpenAI's defaults: temperature 1, no top-k
AS_OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "seed": 5, "do_sample": True, "temperature": 1.0, "top_k": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    with serving(tiny_engine(tmp_path_factory.mktemp("profile"), max_position_embeddings=128)) as running:
        yield running
        eventually(running.is_idle)


def chat(served: Served, **fields: Any) -> Any:
    return served.client.chat.completions.create(model=served.engine.name, messages=CHAT, **{**SETTINGS, **fields})


def complete(served: Served, prompt: Any, **fields: Any) -> Any:
    return served.client.completions.create(model=served.engine.name, prompt=prompt, **{**SETTINGS, **fields})


def test_a_chat_is_answered_as_the_engine_answers_it(served):
    expected = served.engine.complete(CHAT, **AS_OPTIONS)
    answer = chat(served)
    assert answer.choices[0].message.content == expected.text
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "length")
    prompt_tokens = len(served.http.post("/tokenize", json={"messages": CHAT}).json()["tokens"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 12)
    assert answer.usage.total_tokens == prompt_tokens + 12
    assert answer.id.startswith("chatcmpl-") and answer.model == served.engine.name


def test_speculation_changes_no_token_and_off_drafts_nothing(served):
    def drafts() -> int:
        found = re.search(
            r"^selfspec:spec_decode_num_draft_tokens_total (\d+)$", served.http.get("/metrics").text, re.M
        )
        assert found is not None
        return int(found[1])

    start = drafts()
    off = chat(served, extra_body={"speculative_decoding": False})
    assert drafts() == start
    forced = chat(served, extra_body=FORCED)
    assert drafts() > start
    assert off.choices[0].message.content == forced.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_samples_of_a_chat_are_the_engines(served, stream):
    expected = served.engine.complete(CHAT, num_return_sequences=3, **AS_OPTIONS)
    answer = chat(served, n=3, stream=stream)
    if not stream:
        assert [choice.message.content for choice in answer.choices] == [completion.text for completion in expected]
        assert answer.usage.completion_tokens == 36
        return
    texts = ["", "", ""]
    for chunk in answer:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [completion.text for completion in expected]


def test_greedy_samples_are_equal(served):
    answer = chat(served, n=2, temperature=0)
    expected = served.engine.complete(CHAT, max_new_tokens=12, do_sample=False).text
    assert [choice.message.content for choice in answer.choices] == [expected, expected]


def test_a_chat_streams_the_role_then_text_then_the_reason_then_the_usage(served):
    chunks = list(chat(served, stream=True, stream_options={"include_usage": True}, extra_body=FORCED))
    first, *deltas, end, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.content and chunk.choices[0].finish_reason is None for chunk in deltas)
    assert (
        "".join(chunk.choices[0].delta.content for chunk in deltas) == served.engine.complete(CHAT, **AS_OPTIONS).text
    )
    assert (end.choices[0].delta.content, end.choices[0].finish_reason) == (None, "length")
    assert (usage.choices, usage.usage.completion_tokens) == ([], 12)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_of_events_ends_with_done(served):
    body = {"prompt": "abc", "stream": True, **SETTINGS}
    response = served.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert all("usage" not in event and event["object"] == "text_completion" for event in events)
    assert "".join(event["choices"][0]["text"] for event in events) == complete(served, "abc").choices[0].text
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]


def test_texts_and_token_ids_are_completed_and_echoed(served):
    texts = ["abc", "the end"]
    ids = [served.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    expected = [completion.text for completion in served.engine.complete(texts, **AS_OPTIONS)]
    for prompt in (texts, ids):
        answer = complete(served, prompt)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    for prompt in (texts[0], ids[0]):
        assert complete(served, prompt, echo=True).choices[0].text == texts[0] + expected[0]
    pieces = complete(served, texts[0], echo=True, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == texts[0] + expected[0]
    assert served.http.post("/detokenize", json={"tokens": ids[1]}).json() == {"prompt": texts[1]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_text_ends_the_answer_and_is_left_out(served, stream):
    text = served.engine.complete(CHAT, **AS_OPTIONS).text
    stop = text[5:7]
    fields = {"stop": ["never said", stop], "stream": stream, "extra_body": FORCED}
    answer = chat(served, **fields)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        said, reason = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
    else:
        said, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens < 12
    assert (said, reason) == (text[: text.index(stop)], "stop")


def test_a_stop_text_before_min_tokens_does_not_end_the_answer(served):
    text = served.engine.complete(CHAT, **AS_OPTIONS).text
    answer = chat(served, stop=text[0], extra_body={"min_tokens": 5})
    assert answer.usage.completion_tokens > 5 and answer.choices[0].message.content.startswith(text[0])


def test_fields_reach_the_engine(served):
    engine, tokens = served.engine, served.engine.complete(CHAT, **AS_OPTIONS).tokens
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0.5, "top_p": 0.8}, {"temperature": 0.5, "top_p": 0.8}),
        ({"presence_penalty": 1.5, "frequency_penalty": -1}, {"presence_penalty": 1.5, "frequency_penalty": -1.0}),
        ({"logit_bias": {"7": 100}}, {"logit_bias": {7: 100.0}}),
        ({"max_completion_tokens": 3, "max_tokens": 20}, {"max_new_tokens": 3}),
        ({"extra_body": {"top_k": 3, "min_p": 0.1}}, {"top_k": 3, "min_p": 0.1}),
        ({"extra_body": {"repetition_penalty": 3.0}}, {"repetition_penalty": 3.0}),
        ({"extra_body": {"stop_token_ids": [tokens[6]]}}, {"stop_token_ids": [tokens[6]]}),
        (
            {"extra_body": {"stop_token_ids": tokens[:2], "min_tokens": 9}},
            {"stop_token_ids": tokens[:2], "min_new_tokens": 9},
        ),
        ({"user": "u", "extra_body": {"domain": "code", "ignore_eos": True}}, {"domain": "code"}),
    ]
    for fields, options in pairs:
        expected = engine.complete(CHAT, **{**AS_OPTIONS, **options})
        answer = chat(served, **fields)
        assert answer.choices[0].message.content == expected.text, fields
        assert answer.usage.completion_tokens == len(expected.tokens), fields
        assert answer.choices[0].finish_reason == expected.finish_reason, fields


def test_without_a_length_a_text_gets_16_tokens_and_a_chat_the_rest_of_the_context(served):
    assert complete(served, "abc", max_tokens=None).usage.completion_tokens == 16
    answer = chat(served, max_tokens=None)
    assert answer.usage.total_tokens == served.engine.context


def test_the_server_describes_itself(served):
    (model,) = served.client.models.list().data
    assert (model.id, model.object) == (served.engine.name, "model")
    assert served.http.get("/version").json()["version"]
    assert served.http.get("/health").json() == {"status": "ready"}


def test_usage_counts_the_prompt_tokens_whose_pages_were_reused(served):
    text = "a longer prompt, " * 6
    found = [complete(served, text, max_tokens=4, extra_body=FORCED) for _ in range(2)]
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in found] == [0, 64]
    assert found[0].choices[0].text == found[1].choices[0].text and found[0].usage.prompt_tokens == 102


def test_metrics_parse_and_count(served):
    from prometheus_client.parser import text_string_to_metric_families

    chat(served, extra_body=FORCED)
    families = {family.name: family for family in text_string_to_metric_families(served.http.get("/metrics").text)}
    values = {name: family.samples[0].value for name, family in families.items() if family.samples}
    summary = served.engine.metrics()
    assert values["selfspec:generation_tokens"] == summary.tokens
    assert values["selfspec:spec_decode_num_accepted_tokens"] == sum(summary.accepted_by_depth)
    assert values["selfspec:spec_decode_num_draft_tokens"] >= values["selfspec:spec_decode_num_drafts"] > 0
    assert values["selfspec:kv_cache_usage_perc"] == 0
    assert values["selfspec:prefix_cache_queries"] == summary.prefix_cache_queries > 0
    assert values["selfspec:prefix_cache_hits"] == summary.prefix_cache_hits
    reasons = {
        sample.labels["finished_reason"]: sample.value for sample in families["selfspec:request_success"].samples
    }
    assert reasons["length"] > 0
    buckets = [
        sample.value
        for sample in families["selfspec:time_to_first_token_seconds"].samples
        if sample.name.endswith("bucket")
    ]
    assert buckets == sorted(buckets) and buckets[-1] > 0
