"""Cases for tests of tree attention: sequences in a paged cache, all committed or with their last tokens in a tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.kernels import tree_attention as op


@dataclass
class Launch:
    """The tensors of one launch."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    paths: torch.Tensor
    depths: torch.Tensor

    def run(
        self, window: int | None = None, ranges: int | None = None, out: torch.Tensor | None = None, **options: int
    ) -> torch.Tensor:
        """Launches with NaN in workspace and output; the counters must be 0 afterwards."""
        batch, rows = self.lengths.shape[0], self.depths.shape[0]
        kv_heads, dim = self.keys.shape[2:]
        heads = self.q.shape[1] // dim
        if ranges is None:
            ranges = op.ranges_for(self.page_table.shape[1] * 64)
        size = op.workspace_size(batch, rows, heads, dim, ranges)
        workspace = torch.full((size,), float("nan"), device=self.q.device)
        counters = torch.zeros(op.counters_size(batch, rows, kv_heads), dtype=torch.int32, device=self.q.device)
        out = torch.full_like(self.q, float("nan")) if out is None else out
        given = (self.q, self.keys, self.values, self.page_table, self.lengths, self.paths, self.depths)
        op.tree_attention(*given, out, workspace, counters, ranges=ranges, window=window, scale=dim**-0.5, **options)
        assert not counters.any()
        return out

    def expected(self, window: int | None = None) -> torch.Tensor:
        """The reference in float64."""
        q, keys, values = (tensor.double() for tensor in (self.q, self.keys, self.values))
        table, scale = self.page_table, self.keys.shape[3] ** -0.5
        return op.tree_attention_reference(q, keys, values, table, self.lengths, self.paths, self.depths, window, scale)


@dataclass
class Text:
    """Queries, keys and values of every position of one sequence."""

    q: torch.Tensor  # [T, Hq * D]
    k: torch.Tensor  # [T, Hkv, D]
    v: torch.Tensor  # [T, Hkv, D]

    @classmethod
    def random(
        cls, length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
    ) -> Text:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        return cls(2 * normal(length, heads * dim), normal(length, kv_heads, dim), normal(length, kv_heads, dim))

    def plainly(self, positions: list[int], seed: int = 0) -> Launch:
        """Plain decoding at several positions, one sequence per position."""
        root = Tree(torch.zeros(1, 1), torch.zeros(1))
        return lay([self] * len(positions), positions, root, [[position] for position in positions], seed)


@dataclass
class Tree:
    """Paths and depths of the nodes of a draft tree."""

    paths: torch.Tensor  # [M, W]
    depths: torch.Tensor  # [M]

    @classmethod
    def random(cls, nodes: int, deepest: int, seed: int = 0) -> Tree:
        """Parents come before children; entries past a node's depth in its path are out of range."""
        generator = torch.Generator().manual_seed(seed)
        paths, depths = torch.full((nodes, deepest + 1), 10**6), torch.zeros(nodes, dtype=torch.int64)
        for node in range(nodes):
            if node:
                parent = int(torch.randint(max(0, node - 4), node, (1,), generator=generator))
                parent = parent if depths[parent] < deepest else 0
                depths[node] = depths[parent] + 1
                paths[node, : depths[node]] = paths[parent, : depths[node]]
            paths[node, depths[node]] = node
        return cls(paths, depths)

    def deepest_path(self) -> list[int]:
        node = int(self.depths.argmax())
        return self.paths[node, : self.depths[node] + 1].tolist()


def lay(texts: list[Text], lengths: list[int], tree: Tree, tokens: list[list[int]], seed: int = 0) -> Launch:
    """Each text committed up to its length on random pages; node m has the key of position `tokens[b][m]`, or with -1
    random ones. Every slot that no query may read is NaN, and unused page table entries are out of range."""
    generator = torch.Generator().manual_seed(seed)
    k, device = texts[0].k, texts[0].k.device
    rows = len(tree.depths)
    needed = [-(-(length + rows) // 64) for length in lengths]
    pages = sum(needed) + 3
    order = torch.randperm(pages, generator=generator)
    keys = torch.full((pages, 64, *k.shape[1:]), float("nan"), dtype=k.dtype, device=device)
    values = keys.clone()
    table = torch.full((len(lengths), max(needed) + 1), 10**8)
    q = torch.randn(len(lengths) * rows, texts[0].q.shape[1], generator=generator).to(device, k.dtype)
    for b, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        mine, order = order[: needed[b]], order[needed[b] :]
        table[b, : needed[b]] = mine
        committed, nodes = torch.arange(length), length + torch.arange(rows)
        for pool, source in ((keys, text.k), (values, text.v)):
            pool[mine[committed // 64], committed % 64] = source[:length]
            noise = torch.randn(rows, *k.shape[1:], generator=generator).to(device, k.dtype)
            pool[mine[nodes // 64], nodes % 64] = noise
        for m, position in enumerate(tokens[b]):
            if position >= 0:
                page, slot = mine[(length + m) // 64], (length + m) % 64
                keys[page, slot], values[page, slot] = text.k[position], text.v[position]
                q[m * len(lengths) + b] = text.q[position]
    paths = tree.paths.expand(len(lengths), -1, -1)
    ints = [tensor.to(device, torch.int32) for tensor in (table, torch.tensor(lengths), paths, tree.depths)]
    return Launch(q, keys, values, *ints)


def on_path(tree: Tree, length: int) -> list[int]:
    """The position of each node of a tree whose deepest path continues the text; -1 for other nodes."""
    tokens = [-1] * len(tree.depths)
    for depth, node in enumerate(tree.deepest_path()):
        tokens[node] = length + depth
    return tokens
