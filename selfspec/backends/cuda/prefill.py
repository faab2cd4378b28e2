"""Prompts on the device: a chunk of a prompt through all layers, captured as a CUDA graph for a few sizes.

The same PyTorch operations as everywhere; a graph only takes the host out of the way. A chunk is padded to the next
size, so what is computed for a prompt depends on its length alone, never on other prompts or on whether it will be
drafted for. Padding writes to a page that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.backends.cuda.prompt_scoring import ends_buffer
from selfspec.backends.cuda.slots import to_device
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import FEATURE_STATES, Exit, position_features
from selfspec.speculation.exit_scoring import PROMPT_END

SMALLEST = max(32, PROMPT_END)  # rows that a chunk is padded to at least


def padded(count: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())


class Causal:
    """The layout of a chunk's rows, as `cache.layout.Rows` gives it, in tensors of fixed shape for a captured graph."""

    is_causal = True

    def __init__(self, positions: torch.Tensor, flat_slots: torch.Tensor, pages: torch.Tensor, slots: int) -> None:
        self.positions, self.flat_slots, self.pages, self.slots = positions, flat_slots, pages, slots
        self._masks: dict[int | None, torch.Tensor] = {}
        self.rotations: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def mask(self, window: int | None) -> torch.Tensor:
        """[1, M, S] bool: a row attends to the slots up to its own; each slot holds the position of its number."""
        if window not in self._masks:
            slot, position = torch.arange(self.slots, device=self.positions.device), self.positions[..., None]
            visible = slot <= position
            self._masks[window] = visible if window is None else visible & (slot > position - window)
        return self._masks[window]


class Prefill:
    """Up to `rows` tokens of a prompt, seeing up to `slots` slots with themselves, through all layers, and the exit's
    share of it."""

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        exit: Exit | None,
        rows: int,
        slots: int,
        idle_page: int,
    ) -> None:
        self.model, self.cache, self.slots, self._idle = model, cache, slots, idle_page
        self.exit = exit
        # Tokens, where they start and how many they are, and pages: one tensor, told at once.
        self.told = torch.zeros(rows + 2 + -(-slots // PAGE_SIZE), dtype=torch.int64, device=model.device)
        self.tokens, self.table = self.told[None, :rows], self.told[None, rows + 2 :]
        self.span = self.told[rows : rows + 2]
        self.load([0], 0, [])
        # What was known before the chunk, and is known after it, for the exit to recall.
        self.known = torch.zeros(1, 1, FEATURE_STATES * model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.judged = ends_buffer(model, 1)[:, 0]  # what is known of the text's last positions, before and after it

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return [self.told, self.known, self.judged]

    def load(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """Tells which chunk comes next."""
        told = torch.zeros(len(self.told), dtype=torch.int64)
        rows, held = self.tokens.shape[1], pages[: self.table.shape[1]]
        told[: len(tokens)] = torch.tensor(tokens)
        told[rows : rows + 2 + len(held)] = torch.tensor([start, len(tokens), *held])
        told[rows + 2 + len(held) :] = self._idle
        self.told.copy_(to_device(told, self.told.device), non_blocking=True)

    def remember(self, known: torch.Tensor | None, judged: torch.Tensor | None = None) -> None:
        """What was known before the chunk; nothing where a text begins."""
        self.known.zero_() if known is None else self.known[0, 0].copy_(known)
        if judged is not None:
            self.judged.copy_(judged)

    def places(self, row: torch.Tensor | None = None) -> Causal:
        """Where these rows stand, or all of them."""
        row = torch.arange(self.tokens.shape[1], device=self.told.device) if row is None else row
        positions = self.span[0] + row
        page = self.table[0, (positions // PAGE_SIZE).clamp(max=self.table.shape[1] - 1)]
        real = row < self.span[1]
        flat = torch.where(real, page * PAGE_SIZE, self._idle * PAGE_SIZE) + positions % PAGE_SIZE
        return Causal(positions[None], flat, self.table, self.slots)

    def launch(self) -> None:
        model, exit, layers = self.model, self.exit, self.model.config.num_layers
        at = self.places()
        hidden = model.embed(self.tokens)
        if exit is None:
            model.run(hidden, 0, layers, at, self.cache)  # type: ignore[arg-type]
            return
        hidden = model.run(hidden, 0, exit.layer, at, self.cache)  # type: ignore[arg-type]
        middle = model.run(hidden, exit.layer, exit.feature_layer, at, self.cache)  # type: ignore[arg-type]
        last = model.run(middle, exit.feature_layer, layers, at, self.cache)  # type: ignore[arg-type]
        known = position_features(model, middle, last)
        previous = torch.cat((self.known, known[:, :-1]), dim=1)
        exit.fill(hidden, previous, at, self.cache)  # type: ignore[arg-type]
        self.known.copy_(known.index_select(1, self.span[1:] - 1))
        parts = hidden[0], previous[0], known[0, :, : model.config.hidden_size]
        places, begin = torch.arange(PROMPT_END, device=self.told.device), self.span[1] - PROMPT_END
        rows = torch.where(self.span[0] > 0, begin, begin.clamp(min=0)) + places  # below 0: of the chunk before
        before = self.judged.index_select(0, (rows + PROMPT_END).clamp(max=PROMPT_END - 1))
        some = torch.cat([states.index_select(0, rows.clamp(min=0)) for states in parts], dim=1)
        self.judged.copy_(torch.where(rows[:, None] < 0, before, some))
