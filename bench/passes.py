"""`python -m bench.passes`: milliseconds of a pass over several tokens of one sequence, against one token, on a GPU.

A pass runs root and nodes through all layers, the LM head and the choice of tokens after a text of a given length:
verification without its draft, captured as a CUDA graph, with random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median
from typing import Any

import torch

from bench import tables
from bench.machine import bytes_per_step, gpu_bandwidth
from bench.quantized import FORMATS
from bench.synthetic import SHAPES, random_quantized, synthetic
from selfspec import Engine
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.slots import SlotState, StepOptions
from selfspec.sampling import SamplingParams
from selfspec.speculation.plan import NONE, Plan

_REPLAYS = 20  # of which the median is taken


@torch.inference_mode()
def pass_seconds(graphs: Graphs, tokens: int, length: int) -> float:
    """Median time of a pass over a root and `tokens` - 1 copied nodes, which need no exit, after `length` positions."""
    plan = Plan.parse(f"copy:{tokens - 1}") if tokens > 1 else NONE
    buffers, text = graphs.take_buffers(), graphs.cache.open()
    graphs.cache.reserve(text, length + tokens)
    _, replay = graphs.step(buffers, 1, plan, None, StepOptions(), length + tokens)
    slot, times = SlotState.of(SamplingParams(), length, 0, 0, length, True, True), []
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
        show(name, measure_format(args, name, bandwidth), args.shape)
    return 0


def measure_format(args: argparse.Namespace, format: str, bandwidth: float) -> tuple[float, list[dict[str, Any]]]:
    """The seconds that reading the weights takes, and a result for each context and number of tokens."""
    model = (
        synthetic(args.shape, "cuda", torch.bfloat16, exit_layer=2)
        if format == "bf16"
        else random_quantized(args.shape, format)
    )
    engine = Engine(model, kernels=True, max_length=max(args.context) + 256, max_batch=1)
    graphs = engine._graphs
    assert graphs is not None
    ceiling = bytes_per_step(engine) / bandwidth
    results = []
    for length in args.context:
        one = pass_seconds(graphs, 1, length)
        for tokens in args.tokens:
            seconds = one if tokens == 1 else pass_seconds(graphs, tokens, length)
            results.append({"context": length, "tokens": tokens, "ms": 1e3 * seconds, "against_one": seconds / one})
    return ceiling, results


def show(format: str, found: tuple[float, list[dict[str, Any]]], shape: str) -> None:
    ceiling, results = found
    gpu = torch.cuda.get_device_name()
    print(f"{shape}, {format} weights on {gpu}; reading them takes {1e3 * ceiling:.3f} ms\n")
    lines = [
        (
            result["context"],
            result["tokens"],
            f"{result['ms']:.3f}",
            f"{result['against_one']:.3f}x",
            f"{1e3 * ceiling / result['ms']:.0%}",
        )
        for result in results
    ]
    print(*tables.table(("context", "tokens", "ms", "against one token", "ceiling / ms"), lines), sep="\n")
    summary = {"benchmark": "passes", "shape": shape, "format": format, "ceiling_ms": 1e3 * ceiling, "results": results}
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    sys.exit(main())
