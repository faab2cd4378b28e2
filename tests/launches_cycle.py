"""Whole cycles of a model without weights, to be compiled: all kernels together, as decoding launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.synthetic import config_of
from selfspec.cache import Cache
from selfspec.device_cycle import Cycle, Drawing
from selfspec.device_judge import Judge, ends_buffer
from selfspec.device_prompts import Prompts
from selfspec.device_shadow import Shadow
from selfspec.exits import Exit, ExitBlock
from selfspec.fused import FusedDecoder, Scratch, Seats
from selfspec.fused_exit import Drafter, DraftHead, known_buffer
from selfspec.kernels.know import Waiting
from selfspec.model import Decoder, model_parts
from selfspec.sampling import Sampling
from selfspec.tree import Plan

META = torch.device("meta")


def _model(shape: str) -> Decoder:
    config = config_of(shape)
    tensors = {}
    for name, parts in model_parts(config).items():
        size = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        tensors[name] = torch.empty(size, dtype=torch.bfloat16, device=META)
    return Decoder(config, tensors)


def _exit(model: Decoder) -> Exit:
    hidden = model.config.hidden_size
    weight = torch.empty(hidden, hidden, dtype=model.dtype, device=META)
    recall = torch.empty(hidden, 2 * hidden, dtype=model.dtype, device=META)
    return Exit(model, 2, model.norm, ExitBlock(model.layers[2], weight, weight[0], recall))


def _seats(shape: str, batch: int) -> tuple[Decoder, Cache, Seats]:
    model = _model(shape)
    cache = Cache(model.config, META, model.dtype)
    cache.provide(64)
    return model, cache, Seats(batch, 64, META)


def _drafter(model: Decoder, seats: Seats, trained: bool) -> Drafter:
    head = DraftHead.empty(16384, META) if trained else None
    exit = _exit(model) if trained else Exit(model, 2)
    known = known_buffer(model, 66 * seats.count) if trained else None
    return Drafter(exit, head, known, Waiting.empty(seats.waiting, model.config.hidden_size, model.dtype))


def _cycle(shape: str, batch: int, plan: str, sampling: Sampling, exit: str = "raw") -> Cycle:
    model, cache, seats = _seats(shape, batch)
    fused = FusedDecoder(model, cache, Scratch(META), seats, 2048)
    drafter = None if exit == "none" else _drafter(model, seats, exit == "trained")
    return Cycle(fused, seats, Plan.parse(plan), drafter, Drawing.of(sampling))


def _shadow(shape: str, batch: int) -> Shadow:
    model, cache, seats = _seats(shape, batch)
    return Shadow(model, cache, Scratch(META), seats, 2048, _drafter(model, seats, True), Drawing(), scores=True)


def _prompts(shape: str) -> Prompts:
    model, scratch = _model(shape), Scratch(META)
    cache = Cache(model.config, META, model.dtype)
    cache.provide(64)
    return Prompts(model, cache, scratch, 2, 64, 0, exit=_exit(model))


def _judge(shape: str) -> Judge:
    model, cache, seats = _seats(shape, 4)
    return Judge(model, cache, Scratch(META), seats, 2048, _exit(model), ends_buffer(model, seats.count))


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    sampled = Sampling(do_sample=True, temperature=0.7, top_k=50)
    yield "plain, one row", _cycle("smollm2-135m", 1, "none", Sampling(), "none").launch
    yield "plain, with a trained exit that waits", _cycle("smollm2-135m", 1, "none", Sampling(), "trained").launch
    yield "what a trained exit has missed", _shadow("smollm2-135m", 2).launch
    yield "a tree with a trained exit", _cycle("smollm2-135m", 2, "tree:4,2", sampled, "trained").launch
    yield "prompts", _prompts("smollm2-135m").launch
    yield "prompts that are judged", _judge("smollm2-135m").launch
    yield "8b, a chain without a block", _cycle("llama-8b", 1, "chain:2", Sampling(do_sample=True)).launch
