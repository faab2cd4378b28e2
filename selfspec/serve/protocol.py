"""The bodies of requests, checked field by field; a field that would change the output and is not supported is refused.

Fields, types and ranges are those of OpenAI's API, and vLLM's for the extra ones.
"""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from selfspec.logprobs import MAX_TOP
from selfspec.serve.errors import ApiError, of_validation

_log = logging.getLogger(__name__)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
NewTokens = Annotated[int, Field(ge=0, lt=2**31)]  # 0 only with echo
Top = Annotated[int, Field(ge=0, le=MAX_TOP)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MOST_SEQUENCES = 256  # in progress, over all requests; one request has at most as many prompts

Item = TypeVar("Item")
# Validation stops at the first wrong item: building 400000 errors would block the event loop for 10 s.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
PromptList = Annotated[list[Item], Field(fail_fast=True, max_length=MOST_SEQUENCES)]

# Fields that would change the output and are not supported; for each the values, besides None, that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys("echo prompt_logprobs use_beam_search return_token_ids".split(), (False,)),
    **dict.fromkeys("include_stop_str_in_output continue_final_message".split(), (False,)),
    **{name: ([],) for name in "tools functions bad_words allowed_token_ids documents logits_processors".split()},
    **{name: ({},) for name in "chat_template_kwargs audio prediction web_search_options".split()},
    **dict.fromkeys("guided_json guided_regex guided_choice guided_grammar".split(), ()),
    **dict.fromkeys("structured_outputs chat_template truncate_prompt_tokens reasoning_effort".split(), ()),
    "top_logprobs": (0,),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "modalities": (["text"],),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
}

# What to use instead of a refused field.
_INSTEAD = {
    **dict.fromkeys(("guided_json", "structured_outputs"), "use response_format"),
    **dict.fromkeys(("guided_regex", "guided_choice"), "use regex"),
    "guided_grammar": "use grammar",
    "echo": "use /v1/completions",
    "prompt_logprobs": "use echo with logprobs, of /v1/completions",
    "functions": "use tools",
    "function_call": "use tool_choice",
}


