"""Prefills prompts with the decode kernels, several prompts or a part of one in a pass, captured as a CUDA graph.

A pass cuts prompts into *segments* of up to 64 positions. To the kernels a segment is a chain of nodes whose committed
context is the prompt before it: in every layer all segments write their keys and values before any of them attends. A
row gets the same bits in any pass, and in any step that decodes it: the KV of a position depends on the tokens up to
that position alone. `torch_prefill.py` handles longer prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Residual, Scratch
from selfspec.backends.cuda.exit import FusedExit, PreviousFeatures, feature_buffer, prompt_end_buffer
from selfspec.backends.cuda.slots import bucket, host_tensor
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.kernels.embed_rope import embed_rope
from selfspec.kernels.norm import squares_per_row
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import Exit
from selfspec.speculation.exit_scoring import PROMPT_END

SHORT, MEDIUM, LONGEST = 256, 1024, 8192  # tokens: passes are captured for prompts of up to these lengths
SMALL_MODEL = 2048  # hidden size; above it PyTorch's matrix products are faster for prompts over SHORT
SEGMENT = PAGE_SIZE  # positions of a segment
SHORTEST_SEGMENT = 16  # positions of a segment in a pass over prompts that have at most so many tokens
MAX_SEGMENTS = 16  # segments of a pass
MAX_TOKENS = MAX_SEGMENTS * SEGMENT  # tokens of a pass, at most


class PromptPart(NamedTuple):
    """The part of a prompt that a pass runs over."""

    tokens: Sequence[int]
    pages: Sequence[int]  # of the prompt, from its first position on
    start: int = 0  # position of the first of these tokens
    previous: torch.Tensor | None = None  # [2 * hidden]: feature of the position before; None: zeros


def longest_kernel_prompt(model: Decoder) -> int:
    """Returns the number of tokens of the longest prompt that the decode kernels prefill."""
    return LONGEST if model.config.hidden_size <= SMALL_MODEL else SHORT


def segments(tokens: int) -> int:
    """Returns the number of segments into which `tokens` tokens of a prompt are cut."""
    return -(-tokens // SEGMENT)


def next_part(tokens: int) -> int:
    """Returns how many of a prompt's remaining `tokens` tokens the next pass takes. Leaves at least PROMPT_END tokens
    to the last pass, which keeps the states by which the exit is scored, unless the prompt is shorter."""
    if tokens <= MAX_TOKENS:
        return tokens
    return MAX_TOKENS if tokens - MAX_TOKENS >= PROMPT_END else MAX_TOKENS - SEGMENT


def groups_per_pass(lengths: Sequence[int]) -> Iterator[range]:
    """Yields groups of consecutive prompts, given their lengths, so that each group fits into a pass."""
    start = taken = 0
    for index, length in enumerate(lengths):
        if taken + segments(length) > MAX_SEGMENTS:
            yield range(start, index)
            start, taken = index, 0
        taken += segments(length)
    if start < len(lengths):
        yield range(start, len(lengths))


def pass_size(lengths: Sequence[int], end: int = 0) -> tuple[int, int, int]:
    """Returns the size, one of few, for which a pass over `lengths` tokens of some prompts is captured: number of
    segments (a power of two), positions per segment, tokens of the longest prompt. `end`: the largest number of tokens
    from a prompt's first one to the last one in this pass; 0 if all prompts begin in this pass."""
    count, end = sum(map(segments, lengths)), max(end, *lengths)
    segment = SHORTEST_SEGMENT if end <= SHORTEST_SEGMENT else SEGMENT
    return bucket(count), segment, next(size for size in (SHORT, MEDIUM, LONGEST) if end <= size)


def sizes_to_capture(prompts: int, longest: int) -> Iterator[tuple[list[int], int]]:
    """Yields arguments of `pass_size`, one pair for each size that is needed for passes over up to `prompts` prompts of
    up to two segments, or over a part of one prompt of up to `longest` tokens."""
    most = min(max(2 * prompts, segments(SHORT)), MAX_SEGMENTS)
    for power in range((most - 1).bit_length() + 1):
        yield [SEGMENT] * (1 << power), 0
    for shorter, end in ((SHORT, MEDIUM), (MEDIUM, LONGEST)):
        for power in range(MAX_SEGMENTS.bit_length() if longest > shorter else 0):
            yield [SEGMENT << power], min(longest, end)


