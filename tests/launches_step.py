"""Whole steps of a model without weights, to be compiled: all kernels together, as decoding launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from bench.synthetic import config_of
from selfspec.backends.cuda.decoder import FusedDecoder, Scratch
from selfspec.backends.cuda.exit import DraftHead, SlotExit, feature_buffer
from selfspec.backends.cuda.exit_scoring import ExitFill
from selfspec.backends.cuda.slots import SlotStore, StepOptions
from selfspec.backends.cuda.step import DeviceStep
from selfspec.cache.kv_cache import Cache
from selfspec.kernels.final_norm import SlotUnfilled
from selfspec.models.decoder import Decoder, model_parts
from selfspec.speculation.exit import Exit, ExitBlock
from selfspec.speculation.plan import NONE, Plan

META = torch.device("meta")
SLOTS, MAX_CONTEXT = 2, 2048  # sequences, and committed positions that attention is planned for


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
    """With a trained exit; those after the first share most of their kernels with it."""
    model = _model()
    cache = Cache(model.config, META, model.dtype, num_pages=64)
    store = SlotStore(SLOTS, 64, model.config.vocab_size, META, idle_page=0)
    slots = store.first(SLOTS)
    unfilled = SlotUnfilled.empty(slots.unfilled, model.config.hidden_size, model.dtype)
    features = feature_buffer(model, SLOTS + 64 * SLOTS)
    exit = SlotExit(_exit(model), DraftHead.empty(16384, META), features, SLOTS, unfilled)
    decoder = FusedDecoder(model, cache, Scratch(META), slots, MAX_CONTEXT)
    few = StepOptions(samples=True)
    everything = StepOptions(samples=True, processes=True)
    tree = Plan.parse("tree:4,2")
    yield "a tree", DeviceStep(decoder, slots, tree, exit, few).launch
    yield "a plain step that keeps unfilled states", DeviceStep(decoder, slots, NONE, exit, few).launch
    short = Plan.parse("tree:4")  # the second level of `a tree` has the same kernels with more rows
    yield "a tree of everything that a request may ask for", DeviceStep(decoder, slots, short, exit, everything).launch
    copying = Plan.parse("tree:4+copy:8")
    yield "a tree with copied nodes", DeviceStep(decoder, slots, copying, exit, few).launch
    masked = DeviceStep(decoder, slots, copying, exit, replace(few, grammar_masks=True))
    yield "a tree with forced nodes and masks", masked.launch
    yield "a greedy step without an exit", DeviceStep(decoder, slots, NONE, None, StepOptions()).launch
    few_copies = DeviceStep(decoder, slots, Plan.parse("copy:3"), None, StepOptions())
    yield "few copied nodes without an exit", few_copies.launch
    copies = Plan.parse("copy:15")
    yield "copied nodes of everything without an exit", DeviceStep(decoder, slots, copies, None, everything).launch
    yield "a beam", DeviceStep(decoder, slots, Plan.parse("beam:4,8"), exit, few).launch
    fill = ExitFill(decoder, slots, exit, few, scores=True)
    yield "a pass that fills and scores the exit", fill.launch
    parts = DeviceStep(decoder, slots, short, exit, everything)
    yield "passes for callables", parts.run_passes_and_head
    yield "the choice after callables", parts.choose_processed