class Body(BaseModel):
    """A JSON object whose values are not converted: "1" is no number, and true is not 1."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False


class ContentPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: FunctionName
    arguments: str  # a JSON object, or empty: none


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | ListOf[ContentPart] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool's answer

    @field_validator("content", mode="before")
    @classmethod
    def _check_parts(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                raise PydanticCustomError("part", "Only parts of type text are supported")
        return content

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "A message without tool_calls needs content")
        return self

    def as_dict(self) -> dict[str, Any]:
        """The message for a chat template: its text in one piece, and the arguments of tool calls as objects."""
        names = ("name", "tool_call_id")
        message: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.tool_calls:
            message["tool_calls"] = [_for_template(call) for call in self.tool_calls]
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) if parts else self.content or ""
        return {"role": self.role, "content": text, **message}


def _for_template(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": json.loads(call.function.arguments or "{}")}
    return {"id": call.id, "type": call.type, "function": function}


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of the arguments


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class Generation(Body):
    """The fields that chat and text completions share."""

    model: str | None = None
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None  # the other name of max_tokens
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Count | None = None
    stop: str | ListOf[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Any] | None = None  # numbers, by token id
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    best_of: Count | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    speculative_decoding: bool | Literal["force"] | None = None
    domain: str | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None  # in Lark's syntax
    stop_token_ids: ListOf[TokenId] | None = None
    return_metrics: bool | None = None  # what drafting did for the request, in totals
    return_draft_info: bool | None = None  # which tokens of each chunk were drafted, and the plan

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def formats(self) -> list[str]:
        """The given fields that restrict the text to a format: at most one, once checked."""
        fields = ("response_format", "regex", "grammar")
        return [name for name in fields if getattr(self, name) not in (None, {"type": "text"})]

    @property
    def format_field(self) -> str:
        """The field whose grammar the answer follows, if there is one."""
        return "".join(self.formats)

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def new_tokens(self) -> int | None:
        """The largest number of new tokens; None: not given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        """Likely tokens beside each token's log probability; None: no log probabilities."""
        return None

    @property
    def echoes_prompt(self) -> bool:
        return False

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(Generation):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # False: at most one call in an answer

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model may call: all of them, or the one that `tool_choice` names."""
        choice, tools = self.tool_choice, self.tools or []
        if isinstance(choice, NamedTool):
            return [tool for tool in tools if tool.function.name == choice.function.name]
        return [] if choice == "none" else tools

    @property
    def may_call_several(self) -> bool:
        return self.parallel_tool_calls is not False

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def format_field(self) -> str:
        return "tools" if self.must_call else super().format_field

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Generation):
    prompt: str | ListOf[TokenId] | PromptList[str] | PromptList[ListOf[TokenId]]
    echo: bool | None = None
    logprobs: Top | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def echoes_prompt(self) -> bool:
        return bool(self.echo)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: ListOf[TokenId]


Kind = TypeVar("Kind", bound=Body)


def read_body(kind: type[Kind], raw: bytes) -> Kind:
    """Parses and checks a body; raises ApiError that names the field at fault."""
    try:
        given = json.loads(raw, parse_constant=_refuse_constant)
        if b"\\" in raw or not raw.isascii():
            json.dumps(given, ensure_ascii=False).encode()  # fails for half a surrogate pair, which no tokenizer takes
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {_reason(error)}") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, not a {type(given).__name__}")
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise of_validation(error) from None
    _check_extra(body.model_extra or {})
    if isinstance(body, Generation):
        _check_generation(body)
    if isinstance(body, ChatBody | TokenizeBody):
        for index, message in enumerate(body.messages or ()):
            _check_message(index, message)
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it holds text that is not Unicode" if isinstance(error, UnicodeError) else str(error)


def _check_extra(extra: dict[str, Any]) -> None:
    """Refuses unsupported fields; logs the names of unknown ones, which are ignored."""
    for name in extra.keys() & REFUSED.keys():
        value = extra[name]
        if value is not None and not any(type(value) is type(off) and value == off for off in REFUSED[name]):
            instead = _INSTEAD.get(name)
            fix = f": {instead}" if instead else " with this value: leave it out"
            raise ApiError(400, f"{name} is not supported{fix}", name, "unsupported_field")
    ignored = sorted(name for name in extra.keys() - REFUSED.keys() if name.isidentifier() and len(name) <= 40)
    if ignored:
        _log.info("ignored unknown fields: %s", ", ".join(ascii(name) for name in ignored[:8]))


def _check_generation(body: Generation) -> None:
    if body.best_of is not None and body.best_of > body.samples:
        raise ApiError(400, "best_of above n is not supported: leave it out", "best_of", "unsupported_field")
    if any(not text for text in body.stops):
        raise ApiError(400, "stop: a stop text must not be empty", "stop")
    for token, bias in (body.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise ApiError(400, "logit_bias: its keys must be token ids, written as integers", "logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ApiError(400, "logit_bias: its values must be numbers from -100 to 100", "logit_bias")
    if isinstance(body, ChatBody):
        _check_tools(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    if body.new_tokens == 0 and not body.echoes_prompt:
        raise ApiError(400, "max_tokens must be at least 1, or 0 with echo=true", "max_tokens")
    if body.min_tokens and body.new_tokens is not None and body.min_tokens > body.new_tokens:
        raise ApiError(400, "min_tokens is above max_tokens: lower it", "min_tokens")
    for name in body.formats[1:]:
        raise ApiError(400, f"{name} is not possible with {body.formats[0]}: leave one of them out", name)
    for name in ("stream_options", "return_draft_info"):
        if getattr(body, name) and not body.stream:
            raise ApiError(400, f"{name} needs stream=true", name)


def _check_tools(body: ChatBody) -> None:
    names = [tool.function.name for tool in body.tools or ()]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two functions have the same name", "tools")
    if body.tool_choice not in (None, "none") and not body.callable_tools:
        raise ApiError(400, "tool_choice needs tools that have the function it names", "tool_choice")
    if body.must_call and body.formats:
        message = f"tool_choice that asks for a call and {body.formats[0]} are not possible together: leave one out"
        raise ApiError(400, message, "tool_choice")


def _check_message(index: int, message: Message) -> None:
    for number, call in enumerate(message.tool_calls or ()):
        try:
            is_object = isinstance(json.loads(call.function.arguments or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            param = f"messages.{index}.tool_calls.{number}.function.arguments"
            raise ApiError(400, f"{param} must be a JSON object, written as text", param)
    for name in ("function_call", "audio"):
        if (message.model_extra or {}).get(name):
            param = f"messages.{index}.{name}"
            raise ApiError(400, f"{param} is not supported: leave it out", param, "unsupported_field")
