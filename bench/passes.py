"""`python -m bench.passes`: milliseconds of a pass over several tokens of one sequence, against one token, on a GPU.

A pass runs root and nodes through all layers, the LM head and the choice of tokens after a text of a given length:
verification without its draft, captured as a CUDA graph, with random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import torch

from bench import tables
from bench.machine import bytes_per_step, gpu_bandwidth
from bench.quantized import FORMATS, SMALLER_CARDS
from bench.synthetic import SHAPES, random_quantized, synthetic
from selfspec import Engine
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.slots import StepOptions, slot_values
from selfspec.sequence import Sequence as Sequence_
from selfspec.speculation.plan import NONE, Plan

_REPLAYS = 20  # of which the median is taken


@torch.inference_mode()
def pass_seconds(graphs: Graphs, tokens: int, length: int) -> float:
    """Median time of a pass over a root and `tokens` - 1 copied nodes, which need no exit, after `length` positions."""
    buffers, text = graphs.take_buffers(), graphs.cache.open()
    graphs.cache.reserve(text, length + tokens)
    text.length = length
    _, replay = graphs.step(buffers, 1, plan_of(tokens), None, StepOptions(), length + tokens)
    slot, times = slot_values(Sequence_([0] * length, 0, 0, length + tokens, kv=text)), []
    for _ in range(_REPLAYS):
        buffers.slots.write([0], [slot], [0], [text.pages])  # a pass advances the length
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    graphs.give_back(buffers)
    graphs.cache.close(text)
    return median(times)


def plan_of(tokens: int) -> Plan:
    """The plan whose pass has so many tokens, the root included."""
    return Plan.parse(f"copy:{tokens - 1}") if tokens > 1 else NONE


@torch.inference_mode()
def compile_passes(graphs: Graphs, tokens: Sequence[int], contexts: Sequence[int]) -> None:
    """Compiles the kernels of all passes in parallel; each pass would compile its own when it is captured."""
    buffers = graphs.take_buffers()
    with graphs.captured.compiler.compiling():
        for length, count in product(contexts, dict.fromkeys(tokens)):
            graphs.step(buffers, 1, plan_of(count), None, StepOptions(), length + count)
    graphs.give_back(buffers)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.passes", description=__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES, help="(default: llama-8b)")
    parser.add_argument("--format", default=["bf16"], nargs="+", choices=FORMATS, help="of weights (default: bf16)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], help="of a pass, up to 64")
    parser.add_argument("--context", type=int, nargs="+", default=[2048], help="tokens before it (default: 2048)")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: run it on a machine with an NVIDIA GPU")
    bandwidth = gpu_bandwidth()
    for name in args.format:
        show(measure(args.shape, name, args.tokens, args.context, bandwidth))
    return 0


def measure(
    shape: str, format: str, tokens: Sequence[int], contexts: Sequence[int], bandwidth: float
) -> dict[str, Any]:
    """Milliseconds of the passes after each context, and of reading the weights here and on smaller cards."""
    model = (
        synthetic(shape, "cuda", torch.bfloat16, exit_layer=2) if format == "bf16" else random_quantized(shape, format)
    )
    engine = Engine(model, kernels=True, max_length=max(contexts) + 256, max_batch=1)
    graphs = engine._graphs
    assert graphs is not None
    compile_passes(graphs, [1, *tokens], contexts)
    read = bytes_per_step(engine)
    results = []
    for length in contexts:
        one = pass_seconds(graphs, 1, length)
        for count in tokens:
            seconds = one if count == 1 else pass_seconds(graphs, count, length)
            results.append({"context": length, "tokens": count, "ms": 1e3 * seconds, "against_one": seconds / one})
    return {
        "shape": shape, "format": format, "gb": read / 1e9, "ceiling_ms": 1e3 * read / bandwidth,
        "cards_ms": {card: 1e3 * read / speed for card, speed in SMALLER_CARDS.items()}, "results": results,
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    ceiling, gpu = found["ceiling_ms"], torch.cuda.get_device_name()
    print(f"{found['shape']}, {found['format']} weights on {gpu}; reading them takes {ceiling:.3f} ms\n")
    lines = [
        (of["context"], of["tokens"], f"{of['ms']:.3f}", f"{of['against_one']:.3f}x", f"{ceiling / of['ms']:.0%}")
        for of in found["results"]
    ]
    print(*tables.table(("context", "tokens", "ms", "against one token", "ceiling / ms"), lines), sep="\n")
    print(json.dumps({"benchmark": "passes", **found}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
