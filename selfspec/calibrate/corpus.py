"""The training text as tensors: documents packed into rows of one length, and what the model's own head read there.

A document is a prompt and the text the model wrote after it. Several share a row, each seeing only itself. Where text
comes from is left to `writing`, what is learned from it to `training`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import islice

import torch
import torch.nn.functional as F

from selfspec.models.decoder import Attend, Decoder
from selfspec.speculation.exit import FEATURE_STATES, half_way, position_features


@dataclass(frozen=True)
class Document:
    """Tokens of a prompt and its continuation; those from `written` on are the model's own choice."""

    tokens: list[int]
    written: int
    domain: int = 0


@dataclass
class Corpus:
    """Documents packed into R rows of T tokens."""

    tokens: torch.Tensor  # [R, T] int64
    documents: torch.Tensor  # [R, T] int64: which document of the row; 0 is padding
    positions: torch.Tensor  # [R, T] int64: place within the document
    predicts: torch.Tensor  # [R, T] bool: the next token is the model's own choice
    domains: torch.Tensor  # [R, T] int64: the number of the domain

    @classmethod
    def empty(cls, rows: int, length: int) -> Corpus:
        kinds = [torch.bool if field.name == "predicts" else torch.int64 for field in fields(cls)]
        return cls(*(torch.zeros(rows, length, dtype=kind) for kind in kinds))

    @classmethod
    def join(cls, parts: list[Corpus]) -> Corpus:
        return cls(*(torch.cat(tensors) for tensors in zip(*(vars(part).values() for part in parts), strict=True)))

    @classmethod
    def pack(cls, documents: list[Document], length: int, seed: int = 0, open_rows: int = 16) -> Corpus:
        """Fills rows in random order, each document where it fits first; documents longer than a row are cut."""
        shuffled = random.Random(seed).sample(documents, len(documents))
        rows: list[list[Document]] = []
        room: list[int] = []
        for document in shuffled:
            size = min(len(document.tokens), length)
            recent = range(max(0, len(rows) - open_rows), len(rows))
            row = next((index for index in recent if room[index] >= size), None)
            if row is None:
                row = len(rows)
                rows.append([])
                room.append(length)
            rows[row].append(document)
            room[row] -= size
        corpus = cls.empty(len(rows), length)
        for index, row_documents in enumerate(rows):
            corpus._fill(index, row_documents)
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
            self.domains[row, start:stop] = document.domain
            start = stop

    def small(self) -> dict[str, torch.Tensor]:
        """For the disk."""
        return {n: tensor.to(torch.uint8 if n == "predicts" else torch.int32) for n, tensor in vars(self).items()}

    @classmethod
    def from_small(cls, tensors: dict[str, torch.Tensor]) -> Corpus:
        return cls(**{n: tensor.bool() if n == "predicts" else tensor.long() for n, tensor in tensors.items()})

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def rows(self, rows: torch.Tensor | slice) -> Corpus:
        return Corpus(*(tensor[rows] for tensor in vars(self).values()))

    def to(self, device: torch.device) -> Corpus:
        return Corpus(*(tensor.to(device) for tensor in vars(self).values()))


def attend_packed(documents: torch.Tensor, window: int | None, scale: float) -> Attend:
    """Causal attention within each document of the rows [B, T]."""
    back = _distances(torch.arange(documents.shape[1], device=documents.device))
    mask = (documents[:, :, None] == documents[:, None, :]) & (back >= 0)
    if window is not None:
        mask = mask & (back < window)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_attention(q, k, v, mask, scale)

    return attend


def _distances(slots: torch.Tensor) -> torch.Tensor:
    return slots[:, None] - slots


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
    """The states [B, T, hidden] before the first layer and after each, computed as far as they are asked for."""
    hidden = model.embed(batch.tokens)
    yield hidden
    rotations, scale = model.rotations(batch.positions), model.config.attention_scale
    windows = {spec.window for spec in model.config.layers}
    attends = {window: attend_packed(batch.documents, window, scale) for window in windows}
    for layer, spec in zip(model.layers, model.config.layers, strict=True):
        hidden = model.run_layer(layer, spec, hidden, rotations, attends[spec.window])
        yield hidden


@torch.no_grad()
def recalled_states(
    model: Decoder, corpus: Corpus, rows: int, keep_on: torch.device, progress: Callable[[int], None] = lambda _: None
) -> torch.Tensor:
    """What the model leaves to recall at every token, [R, T, 2 * hidden]: the teacher, computed once."""
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
