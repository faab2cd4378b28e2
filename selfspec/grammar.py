"""Structured output: reads a `response_format`, compiles its grammar, and masks the tokens that the grammar forbids.

A sequence has one `Grammar`, whose state is that after the sequence's tokens. Masks are computed on the host by
llguidance, one bit per token; a backend applies them to processed logits before the choice. Drafts do not change the
state: masks of a draft tree's nodes are computed by consuming the tokens of a path and rolling them back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch

from selfspec.speculation.plan import Plan

# Of a schema, regex or grammar. llguidance compiles schemas with many optional properties slowest, in time that grows
# with the square of their number: 63 KB took 0.4 to 1.5 s, 127 KB 1.5 to 5 s (49,152 tokens, one ARM core).
MAX_BYTES = 64 * 1024
_KEPT = 8  # compiled grammars that are kept, of the newest formats: at most about 15 MB each
# llguidance's limits, in its documentation's figures: 20 ms to read regexes; 14 ms and 2.5 ms for one mask; 2 kB per
# lexer state.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# Without a bound, a weak model fills its text with white space. A schema's own "x-guidance" replaces it.
JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,64})"}
# The part that fails is searched in schemas up to this many bytes, by at most this many checks: each compiles a part
# and all definitions, which takes 1 to 10 ms for 4 KB.
_SEARCHED_BYTES, _CHECKS = 4096, 64
_DEFINITIONS = ("$defs", "definitions")  # of a schema, to which its parts refer
_BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)

Bits = np.ndarray  # [ceil(V / 32)] uint32: token t is allowed if bit t % 32 of word t // 32 is set


class ResponseFormatError(ValueError):
    """The `response_format` of a request cannot be followed."""


class Grammar:
    """The grammar of one sequence, at the state after the first `length` tokens of the sequence."""

    def __init__(self, matcher: Any, tokenizer_end: int, ends: Sequence[int], words: int, length: int = 0) -> None:
        self._matcher, self._tokenizer_end, self.ends, self.words = matcher, tokenizer_end, tuple(ends), words
        self._length = length

    def at_start(self, length: int) -> Grammar:
        """Copies an unused grammar for a sequence whose prompt has `length` tokens."""
        return Grammar(self._matcher.deep_copy(), self._tokenizer_end, self.ends, self.words, length)

    def apply(
        self,
        logits: torch.Tensor,  # [1, V]
        tokens: Sequence[int],  # of the sequence
        path: Sequence[int] = (),  # tokens of drafted nodes that follow
        token_ids: torch.Tensor | None = None,  # of the columns; None: column i is token i
    ) -> torch.Tensor:
        """Returns the logits with -inf at tokens that may not follow; unchanged where the path itself is forbidden, or
        ends the text."""
        self._advance(tokens)
        if self._tokenizer_end in path or any(end in path for end in self.ends):
            return logits
        consumed = self._matcher.try_consume_tokens(list(path))
        bits = np.zeros(self.words, np.uint32)
        if consumed == len(path):
            self._fill(bits, bits.ctypes.data)
            self.check()
        self._matcher.rollback(consumed)
        if consumed < len(path):
            return logits
        allowed = torch.from_numpy(np.unpackbits(bits.view(np.uint8), bitorder="little")).bool().to(logits.device)
        return logits.masked_fill(
            ~(allowed[: logits.shape[1]] if token_ids is None else allowed[token_ids]), -torch.inf
        )

    def mask(self, tokens: Sequence[int], out: Bits) -> None:
        """Computes the mask after the tokens of the sequence."""
        self._advance(tokens)
        self._fill(out, out.ctypes.data)
        self.check()

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens that follow with no alternative, in order."""
        self._advance(tokens)
        return self._matcher.compute_ff_tokens()

    def node_masks(self, plan: Plan, drafted: Sequence[int], root: Bits, out: np.ndarray) -> dict[int, int]:
        """Fills rows of `out` [rows, words] with the masks of drafted nodes whose path is allowed. Returns the row of
        each such node; nodes with equal token paths share a row. `root` is the mask at the root; `drafted` are the
        tokens of the nodes, root included; -1: none."""
        rows: dict[int, int] = {}
        consume, rollback, address = self._matcher.consume_token, self._matcher.rollback, out.ctypes.data
        used = 0

        def visit(nodes: Sequence[int], bits: Bits) -> None:
            nonlocal used
            by_token: dict[int, list[int]] = {}
            for node in nodes:
                for child in plan.children[node]:
                    by_token.setdefault(drafted[child], []).append(child)
            for token, same in by_token.items():
                if token >= 0 and token not in self.ends and bits[token >> 5] & _BIT[token & 31]:
                    consume(token)
                    below = out[used]
                    self._fill(below, address + used * below.nbytes)
                    rows.update(dict.fromkeys(same, used))
                    used += 1
                    visit(same, below)
                    rollback(1)

        visit((0,), root)
        self.check()
        return rows

    def _advance(self, tokens: Sequence[int]) -> None:
        """Consumes the tokens that the sequence got since the last call."""
        if len(tokens) > self._length:
            self._matcher.consume_tokens(list(tokens[self._length :]))
            self._length = len(tokens)

    def _fill(self, bits: Bits, address: int) -> None:
        """Computes the mask at the matcher's state. llguidance allows its tokenizer's end token where the text may end:
        replaces it by the request's end tokens."""
        self._matcher.unsafe_compute_mask_ptr(address, bits.nbytes)
        end = self._tokenizer_end
        if self.ends != (end,) and bits[end >> 5] & _BIT[end & 31]:
            bits[end >> 5] &= ~_BIT[end & 31]
            for other in self.ends:
                bits[other >> 5] |= _BIT[other & 31]

    def check(self) -> None:
        """Raises ResponseFormatError if the grammar has an error, or took more work than llguidance's limits allow."""
        if self._matcher.is_error():
            text = self._matcher.get_error().replace("<non-verbose/>", "").strip()
            raise ResponseFormatError(f"response_format cannot be followed: {text}")


