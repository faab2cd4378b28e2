"""The kernel of `tree_attention`: programs of the prefix, which sum ranges of committed keys for many nodes, and
programs of the nodes, which sum each node's own keys and merge both.

A program of a node waits for programs of the prefix in the same launch. These come first, by program number or, where
the waiting ones could fill the GPU, by ticket: a program that holds a ticket waits only for programs with smaller ones,
which are running or done, in whatever order programs are started.
"""

from __future__ import annotations

from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, tl


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

    A whole page at least MAX_NODES behind the query: 64 * floor((position - 63) / 64), from position -1 on.
    """
    return (position + 1) // 64 * 64 - 64


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
def _ticket(counter):
    """A number that no other program of this launch gets: 0 for the first to ask, and so on. The last one clears the
    counter for the next launch, which cannot start before all programs of this one have asked and called `release`."""
    program = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    if program == tl.num_programs(0) - 1:
        tl.atomic_xchg(counter, 0, sem="acq_rel", scope="gpu")
    return program


@jit
def _wait_for_prefix(counter, expected, packs):
    """Waits until the programs of the prefix have stored their results; the last pack to see it clears the counter.

    These never wait for others, so each that has started ends. See the module for why all of them start.
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
def tree_attention_kernel(
    q, q_stride, out, out_stride, keys, values, page_stride, slot_stride, head_stride, page_table, table_stride,
    lengths, paths, path_stride, depths, batch, rows, partials, stats, counters, ranges, prefix_programs, scale,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROW_TILE: tl.constexpr, KEY_TILE: tl.constexpr, TOTALS: tl.constexpr, PACK: tl.constexpr,
    TAIL_STAGES: tl.constexpr, PREFIX: tl.constexpr, NODES: tl.constexpr, TICKETS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The programs of the prefix, then those of the nodes; both in one launch, or apart, each in its own.
    With a WINDOW of 0 there is none.

    Lengths, page tables and trees stay as they are while a cycle attends, and are looked up before earlier launches
    have ended.
    """
    APART: tl.constexpr = not (PREFIX and NODES)
    program = _ticket(counters) if TICKETS else tl.program_id(0)
    if NODES:
        release(PDL)  # the product that follows asks for its weights meanwhile
    cache = (keys, values, page_table, page_stride, slot_stride, head_stride, table_stride)
    rows_at = (lengths, paths, depths, path_stride, batch, rows)
    workspace = (partials, stats, counters + 1, ranges)
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
