"""Options that several commands share, and what they become: an engine, and the arguments of its calls."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from selfspec.commands.running import note

if TYPE_CHECKING:
    from selfspec.engine import Engine
    from selfspec.text import Prompt

MODES: dict[str, Any] = {"auto": None, "off": False, "force": "force"}  # of --speculative, as `speculative_decoding`


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `load_engine` reads."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", default="demo", help="folder, GGUF file or hub name (default: the demo model)")
    add("--device", default="auto", help="cpu, cuda, mps (default: the best there is)")
    add("--dtype", default="auto", help="float32, bfloat16, float16; native: a GGUF file's own (default: by device)")
    add("--quantize", choices=("int8", "int4"), help="round 16-bit weights while loading (default: keep them)")
    add("--profile", default="auto", help="profile folder, or 'none' (default: the newest made for this model)")
    add("--max-length", metavar="N", type=int, help="tokens of a sequence with its prompt (default: the context)")
    add("--max-batch", metavar="N", type=int, help="sequences that decode together (default: 64)")
    add("--kv-cache-gb", metavar="GB", type=float, help="size of the KV cache (default: by free memory)")
    add("--memory-gb", metavar="GB", type=float, help="most memory in all; refuses a model that does not fit")
    add("-v", "--verbose", action="store_true", help="print what is loaded, and where")


def add_text_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    group = parser.add_argument_group("text")
    add = group.add_argument
    add("--max-new-tokens", metavar="N", type=int, default=max_new_tokens, help="(default: %(default)s)")
    add("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", metavar="K", type=int, help="0 switches it off (default: 50)")
    add("--top-p", metavar="P", type=float, help="(default: 1, off)")
    add("--seed", metavar="N", type=int, default=0, help="the same seed draws the same text (default: 0)")


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    add = group.add_argument
    add("--speculative", choices=list(MODES), default="auto", help="auto: where it pays (default)")
    add("--exit-layer", metavar="N", type=int, help="draft with the first N layers")
    add("--plan", help="none, chain:4, tree:4,2,2,1, beam:6,6,6, nodes:0.0,0.1 (parent.rank), copy:8, tree:4,2+copy:8")
    add("--domain", default="auto", help="one of the profile's (default: by the prompt)")


def model_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `Engine.from_pretrained` and of `plan_memory`."""
    names = "device dtype quantize max_length max_batch kv_cache_gb memory_gb".split()
    profile = None if args.profile == "none" else args.profile
    return {**{name: getattr(args, name) for name in names}, "profile": profile}


def load_engine(args: argparse.Namespace, prefix_reuse: bool = True) -> Engine:
    from selfspec.engine import Engine  # these import torch
    from selfspec.speculation.plan import Plan

    if getattr(args, "plan", None) is not None:
        Plan.parse(args.plan)  # before the weights: a malformed plan must not cost their loading
    engine = Engine.from_pretrained(args.model, **model_arguments(args), prefix_reuse=prefix_reuse)
    if engine.tokenizer is None:
        raise ValueError(f"the folder of {args.model} holds no tokenizer: save the model's tokenizer.json there")
    return engine


def has_chat_template(engine: Engine) -> bool:
    return bool(getattr(engine.tokenizer, "chat_template", None))


def as_prompts(engine: Engine, texts: list[str], raw: bool) -> list[Prompt]:
    """Returns each text as a chat of one message; as it is with `raw`, or where the model has no chat template."""
    if raw:
        return list(texts)
    if not has_chat_template(engine):
        note("this model has no chat template: it continues the text of the prompt, as with --raw")
        return list(texts)
    return [[{"role": "user", "content": text}] for text in texts]


def text_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the engine's calls for length and sampling."""
    arguments: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "seed": args.seed, "do_sample": False}
    if args.temperature:
        top_k, top_p = 50 if args.top_k is None else args.top_k, 1.0 if args.top_p is None else args.top_p
        return {**arguments, "do_sample": True, "temperature": args.temperature, "top_k": top_k, "top_p": top_p}
    for option, value in (("--top-k", args.top_k), ("--top-p", args.top_p)):
        if value is not None:
            note(f"{option} has no effect without --temperature: decoding is greedy")
    return arguments


def speculation_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the engine's calls for speculation."""
    return {
        "speculative_decoding": MODES[args.speculative],
        "exit_layer": args.exit_layer,
        "plan": args.plan,
        "domain": args.domain,
    }
