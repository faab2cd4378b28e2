"""Acceptance: finds for each sequence the longest path of its draft tree along the model's choices.

Reads the model's choice at every node (drawn before the walk), the nodes' tokens and the tree. Writes for each
sequence the accepted path and a report for the host, and updates committed length, newest token, text and token counts.
`kv_compaction` moves keys and values. A node is reached if its parent is reached and the choice after the parent is the
node's token; no node is reached after a stop token, or after the choice -1 (no finite logit), which is reported as it
is. If a copied node and one drafted by the exit are reached at the last depth, the latter is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels.noise import check_tensor
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton

# Report columns: tokens emitted; last node; deepest reached node drafted by the exit (or root); first token.
COUNT, LAST, EXIT_LAST, TOKENS = 0, 1, 2, 3


@dataclass(frozen=True)
class TreeTensors:
    """The trees of n nodes and the root of B sequences, as kernels read them; those of a plan without a beam are the
    same for all sequences, with a stride of 0."""

    parents: torch.Tensor  # [B, n + 1] int32; the root's is 0
    ancestors: torch.Tensor  # [B, n + 1] int64: bit j - 1 of entry i is set if node j is i or an ancestor of i
    depths: torch.Tensor  # [n + 1] int32
    paths: torch.Tensor  # [B, n + 1, depth + 1] int32: nodes from the root to each node; past its depth 0
    copied: int  # nodes 1 to `copied` are copied, the others drafted by the exit


def accept_reference(
    chosen: torch.Tensor,  # [(n + 1) * B], node-major
    tokens: torch.Tensor,  # [(n + 1) * B]
    parents: list[int],  # of nodes 1..n
    sequences: int,
    stops: torch.Tensor | None = None,  # [B, S], padded with -1
) -> list[list[list[int]]]:
    """For each sequence the paths to all reached nodes (nodes, root first), in the order of their last nodes."""
    walks = []
    for sequence in range(sequences):
        paths = {0: [0]}
        for node, parent in enumerate(parents, start=1):
            choice = int(chosen[parent * sequences + sequence])
            ends = choice < 0 or (stops is not None and choice in stops[sequence].tolist())
            if parent in paths and not ends and int(tokens[node * sequences + sequence]) == choice:
                paths[node] = [*paths[parent], node]
        walks.append(list(paths.values()))
    return walks


@jit(
    do_not_specialize=[
        "sequences",
        "nodes",
        "copied",
        "parents_stride",
        "ancestors_stride",
        "trees_stride",
        "tree_stride",
        "path_stride",
        "report_stride",
        "stop_count",
    ]
)
def _accept_kernel(
    chosen, tokens, parents, ancestors, depths, tree_paths, active, lengths, lengths_before, newest_tokens, paths,
    report, texts, counts, stops,
    sequences, nodes, copied, parents_stride, ancestors_stride, trees_stride, tree_stride, path_stride, report_stride, 
    text_stride, counts_stride, stops_stride, stop_count,
    NODES_P2: tl.constexpr, DEPTHS_P2: tl.constexpr, STOPS_P2: tl.constexpr, FIRST_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per sequence; all nodes at once. A node is reached if the bits of all its ancestors are set in
    `followed`."""
    release(PDL)
    sequence = tl.program_id(0)
    node = tl.arange(0, NODES_P2)
    parent = tl.load(parents + sequence * parents_stride + node, mask=node < nodes, other=0)
    above = tl.load(ancestors + sequence * ancestors_stride + node, mask=node < nodes, other=0)
    depth = tl.load(depths + node, mask=node < nodes, other=0)
    wait(PDL)
    state = tl.load(active + sequence)
    choice = tl.load(chosen + parent * sequences + sequence).to(tl.int32)
    drafted = tl.load(tokens + node * sequences + sequence, mask=node < nodes, other=-1)
    follows = (drafted == choice) & (choice >= 0)
    if stops is not None:
        place = tl.arange(0, STOPS_P2)
        stop = tl.load(stops + sequence * stops_stride + place, mask=place < stop_count, other=-1)
        follows = follows & (tl.max((choice[:, None] == stop[None, :]).to(tl.int32), 1) == 0)
    follows = follows & (node > 0) & (node < nodes) & (state > 1)
    followed = tl.sum(follows.to(tl.int64) << tl.maximum(node - 1, 0).to(tl.int64), 0)
    reached = (node < nodes) & ((above & followed) == above)
    order = depth * 64 + node  # 64 > MAX_NODES
    last = tl.max(tl.where(reached, order, 0), 0) % 64
    exit_last = tl.max(tl.where(reached & ((node == 0) | (node > copied)), order, 0), 0) % 64
    count = tl.where(state != 0, tl.load(depths + last) + 1, 0)

    place = tl.arange(0, DEPTHS_P2)
    inside = place < count
    path = tl.load(tree_paths + sequence * trees_stride + last * tree_stride + place, mask=inside, other=0)
    emitted = tl.load(chosen + path * sequences + sequence, mask=inside, other=-1).to(tl.int32)
    length = tl.load(lengths + sequence)
    at = report + sequence * report_stride
    tl.store(at + FIRST_TOKEN + place, emitted, mask=inside)
    tl.store(paths + sequence * path_stride + place, path, mask=inside)
    if texts is not None:
        tl.store(texts + sequence.to(tl.int64) * text_stride + length + 1 + place, emitted, mask=inside)
    if counts is not None:  # integer additions commute: their order changes no bit
        entry = counts + sequence.to(tl.int64) * counts_stride + tl.maximum(emitted, 0)
        tl.atomic_add(entry, 2, mask=inside & (emitted >= 0), sem="relaxed")
    newest = tl.sum(tl.where(place == count - 1, emitted, 0), 0)
    tl.store(newest_tokens + sequence, newest, mask=count > 0)
    tl.store(lengths_before + sequence, length)
    tl.store(lengths + sequence, length + count)
    tl.store(at, count)
    tl.store(at + 1, last)
    tl.store(at + 2, exit_last)


