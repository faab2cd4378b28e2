"""Tree attention on a CUDA device: the same bits drafted and committed, for any tile, batch, launch and replay."""

from __future__ import annotations

import pytest
import torch

from selfspec.kernels import tree_attention as op
from tests.tree_attention_cases import Text, Tree, lay, on_path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Query heads, key-value heads, head size, dtype, window.
SHAPES = {
    "8b": (32, 8, 128, torch.bfloat16, None),
    "smollm2": (9, 3, 64, torch.float16, None),
    "gemma": (4, 1, 256, torch.bfloat16, 512),
    "phi": (4, 4, 96, torch.float16, None),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


def text_of(shape: str, length: int, seed: int = 0) -> tuple[Text, int | None]:
    *sizes, window = SHAPES[shape]
    return Text.random(length, *sizes, device="cuda", seed=seed), window


@shapes
def test_trees_and_plain_decoding_give_the_same_bits(shape: str) -> None:
    text, window = text_of(shape, 8400)
    tree = Tree.random(64, 20)
    path = tree.deepest_path()
    assert len(path) > 12
    for length in (0, 1, 50, 63, 64, 115, 127, 128, 180, 1000, 2048, 2100, 4150, 8250):
        drafted = lay([text], [length], tree, [on_path(tree, length)], seed=length).run(window)
        plain = text.plainly([length + depth for depth in range(len(path))], seed=1)
        assert torch.equal(drafted[path], plain.run(window)), length
        alone = torch.cat([text.plainly([length + depth]).run(window) for depth in (0, 5, len(path) - 1)])
        assert torch.equal(drafted[[path[0], path[5], path[-1]]], alone), length


@shapes
def test_tiles_launches_and_repetition_keep_the_bits(shape: str) -> None:
    text, window = text_of(shape, 11600)
    for length in (100, 250, 2300, 11400):
        for nodes in (3, 16, 64):
            launch = lay([text], [length], Tree.random(nodes, 12), [[-1] * nodes])
            expected = launch.run(window, row_tile=16)
            packs = {1, 16 // (text.q.shape[1] // text.k[0].numel())}  # nodes alone, and as many as fill a tile
            choices = [
                {"row_tile": tile, "separate": separate, "pack": pack}
                for tile in (16, 64)
                for separate in (False, True)
                for pack in packs
            ]
            choices += [{"per_unit": count, "separate": separate} for count in (1, 3) for separate in (False, True)]
            for options in [*choices, {"tickets": True}, {"tickets": False}, {"ranges": op.ranges_for(32768)}]:
                assert torch.equal(launch.run(window, **options), expected), (length, nodes, options)
    if shape in ("8b", "smollm2"):
        assert all(torch.equal(launch.run(window, per_unit=per_unit), expected) for per_unit in [None, 1] * 100)


@shapes
def test_rows_match_the_reference(shape: str) -> None:
    text, window = text_of(shape, 1500)
    launch = lay([text, text], [1200, 90], Tree.random(16, 9), [[-1] * 16] * 2)
    expected = launch.expected(window)
    error = (launch.run(window).double() - expected).norm() / expected.norm()
    assert error < (4e-3 if launch.q.dtype == torch.bfloat16 else 6e-4)


@shapes
def test_a_sequence_keeps_its_bits_in_any_batch(shape: str) -> None:
    text, window = text_of(shape, 3000)
    other, _ = text_of(shape, 3000, seed=1)
    tree = Tree.random(64, 9)
    path, tokens, random = tree.deepest_path(), on_path(tree, 1500), [-1] * 64
    alone = lay([text], [1500], tree, [tokens]).run(window)[path]
    batch = lay([other, text, other, other], [2900, 1500, 3, 800], tree, [random, tokens, random, random], seed=5)
    for per_unit in (None, 1, 3):
        assert torch.equal(batch.run(window, per_unit=per_unit).view(64, 4, -1)[path, 1], alone), per_unit


@pytest.mark.parametrize(("tickets", "per_unit"), [(False, None), (True, None), (True, 2)])
def test_a_graph_can_be_replayed_as_the_text_grows(tickets: bool, per_unit: int | None) -> None:
    text, _ = text_of("8b", 700)
    launch = text.plainly([600])
    ranges = op.ranges_for(2048)
    workspace = torch.full((op.workspace_size(1, 1, 32, 128, ranges),), float("nan"), device="cuda")
    counters = torch.zeros(op.counters_size(1, 1, 8), dtype=torch.int32, device="cuda")
    out = torch.empty_like(launch.q)
    tensors = (launch.q, launch.keys, launch.values, launch.page_table, launch.lengths, launch.paths, launch.depths)

    def attend() -> None:
        for _ in range(3):  # one layer after the other, in the same workspace
            op.tree_attention(
                *tensors, out, workspace, counters, ranges=ranges, window=None, scale=128**-0.5, per_unit=per_unit,
                tickets=tickets,
            )  # fmt: skip

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for position in (600, 5, 300, 127, 64, 600):
        launch.lengths.fill_(position)
        launch.q.copy_(text.q[position : position + 1])
        out.fill_(float("nan"))
        workspace.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, text.plainly([position]).run()), position
        assert not counters.any()
