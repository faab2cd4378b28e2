"""Short prompts on the device: many of them in one pass of the kernels that decode, captured as a CUDA graph.

A text is cut into stretches of up to 64 positions, and each stretch is to the kernels a chain of nodes with everything
before it as its past: in every layer all stretches have stored their keys before any of them attends. A row gets the
same bits in any company, so texts share a pass whatever they are. `prefill.py` handles longer prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Scratch, Stream
from selfspec.backends.cuda.exit import FusedExit, Past, known_buffer
from selfspec.backends.cuda.prompt_scoring import ends_buffer
from selfspec.backends.cuda.slots import to_device
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.kernels.embed_rope import embed_rope
from selfspec.kernels.norm import squares_per_row
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import Exit
from selfspec.speculation.exit_scoring import PROMPT_END

SHORT, LONGEST = 256, 1024  # tokens of the texts that passes are made for
SMALL_MODEL = 2048  # its width: texts of larger ones are worth large products of PyTorch if they are not short
STRETCH = PAGE_SIZE
SHORTEST = 16  # positions of a stretch, where no text is longer
MOST_STRETCHES = 16  # in a pass

Text = tuple[Sequence[int], Sequence[int]]  # tokens, and the pages that they go to


def longest_together(model: Decoder) -> int:
    """Tokens of texts that share passes."""
    return LONGEST if model.config.hidden_size <= SMALL_MODEL else SHORT


def stretches(tokens: int) -> int:
    """How many a text of so many tokens is cut into."""
    return -(-tokens // STRETCH)


def passes(lengths: Sequence[int]) -> Iterator[range]:
    """Texts of these lengths, in groups that fit into a pass."""
    start = taken = 0
    for index, length in enumerate(lengths):
        if taken + stretches(length) > MOST_STRETCHES:
            yield range(start, index)
            start, taken = index, 0
        taken += stretches(length)
    if start < len(lengths):
        yield range(start, len(lengths))


def pass_size(lengths: Sequence[int]) -> tuple[int, int, int]:
    """How many stretches, of how many positions, of texts of how many, a pass of such texts is captured for: few sizes,
    powers of two."""
    count, longest = sum(map(stretches, lengths)), max(lengths)
    stretch = SHORTEST if longest <= SHORTEST else STRETCH
    return 1 << (count - 1).bit_length(), stretch, SHORT if longest <= SHORT else LONGEST


def passes_up_to(texts: int, longest: int) -> Iterator[list[int]]:
    """Lengths of texts for each size of the passes that as many texts of one or two whole stretches take, or a longer
    one alone."""
    most = min(max(2 * texts, stretches(SHORT)), MOST_STRETCHES)
    for power in range((most - 1).bit_length() + 1):
        yield [STRETCH] * (1 << power)
    while longest > SHORT:
        yield [longest]
        longest //= 2


class Pass:
    """Some layers over up to `count` stretches of texts of up to `longest` tokens."""

    def __init__(
        self, model: Decoder, cache: Cache, scratch: Scratch, count: int, stretch: int, longest: int, idle_page: int
    ) -> None:
        self.model, self.cache, self.scratch, self.count, self.stretch = model, cache, scratch, count, stretch
        self.rows, device = count * stretch, model.device
        sizes = {
            "tokens": (count, stretch),
            "lengths": (count,),  # where each stretch begins
            "filled": (count,),  # how many positions of it there are
            "pages": (count, longest // PAGE_SIZE),
            "roots": (count,),  # the row that comes before the stretch, among what is known: first `count` of nothing
            "lasts": (count,),  # of each text, the row of its last token
            "ends": (count, PROMPT_END),  # of each text, the rows of its last tokens, -1 where there are no more
        }
        # One tensor, told at once; all parts at multiples of 16 bytes, so that one compiled kernel serves every size.
        self._where, total = {}, 0
        for name, shape in sizes.items():
            size = int(np.prod(shape))
            self._where[name] = slice(total, total + size), shape
            total += (size + 3) // 4 * 4
        self._nothing = np.zeros(total, dtype=np.int64)  # what is told where there is no text
        nothing = self._parts(self._nothing)
        nothing["pages"][:], nothing["roots"][:], nothing["ends"][:] = idle_page, np.arange(count), -1
        self.told = torch.zeros(total, dtype=torch.int64, device=device)
        self._ints = torch.zeros(total, dtype=torch.int32, device=device)
        short = self._parts(self._ints)
        self.tokens, self.lengths, self.page_table = short["tokens"], short["lengths"], short["pages"]
        long = self._parts(self.told)
        self.filled, self.roots, self.lasts, self.ends = (long[n] for n in ("filled", "roots", "lasts", "ends"))
        self.load([])
        self.nodes = Nodes.chain(model, stretch, count)
        self.places, self._steps = self.nodes.places, self.nodes.depths
        self._first = torch.zeros_like(self._steps)
        self.fused = FusedDecoder(model, cache, scratch, self, longest)

    def _parts(self, whole: torch.Tensor | np.ndarray) -> dict:
        """Views of the parts of what is told."""
        return {name: whole[where].reshape(shape) for name, (where, shape) in self._where.items()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it holds."""
        return [self.told, self._ints, *vars(self.places).values()]

    def load(self, texts: Sequence[Text]) -> None:
        """Tells which texts come next."""
        told = self._nothing.copy()
        parts = self._parts(told)
        at = 0
        for number, (tokens, pages) in enumerate(texts):
            first, length = at, len(tokens)
            for start in range(0, length, self.stretch):
                some = tokens[start : start + self.stretch]
                parts["tokens"][at, : len(some)] = some
                parts["lengths"][at], parts["filled"][at] = start, len(some)
                held = pages[: parts["pages"].shape[1]]
                parts["pages"][at, : len(held)] = held
                if start:
                    parts["roots"][at] = self.count + self.row(at - 1, self.stretch - 1)
                at += 1
            places = np.arange(max(0, length - PROMPT_END), length)
            ends = self.row(first + places // self.stretch, places % self.stretch)
            parts["ends"][number, : len(places)] = ends
            parts["lasts"][number] = self.row(at - 1, (length - 1) % self.stretch)
        self.told.copy_(to_device(torch.from_numpy(told), self.told.device), non_blocking=True)

    def row(self, stretch: Any, place: Any) -> Any:
        """Of a stretch's position: rows are node-major. For numbers and arrays."""
        return place * self.count + stretch

    def _enter(self) -> Stream:
        """The tokens' states, before the first layer."""
        self._ints.copy_(self.told)
        stream, model, fused = self._stream("entered"), self.model, self.fused
        first_norm = fused.next_norm(model.layers[0].attention_norm, stream)
        embed_rope(
            self.places, stream.states, first_norm, model.embedding, model._embedding_scale, self.lengths,
            self.page_table, self.nodes.depths, fused.inv_freq, fused.rope_scaling, 0,
            ranked=self.tokens, parents=self._first, ranks=self._steps,
        )  # fmt: skip
        return stream

    def _stream(self, name: str) -> Stream:
        hidden = self.model.config.hidden_size
        squares = self.scratch.take(f"prompts {name} squares", self.rows, squares_per_row(hidden), dtype=torch.float32)
        return Stream(self._take(f"{name} states", hidden), squares, self._take(f"{name} scaled", hidden))

    def _take(self, name: str, width: int, rows: int = 0) -> torch.Tensor:
        return self.scratch.take(f"prompts {name}", rows or self.rows, width, dtype=self.model.dtype)


class Marking(Pass):
    """What `routing.mark` does, up to the means."""

    def __init__(self, *place: Any, layer: int) -> None:
        super().__init__(*place)
        self.layer = layer
        self.sums = torch.zeros(self.count, self.model.config.hidden_size, device=self.model.device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, self.sums]

    def launch(self) -> None:
        stream = self._enter()
        hidden = self.fused.run(range(self.layer), stream, stream, self.nodes).states.float()
        states = F.rms_norm(hidden, hidden.shape[-1:]).unflatten(0, (self.stretch, self.count))
        real = torch.arange(self.stretch, device=hidden.device)[:, None] < self.filled
        self.sums.copy_(torch.where(real[..., None], states, 0).sum(0))


class Prompts(Pass):
    """Prompts through all layers, and the exit's share of it; of each, what is then known at its end, and all that is
    needed to judge it by its last positions."""

    def __init__(self, *place: Any, exit: Exit | None) -> None:
        super().__init__(*place)
        model, self.exit = self.model, exit
        self.known = known_buffer(model, self.count)
        size = ends_buffer(model, 1).shape[-1]
        self.judged = self._take("judged", size, self.ends.numel()).view(*self.ends.shape, size)
        # Of every position but a stretch's first, the one before it.
        self._known_rows = torch.arange(self.rows, device=model.device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, self.known, self._known_rows]

    def launch(self) -> None:
        fused, exit, layers = self.fused, self.exit, self.model.config.num_layers
        self._known_rows[: self.count].copy_(self.roots)  # before any kernel that may look it up without waiting
        stream = self._enter()
        if exit is None:  # nobody will recall anything, or judge
            stream = fused.run(range(layers - 1), stream, stream, self.nodes)
            last, spec = self.model.layers[-1], self.model.config.layers[-1]
            fused.store(last, spec, layers - 1, stream, self.nodes, None)  # all that is left of them
            return
        stream = fused.run(range(exit.layer), stream, stream, self.nodes)
        known = self._take("known", self.known.shape[1], self.count + self.rows)
        known[: self.count].zero_()
        own = FusedExit(fused, exit)
        own.know(stream, own.own(self.rows), self.nodes, known[self.count :])
        if exit.block is not None:
            own.fill(stream.states, Past(known, self._known_rows), self.nodes)
        self.known.copy_(known[self.count :].index_select(0, self.lasts))
        rows, hidden = self.ends.flatten().clamp(min=0), self.model.config.hidden_size
        before = known.index_select(0, self._known_rows.index_select(0, rows))
        reads = known[self.count :, :hidden].index_select(0, rows)
        torch.cat((stream.states.index_select(0, rows), before, reads), dim=1, out=self.judged.flatten(0, 1))