class PromptPass:
    """A pass over up to `count` segments of `segment` positions each, cut from prompts of up to `longest` tokens. Its
    rows are node-major: row = position in the segment * count + number of the segment."""

    def __init__(
        self, model: Decoder, cache: Cache, scratch: Scratch, count: int, segment: int, longest: int, idle_page: int
    ) -> None:
        self.model, self.scratch, self.count, self.segment = model, scratch, count, segment
        self.rows = count * segment
        self.inputs = PassInputs(count, segment, longest, idle_page, model.device)
        self.nodes = Nodes.chain(model, segment, count)
        self.decoder = FusedDecoder(model, cache, scratch, self.inputs, longest)
        # Makes `embed_rope` take the token of node i from column i of the segment's tokens: rank i after parent 0.
        self._parents = torch.zeros_like(self.nodes.depths)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that belong to this pass alone."""
        return [*self.inputs.tensors, *vars(self.nodes.metadata).values()]

    def load(self, prompts: Sequence[PromptPart]) -> None:
        """Copies the tokens and pages of the next launch's prompts to the device."""
        self.inputs.load(prompts)

    def _embed(self) -> Residual:
        """Embeds the tokens and fills the metadata of their rows."""
        self.inputs.convert()
        model, decoder, hidden = self.model, self.decoder, self.model.config.hidden_size
        squares = self.scratch.take("prompts embedded squares", self.rows, squares_per_row(hidden), dtype=torch.float32)
        residual = Residual(self._take("embedded states", hidden), squares, self._take("embedded scaled", hidden))
        first_norm = decoder.next_norm(model.layers[0].attention_norm, residual)
        embed_rope(
            self.nodes.metadata, residual.states, first_norm, model.embedding.weight, model.embedding_scale,
            self.inputs.lengths, self.inputs.page_table, self.nodes.depths, decoder.inv_freq, decoder.rope_scaling, 0,
            ranked=self.inputs.tokens, parents=self._parents, ranks=self.nodes.depths,
        )  # fmt: skip
        return residual

    def _take(self, name: str, width: int, rows: int = 0) -> torch.Tensor:
        return self.scratch.take(f"prompts {name}", rows or self.rows, width, dtype=self.model.dtype)


