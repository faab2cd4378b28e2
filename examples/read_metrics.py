"""Read what an engine has done: speeds, accepted drafts, plans and memory, over all requests.

python examples/read_metrics.py
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from selfspec import Engine

QUESTIONS = [
    "Write a Python function that adds two numbers.",
    "What is 12 times 12?",
    "Name three rivers in Europe.",
    "Write one sentence about the sea.",
]

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="demo", help="folder, GGUF file or hub name")
parser.add_argument("--max-new-tokens", type=int, default=32)
args = parser.parse_args()

engine = Engine.from_pretrained(args.model)


def ask(question: str, **options: Any) -> str:
    chat = [{"role": "user", "content": question}]
    return engine.complete(chat, max_new_tokens=args.max_new_tokens, do_sample=False, **options).text


# Calls of several threads share batches; each gets the tokens that it would get alone.
with ThreadPoolExecutor() as threads:
    list(threads.map(ask, QUESTIONS))

# One call with drafting forced, so that there is something to count on any machine.
ask(QUESTIONS[0], speculative_decoding="force", plan="chain:2")

metrics = engine.metrics()
print(metrics)  # a table
print("\naccepted by depth:", [f"{rate:.0%}" for rate in metrics.accept_rate_by_depth])
print("plain decoding was chosen because of:", metrics.changes_by_reason)

for holder, size in engine.memory().items():
    print(f"{holder:<12}{size / 1e6:10.1f} MB")

print("\nfor Prometheus:", *metrics.prometheus().splitlines()[:3], "...", sep="\n")
