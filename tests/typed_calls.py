"""Types that a user's checker sees; mypy checks this file, nothing runs it."""

from __future__ import annotations

from typing import assert_type

from transformers import GenerationConfig

from selfspec import Completion, Engine, Stream


def completions(engine: Engine, config: GenerationConfig) -> None:
    assert_type(engine.complete("hi").text, str)
    assert_type(engine.complete([{"role": "user", "content": "hi"}], max_new_tokens=3), Completion)
    assert_type(engine.complete(["hi", "you"]), list[Completion])
    assert_type(engine.complete([[{"role": "user", "content": "hi"}]]), list[Completion])
    several = engine.complete("hi", do_sample=True, num_return_sequences=3)
    assert_type(several, Completion | list[Completion])
    assert_type(engine.complete("hi", generation_config=config), Completion | list[Completion])
    assert_type(engine.stream("hi"), Stream)
