"""Training text as tensors: documents packed into rows of one length, and the model's hidden states on them.

A document is a prompt and the text that the model wrote after it. Documents share a row, and each attends only to
itself. `writing` makes documents, `training` trains exits on them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F

from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import FEATURE_STATES, half_way, position_features


@dataclass(frozen=True)
class Document:
    """Tokens of a prompt and its continuation. The model chose the tokens from index `written` on, except `forced`."""

    tokens: list[int]
    written: int
    domain: int = 0
    forced: range = range(0)  # indices of tokens that a chat template put between an invented turn and its answer


@dataclass
class Corpus:
    """Documents packed into R rows of T tokens."""

    tokens: torch.Tensor  # [R, T] int64
    documents: torch.Tensor  # [R, T] int64: number of the document in its row, from 1; 0 is padding
    positions: torch.Tensor  # [R, T] int64: position within the document
    predicts: torch.Tensor  # [R, T] bool: the model chose the next token
    domains: torch.Tensor  # [R, T] int64: number of the domain

    @classmethod
    def empty(cls, rows: int, length: int) -> Corpus:
        dtypes = [torch.bool if field.name == "predicts" else torch.int64 for field in fields(cls)]
        return cls(*(torch.zeros(rows, length, dtype=dtype) for dtype in dtypes))

    @classmethod
    def join(cls, parts: list[Corpus]) -> Corpus:
        return cls(*(torch.cat(tensors) for tensors in zip(*(vars(part).values() for part in parts), strict=True)))

    @classmethod
    def pack(cls, documents: list[Document], length: int, seed: int = 0, open_rows: int = 16) -> Corpus:
        """Puts each document, in random order, into the first of the last `open_rows` rows that has space for it, or
        into another row. Cuts documents longer than a row."""
        rows: list[list[Document]] = []
        space: list[int] = []  # tokens left in each row
        for document in random.Random(seed).sample(documents, len(documents)):
            size = min(len(document.tokens), length)
            recent = range(max(0, len(rows) - open_rows), len(rows))
            row = next((index for index in recent if space[index] >= size), None)
            if row is None:
                row = len(rows)
                rows.append([])
                space.append(length)
            rows[row].append(document)
            space[row] -= size
        return cls._of_rows(rows, length)

    @classmethod
    def one_per_row(cls, documents: list[Document]) -> Corpus:
        """Each document alone in its row, padded to the longest."""
        longest = max(len(document.tokens) for document in documents)
        return cls._of_rows([[document] for document in documents], longest)

    @classmethod
    def _of_rows(cls, rows: list[list[Document]], length: int) -> Corpus:
        corpus = cls.empty(len(rows), length)
        for index, documents in enumerate(rows):
            corpus._fill(index, documents)
        return corpus

    def _fill(self, row: int, documents: list[Document]) -> None:
        start = 0
        for number, document in enumerate(documents, start=1):
            tokens = document.tokens[: self.length - start]
            stop = start + len(tokens)
            self.tokens[row, start:stop] = torch.tensor(tokens)
            self.documents[row, start:stop] = number
            self.positions[row, start:stop] = torch.arange(len(tokens))
            self.predicts[row, start + document.written - 1 : stop - 1] = True
            if document.forced:
                self.predicts[row, start + document.forced.start - 1 : start + document.forced.stop - 1] = False
            self.domains[row, start:stop] = document.domain
            start = stop

    def small(self) -> dict[str, torch.Tensor]:
        """The tensors in the smallest integer types that hold them, to be written to disk."""
        return {n: tensor.to(torch.uint8 if n == "predicts" else torch.int32) for n, tensor in vars(self).items()}

    @classmethod
    def from_small(cls, tensors: dict[str, torch.Tensor]) -> Corpus:
        return cls(**{n: tensor.bool() if n == "predicts" else tensor.long() for n, tensor in tensors.items()})

    def __len__(self) -> int:
        """Number of rows."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """Tokens of a row, padding included."""
        return self.tokens.shape[1]

    @property
    def size(self) -> int:
        """Tokens without padding."""
        return int((self.documents > 0).sum())

    def rows(self, rows: torch.Tensor | slice) -> Corpus:
        return Corpus(*(tensor[rows] for tensor in vars(self).values()))

    def to(self, device: torch.device) -> Corpus:
        return Corpus(*(tensor.to(device) for tensor in vars(self).values()))


def packed_mask(documents: torch.Tensor, window: int | None) -> torch.Tensor:
    """[B, T, T] bool: causal attention within each document, given the document numbers [B, T]."""
    slots = torch.arange(documents.shape[1], device=documents.device)
    back = slots[:, None] - slots
    mask = (documents[:, :, None] == documents[:, None, :]) & (back >= 0)
    return mask if window is None else mask & (back < window)


def scaled_attention(
    q: torch.Tensor,  # [B, M, Hq, D]
    k: torch.Tensor,  # [B, S, Hkv, D]
    v: torch.Tensor,  # [B, S, Hkv, D]
    mask: torch.Tensor,  # [B, M, S] bool
    scale: float,
) -> torch.Tensor:  # [B, M, Hq, D]
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask[:, None], scale=scale).transpose(1, 2)


def hidden_states(model: Decoder, batch: Corpus) -> Iterator[torch.Tensor]:
    """Yields the states [B, T, hidden] before the first layer and after each layer; computes only those asked for."""
    hidden = model.embed(batch.tokens)
    yield hidden
    rotations, scale = model.rotations(batch.positions), model.config.attention_scale
    windows = {spec.window for spec in model.config.layers}
    masks = {window: packed_mask(batch.documents, window) for window in windows}
    for layer, spec in zip(model.layers, model.config.layers, strict=True):
        attend = partial(scaled_attention, mask=masks[spec.window], scale=scale)
        hidden = model.run_layer(layer, spec, hidden, rotations, attend)
        yield hidden


@torch.no_grad()
def text_features(
    model: Decoder, corpus: Corpus, rows: int, keep_on: torch.device, progress: Callable[[int], None] = lambda _: None
) -> torch.Tensor:
    """The states that exits read one position later and are trained to predict, [R, T, 2 * hidden]: see
    `position_features`. Passes `rows` rows at a time through the model; keeps the states on `keep_on`."""
    size = FEATURE_STATES * model.config.hidden_size
    pinned = keep_on.type == "cpu" and model.device.type == "cuda"
    kept = torch.empty(*corpus.tokens.shape, size, dtype=model.dtype, device=keep_on, pin_memory=pinned)
    for start in range(0, len(corpus), rows):
        batch = corpus.rows(slice(start, start + rows)).to(model.device)
        states = hidden_states(model, batch)
        middle = deque(islice(states, half_way(model) + 1), maxlen=1).pop()
        last = deque(states, maxlen=1).pop()
        kept[start : start + rows].copy_(position_features(model, middle, last))
        progress(len(batch))
    return kept
