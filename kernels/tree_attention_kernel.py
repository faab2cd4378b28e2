"""The kernel of `tree_attention`: prefix programs, which sum ranges of committed keys for many nodes at once, and node
programs, which sum each node's tail and merge it with the prefix.

The *prefix* of a node is the keys below its split point, its *tail* the keys from there to the node itself. A prefix is
summed in fixed *ranges* of positions; consecutive ranges are merged in *bundles* (see `tree_attention_common`). Both
kinds of programs run in one launch, or with SEPARATE in two. In one launch a node program waits for prefix programs by
spinning on a counter, which cannot deadlock: prefix programs never wait, and they start first, because their program
numbers are lower. Where node programs could fill the GPU before all prefix programs have started, programs number
themselves by tickets in the order in which they start; a program then waits only for lower tickets, which are running
or done. `wait` and `release` order launches: see `pdl`.

Arguments that are passed on together:
  cache      keys, values, page_table, page_stride, slot_stride, head_stride, table_stride
  layout     lengths, paths, depths, tree_stride, path_stride, batch, nodes (per sequence)
  workspace  partials, stats, counters, ranges (as many per sequence as the workspace has space for)
Constants are explained at `tree_attention_kernel`.

A *unit* is (sequence, key-value head, tile of nodes); it has one counter. A *partial* is the running softmax of one
range, or with SEPARATE of one bundle, for one row; its m_i and l_i are in `stats`, its acc in `partials`.
"""

from __future__ import annotations

from selfspec.kernels.pdl import release, wait
from selfspec.kernels.tree_attention_common import (
    bundle_of_jit,
    bundle_start_jit,
    load_columns,
    partials_of,
    prefix_of_tile,
    range_start_jit,
    softmax_merge,
    softmax_step,
    split_point_jit,
)
from selfspec.kernels.triton_compat import jit, tl

# Synchronisation between programs.


@jit
def _ticket(counter):
    """Returns a number that no other program of this launch gets, in the order of the calls, from 0. The last caller
    clears the counter for the next launch, which cannot start before all programs of this one have called this function
    and `release`."""
    program = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    if program == tl.num_programs(0) - 1:
        tl.atomic_xchg(counter, 0, sem="acq_rel", scope="gpu")
    return program


@jit
def _wait_for_prefix(counter, expected, packs):
    """Waits until the partials of `expected` ranges of a unit are stored. The last of the unit's `packs` node
    programs clears the counter."""
    if expected > 0:
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < expected:
            pass
        last = packs == 1
        if not last:
            last = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == expected + packs - 1
        if last:
            tl.store(counter, 0)


# Prefix programs.


