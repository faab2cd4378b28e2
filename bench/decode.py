"""`python -m bench.decode`: speed of transformers' eager `generate`, our plain decoding and forced speculation.

All modes share one copy of the weights, take turns on every prompt, and must give the same greedy tokens. The table
starts with the ceiling: reading all weights once per token at the memory bandwidth measured here.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from selfspec import Engine, weights
from selfspec.text import encode

PROMPTS = Path(__file__).parent / "prompts"


@dataclass
class Mode:
    """One way of decoding, and what was measured of it."""

    name: str
    generate: Callable[[torch.Tensor], tuple[list[int], int]]  # prompt [1, T] -> new tokens, passes of the whole model
    seconds: list[float] = field(default_factory=list)  # per prompt
    tokens: int = 0
    passes: int = 0
    per_token: list[float] = field(default_factory=list)  # per prompt
    outputs: list[list[int]] = field(default_factory=list)

    def measure(self, prompt: torch.Tensor) -> None:
        _synchronize(prompt.device)
        start = time.perf_counter()
        new, passes = self.generate(prompt)
        _synchronize(prompt.device)
        self.seconds.append(time.perf_counter() - start)
        self.per_token.append(self.seconds[-1] / len(new))
        self.tokens += len(new)
        self.passes += passes
        self.outputs.append(new)

    def result(self, baseline: Mode) -> dict[str, Any]:
        ratios = [theirs / ours for theirs, ours in zip(baseline.per_token, self.per_token, strict=True)]
        return {
            "mode": self.name,
            "tokens_per_s": round(self.tokens / sum(self.seconds), 2),
            "ms_per_token_median": round(1e3 * statistics.median(self.per_token), 2),
            "speedup_median": round(statistics.median(ratios), 3),
            "tokens_per_cycle": round(self.tokens / self.passes, 3),
            "same_tokens_as_transformers": sum(a == b for a, b in zip(self.outputs, baseline.outputs, strict=True)),
            "prompts": len(self.outputs),
        }


@dataclass(frozen=True)
class Setup:
    """What a number needs beside it to mean something."""

    model: str
    device: str
    dtype: str
    threads: int
    torch: str
    transformers: str
    max_new_tokens: int
    bandwidth_gb_s: float
    ceiling_tokens_per_s: float


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110  # a log has room that no terminal tells of
    device = weights.pick_device(args.device)
    hf, tokenizer = load(args, device)
    engine = Engine.from_model(hf, tokenizer, profile=None if args.profile == "none" else args.profile)
    modes = [Mode("transformers eager", lambda ids: with_transformers(hf, ids, args.max_new_tokens))]
    modes += [Mode("selfspec plain", lambda ids: ours(engine, ids, args.max_new_tokens, speculative_decoding=False))]
    for plan in args.plans:
        settings = {"speculative_decoding": "force", "plan": plan, "exit_layer": args.exit_layer}
        modes.append(Mode(f"selfspec {plan}", lambda ids, s=settings: ours(engine, ids, args.max_new_tokens, **s)))  # type: ignore[misc]
    setup = describe(args, engine, hf)
    prompts = [
        encode(tokenizer, [{"role": "user", "content": text}]) for text in read_prompts(args.prompts, args.limit)
    ]
    warm_up(modes, torch.tensor([prompts[0]], device=device))
    for turn, prompt in enumerate(track(prompts, description="prompts", console=Console(stderr=True))):
        for offset in range(len(modes)):  # who goes first changes with every prompt
            modes[(turn + offset) % len(modes)].measure(torch.tensor([prompt], device=device))
    results = [mode.result(modes[0]) for mode in modes]
    show(console, setup, results, engine, args)
    print(json.dumps({"benchmark": "decode", "setup": asdict(setup), "results": results}))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    parser.add_argument("--model", default="demo", help="folder, GGUF file, hub name (default: the demo model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of .jsonl files with 'prompt' lines")
    parser.add_argument("--limit", type=int, default=8, help="prompts taken from each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--profile", default="auto", help="folder, 'auto' or 'none'")
    parser.add_argument(
        "--exit-layer", type=int, help="default: the profile's, else a quarter of the layers, untrained"
    )
    parser.add_argument("--plans", nargs="*", default=["chain:2", "tree:4,2,2,1"], help="plans to force")
    return parser.parse_args(arguments)


def load(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    folder = weights.resolve(args.model)
    stored = transformers.AutoConfig.from_pretrained(folder).dtype or torch.float32
    dtype = weights.pick_dtype(args.dtype, device, stored)
    hf: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    hf = hf.to(device).eval()
    return hf, transformers.AutoTokenizer.from_pretrained(folder)


def read_prompts(folder: Path, limit: int) -> list[str]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"no .jsonl file in {folder}: pass --prompts with a folder of them")
    return [json.loads(line)["prompt"] for file in files for line in file.read_text().splitlines()[:limit]]


def with_transformers(hf: Any, ids: torch.Tensor, count: int) -> tuple[list[int], int]:
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    new = out[0, ids.shape[1] :].tolist()
    return new, len(new)


def ours(engine: Engine, ids: torch.Tensor, count: int, **settings: Any) -> tuple[list[int], int]:
    out: Any = engine.generate(ids, max_new_tokens=count, do_sample=False, return_dict_in_generate=True, **settings)
    return out.sequences[0, ids.shape[1] :].tolist(), out.stats[0].cycles


def warm_up(modes: list[Mode], prompt: torch.Tensor) -> None:
    for mode in modes:
        mode.generate(prompt)


def describe(args: argparse.Namespace, engine: Engine, hf: Any) -> Setup:
    device = engine.model.device
    bandwidth = read_bandwidth(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}"
    return Setup(
        model=str(args.model),
        device=name,
        dtype=str(engine.model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        max_new_tokens=args.max_new_tokens,
        bandwidth_gb_s=round(bandwidth / 1e9, 1),
        ceiling_tokens_per_s=round(bandwidth / engine.model.nbytes, 1),
    )


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory that no cache holds, best of several."""
    data = torch.ones(2**28 if device.type == "cuda" else 2**26, device=device)
    times = []
    for _ in range(8):
        _synchronize(device)
        start = time.perf_counter()
        data.sum()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return data.numel() * data.element_size() / min(times)


def show(
    console: Console, setup: Setup, results: list[dict[str, Any]], engine: Engine, args: argparse.Namespace
) -> None:
    trained = engine.profile.trained_layers() if engine.profile else []
    exits = f"exits trained after layers {trained}" if trained else "exits untrained"
    console.print(
        f"{setup.model}, {setup.dtype} on {setup.device} ({setup.threads} threads), torch {setup.torch}, transformers "
        f"{setup.transformers}, greedy, {setup.max_new_tokens} new tokens, {exits}",
        soft_wrap=True,
    )
    table = Table()
    headings = ("mode", "tokens/s", "ms/token", "against transformers", "tokens per cycle", "same tokens")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    ceiling = setup.ceiling_tokens_per_s
    table.add_row(f"ceiling ({setup.bandwidth_gb_s} GB/s)", f"{ceiling:.1f}", f"{1e3 / ceiling:.1f}", "", "1.00", "")
    for row in results:
        table.add_row(
            row["mode"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ms_per_token_median']:.1f}",
            f"{row['speedup_median']:.2f}x",
            f"{row['tokens_per_cycle']:.2f}",
            f"{row['same_tokens_as_transformers']}/{row['prompts']}",
        )
    console.print(table)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
