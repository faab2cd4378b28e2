"""Tree attention in Triton's interpreter: matches the reference, and its bits depend on positions and keys alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.kernels import tree_attention as op
from selfspec.kernels.tree_attention_common import range_of, range_start, split_point
from tests.tree_attention_cases import Launch, Text, Tree, lay, on_path

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/test_gpu_kernel_tree_attention.py runs instead"
)

# float16 where bits are compared: the interpreter multiplies float32 with BLAS, whose rows depend on their number.
HALF = torch.float16


def drafted(text: Text, length: int, tree: Tree, seed: int = 0) -> Launch:
    """The text committed up to `length`, and its next tokens on the deepest path of a tree."""
    return lay([text], [length], tree, [on_path(tree, length)], seed)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-6 if actual.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (4, 2, 64, HALF),
        (3, 1, 96, torch.float32),
        (16, 1, 16, torch.float32),
        (2, 1, 256, HALF),
    ],
)
def test_head_sizes_and_groups_match_the_reference(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    text = Text.random(200, heads, kv_heads, dim, dtype)
    launch = lay([text, text], [0, 190], Tree.random(4, 3), [[-1] * 4] * 2)
    assert_close(launch.run(), launch.expected())


def test_every_length_matches_the_reference() -> None:
    lengths = [0, 1, 62, 63, 64, 66, 127, 128, 191, 2113]
    launch = Text.random(2120, 2, 1, 16, torch.float32).plainly(lengths)
    assert_close(launch.run(), launch.expected())


@pytest.mark.parametrize("window", [1, 100, 513])
def test_windows_match_the_reference(window: int) -> None:
    text = Text.random(700, 2, 1, 16, torch.float32)
    tree = Tree.random(5, 3)
    launch = lay([text, text], [68, 650], tree, [[-1] * 5] * 2)
    assert_close(launch.run(window), launch.expected(window))


@pytest.mark.parametrize(("length", "window"), [(0, None), (122, 70), (1150, None)])
def test_a_drafted_key_gives_the_bits_of_a_committed_one(length: int, window: int | None) -> None:
    text = Text.random(1200, 3, 1, 16, HALF)
    tree = Tree.random(12, 6)
    path = tree.deepest_path()
    assert len(path) == 7 and path != list(range(7))
    actual = drafted(text, length, tree, seed=1).run(window)[path]
    assert torch.equal(actual, text.plainly([length + depth for depth in range(7)], seed=2).run(window))


@pytest.mark.parametrize(("length", "window"), [(100, None), (226, 100)])
def test_the_deepest_chain_gives_the_bits_of_committed_text(length: int, window: int | None) -> None:
    text = Text.random(300, 1, 1, 16, HALF)
    chain = Tree(torch.arange(64).expand(64, 64), torch.arange(64))
    actual = drafted(text, length, chain).run(window)
    some = [0, 27, 28, 63]
    assert torch.equal(actual[some], text.plainly([length + depth for depth in some]).run(window))


@settings(max_examples=5)
@given(
    st.integers(0, 400),
    st.integers(1, 9),
    st.integers(0, 5),
    st.sampled_from([None, 90]),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 99),
)
def test_any_tree_gives_the_bits_of_committed_text(
    length: int, nodes: int, deepest: int, window: int | None, pack: int, seed: int
) -> None:
    text = Text.random(500, 4, 2, 16, HALF, seed=seed)
    tree = Tree.random(nodes, max(deepest, 1), seed)
    path = tree.deepest_path()
    actual = drafted(text, length, tree, seed).run(window, pack=pack)[path]
    assert torch.equal(actual, text.plainly([length + depth for depth in range(len(path))]).run(window))


def test_a_sequence_keeps_its_bits_in_any_batch_and_on_any_pages() -> None:
    text, other = (Text.random(400, 3, 1, 16, HALF, seed=seed) for seed in (1, 2))
    tree = Tree.random(6, 4)
    tokens = on_path(tree, 195)
    alone = lay([text], [195], tree, [tokens], seed=3).run()[tree.deepest_path()]
    together = lay([other, text, other], [390, 195, 7], tree, [[-1] * 6, tokens, [-1] * 6], seed=4)
    for pack in (1, 5):
        assert torch.equal(together.run(pack=pack).view(6, 3, -1)[tree.deepest_path(), 1], alone)


@pytest.mark.parametrize(("length", "window"), [(200, None), (250, 70)])  # the nodes have one split point, or several
def test_row_tiles_packs_and_launches_do_not_change_bits(length: int, window: int | None) -> None:
    text = Text.random(400, 3, 1, 16, HALF)
    launch = drafted(text, length, Tree.random(9, 7))
    expected = launch.run(window, row_tile=16, pack=1)
    tiles, separate, pack = {"row_tile": 64}, {"separate": True}, {"pack": 5}
    one_range, several_ranges = {"per_unit": 99}, {"per_unit": 1}  # of a prefix program
    choices = tiles | {"ranges": 9}, pack, separate, separate | tiles | pack, one_range, one_range | separate
    for options in (*choices, several_ranges, several_ranges | separate):
        assert torch.equal(launch.run(window, **options), expected), options


@pytest.mark.parametrize(("window", "pack"), [(None, 5), (700, 1)])
def test_programs_that_take_whole_bundles_do_not_change_bits(window: int | None, pack: int) -> None:
    """Over three bundles."""
    launch = drafted(Text.random(1300, 3, 1, 16, HALF), 1150, Tree.random(9, 7))
    expected = launch.run(window, row_tile=16, separate=False)
    assert torch.equal(launch.run(window, row_tile=64, separate=True, pack=pack), expected)


@pytest.mark.parametrize(("length", "window"), [(12600, None), (12600, 3200), (10400, 2500), (2700, 700)])
def test_ranges_are_merged_in_the_same_order_in_one_launch_and_in_two(
    length: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, as rounding to half the bits hides most orders; so tiles must be alike, see HALF, and numpy, which
    interprets products, must not leave them to a library that sums by where its operands lie, as it does on AVX-512."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ij,jk->ik", a.astype(dtype), b.astype(dtype)))
    launch = lay([Text.random(length, 3, 1, 16, torch.float32)], [length], Tree.random(3, 2), [[-1] * 3])
    together = launch.run(window, row_tile=16, pack=1, separate=False)
    assert torch.equal(launch.run(window, row_tile=16, pack=1, separate=True), together)
    assert_close(together, launch.expected(window))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, which interprets the product
@pytest.mark.parametrize("pack", [1, 5])
def test_values_that_a_node_does_not_see_may_be_infinite(pack: int) -> None:
    chain = Tree(torch.arange(4).expand(4, 4), torch.arange(4))
    for length in (30, 200, 250):
        launch = drafted(Text.random(260, 3, 1, 16, HALF), length, chain)
        expected = launch.run(pack=pack)
        slot = length + 3
        launch.values[launch.page_table[0, slot // 64], slot % 64] = torch.inf
        actual = launch.run(pack=pack)
        assert torch.equal(actual[:3], expected[:3]) and not actual[3].isfinite().any(), length


@pytest.mark.parametrize(("pack", "tickets"), [(1, False), (5, True)])
def test_counters_serve_one_launch_after_the_other(pack: int, tickets: bool) -> None:
    launch = drafted(Text.random(400, 3, 1, 16, HALF), 250, Tree.random(7, 3))
    ranges = op.ranges_for(400)
    workspace = torch.zeros(op.workspace_size(1, 7, 3, 16, ranges))
    counters = torch.zeros(op.counters_size(1, 7, 1), dtype=torch.int32)
    tensors = (launch.q, launch.keys, launch.values, launch.page_table, launch.lengths, launch.paths, launch.depths)
    first, second = (torch.empty_like(launch.q) for _ in range(2))
    for out in (first, second):
        workspace.fill_(float("nan"))  # what the first launch left may not serve the second
        op.tree_attention(
            *tensors, out, workspace, counters, ranges=ranges, window=None, scale=0.25, pack=pack, tickets=tickets
        )
        assert not counters.any()
    assert torch.equal(first, second)
    torch.testing.assert_close(first.double(), launch.expected(), atol=2e-3, rtol=2e-3)


def test_strided_rows_and_heads_are_supported() -> None:
    launch = drafted(Text.random(300, 4, 2, 16, HALF), 200, Tree.random(3, 2))
    expected = launch.run()
    wide_q, wide_out = torch.randn(3, 100).to(HALF), torch.full((3, 80), 7.0, dtype=HALF)
    wide_q[:, 20:84] = launch.q
    wide_keys, wide_values = (torch.randn(*launch.keys.shape[:2], 5, 48).to(HALF) for _ in range(2))
    wide_keys[:, :, 1:3, 16:32], wide_values[:, :, 1:3, 16:32] = launch.keys, launch.values
    keys, values = wide_keys[:, :, 1:3, 16:32], wide_values[:, :, 1:3, 16:32]
    actual = replace(launch, q=wide_q[:, 20:84], keys=keys, values=values).run(out=wide_out[:, 8:72])
    assert torch.equal(actual, expected)
    assert (wide_out[:, :8] == 7).all() and (wide_out[:, 72:] == 7).all()


def test_a_context_beyond_the_planned_ranges_gives_nan() -> None:
    launch = Text.random(400, 2, 1, 16, HALF).plainly([130, 390])
    out = launch.run(ranges=2)
    assert torch.equal(out[:1], launch.run()[:1])
    assert out[1].isnan().all()


def test_ranges_tile_the_positions_in_whole_pages() -> None:
    starts = [range_start(index) for index in range(40)]
    assert starts[0] == 0 and all(start % 64 == 0 for start in starts)
    for index, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        assert start < end
        assert range_of(start) == range_of(end - 1) == index


def test_the_split_leaves_a_tail_of_at_most_127_keys_behind_the_deepest_root() -> None:
    for position in range(-1, 1000):
        split = split_point(position)
        assert max(split, 0) == 64 * (max(0, position - op.MAX_NODES) // 64)
        assert split + op.MAX_NODES <= max(position, 0)
        assert position - max(split, 0) < 127
    assert [op.ranges_for(context) for context in (0, 1, 127, 128, 256, 257, 1088, 5000)] == [0, 0, 0, 1, 2, 2, 8, 22]


def test_a_unit_without_prefix_programs_is_refused() -> None:
    launch = drafted(Text.random(100, 2, 1, 16, HALF), 60, Tree.random(4, 2))
    for per_unit in (0, -1):
        with pytest.raises(ValueError, match="per_unit must be at least 1"):
            launch.run(per_unit=per_unit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 32, dtype=HALF)}, "q must have shape"),
        ({"q": torch.zeros(4, 40, dtype=HALF)}, "q must be"),
        ({"q": torch.zeros(4, 32)}, "share one of"),
        ({"keys": torch.zeros(9, 32, 1, 16, dtype=HALF)}, "keys must be"),
        ({"values": torch.zeros(9, 64, 1, 16, dtype=HALF)}, "values must have"),
        ({"paths": torch.zeros(1, 4, 65, dtype=torch.int32)}, "paths must be"),
        ({"paths": torch.zeros(1, 4, 2)}, "int32"),
        ({"lengths": torch.zeros(1, dtype=torch.int64)}, "lengths must be"),
        ({"page_table": torch.zeros(2, 5, dtype=torch.int32)}, "page_table must have shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    launch = drafted(Text.random(100, 2, 1, 16, HALF), 60, Tree.random(4, 2))
    with pytest.raises(ValueError, match=message):
        replace(launch, **change).run()


def test_options_and_workspaces_that_do_not_fit_are_refused() -> None:
    launch = drafted(Text.random(200, 2, 1, 16, HALF), 160, Tree.random(4, 2))
    for options in ({"window": 0}, {"row_tile": 32}, {"pack": 3}):
        with pytest.raises(ValueError, match="|".join(options)):
            launch.run(**options)
    tensors = (launch.q, launch.keys, launch.values, launch.page_table, launch.lengths, launch.paths, launch.depths)
    workspace, counters = torch.zeros(op.workspace_size(1, 4, 2, 16, 1)), torch.zeros(5, dtype=torch.int32)
    for too_small in ((workspace[1:], counters), (workspace, counters[1:])):
        with pytest.raises(ValueError, match="must have shape"):
            op.tree_attention(*tensors, torch.empty_like(launch.q), *too_small, ranges=1, window=None, scale=0.25)
