"""What the benchmarks that send many requests share: a model with its prompts, request options, and stamped requests.

A stamped request notes, on the loop's own thread, when each of its tokens came; no thread per request takes the
interpreter from the loop. Which requests are sent when, and what their times say, is left to each benchmark.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import synthetic
from selfspec import Engine
from selfspec.models import loading
from selfspec.progress import Progress
from selfspec.request import read_settings, split_options
from selfspec.text import encode

PROMPTS = Path(__file__).parent / "prompts"
DEFAULT_PLAN = "chain:2"  # where the model has no profile
NAMED_TOKENS = 16  # token ids in a bias, a ban or a list of stop tokens

Options = dict[str, Any]  # of a request, as `generate` takes them


def read_prompts(folder: Path, limit: int) -> list[str]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"no .jsonl file in {folder}: pass --prompts with a folder of them")
    return [json.loads(line)["prompt"] for file in files for line in file.read_text().splitlines()[:limit]]


def add_arguments(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    """Which model decodes which prompts, and what it drafts."""
    add = parser.add_argument
    add("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    add("--shape", choices=synthetic.SHAPES, help="in place of a model: synthetic weights")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--profile", default="auto", help="folder, 'auto' or 'none'")
    add("--plan", help=f"draft this plan (default: the profile's choice, without a profile {DEFAULT_PLAN})")
    add("--exit-layer", type=int, help="default: the profile's, else a quarter of the layers; 2 for a shape")
    add("--agree", type=float, default=0.70, help="how often a shape's exit shall hold the model's token")
    add("--agree-top4", type=float, default=0.85, help="how often one of its best four shall")
    add("--no-kernels", action="store_true", help="PyTorch's operations on a GPU too")
    add("--prompts", type=Path, default=PROMPTS, help="folder of .jsonl files with 'prompt' lines")
    add("--limit", type=int, default=8, help="prompts taken from each file; for a shape, all random prompts")
    add("--prompt-tokens", type=int, default=128, help="length of a shape's random prompts")
    add("--max-new-tokens", type=int, default=new_tokens, help=f"of each text (default: {new_tokens})")


@dataclass
class Target:
    """A model to send requests to."""

    name: str
    engine: Engine
    prompts: list[list[int]]
    speculation: Options  # of a request that drafts
    synthetic: dict[str, Any] | None = None  # how the exit of synthetic weights was made to agree

    @property
    def modes(self) -> dict[str, Options]:
        return {"plain": {"speculative_decoding": False}, "speculation": self.speculation}


def open_target(args: argparse.Namespace, longest: int, max_batch: int) -> Target:
    """An engine for texts of up to `longest` tokens, prompt included, of which `max_batch` decode together."""
    device = loading.pick_device(args.device)
    limits: dict[str, Any] = {
        "max_length": -(-longest // 64) * 64,
        "max_batch": max_batch,
        "kernels": False if args.no_kernels else None,
    }
    if not args.shape:
        profile = None if args.profile == "none" else args.profile
        engine = Engine.from_pretrained(args.model, device, args.dtype, profile, **limits)
        texts = read_prompts(args.prompts, args.limit)
        prompts = [_encoded(engine.tokenizer, text) for text in texts]
        drafts = {"plan": args.plan or DEFAULT_PLAN, "exit_layer": args.exit_layer}
        return Target(args.model, engine, prompts, {} if engine.profile and not args.plan else drafts)
    dtype = loading.pick_dtype(args.dtype, device, torch.bfloat16)
    engine = Engine(synthetic.synthetic(args.shape, str(device), dtype), **limits)
    layer, wanted = args.exit_layer or 2, synthetic.Agreement(args.agree, args.agree_top4)
    told = synthetic.tune_exit(engine, layer, wanted)
    prompts = synthetic.random_prompts(engine.model, args.limit, args.prompt_tokens).tolist()
    return Target(args.shape, engine, prompts, {"plan": args.plan or DEFAULT_PLAN, "exit_layer": layer}, told)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return encode(tokenizer, [{"role": "user", "content": text}] if tokenizer.chat_template else text)


GREEDY: Options = {"do_sample": False, "repetition_penalty": 1.0}
SAMPLED: Options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
QWEN: Options = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def built_in_options(prompts: Sequence[Sequence[int]], stops: Sequence[int], vocabulary: int) -> dict[str, Options]:
    """Options that run on the device, by name. Biased and banned are the tokens that prompts use most, so that texts
    change; `stops` end texts."""
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


class Stamps(Progress):
    """Notes when a request's tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[tuple[float, int]] = []  # when, and the tokens there were then

    def update(self, new_tokens: int) -> None:
        self._note(new_tokens)
        super().update(new_tokens)

    def end(self, new_tokens: int) -> None:
        self._note(new_tokens)
        super().end(new_tokens)

    def _note(self, new_tokens: int) -> None:
        if new_tokens > (self.arrivals[-1][1] if self.arrivals else 0):
            self.arrivals.append((time.perf_counter(), new_tokens))


class Stamped:
    """A request for one text, and when its tokens came. The model's own end tokens do not end it."""

    def __init__(self, engine: Engine, prompt: Sequence[int], seed: int, new_tokens: int, options: Options) -> None:
        wishes, kwargs = split_options(options)
        processors = kwargs.pop("logits_processor", None)
        settings = read_settings(
            engine.generation_config, None, {"eos_token_id": None, "max_new_tokens": new_tokens, **kwargs}
        )
        self.engine, self.submitted_at, self.stamps = engine, 0.0, Stamps()
        self.request = engine._request([list(prompt)], len(prompt), settings, seed, processors, None, wishes)
        self.request.progress = self.stamps

    def submit(self) -> None:
        self.submitted_at = time.perf_counter()
        self.engine.scheduler.submit(self.request)

    def wait(self) -> Stamped:
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
        return self.stamps.arrivals[-1][0]

    @property
    def first_token_s(self) -> float:
        """Seconds from submission to the first token."""
        return self.stamps.arrivals[0][0] - self.submitted_at

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds per token after those that came first; None where there are no others."""
        (first_at, first), (last_at, last) = self.stamps.arrivals[0], self.stamps.arrivals[-1]
        return (last_at - first_at) / (last - first) if last > first else None

    def gaps(self, start: float, stop: float) -> list[float]:
        """Seconds between arrivals, of those that overlap with the time from `start` to `stop`."""
        pairs = pairwise(at for at, _ in list(self.stamps.arrivals))
        return [after - before for before, after in pairs if after > start and before < stop]


def run_together(requests: Sequence[Stamped]) -> float:
    """Submits all at once and waits for all; returns tokens per second."""
    for request in requests:
        request.submit()
    for request in requests:
        request.wait()
    seconds = max(request.ended_at for request in requests) - requests[0].submitted_at
    return sum(len(request.tokens) for request in requests) / seconds
