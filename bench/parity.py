"""`python -m bench.parity`: the largest difference between our float32 logits and transformers' on a real model.

Every prompt runs through both on the same weights; a difference of 1e-4 or more at any position is a failure.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain
from typing import Any

import torch
import transformers

from bench.requests import PROMPTS, read_prompts, tokens_of
from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.cache.size import pages_for
from selfspec.models import loading as weights
from selfspec.models.decoder import Decoder

TOLERANCE = 1e-4


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.parity", description=__doc__)
    parser.add_argument("--model", default="demo", help="folder, GGUF file, hub name (default: the demo model)")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each file of bench/prompts (default: 1)")
    args = parser.parse_args(arguments)
    folder = weights.resolve(args.model)
    hf: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    decoder = weights.adopt(hf)
    worst, spread, positions = 0.0, 0.0, 0
    for text in chain.from_iterable(read_prompts(PROMPTS, args.limit).values()):
        ids = torch.tensor([tokens_of(tokenizer, text)])
        with torch.inference_mode():
            theirs, mine = hf(ids).logits, logits(decoder, ids)
        worst = max(worst, (theirs - mine).abs().max().item())
        spread = max(spread, theirs.abs().max().item())
        positions += ids.shape[1]
    print(f"{args.model}: {positions} positions, largest logit {spread:.1f}")
    print(f"largest difference: {worst:.2e} (bound {TOLERANCE:.0e})")
    found = {"model": str(args.model), "positions": positions, "largest_logit": spread, "largest_difference": worst}
    print(json.dumps({"benchmark": "parity", **found, "bound": TOLERANCE}))
    return int(worst >= TOLERANCE)


def logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """All logits of a prompt [1, T, vocabulary], in one pass."""
    count = ids.shape[1]
    cache = Cache(decoder.config, decoder.device, decoder.dtype, pages_for(count))
    sequence = cache.open()
    cache.reserve(sequence, count)
    rows = Rows.causal([sequence], count, decoder.device)
    return decoder.logits(decoder.run(decoder.embed(ids), 0, decoder.config.num_layers, rows, cache))


if __name__ == "__main__":
    sys.exit(main())
