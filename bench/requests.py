"""Shared by the benchmarks: a model with its prompts, the options of requests, and requests that record token times.

A timed request records its times on the loop's thread, so that no thread per request competes with the loop for the
interpreter. Each benchmark decides which requests to send, and evaluates their times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers

from bench import synthetic
from bench.machine import freeze_objects
from selfspec import Engine
from selfspec.models import loading
from selfspec.request import read_settings, split_options
from selfspec.sequence import Progress
from selfspec.speculation.exit import Exit
from selfspec.text import encode

PROMPTS = Path(__file__).parent / "prompts"
DEFAULT_PLAN = "chain:2"  # of a model without a profile
NAMED_TOKENS = 16  # token ids in a logit bias, a ban or a list of stop tokens
LONGEST_PROMPT = 1280  # tokens; the longest shipped prompt has about 1,100 with one token per character

Options = dict[str, Any]  # keyword arguments of `generate`


def read_prompts(folder: Path, limit: int) -> dict[str, list[str]]:
    """Up to `limit` prompts of every NAME.jsonl file, by name."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"no .jsonl file in {folder}: pass --prompts with a folder of them")
    texts = {file.stem: file.read_text(encoding="utf-8").split("\n") for file in files}
    return {name: [json.loads(line)["prompt"] for line in lines if line][:limit] for name, lines in texts.items()}


