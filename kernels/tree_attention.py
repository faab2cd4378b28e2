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

from selfspec.kernels.constants import MAX_NODES, PAGE_SIZE
from selfspec.kernels.tree_attention_kernel import bundle_of, range_of, split_point, tree_attention_kernel
from selfspec.kernels.triton_compat import shared_bytes, use_pdl

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


def ranges_for(context: int) -> int:
    """Ranges that a launch must be planned for, so that queries may stand at any position below `context`."""
    end = split_point(context - 1)
    return range_of(end - 1) + 1 if end > 0 else 0


def workspace_size(batch: int, rows: int, query_heads: int, dim: int, ranges: int) -> int:
    """How many float32 numbers of workspace a launch needs for its partial results."""
    return batch * ranges * rows * query_heads * (dim + 2)


def counters_size(batch: int, rows: int, kv_heads: int) -> int:
    """How many int32 counters a launch needs, at most; 0 before the first launch, and again after each."""
    return 1 + batch * rows * kv_heads  # the first one counts the tickets


def tree_attention(
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
    tickets: bool | None = None,  # whether programs are numbered in the order of their starting; the same
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
    if tickets is None:
        tickets = _need_tickets(q, node_programs)
    records = batch * ranges * rows * kv_heads * group
    stages = partial(_stages, dim, keys.element_size(), row_tile, many=many, roomy=shared_bytes(q) > _ROOMY)
    for prefix, nodes in [(True, False), (False, True)] if apart else [(True, True)]:
        tree_attention_kernel[(prefix_programs * prefix + node_programs * nodes,)](
            q, q.stride(0), out, out.stride(0), keys, values, *keys.stride()[:3], page_table, page_table.stride(0),
            lengths, paths, paths.stride(0), depths, batch, rows, workspace[: records * dim], workspace[records * dim
            :], counters, ranges, prefix_programs if prefix else 0, scale * LOG2_E, WINDOW=window or 0,
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, ROW_TILE=row_tile, PACK=pack, PREFIX=prefix, NODES=nodes,
            TICKETS=tickets and not apart, PDL=pdl,
            **(_tiles(dim, keys.element_size()) | stages(prefix, nodes)),
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return out


def _need_tickets(q: torch.Tensor, node_programs: int) -> bool:
    """Whether programs that wait could fill the GPU before those they wait for have started: fewer programs of nodes
    than multiprocessors leave one where the prefix goes on. A ticket costs a round trip to memory."""
    if not q.is_cuda:
        return True
    return node_programs >= torch.cuda.get_device_properties(q.device).multi_processor_count


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
    if paths.dim() != 2 or paths.shape[0] != rows or not 1 <= paths.shape[1] <= MAX_NODES + 1 or paths.stride(1) != 1:
        raise ValueError(f"paths must be [{rows}, 1 to {MAX_NODES + 1}] with contiguous rows, not {list(paths.shape)}")
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