def accept(
    chosen: torch.Tensor,  # [(n + 1) * B] int32 or int64: the model's choice at every node, node-major
    tokens: torch.Tensor,  # [(n + 1) * B] int32: the nodes' tokens
    tree: TreeTensors,
    active: torch.Tensor,  # [B] int32: 0 idle, nothing changes; 1 emits only the root's choice; 2 accepts nodes
    lengths: torch.Tensor,  # [B] int32, advanced by the number of accepted tokens
    lengths_before: torch.Tensor,  # [B] int32, to fill
    newest_tokens: torch.Tensor,  # [B] int32, replaced by the newest token
    paths: torch.Tensor,  # [B, depth + 1] int32, to fill: accepted nodes, root first
    report: torch.Tensor,  # [B, TOKENS + depth + 1] int32, to fill
    texts: torch.Tensor | None = None,  # [B, T] int32: tokens by position, to which the emitted ones are added
    counts: torch.Tensor | None = None,  # [B, V] int32: 2 is added for each token emitted (see `Processing.counts`)
    stops: torch.Tensor | None = None,  # [B, S] int32 stop tokens, padded with -1
) -> None:
    """Finds the accepted paths; updates lengths, newest tokens, texts and counts."""
    (sequences, depths), nodes = paths.shape, len(tree.depths)
    if report.shape[1] < TOKENS + depths or tree.paths.shape[2] > depths:
        raise ValueError(f"paths of {depths} nodes or a report of {report.shape[1]} columns are too narrow")
    if chosen.numel() != nodes * sequences or tokens.numel() != chosen.numel():
        raise ValueError(f"{chosen.numel()} choices do not fit {nodes} nodes of {sequences} sequences")
    for name, tensor in (("texts", texts), ("counts", counts), ("stops", stops)):
        if tensor is not None:
            check_tensor(tensor, name, (sequences, tensor.shape[-1]), (torch.int32,), chosen.device)
    stop_count = 1 if stops is None else stops.shape[1]
    strides = (0 if tensor is None else tensor.stride(0) for tensor in (texts, counts, stops))
    _accept_kernel[(sequences,)](
        chosen, tokens, tree.parents, tree.ancestors, tree.depths, tree.paths, active, lengths, lengths_before,
        newest_tokens, paths, report, texts, counts, stops,
        sequences, nodes, tree.copied, tree.parents.stride(0), tree.ancestors.stride(0), *tree.paths.stride()[:2],
        paths.stride(0), report.stride(0), *strides, stop_count,
        NODES_P2=triton.next_power_of_2(nodes), DEPTHS_P2=triton.next_power_of_2(tree.paths.shape[2]),
        STOPS_P2=triton.next_power_of_2(max(1, stop_count)), FIRST_TOKEN=TOKENS, num_warps=1,
        **pdl_options(chosen),
    )  # fmt: skip
