"""Attention of tree nodes over the paged key-value cache, summing every node's keys in the order of their positions.

Once a node is committed its key moves to another slot. What a node computes may not depend on that, to the bit: here it
is a function of its position and of the keys in position order alone, whatever the tree, the batch and the pages. The
keys below a split point that depends on the position only are committed for every node of any tree; they are summed in
fixed ranges, for many nodes at once, and the results merged in fixed bundles. The up to 127 keys from there on are
found through each node's path, and what it alone sees is summed for it alone. Knows tensors only; writing the rows'
keys and values to the cache is another kernel's job.
"""

from __future__ import annotations

from functools import partial
from math import gcd

import torch

from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, shared_bytes, tl, use_pdl

PAGE_SIZE = 64
DEEPEST = 63  # a node may stand this far behind the root
LOG2_E = 1.4426950408889634
_ROOMY = 200 * 1024  # bytes of shared memory that leave room for two programs of what every GPU has, 99 KB
_MANY_ROWS = 128  # of all texts to a key head: more keep SMs so busy that it is better to share one
_MANY_NODES = 1024  # of all texts and key heads: more keep SMs busy even if some share a program


def reference(
    q: torch.Tensor,  # [R, Hq * D], node-major: row = node * B + sequence
    keys: torch.Tensor,  # [pages, 64, Hkv, D], one layer of the cache
    values: torch.Tensor,  # [pages, 64, Hkv, D]
    page_table: torch.Tensor,  # [B, P]
    lengths: torch.Tensor,  # [B] committed positions
    paths: torch.Tensor,  # [M, W]: entry i is the node at depth i on the way to the row's node, i up to its depth
    depths: torch.Tensor,  # [M]
    window: int | None,  # keys further back than this are not seen
    scale: float,
) -> torch.Tensor:  # [R, Hq * D]
    """Softmax attention of each row over the keys it sees, gathered in the order of their positions."""
    batch, (_, _, kv_heads, dim) = lengths.shape[0], keys.shape
    out = torch.empty_like(q)
    for row in range(q.shape[0]):
        m, b = divmod(row, batch)
        length, depth = int(lengths[b]), int(depths[m])
        path = paths[m, : depth + 1].long().cpu()
        slots = torch.cat([torch.arange(length), length + path])
        if window is not None:
            slots = slots[-window:]
        pages = page_table[b].cpu()[slots // PAGE_SIZE].long()
        k, v = (cached[pages, slots % PAGE_SIZE].transpose(0, 1) for cached in (keys, values))  # [Hkv, T, D]
        heads = q[row].view(kv_heads, -1, dim)  # [Hkv, group, D]
        weights = torch.softmax(heads @ k.to(q.dtype).transpose(1, 2) * scale, dim=-1)
        out[row] = (weights @ v.to(q.dtype)).flatten()
    return out


def range_of(position: int) -> int:
    """Index of the range of the prefix in which a position lies: ranges of 128, of 512 from 2048 on, of 1024 from 8192
    on. Short contexts get many programs, long ones few partial results. (Also compiled: plain integer arithmetic.)"""
    return min(position, 2048) // 128 + max(min(position, 8192) - 2048, 0) // 512 + max(position - 8192, 0) // 1024


def range_start(index: int) -> int:
    """The first position of a range."""
    return min(index, 16) * 128 + max(min(index, 28) - 16, 0) * 512 + max(index - 28, 0) * 1024


def bundle_of(index: int) -> int:
    """Ranges are merged in bundles of four, long ones of two, before the bundles are: where there are many rows one
    program takes a whole bundle, elsewhere each range has its own."""
    return min(index, 28) // 4 + max(index - 28, 0) // 2


def bundle_start(index: int) -> int:
    """The first range of a bundle."""
    return min(index, 7) * 4 + max(index - 7, 0) * 2


def split_point(position: int) -> int:
    """Where the prefix of a query ends and its tail begins; below 0 where there is no prefix.

    A whole page at least DEEPEST behind the query: 64 * floor((position - 63) / 64), from position -1 on.
    """
    return (position + 1) // 64 * 64 - 64


def ranges_for(context: int) -> int:
    """Ranges that a launch must be planned for, so that queries may stand at any position below `context`."""
    end = split_point(context - 1)
    return range_of(end - 1) + 1 if end > 0 else 0


def workspace_size(batch: int, rows: int, query_heads: int, dim: int, ranges: int) -> int:
    """How many float32 numbers of workspace a launch needs for its partial results."""
    return batch * ranges * rows * query_heads * (dim + 2)


def counters_size(batch: int, rows: int, kv_heads: int) -> int:
    """How many int32 counters a launch needs, at most; 0 before the first launch, and again after each."""
    return batch * rows * kv_heads


_range_of = jit(range_of)
_range_start = jit(range_start)
_bundle_of = jit(bundle_of)
_bundle_start = jit(bundle_start)
_split_point = jit(split_point)


@jit
def _ranges(begin, end):
    """The ranges in which the positions from begin up to end lie: first, and one past the last."""
    low = _range_of(begin)
    return low, tl.where(end > begin, _range_of(tl.maximum(end, 1) - 1) + 1, low)


@jit
def _records(low, high, APART: tl.constexpr):
    """Which results are kept of these ranges: one of each or, apart, of each bundle that they are in."""
    if APART:
        return _bundle_of(low), tl.where(high > low, _bundle_of(tl.maximum(high, 1) - 1) + 1, _bundle_of(low))
    else:
        return low, high


@jit
def _ranges_of_tile(depths, length, first, count, WINDOW: tl.constexpr, ROW_TILE: tl.constexpr):
    """The positions of the prefix, and their ranges, that any of the nodes of a tile sees."""
    node = tl.arange(0, ROW_TILE)
    depth = tl.load(depths + first + node, mask=node < count, other=0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length + tl.min(tl.where(node < count, depth, 64)) - WINDOW + 1, 0)
    end = _split_point(length + tl.max(depth))
    low, high = _ranges(begin, end)
    return begin, end, low, high


@jit
def _absorb(top, total, sums, q, k, v, visible, scale):
    """Takes a tile of keys into a running softmax: its largest logit, its sum of weights and of weighted values.

    A row that sees none of the keys keeps its bits. `total` is summed by a dot product as well, in the same order
    whatever the height of the tile, where the order of tl.sum would follow the layout; all its columns are alike. The
    maximum has no order.
    """
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    logits = tl.where(visible, logits, float("-inf"))
    raised = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(raised == float("-inf"), 0.0, raised)  # nothing seen yet: not infinity minus infinity
    weights = tl.exp2(tl.math.fma(logits, tl.full(logits.shape, scale, tl.float32), (-shift * scale)[:, None]))
    weights = weights.to(v.dtype)
    kept = tl.exp2((top - shift) * scale)
    ones = tl.full((v.shape[0], total.shape[1]), 1.0, v.dtype)
    total = tl.dot(weights, ones, total * kept[:, None], input_precision="ieee")
    sums = tl.dot(weights, v, sums * kept[:, None], input_precision="ieee")
    return raised, total, sums


@jit
def _merge(top, total, sums, top2, total2, sums2, scale):
    """One running softmax out of two; the multiply-adds are spelled out, so that no compiler chooses their rounding.
    One that has seen nothing leaves the other's bits as they are."""
    raised = tl.maximum(top, top2)
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    kept, kept2 = tl.exp2((top - shift) * scale), tl.exp2((top2 - shift) * scale)
    total = tl.math.fma(total, kept, total2 * kept2)
    sums = tl.math.fma(sums, tl.broadcast_to(kept[:, None], sums.shape), sums2 * kept2[:, None])
    return raised, total, sums


@jit
def _prefix_program(
    program, q, q_stride, cache, rows_at, workspace, scale, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROW_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    TOTALS: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums one range of the prefix, or a bundle, for one key-value head and a tile of rows: nodes times the query heads
    sharing it.

    Which one is told by the lengths: the unit's last one first, as it is the longest.
    """
    keys, values, page_table, page_stride, slot_stride, head_stride, table_stride = cache
    lengths, _, depths, _, batch, rows = rows_at
    partials, stats, counters, ranges = workspace
    PER_TILE: tl.constexpr = ROW_TILE // 16 * (16 // GROUP)
    tiles = tl.cdiv(rows, PER_TILE)
    units = batch * KV_HEADS * tiles
    unit = program % units
    first = unit % tiles * PER_TILE
    head = unit // tiles % KV_HEADS
    b = unit // (tiles * KV_HEADS)
    length = tl.load(lengths + b)
    begin, end, low, high = _ranges_of_tile(depths, length, first, tl.minimum(rows - first, PER_TILE), WINDOW, ROW_TILE)
    planned = high <= ranges
    low, high = _records(low, high, APART)
    index = high - 1 - program // units
    if (index >= low) & planned:
        first_range = _bundle_start(index) if APART else index
        after_last = _bundle_start(index + 1) if APART else index + 1
        length_of_each = _range_start(first_range + 1) - _range_start(first_range)
        row = tl.arange(0, ROW_TILE)
        node = first + row // GROUP
        real = (row < PER_TILE * GROUP) & (node < rows)
        position = tl.where(real, length + tl.load(depths + node, mask=real, other=0), -1)
        upto = _split_point(position)
        column = tl.arange(0, DIM_PAD)
        inside = real[:, None] & (column < DIM)[None, :]
        query_head = head * GROUP + row % GROUP
        q_at = (node * batch + b).to(tl.int64) * q_stride + query_head * DIM
        key = tl.arange(0, KEY_TILE)
        tile_at = key[:, None] * slot_stride + head * head_stride + column[None, :]
        top = tl.full((ROW_TILE,), float("-inf"), tl.float32)
        total = tl.zeros((ROW_TILE, TOTALS), tl.float32)
        sums = tl.zeros((ROW_TILE, DIM_PAD), tl.float32)
        # Split points and ranges are whole pages, so every key of every tile is committed.
        start = tl.maximum(_range_start(first_range), begin // KEY_TILE * KEY_TILE)
        stop = tl.minimum(_range_start(after_last), end)
        whole = (top, tl.zeros((ROW_TILE,), tl.float32), sums)  # of the ranges before the one in progress
        pages = page_table + b * table_stride
        page = tl.load(pages + start // 64)
        wait(PDL)
        if APART:
            release(PDL)  # not before: the nodes' launch reads what this one waited for
        q_tile = tl.load(q + q_at[:, None] + column[None, :], mask=inside, other=0.0)
        for at in range(start, stop, KEY_TILE):
            if APART:  # noqa: SIM102
                if (at % length_of_each == 0) & (at > start):
                    whole = _merge(*whole, top, tl.max(total, 1), sums, scale)
                    top = tl.full((ROW_TILE,), float("-inf"), tl.float32)
                    total = tl.zeros((ROW_TILE, TOTALS), tl.float32)
                    sums = tl.zeros((ROW_TILE, DIM_PAD), tl.float32)
            offset = page.to(tl.int64) * page_stride + at % 64 * slot_stride
            page = tl.load(pages + tl.minimum(at + KEY_TILE, stop - 1) // 64)  # for the next turn: asked for early
            k = _load_columns(keys + offset + tile_at, column, DIM, DIM_PAD)
            v = _load_columns(values + offset + tile_at, column, DIM, DIM_PAD)
            visible = (at + key)[None, :] < upto[:, None]
            if WINDOW > 0:
                visible = visible & ((at + key)[None, :] > position[:, None] - WINDOW)
            top, total, sums = _absorb(top, total, sums, q_tile, k, v, visible, scale)
        seen = tl.max(total, 1)
        if APART:
            top, seen, sums = _merge(*whole, top, seen, sums, scale)
        record = ((b * ranges + index).to(tl.int64) * rows + node) * (KV_HEADS * GROUP) + query_head
        tl.store(partials + record[:, None] * DIM + column[None, :], sums, mask=inside)
        tl.store(stats + record * 2, top, mask=real)
        tl.store(stats + record * 2 + 1, seen, mask=real)
        if not APART:
            tl.debug_barrier()  # all warps have stored before one thread says so
            tl.atomic_add(counters + unit, 1, sem="release", scope="gpu")
    elif APART:
        wait(PDL)  # whoever waits for this launch also waits for those before it


@jit
def _load_columns(pointers, column, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Whole rows of keys or values; no mask where the head size is a power of two."""
    if DIM == DIM_PAD:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(column < DIM)[None, :], other=0.0)


@jit
def _wait_for_prefix(counter, expected, packs):
    """Waits until the programs of the prefix have stored their results; the last pack to see it clears the counter.

    They have been started: programs start in the order of their numbers, and those of the prefix never wait.
    """
    if expected > 0:
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < expected:
            pass
        last = packs == 1
        if not last:
            last = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == expected + packs - 1
        if last:
            tl.store(counter, 0)


@jit
def _tail_part(turn, count, cache, rows_at, b, head, length, first, WINDOW: tl.constexpr):
    """Where the keys lie that some nodes take at this turn: each in its turn the first 64 keys from its split point on,
    then each the rest, through its path from its root on; and which of them it sees."""
    _, _, page_table, page_stride, slot_stride, head_stride, table_stride = cache
    _, paths, depths, path_stride, _, _ = rows_at
    node = first + turn % count
    position = length + tl.load(depths + node)
    at = tl.maximum(_split_point(position), 0) + turn // count * 64 + tl.arange(0, 64)
    visible = at <= position
    if WINDOW > 0:
        visible = visible & (at > position - WINDOW)
    depth = at - length
    on_path = tl.load(paths + node * path_stride + depth, mask=visible & (depth >= 0), other=0)
    slot = tl.where(depth >= 0, length + on_path, at)
    page = tl.load(page_table + b * table_stride + slot // 64, mask=visible, other=0).to(tl.int64)
    return page * page_stride + slot % 64 * slot_stride + head * head_stride, visible


@jit
def _tail_turns(count, depths, length, first, WINDOW: tl.constexpr, PACK: tl.constexpr):
    """The first turn of some nodes and one past the last. Where their tails begin with the same committed keys, they
    take these together, in the last of the first turns."""
    if PACK == 1:
        position = length + tl.load(depths + first)
        return 0, tl.where(position - tl.maximum(_split_point(position), 0) >= 64, 2, 1), False
    else:
        node = tl.minimum(tl.arange(0, 16), count - 1)
        position = length + tl.load(depths + first + node)
        start = tl.maximum(_split_point(position), 0)
        least = tl.min(start)
        together = (WINDOW == 0) & (least == tl.max(start)) & (least + 64 <= length)
        return tl.where(together, count - 1, 0), tl.where(tl.max(position - start) >= 64, 2 * count, count), together


@jit
def _sum_tails(
    q_tile, cache, rows_at, b, head, first, turns, near, next_near, scale, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PACK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The running softmax of each of some nodes over the keys from its split point to itself, in position order."""
    keys, values = cache[0], cache[1]
    length, count, start, stop, together = turns
    at, visible = near
    next_at, next_visible = next_near
    column = tl.arange(0, DIM_PAD)
    place = tl.arange(0, 16) // GROUP
    top = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16, 8), tl.float32)
    sums = tl.zeros((16, DIM_PAD), tl.float32)
    for turn in tl.range(start, stop, num_stages=STAGES):
        inside = visible[:, None] & (column < DIM)[None, :]
        k = tl.load(keys + at[:, None] + column[None, :], mask=inside, other=0.0)
        v = tl.load(values + at[:, None] + column[None, :], mask=inside, other=0.0)
        seen, before = visible[None, :], sums
        at, visible = next_at, next_visible
        if PACK > 1:
            takes = ((place == turn % count) | (together & (turn < count)))[:, None]
            seen = seen & takes
            next_at, next_visible = _tail_part(turn + 2, count, cache, rows_at, b, head, length, first, WINDOW)
        top, total, sums = _absorb(top, total, sums, q_tile, k, v, seen, scale)
        if PACK > 1:  # nothing times another node's values, which may be infinite, would be no number
            sums = tl.where(takes, sums, before)
    return top, tl.max(total, 1), sums


@jit
def _kept(workspace, of_text, row_at, row_count, real, first, index, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """The running softmax of some rows that a program of the prefix has stored as record `index`; one that has seen
    nothing for rows that are not real, and where records begin later, with `first`."""
    partials, stats, _, _ = workspace
    number = tl.zeros((16,), tl.int32) + index
    there = real & (number >= first)
    at = (of_text + number).to(tl.int64) * row_count + row_at
    column = tl.arange(0, DIM_PAD)
    inside = there[:, None] & (column < DIM)[None, :]
    # Past the first-level cache, which may hold what an earlier launch had stored here.
    top = tl.load(stats + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    sums = tl.load(partials + at[:, None] * DIM + column[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    return top, total, sums


@jit
def _merge_prefix(
    workspace, of_text, row_at, row_count, real, low, high, scale,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """What the ranges from low up to high come to for some rows, bundle by bundle: four records at a time, all asked
    for at once, and those that are left one by one."""
    first, after_last = _records(low, high, APART)
    top = tl.full((16,), float("-inf"), tl.float32)
    nothing = (top, tl.zeros((16,), tl.float32), tl.zeros((16, DIM_PAD), tl.float32))
    top, total, sums = nothing
    rest = after_last // 4 * 4
    for index in range(first // 4 * 4, rest, 4):
        a = _kept(workspace, of_text, row_at, row_count, real, first, index, DIM, DIM_PAD)
        b = _kept(workspace, of_text, row_at, row_count, real, first, index + 1, DIM, DIM_PAD)
        c = _kept(workspace, of_text, row_at, row_count, real, first, index + 2, DIM, DIM_PAD)
        d = _kept(workspace, of_text, row_at, row_count, real, first, index + 3, DIM, DIM_PAD)
        if APART:
            top, total, sums = _merge(*_merge(top, total, sums, *a, scale), *b, scale)
            top, total, sums = _merge(*_merge(top, total, sums, *c, scale), *d, scale)
        else:
            bundle = _merge(*_merge(*nothing, *a, scale), *b, scale)
            if _bundle_of(index + 2) > _bundle_of(index):  # these are bundles of two
                top, total, sums = _merge(top, total, sums, *bundle, scale)
                bundle = nothing
            bundle = _merge(*_merge(*bundle, *c, scale), *d, scale)
            top, total, sums = _merge(top, total, sums, *bundle, scale)
    bundle = nothing
    for index in range(tl.maximum(first, rest), after_last):
        record = _kept(workspace, of_text, row_at, row_count, real, first, index, DIM, DIM_PAD)
        if APART:
            top, total, sums = _merge(top, total, sums, *record, scale)
        else:
            if (index == _bundle_start(_bundle_of(index))) & (index > rest):
                top, total, sums = _merge(top, total, sums, *bundle, scale)
                bundle = nothing
            bundle = _merge(*bundle, *record, scale)
    return (top, total, sums) if APART else _merge(top, total, sums, *bundle, scale)


@jit
def _node_program(
    program, q, q_stride, out, out_stride, cache, rows_at, workspace, scale, WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROW_TILE: tl.constexpr,
    PACK: tl.constexpr, TAIL_STAGES: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums the tails of a pack of nodes for one key-value head, merges them with the ranges of their prefix, and writes
    the results.

    Apart from the prefix, whose launch is over when this one has waited: that had waited before it released this one,
    so what both read is there from the start.
    """
    lengths, _, depths, _, batch, rows = rows_at
    _, _, counters, ranges = workspace
    packs = tl.cdiv(rows, PACK)
    head = program % KV_HEADS
    first = program // KV_HEADS % packs * PACK
    b = program // (KV_HEADS * packs)
    count = tl.minimum(rows - first, PACK) if PACK > 1 else 1
    length = tl.load(lengths + b)
    start, stop, together = _tail_turns(count, depths, length, first, WINDOW, PACK)
    # Two parts are looked up beforehand, so that all keys and values of a node are on the way at once.
    near = _tail_part(start, count, cache, rows_at, b, head, length, first, WINDOW)
    next_near = _tail_part(start + 1, count, cache, rows_at, b, head, length, first, WINDOW)
    PER_TILE: tl.constexpr = ROW_TILE // 16 * (16 // GROUP)
    tile = first // PER_TILE
    nodes = tl.minimum(rows - tile * PER_TILE, PER_TILE)
    _, _, low, high = _ranges_of_tile(depths, length, tile * PER_TILE, nodes, WINDOW, ROW_TILE)
    planned = high <= ranges
    low, high = _records(low, high, APART)
    _, _, own_low, own_high = _ranges_of_tile(depths, length, first, count, WINDOW, 16 if PACK > 1 else 1)
    row = tl.arange(0, 16)
    column = tl.arange(0, DIM_PAD)
    node = first + row // GROUP
    real = (row < PACK * GROUP) & (node < rows)
    inside = real[:, None] & (column < DIM)[None, :]
    query_head = head * GROUP + row % GROUP
    at = (node * batch + b).to(tl.int64)
    in_row = query_head[:, None] * DIM + column[None, :]
    if not APART:
        wait(PDL)
    q_tile = tl.load(q + (at * q_stride)[:, None] + in_row, mask=inside, other=0.0)
    tail_top, tail_total, tail_sums = _sum_tails(
        q_tile, cache, rows_at, b, head, first, (length, count, start, stop, together), near, next_near, scale, WINDOW,
        GROUP, DIM, DIM_PAD, PACK, TAIL_STAGES,
    )  # fmt: skip
    if APART:
        wait(PDL)
    else:
        unit = (b * KV_HEADS + head) * tl.cdiv(rows, PER_TILE) + tile
        _wait_for_prefix(counters + unit, tl.where(planned, high - low, 0), tl.cdiv(nodes, PACK))
    top, total, sums = _merge_prefix(
        workspace, b * ranges, node * (KV_HEADS * GROUP) + query_head, rows * (KV_HEADS * GROUP), real,
        own_low, tl.where(planned, own_high, own_low), scale, DIM, DIM_PAD, APART,
    )  # fmt: skip
    _, total, sums = _merge(top, total, sums, tail_top, tail_total, tail_sums, scale)
    result = tl.where(planned, sums / tl.where(real, total, 1.0)[:, None], float("nan"))
    tl.store(out + (at * out_stride)[:, None] + in_row, result.to(out.dtype.element_ty), mask=inside)


# Few of the numbers change the code; a kernel compiled for each of their kinds would only cost time.
@jit(do_not_specialize=["table_stride", "path_stride", "batch", "rows", "ranges", "prefix_programs"])
def _path_attention(
    q, q_stride, out, out_stride, keys, values, page_stride, slot_stride, head_stride, page_table, table_stride,
    lengths, paths, path_stride, depths, batch, rows, partials, stats, counters, ranges, prefix_programs, scale,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROW_TILE: tl.constexpr, KEY_TILE: tl.constexpr, TOTALS: tl.constexpr, PACK: tl.constexpr,
    TAIL_STAGES: tl.constexpr, PREFIX: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The programs of the prefix, then those of the nodes; both in one launch, or apart, each in its own.
    With a WINDOW of 0 there is none.

    Lengths, page tables and trees stay as they are while a cycle attends, and are looked up before earlier launches
    have ended.
    """
    APART: tl.constexpr = not (PREFIX and NODES)
    if NODES:
        release(PDL)  # the product that follows asks for its weights meanwhile
    program = tl.program_id(0)
    cache = (keys, values, page_table, page_stride, slot_stride, head_stride, table_stride)
    rows_at = (lengths, paths, depths, path_stride, batch, rows)
    workspace = (partials, stats, counters, ranges)
    if PREFIX:  # noqa: SIM102
        if program < prefix_programs:
            _prefix_program(
                program, q, q_stride, cache, rows_at, workspace, scale, WINDOW, KV_HEADS, GROUP, DIM, DIM_PAD, ROW_TILE,
                KEY_TILE, TOTALS, APART, PDL,
            )  # fmt: skip
    if NODES:  # noqa: SIM102
        if program >= prefix_programs:
            _node_program(
                program - prefix_programs, q, q_stride, out, out_stride, cache, rows_at, workspace, scale, WINDOW,
                KV_HEADS, GROUP, DIM, DIM_PAD, ROW_TILE, PACK, TAIL_STAGES, APART, PDL,
            )  # fmt: skip


def path_attention(
    q: torch.Tensor,  # [R, Hq * D], R = M * B, node-major: row = node * B + sequence
    keys: torch.Tensor,  # [pages, 64, Hkv, D], one layer of the cache; the rows' own keys are in it
    values: torch.Tensor,  # [pages, 64, Hkv, D]
    page_table: torch.Tensor,  # [B, P] int32; entries past the last slot in use do not matter
    lengths: torch.Tensor,  # [B] int32
    paths: torch.Tensor,  # [M, W] int32; entries past the row's depth do not matter
    depths: torch.Tensor,  # [M] int32
    out: torch.Tensor,  # [R, Hq * D]
    workspace: torch.Tensor,  # float32, `workspace_size` numbers
    counters: torch.Tensor,  # int32, `counters_size` zeros
    *,
    ranges: int,  # `ranges_for` the longest context this launch may meet; rows beyond it get NaN
    window: int | None,
    scale: float,
    row_tile: int | None = None,  # how many rows of the prefix share a program; changes the speed, never the result
    apart: bool | None = None,  # prefix and nodes in launches of their own, a program for each bundle; the same
    pack: int | None = None,  # how many nodes share a program; the same
) -> torch.Tensor:
    """Writes the attention of every row to `out`, and returns it.

    Few rows take one launch, in which nodes sum their tails while others sum the prefix. Many rows of long keys are
    faster apart: programs of the prefix can look further ahead, and nodes need not stand and wait; some of these share
    a program then, and read the keys that all of them see only once. For short keys one launch more costs more than
    that; in other cases a program that holds a bundle beside the range in progress would spill registers.
    """
    batch, rows, kv_heads, dim = lengths.shape[0], depths.shape[0], *keys.shape[2:]
    _check(q, keys, values, page_table, lengths, paths, depths, out, workspace, counters, ranges, window, scale)
    group, pdl = q.shape[1] // (kv_heads * dim), use_pdl(q)
    row_tile = row_tile or (16 if rows * group <= 16 else 64)
    if row_tile not in (16, 64):
        raise ValueError(f"row_tile must be 16 or 64, not {row_tile}")
    if apart is None:
        apart = row_tile == 64 and pdl and dim == 128 and 64 % group == 0 and window is None
    apart = apart and ranges > 0
    many, together = batch * rows * group > _MANY_ROWS, 16 // group  # as many nodes as fill a tile of queries
    pack = pack or _pack(together, apart, many, batch * rows * kv_heads)
    if together % pack:
        raise ValueError(f"pack must divide {together}, not be {pack}")
    # Within a window no tile of nodes sees more ranges than this, wherever it stands.
    met = ranges if window is None else min(ranges, window // 128 + 2)
    if apart:
        met = bundle_of(ranges - 1) + 1 if window is None else min(bundle_of(ranges - 1) + 1, window // 512 + 2)
    prefix_programs = met * batch * kv_heads * -(-rows // (row_tile // 16 * together))
    node_programs = batch * -(-rows // pack) * kv_heads
    records = batch * ranges * rows * kv_heads * group
    stages = partial(_stages, dim, keys.element_size(), row_tile, many=many, roomy=shared_bytes(q) > _ROOMY)
    for prefix, nodes in [(True, False), (False, True)] if apart else [(True, True)]:
        _path_attention[(prefix_programs * prefix + node_programs * nodes,)](
            q, q.stride(0), out, out.stride(0), keys, values, *keys.stride()[:3], page_table, page_table.stride(0),
            lengths, paths, paths.stride(0), depths, batch, rows, workspace[: records * dim], workspace[records * dim
            :], counters, ranges, prefix_programs if prefix else 0, scale * LOG2_E, WINDOW=window or 0,
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, ROW_TILE=row_tile, PACK=pack, PREFIX=prefix, NODES=nodes,
            PDL=pdl,
            **(_tiles(dim, keys.element_size()) | stages(prefix, nodes)),
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return out


def _pack(together: int, apart: bool, many: bool, nodes: int) -> int:
    """How many nodes share a program: a part of those that fill a tile of queries."""
    if apart:
        return gcd(4 if many else 2, together)
    return next(count for count in (5, 4, 3, 2, 1) if together % count == 0) if nodes > _MANY_NODES else 1


def _tiles(dim: int, element_size: int) -> dict[str, int]:
    """The size of the key tiles, which is part of the result, so it follows from head size and dtype alone, and the
    usual number of warps, which is not."""
    wide = _is_wide(dim, element_size)
    return {"DIM_PAD": _padded(dim), "KEY_TILE": 32 if wide else 64, "num_warps": 8 if wide else 4}


def _stages(
    dim: int, element_size: int, row_tile: int, prefix: bool, nodes: bool, many: bool, roomy: bool
) -> dict[str, int]:
    """How loads are pipelined, and in how many columns weights are summed, which changes no result: within 99 KB of
    shared memory, unless the GPU is `roomy`. There tiles of 64 rows apart from their nodes can look further ahead: with
    `many` of them two programs just share an SM if sums of weights take 8 columns and stay in registers, and elsewhere
    each is to have one for itself."""
    wide, narrow = _is_wide(dim, element_size), _padded(dim) * element_size <= 128
    if nodes and not prefix:  # small, so that they find room beside the prefix
        return {"TAIL_STAGES": 3 if narrow else 2, "TOTALS": 8, "num_stages": 2}
    apart = prefix and not nodes
    further = (row_tile == 16) + (roomy and apart)
    return {
        "TAIL_STAGES": 2 if wide else 3,
        "TOTALS": 16 if apart and not many else 8,
        "num_stages": 2 + narrow + further,
    }


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _is_wide(dim: int, element_size: int) -> bool:
    """Whether keys are so long that only half as many fit."""
    return _padded(dim) * element_size > 256 or element_size > 2


def _check(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    paths: torch.Tensor,
    depths: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    counters: torch.Tensor,
    ranges: int,
    window: int | None,
    scale: float,
) -> None:
    batch, rows = lengths.shape[0], depths.shape[0]
    if keys.dim() != 4 or keys.shape[1] != PAGE_SIZE or keys.stride(3) != 1:
        raise ValueError(f"keys must be [pages, {PAGE_SIZE}, heads, dim] with contiguous heads, not {keys.shape}")
    if values.shape != keys.shape or values.stride() != keys.stride():
        raise ValueError("values must have the shape and strides of keys")
    kv_heads, dim = keys.shape[2:]
    if dim % 16 or not 16 <= dim <= 256:
        raise ValueError(f"the head size must be a multiple of 16 up to 256, not {dim}")
    heads, rest = divmod(q.shape[-1], kv_heads * dim)
    if q.dim() != 2 or rest or not 1 <= heads <= 16:
        raise ValueError(f"q must be [rows, 1 to 16 times {kv_heads} heads of {dim}], not {list(q.shape)}")
    if out.shape != q.shape or q.shape[0] != batch * rows:
        raise ValueError(
            f"q and out must have {batch} * {rows} rows and one width, not {list(q.shape)}, {list(out.shape)}"
        )
    if q.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the rows of q and out must be contiguous")
    if not q.dtype == keys.dtype == values.dtype == out.dtype or q.dtype not in _DTYPES:
        raise ValueError(f"q, keys, values and out must share one of {_DTYPES}, not {q.dtype}, {keys.dtype}")
    if page_table.dim() != 2 or page_table.shape[0] != batch or page_table.stride(1) != 1:
        raise ValueError(f"page_table must be [{batch}, pages] with contiguous rows, not {list(page_table.shape)}")
    if paths.dim() != 2 or paths.shape[0] != rows or not 1 <= paths.shape[1] <= DEEPEST + 1 or paths.stride(1) != 1:
        raise ValueError(f"paths must be [{rows}, 1 to {DEEPEST + 1}] with contiguous rows, not {list(paths.shape)}")
    for name, tensor in {"page_table": page_table, "lengths": lengths, "paths": paths, "depths": depths}.items():
        if tensor.dtype != torch.int32 or (tensor.dim() == 1 and tensor.shape[0] > 1 and tensor.stride(0) != 1):
            raise ValueError(f"{name} must be contiguous int32, not {tensor.dtype} with strides {tensor.stride()}")
    _check_workspace(workspace, workspace_size(batch, rows, kv_heads * heads, dim, ranges), torch.float32, "workspace")
    _check_workspace(counters, counters_size(batch, rows, kv_heads), torch.int32, "counters")
    if ranges < 0 or (window is not None and window < 1) or not scale > 0:
        raise ValueError(f"needs ranges >= 0, window >= 1 and scale > 0, not {ranges}, {window}, {scale}")


def _check_workspace(tensor: torch.Tensor, size: int, dtype: torch.dtype, name: str) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype != dtype or tensor.numel() < size:
        raise ValueError(f"{name} must hold {size} contiguous {dtype}, not {list(tensor.shape)} {tensor.dtype}")


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
