"""`python -m bench.options`: tokens per second with each option of a request, plainly and with speculation.

One sequence at a time, all options in turn on every prompt, beside plain greedy decoding; tokens with speculation are
compared with the plain ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import torch

from bench import machine, tables
from bench.requests import (
    GREEDY,
    NAMED_TOKENS,
    Options,
    Target,
    TimedRequest,
    add_arguments,
    built_in_options,
    open_target,
    run_together,
)
from bench.timing import Limit, rotated

_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Berlin", "Lima", "Nairobi", "Osaka", "Quito"]},
        "hobbies": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "hobbies"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _RECORD, "minItems": 100}  # longer than any measured text
_SLEEP_S = 100e-6  # a processor of 100 us, about a quarter of a plain step of the demo model on an H200


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.options", description=__doc__)
    parser.epilog = (
        "Structured output on prompts that ask for it, beside greedy text on the same prompts: --prompts "
        "bench/prompts/structured --limit 8 --options JSON --max-new-tokens 256"
    )
    add_arguments(parser, new_tokens=128, prompts=1)
    parser.add_argument("--options", nargs="+", help="only greedy and options whose name contains one of these words")
    parser.add_argument("--repeat", type=int, default=3, help="runs on every prompt (default: 3)")
    args = parser.parse_args(arguments)
    target = open_target(args, max_batch=1)
    setup = machine.describe(target.engine, target.name, target.synthetic)
    print(*tables.setup(setup), "", sep="\n")
    words = args.options or [""]
    chosen = {
        name: options
        for name, options in options_of(target).items()
        if name == "greedy" or any(word in name for word in words)
    }
    found = measure(target, chosen, args.max_new_tokens, args.repeat, Limit(args.seconds))
    print(*tables.options(found), sep="\n")
    same = all(result["same_tokens"] == result["sequences"] for result in found["results"])
    print(json.dumps({"benchmark": "options", "setup": setup, "all_tokens_same": same, **found}))
    return int(target.engine.has_kernels and not same)


def options_of(target: Target) -> dict[str, Options]:
    """Every option that is measured, greedy first. The stop tokens are ids that models hardly ever write."""
    vocabulary = target.engine.model.config.vocab_size
    stops = range(vocabulary - NAMED_TOKENS, vocabulary)
    json_schema = {**GREEDY, "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}}
    return {
        **built_in_options(target.prompts, stops, vocabulary),
        **({"JSON schema": json_schema} if can_write_json(target.engine.tokenizer) else {}),
        "processor that does nothing": {**GREEDY, "logits_processor": [do_nothing]},
        "processor that sleeps 100 us": {**GREEDY, "logits_processor": [sleep]},
    }


def can_write_json(tokenizer: Any) -> bool:
    """Whether there is a tokenizer, and it has tokens for the signs of JSON."""
    signs = '[{":,}]'
    return tokenizer is not None and signs in tokenizer.decode(tokenizer.encode(signs, add_special_tokens=False))


def do_nothing(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits


def sleep(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    time.sleep(_SLEEP_S)
    return logits


def measure(target: Target, options: dict[str, Options], new_tokens: int, repeat: int, limit: Limit) -> dict[str, Any]:
    """All options and modes take turns on each prompt; the first one changes from turn to turn. With kernels turns on
    two prompts come first, which are not timed and capture graphs."""
    ways = [(name, mode) for name in options for mode in target.modes]
    speeds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    texts: dict[tuple[str, str], list[list[int]]] = {way: [] for way in ways}
    untimed = min(2, len(target.prompts)) if target.engine.has_kernels else 0
    turns = [*range(untimed), *(place for _ in range(repeat) for place in range(len(target.prompts)))]
    for turn, place in enumerate(turns):
        if turn > untimed and limit.is_spent:  # one timed turn at least: every option has a figure
            break
        for name, mode in rotated(ways, turn):
            request = TimedRequest(
                target.engine, target.prompts[place], place, new_tokens, {**options[name], **target.modes[mode]}
            )
            speed = run_together([request])
            if turn >= untimed:
                speeds[name, mode].append(speed)
                texts[name, mode].append(request.tokens)
    baseline = median(speeds["greedy", "plain"])
    results = [_result(name, target, speeds, texts, baseline) for name in options]
    return {"new_tokens": new_tokens, "prompts": len(target.prompts), "results": results}


def _result(name: str, target: Target, speeds: dict, texts: dict, baseline: float) -> dict[str, Any]:
    plain, drafted = (median(speeds[name, mode]) for mode in target.modes)
    pairs = list(zip(*(texts[name, mode] for mode in target.modes), strict=True))
    return {
        "option": name,
        "plain_tokens_per_s": round(plain, 2),
        "tokens_per_s": round(drafted, 2),
        "plain_against_greedy": round(plain / baseline, 4),
        "against_greedy_plain": round(drafted / baseline, 4),
        "same_tokens": sum(a == b for a, b in pairs),
        "sequences": len(pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