def add_arguments(parser: argparse.ArgumentParser, new_tokens: int, prompts: int) -> None:
    """Arguments that choose the model, its prompts and its drafts."""
    add = parser.add_argument
    add("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    add("--shape", choices=synthetic.SHAPES, help="random weights of this shape in place of a model")
    add("--device", default="auto", help="cpu, cuda (default: the best there is)")
    add("--dtype", default="auto", help="float32, bfloat16, float16 (default: by device)")
    add("--quantize", choices=["int4", "int8"], help="round 16-bit weights at load")
    add("--profile", default="auto", help="folder, 'auto' or 'none'")
    add("--plan", help=f"draft this plan (default: the profile's choice, without a profile {DEFAULT_PLAN})")
    add("--exit-layer", type=int, help="default: the profile's, else a quarter of the layers; 2 for a shape")
    add("--agree", type=float, default=0.70, help="share of tokens that a shape's exit ranks first (default: 0.7)")
    add("--agree-top4", type=float, default=0.85, help="share that it ranks among its best four (default: 0.85)")
    add("--no-kernels", action="store_true", help="use PyTorch operations on a GPU too")
    add("--prompts", type=Path, default=PROMPTS, help="folder of NAME.jsonl files with 'prompt' lines")
    add("--limit", type=int, default=prompts, help=f"prompts of each file, or of a shape (default: {prompts})")
    add("--prompt-tokens", type=int, default=128, help="tokens of a shape's random prompts (default: 128)")
    add("--max-new-tokens", type=int, default=new_tokens, help=f"of each sequence (default: {new_tokens})")
    add(
        "--seconds", type=float, default=float("inf"), help="of measuring; what takes longer is left out (default: all)"
    )


@dataclass
class Target:
    """A model to measure, its prompts by domain, and the options of a request that drafts."""

    name: str
    engine: Engine
    domains: dict[str, list[list[int]]]
    speculation: Options
    synthetic: dict[str, Any] | None = None  # how the exit of random weights was made to agree
    hf: Any = None  # the transformers model that shares the weights

    @property
    def prompts(self) -> list[list[int]]:
        """The first prompt of every domain, then the second of every domain, and so on."""
        turns = zip_longest(*self.domains.values())
        return [prompt for prompt in chain.from_iterable(turns) if prompt is not None]

    @property
    def modes(self) -> dict[str, Options]:
        return {"plain": {"speculative_decoding": False}, "speculation": self.speculation}


def open_target(
    args: argparse.Namespace, max_batch: int, longest: int | None = None, with_transformers: bool = False
) -> Target:
    """Loads the model into an engine for up to `max_batch` sequences of `longest` tokens, prompt included."""
    target = _open(args, max_batch, longest, with_transformers)
    freeze_objects(target.engine)
    return target


def _open(args: argparse.Namespace, max_batch: int, longest: int | None, with_transformers: bool) -> Target:
    longest = longest or LONGEST_PROMPT + args.max_new_tokens
    limits: dict[str, Any] = {
        "max_length": -(-longest // 64) * 64,
        "max_batch": max_batch,
        "kernels": False if args.no_kernels else None,
        "prefix_reuse": False,  # prompts are sent more than once, and every call shall prefill
    }
    if args.shape:
        return _open_shape(args, limits)
    profile, hf = None if args.profile == "none" else args.profile, None
    if with_transformers:
        hf, tokenizer = _load_transformers(args)
        engine = Engine.from_model(hf, tokenizer, profile=profile, **limits)
    else:
        engine = Engine.from_pretrained(args.model, args.device, args.dtype, profile, quantize=args.quantize, **limits)
    texts = read_prompts(args.prompts, args.limit)
    domains = {name: [tokens_of(engine.tokenizer, text) for text in prompts] for name, prompts in texts.items()}
    drafts = {"plan": args.plan or DEFAULT_PLAN, "exit_layer": args.exit_layer}
    return Target(args.model, engine, domains, {} if engine.profile and not args.plan else drafts, hf=hf)


def without_profile(target: Target, domains: dict[str, list[list[int]]]) -> Target:
    """The same weights in an engine of its own for one sequence, without a profile: it drafts copies alone."""
    of = target.engine
    engine = Engine(
        of.model, of.tokenizer, of.generation_config, profile=None, max_length=of.context, max_batch=1,
        kernels=of.has_kernels, name=of.name, prefix_reuse=False,
    )  # fmt: skip
    return Target(target.name, engine, domains, {})


def _load_transformers(args: argparse.Namespace) -> tuple[Any, Any]:
    device, folder = loading.pick_device(args.device), loading.resolve(args.model)
    stored = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype or torch.float32
    dtype = loading.pick_dtype(args.dtype, device, stored)
    hf: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    return hf.to(device).eval(), transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _open_shape(args: argparse.Namespace, limits: dict[str, Any]) -> Target:
    """Random weights and random prompts, with an exit that is tuned to agree as often as asked for."""
    device = loading.pick_device(args.device)
    dtype = loading.pick_dtype(args.dtype, device, torch.bfloat16)
    model = synthetic.synthetic(args.shape, str(device), dtype)
    engine = Engine(model, synthetic.word_tokenizer(model.config.vocab_size), **limits)
    layer, wanted = 2 if args.exit_layer is None else args.exit_layer, synthetic.Agreement(args.agree, args.agree_top4)
    found = synthetic.tune_exit(engine, layer, wanted)
    if args.quantize:
        exit = engine.drafters.exits[layer]
        engine = Engine(synthetic.rounded(engine.model, args.quantize), engine.tokenizer, **limits)
        engine.drafters.exits[layer] = Exit(engine.model, layer).with_head_rows(exit.head_rows, [])
    prompts = synthetic.random_prompts(engine.model, args.limit, args.prompt_tokens).tolist()
    drafts = {"plan": args.plan or DEFAULT_PLAN, "exit_layer": layer}
    return Target(args.shape, engine, {"random": prompts}, drafts, found)


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """The prompt's tokens: a user's message where the model has a chat template."""
    return encode(tokenizer, [{"role": "user", "content": text}] if tokenizer.chat_template else text)


GREEDY: Options = {"do_sample": False, "repetition_penalty": 1.0}
SAMPLED: Options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
QWEN: Options = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def built_in_options(prompts: Sequence[Sequence[int]], stops: Sequence[int], vocabulary: int) -> dict[str, Options]:
    """Options that run on the device, by name. The most frequent tokens of the prompts are biased and banned, so that
    the text changes; `stops` are stop tokens."""
    often = [token for token, _ in Counter(token for prompt in prompts for token in prompt).most_common(NAMED_TOKENS)]
    return {
        "greedy": GREEDY,
        "temperature 0.7, top-p 0.9": {**SAMPLED, "temperature": 0.7, "top_p": 0.9},
        "top-k 50": {**SAMPLED, "top_k": 50},
        "min-p 0.1": {**SAMPLED, "min_p": 0.1},
        "repetition penalty 1.1": {**GREEDY, "repetition_penalty": 1.1},
        "presence penalty 0.5": {**GREEDY, "presence_penalty": 0.5},
        "frequency penalty 0.2": {**GREEDY, "frequency_penalty": 0.2},
        "min_new_tokens 64": {**GREEDY, "min_new_tokens": 64, "stop_token_ids": list(stops)},
        "logit bias": {**GREEDY, "logit_bias": dict.fromkeys(often, 2.0)},
        "banned tokens": {**GREEDY, "suppress_tokens": often},
        "allowed tokens": {**GREEDY, "allowed_token_ids": list(range(vocabulary // 2))},
        "stop tokens": {**GREEDY, "stop_token_ids": list(stops)},
        "Qwen's settings": QWEN,
    }


class TokenTimes(Progress):
    """Records when a request's new tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[tuple[float, int]] = []  # (time in seconds, number of new tokens at that time)

    def update(self, new_tokens: int) -> None:
        self._record(new_tokens)
        super().update(new_tokens)

    def end(self, new_tokens: int) -> None:
        self._record(new_tokens)
        super().end(new_tokens)

    def _record(self, new_tokens: int) -> None:
        if new_tokens > (self.arrivals[-1][1] if self.arrivals else 0):
            self.arrivals.append((time.perf_counter(), new_tokens))


class TimedRequest:
    """A request for one sequence, and the times of its tokens. The model's end tokens do not end it."""

    def __init__(self, engine: Engine, prompt: Sequence[int], seed: int, new_tokens: int, options: Options) -> None:
        speculation, kwargs = split_options(options)
        processors, response_format = kwargs.pop("logits_processor", None), kwargs.pop("response_format", None)
        settings = read_settings(
            engine.generation_config, None, {"eos_token_id": None, "max_new_tokens": new_tokens, **kwargs}
        )
        self.engine, self.submitted_at, self.times = engine, 0.0, TokenTimes()
        self.request = engine._requests.build(
            [list(prompt)], len(prompt), settings, seed, processors, None, speculation, engine.tokenizer,
            response_format,
        )  # fmt: skip
        self.request.progress = self.times

    def submit(self) -> None:
        self.submitted_at = time.perf_counter()
        self.engine.scheduler.submit(self.request)

    def wait(self) -> TimedRequest:
        self.engine.scheduler.wait(self.request)
        return self

    def cancel(self) -> None:
        self.engine.scheduler.cancel(self.request)

    @property
    def tokens(self) -> list[int]:
        (sequence,) = self.request.sequences
        return sequence.tokens[len(sequence.prompt) :]

    @property
    def ended_at(self) -> float:
        return self.times.arrivals[-1][0]

    @property
    def first_token_s(self) -> float:
        """Seconds from submission to the first token."""
        return self.times.arrivals[0][0] - self.submitted_at

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds per token after the first step's tokens; None if there are no others."""
        (first_at, first), (last_at, last) = self.times.arrivals[0], self.times.arrivals[-1]
        return (last_at - first_at) / (last - first) if last > first else None

    def gaps(self, start: float, stop: float) -> list[float]:
        """Seconds between consecutive arrivals, of those that overlap with the time from `start` to `stop`."""
        pairs = pairwise(at for at, _ in list(self.times.arrivals))
        return [after - before for before, after in pairs if after > start and before < stop]


def run_together(requests: Sequence[TimedRequest]) -> float:
    """Submits all requests at once and waits for all; returns tokens per second."""
    for request in requests:
        request.submit()
    for request in requests:
        request.wait()
    seconds = max(request.ended_at for request in requests) - requests[0].submitted_at
    return sum(len(request.tokens) for request in requests) / seconds
