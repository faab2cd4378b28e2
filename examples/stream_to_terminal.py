"""Print an answer as it is decoded; Ctrl-C stops it and frees its part of the KV cache.

python examples/stream_to_terminal.py "Why is the sky blue?"
"""

from __future__ import annotations

import argparse

from selfspec import Engine

parser = argparse.ArgumentParser()
parser.add_argument("question", nargs="?", default="Why is the sky blue?")
parser.add_argument("--model", default="demo", help="folder, GGUF file or hub name")
parser.add_argument("--max-new-tokens", type=int, default=100)
args = parser.parse_args()

engine = Engine.from_pretrained(args.model)
messages = [{"role": "user", "content": args.question}]

# Leaving the `with` block, also by an exception, ends the request.
with engine.stream(messages, max_new_tokens=args.max_new_tokens, do_sample=True, temperature=0.7, seed=1) as stream:
    try:
        for piece in stream:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
print()

completion = stream.completion  # None if the stream was left early
if completion is not None:
    stats = completion.stats
    print(f"{stats.new_tokens} tokens, {stats.new_tokens / stats.elapsed_s:.1f} tokens/s, plan {stats.plan}")
