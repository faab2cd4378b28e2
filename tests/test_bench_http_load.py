"""Tests of `bench.http_load` against a server on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from bench import http_load
from tests.serving import Served, serving, tiny_engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tiny_engine(tmp_path_factory.mktemp("profile"), max_position_embeddings=1024)) as found:
        yield found


@pytest.mark.parametrize("load", [["--streams", "3"], ["--rate", "200"]], ids=["streams", "rate"])
def test_a_load_is_sent_and_its_tokens_and_times_are_reported(
    served: Served, load: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert http_load.main([served.address, *load, "--requests", "5", "--max-new-tokens", "4"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["requests"], found["tokens"]) == (5, 20) and found["tokens_per_s"] > 0
    assert 0 < found["first_token_ms_p50"] <= found["first_token_ms_p99"]
    assert 0 < found["per_token_ms_p50"] <= found["per_token_ms_p99"]


def test_fields_of_the_body_reach_the_server_and_its_errors_are_shown(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert http_load.main([f"{served.address}/v1", "--streams", "1", "--requests", "1", "--body", '{"top_k": -9}']) == 1
    assert "400" in (shown := capsys.readouterr().err) and "top_k" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["https://localhost", "--streams", "1"], "must begin with http://"),
        (["http://localhost", "--streams", "0"], "0 is not above 0"),
        (["http://localhost", "--rate", "1", "--body", "[1]"], "not a JSON object"),
        (["http://127.0.0.1:9", "--rate", "1"], "refused"),
    ],
)
def test_bad_arguments_and_absent_servers_are_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert http_load.main(arguments) == 1
    except SystemExit as stopped:
        assert stopped.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_every_prompt_begins_with_a_number_of_its_own() -> None:
    prompts = http_load.numbered_prompts(200)
    assert len({prompt.split(".")[0] for prompt in prompts}) == len(prompts) == 200
