"""Bytes of device memory beside weights, exits and KV cache, computed from shapes before anything is allocated.

With kernels: slot buffers and captured steps, which are built as for a warm-up but on PyTorch's meta device, and the
scratch memory that their launches take. Everywhere: the temporary tensors of a prefill chunk on PyTorch's operations.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from selfspec.backends.torch_backend import PREFILL_CHUNK
from selfspec.cache.kv_cache import Cache
from selfspec.drafters import Drafters
from selfspec.governor.rules import Rules
from selfspec.models.decoder import Decoder
from selfspec.models.linear import EXPANDED_TOGETHER, EXPANDING_NBYTES
from selfspec.profiles.profile import Profile
from selfspec.profiles.router import Embedded
from selfspec.speculation.exit import Exit

if TYPE_CHECKING:
    from selfspec.backends.cuda.graphs import Graphs


def prefill_nbytes(model: Decoder) -> int:
    """Bytes of the temporary tensors of a prefill chunk at their peak, in the MLP: its input and output, gate and
    up projection, the activated gate and its product with up; and of quantized weights that are expanded."""
    config = model.config
    width = 3 * config.hidden_size + 4 * config.intermediate_size
    expanding = min(EXPANDED_TOGETHER, prod(model.head.shape)) * EXPANDING_NBYTES if model.is_quantized else 0
    return PREFILL_CHUNK * width * model.dtype.itemsize + expanding


def graphs_nbytes(model: Decoder, profile: Profile | None, context: int, max_batch: int, batch: int) -> tuple[int, int]:
    """Bytes of slot buffers, captured steps and their scratch, and the number of graphs, once `Engine.warmup(batch)`
    has captured the greedy steps of a model on the meta device."""
    from selfspec.backends.cuda.graphs import Graphs  # these import Triton
    from selfspec.backends.cuda.kernel_prefill import longest_kernel_prompt
    from selfspec.backends.cuda.warmup import WarmUp
    from selfspec.warmup import Expected, expected_steps

    drafters = Drafters(model, profile, lambda *_: Embedded(lambda: torch.empty(0)), kernels=True)
    graphs = Graphs(model, Cache(model.config, model.device, model.dtype, 1), context, max_batch)
    expected = Expected(batch, None, (0.0,), context)
    rules = Rules().for_device("cuda")
    preparing = WarmUp(graphs, context, rules.max_tree_batch)
    exits: dict[Exit | None, None] = {None: None}
    for step in dict.fromkeys(expected_steps(drafters, rules, GenerationConfig(), expected)):
        preparing.prepare(step)
        exits[step.exit] = None
    graphs.max_kernel_prompt = longest_kernel_prompt(model)
    for exit in exits:
        preparing.prepare_prompts(exit, batch, profile.router_layer if profile is not None and profile.routes else None)
    return graphs.nbytes + _scratch_nbytes(graphs), len(graphs.captured.entries)


def _scratch_nbytes(graphs: Graphs) -> int:
    """Bytes of scratch that all captured steps and passes take. Sizes each buffer for the pass with most rows, so
    buffers that this pass does not use are not counted exactly."""
    from selfspec.backends.cuda.step import DeviceStep
    from selfspec.kernels.topk import Scores
    from selfspec.kernels.tree_attention import workspace_size

    config, itemsize = graphs.model.config, graphs.model.dtype.itemsize
    rows, partials, scores = 0, 0, 0
    for made, *_ in graphs.captured.entries.values():
        is_step = isinstance(made, DeviceStep)
        sequences, nodes = (made.slots.count, len(made.plan) + 1) if is_step else (made.count, len(made.nodes.depths))
        rows = max(rows, sequences * nodes)
        attention = sequences, nodes, config.num_heads, config.head_dim, made.decoder.ranges
        partials = max(partials, workspace_size(*attention))
        if is_step and made.exit is not None:
            columns = config.vocab_size if made.exit.head is None else len(made.exit.head.tokens)
            drafting = sequences * max(len(level) for level in made.plan.levels)
            ranked = Scores.empty(drafting, columns, 2, "meta")  # two or more tokens of a row are ranked
            scores = max(scores, sum(tensor.nbytes for tensor in vars(ranked).values() if tensor is not None))
    # Of a layer: queries, attended values, MLP; normed product. Of prompts: two residual streams and features of two
    # states. Of an exit: residual streams of its block and of the last layer, its output, the head's input.
    layer = 2 * config.num_heads * config.head_dim + config.intermediate_size
    states = config.sandwich_norms + 4 + 2 + 2 + 1 + 1
    return rows * (layer + states * config.hidden_size) * itemsize + 4 * partials + scores
