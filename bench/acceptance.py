"""`python -m bench.acceptance`: how well a profile's exits draft, on prompts that calibration never saw.

For each prompt file: agreement of the exit with the model on the model's own greedy answers, then real generation with
a tree grown on the measuring prompts of the shipped domain of that name, with `chain:4`, with the whole head in place
of the trimmed one, and at a temperature. Counts tokens, not seconds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from selfspec import Engine, Plan
from selfspec.calibrate.choice import Paths
from selfspec.calibrate.measuring import Answers, Measurement, measure
from selfspec.calibrate.prompts import Prompt, shipped_domains
from selfspec.calibrate.trial import acceptance, generate_batches
from selfspec.calibrate.writing import Template, write_answers
from selfspec.text import encode

PROMPTS = Path(__file__).parent / "prompts"
CHAIN = "chain:4"


@dataclass
class Bench:
    """An engine with a profile, and how much to measure with it."""

    engine: Engine
    exit_layer: int
    depth: int
    batch: int
    new_tokens: int

    def tokens_of(self, prompts: list[Prompt]) -> list[list[int]]:
        tokenizer = self.engine.tokenizer
        chats = [
            [{"role": "user", "content": p}] if isinstance(p, str) and tokenizer.chat_template else p for p in prompts
        ]
        return [encode(tokenizer, chat) for chat in chats]

    def rehearse(self, domain: str, prompts: list[list[int]]) -> Measurement:
        """The exit on the model's greedy answers."""
        assert self.engine.profile is not None
        model = self.engine.model
        ends = self.engine.generation_config.eos_token_id
        template = Template.of(self.engine.tokenizer)
        greedy = [0.0] * len(prompts)
        ends = ends if isinstance(ends, list) else [ends]
        corpus = write_answers(model, template, ends, prompts, greedy, self.new_tokens, seed=0)
        exit = self.engine.profile.exit(model, self.exit_layer)
        rows = self.engine.profile.head_rows(model, domain)
        return measure(model, [exit], rows, Answers(0.0, corpus), seed=0)[0]

    def grown(self, domain: str, prompts: list[list[int]]) -> Plan:
        """The tree of at most 63 nodes that would accept most on these prompts."""
        return Plan.from_paths(Paths(self.rehearse(domain, prompts).ranks).most_reached(self.depth))

    def generate(self, domain: str, prompts: list[list[int]], plan: Plan | str, **kwargs: Any) -> dict[str, float]:
        """Tokens per cycle and accept rate over all prompts, with speculation forced."""
        batches = [prompts[start : start + self.batch] for start in range(0, len(prompts), self.batch)]
        drafting = {"speculative_decoding": "force", "domain": domain, "plan": plan, "exit_layer": self.exit_layer}
        settings = {"max_new_tokens": self.new_tokens, "seed": 0, **drafting, **kwargs}
        tokens_per_cycle, accept_rate = acceptance(generate_batches(self.engine, batches, settings))
        return {"tokens_per_cycle": round(tokens_per_cycle, 3), "accept_rate": round(accept_rate, 3)}

    def domain(self, name: str, prompts: list[list[int]], measuring: list[list[int]], domain: str) -> dict[str, Any]:
        ranks = self.rehearse(domain, prompts).ranks[:, 0]
        plan = self.grown(domain, measuring)
        greedy: dict[str, Any] = {"do_sample": False}
        result: dict[str, Any] = {"domain": name, "prompts": len(prompts), "nodes": len(plan), "depth": plan.depth}
        result |= {"top1": round(float((ranks == 0).mean()), 3)}
        result |= {"top4": round(float(((ranks >= 0) & (ranks < 4)).mean()), 3)}
        result["tree"] = self.generate(domain, prompts, plan, **greedy)
        result[CHAIN] = self.generate(domain, prompts, CHAIN, **greedy)
        trimmed = self.engine.drafters.head_rows_of(domain)
        if trimmed is not None:
            result["head_rows"] = len(trimmed)
            self.engine.drafters.head_rows[domain] = None
            result["whole_head"] = self.generate(domain, prompts, plan, **greedy)
            self.engine.drafters.head_rows[domain] = trimmed
        sampled = {"do_sample": True, "temperature": 0.7, "top_k": 0}
        result["tree_at_0.7"] = self.generate(domain, prompts, plan, **sampled)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", default="auto")
    parser.add_argument("--prompts", type=Path, nargs="*", default=sorted(PROMPTS.glob("*.jsonl")))
    parser.add_argument("--exit-layer", type=int, help="default: the profile's for the domain")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="also append each result to this file as it comes")
    args = parser.parse_args()
    engine = Engine.from_pretrained(args.model, profile=args.profile)
    if engine.profile is None:
        parser.error("the model has no profile: python -m selfspec.calibrate makes one")
    known = {domain.name: domain for domain in shipped_domains()}
    results = []
    for path in args.prompts:
        domain = path.stem if path.stem in engine.profile.domains else next(iter(engine.profile.domains))
        layer = args.exit_layer or engine.profile.domains[domain].exit_layer
        bench = Bench(engine, layer, args.depth, args.batch, args.max_new_tokens)
        prompts = bench.tokens_of([json.loads(line)["prompt"] for line in path.read_text().splitlines()])
        measuring = bench.tokens_of(list(known[domain].measuring))
        fitting = [prompt for prompt in prompts if len(prompt) < 512][: args.limit]
        results.append({"exit_layer": layer, **bench.domain(path.stem, fitting, measuring, domain)})
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    show(results, args)
    print(json.dumps({"model": args.model, "results": results}))


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table(
        title=f"{args.model}: {args.max_new_tokens} tokens a prompt, tokens per cycle (accept rate)",
        title_justify="left",
    )
    for heading in ("prompts", "exit", "nodes, depth", "top-1", "top-4", "tree", CHAIN, "whole head", "tree at 0.7"):
        table.add_column(heading, justify="right" if heading != "prompts" else "left")
    for result in results:
        cells = [result.get(kind) for kind in ("tree", CHAIN, "whole_head", "tree_at_0.7")]
        table.add_row(
            f"{result['domain']} ({result['prompts']})", str(result["exit_layer"]),
            f"{result['nodes']}, {result['depth']}", f"{result['top1']:.3f}", f"{result['top4']:.3f}",
            *(f"{c['tokens_per_cycle']:.2f} ({c['accept_rate']:.0%})" if c else "-" for c in cells),
        )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
