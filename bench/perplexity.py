"""`python -m bench.perplexity`: perplexity of a model with its weights held in several ways, on the shipped prompts.

The texts of all domains are read as one text, in windows of 512 tokens. Ways: "expanded" (16 bits, or --dtype),
"native" (a GGUF file's own bits), "int8" and "int4" (rounded while loading), "int4-all" (LM head and embedding in 4
bits too).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from itertools import zip_longest
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from bench import tables
from bench.modes import release
from bench.requests import PROMPTS, read_prompts
from selfspec import Engine
from selfspec.models.quantized.folder import BITS
from selfspec.profiles.paths import shipped_dir

WINDOW = 512  # tokens that are read together: one prefill chunk
WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "expanded": lambda dtype: {"dtype": dtype},
    "native": lambda _: {"dtype": "native"},
    "int8": lambda dtype: {"dtype": dtype, "quantize": "int8"},
    "int4": lambda dtype: {"dtype": dtype, "quantize": "int4"},
    "int4-all": lambda dtype: {"dtype": dtype, "quantize": "int4"},
}


def text_tokens(engine: Engine, count: int) -> list[int]:
    """The first tokens of the shipped prompts, one of each domain in turn."""
    folders = PROMPTS, shipped_dir() / "prompts"
    domains = [prompts for folder in folders for prompts in read_prompts(folder, 1000).values()]
    tokens: list[int] = []
    for prompt in (prompt for turn in zip_longest(*domains) for prompt in turn if prompt):
        if len(tokens) >= count:
            break
        tokens += engine.tokenizer.encode(f"{prompt}\n\n", add_special_tokens=False)
    return tokens[:count]


def mean_loss(engine: Engine, tokens: list[int]) -> tuple[float, int]:
    """Mean of the negative log probabilities of all tokens but the first of each window, and their number."""
    losses: list[float] = []
    for start in range(0, len(tokens) - 1, WINDOW):
        window = torch.tensor([tokens[start : start + WINDOW]], device=engine.device)
        out: Any = engine.generate(
            window, max_new_tokens=1, prompt_logprobs=0, return_dict_in_generate=True, speculative_decoding=False,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        losses += [-token.logprob for token in out.prompt_logprobs[0]]
    return math.fsum(losses) / len(losses), len(losses)


def measure(args: argparse.Namespace, way: str) -> dict[str, Any]:
    bits = patch("selfspec.models.loading.rounded_bits", lambda _, quantize: BITS[quantize])
    with bits if way == "int4-all" else patch.dict({}):
        engine = Engine.from_pretrained(
            args.model, device=args.device, profile=None, max_length=1024, max_batch=1, **WAYS[way](args.dtype)
        )
    began = perf_counter()
    loss, count = mean_loss(engine, text_tokens(engine, args.tokens))
    seconds = perf_counter() - began
    return {
        "way": way,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "kernels": engine.has_kernels,
        "weights_mb": round(engine.memory()["weights"] / 1e6, 2),
        "tokens": count,
        "perplexity": math.exp(loss),
        "seconds": round(seconds, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.perplexity", description=__doc__)
    parser.add_argument("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    parser.add_argument("--device", default="auto", help="cpu, cuda (default: the best there is)")
    parser.add_argument("--dtype", default="auto", help="of activations and of weights that are not quantized")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text (default: 8192)")
    args = parser.parse_args(arguments)
    results = []
    for way in args.ways:
        results.append(measure(args, way))
        release()
    first = results[0]["perplexity"]
    for result in results:
        result["against_first"] = result["perplexity"] / first - 1
    lines = [
        (
            result["way"],
            result["weights_mb"],
            f"{result['perplexity']:.4f}",
            f"{result['against_first']:+.3%}",
            result["seconds"],
        )
        for result in results
    ]
    print(f"{args.model}, activations in {results[0]['dtype']}, {results[0]['tokens']} tokens\n")
    print(*tables.table(("weights", "MB", "perplexity", f"against {results[0]['way']}", "s"), lines), sep="\n")
    print(json.dumps({"benchmark": "perplexity", "model": args.model, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
