"""The device's side of a batch: one slot for each sequence, with its length, pages, newest token and parameters.

Captured steps read and write the first 1, 2, 4, ... slots of a table, so that few sizes are captured. The host writes a
slot when a sequence joins or leaves; every write is ordered on the stream after the steps launched before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from selfspec.sampling import MAX_STOPS, SamplingParams

IDLE, PLAIN, DRAFTING = 0, 1, 2  # values of `active`: no sequence, one that accepts no draft, one that does

_MOST = 2**31 - 1  # that a slot's integers hold

_INTS = ("lengths", "pending", "sample_indices", "active", "bases", "unfilled", "top_k", "min_length")
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_FIELDS = (*_INTS, *_FLOATS)
_OFF = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}


@dataclass(frozen=True)
class Slots:
    """The first `count` slots of a table."""

    count: int
    table: SlotTable
    seeds: torch.Tensor  # [B] int64
    page_table: torch.Tensor  # [B, P] int32
    stops: torch.Tensor  # [B, MAX_STOPS] int32, -1 where there is none
    lengths: torch.Tensor  # [B] int32, as are all others but the floats: committed positions
    pending: torch.Tensor  # the newest token, whose KV is not written yet
    sample_indices: torch.Tensor
    active: torch.Tensor  # IDLE, PLAIN or DRAFTING
    bases: torch.Tensor  # lengths before the newest step
    unfilled: torch.Tensor  # newest positions that the exit's cache lacks
    top_k: torch.Tensor  # below 1: off
    min_length: torch.Tensor  # stop tokens are banned at positions below it
    temperature: torch.Tensor  # float32; 0: greedy
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


class SlotTable:
    """All slots of a batch."""

    def __init__(self, capacity: int, pages: int, vocabulary: int, device: torch.device, idle_page: int) -> None:
        self.capacity, self.vocabulary, self.device, self.idle_page = capacity, vocabulary, device, idle_page
        width = -(-capacity // 4) * 4  # every field begins at a multiple of 16 bytes: one compiled kernel for all sizes
        self._words = torch.zeros(len(_FIELDS), width, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(width, dtype=torch.int64, device=device)
        self.page_table = torch.full((capacity, pages), idle_page, dtype=torch.int32, device=device)
        self.stops = torch.full((capacity, MAX_STOPS), -1, dtype=torch.int32, device=device)
        self._bias: torch.Tensor | None = None  # [capacity, V] float32, once a sequence needs it
        self._counts: torch.Tensor | None = None  # [capacity, V] int32
        self._biased: set[int] = set()  # slots whose bias is not all 0
        self._views: dict[int, Slots] = {}

    def first(self, count: int) -> Slots:
        """A view of the first `count` slots."""
        if count not in self._views:
            fields = {}
            for index, name in enumerate(_FIELDS):
                words = self._words[index, :count]
                fields[name] = words.view(torch.float32) if name in _FLOATS else words
            own = self.seeds[:count], self.page_table[:count], self.stops[:count]
            self._views[count] = Slots(count, self, *own, **fields)
        return self._views[count]

    @property
    def counts(self) -> torch.Tensor:
        """[capacity, V]: bit 0 if the token occurs in the prompt, the rest how often it was generated."""
        if self._counts is None:
            self._counts = torch.zeros(self.capacity, self.vocabulary, dtype=torch.int32, device=self.device)
        return self._counts

    @property
    def bias(self) -> torch.Tensor:
        """[capacity, V]: added to the logits; -inf bans a token."""
        if self._bias is None:
            self._bias = torch.zeros(self.capacity, self.vocabulary, dtype=torch.float32, device=self.device)
        return self._bias

    def write(self, slots: Seq[int], states: Seq[SlotState | None], seeds: Seq[int], pages: Seq[Seq[int]]) -> None:
        """Writes some slots at once: those of sequences that join, and with None those that are left idle."""
        count, fields = len(slots), len(_FIELDS)
        packed = np.zeros((count, fields + MAX_STOPS), dtype=np.int32)  # one copy to the device for all of it
        for place, state in enumerate(states):
            self._fill(packed[place, :fields], packed[place, fields:], state)
        keys = self._to_device(torch.tensor([slots, seeds]))
        of_slots, at = self._to_device(torch.from_numpy(packed)), keys[0]
        self._words.index_copy_(1, at, of_slots[:, :fields].T)
        self.stops.index_copy_(0, at, of_slots[:, fields:])
        self.seeds.index_copy_(0, at, keys[1])
        self._copy_pages(at, pages)

    @staticmethod
    def _fill(words: np.ndarray, stops: np.ndarray, state: SlotState | None) -> None:
        stops[:] = -1
        values = _OFF if state is None else vars(state)
        words[: len(_INTS)] = [values.get(name, 0) for name in _INTS]
        words[len(_INTS) :].view(np.float32)[:] = [values[name] for name in _FLOATS]
        if state is not None:
            stops[: len(state.stops)] = state.stops

    def write_pages(self, slots: Seq[int], pages: Seq[Seq[int]]) -> None:
        """Sequences in these slots have taken pages."""
        self._copy_pages(self._to_device(torch.tensor(slots)), pages)

    def _copy_pages(self, at: torch.Tensor, pages: Seq[Seq[int]]) -> None:
        """Writes rows of the page table, as wide as the longest of them; what is behind is never read."""
        width = max(map(len, pages))
        rows = np.zeros((len(pages), width), dtype=np.int32)
        for row, of_slot in zip(rows, pages, strict=True):
            row[: len(of_slot)], row[len(of_slot) :] = of_slot, of_slot[0]
        self.page_table[:, :width].index_copy_(0, at, self._to_device(torch.from_numpy(rows)))

    def write_processing(self, slot: int, state: ProcessingState) -> None:
        """Bias and token counts of a slot whose sequence processes logits."""
        bias, counts = self.bias[slot], self.counts[slot]
        self._biased.add(slot)
        bias.fill_(-torch.inf if state.allowed is not None else 0.0)
        for ids, value in ((state.allowed or (), 0.0), (state.banned, -torch.inf)):
            known = [token for token in ids if token < self.vocabulary]  # as on the host, others mean nothing
            if known:
                bias[self._to_device(torch.tensor(known))] = value
        if state.bias:
            tokens, values = torch.tensor([token for token, _ in state.bias]), [value for _, value in state.bias]
            bias[self._to_device(tokens)] += self._to_device(torch.tensor(values, dtype=torch.float32))
        counts.zero_()
        prompt, generated = (self._to_device(torch.tensor(of, dtype=torch.int64)) for of in state.text)
        counts.index_fill_(0, prompt, 1)
        counts.index_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))

    def clear_processing(self, slot: int) -> None:
        """The next sequence of a slot processes no logits: its penalties are off, so its counts do not matter."""
        if slot in self._biased:
            self._biased.remove(slot)
            self.bias[slot].zero_()

    def write_drafting(self, slots: Seq[int], drafts: Seq[bool]) -> None:
        """Whether the sequences in these slots accept drafts."""
        values = torch.tensor([DRAFTING if of else PLAIN for of in drafts], dtype=torch.int32)
        row = self._words[_FIELDS.index("active")]
        row.index_copy_(0, self._to_device(torch.tensor(slots)), self._to_device(values))

    def move(self, sources: Seq[int], targets: Seq[int], *others: torch.Tensor) -> None:
        """Copies slots to others, which are idle, with the same rows of `others`; the sources become idle."""
        self._biased.update(target for source, target in zip(sources, targets, strict=True) if source in self._biased)
        of, to = (self._to_device(torch.tensor(places)) for places in (sources, targets))
        rows = [self.seeds, self.stops, self.page_table, *others]
        rows += [tensor for tensor in (self._bias, self._counts) if tensor is not None]
        for tensor in rows:
            tensor.index_copy_(0, to, tensor.index_select(0, of))
        self._words.index_copy_(1, to, self._words.index_select(1, of))
        self._words[_FIELDS.index("active")].index_fill_(0, of, IDLE)
        self._words[_FIELDS.index("lengths")].index_fill_(0, of, 0)
        self._words[_FIELDS.index("unfilled")].index_fill_(0, of, 0)
        self.page_table.index_fill_(0, of, self.idle_page)

    @property
    def changing(self) -> list[torch.Tensor]:
        """What steps change, or `idle`."""
        return [self._words, self.page_table]

    def idle(self) -> None:
        """All slots idle: what runs writes to a page that belongs to no sequence."""
        for name in ("active", "lengths", "unfilled"):
            self._words[_FIELDS.index(name)].zero_()
        self.page_table.fill_(self.idle_page)

    @property
    def tensors(self) -> list[torch.Tensor]:
        optional = [tensor for tensor in (self._bias, self._counts) if tensor is not None]
        return [self._words, self.seeds, self.page_table, self.stops, *optional]

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return to_device(host, self.device)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; the host does not wait for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@dataclass(frozen=True)
class SlotState:
    """What a slot holds of a sequence that joins; fields as in `Slots`."""

    lengths: int
    pending: int
    sample_indices: int
    active: int
    top_k: int
    min_length: int
    temperature: float
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    stops: tuple[int, ...]

    @classmethod
    def of(
        cls, params: SamplingParams, length: int, pending: int, sample_index: int, prompt: int, drafts: bool,
        processed: bool,
    ) -> SlotState:  # fmt: skip
        """`prompt` counts the prompt's tokens; not `processed`: the host processes the logits."""
        shortest = max(params.min_length, prompt + params.min_new_tokens if params.min_new_tokens else 0)
        return cls(
            lengths=length,
            pending=pending,
            sample_indices=sample_index,
            active=DRAFTING if drafts else PLAIN,
            top_k=min(params.top_k, _MOST) if params.do_sample else 0,
            min_length=min(shortest, _MOST) if processed else 0,
            temperature=params.temperature if params.do_sample else 0.0,
            top_p=params.top_p if params.do_sample else 1.0,
            min_p=params.min_p if params.do_sample else 0.0,
            repetition=params.repetition_penalty if processed else 1.0,
            presence=params.presence_penalty if processed else 0.0,
            frequency=params.frequency_penalty if processed else 0.0,
            stops=tuple(token for token in params.stop_token_ids if 0 <= token <= _MOST)[:MAX_STOPS],
        )


@dataclass(frozen=True)
class ProcessingState:
    """What bias and counts of a slot are made from."""

    bias: tuple[tuple[int, float], ...]
    banned: tuple[int, ...]
    allowed: tuple[int, ...] | None
    text: tuple[list[int], list[int]]  # the prompt's tokens, and those generated so far


@dataclass(frozen=True)
class Features:
    """What some sequence of a batch asks of the choice: decides which kernels a captured step has, never a row's
    bits."""

    samples: bool = False
    cuts: bool = False  # some sequence has a top-k, top-p or min-p
    few: bool = True  # every one that has one keeps at most 64 tokens by its top-k
    processes: bool = False

    @classmethod
    def of(cls, every: Seq[SamplingParams]) -> Features:
        """One of four, so that few steps are captured: greedy, greedy and processed, sampling with a top-k up to 64 or
        without cuts, and everything."""
        sampling = [params for params in every if params.do_sample]
        processes = any(params.changes_logits for params in every)
        cut = [params for params in sampling if params.top_k or params.top_p < 1 or params.min_p > 0]
        few = all(1 <= params.top_k <= 64 for params in cut)
        if not sampling:
            return cls(processes=processes)
        return cls(samples=True, cuts=True, few=few and not processes, processes=processes or not few)
