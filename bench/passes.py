"""`python -m bench.passes`: what a pass over several rows of a sequence costs beside a pass over one, on this GPU.

A pass is all of the model's layers over a root and its nodes, the head, and the choice of a token at each of them, with
a text of some length before it: verification without its draft. Captured as a CUDA graph like every step. The weights
are synthetic, which changes no time.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from bench.decode import bytes_per_token
from bench.kernels import read_bandwidth
from bench.synthetic import SHAPES, synthetic
from selfspec import Engine
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.slots import Features, SlotState
from selfspec.sampling import SamplingParams
from selfspec.speculation.plan import NONE, Plan

_REPLAYS = 20


@torch.inference_mode()
def pass_seconds(graphs: Graphs, rows: int, length: int) -> float:
    """The median time of a pass over so many rows that see `length` positions before them, in pages of their own."""
    plan = Plan.tree((rows - 1,)) if rows > 1 else NONE
    table, text = graphs.take_table(), graphs.cache.open()
    graphs.cache.reserve(text, length + rows)
    _, replay = graphs.step(table, 1, plan, None, Features(), length + rows)
    slot, times = SlotState.of(SamplingParams(), length, 0, 0, length, True, True), []
    for _ in range(_REPLAYS):
        table.slots.write([0], [slot], [0], [text.pages])  # a pass advances the length
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    graphs.give_back(table)
    graphs.cache.close(text)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.passes", description=__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], help="of one sequence, up to 64")
    parser.add_argument("--context", type=int, nargs="+", default=[2048])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    bandwidth = read_bandwidth()
    model = synthetic(args.shape, "cuda", torch.bfloat16, exit_layer=2)
    engine = Engine(model, kernels=True, max_length=max(args.context) + 256, max_batch=1)
    graphs = engine._graphs
    assert graphs is not None
    table = Table(title=f"{args.shape}, bfloat16 on {torch.cuda.get_device_name()}: passes of one sequence")
    for heading in ("context", "rows", "ms", "against one row", "weights, of the bandwidth"):
        table.add_column(heading, justify="right")
    results = []
    for length in args.context:
        one = pass_seconds(graphs, 1, length)
        for rows in args.rows:
            seconds = one if rows == 1 else pass_seconds(graphs, rows, length)
            share = bytes_per_token(engine) / seconds / bandwidth
            results.append(
                {"context": length, "rows": rows, "ms": 1e3 * seconds, "ratio": seconds / one, "share": share}
            )
            table.add_row(str(length), str(rows), f"{1e3 * seconds:.3f}", f"{seconds / one:.3f}", f"{share:.0%}")
    Console(width=120).print(table)
    print(json.dumps({"benchmark": "passes", "shape": args.shape, "bandwidth": bandwidth, "results": results}))


if __name__ == "__main__":
    main()
