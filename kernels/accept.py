"""Acceptance: each sequence walks down its draft tree, from the root along the children that carry the target's choice.

Reads the target's choice at every node (drawn before, so that it depends on the node's position and never on the walk),
the nodes' tokens and the tree. Writes for each sequence the accepted path and a report for the host, and updates
committed length, pending token and token counts. `kv_compaction` moves keys and values. The walk ends where no child
carries the choice, after a stop token, and after the choice -1 (no finite logit), which is reported as it is.
"""

from __future__ import annotations

import torch

from selfspec.kernels.noise import check_tensor
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl

COUNT, LAST, TOKENS = 0, 1, 2  # columns of a report: tokens emitted, the node the walk ended at, first of the tokens


def accept_reference(
    chosen: torch.Tensor,  # [(n + 1) * B], node-major
    tokens: torch.Tensor,  # [(n + 1) * B]
    children: torch.Tensor,  # [n + 1, W], padded with -1
    sequences: int,
    stops: torch.Tensor | None = None,  # [B, S], padded with -1
) -> list[tuple[list[int], list[int]]]:
    """For each sequence the accepted path (nodes, root first) and the tokens emitted, one for each node of the path."""
    walks = []
    for sequence in range(sequences):
        path, emitted, node = [], [], 0
        while node >= 0:
            choice = int(chosen[node * sequences + sequence])
            path.append(node)
            emitted.append(choice)
            if choice < 0 or (stops is not None and choice in stops[sequence].tolist()):
                break
            kids = [int(child) for child in children[node] if child >= 0]
            node = next((child for child in kids if int(tokens[child * sequences + sequence]) == choice), -1)
        walks.append((path, emitted))
    return walks


@jit(do_not_specialize=["sequences", "path_stride", "report_stride", "deepest", "width", "stop_count"])
def _accept_kernel(
    chosen, tokens, children, active, lengths, lengths_before, pending, paths, report, counts, stops,
    sequences, path_stride, report_stride, counts_stride, stops_stride, deepest, width, stop_count,
    WIDTH_P2: tl.constexpr, STOPS_P2: tl.constexpr, FIRST_TOKEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per sequence. The loop always runs over all depths; `walking` masks what it writes."""
    release(PDL)
    wait(PDL)
    sequence = tl.program_id(0)
    kid = tl.arange(0, WIDTH_P2)
    state = tl.load(active + sequence)
    walking = state != 0
    node = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32)
    newest = tl.load(pending + sequence)
    if stops is not None:
        place = tl.arange(0, STOPS_P2)
        stop = tl.load(stops + sequence * stops_stride + place, mask=place < stop_count, other=-1)
    if counts is not None:
        counts += sequence.to(tl.int64) * counts_stride
    for depth in range(deepest + 1):
        choice = tl.load(chosen + node * sequences + sequence).to(tl.int32)
        tl.store(report + sequence * report_stride + FIRST_TOKEN + depth, choice, mask=walking)
        tl.store(paths + sequence * path_stride + depth, node, mask=walking)
        count += walking.to(tl.int32)
        last = tl.where(walking, node, last)
        newest = tl.where(walking, choice.to(newest.dtype), newest)
        walking = walking & (choice >= 0)
        if counts is not None:
            tl.store(counts + choice, tl.load(counts + choice, mask=walking, other=0) + 2, mask=walking)
            tl.debug_barrier()  # the next token may be the same one
        if stops is not None:
            walking = walking & (tl.max((stop == choice).to(tl.int32), 0) == 0)
        child = tl.load(children + node * width + kid, mask=kid < width, other=-1)
        drafted = tl.load(tokens + child * sequences + sequence, mask=child >= 0, other=-1).to(tl.int32)
        match = tl.min(tl.where((child >= 0) & (drafted == choice), child, 1 << 30), axis=0)
        walking = walking & (match < (1 << 30)) & (state > 1)
        node = tl.where(walking, match, node)
    length = tl.load(lengths + sequence)
    tl.store(lengths_before + sequence, length)
    tl.store(lengths + sequence, length + count)
    tl.store(pending + sequence, newest)
    tl.store(report + sequence * report_stride, count)
    tl.store(report + sequence * report_stride + 1, last)


def accept(
    chosen: torch.Tensor,  # [(n + 1) * B] int32 or int64: the target's choice at every node, node-major
    tokens: torch.Tensor,  # [(n + 1) * B] int32: the nodes' tokens
    children: torch.Tensor,  # [n + 1, W] int32, padded with -1
    active: torch.Tensor,  # [B] int32: 0 idle, nothing changes; 1 emits only the root's choice; 2 accepts nodes
    lengths: torch.Tensor,  # [B] int32, advanced by the number of accepted tokens
    lengths_before: torch.Tensor,  # [B] int32, to fill
    pending: torch.Tensor,  # [B] int32, replaced by the newest token
    paths: torch.Tensor,  # [B, depth + 1] int32, to fill: accepted nodes, root first
    report: torch.Tensor,  # [B, TOKENS + depth + 1] int32, to fill
    counts: torch.Tensor | None = None,  # [B, V] int32: 2 is added for each token emitted (see `Processing.counts`)
    stops: torch.Tensor | None = None,  # [B, S] int32 stop tokens, padded with -1
) -> None:
    """Finds the accepted paths; updates lengths, pending tokens and counts."""
    sequences, depths = paths.shape
    if report.shape[1] < TOKENS + depths:
        raise ValueError(f"a report of {report.shape[1]} columns is too narrow for {depths} tokens")
    if chosen.numel() != children.shape[0] * sequences or tokens.numel() != chosen.numel():
        raise ValueError(f"{chosen.numel()} choices do not fit {children.shape[0]} nodes of {sequences} sequences")
    for name, tensor in (("counts", counts), ("stops", stops)):
        if tensor is not None:
            check_tensor(tensor, name, (sequences, tensor.shape[-1]), (torch.int32,), chosen.device)
    pdl, stop_count = use_pdl(chosen), 1 if stops is None else stops.shape[1]
    _accept_kernel[(sequences,)](
        chosen, tokens, children, active, lengths, lengths_before, pending, paths, report, counts, stops,
        sequences, paths.stride(0), report.stride(0), 0 if counts is None else counts.stride(0),
        0 if stops is None else stops.stride(0), depths - 1, children.shape[1], stop_count,
        WIDTH_P2=triton.next_power_of_2(children.shape[1]), STOPS_P2=triton.next_power_of_2(max(1, stop_count)),
        FIRST_TOKEN=TOKENS, PDL=pdl, num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
