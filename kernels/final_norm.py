"""Final RMSNorm; also stores the state that the exit reads at the next position.

A plain step's launch also keeps the states of its position that the exit's cache lacks, so that not drafting costs no
further launch; `backends/cuda/exit_scoring.py` fills the cache from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.norm import block_width, check_weight, normalise_reference, power_of_two, row_factor, tiles
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, tl, use_pdl


def places_for(sequences: int) -> int:
    """How many positions of each of so many sequences can wait: as long as rows are few, twice as many are caught up in
    about the same time; otherwise no more than are worth looking at."""
    return max(16, min(32, 64 // sequences))


@dataclass(frozen=True)
class Waiting:
    """Of each of B sequences its newest positions, which an exit's cache does not have yet: row = place * B + sequence,
    the oldest place first."""

    counts: torch.Tensor  # [B] int32: how many there are
    hidden: torch.Tensor  # [places * B, hidden]: the states that the exit takes
    previous: torch.Tensor  # [places * B, 2 * hidden]: what was known one position before

    @classmethod
    def empty(cls, counts: torch.Tensor, hidden: int, dtype: torch.dtype) -> Waiting:
        rows = places_for(len(counts)) * len(counts)
        states, previous = (torch.zeros(rows, n * hidden, dtype=dtype, device=counts.device) for n in (1, 2))
        return cls(counts, states, previous)

    @property
    def places(self) -> int:
        """How many positions of a sequence there is room for."""
        return len(self.hidden) // len(self.counts)


def know_reference(
    last: torch.Tensor,  # [R, hidden]
    weight: torch.Tensor,  # [hidden]
    eps: float,
    offset: float,
    middle: torch.Tensor | None = None,  # [R, hidden]
) -> torch.Tensor:
    """[R, hidden], or with a middle layer's states [R, 2 * hidden]."""
    read = normalise_reference(last, weight, eps, offset)
    if middle is None:
        return read
    return torch.cat((read, normalise_reference(middle, None, torch.finfo(middle.dtype).eps, 0.0)), dim=1)


@jit(do_not_specialize=["sequences"])
def _know(
    last, weight, middle, known, hidden, counts, waiting_hidden, waiting_previous,
    last_stride, middle_stride, known_stride, hidden_stride, sequences,
    K: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    MIDDLE_EPS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each row."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCKS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = columns < K
    scale = OFFSET + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    # Everything is asked for before anything is waited for: what was known before goes where this is written.
    values = tl.load(last + row * last_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if middle is not None:
        middle_values = tl.load(middle + row * middle_stride + columns, mask=inside, other=0.0).to(tl.float32)
    at = known + row * known_stride + columns
    if counts is not None:  # puts aside the exit's states of the row, and what was known before it, where it is free
        count = tl.minimum(tl.load(counts + row), MOST - 1)
        states = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0)
        place = (count * sequences + row).to(tl.int64)
        if middle is not None:
            before = tl.load(at, mask=inside, other=0.0)
            middle_before = tl.load(at + K, mask=inside, other=0.0)
            to = waiting_previous + place * 2 * K + columns
            tl.store(to, before, mask=inside)
            tl.store(to + K, middle_before, mask=inside)
        tl.store(waiting_hidden + place * K + columns, states, mask=inside)
        tl.debug_barrier()  # who stores next may be another thread
        tl.store(counts + row, count + 1)
    values = values * row_factor(values, K, BLOCKS, WIDTH, EPS) * scale
    tl.store(at, values.to(known.dtype.element_ty), mask=inside)
    if middle is not None:
        middle_values = middle_values * row_factor(middle_values, K, BLOCKS, WIDTH, MIDDLE_EPS)
        tl.store(at + K, middle_values.to(known.dtype.element_ty), mask=inside)


def know(
    last: torch.Tensor,  # [R, hidden]: the states that the model's last norm reads
    weight: torch.Tensor,
    eps: float,
    offset: float,
    known: torch.Tensor,  # to fill: [R, hidden], or with a middle layer's states [R, 2 * hidden]
    middle: torch.Tensor | None = None,  # [R, hidden]
    *,
    hidden: torch.Tensor | None = None,  # [B, hidden]: the exit's states of the rows, which are B sequences' newest
    waiting: Waiting | None = None,  # where they are put aside, with what `known` held before, and counted
) -> None:
    rows, width = last.shape
    check_weight(weight, width)
    if known.shape != (rows, width if middle is None else 2 * width) or known.stride(1) != 1:
        raise ValueError(f"known must have {rows} contiguous rows of what is known, got {tuple(known.shape)}")
    if (hidden is None) != (waiting is None) or (waiting is not None and len(waiting.counts) != rows):
        raise ValueError("rows that wait are one for each sequence, with the exit's states of them")
    pdl = use_pdl(last)
    aside = (None,) * 4 if waiting is None else (hidden, waiting.counts, waiting.hidden, waiting.previous)
    _know[(rows,)](
        last, weight, middle, known, *aside,
        last.stride(0), 0 if middle is None else middle.stride(0), known.stride(0),
        0 if hidden is None else hidden.stride(0), rows,
        K=width, BLOCKS=power_of_two(tiles(width)), WIDTH=block_width(width), EPS=eps, OFFSET=offset,
        MIDDLE_EPS=torch.finfo(last.dtype).eps, MOST=1 if waiting is None else waiting.places, PDL=pdl,
        num_warps=4, enable_fp_fusion=False,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
