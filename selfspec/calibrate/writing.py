"""Writes training text with the model itself: answers to the domains' prompts and to user turns that it invents.

All text comes from requests to the engine's scheduler. A chunk of text depends only on its number and the seed, so a
stopped run writes only the chunks that are missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from selfspec.calibrate.corpus import Corpus, Document
from selfspec.engine import Engine
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request
from selfspec.sequence import Sequence as Sequence_
from selfspec.text import encode

_ANSWER_TOKENS, _TURN_TOKENS = 256, 128  # the most tokens of an answer and of an invented turn
_TURN_TEMPERATURE = 0.9
_SHOWN_TOKENS = 12  # the most tokens of a domain's prompt that an invented turn starts with
_PROMPT_SHARE = 0.25  # of the documents answer a domain's prompt as it is; the others answer an invented turn
_MARK = "\u2042mark\u2042"  # a text that no chat template changes

Progress = Callable[[int], None]  # called with a number of tokens that were written
Submit = Callable[[Sequence[int], float, int, int], Request]  # (prompt, temperature, most new tokens, sample index)


@dataclass(frozen=True)
class Template:
    """The tokens that a chat template puts before and after a user's turn; a base model has none after it."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        if not getattr(tokenizer, "chat_template", None):
            return cls(tuple(encode(tokenizer, "a")[:-1]), ())
        chat = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, found, after = text.partition(_MARK)
        if not found or not after:
            raise ValueError(
                "the tokenizer's chat template changes a user's text or puts nothing after it, so calibration cannot "
                "write turns with it: correct the template, or remove it to calibrate as a base model"
            )
        return cls(*(tuple(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after)))


class Script(NamedTuple):
    """The given start of a document: a whole prompt to answer, or the first tokens of a turn to invent."""

    tokens: tuple[int, ...]
    is_whole: bool
    temperature: float  # of the answer; 0: greedy
    domain: int


class Writer:
    """Lets an engine answer prompts and write training text."""

    def __init__(self, engine: Engine, template: Template | None = None) -> None:
        self.engine, self.template = engine, template or Template.of(engine.tokenizer)
        ends = engine.generation_config.eos_token_id
        own = ends if isinstance(ends, list | tuple) else [] if ends is None else [ends]
        self.ends = tuple(dict.fromkeys([*own, *self.template.after[:1]]))  # tokens that end a turn or an answer

    def answers(
        self,
        prompts: list[list[int]],
        temperature: float,
        new_tokens: int,
        seed: int,
        progress: Progress = lambda _: None,
    ) -> Corpus:
        """One row for each prompt: the prompt and at most `new_tokens` tokens of its answer."""
        with self._requests(seed) as submit:
            requests = [submit(prompt, temperature, new_tokens, index) for index, prompt in enumerate(prompts)]
            sequences = [self._decoded(request, progress) for request in requests]
        return Corpus.one_per_row([Document(sequence.tokens, len(sequence.prompt)) for sequence in sequences])

    def chunk(
        self,
        prompts: list[list[list[int]]],  # for each domain, the tokens of its prompts
        number: int,
        documents: int,
        length: int,
        seed: int = 0,
        progress: Progress = lambda _: None,
    ) -> Corpus:
        """So many documents of at most `length` tokens, packed into rows of that length."""
        source = random.Random(f"{seed}.{number}")
        scripts = [self.script(prompts, length, source) for _ in range(documents)]
        with self._requests(source.getrandbits(62)) as submit:
            turns = {
                index: submit(script.tokens, _TURN_TEMPERATURE, self._turn_tokens(script, length), index)
                for index, script in enumerate(scripts)
                if not script.is_whole
            }
            answers = []
            for index, script in enumerate(scripts):  # answers begin while later turns are being written
                turn = self._decoded(turns[index], progress).tokens if index in turns else None
                prompt = list(script.tokens) if turn is None else self._closed(turn)
                most = max(1, min(_ANSWER_TOKENS, length - len(prompt)))
                answers.append(submit(prompt, script.temperature, most, index))
            written = zip(scripts, (self._decoded(answer, progress) for answer in answers), strict=True)
            return Corpus.pack([self._document(script, answer) for script, answer in written], length)

    def script(self, prompts: list[list[list[int]]], length: int, source: random.Random) -> Script:
        """Draws the start of a document. A prompt longer than half of `length` tokens is not answered as it is."""
        domain = source.randrange(len(prompts))
        tokens, before, after = source.choice(prompts[domain]), self.template.before, self.template.after
        if source.random() < _PROMPT_SHARE and len(tokens) <= length // 2:
            return Script(tuple(tokens), True, source.choice((0.4, 0.8)), domain)
        turn = tokens[len(before) : len(tokens) - len(after)]
        shown = source.randint(0, min(_SHOWN_TOKENS, len(turn) // 2))
        start = before + tuple(turn[: shown or not before])  # a sequence needs at least one token
        return Script(start, not after, source.choice((0.0, 0.8)), domain)

    def _turn_tokens(self, script: Script, length: int) -> int:
        """The most tokens of an invented turn, so that at least half of the rest of the row is left for its answer."""
        rest = length - len(script.tokens) - len(self.template.after)
        return max(1, min(_TURN_TOKENS, rest // 2))

    def _closed(self, turn: list[int]) -> list[int]:
        """An invented turn as a prompt: the template's tokens follow, in place of the end token that was drawn."""
        text = turn[:-1] if turn[-1] in self.ends else turn
        return [*text, *self.template.after]

    def _document(self, script: Script, answer: Sequence_) -> Document:
        """The model chose all tokens after the script but those of the template."""
        prompt = len(answer.prompt)
        forced = range(0) if script.is_whole else range(prompt - len(self.template.after), prompt)
        return Document(answer.tokens, len(script.tokens), script.domain, forced)

    @contextmanager
    def _requests(self, seed: int) -> Iterator[Submit]:
        """Yields a function that submits a sequence as a request of its own: the scheduler keeps its batch full with
        them. An error or an interrupt in the context cancels all of them."""
        submitted: list[Request] = []

        def submit(prompt: Sequence[int], temperature: float, new_tokens: int, index: int) -> Request:
            params = SamplingParams(
                do_sample=temperature > 0, temperature=temperature or 1.0, top_k=0, stop_token_ids=self.ends
            )
            longest = min(len(prompt) + new_tokens, self.engine.context)
            request = Request([Sequence_(list(prompt), seed, index, longest, params)], self.engine.model.device)
            self.engine.scheduler.submit(request)
            submitted.append(request)
            return request

        try:
            yield submit
        except BaseException:
            for request in submitted:
                self.engine.scheduler.cancel(request)
            raise

    def _decoded(self, request: Request, progress: Progress) -> Sequence_:
        """Waits for the end of a request and returns its sequence."""
        self.engine.scheduler.wait(request)
        (sequence,) = request.sequences
        progress(sequence.new_tokens)
        return sequence
