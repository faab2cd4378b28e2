"""Log probabilities in OpenAI's two shapes: lists of objects in a chat, lists of values in a text completion."""

from __future__ import annotations

from codecs import getincrementaldecoder
from functools import lru_cache
from typing import Any, Literal

from transformers.convert_slow_tokenizer import bytes_to_unicode

from selfspec.logprobs import TokenLogprob
from selfspec.sequence import Sequence

Json = dict[str, Any]

_LEAST = -9999.0  # stands for minus infinity, which JSON lacks, as in OpenAI's answers
_CACHED_TOKENS = 16_384  # token ids whose bytes are kept, about 100 bytes each


class TokenBytes:
    """The bytes that each token of a tokenizer stands for in the middle of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before = list(tokenizer("a", add_special_tokens=False)["input_ids"])[-1:]
        self._by_character = {character: byte for byte, character in bytes_to_unicode().items()}
        self._special = frozenset(tokenizer.all_special_ids)
        self.of = lru_cache(_CACHED_TOKENS)(self._of)

    def is_special(self, token: int) -> bool:
        """Whether the token has no text in an answer."""
        return token in self._special

    def _of(self, token: int) -> bytes:
        """Decodes the token after another one: a first token may be spelled differently. A part of a character has no
        text of its own: its bytes are spelled in the vocabulary."""
        text = self._decode([*self._before, token])[len(self._decode(self._before)) :]
        if "\ufffd" not in text:
            return text.encode()
        spelled = self._tokenizer.convert_ids_to_tokens(token) or ""
        if len(spelled) == 6 and spelled.startswith("<0x"):
            return bytes([int(spelled[3:5], 16)])
        if all(character in self._by_character for character in spelled):
            return bytes(self._by_character[character] for character in spelled)
        return text.encode()

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class ChoiceLogprobs:
    """The log probabilities of one choice, step by step; with `echo` those of the prompt's tokens first."""

    def __init__(self, sequence: Sequence, token_bytes: TokenBytes, kind: Literal["chat", "text"], echo: str) -> None:
        self._sequence, self._bytes, self._kind, self._echo = sequence, token_bytes, kind, echo
        self._new_tokens = 0  # that were returned
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the text before the next token

    def advance(self, new_tokens: int) -> Json | None:
        """Returns the values of the tokens since the last call; None if there are none."""
        found: list[int | TokenLogprob] = []
        if self._echo:
            found = [self._sequence.prompt[0], *self._sequence.first_sample.prompt_logprobs]
            self._skip_first_space()
        found += self._sequence.logprobs[self._new_tokens : new_tokens]
        self._new_tokens = new_tokens
        shaped = self._of_chat(found) if self._kind == "chat" else self._of_text(found)
        self._echo = ""
        return shaped if found else None

    def _skip_first_space(self) -> None:
        """Some tokenizers spell a text's first word with a space before it, which the text lacks."""
        first = next((token for token in self._sequence.prompt if not self._is_hidden(token)), None)
        if first is not None and self._bytes.of(first).startswith(b" ") and not self._echo.startswith(" "):
            self._offset = -1

    def _of_chat(self, found: list[Any]) -> Json:
        content = [
            {
                **self._object(entry.token, entry.logprob),
                "top_logprobs": [self._object(*likely) for likely in entry.top],
            }
            for entry in found
        ]
        return {"content": content, "refusal": None}

    def _object(self, token: int, logprob: float) -> Json:
        spelled = self._bytes.of(token)
        return {"token": spelled.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(spelled)}

    def _of_text(self, found: list[int | TokenLogprob]) -> Json:
        shaped: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in found:
            token, logprob, top = (
                (entry, None, None) if isinstance(entry, int) else (entry.token, entry.logprob, entry.top)
            )
            shaped["tokens"].append(self._name(token))
            shaped["token_logprobs"].append(None if logprob is None else max(logprob, _LEAST))
            shaped["text_offset"].append(max(self._start_of(token), 0))
            likely = None if top is None or logprob is None else dict([(token, logprob), *top])
            named = (
                None if likely is None else {self._name(other): max(value, _LEAST) for other, value in likely.items()}
            )
            shaped["top_logprobs"].append(named)
        return shaped

    def _start_of(self, token: int) -> int:
        """The number of characters before the token in the text; adds the token to the text."""
        start, spelled = self._offset, self._bytes.of(token)
        if self._is_hidden(token):
            return start
        self._offset += len(self._decoder.decode(spelled))
        whole = spelled.decode(errors="ignore")  # of a part of a character nothing is left
        return self._offset - len(whole) if whole else start

    def _is_hidden(self, token: int) -> bool:
        """Whether the text lacks the token: a special one that the echoed prompt does not have at this place."""
        text = self._bytes.of(token).decode(errors="replace")
        return self._bytes.is_special(token) and not self._echo.startswith(text, max(self._offset, 0))

    def _name(self, token: int) -> str:
        """The token's text; for a part of a character its bytes."""
        spelled = self._bytes.of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def joined(parts: list[Json]) -> Json | None:
    """Joins the values of all steps; None if there are none."""
    if not parts:
        return None
    return {
        key: [value for part in parts for value in part[key]] if isinstance(parts[0][key], list) else None
        for key in parts[0]
    }
