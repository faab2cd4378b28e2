"""Whole cycles of a model without weights, to be compiled: all kernels together, as decoding launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.synthetic import config_of
from selfspec.backends.cuda.decoder import FusedDecoder, Scratch, Seats
from selfspec.backends.cuda.exit import Drafter, DraftHead, known_buffer
from selfspec.backends.cuda.exit_scoring import Shadow
from selfspec.backends.cuda.step import Cycle, Drawing
from selfspec.cache.kv_cache import Cache
from selfspec.kernels.final_norm import Waiting
from selfspec.models.decoder import Decoder, model_parts
from selfspec.sampling import Sampling
from selfspec.speculation.exit import Exit, ExitBlock
from selfspec.speculation.plan import Plan

META = torch.device("meta")


def _model() -> Decoder:
    config = config_of("smollm2-135m")
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


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Of two texts, by a trained exit; those after the first share most of their kernels with it."""
    model, seats = _model(), Seats(2, 64, META)
    cache = Cache(model.config, META, model.dtype)
    cache.provide(64)
    waiting = Waiting.empty(seats.waiting, model.config.hidden_size, model.dtype)
    drafter = Drafter(_exit(model), DraftHead.empty(16384, META), known_buffer(model, 66 * seats.count), waiting)
    fused = FusedDecoder(model, cache, Scratch(META), seats, 2048)
    drawing = Drawing.of(Sampling(do_sample=True, temperature=0.7, top_k=50))
    yield "a tree", Cycle(fused, seats, Plan.parse("tree:4,2"), drafter, drawing).launch
    yield "a plain step that waits", Cycle(fused, seats, Plan(), drafter, drawing).launch
    yield "what was missed", Shadow(model, cache, Scratch(META), seats, 2048, drafter, drawing, scores=True).launch
