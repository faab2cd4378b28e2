"""KV compaction: moves the accepted path's keys and values to consecutive slots, in all layers in one launch.

Node i of a sequence lies at slot length + i; after acceptance, node paths[i] moves to slot length + i. Keys and values
are [layers, pages, 64, Hkv, D]. A program reads everything that it moves before it writes, and no two programs touch
the same columns, so sources and targets may overlap. The launch also copies the feature of the newest accepted node,
which the exit reads at the next position (see `final_norm`), to the sequence's own row.
"""

from __future__ import annotations

import torch

from selfspec.kernels.constants import PAGE_SIZE
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton


def compact_kv_reference(
    pages: torch.Tensor,  # [layers, pages, page size, Hkv, D]
    page_table: torch.Tensor,  # [B, P]
    lengths_before: torch.Tensor,  # [B]
    counts: torch.Tensor,  # [B] nodes of the accepted path, root included
    paths: torch.Tensor,  # [B, depth + 1]
) -> None:
    """Moves node `paths[b, i]` of every sequence to slot lengths_before[b] + i, for i below counts[b]."""
    before = pages.clone()
    for sequence in range(len(lengths_before)):
        base = int(lengths_before[sequence])
        for place in range(int(counts[sequence])):
            source, target = base + int(paths[sequence, place]), base + place
            from_page, to_page = (page_table[sequence, slot // PAGE_SIZE] for slot in (source, target))
            pages[:, to_page, target % PAGE_SIZE] = before[:, from_page, source % PAGE_SIZE]


@jit(
    do_not_specialize=[
        "sequences",
        "first_node_row",
        "layers",
        "page_table_stride",
        "counts_stride",
        "path_stride",
        "depths",
    ]
)
def _compact_kv_kernel(
    keys, values, page_table, lengths_before, counts, paths, features,
    sequences, first_node_row, layers, layer_stride, slot_stride, page_table_stride, counts_stride, path_stride, depths,
    DEPTHS_P2: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    FEATURE: tl.constexpr, FEATURE_P2: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (layer, sequence, block of columns); programs of layer `layers` copy the feature instead."""
    release(PDL)
    wait(PDL)
    layer = tl.program_id(0)
    sequence = tl.program_id(1)
    count = tl.load(counts + sequence * counts_stride)
    base = tl.load(lengths_before + sequence)
    if layer == layers:
        last = tl.load(paths + sequence * path_stride + tl.maximum(count - 1, 0))
        entry = tl.program_id(2) * FEATURE_P2 + tl.arange(0, FEATURE_P2)  # not `column`: its shape differs below
        copies = entry < tl.where(count > 0, FEATURE, 0)
        newest = tl.load(features + (first_node_row + sequences * last + sequence) * FEATURE + entry, mask=copies)
        tl.store(features + sequence * FEATURE + entry, newest, mask=copies)
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
        tl.debug_barrier()  # a target may be the source of another warp
        tl.store(keys + to_slots, moved_keys, mask=inside)
        tl.store(values + to_slots, moved_values, mask=inside)


def compact_kv(
    keys: torch.Tensor,  # [layers, pages, page size, Hkv, D]
    values: torch.Tensor,
    page_table: torch.Tensor,  # [B, P] int32
    lengths_before: torch.Tensor,  # [B] int32: committed tokens before acceptance
    counts: torch.Tensor,  # [B] int32, any stride: nodes of the accepted path, root included
    paths: torch.Tensor,  # [B, depth + 1] int32
    features: torch.Tensor | None = None,  # [rows, width]; row b is sequence b's own
    first_node_row: int = 0,  # row first_node_row + node * B + b of `features` is that of sequence b's node
) -> None:
    """Moves the accepted paths' keys and values, and copies the newest accepted node's feature to its sequence."""
    layers, _, page_size, heads, dim = keys.shape
    sequences, depths = paths.shape
    if page_size != PAGE_SIZE or keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError(f"keys and values must have one shape and stride, in pages of {PAGE_SIZE} slots")
    if not keys[0].is_contiguous():
        raise ValueError("the pages of a layer must be contiguous")
    if features is not None and not features.is_contiguous():
        raise ValueError("features must be contiguous")
    columns = heads * dim
    block = min(triton.next_power_of_2(columns), 256 if depths <= 16 else 64)  # a program holds depths * block values
    width = features.shape[1] if features is not None else 0
    grid = (layers + (features is not None), sequences, triton.cdiv(columns, block))
    _compact_kv_kernel[grid](
        keys, values, page_table, lengths_before, counts, paths, features if features is not None else keys,
        sequences, first_node_row, layers, keys.stride(0), columns, page_table.stride(0), counts.stride(0),
        paths.stride(0), depths,
        DEPTHS_P2=triton.next_power_of_2(depths), COLUMNS=columns, BLOCK=block,
        FEATURE=width, FEATURE_P2=triton.next_power_of_2(max(width, 1)), PAGE=PAGE_SIZE,
        num_warps=4, **pdl_options(keys),
    )  # fmt: skip
