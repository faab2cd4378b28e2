"""Tokenizes prompts and builds the engine's requests for one call. Runs on a thread: long texts take a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from selfspec.engine import Engine
from selfspec.sequence import Request
from selfspec.serve.errors import ApiError, of_engine
from selfspec.serve.protocol import ChatBody, CompletionBody, Generation, Message, Tool
from selfspec.serve.stops import StopTexts
from selfspec.serve.tools import ToolForm, call_grammar, tool_form
from selfspec.text import Prompt, encode

_COMPLETION_TOKENS = 16  # new tokens of a text completion that gives no length: OpenAI's default
_LEAST_TEMPERATURE = 1e-5  # below it decoding is greedy, as in vLLM: logits divided by less overflow
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_SAME_NAME = "seed presence_penalty frequency_penalty repetition_penalty speculative_decoding domain".split()


@dataclass(frozen=True)
class Prepared:
    """The engine's requests of one call, one or more per prompt, and the text that each answer begins with."""

    requests: list[Request]
    echoes: list[str]  # one per request
    prompt_tokens: int
    form: ToolForm | None = None  # of tool calls, where the model may call tools


def count_sequences(body: ChatBody | CompletionBody) -> int:
    return body.samples * (len(body.prompts) if isinstance(body, CompletionBody) else 1)


def prepare(engine: Engine, body: ChatBody | CompletionBody) -> Prepared:
    """Builds all requests of a call; raises ApiError for the first that cannot be served."""
    requests: list[Request] = []
    echoes: list[str] = []
    prompt_tokens = 0
    form = _form(engine, body) if isinstance(body, ChatBody) and body.callable_tools else None
    try:
        for tokens, echo in _prompts(engine, body):
            made = _requests(engine, body, tokens, form)
            requests += made
            echoes += [echo] * len(made)
            prompt_tokens += len(tokens)
    except ValueError as error:
        raise of_engine(error, body.format_field) from None
    return Prepared(requests, echoes, prompt_tokens, form)


def _form(engine: Engine, body: ChatBody) -> ToolForm:
    tools = [tool.model_dump(exclude_unset=True) for tool in body.callable_tools]
    try:
        return tool_form(engine.tokenizer.get_chat_template(tools=tools))
    except ValueError as error:
        raise ApiError(400, f"tools: {error}", "tools", "unsupported_field") from None


def tokenize_chat(engine: Engine, messages: list[Message], tools: Sequence[Tool] = ()) -> list[int]:
    described = [tool.model_dump(exclude_unset=True) for tool in tools]
    return _encode(engine, [message.as_dict() for message in messages], "messages", described)


def tokenize_text(engine: Engine, text: str) -> list[int]:
    return _encode(engine, text, "prompt")


def _encode(engine: Engine, prompt: Prompt, param: str, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
    try:
        return encode(engine.tokenizer, prompt, tools)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param) from None


def _prompts(engine: Engine, body: ChatBody | CompletionBody) -> list[tuple[list[int], str]]:
    """Returns the tokens of each prompt, and its text where the call asks to echo it."""
    if isinstance(body, ChatBody):
        tools = [] if body.tool_choice == "none" else body.tools or []
        return [(_checked(engine, tokenize_chat(engine, body.messages, tools), "messages"), "")]
    prompts = []
    for prompt in body.prompts:
        tokens = _checked(engine, tokenize_text(engine, prompt) if isinstance(prompt, str) else prompt, "prompt")
        echo = prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt) if body.echo else ""
        prompts.append((tokens, echo if body.echo else ""))
    if not prompts:
        raise ApiError(400, "prompt: the list is empty: pass at least one prompt", "prompt")
    return prompts


def _checked(engine: Engine, tokens: list[int], param: str) -> list[int]:
    """Returns the tokens; raises ApiError for none, too many, or one outside the vocabulary."""
    if not tokens:
        raise ApiError(400, f"{param}: a prompt has no tokens: pass at least one", param)
    if len(tokens) >= engine.context:
        message = f"{param}: {len(tokens)} tokens, and the context holds {engine.context} with the new ones: shorten it"
        raise ApiError(422, message, param, "context_length_exceeded")
    last = engine.model.config.vocab_size - 1
    if max(tokens) > last:
        raise ApiError(400, f"{param}: token id {max(tokens)} is outside the vocabulary (0 to {last})", param)
    return tokens


def _requests(
    engine: Engine, body: ChatBody | CompletionBody, tokens: list[int], form: ToolForm | None
) -> list[Request]:
    """Returns one request for all samples of a prompt; one per sample where decoding is greedy, since the engine
    refuses several greedy samples in one request."""
    left = engine.context - len(tokens)
    default = left if isinstance(body, ChatBody) else _COMPLETION_TOKENS
    asked = default if body.new_tokens is None else max(1, body.new_tokens)  # 0: one token, which is not shown
    options = engine_options(body, engine.generation_config, min(asked, left))
    if isinstance(body, ChatBody) and body.must_call and form is not None:
        schemas = {tool.function.name: tool.function.parameters for tool in body.callable_tools}
        lark = call_grammar(form, schemas, body.tool_choice == "required" and body.may_call_several)
        options["response_format"] = {"type": "grammar", "grammar": lark}
    if body.stops:
        options["stopping_criteria"] = [StopTexts(engine.tokenizer, body.stops, len(tokens), body.min_tokens or 0)]
    if options["do_sample"]:
        return [engine.build_request(tokens, num_return_sequences=body.samples, **options)]
    return [engine.build_request(tokens, num_return_sequences=1, **options) for _ in range(body.samples)]


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
        options["logit_bias"] = {int(token): float(bias) for token, bias in body.logit_bias.items()}
    return options


def _first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next(value for value in values if value is not None)
