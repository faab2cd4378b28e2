"""Results of requests: statistics, outputs, completions and streams, made from a request's sequences."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from selfspec.history import Change
from selfspec.logprobs import TokenLogprob
from selfspec.request import Settings
from selfspec.scheduler import Scheduler
from selfspec.sequence import Request, Sequence
from selfspec.text import Detokenizer


@dataclass(frozen=True)
class Stats:
    """Statistics of one sequence. `cycles` counts steps."""

    new_tokens: int
    cycles: int
    drafted: int
    accepted: int
    accept_rate: float  # accepted / sum of reached_by_depth; 0 where nothing was drafted
    tokens_per_cycle: float
    plan: str  # the most used one
    exit_layer: int | None  # of the exit that the request may draft with, also where the plan only copies
    disabled_reason: str | None  # the first reason for a plain step, other than `measuring`
    finish_reason: str
    elapsed_s: float
    changes: list[Change]  # the first plan, every change of plan, and the end of `measuring`
    ood: bool  # the text was found to be unlike the texts that the exit was calibrated on
    accepted_by_depth: list[int]  # accepted nodes of each depth, from depth 1 on
    reached_by_depth: list[int]  # steps that accepted a node of the depth, or rejected all of them


@dataclass(frozen=True)
class GenerateOutput:
    """Returned by `generate` with return_dict_in_generate=True."""

    sequences: torch.Tensor  # [B * num_return_sequences, longest]
    stats: list[Stats]
    logprobs: list[list[TokenLogprob]] | None = None  # of the new tokens of each sequence, with `logprobs`
    prompt_logprobs: list[list[TokenLogprob]] | None = None  # of its prompt's tokens from the second on


@dataclass(frozen=True)
class Completion:
    """A completed prompt. `text` and `tokens` are the new ones only; `finish_reason` is 'stop' or 'length'."""

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    origins: list[str]  # of each token: 'drafted', 'decoded' (by the whole model, after drafts), or 'plain'
    logprobs: list[TokenLogprob] | None = None  # of each token, with `logprobs`
    prompt_logprobs: list[TokenLogprob] | None = None  # of the prompt's tokens from the second on


class Stream(Iterator[str]):
    """Text pieces of one completion in progress. `completion` holds the result once all pieces were read."""

    def __init__(self, request: Request, scheduler: Scheduler, tokenizer: Any) -> None:
        self._request, self._sequence, self._scheduler = request, request.sequences[0], scheduler
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, self._sequence.prompt)
        self._progress = _progress(request, scheduler)
        self._made = 0  # new tokens so far
        self._shown = 0  # those that are in the pieces so far

    def __next__(self) -> str:
        while self._has_more():
            piece = self._show(self._waiting)
            if piece:
                return piece
        raise StopIteration

    def marked(self) -> Iterator[tuple[str, str]]:
        """The pieces token by token, each with its token's origin, as in `Completion.origins`.

        A character spread over several tokens comes with the last of them.
        """
        while self._has_more():
            origin = self._sequence.history.origins[self._shown]
            piece = self._show(1)
            if piece:
                yield piece, origin

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops generating and frees the cache; harmless when already finished."""
        self._progress.close()
        if self._request.is_cancelled and self._made:  # before the first token: submitting failed, or has waited
            self._scheduler.cancel(self._request)

    @property
    def completion(self) -> Completion | None:
        """The finished completion; None while there are pieces to come, and after an early close."""
        is_complete = self._sequence.finish_reason in ("stop", "length")
        all_shown = self._shown == self._sequence.new_tokens
        return completion_of(self._sequence, self._tokenizer) if is_complete and all_shown else None

    @property
    def _waiting(self) -> int:
        return self._made - self._shown

    def _has_more(self) -> bool:
        """Waits for the next step if every token was shown; returns whether there is another token."""
        if not self._waiting:
            self._made = next(self._progress, self._made)
        return self._waiting > 0

    def _show(self, count: int) -> str:
        """Returns the text that the next `count` tokens add."""
        sequence = self._sequence
        start = len(sequence.prompt) + self._shown
        self._shown += count
        last = self._request.progress.is_over and self._shown == sequence.new_tokens
        return self._detokenizer.add(sequence.tokens[start : start + count], last)


def _progress(request: Request, scheduler: Scheduler) -> Generator[int, None, None]:
    """Submits the request when the first piece is wanted; yields how many new tokens there are.

    Not a method: a stream that is dropped must not be kept alive, cache and all, by its own generator.
    """
    scheduler.submit(request)
    with closing(scheduler.follow(request)) as progress:  # closing this generator alone leaves the inner one open
        yield from progress


def to_tensor(input_ids: torch.Tensor, sequences: list[Sequence], settings: Settings) -> torch.Tensor:
    """Returns the prompts as given, padding included, and their new tokens, padded on the right to the longest."""
    samples = settings.num_return_sequences
    prompts = input_ids if samples == 1 else input_ids.repeat_interleave(samples, dim=0)
    longest = max(sequence.new_tokens for sequence in sequences)
    pad = settings.pad_token_id if settings.pad_token_id is not None else 0
    new = [sequence.tokens[len(sequence.prompt) :] + [pad] * (longest - sequence.new_tokens) for sequence in sequences]
    # numpy reads lists 4 times as fast as torch.
    return torch.cat((prompts, torch.from_numpy(np.array(new, dtype=np.int64)).to(input_ids.device)), dim=1)


def output_of(tokens: torch.Tensor, request: Request) -> GenerateOutput:
    every = request.sequences
    of_new = None if request.logprobs is None else [sequence.logprobs for sequence in every]
    of_prompts = (
        None if request.prompt_logprobs is None else [sequence.first_sample.prompt_logprobs for sequence in every]
    )
    return GenerateOutput(tokens, [stats_of(sequence) for sequence in every], of_new, of_prompts)


def completion_of(sequence: Sequence, tokenizer: Any) -> Completion:
    tokens = sequence.tokens[len(sequence.prompt) :]
    assert sequence.finish_reason is not None
    text = Detokenizer(tokenizer, sequence.prompt).add(tokens, last=True)
    request = sequence.request
    return Completion(
        text,
        tokens,
        sequence.finish_reason,
        stats_of(sequence),
        list(sequence.history.origins),
        None if request.logprobs is None else sequence.logprobs,
        None if request.prompt_logprobs is None else sequence.first_sample.prompt_logprobs,
    )


def stats_of(sequence: Sequence) -> Stats:
    history = sequence.history
    reached = history.accepted + history.rejections
    assert sequence.finish_reason is not None
    exit = sequence.request.exit
    return Stats(
        new_tokens=sequence.new_tokens,
        cycles=history.steps,
        drafted=history.drafted,
        accepted=history.accepted,
        accept_rate=history.accepted / reached if reached else 0.0,
        tokens_per_cycle=sequence.new_tokens / history.steps,
        plan=str(history.plans.most_common(1)[0][0]),
        exit_layer=None if exit is None else exit.layer,
        disabled_reason=sequence.disabled_reason,
        finish_reason=sequence.finish_reason,
        elapsed_s=sequence.elapsed_s,
        changes=list(history.changes),
        ood=sequence.skill.was_ood,
        accepted_by_depth=list(history.accepted_by_depth),
        reached_by_depth=list(history.reached_by_depth),
    )