class Grammars:
    """Compiles the grammars of one engine's requests and keeps the newest; any thread may call it."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._lock = vocab_size, Lock()
        self._tokenizers: tuple[Any, Any] = None, None  # transformers', and llguidance's for the same tokens
        self._compiled = lru_cache(_KEPT)(self._compile)

    def compile(self, response_format: Any, tokenizer: Any, ends: Sequence[int]) -> Grammar | None:
        """Returns the grammar at its beginning, which sequences copy; None for plain text. A text may end with one of
        the tokens `ends`, or where there are none with the tokenizer's end token. Raises ResponseFormatError for a
        format that cannot be followed."""
        source = read_response_format(response_format)
        if source is None:
            return None
        try:
            return self._compiled(source, self._tokenizer(tokenizer), tuple(ends))
        except ResponseFormatError as error:
            is_schema = response_format["type"] == "json_schema"
            field = _failing_field(response_format["json_schema"]["schema"]) if is_schema else ""
            raise ResponseFormatError(f"{error}, in {field} of the schema" if field else str(error)) from None

    def _compile(self, source: str, tokenizer: Any, ends: tuple[int, ...]) -> Grammar:
        """Compiles a format for llguidance's form of a tokenizer, and checks it by its first mask."""
        llguidance = _llguidance()
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
        grammar = Grammar(matcher, tokenizer.eos_token, ends or (tokenizer.eos_token,), -(-self._vocab_size // 32))
        grammar.mask((), np.empty(grammar.words, np.uint32))
        return grammar

    def _tokenizer(self, tokenizer: Any) -> Any:
        """llguidance's form of a tokenizer, which takes about 1 s to build for 49,152 tokens on one ARM core."""
        if getattr(tokenizer, "eos_token_id", None) is None:
            raise ResponseFormatError("response_format needs a tokenizer that has an end token")
        with self._lock:
            if self._tokenizers[0] is not tokenizer:
                try:
                    made = _llguidance().hf.from_tokenizer(tokenizer, self._vocab_size)
                except Exception as error:
                    message = f"response_format: llguidance cannot read this tokenizer: {error}"
                    raise ResponseFormatError(message) from None
                self._tokenizers = tokenizer, made
            return self._tokenizers[1]


def read_response_format(given: Any) -> str | None:
    """Returns a checked `response_format` as llguidance reads it; None for plain text."""
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        text = json.dumps({"type": "object"})
    elif kind == "json_schema":
        text = _schema(given.get("json_schema"))
    elif kind in ("regex", "grammar"):
        text = given.get(kind)
        if not isinstance(text, str) or not text:
            raise ResponseFormatError(f"response_format: {kind} must be a text that is not empty")
    else:
        kinds = "text, json_object, json_schema, regex, grammar"
        raise ResponseFormatError(f"response_format: pass an object whose type is one of {kinds}")
    size = len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise ResponseFormatError(f"response_format: a {kind} of {size} bytes is above {MAX_BYTES}: shorten it")
    if kind == "grammar":
        return json.dumps({"grammars": [{"lark_grammar": text}]})
    matcher = _llguidance().LLMatcher
    try:
        if kind == "regex":
            return matcher.grammar_from_regex(text)
        return matcher.grammar_from_json_schema(text, {} if "x-guidance" in json.loads(text) else JSON_OPTIONS)
    except (ValueError, RecursionError) as error:
        raise ResponseFormatError(f"response_format cannot be followed: {error}") from None


def _schema(given: Any) -> str:
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise ResponseFormatError("response_format: json_schema.schema must be a JSON schema, which is an object")
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ResponseFormatError(f"response_format: json_schema.schema is not JSON: {error}") from None


def _failing_field(schema: dict[str, Any]) -> str:
    """Returns the path of the innermost part of a schema that llguidance refuses with the error of the whole schema;
    of a larger part if that takes too many checks, "" for a schema above `_SEARCHED_BYTES`."""
    if len(json.dumps(schema)) > _SEARCHED_BYTES:
        return ""
    matcher, definitions = _llguidance().LLMatcher, {key: schema[key] for key in _DEFINITIONS if key in schema}

    def error_of(part: dict[str, Any]) -> str:
        return matcher.validate_grammar(matcher.grammar_from_json_schema(json.dumps({**definitions, **part})))

    error, path, checks = error_of(schema), "", iter(range(_CHECKS))
    while error:
        parts = ((key, part) for key, part in _parts_of_schema(schema) if isinstance(part, dict))
        inner = next((at for _, at in zip(checks, parts, strict=False) if error_of(at[1]) == error), None)
        if inner is None:
            break
        path, schema = f"{path}.{inner[0]}".lstrip("."), inner[1]
    return path


def _parts_of_schema(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values directly below a schema that may be schemas, with their keys."""
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in _DEFINITIONS):
        if isinstance(value, dict) and key in (*_DEFINITIONS, "properties", "patternProperties"):
            yield from ((f"{key}.{name}", part) for name, part in value.items())
        elif isinstance(value, list):
            yield from ((f"{key}.{place}", part) for place, part in enumerate(value))
        else:
            yield key, value


def _llguidance() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError:
        message = "response_format needs llguidance, which is not installed: pip install llguidance"
        raise ImportError(message) from None
    return llguidance
