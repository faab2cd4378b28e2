"""Tree attention over the paged cache, one layer of two models; the library is SDPA over contiguous keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.ops import Case
from selfspec.kernels.tree_attention import (
    counters_size,
    ranges_for,
    tree_attention,
    tree_attention_reference,
    workspace_size,
)

MODELS = {"8B": (32, 8, 128), "SmolLM2-135M": (9, 3, 64)}  # query heads, key-value heads, head size


def cases(device: torch.device | str) -> list[Case]:
    """All contexts and row counts; the grid is planned for 32768 positions, as a captured step would be."""
    sizes = [(model, rows, context) for model in MODELS for rows in (1, 16, 64) for context in (512, 2048, 32768)]
    return [case(*size, torch.device(device)) for size in sizes]


def case(model: str, rows: int, context: int, device: torch.device) -> Case:
    heads, kv_heads, dim = MODELS[model]
    pages = context // 64 + 2
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    q, keys, values = normal(rows, heads * dim), normal(pages, 64, kv_heads, dim), normal(pages, 64, kv_heads, dim)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)[None]
    lengths = torch.tensor([context - rows], dtype=torch.int32, device=device)
    paths, depths = (tensor.to(device) for tensor in wide_tree(rows))
    paths = paths[None]
    ranges, scale = ranges_for(32768), dim**-0.5
    out = torch.empty_like(q)
    workspace = torch.empty(workspace_size(1, rows, heads, dim, ranges), device=device)
    counters = torch.zeros(counters_size(1, rows, kv_heads), dtype=torch.int32, device=device)
    cache = (keys, values, table, lengths)

    def run() -> torch.Tensor:
        spaces = (out, workspace, counters)
        return tree_attention(q, *cache, paths, depths, *spaces, ranges=ranges, window=None, scale=scale)

    def truth() -> tuple[torch.Tensor, torch.Tensor]:
        some = slice(0, 2)  # two rows suffice to measure the error
        doubled = (q[some].double(), keys.double(), values.double(), table, lengths, paths[:, some], depths[some])
        return run()[some], tree_attention_reference(*doubled, None, scale)

    k, v = (cached.flatten(0, 1)[None, :context].transpose(1, 2).contiguous() for cached in (keys, values))
    rows_of_heads = q.view(1, rows, heads, dim).transpose(1, 2).contiguous()

    def library() -> torch.Tensor:
        return F.scaled_dot_product_attention(rows_of_heads, k, v, scale=scale, enable_gqa=True)

    moved = 2 * context * kv_heads * dim * keys.element_size()
    return Case(f"tree attention {model} M={rows} context={context}", run, moved, truth, library)


def wide_tree(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Paths and depths of a tree in which every node has four children, level by level."""
    paths = [[0]]
    for node in range(1, nodes):
        paths.append([*paths[(node - 1) // 4], node])
    deepest = len(paths[-1])
    padded = torch.tensor([path + [0] * (deepest - len(path)) for path in paths], dtype=torch.int32)
    return padded, torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32)
