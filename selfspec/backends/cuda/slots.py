"""The device side of a batch: one slot per sequence, with its length, pages, newest token and sampling parameters.

Captured steps read and write the first 1, 2, 4, ... slots, so that few sizes are captured. The host writes a slot when
a sequence joins or leaves; the device runs these writes after the steps that were launched before them. `placement.py`
gives sequences slots.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from selfspec.backends.cuda.exit import DraftHead, SlotExit, draft_head_capacity, feature_buffer, prompt_end_buffer
from selfspec.kernels.constants import PAGE_SIZE
from selfspec.kernels.final_norm import SlotUnfilled
from selfspec.models.decoder import Decoder
from selfspec.sampling import MAX_STOPS, SamplingParams
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_STEP_ROWS

IDLE, PLAIN, DRAFTING = 0, 1, 2  # values of `active`: no sequence; one that accepts no drafts; one that accepts them

_MAX_INT32 = 2**31 - 1

_INTS = ("lengths", "newest_tokens", "sample_indices", "active", "lengths_before", "unfilled", "top_k", "min_length")
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_FIELDS = (*_INTS, *_FLOATS)
_PAGES_AT = len(_FIELDS) + MAX_STOPS  # first column of the slot's pages in a row of `SlotWrite`
_ZERO_IN_IDLE_SLOTS = ("active", "lengths", "unfilled")
IDLE_VALUES: dict[str, Any] = {**dict.fromkeys(_FIELDS, 0), "top_p": 1.0, "repetition": 1.0, "stops": ()}


def bucket(count: int, least: int = 1) -> int:
    """Rounds a number of slots, rows or positions up to a power of two, at least `least`: the sizes that graphs are
    captured for."""
    return max(least, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class Slots:
    """Views of the first `count` slots of a batch: one tensor per field."""

    count: int
    store: SlotStore  # all slots of the batch
    seeds: torch.Tensor  # [B] int64
    page_table: torch.Tensor  # [B, P] int32
    texts: torch.Tensor  # [B, 64 * P] int32: tokens by position, written by `write_text` and then by steps
    stops: torch.Tensor  # [B, MAX_STOPS] int32, -1 where there is none
    lengths: torch.Tensor  # [B] int32, as all fields down to `min_length`: committed positions
    newest_tokens: torch.Tensor  # the newest token, whose KV is not written yet: the root of the next step
    sample_indices: torch.Tensor  # of each sequence among the samples of its prompt
    active: torch.Tensor  # IDLE, PLAIN or DRAFTING
    lengths_before: torch.Tensor  # committed positions before the newest step
    unfilled: torch.Tensor  # number of unfilled positions (see `exit_scoring.py`): the newest ones
    top_k: torch.Tensor  # below 1: off
    min_length: torch.Tensor  # stop tokens are banned at positions below it
    temperature: torch.Tensor  # [B] float32, as all fields after it; 0: greedy
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


class SlotWrite:
    """Values for `count` slots that are copied to the device as one int32 tensor, with views of its parts: a header
    with the slots' numbers and seeds, 64 bits each, then a row for each slot: fields, stop tokens, pages."""

    fields, stops, pages = slice(0, len(_FIELDS)), slice(len(_FIELDS), _PAGES_AT), slice(_PAGES_AT, None)  # of a row

    def __init__(self, count: int, pages: int, device: torch.device) -> None:
        self._count, self._header = count, 2 * 2 * count  # length of the header: two int64 per slot, in int32
        self.whole = torch.zeros(self._header + count * (_PAGES_AT + pages), dtype=torch.int32, device=device)
        rows = self.whole[self._header :].view(count, -1)
        self.slots, self.seeds = self.whole[: self._header].view(torch.int64).view(2, count)
        self.values, self.stop_rows, self.page_rows = rows[:, self.fields].T, rows[:, self.stops], rows[:, self.pages]

    def parts(self, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the header [2, count] and the rows as views of an array like `whole`."""
        header, rows = whole[: self._header], whole[self._header :]
        return header.view(np.int64).reshape(2, self._count), rows.reshape(self._count, -1)


class SlotStore:
    """All slots of a batch, and the host's writes to them."""

    def __init__(self, capacity: int, pages: int, vocabulary: int, device: torch.device, idle_page: int) -> None:
        self.capacity, self.vocabulary, self.device, self.idle_page = capacity, vocabulary, device, idle_page
        width = -(-capacity // 4) * 4  # fields begin at multiples of 16 bytes: one compiled kernel for all capacities
        self._fields = torch.zeros(len(_FIELDS), width, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(width, dtype=torch.int64, device=device)
        self.page_table = torch.full((capacity, pages), idle_page, dtype=torch.int32, device=device)
        self.texts = torch.zeros(capacity, pages * PAGE_SIZE, dtype=torch.int32, device=device)
        self.stops = torch.full((capacity, MAX_STOPS), -1, dtype=torch.int32, device=device)
        self._bias: torch.Tensor | None = None  # [capacity, V] float32, allocated on first use
        self._counts: torch.Tensor | None = None  # [capacity, V] int32, allocated on first use
        self._biased: set[int] = set()  # slots whose bias may differ from 0
        self._views: dict[int, Slots] = {}
        self._writes: dict[int, SlotWrite] = {}  # by number of slots that are written

    def first(self, count: int) -> Slots:
        """Returns views of the first `count` slots: the same object for the same count."""
        if count not in self._views:
            fields = {}
            for index, name in enumerate(_FIELDS):
                values = self._fields[index, :count]
                fields[name] = values.view(torch.float32) if name in _FLOATS else values
            own = self.seeds[:count], self.page_table[:count], self.texts[:count], self.stops[:count]
            self._views[count] = Slots(count, self, *own, **fields)
        return self._views[count]

    @property
    def counts(self) -> torch.Tensor:
        """[capacity, V] int32: bit 0 is set if the token occurs in the prompt; the other bits are the number of times
        it was generated."""
        if self._counts is None:
            self._counts = torch.zeros(self.capacity, self.vocabulary, dtype=torch.int32, device=self.device)
        return self._counts

    @property
    def bias(self) -> torch.Tensor:
        """[capacity, V] float32: added to the logits; -inf bans the token."""
        if self._bias is None:
            self._bias = torch.zeros(self.capacity, self.vocabulary, dtype=torch.float32, device=self.device)
        return self._bias

    def write(
        self, slots: Seq[int], values: Seq[dict[str, Any]], seeds: Seq[int], pages: Seq[Seq[int]]
    ) -> torch.Tensor:
        """Writes several slots with one copy to the device; `values`: of each slot, `slot_values` of its sequence or
        IDLE_VALUES. Returns the slots' numbers [count] on the device, valid until the next call."""
        written = self._slot_write(len(slots))
        host = host_tensor(written.whole, self.device)
        header, rows = written.parts(host.numpy())
        header[0], header[1] = slots, seeds
        rows[:, written.pages] = self.idle_page
        for row, of_slot, slot_pages in zip(rows, values, pages, strict=True):
            self._pack(row[written.fields], row[written.stops], of_slot)
            row[written.pages][: len(slot_pages)] = slot_pages
        written.whole.copy_(host, non_blocking=True)
        self._fields.index_copy_(1, written.slots, written.values)
        self.stops.index_copy_(0, written.slots, written.stop_rows)
        self.seeds.index_copy_(0, written.slots, written.seeds)
        self.page_table.index_copy_(0, written.slots, written.page_rows)
        return written.slots

    def _slot_write(self, count: int) -> SlotWrite:
        if count not in self._writes:
            self._writes[count] = SlotWrite(count, self.page_table.shape[1], self.device)
        return self._writes[count]

    @staticmethod
    def _pack(fields: np.ndarray, stops: np.ndarray, values: dict[str, Any]) -> None:
        """Writes the fields and stop tokens of a slot to a host row. Float fields keep their bits in the int32 row."""
        fields[: len(_INTS)] = [values[name] for name in _INTS]
        fields[len(_INTS) :].view(np.float32)[:] = [values[name] for name in _FLOATS]
        stops[:] = -1
        stops[: len(values["stops"])] = values["stops"]

    def write_pages(self, slots: Seq[int], pages: Seq[Seq[int]]) -> None:
        """Writes the page tables of slots whose sequences have taken pages."""
        rows = torch.from_numpy(_rectangle(pages))
        at = self._to_device(torch.tensor(slots))
        self.page_table[:, : rows.shape[1]].index_copy_(0, at, self._to_device(rows))

    def write_processing(self, slot: int, params: SamplingParams, prompt: Seq[int], generated: Seq[int]) -> None:
        """Writes the bias and token counts of a slot whose sequence processes logits. `prompt`, `generated`: the tokens
        of its prompt, and those after it."""
        bias, counts = self.bias[slot], self.counts[slot]
        self._biased.add(slot)
        allowed = params.allowed_array
        bias.fill_(0.0 if allowed is None else -torch.inf)
        if allowed is not None:
            bias[self._to_device(torch.from_numpy(allowed))] = 0.0
        banned = [token for token in params.banned_token_ids if token < self.vocabulary]  # others have no effect
        if banned:
            bias[self._to_device(torch.tensor(banned))] = -torch.inf
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias, strict=True)
            bias[self._to_device(torch.tensor(tokens))] += self._to_device(torch.tensor(values, dtype=torch.float32))
        counts.zero_()
        given, new = (self._to_device(torch.tensor(part, dtype=torch.int64)) for part in (prompt, generated))
        counts.index_fill_(0, given, 1)
        counts.index_add_(0, new, torch.full_like(new, 2, dtype=torch.int32))

    def clear_processing(self, slot: int) -> None:
        """Zeroes the bias of a slot whose sequence processes no logits. Leaves the counts, which change nothing without
        penalties."""
        if slot in self._biased:
            self._biased.remove(slot)
            self.bias[slot].zero_()

    def write_text(self, slot: int, tokens: Seq[int]) -> None:
        """Writes the tokens so far of a slot's text. Steps, also one in flight, write the tokens that they emit."""
        self.texts[slot, : len(tokens)].copy_(self._to_device(torch.tensor(tokens, dtype=torch.int32)))

    def write_drafting(self, slots: Seq[int], drafts: Seq[bool]) -> None:
        """Writes whether the sequences in these slots accept drafts."""
        values = torch.tensor([DRAFTING if accepts else PLAIN for accepts in drafts], dtype=torch.int32)
        row = self._fields[_FIELDS.index("active")]
        row.index_copy_(0, self._to_device(torch.tensor(slots)), self._to_device(values))

    def move(self, sources: Seq[int], targets: Seq[int], *others: torch.Tensor) -> None:
        """Moves the values of slots to idle slots, and rows of `others` likewise; the source slots become idle."""
        self._biased.update(target for source, target in zip(sources, targets, strict=True) if source in self._biased)
        source, target = (self._to_device(torch.tensor(numbers)) for numbers in (sources, targets))
        rows = [self.seeds, self.stops, self.page_table, self.texts, *others]
        rows += [tensor for tensor in (self._bias, self._counts) if tensor is not None]
        for tensor in rows:
            tensor.index_copy_(0, target, tensor.index_select(0, source))
        self._fields.index_copy_(1, target, self._fields.index_select(1, source))
        for name in _ZERO_IN_IDLE_SLOTS:
            self._fields[_FIELDS.index(name)].index_fill_(0, source, 0)
        self.page_table.index_fill_(0, source, self.idle_page)

    @property
    def changing(self) -> list[torch.Tensor]:
        """Tensors that `idle`, or a step of idle slots, changes."""
        return [self._fields, self.page_table]

    def idle(self) -> None:
        """Makes all slots idle: steps then write KV to the idle page, which belongs to no sequence."""
        for name in _ZERO_IN_IDLE_SLOTS:
            self._fields[_FIELDS.index(name)].zero_()
        self.page_table.fill_(self.idle_page)

    @property
    def tensors(self) -> list[torch.Tensor]:
        optional = [tensor for tensor in (self._bias, self._counts) if tensor is not None]
        written = [write.whole for write in list(self._writes.values())]
        return [self._fields, self.seeds, self.page_table, self.texts, self.stops, *optional, *written]

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return to_device(host, self.device)


def _rectangle(pages: Seq[Seq[int]]) -> np.ndarray:
    """Returns rows of a page table, all as wide as the longest; entries past a row's pages are never read."""
    width = max(map(len, pages))
    return np.array([[*row, *[row[0]] * (width - len(row))] for row in pages], dtype=np.int32)


def host_tensor(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns an uninitialised host tensor of this shape and dtype, pinned for a GPU so that copies do not wait."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=device.type == "cuda")


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to the device without waiting for the copy."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def slot_values(sequence: Sequence) -> dict[str, Any]:
    """Returns the values of the slot of a sequence that joins, by the fields of `Slots`; stop tokens unpadded."""
    params, processed = sequence.params, not sequence.request.processors  # whether the device processes its logits
    after_prompt = len(sequence.prompt) + params.min_new_tokens if params.min_new_tokens else 0
    shortest = max(params.min_length, after_prompt)
    return {
        "lengths": sequence.kv.length,
        "newest_tokens": sequence.tokens[-1],
        "sample_indices": sequence.sample_index,
        "active": DRAFTING if sequence.drafts else PLAIN,
        "lengths_before": 0,
        "unfilled": 0,
        "top_k": min(params.top_k, _MAX_INT32) if params.do_sample else 0,
        "min_length": min(shortest, _MAX_INT32) if processed else 0,
        "temperature": params.temperature if params.do_sample else 0.0,
        "top_p": params.top_p if params.do_sample else 1.0,
        "min_p": params.min_p if params.do_sample else 0.0,
        "repetition": params.repetition_penalty if processed else 1.0,
        "presence": params.presence_penalty if processed else 0.0,
        "frequency": params.frequency_penalty if processed else 0.0,
        "stops": [token for token in params.stop_token_ids if 0 <= token <= _MAX_INT32][:MAX_STOPS],
    }


@dataclass(frozen=True)
class StepOptions:
    """The optional parts that a captured step has. A step needs those that some sequence of its batch needs; each one
    costs time, and changes no result of the other sequences."""

    samples: bool = False  # adds noise; applies top-k, top-p and min-p
    # Applies penalties, bias, allowed or banned tokens, minimum length. A sampling step with it truncates in any way
    # (four launches), without it only by a top-k up to 64 (one launch).
    processes: bool = False
    grammar_masks: bool = False  # applies masks of grammars, which the host computes between the parts of a step

    @classmethod
    def of(cls, batch: Seq[SamplingParams]) -> StepOptions:
        """Returns one of four combinations, so that few steps are captured: greedy; greedy with processing; sampling,
        truncated with a top-k up to 64 or not at all; sampling with any truncation and with processing."""
        sampling = [params for params in batch if params.do_sample]
        truncating = [params for params in sampling if params.top_k or params.top_p < 1 or params.min_p > 0]
        small_top_k = all(1 <= params.top_k <= 64 for params in truncating)
        return cls(bool(sampling), not small_top_k or any(params.changes_logits for params in batch))


class SlotBuffers:
    """All slots of a batch and the exit's buffers for them. Captured graphs hold their addresses."""

    def __init__(self, number: int, model: Decoder, capacity: int, pages: int, idle_page: int) -> None:
        self.number, self.model = number, model  # the number is part of the keys of graphs that use these buffers
        self.slots = SlotStore(capacity, pages, model.config.vocab_size, model.device, idle_page)
        self.features = feature_buffer(model, capacity + MAX_STEP_ROWS)  # see `SlotExit.features`
        self._unfilled: dict[int, SlotUnfilled] = {}  # by number of slots, as `_prompt_ends`
        self._prompt_ends: dict[int, torch.Tensor] = {}
        self._heads: dict[int, DraftHead] = {}  # by capacity

    def exit(self, exit: Exit, count: int) -> SlotExit:
        """Returns the exit with its buffers for the first `count` slots."""
        head = None if exit.head_rows is None else self._head(draft_head_capacity(exit, self.model))
        features = None if exit.block is None else self.features
        return SlotExit(exit, head, features, self.slots.capacity, self._unfilled_states(count))

    def _head(self, capacity: int) -> DraftHead:
        if capacity not in self._heads:
            self._heads[capacity] = DraftHead.empty(capacity, self.model.device)
        return self._heads[capacity]

    def _unfilled_states(self, count: int) -> SlotUnfilled:
        if count not in self._unfilled:
            slots, config = self.slots.first(count), self.model.config
            self._unfilled[count] = SlotUnfilled.empty(slots.unfilled, config.hidden_size, self.model.dtype)
        return self._unfilled[count]

    def prompt_end(self, count: int) -> torch.Tensor:
        """Returns the `prompt_end_buffer` of the first `count` slots, [PROMPT_END, count, 4 * hidden]."""
        if count not in self._prompt_ends:
            self._prompt_ends[count] = prompt_end_buffer(self.model, count)
        return self._prompt_ends[count]

    def save_and_idle(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Makes all slots idle. Returns the tensors that this and a step of idle slots change, each with a copy of its
        values before."""
        unfilled = [tensor for states in self._unfilled.values() for tensor in (states.hidden, states.previous)]
        changed = [*self.slots.changing, self.features[: self.slots.capacity], *unfilled]
        saved = [(tensor, tensor.clone()) for tensor in changed]
        self.slots.idle()
        return saved

    @property
    def tensors(self) -> list[torch.Tensor]:
        unfilled = [tensor for states in list(self._unfilled.values()) for tensor in (states.hidden, states.previous)]
        heads = [head.tokens for head in list(self._heads.values())]
        return [*self.slots.tensors, self.features, *unfilled, *list(self._prompt_ends.values()), *heads]
