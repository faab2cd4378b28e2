"""Attention of tree nodes over the paged KV cache, with bits that depend on positions alone.

Computes softmax attention of q [R, Hq * D] (rows of M nodes of B sequences, node-major) over one layer of the cache,
[pages, 64, Hkv, D]. A node sees the committed keys of its sequence and those of its ancestors and itself, which
`qkv_rope_gemm` has written before.

A node's key lies at cache slot length + node and moves when it is committed. The result must not depend on that: it is
a function of the query's position and of the keys in position order, the same for every tree, batch and page layout.
Each query's keys are therefore divided by its position alone:

- prefix: the keys below split_point(position), which are committed for every node of any tree. They are summed in fixed
  *ranges* of positions, each by one program for many nodes at once; the partial results are merged in *bundles* of two
  or four ranges, then bundle by bundle.
- tail: the up to 127 keys from the split point on, found through the node's path and summed for each node by itself.

Finally tail and prefix are merged. `tree_attention_kernel` has the kernel, `tree_attention_common` the division of
positions and the running softmax.
"""

from __future__ import annotations

from functools import partial
from math import gcd

import torch

from selfspec.kernels.constants import MAX_NODES, PAGE_SIZE
from selfspec.kernels.noise import check_tensor
from selfspec.kernels.tree_attention_common import bundle_of, range_of, split_point
from selfspec.kernels.tree_attention_kernel import tree_attention_kernel
from selfspec.kernels.triton_compat import pdl_options, shared_bytes

