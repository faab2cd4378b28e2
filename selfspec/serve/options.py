"""Converts the fields of a request to the engine's options, with OpenAI's defaults and the model's own."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from selfspec.serve.protocol import Generation

_LEAST_TEMPERATURE = 1e-5  # below it decoding is greedy, as in vLLM: logits divided by less overflow
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_SAME_NAME = "seed presence_penalty frequency_penalty repetition_penalty speculative_decoding domain".split()


def engine_options(body: Generation, config: GenerationConfig, max_new_tokens: int) -> dict[str, Any]:
    """Returns the options of `Engine.complete`, but for stop texts and the number of samples. A sampling field that is
    not given has the value of the model's generation config, else OpenAI's."""
    sampling = {name: _first(getattr(body, name), getattr(config, name, None), off) for name, off in _NEUTRAL.items()}
    sampling["top_k"] = max(0, sampling["top_k"])
    is_sampled = sampling["temperature"] >= _LEAST_TEMPERATURE
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": is_sampled}
    if is_sampled:
        options |= sampling
    options |= {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    for name in body.formats:
        given = getattr(body, name)
        options["response_format"] = given if name == "response_format" else {"type": name, name: given}
    if body.min_tokens is not None:
        options["min_new_tokens"] = body.min_tokens
    if body.top is not None:
        options["logprobs"] = body.top
        if body.echoes_prompt:
            options["prompt_logprobs"] = body.top
    if body.ignore_eos:
        options["eos_token_id"] = None
    if body.stop_token_ids:
        options["stop_token_ids"] = body.stop_token_ids
    if body.logit_bias:
        options["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    return options


def _first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next(value for value in values if value is not None)
