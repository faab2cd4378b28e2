"""`python -m bench.parity`: how far our float32 logits are from transformers' on a real model.

Every prompt runs through both in float32 on the same weights; the largest difference over all positions and the whole
vocabulary is printed, and anything of 1e-4 or more is a failure.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
import transformers
from rich.progress import track

from bench.requests import PROMPTS, read_prompts
from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.cache.size import pages_for
from selfspec.models import loading as weights
from selfspec.models.decoder import Decoder
from selfspec.text import encode

TOLERANCE = 1e-4


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.parity", description=__doc__)
    parser.add_argument("--model", default="demo", help="folder, GGUF file, hub name (default: the demo model)")
    parser.add_argument("--limit", type=int, default=4, help="prompts taken from each file of bench/prompts")
    args = parser.parse_args(arguments)
    folder = weights.resolve(args.model)
    hf: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    decoder = weights.adopt(hf)
    worst, spread, positions = 0.0, 0.0, 0
    for text in track(read_prompts(PROMPTS, args.limit), description="prompts"):
        ids = torch.tensor([encode(tokenizer, [{"role": "user", "content": text}])])
        with torch.inference_mode():
            theirs, mine = hf(ids).logits, logits(decoder, ids)
        worst = max(worst, (theirs - mine).abs().max().item())
        spread = max(spread, theirs.abs().max().item())
        positions += ids.shape[1]
    fine = worst < TOLERANCE
    print(f"{args.model}: largest logit {spread:.1f}, largest difference {worst:.2e} over {positions} positions")
    print(json.dumps({"benchmark": "parity", "model": str(args.model), "max_difference": worst, "within": fine}))
    return 0 if fine else 1


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
