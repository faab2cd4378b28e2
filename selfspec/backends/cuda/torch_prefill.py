"""Prefills one chunk of a longer prompt with PyTorch operations, captured as a CUDA graph for a few sizes.

Runs the operations of the reference backend; the graph only removes the host's time between them. A chunk is padded to
the next size, so the KV of a prompt depends on its tokens alone, never on other prompts or plans. Padding rows write
to the idle page. `kernel_prefill.py` handles shorter prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.backends.cuda.exit import prompt_end_buffer
from selfspec.backends.cuda.slots import to_device
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import FEATURE_STATES, Exit, position_features
from selfspec.speculation.exit_scoring import PROMPT_END

MIN_ROWS = max(32, PROMPT_END)  # rows to which chunks are padded, at least


class ChunkLayout:
    """The layout of a chunk's rows, like `cache.layout.Rows`, but with tensors of fixed shape for a captured graph."""

    is_causal = True

    def __init__(self, positions: torch.Tensor, flat_slots: torch.Tensor, pages: torch.Tensor, slots: int) -> None:
        """`slots`: number of cache slots that the rows may attend to."""
        self.positions, self.flat_slots, self.pages, self.slots = positions, flat_slots, pages, slots
        self._masks: dict[int | None, torch.Tensor] = {}
        self.rotations: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def mask(self, window: int | None) -> torch.Tensor:
        """Returns [1, M, S] bool: a row attends to the cache slots up to its own, within the window. Slot i is position
        i, as a prompt has no other nodes."""
        if window not in self._masks:
            slot, position = torch.arange(self.slots, device=self.positions.device), self.positions[..., None]
            visible = slot <= position
            self._masks[window] = visible if window is None else visible & (slot > position - window)
        return self._masks[window]


class TorchPrefill:
    """The pass over a chunk of up to `rows` prompt tokens that ends within the prompt's first `max_context` positions.
    With an exit also fills the exit's KV, and keeps the feature and the states that the next chunk needs. With
    `keeps_states` also keeps the normed final states of all rows, for log probabilities."""

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        exit: Exit | None,
        rows: int,
        max_context: int,
        idle_page: int,
        keeps_states: bool,
    ) -> None:
        self.model, self.cache, self.max_context, self._idle_page = model, cache, max_context, idle_page
        self.exit = exit
        # One tensor for one copy to the device: tokens; start position and number of tokens; pages.
        self.inputs = torch.zeros(rows + 2 + -(-max_context // PAGE_SIZE), dtype=torch.int64, device=model.device)
        self.tokens, self.page_table = self.inputs[None, :rows], self.inputs[None, rows + 2 :]
        self.span = self.inputs[rows : rows + 2]  # start position, number of tokens
        self.load([0], 0, [])
        width = FEATURE_STATES * model.config.hidden_size
        # Feature of the last position before the chunk; after the launch, of the chunk's last position.
        self.feature = torch.zeros(1, 1, width, dtype=model.dtype, device=model.device)
        self.prompt_end = prompt_end_buffer(model, 1)[:, 0]  # likewise, the states at the last PROMPT_END positions
        self.final_states = torch.zeros_like(model.embed(self.tokens)[0]) if keeps_states else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that belong to this pass alone."""
        kept = [] if self.final_states is None else [self.final_states]
        return [self.inputs, self.feature, self.prompt_end, *kept]

    def load(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """Copies the chunk's tokens, start and pages to the device."""
        inputs = torch.zeros(len(self.inputs), dtype=torch.int64)
        rows, held = self.tokens.shape[1], pages[: self.page_table.shape[1]]
        inputs[: len(tokens)] = torch.tensor(tokens)
        inputs[rows : rows + 2 + len(held)] = torch.tensor([start, len(tokens), *held])
        inputs[rows + 2 + len(held) :] = self._idle_page
        self.inputs.copy_(to_device(inputs, self.inputs.device), non_blocking=True)

    def load_previous(self, feature: torch.Tensor | None, prompt_end: torch.Tensor | None = None) -> None:
        """Sets `feature` and `prompt_end` to those of the prompt before the chunk. Both are None for the first chunk:
        sets `feature` to zeros then, and leaves `prompt_end`, of which that chunk reads nothing."""
        self.feature.zero_() if feature is None else self.feature[0, 0].copy_(feature)
        if prompt_end is not None:
            self.prompt_end.copy_(prompt_end)

    def _layout(self) -> ChunkLayout:
        row = torch.arange(self.tokens.shape[1], device=self.inputs.device)
        positions = self.span[0] + row
        page = self.page_table[0, (positions // PAGE_SIZE).clamp(max=self.page_table.shape[1] - 1)]
        is_token = row < self.span[1]
        flat = torch.where(is_token, page * PAGE_SIZE, self._idle_page * PAGE_SIZE) + positions % PAGE_SIZE
        return ChunkLayout(positions[None], flat, self.page_table, self.max_context)

    def launch(self) -> None:
        model, exit, layers = self.model, self.exit, self.model.config.num_layers
        at = self._layout()
        hidden = model.embed(self.tokens)
        if exit is None:
            last = model.run(hidden, 0, layers, at, self.cache)  # type: ignore[arg-type]
            if self.final_states is not None:
                self.final_states.copy_(model.head_input(last)[0])
            return
        hidden = model.run(hidden, 0, exit.layer, at, self.cache)  # type: ignore[arg-type]
        middle = model.run(hidden, exit.layer, exit.feature_layer, at, self.cache)  # type: ignore[arg-type]
        last = model.run(middle, exit.feature_layer, layers, at, self.cache)  # type: ignore[arg-type]
        features = position_features(model, middle, last)
        previous = torch.cat((self.feature, features[:, :-1]), dim=1)
        exit.fill(hidden, previous, at, self.cache)  # type: ignore[arg-type]
        self.feature.copy_(features.index_select(1, self.span[1:] - 1))
        final_states = features[0, :, : model.config.hidden_size]
        self._keep_prompt_end(hidden[0], previous[0], final_states)
        if self.final_states is not None:
            self.final_states.copy_(final_states)

    def _keep_prompt_end(self, *states: torch.Tensor) -> None:
        """Writes to `prompt_end` the states [rows, ...] at the last PROMPT_END positions up to the chunk's end, some
        of which may belong to the chunk before."""
        index, begin = torch.arange(PROMPT_END, device=self.inputs.device), self.span[1] - PROMPT_END
        rows = torch.where(self.span[0] > 0, begin, begin.clamp(min=0)) + index  # below 0: rows of the chunk before
        before = self.prompt_end.index_select(0, (rows + PROMPT_END).clamp(max=PROMPT_END - 1))
        of_chunk = torch.cat([state.index_select(0, rows.clamp(min=0)) for state in states], dim=1)
        self.prompt_end.copy_(torch.where(rows[:, None] < 0, before, of_chunk))