class PassInputs:
    """The inputs of a pass over prompt segments, copied to the device as one int64 tensor, and there to an int32 one.

    Segments without a prompt write to the idle page. All inputs begin at multiples of 16 bytes, so that one compiled
    kernel serves every size.
    """

    def __init__(self, count: int, segment: int, longest: int, idle_page: int, device: torch.device) -> None:
        self.count, self.segment = count, segment
        shapes = {
            "tokens": (count, segment),
            "lengths": (count,),  # positions of the prompt before each segment
            "counts": (count,),  # tokens of each segment
            "pages": (count, longest // PAGE_SIZE),
            # Row of the feature of the position before each segment, in `features` of `KernelPrefill.launch`.
            "previous": (count,),
            "last": (count,),  # row of each prompt's last token
            "end": (count, PROMPT_END),  # rows of each prompt's last tokens, -1 where it has fewer
        }
        self._parts: dict[str, tuple[slice, tuple[int, ...]]] = {}
        total = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            self._parts[name] = slice(total, total + size), shape
            total += (size + 3) // 4 * 4
        self._without_prompts = np.zeros(total, dtype=np.int64)  # the inputs of a pass over no prompt
        idle = self._views(self._without_prompts)
        idle["pages"][:], idle["previous"][:], idle["end"][:] = idle_page, np.arange(count), -1
        self._int64 = torch.zeros(total, dtype=torch.int64, device=device)
        self._int32 = torch.zeros(total, dtype=torch.int32, device=device)
        for_kernels, for_torch = self._views(self._int32), self._views(self._int64)
        self.tokens, self.lengths, self.page_table = (for_kernels[name] for name in ("tokens", "lengths", "pages"))
        self.counts, self.previous, self.last, self.end = (
            for_torch[name] for name in ("counts", "previous", "last", "end")
        )
        self.load([])

    def _views(self, whole: torch.Tensor | np.ndarray) -> dict:
        """Returns views of the inputs in a tensor or array of all, by name."""
        return {name: whole[part].reshape(shape) for name, (part, shape) in self._parts.items()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self._int64, self._int32]

    def load(self, prompts: Sequence[PromptPart]) -> None:
        """Cuts the prompts into segments and copies the inputs to the device, without waiting."""
        host = host_tensor(self._int64, self._int64.device)
        inputs = host.numpy()
        inputs[:] = self._without_prompts
        parts = self._views(inputs)
        at = 0  # the next segment
        for number, prompt in enumerate(prompts):
            first, length = at, len(prompt.tokens)
            for offset in range(0, length, self.segment):
                some = prompt.tokens[offset : offset + self.segment]
                parts["tokens"][at, : len(some)] = some
                parts["lengths"][at], parts["counts"][at] = prompt.start + offset, len(some)
                pages = prompt.pages[: parts["pages"].shape[1]]
                parts["pages"][at, : len(pages)] = pages
                if offset:
                    parts["previous"][at] = self.count + self._row(at - 1, self.segment - 1)
                at += 1
            positions = np.arange(max(0, length - PROMPT_END), length)
            end = self._row(first + positions // self.segment, positions % self.segment)
            parts["end"][number, : len(positions)] = end
            parts["last"][number] = self._row(at - 1, (length - 1) % self.segment)
        self._int64.copy_(host, non_blocking=True)

    def rows_of(self, first: int, length: int) -> torch.Tensor:
        """Returns the rows [length] of the first `length` tokens of a prompt, on the host; `first`: number of the
        prompt's first segment."""
        position = torch.arange(length)
        return self._row(first + position // self.segment, position % self.segment)

    def _row(self, segment: Any, position: Any) -> Any:
        """Returns the row of a position in a segment; takes integers or arrays."""
        return position * self.count + segment

    def convert(self) -> None:
        """Converts the inputs to int32 on the device, as kernels read them; part of the captured pass."""
        self._int32.copy_(self._int64)


class PromptEmbedding(PromptPass):
    """Sums the normed states of each segment after `layer` layers. A prompt's embedding for the router is the sum over
    its segments, divided by its number of tokens."""

    def __init__(self, *size: Any, layer: int) -> None:
        super().__init__(*size)
        self.layer = layer
        self.sums = torch.zeros(self.count, self.model.config.hidden_size, device=self.model.device)  # float32

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, self.sums]

    def launch(self) -> None:
        residual = self._embed()
        hidden = self.decoder.run(range(self.layer), residual, residual, self.nodes).states.float()
        states = F.rms_norm(hidden, hidden.shape[-1:]).unflatten(0, (self.segment, self.count))
        is_token = torch.arange(self.segment, device=hidden.device)[:, None] < self.inputs.counts
        self.sums.copy_(torch.where(is_token[..., None], states, 0).sum(0))


class KernelPrefill(PromptPass):
    """Fills the KV of prompts in all layers. With an exit also fills the exit's KV, and keeps for each prompt the
    feature of its last position in the pass and the states at its last PROMPT_END positions. With `keeps_states` also
    keeps the normed final states of all rows, for log probabilities."""

    def __init__(self, *size: Any, exit: Exit | None, keeps_states: bool = False) -> None:
        super().__init__(*size)
        model, self.exit = self.model, exit
        self.final_states = self._take("final", model.config.hidden_size) if keeps_states else None
        self.features = feature_buffer(model, self.count)  # of each prompt's last position in the pass
        # Row i: feature of the position before segment i, if that is the prompt's first segment in the pass.
        self.before = feature_buffer(model, self.count)
        self._before_is_set = False  # whether `before` holds values other than zero
        end, width = self.inputs.end, prompt_end_buffer(model, 1).shape[-1]
        self.prompt_end = self._take("end", width, end.numel()).view(*end.shape, width)
        # [R]: for each row of the pass, the row of the previous position in `features` of `launch`: `count` rows of
        # `before`, then the pass's. The position before row r is row r - `count` of the pass, so row r of `features`;
        # the first `count` rows begin segments, and `launch` sets theirs.
        self._previous_rows = torch.arange(self.rows, device=model.device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, self.features, self.before, self._previous_rows]

    def load(self, prompts: Sequence[PromptPart]) -> None:
        super().load(prompts)
        if self._before_is_set:
            self.before.zero_()
        first_segments = accumulate((-(-len(prompt.tokens) // self.segment) for prompt in prompts), initial=0)
        self._before_is_set = any(prompt.previous is not None for prompt in prompts)
        for row, prompt in zip(first_segments, prompts, strict=False):
            if prompt.previous is not None:
                self.before[row].copy_(prompt.previous)

    def launch(self) -> None:
        decoder, exit, layers = self.decoder, self.exit, self.model.config.num_layers
        # Before the first kernel: kernels after it may start early, and read these rows without waiting.
        self._previous_rows[: self.count].copy_(self.inputs.previous)
        residual = self._embed()
        if exit is None and self.final_states is not None:
            decoder.final_norm(decoder.run(range(layers), residual, residual, self.nodes), self.final_states)
            return
        if exit is None:  # only keys and values are needed
            residual = decoder.run(range(layers - 1), residual, residual, self.nodes)
            last, spec = self.model.layers[-1], self.model.config.layers[-1]
            decoder.write_kv(last, spec, layers - 1, residual, self.nodes, None)
            return
        residual = decoder.run(range(exit.layer), residual, residual, self.nodes)
        # [count + R, 2 * hidden]: `before`, then the features of the pass's rows.
        features = self._take("features", self.features.shape[1], self.count + self.rows)
        features[: self.count].copy_(self.before)
        fused_exit = FusedExit(decoder, exit)
        fused_exit.verify(residual, fused_exit.block_residual(self.rows), self.nodes, features[self.count :])
        if exit.block is not None:
            fused_exit.fill(residual.states, PreviousFeatures(features, self._previous_rows), self.nodes)
        self.features.copy_(features[self.count :].index_select(0, self.inputs.last))
        rows, hidden = self.inputs.end.flatten().clamp(min=0), self.model.config.hidden_size
        previous = features.index_select(0, self._previous_rows.index_select(0, rows))
        final_states = features[self.count :, :hidden].index_select(0, rows)
        if self.final_states is not None:
            self.final_states.copy_(features[self.count :, :hidden])
        parts = residual.states.index_select(0, rows), previous, final_states
        torch.cat(parts, dim=1, out=self.prompt_end.flatten(0, 1))