LOG2_E = 1.4426950408889634  # the kernel computes exp2 instead of exp
# With this much shared memory two programs of up to 99 KB, which every GPU has, share an SM. These bounds are the
# fastest on an H200; not measured on other GPUs.
_LARGE_SHARED_BYTES = 200 * 1024
_MANY_ROWS = 128  # rows of all sequences per key-value head; more keep SMs so busy that two programs should share one
_MANY_NODES = 1024  # nodes of all sequences times key-value heads; more keep SMs busy even if nodes share a program
# Prefix programs of a launch, but at least one per unit. More would mostly have no range and delay the node programs,
# which start after them; fewer would leave SMs idle where lengths differ.
_MOST_PREFIX_PROGRAMS_PER_SM = 8
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tree_attention_reference(
    q: torch.Tensor,  # [R, Hq * D], node-major: row = node * B + sequence
    keys: torch.Tensor,  # [pages, 64, Hkv, D], one layer of the cache
    values: torch.Tensor,  # [pages, 64, Hkv, D]
    page_table: torch.Tensor,  # [B, P]
    lengths: torch.Tensor,  # [B] committed positions
    paths: torch.Tensor,  # [B, M, W]: entry i is the node at depth i on the path to node m, i up to its depth
    depths: torch.Tensor,  # [M]
    window: int | None,  # positions that a query sees, itself included; None: all
    scale: float,
) -> torch.Tensor:  # [R, Hq * D]
    """Softmax attention of each row over the keys it sees, gathered in position order."""
    batch, (_, _, kv_heads, dim) = lengths.shape[0], keys.shape
    out = torch.empty_like(q)
    for row in range(q.shape[0]):
        m, b = divmod(row, batch)
        length, depth = int(lengths[b]), int(depths[m])
        path = paths[b, m, : depth + 1].long().cpu()
        slots = torch.cat([torch.arange(length), length + path])  # cache slots in position order
        if window is not None:
            slots = slots[-window:]
        pages = page_table[b].cpu()[slots // PAGE_SIZE].long()
        k, v = (cached[pages, slots % PAGE_SIZE].transpose(0, 1) for cached in (keys, values))  # [Hkv, T, D]
        heads = q[row].view(kv_heads, -1, dim)  # [Hkv, group, D]
        weights = torch.softmax(heads @ k.to(q.dtype).transpose(1, 2) * scale, dim=-1)
        out[row] = (weights @ v.to(q.dtype)).flatten()
    return out


def ranges_for(context: int) -> int:
    """The number of ranges that a launch must be planned for, if queries are at positions below `context`."""
    end = split_point(context - 1)
    return range_of(end - 1) + 1 if end > 0 else 0


def workspace_size(batch: int, rows: int, query_heads: int, dim: int, ranges: int) -> int:
    """Float32 numbers that a launch needs for partial results; rows: nodes per sequence."""
    return batch * ranges * rows * query_heads * (dim + 2)


def counters_size(batch: int, rows: int, kv_heads: int) -> int:
    """Int32 counters that a launch needs at most; they are 0 before the first launch, and again after each."""
    return 1 + batch * rows * kv_heads  # the first one counts tickets


def tree_attention(
    q: torch.Tensor,  # [R, Hq * D], R = M * B, node-major: row = node * B + sequence
    keys: torch.Tensor,  # [pages, 64, Hkv, D], one layer of the cache; the rows' own keys are in it
    values: torch.Tensor,  # [pages, 64, Hkv, D]
    page_table: torch.Tensor,  # [B, P] int32; entries past the last cache slot in use are not read
    lengths: torch.Tensor,  # [B] int32: committed positions
    paths: torch.Tensor,  # [B, M, W] int32; entries past a node's depth are not read
    depths: torch.Tensor,  # [M] int32
    out: torch.Tensor,  # [R, Hq * D]
    workspace: torch.Tensor,  # float32, `workspace_size` numbers
    counters: torch.Tensor,  # int32, `counters_size` zeros
    *,
    ranges: int,  # `ranges_for` the longest context of this launch; rows at later positions get NaN
    window: int | None,  # positions that a query sees, itself included; None: all
    scale: float,
    # Change the speed, never the result; None: chosen by shape and device.
    row_tile: int | None = None,  # rows of a prefix program: 16 or 64
    separate: bool | None = None,  # prefix and nodes in two launches; prefix programs take whole bundles
    per_unit: int | None = None,  # prefix programs of a unit (sequence, key-value head, tile of nodes)
    pack: int | None = None,  # nodes of a node program
    tickets: bool | None = None,  # number programs in the order in which they start
) -> torch.Tensor:
    """Writes the attention of every row to `out`, and returns it.

    Few rows take one launch, in which nodes sum their tails while other programs sum the prefix. Many rows of long keys
    are faster in two where shared memory is large: prefix programs can pipeline deeper, node programs do not spin, and
    nodes that share a program read common keys once. For short keys the second launch costs more than it gains; other
    shapes would spill registers in two launches.
    """
    batch, nodes, kv_heads, dim = lengths.shape[0], depths.shape[0], *keys.shape[2:]
    _check(q, keys, values, page_table, lengths, paths, depths, out, workspace, counters, ranges, window, scale)
    group, pdl, large_shared = q.shape[1] // (kv_heads * dim), pdl_options(q), shared_bytes(q) > _LARGE_SHARED_BYTES
    row_tile = row_tile or (16 if nodes * group <= 16 else 64)
    if row_tile not in (16, 64):
        raise ValueError(f"row_tile must be 16 or 64, not {row_tile}")
    if separate is None:
        separate = row_tile == 64 and pdl["PDL"] and large_shared and dim == 128 and 64 % group == 0 and window is None
    separate = separate and ranges > 0
    many_rows, full_pack = batch * nodes * group > _MANY_ROWS, 16 // group  # nodes whose queries fill 16 rows
    pack = pack or _pack(full_pack, separate, many_rows, batch * nodes * kv_heads)
    if full_pack % pack:
        raise ValueError(f"pack must divide {full_pack}, not be {pack}")
    tiles = -(-nodes // (row_tile // 16 * full_pack))
    units, sms = batch * kv_heads * tiles, _sm_count(q)
    per_unit = max(1, _MOST_PREFIX_PROGRAMS_PER_SM * sms // units) if per_unit is None else per_unit
    if per_unit < 1:
        raise ValueError(f"per_unit must be at least 1, not {per_unit}")
    partials_of_unit = _most_partials(ranges, window, separate)
    prefix_programs = min(per_unit, partials_of_unit) * units
    node_programs = batch * -(-nodes // pack) * kv_heads
    if tickets is None:
        # Needed if waiting node programs could fill the GPU before all prefix programs have started. With fewer node
        # programs than SMs, one SM is left to the prefix; a ticket costs each program a round trip to memory.
        tickets = node_programs >= sms
    partials = batch * ranges * nodes * kv_heads * group
    sums, stats = workspace[: partials * dim], workspace[partials * dim :]
    stages = partial(_stages, dim, keys.element_size(), row_tile, many=many_rows, large_shared=large_shared)
    for runs_prefix, runs_nodes in [(True, False), (False, True)] if separate else [(True, True)]:
        tree_attention_kernel[(prefix_programs * runs_prefix + node_programs * runs_nodes,)](
            q, q.stride(0), out, out.stride(0), keys, values, *keys.stride()[:3], page_table, page_table.stride(0),
            lengths, paths, *paths.stride()[:2], depths, batch, nodes, sums, stats, counters, ranges,
            prefix_programs if runs_prefix else 0, scale * LOG2_E, WINDOW=window or 0, KV_HEADS=kv_heads, GROUP=group,
            DIM=dim, ROW_TILE=row_tile, PACK=pack, PREFIX=runs_prefix, NODES=runs_nodes,
            LOOP=per_unit < partials_of_unit, TICKETS=tickets and not separate, **pdl,
            **(_tiles(dim, keys.element_size()) | stages(runs_prefix, runs_nodes)),
        )  # fmt: skip
    return out


def _most_partials(ranges: int, window: int | None, separate: bool) -> int:
    """Most partial results of a unit (see the kernel): one per range, or with separate launches one per bundle. Ranges
    have at least 128 positions and bundles 512, so a window meets only some of them."""
    if separate:
        bundles = bundle_of(ranges - 1) + 1
        return bundles if window is None else min(bundles, window // 512 + 2)
    return ranges if window is None else min(ranges, window // 128 + 2)


def _sm_count(q: torch.Tensor) -> int:
    """The number of the GPU's SMs; 1 without a GPU, so that tests cover tickets and loops over ranges."""
    return torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1


def _pack(full_pack: int, separate: bool, many_rows: bool, nodes: int) -> int:
    """Nodes of a node program: a divisor of `full_pack`, the nodes whose queries fill 16 rows."""
    if separate:
        return gcd(4 if many_rows else 2, full_pack)
    return next(count for count in (5, 4, 3, 2, 1) if full_pack % count == 0) if nodes > _MANY_NODES else 1


def _tiles(dim: int, element_size: int) -> dict[str, int]:
    """Padded head size, key tile and warps. The key tile is part of the result, so it depends on head size and dtype
    alone."""
    wide = _is_wide(dim, element_size)
    return {"DIM_PAD": _padded(dim), "KEY_TILE": 32 if wide else 64, "num_warps": 8 if wide else 4}


def _stages(
    dim: int, element_size: int, row_tile: int, prefix: bool, nodes: bool, many: bool, large_shared: bool
) -> dict[str, int]:
    """Pipeline stages, and columns in which weights are summed; neither changes the result.

    Stages fit 99 KB of shared memory, or more with `large_shared`: there, prefix programs of 64 rows in a launch of
    their own load one key tile further ahead. With `many` rows two of them share an SM, which needs 8 columns, so that
    sums of weights stay in registers; otherwise each has an SM for itself.
    """
    wide, narrow = _is_wide(dim, element_size), _padded(dim) * element_size <= 128
    if nodes and not prefix:  # small, to fit beside prefix programs
        return {"TAIL_STAGES": 3 if narrow else 2, "SUM_COLUMNS": 8, "num_stages": 2}
    separate = prefix and not nodes
    further = (row_tile == 16) + (large_shared and separate)
    return {
        "TAIL_STAGES": 2 if wide else 3,
        "SUM_COLUMNS": 16 if separate and not many else 8,
        "num_stages": 2 + narrow + further,
    }


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _is_wide(dim: int, element_size: int) -> bool:
    """Whether a key takes more than 256 bytes, or 32-bit elements: key tiles then have 32 keys instead of 64."""
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
    check_tensor(q, "q", (batch * rows, q.shape[1]), _DTYPES, q.device)
    check_tensor(out, "out", tuple(q.shape), (q.dtype,), q.device)
    if not q.dtype == keys.dtype == values.dtype:
        raise ValueError(f"q, keys and values must share one of {_DTYPES}, not {q.dtype}, {keys.dtype}, {values.dtype}")
    for name, tensor, shape in (
        ("page_table", page_table, (batch, page_table.shape[-1])),
        ("lengths", lengths, (batch,)),
        ("paths", paths, (batch, rows, paths.shape[-1])),
        ("depths", depths, (rows,)),
    ):
        check_tensor(tensor, name, shape, (torch.int32,), q.device)
    if not 1 <= paths.shape[2] <= MAX_NODES + 1:
        raise ValueError(f"paths must be [{batch}, {rows}, 1 to {MAX_NODES + 1}], not {list(paths.shape)}")
    numbers, counts = workspace_size(batch, rows, kv_heads * heads, dim, ranges), counters_size(batch, rows, kv_heads)
    check_tensor(workspace[:numbers], "workspace", (numbers,), (torch.float32,), q.device)
    check_tensor(counters[:counts], "counters", (counts,), (torch.int32,), q.device)
    if ranges < 0 or (window is not None and window < 1) or not scale > 0:
        raise ValueError(f"needs ranges >= 0, window >= 1 and scale > 0, not {ranges}, {window}, {scale}")