@jit
def _sum_range(
    index, unit, b, head, first, length, begin, end, q, q_stride, cache, layout, workspace, scale,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROW_TILE: tl.constexpr, KEY_TILE: tl.constexpr, SUM_COLUMNS: tl.constexpr, SEPARATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sums range `index` of a unit's prefix (SEPARATE: bundle `index`) for the unit's ROW_TILE rows, and stores a
    partial. A row is one of the GROUP query heads of a key-value head, of one node. The prefix is the positions from
    `begin` to `end` - 1."""
    keys, values, page_table, page_stride, slot_stride, head_stride, table_stride = cache
    _, _, depths, _, _, batch, nodes = layout
    partials, stats, counters, ranges = workspace
    NODES_PER_TILE: tl.constexpr = ROW_TILE // 16 * (16 // GROUP)
    first_range = bundle_start_jit(index) if SEPARATE else index
    after_last = bundle_start_jit(index + 1) if SEPARATE else index + 1
    range_length = range_start_jit(first_range + 1) - range_start_jit(first_range)
    row = tl.arange(0, ROW_TILE)
    node = first + row // GROUP
    real = (row < NODES_PER_TILE * GROUP) & (node < nodes)  # other rows only fill the tile
    position = tl.where(real, length + tl.load(depths + node, mask=real, other=0), -1)
    own_end = split_point_jit(position)  # [ROW_TILE]: each row sums the keys below it
    column = tl.arange(0, DIM_PAD)
    inside = real[:, None] & (column < DIM)[None, :]
    query_head = head * GROUP + row % GROUP
    q_at = (node * batch + b).to(tl.int64) * q_stride + query_head * DIM
    key = tl.arange(0, KEY_TILE)
    tile_at = key[:, None] * slot_stride + head * head_stride + column[None, :]  # [KEY_TILE, DIM_PAD]
    m_i = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    l_i = tl.zeros((ROW_TILE, SUM_COLUMNS), tl.float32)
    acc = tl.zeros((ROW_TILE, DIM_PAD), tl.float32)
    # Split points and ranges are whole pages, so every key of every tile is committed.
    start = tl.maximum(range_start_jit(first_range), begin // KEY_TILE * KEY_TILE)
    stop = tl.minimum(range_start_jit(after_last), end)
    bundle = (m_i, tl.zeros((ROW_TILE,), tl.float32), acc)  # SEPARATE: the merged ranges before the current one
    pages = page_table + b * table_stride
    page = tl.load(pages + start // 64)
    wait(PDL)
    if SEPARATE:
        release(PDL)  # not before `wait`: the node launch reads queries, keys and values without waiting for them
    q_tile = tl.load(q + q_at[:, None] + column[None, :], mask=inside, other=0.0)
    for at in range(start, stop, KEY_TILE):
        if SEPARATE:  # noqa: SIM102
            if (at % range_length == 0) & (at > start):
                bundle = softmax_merge(*bundle, m_i, tl.max(l_i, 1), acc, scale)
                m_i = tl.full((ROW_TILE,), float("-inf"), tl.float32)
                l_i = tl.zeros((ROW_TILE, SUM_COLUMNS), tl.float32)
                acc = tl.zeros((ROW_TILE, DIM_PAD), tl.float32)
        offset = page.to(tl.int64) * page_stride + at % 64 * slot_stride
        page = tl.load(pages + tl.minimum(at + KEY_TILE, stop - 1) // 64)  # of the next key tile, loaded ahead
        k = load_columns(keys + offset + tile_at, column, DIM, DIM_PAD)
        v = load_columns(values + offset + tile_at, column, DIM, DIM_PAD)
        visible = (at + key)[None, :] < own_end[:, None]
        if WINDOW > 0:
            visible = visible & ((at + key)[None, :] > position[:, None] - WINDOW)
        m_i, l_i, acc = softmax_step(m_i, l_i, acc, q_tile, k, v, visible, scale)
    l_row = tl.max(l_i, 1)
    if SEPARATE:
        m_i, l_row, acc = softmax_merge(*bundle, m_i, l_row, acc, scale)
    partial = ((b * ranges + index).to(tl.int64) * nodes + node) * (KV_HEADS * GROUP) + query_head
    tl.store(partials + partial[:, None] * DIM + column[None, :], acc, mask=inside)
    tl.store(stats + partial * 2, m_i, mask=real)
    tl.store(stats + partial * 2 + 1, l_row, mask=real)
    if not SEPARATE:
        tl.debug_barrier()  # all warps have stored before one thread counts the range
        tl.atomic_add(counters + unit, 1, sem="release", scope="gpu")


@jit
def _prefix_program(
    program, programs, q, q_stride, cache, layout, workspace, scale, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROW_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    SUM_COLUMNS: tl.constexpr, LOOP: tl.constexpr, SEPARATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums ranges of a unit's prefix (SEPARATE: bundles).

    Each unit has per_unit = `programs` / units programs. Its program i sums range high - 1 - i, so that the last range,
    the longest, starts first; with LOOP also every per_unit-th range before it. Programs without a range do nothing.
    """
    lengths, _, depths, _, _, batch, nodes = layout
    _, _, _, ranges = workspace
    NODES_PER_TILE: tl.constexpr = ROW_TILE // 16 * (16 // GROUP)
    tiles = tl.cdiv(nodes, NODES_PER_TILE)
    units = batch * KV_HEADS * tiles
    unit = program % units
    first = unit % tiles * NODES_PER_TILE
    head = unit // tiles % KV_HEADS
    b = unit // (tiles * KV_HEADS)
    length = tl.load(lengths + b)
    count = tl.minimum(nodes - first, NODES_PER_TILE)
    begin, end, low, high = prefix_of_tile(depths, length, first, count, WINDOW, ROW_TILE)
    fits = high <= ranges  # else the context is longer than the workspace allows: node programs write NaN
    low, high = partials_of(low, high, SEPARATE)
    index = high - 1 - program // units
    if LOOP:
        per_unit = programs // units
        count_of_ranges = tl.where(fits & (index >= low), (index - low) // per_unit + 1, 0)
        # Without hoisting: it would keep the addresses of all rows in registers, which then spill.
        for i in tl.range(0, count_of_ranges, num_stages=1, disable_licm=True):
            _sum_range(
                index - i * per_unit, unit, b, head, first, length, begin, end, q, q_stride, cache, layout,
                workspace, scale, WINDOW, KV_HEADS, GROUP, DIM, DIM_PAD, ROW_TILE, KEY_TILE, SUM_COLUMNS, SEPARATE, PDL,
            )  # fmt: skip
    elif (index >= low) & fits:
        _sum_range(
            index, unit, b, head, first, length, begin, end, q, q_stride, cache, layout, workspace, scale,
            WINDOW, KV_HEADS, GROUP, DIM, DIM_PAD, ROW_TILE, KEY_TILE, SUM_COLUMNS, SEPARATE, PDL,
        )  # fmt: skip
    if SEPARATE:
        wait(PDL)  # so that the node launch, which waits for this one, also waits for all launches before it


# Node programs. A program sums the tails of a *pack* of `count` nodes, up to PACK, in blocks of 64 keys: for i below
# `count`, block i is the first 64 tail keys of the pack's node i, and block count + i is the rest of its tail.


@jit
def _tail_block(block, count, cache, layout, b, head, length, first, WINDOW: tl.constexpr):
    """Returns the offsets [64] of a block's keys in the cache, and which of these keys its node sees. The node's path
    gives the cache slots of the root and the nodes."""
    _, _, page_table, page_stride, slot_stride, head_stride, table_stride = cache
    _, paths, depths, tree_stride, path_stride, _, _ = layout
    node = first + block % count
    position = length + tl.load(depths + node)
    at = tl.maximum(split_point_jit(position), 0) + block // count * 64 + tl.arange(0, 64)
    visible = at <= position
    if WINDOW > 0:
        visible = visible & (at > position - WINDOW)
    depth = at - length
    on_path = tl.load(paths + b * tree_stride + node * path_stride + depth, mask=visible & (depth >= 0), other=0)
    slot = tl.where(depth >= 0, length + on_path, at)
    page = tl.load(page_table + b * table_stride + slot // 64, mask=visible, other=0).to(tl.int64)
    return page * page_stride + slot % 64 * slot_stride + head * head_stride, visible


@jit
def _tail_blocks(count, depths, length, first, WINDOW: tl.constexpr, PACK: tl.constexpr):
    """Returns a pack's first block, one past its last, and whether its nodes share their first 64 tail keys. They do if
    all tails begin with the same 64 committed keys: the pack then reads only block count - 1 of the first `count`."""
    if PACK == 1:
        position = length + tl.load(depths + first)
        return 0, tl.where(position - tl.maximum(split_point_jit(position), 0) >= 64, 2, 1), False
    else:
        node = tl.minimum(tl.arange(0, 16), count - 1)
        position = length + tl.load(depths + first + node)
        start = tl.maximum(split_point_jit(position), 0)
        least = tl.min(start)
        shared = (WINDOW == 0) & (least == tl.max(start)) & (least + 64 <= length)
        return tl.where(shared, count - 1, 0), tl.where(tl.max(position - start) >= 64, 2 * count, count), shared


@jit
def _sum_tails(
    q_tile, cache, layout, b, head, first, blocks, first_block, second_block, scale, WINDOW: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PACK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns the running softmax of each row of a pack over its node's tail, in position order. `blocks`: the length,
    the pack's `count` and the results of `_tail_blocks`; `first_block` and `second_block`: the results of `_tail_block`
    for the first two blocks."""
    keys, values = cache[0], cache[1]
    length, count, start, stop, shared = blocks
    at, visible = first_block
    next_at, next_visible = second_block
    column = tl.arange(0, DIM_PAD)
    node_of_row = tl.arange(0, 16) // GROUP  # [16]: the node of each row, counted within the pack
    m_i = tl.full((16,), float("-inf"), tl.float32)
    l_i = tl.zeros((16, 8), tl.float32)
    acc = tl.zeros((16, DIM_PAD), tl.float32)
    for block in tl.range(start, stop, num_stages=STAGES):
        inside = visible[:, None] & (column < DIM)[None, :]
        k = tl.load(keys + at[:, None] + column[None, :], mask=inside, other=0.0)
        v = tl.load(values + at[:, None] + column[None, :], mask=inside, other=0.0)
        seen, before = visible[None, :], acc
        at, visible = next_at, next_visible
        if PACK > 1:
            in_block = ((node_of_row == block % count) | (shared & (block < count)))[:, None]  # rows of its node
            seen = seen & in_block
            next_at, next_visible = _tail_block(block + 2, count, cache, layout, b, head, length, first, WINDOW)
        m_i, l_i, acc = softmax_step(m_i, l_i, acc, q_tile, k, v, seen, scale)
        if PACK > 1:  # another node's infinite values times 0 would give NaN
            acc = tl.where(in_block, acc, before)
    return m_i, tl.max(l_i, 1), acc


@jit
def _load_partial(
    workspace, first_of_sequence, row_at, row_count, real, first, index, DIM: tl.constexpr, DIM_PAD: tl.constexpr
):
    """Returns the running softmax that a prefix program stored as partial `index` for 16 rows; an empty one for rows
    that are not real, and for indices below `first`. `first_of_sequence`: number of the sequence's partial 0."""
    partials, stats, _, _ = workspace
    number = tl.zeros((16,), tl.int32) + index
    exists = real & (number >= first)
    at = (first_of_sequence + number).to(tl.int64) * row_count + row_at
    column = tl.arange(0, DIM_PAD)
    inside = exists[:, None] & (column < DIM)[None, :]
    # .cg skips L1, which may hold a stale value of an earlier launch.
    m_i = tl.load(stats + at * 2, mask=exists, other=float("-inf"), cache_modifier=".cg")
    l_i = tl.load(stats + at * 2 + 1, mask=exists, other=0.0, cache_modifier=".cg")
    acc = tl.load(partials + at[:, None] * DIM + column[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    return m_i, l_i, acc


@jit
def _merge_prefix(
    workspace, first_of_sequence, row_at, row_count, real, low, high, scale,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, SEPARATE: tl.constexpr,
):  # fmt: skip
    """Returns the merged partials of ranges low to high - 1: merges ranges within each bundle, then bundles in order.

    Four partials are loaded at a time, so that their latencies overlap; the remaining ones one by one. With SEPARATE
    each partial is a whole bundle already.
    """
    first, after_last = partials_of(low, high, SEPARATE)
    m_i = tl.full((16,), float("-inf"), tl.float32)
    empty = (m_i, tl.zeros((16,), tl.float32), tl.zeros((16, DIM_PAD), tl.float32))
    m_i, l_i, acc = empty
    rest = after_last // 4 * 4
    for index in range(first // 4 * 4, rest, 4):
        p0 = _load_partial(workspace, first_of_sequence, row_at, row_count, real, first, index, DIM, DIM_PAD)
        p1 = _load_partial(workspace, first_of_sequence, row_at, row_count, real, first, index + 1, DIM, DIM_PAD)
        p2 = _load_partial(workspace, first_of_sequence, row_at, row_count, real, first, index + 2, DIM, DIM_PAD)
        p3 = _load_partial(workspace, first_of_sequence, row_at, row_count, real, first, index + 3, DIM, DIM_PAD)
        if SEPARATE:
            m_i, l_i, acc = softmax_merge(*softmax_merge(m_i, l_i, acc, *p0, scale), *p1, scale)
            m_i, l_i, acc = softmax_merge(*softmax_merge(m_i, l_i, acc, *p2, scale), *p3, scale)
        else:
            bundle = softmax_merge(*softmax_merge(*empty, *p0, scale), *p1, scale)
            if bundle_of_jit(index + 2) > bundle_of_jit(index):  # bundles of two ranges
                m_i, l_i, acc = softmax_merge(m_i, l_i, acc, *bundle, scale)
                bundle = empty
            bundle = softmax_merge(*softmax_merge(*bundle, *p2, scale), *p3, scale)
            m_i, l_i, acc = softmax_merge(m_i, l_i, acc, *bundle, scale)
    bundle = empty
    for index in range(tl.maximum(first, rest), after_last):
        partial = _load_partial(workspace, first_of_sequence, row_at, row_count, real, first, index, DIM, DIM_PAD)
        if SEPARATE:
            m_i, l_i, acc = softmax_merge(m_i, l_i, acc, *partial, scale)
        else:
            if (index == bundle_start_jit(bundle_of_jit(index))) & (index > rest):
                m_i, l_i, acc = softmax_merge(m_i, l_i, acc, *bundle, scale)
                bundle = empty
            bundle = softmax_merge(*bundle, *partial, scale)
    return (m_i, l_i, acc) if SEPARATE else softmax_merge(m_i, l_i, acc, *bundle, scale)


@jit
def _node_program(
    program, q, q_stride, out, out_stride, cache, layout, workspace, scale, WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROW_TILE: tl.constexpr,
    PACK: tl.constexpr, TAIL_STAGES: tl.constexpr, SEPARATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums the tails of a pack of nodes for one key-value head, merges each with its node's prefix, and writes the
    attended values.

    With SEPARATE, `wait` comes after the tails are summed: queries, keys and values are complete from the start,
    because the prefix launch waited for them before it released this one.
    """
    lengths, _, depths, _, _, batch, nodes = layout
    _, _, counters, ranges = workspace
    packs = tl.cdiv(nodes, PACK)
    head = program % KV_HEADS
    first = program // KV_HEADS % packs * PACK
    b = program // (KV_HEADS * packs)
    count = tl.minimum(nodes - first, PACK) if PACK > 1 else 1
    length = tl.load(lengths + b)
    start, stop, shared = _tail_blocks(count, depths, length, first, WINDOW, PACK)
    # The offsets of two blocks are found ahead, so that all keys and values of a node are loaded at once.
    first_block = _tail_block(start, count, cache, layout, b, head, length, first, WINDOW)
    second_block = _tail_block(start + 1, count, cache, layout, b, head, length, first, WINDOW)
    # Ranges of the unit's tile of nodes, for whose partials this program waits, and of the pack, which it merges.
    NODES_PER_TILE: tl.constexpr = ROW_TILE // 16 * (16 // GROUP)
    tile = first // NODES_PER_TILE
    tile_nodes = tl.minimum(nodes - tile * NODES_PER_TILE, NODES_PER_TILE)
    _, _, low, high = prefix_of_tile(depths, length, tile * NODES_PER_TILE, tile_nodes, WINDOW, ROW_TILE)
    fits = high <= ranges
    low, high = partials_of(low, high, SEPARATE)
    _, _, own_low, own_high = prefix_of_tile(depths, length, first, count, WINDOW, 16 if PACK > 1 else 1)
    row = tl.arange(0, 16)
    column = tl.arange(0, DIM_PAD)
    node = first + row // GROUP
    real = (row < PACK * GROUP) & (node < nodes)  # other rows only fill the tile
    inside = real[:, None] & (column < DIM)[None, :]
    query_head = head * GROUP + row % GROUP
    at = (node * batch + b).to(tl.int64)
    in_row = query_head[:, None] * DIM + column[None, :]
    if not SEPARATE:
        wait(PDL)
    q_tile = tl.load(q + (at * q_stride)[:, None] + in_row, mask=inside, other=0.0)
    tail_m, tail_l, tail_acc = _sum_tails(
        q_tile, cache, layout, b, head, first, (length, count, start, stop, shared), first_block, second_block, scale,
        WINDOW, GROUP, DIM, DIM_PAD, PACK, TAIL_STAGES,
    )  # fmt: skip
    if SEPARATE:
        wait(PDL)
    else:
        unit = (b * KV_HEADS + head) * tl.cdiv(nodes, NODES_PER_TILE) + tile
        _wait_for_prefix(counters + unit, tl.where(fits, high - low, 0), tl.cdiv(tile_nodes, PACK))
    m_i, l_i, acc = _merge_prefix(
        workspace, b * ranges, node * (KV_HEADS * GROUP) + query_head, nodes * (KV_HEADS * GROUP), real,
        own_low, tl.where(fits, own_high, own_low), scale, DIM, DIM_PAD, SEPARATE,
    )  # fmt: skip
    _, l_i, acc = softmax_merge(m_i, l_i, acc, tail_m, tail_l, tail_acc, scale)
    result = tl.where(fits, acc / tl.where(real, l_i, 1.0)[:, None], float("nan"))
    tl.store(out + (at * out_stride)[:, None] + in_row, result.to(out.dtype.element_ty), mask=inside)


# These numbers change between launches but change no code: specializing on them would only compile more.
@jit(do_not_specialize=["table_stride", "tree_stride", "path_stride", "batch", "nodes", "ranges", "prefix_programs"])
def tree_attention_kernel(
    q, q_stride, out, out_stride, keys, values, page_stride, slot_stride, head_stride, page_table, table_stride,
    lengths, paths, tree_stride, path_stride, depths, batch, nodes, partials, stats, counters, ranges, prefix_programs,
    scale,
    WINDOW: tl.constexpr,  # 0: no window
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,  # query heads per key-value head
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROW_TILE: tl.constexpr,  # rows of a prefix program
    KEY_TILE: tl.constexpr,  # keys that a prefix program adds at a time; decides the bits of the result
    SUM_COLUMNS: tl.constexpr,  # columns of l_i in which prefix programs sum the softmax weights; all columns are equal
    PACK: tl.constexpr,  # nodes of a node program, at most
    TAIL_STAGES: tl.constexpr,  # pipeline stages of the loop over a tail's blocks
    PREFIX: tl.constexpr, NODES: tl.constexpr,  # which programs this launch has
    LOOP: tl.constexpr,  # prefix programs loop over ranges: for fewer programs than ranges; costs registers
    TICKETS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Runs programs below `prefix_programs` as prefix programs, the others as node programs.

    Reads lengths, page tables and trees before earlier launches have ended: a pass does not change them.
    """
    SEPARATE: tl.constexpr = not (PREFIX and NODES)
    program = _ticket(counters) if TICKETS else tl.program_id(0)
    if NODES:
        release(PDL)  # early: the output projection prefetches its weights meanwhile
    cache = (keys, values, page_table, page_stride, slot_stride, head_stride, table_stride)
    layout = (lengths, paths, depths, tree_stride, path_stride, batch, nodes)
    workspace = (partials, stats, counters + 1, ranges)
    if PREFIX:  # noqa: SIM102
        if program < prefix_programs:
            _prefix_program(
                program, prefix_programs, q, q_stride, cache, layout, workspace, scale, WINDOW, KV_HEADS, GROUP, DIM,
                DIM_PAD, ROW_TILE, KEY_TILE, SUM_COLUMNS, LOOP, SEPARATE, PDL,
            )  # fmt: skip
    if NODES:  # noqa: SIM102
        if program >= prefix_programs:
            _node_program(
                program - prefix_programs, q, q_stride, out, out_stride, cache, layout, workspace, scale, WINDOW,
                KV_HEADS, GROUP, DIM, DIM_PAD, ROW_TILE, PACK, TAIL_STAGES, SEPARATE, PDL,
            )  # fmt: skip
