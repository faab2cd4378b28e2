"""Calibrate a model for your own prompts, then generate with the profile.

python examples/calibrate_for_my_prompts.py --model path/or/name --out my-profile

The defaults train far too little to be useful, so that the example ends within 10 minutes on a CPU. On a GPU run the
command that the script prints, but leave out --exits, --tokens and --steps, and give 40 prompts or more. Ctrl-C stops
the script; with --resume it continues.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from selfspec import Engine
from selfspec.cli import main as selfspec

DISHES = ["pancakes", "tomato soup", "fried rice", "apple pie", "lentil stew", "an omelette", "bread", "potato salad"]

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="demo", help="folder, GGUF file or hub name")
parser.add_argument("--out", type=Path, default=Path("my-profile"), help="folder of the profile")
parser.add_argument("--tokens", type=int, default=1000, help="of text; at least one chunk is written")
parser.add_argument("--steps", type=int, default=10, help="of training")
parser.add_argument("--max-new-tokens", type=int, default=32)
args, others = parser.parse_known_args()  # others: of `selfspec calibrate`, such as --resume

# One JSON object per line, with "prompt" or with "messages".
args.out.mkdir(parents=True, exist_ok=True)
prompts = args.out / "recipes.jsonl"
prompts.write_text("".join(json.dumps({"prompt": f"How do I cook {dish}?"}) + "\n" for dish in DISHES))

command = ["calibrate", "--model", args.model, "--domain", f"recipes={prompts}", "--out", str(args.out)]
command += ["--exits", "1", "--tokens", str(args.tokens), "--steps", str(args.steps), *others]
print("selfspec", *command)
status = selfspec(command)
if status:
    sys.exit(status)

# Without --out the profile lies where profile="auto", the default, finds it by the model's weights.
engine = Engine.from_pretrained(args.model, profile=args.out)
chat = [{"role": "user", "content": "How do I cook noodles?"}]
options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
plain = engine.complete(chat, speculative_decoding=False, **options)
drafted = engine.complete(chat, speculative_decoding="force", plan="chain:2", **options)
print(drafted.text)
print("same tokens as plain decoding:", drafted.tokens == plain.tokens)
print(f"{drafted.stats.tokens_per_cycle:.2f} tokens per step with this exit")
