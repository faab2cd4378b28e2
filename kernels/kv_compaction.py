"""KV compaction: the accepted paths' keys and values move to consecutive slots in all layers, in one launch.

A program reads everything it moves before it writes, and no two programs touch the same columns. The state that the
exit reads at the next position moves along: that of the newest accepted node replaces the sequence's own.
"""

from __future__ import annotations

import torch

from selfspec.kernels.constants import PAGE_SIZE
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl


def compact_kv_reference(
    pages: torch.Tensor,  # [layers, pages, page size, Hkv, D]
    page_table: torch.Tensor,  # [B, P]
    bases: torch.Tensor,  # [B] lengths before
    counts: torch.Tensor,  # [B] how many nodes were accepted
    paths: torch.Tensor,  # [B, depth + 1]
) -> None:
    """Moves node `paths[b, i]` of every sequence to slot bases[b] + i, for i below counts[b]."""
    before = pages.clone()
    for sequence in range(len(bases)):
        base = int(bases[sequence])
        for place in range(int(counts[sequence])):
            source, target = base + int(paths[sequence, place]), base + place
            from_page, to_page = (page_table[sequence, slot // PAGE_SIZE] for slot in (source, target))
            pages[:, to_page, target % PAGE_SIZE] = before[:, from_page, source % PAGE_SIZE]


@jit(
    do_not_specialize=[
        "sequences",
        "first_state",
        "layers",
        "page_table_stride",
        "counts_stride",
        "path_stride",
        "depths",
    ]
)
def _compact_kv(
    keys, values, page_table, bases, counts, paths, known,
    sequences, first_state, layers, layer_stride, slot_stride, page_table_stride, counts_stride, path_stride, depths,
    DEPTHS_P2: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    KNOWN: tl.constexpr, KNOWN_P2: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (layer, sequence, block of columns); a layer past the last one moves what is known instead."""
    release(PDL)
    wait(PDL)
    layer = tl.program_id(0)
    sequence = tl.program_id(1)
    count = tl.load(counts + sequence * counts_stride)
    base = tl.load(bases + sequence)
    if layer == layers:
        last = tl.load(paths + sequence * path_stride + tl.maximum(count - 1, 0))
        entry = tl.program_id(2) * KNOWN_P2 + tl.arange(0, KNOWN_P2)
        moves_known = entry < tl.where(count > 0, KNOWN, 0)
        newest = tl.load(known + (first_state + sequences * last + sequence) * KNOWN + entry, mask=moves_known)
        tl.store(known + sequence * KNOWN + entry, newest, mask=moves_known)
    else:
        place = tl.arange(0, DEPTHS_P2)
        node = tl.load(paths + sequence * path_stride + place, mask=place < depths, other=0)
        moves = (place < count) & (node != place)
        source, target = base + node, base + place
        row = page_table + sequence * page_table_stride
        source = tl.load(row + source // PAGE, mask=moves, other=0).to(tl.int64) * PAGE + source % PAGE
        target = tl.load(row + target // PAGE, mask=moves, other=0).to(tl.int64) * PAGE + target % PAGE
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = moves[:, None] & (column < COLUMNS)[None, :]
        start = layer.to(tl.int64) * layer_stride
        from_slots = start + source[:, None] * slot_stride + column[None, :]
        to_slots = start + target[:, None] * slot_stride + column[None, :]
        moved_keys = tl.load(keys + from_slots, mask=inside)
        moved_values = tl.load(values + from_slots, mask=inside)
        tl.debug_barrier()  # a target may be another entry's source, held by another warp
        tl.store(keys + to_slots, moved_keys, mask=inside)
        tl.store(values + to_slots, moved_values, mask=inside)


def compact_kv(
    keys: torch.Tensor,  # [layers, pages, page size, Hkv, D]
    values: torch.Tensor,
    page_table: torch.Tensor,  # [B, P] int32
    bases: torch.Tensor,  # [B] int32
    counts: torch.Tensor,  # [B] int32, any stride
    paths: torch.Tensor,  # [B, depth + 1] int32
    known: torch.Tensor
    | None = None,  # [rows, width]: row b is sequence b's, row first_state + node * B + b its node's
    first_state: int = 0,
) -> None:
    """Moves the accepted paths, and the state of each sequence's newest node to the sequence's own row of `known`."""
    layers, _, page_size, heads, dim = keys.shape
    sequences, depths = paths.shape
    if page_size != PAGE_SIZE or keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError(f"keys and values must be alike, in pages of {PAGE_SIZE} slots")
    if not keys[0].is_contiguous():
        raise ValueError("the pages of a layer must be contiguous")
    if known is not None and not known.is_contiguous():
        raise ValueError("what is known must be contiguous")
    columns = heads * dim
    block = min(triton.next_power_of_2(columns), 256 if depths <= 16 else 64)
    width = known.shape[1] if known is not None else 0
    pdl = use_pdl(keys)
    grid = (layers + (known is not None), sequences, triton.cdiv(columns, block))
    _compact_kv[grid](
        keys, values, page_table, bases, counts, paths, known if known is not None else keys,
        sequences, first_state, layers, keys.stride(0), columns, page_table.stride(0), counts.stride(0),
        paths.stride(0), depths,
        DEPTHS_P2=triton.next_power_of_2(depths), COLUMNS=columns, BLOCK=block,
        KNOWN=width, KNOWN_P2=triton.next_power_of_2(max(width, 1)), PAGE=PAGE_SIZE, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
