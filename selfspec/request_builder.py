"""Builds the request of one call: checks its prompts, sampling parameters and options before any work starts.

Takes no page of the KV cache and runs no pass. `request` reads single arguments; the scheduler runs what is built here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import GenerationConfig, StopStringCriteria

from selfspec.drafters import Drafters
from selfspec.governor.rules import Policy, Rules
from selfspec.grammar import Grammar, Grammars, ResponseFormatError
from selfspec.models.decoder import Decoder
from selfspec.request import (
    Resolved,
    Settings,
    SpeculationRequest,
    check_prompts,
    check_token_ids,
    read_seeds,
    read_settings,
    split_options,
)
from selfspec.sequence import Request
from selfspec.sequence import Sequence as Sequence_
from selfspec.speculation.plan import Plan
from selfspec.warn import WarnOnce

DEFAULT_COMPLETION_TOKENS = 512  # new tokens of complete() and stream() where no length is given

# Arguments that only sampling uses, and their values that need no warning in a greedy request: transformers' defaults,
# the values that switch them off, and temperature 0, which asks for greedy decoding.
_WITHOUT_EFFECT = {"temperature": (0.0, 1.0), "top_k": (0, 50), "top_p": (1.0,), "min_p": (0.0,)}


class RequestBuilder:
    """Builds requests for one engine: its model, exits, rules and longest sequence."""

    def __init__(
        self,
        model: Decoder,
        drafters: Drafters,
        rules: Rules,
        context: int,  # tokens of a sequence, at most
        has_kernels: bool,
    ) -> None:
        self.model, self.drafters, self.rules = model, drafters, rules
        self.context, self.has_kernels = context, has_kernels
        self._grammars = Grammars(model.config.vocab_size)
        self._warn = WarnOnce()

    def build(
        self,
        prompts: list[list[int]],
        width: int,  # tokens of the widest prompt, padding included
        settings: Settings,
        seed: int | Sequence[int] | None,
        processors: Sequence[Callable] | None,
        criteria: Sequence[Callable] | None,
        speculation: SpeculationRequest,
        tokenizer: Any = None,  # for stop strings and grammars
        response_format: Any = None,
    ) -> Request:
        """Returns the request; raises ValueError for an argument that cannot be served."""
        check_prompts(prompts, self.model.config.vocab_size, self.context)
        resolved = settings.resolve(width, processors, criteria, self.model.device)
        grammar, resolved = self._grammar(response_format, tokenizer, settings, resolved)
        params = resolved.params
        check_token_ids(params, self.model.config.vocab_size)
        seeds = read_seeds(seed, len(prompts), params.do_sample)
        plan = None if speculation.plan is None else Plan.parse(speculation.plan)
        layer = self.drafters.requested_exit_layer(speculation, plan)
        policy = self._policy(resolved, speculation, plan, layer)
        if policy.only_copies:
            self._warn_no_profile()
        if resolved.processors and self.has_kernels:
            self._warn_callables(resolved.processors)
        request = Request(
            self._sequences(prompts, seeds, resolved, settings.num_return_sequences, grammar),
            device=self.model.device,
            processors=tuple(resolved.processors),
            criteria=tuple(_criteria(resolved, tokenizer)),
            policy=policy,
            rejection=speculation.acceptance == "rejection" and params.do_sample,
            logprobs=settings.logprobs,
            prompt_logprobs=settings.prompt_logprobs,
        )
        if not policy.permanent_reason:
            request.find_drafter = partial(self.drafters.drafter, speculation, prompts, policy, layer)
            for sequence in request.sequences:  # here, so that the decoding loop does not wait: 1 ms for 8,000 tokens
                sequence.copying.read(sequence.prompt, len(sequence.prompt))
        return request

    def build_for_tokens(
        self, tokenizer: Any, model_config: GenerationConfig, tokens: list[list[int]], options: dict[str, Any]
    ) -> Request:
        """Builds a request for the tokens of prompts with `options`, the keyword arguments of a call for text."""
        options = dict(options)
        for name in ("input_ids", "inputs", "attention_mask", "streamer"):
            if name in options:
                raise ValueError(f"{name} goes with generate(), not with text: use stream() to follow a completion")
        names = ("generation_config", "logits_processor", "stopping_criteria", "seed", "tokenizer", "response_format")
        config, processors, criteria, seed, own_tokenizer, form = (options.pop(name, None) for name in names)
        speculation, kwargs = split_options(options)
        lengths = ("max_new_tokens", "max_length")
        if all(kwargs.get(name) is None and getattr(config, name, None) is None for name in lengths):
            kwargs["max_new_tokens"] = DEFAULT_COMPLETION_TOKENS
        settings = self.settings(model_config, config, kwargs)
        width = max((len(prompt) for prompt in tokens), default=0)
        tokenizer = own_tokenizer if own_tokenizer is not None else tokenizer
        return self.build(tokens, width, settings, seed, processors, criteria, speculation, tokenizer, form)

    def settings(
        self, model_config: GenerationConfig, config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> Settings:
        """Reads the arguments of a call; warns of those that only sampling uses where the call decodes greedily."""
        settings = read_settings(model_config, config, kwargs)
        if not settings.sampling.do_sample:
            self._warn_ignored(kwargs)
        return settings

    def _warn_ignored(self, asked: dict[str, Any]) -> None:
        for name, neutral in _WITHOUT_EFFECT.items():
            value = asked.get(name)
            if value is not None and value not in neutral:
                self._warn(
                    f"{name}={value} has no effect: do_sample is False, so decoding is greedy. Pass do_sample=True to "
                    f"sample, or leave {name} out."
                )

    def _policy(
        self, resolved: Resolved, speculation: SpeculationRequest, plan: Plan | None, layer: int | None
    ) -> Policy:
        return Policy(
            rules=(speculation.rules or self.rules).for_device(self.model.device.type),
            sampling=resolved.params,
            mode=speculation.speculative_decoding,
            plan=plan,
            has_exit=layer is not None or self.drafters.profile is not None,
            stateful_processors=speculation.stateful_processors,
            new_tokens=resolved.max_new_tokens,
        )

    def _sequences(
        self, prompts: list[list[int]], seeds: list[int], resolved: Resolved, samples: int, grammar: Grammar | None
    ) -> list[Sequence_]:
        """Returns `samples` sequences per prompt; those after a prompt's first share its prefill."""
        sequences: list[Sequence_] = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            longest = min(len(prompt) + resolved.max_new_tokens, self.context)
            first = Sequence_(prompt, seed, 0, longest, resolved.params)
            sequences.append(first)
            for index in range(1, samples):
                sample = Sequence_(prompt, seed, index, longest, resolved.params)
                sample.parent = first
                sequences.append(sample)
        if grammar is not None:
            for sequence in sequences:
                sequence.grammar = grammar.at_start(len(sequence.prompt))
        return sequences

    def _grammar(
        self, response_format: Any, tokenizer: Any, settings: Settings, resolved: Resolved
    ) -> tuple[Grammar | None, Resolved]:
        """Compiles the grammar of a request. Without an end token the text ends with the tokenizer's: where a grammar
        is complete, only an end token may follow."""
        grammar = self._grammars.compile(response_format, tokenizer, settings.eos_token_ids)
        if grammar is None:
            return None, resolved
        params, asked = resolved.params, settings.sampling
        if max(params.min_new_tokens, params.min_length, asked.min_new_tokens, asked.min_length):
            raise ResponseFormatError("response_format and a minimum length are not possible together: leave one out")
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *grammar.ends)))
        return grammar, replace(resolved, params=replace(params, stop_token_ids=stops))

    def _warn_callables(self, callables: Sequence[Callable]) -> None:
        names = ", ".join(
            dict.fromkeys(getattr(function, "__name__", type(function).__name__) for function in callables)
        )
        self._warn(
            f"the logits processors {names} are Python callables: every step waits for them on the host, so decoding "
            "is slower. Built-in options (penalties, logit_bias, allowed_token_ids, ...) run on the device."
        )

    def _warn_no_profile(self) -> None:
        rounded = ", with --quantize if that rounded the weights: a profile of the unrounded ones does not fit them"
        self._warn(
            "drafting only what the text repeats: this model has no profile, so there is no trained exit. Calibrate "
            f"it: python -m selfspec.calibrate --model ...{rounded if self.model.is_quantized else ''}"
        )


def _criteria(resolved: Resolved, tokenizer: Any) -> list[Callable]:
    every = list(resolved.criteria)
    if resolved.stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: pass tokenizer=, or one to Engine.from_model")
        every.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=list(resolved.stop_strings)))
    return every
