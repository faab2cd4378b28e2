"""Final RMSNorm; also writes the feature that the exit reads at the next position.

Reads the last layer's states [R, hidden] and writes their norm to out[:, :hidden], which the LM head reads. With the
states of a middle layer, writes their norm without weights to out[:, hidden:]: both halves together are the position's
*feature*, which an exit block reads at the next position. In a plain step the same launch also saves the exit's
input and the feature of the previous position to `SlotUnfilled`, so that not drafting costs no further launch;
`backends/cuda/exit_scoring.py` later fills the exit block's KV from them.

One program per row; sums of squares are balanced trees over fixed blocks (`norm.rms_factor`), with the bits of
`norm.rms_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.norm import check_weight, columns_per_square, rms_factor, rms_norm_reference, squares_per_row
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton


def unfilled_capacity(sequences: int) -> int:
    """Positions per sequence that can be saved before the exit's KV must be filled.

    At least 16; up to 32 while all sequences together have at most 64 rows, as a pass over 64 rows takes about as long
    as one over 16.
    """
    return max(16, min(32, 64 // sequences))


@dataclass(frozen=True)
class SlotUnfilled:
    """Exit inputs at the newest positions of B sequences whose exit KV is not filled: row = place * B + sequence, the
    oldest position at place 0."""

    counts: torch.Tensor  # [B] int32: saved positions
    hidden: torch.Tensor  # [capacity * B, hidden]: the states that the exit reads
    previous: torch.Tensor  # [capacity * B, 2 * hidden]: the feature of the position before each

    @classmethod
    def empty(cls, counts: torch.Tensor, hidden: int, dtype: torch.dtype) -> SlotUnfilled:
        rows = unfilled_capacity(len(counts)) * len(counts)
        states, previous = (torch.zeros(rows, n * hidden, dtype=dtype, device=counts.device) for n in (1, 2))
        return cls(counts, states, previous)

    @property
    def capacity(self) -> int:
        """Positions per sequence that can be saved."""
        return len(self.hidden) // len(self.counts)


def final_norm_reference(
    last: torch.Tensor,  # [R, hidden]
    weight: torch.Tensor,  # [hidden]
    eps: float,
    offset: float,
    middle: torch.Tensor | None = None,  # [R, hidden]
) -> torch.Tensor:
    """[R, hidden], or with a middle layer's states [R, 2 * hidden]."""
    normed = rms_norm_reference(last, weight, eps, offset)
    if middle is None:
        return normed
    return torch.cat((normed, rms_norm_reference(middle, None, torch.finfo(middle.dtype).eps, 0.0)), dim=1)


@jit(do_not_specialize=["sequences"])
def _final_norm_kernel(
    last, weight, middle, out, hidden, counts, unfilled_hidden, unfilled_previous,
    last_stride, middle_stride, out_stride, hidden_stride, sequences,
    K: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    MIDDLE_EPS: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCKS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [BLOCKS, WIDTH]: one row
    inside = columns < K
    scale = OFFSET + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    # All loads come before the first store: `out` holds the previous position's feature, which is saved first.
    values = tl.load(last + row * last_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if middle is not None:
        middle_values = tl.load(middle + row * middle_stride + columns, mask=inside, other=0.0).to(tl.float32)
    at = out + row * out_stride + columns
    if counts is not None:
        count = tl.minimum(tl.load(counts + row), CAPACITY - 1)  # a full buffer overwrites its newest place
        states = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0)
        place = (count * sequences + row).to(tl.int64)
        if middle is not None:
            before = tl.load(at, mask=inside, other=0.0)
            middle_before = tl.load(at + K, mask=inside, other=0.0)
            to = unfilled_previous + place * 2 * K + columns
            tl.store(to, before, mask=inside)
            tl.store(to + K, middle_before, mask=inside)
        tl.store(unfilled_hidden + place * K + columns, states, mask=inside)
        tl.debug_barrier()  # all threads have read the count before one changes it
        tl.store(counts + row, count + 1)
    values = values * rms_factor(values, K, BLOCKS, WIDTH, EPS) * scale
    tl.store(at, values.to(out.dtype.element_ty), mask=inside)
    if middle is not None:
        middle_values = middle_values * rms_factor(middle_values, K, BLOCKS, WIDTH, MIDDLE_EPS)
        tl.store(at + K, middle_values.to(out.dtype.element_ty), mask=inside)


def final_norm(
    last: torch.Tensor,  # [R, hidden]: states after the last layer
    weight: torch.Tensor,  # [hidden]
    eps: float,
    offset: float,  # added to the weights
    out: torch.Tensor,  # [R, hidden], or with a middle layer's states [R, 2 * hidden]
    middle: torch.Tensor | None = None,  # [R, hidden]
    *,
    hidden: torch.Tensor | None = None,  # [B, hidden]: the exit's input at the rows, one row per sequence
    unfilled: SlotUnfilled | None = None,  # where `hidden` and the content of `out` are saved
) -> None:
    """Writes the norm of `last`, and of `middle` if given, to `out`; saves the exit's input if `unfilled` is given."""
    rows, width = last.shape
    check_weight(weight, width)
    if out.shape != (rows, width if middle is None else 2 * width) or out.stride(1) != 1:
        raise ValueError(
            f"out must have {rows} contiguous rows of {width if middle is None else 2 * width}, got {tuple(out.shape)}"
        )
    if (hidden is None) != (unfilled is None) or (unfilled is not None and len(unfilled.counts) != rows):
        raise ValueError("`hidden` and `unfilled` come together, with one row per sequence")
    saved = (None,) * 4 if unfilled is None else (hidden, unfilled.counts, unfilled.hidden, unfilled.previous)
    _final_norm_kernel[(rows,)](
        last, weight, middle, out, *saved,
        last.stride(0), 0 if middle is None else middle.stride(0), out.stride(0),
        0 if hidden is None else hidden.stride(0), rows,
        K=width, BLOCKS=triton.next_power_of_2(squares_per_row(width)), WIDTH=columns_per_square(width), EPS=eps,
        OFFSET=offset, MIDDLE_EPS=torch.finfo(last.dtype).eps, CAPACITY=1 if unfilled is None else unfilled.capacity,
        num_warps=4, enable_fp_fusion=False, **pdl_options(last),
    )  # fmt: skip
