"""The kernels' references: noise against published vectors and statistics, attention and commit against plain loops."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.cache.kv_cache import compact
from selfspec.kernels import philox as noise
from selfspec.kernels.paged_attention import paged_attention
from selfspec.kernels.philox import gumbel, philox, uniform, uniform_vocabulary

ROOT = Path(__file__).parents[1]

# Noise: known answers. Random123 publishes these for Philox 4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = {
    "zeros": (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    "ones": (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "digits of pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
known_answers = pytest.mark.parametrize(
    ("counter", "key", "words"), KNOWN_ANSWERS.values(), ids=[name.replace(" ", "_") for name in KNOWN_ANSWERS]
)


def signed(word: int, bits: int) -> int:
    """The integer that torch holds for these bits."""
    return word - (1 << bits) if word >> (bits - 1) else word


@known_answers
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    got = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(word.item() for word in got) == words


def test_philox_broadcasts() -> None:
    counters, keys, words = zip(*KNOWN_ANSWERS.values(), strict=True)
    got = philox(
        tuple(torch.tensor(column)[:, None] for column in zip(*counters, strict=True)),
        tuple(torch.tensor(column)[None] for column in zip(*keys, strict=True)),
    )
    assert torch.stack(got, dim=-1).shape == (3, 3, 4)
    assert [tuple(word[i, i].item() for word in got) for i in range(3)] == list(words)


@known_answers
def test_uniform_is_the_published_words_of_its_seed_copy_position_token_and_stream(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    block, position, copy, stream = counter
    seed = signed(key[1] << 32 | key[0], 64)
    tokens = 4 * block + torch.arange(4)
    got = uniform(torch.tensor([seed]), torch.tensor([copy]), torch.tensor([position]), tokens[None], stream)
    expected = (torch.tensor(words, dtype=torch.float64) + 0.5) / 2**32
    assert (got[0].double() - expected).abs().max() <= 2.0**-25 * 1.001


# Noise: the same number however it is asked for


ROWS = (
    torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 1 << 32]),  # seeds
    torch.tensor([0, 1, 0, 7, 0, 2]),  # copies
    torch.tensor([0, 1, 511, 2**20, 5, 5]),  # positions
)


@pytest.mark.parametrize("vocabulary", [1, 3, 4, 101, 128])
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_whole_vocabulary_equals_token_by_token(vocabulary: int, stream: int) -> None:
    tokens = torch.arange(vocabulary).expand(len(ROWS[0]), -1)
    assert torch.equal(uniform_vocabulary(*ROWS, vocabulary, stream), uniform(*ROWS, tokens, stream))


def test_order_of_rows_and_tokens_does_not_matter() -> None:
    rows, tokens = torch.randperm(6), torch.randperm(101)
    whole = uniform_vocabulary(*ROWS, 101, 0)
    got = uniform(*(column[rows] for column in ROWS), tokens.expand(6, -1), 0)
    assert torch.equal(got, whole[rows][:, tokens])


# Noise: statistics. Fixed seeds, so a p-value is the same in every run; 1e-3 is far below what these show.

DRAWS = 20_000
LINE = torch.arange(DRAWS)
ZERO = torch.zeros(DRAWS, dtype=torch.long)


def one_each(seeds: torch.Tensor, copies: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, stream: int = 0):
    return uniform(seeds, copies, positions, tokens[:, None], stream).squeeze(1)


ALONG: dict[str, Callable[[], torch.Tensor]] = {
    "tokens": lambda: uniform_vocabulary(torch.tensor([3]), torch.tensor([0]), torch.tensor([17]), DRAWS, 0)[0],
    "positions": lambda: one_each(ZERO + 3, ZERO, LINE, ZERO + 42),
    "copies": lambda: one_each(ZERO + 3, LINE, ZERO + 17, ZERO + 42),
    "seeds": lambda: one_each(LINE, ZERO, ZERO + 17, ZERO + 42),
    "high_seeds": lambda: one_each(LINE << 32, ZERO, ZERO + 17, ZERO + 42),
    "streams": lambda: torch.cat([one_each(ZERO[:1] + 3, ZERO[:1], ZERO[:1] + 17, ZERO[:1], s) for s in range(500)]),
}
along = pytest.mark.parametrize("axis", ALONG)


@along
def test_uniform_is_uniform_along(axis: str) -> None:
    assert scipy.stats.kstest(ALONG[axis]().double().numpy(), "uniform").pvalue > 1e-3


@along
def test_neighbours_are_independent_along(axis: str) -> None:
    cells = (ALONG[axis]() * 8).long()
    assert independence_pvalue(cells[:-1], cells[1:]) > 1e-3


@pytest.mark.parametrize("other", ["seed", "high_seed", "copy", "position", "stream"])
def test_tokens_of_two_rows_are_independent_where_they_differ_by(other: str) -> None:
    first = {"seed": 3, "copy": 0, "position": 17, "stream": 0}
    second = {**first, **({"seed": 3 + 2**32} if other == "high_seed" else {other: first[other] + 1})}
    a, b = (
        uniform_vocabulary(*(torch.tensor([row[x]]) for x in ("seed", "copy", "position")), DRAWS, row["stream"])[0]
        for row in (first, second)
    )
    assert independence_pvalue((a * 8).long(), (b * 8).long()) > 1e-3


def independence_pvalue(a: torch.Tensor, b: torch.Tensor) -> float:
    """Chi-square of the joint counts of two series of numbers 0..7."""
    return scipy.stats.chisquare((8 * a + b).bincount(minlength=64).numpy()).pvalue


@pytest.mark.parametrize("word", [0, 1, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_extreme_words_stay_inside_the_interval_and_give_finite_gumbels(
    word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "philox", lambda counter, key: (torch.full_like(counter[0] + key[0], word),) * 4)
    numbers = uniform_vocabulary(*ROWS, 5, 0)
    assert ((numbers > 0) & (numbers < 1)).all()
    assert gumbel(numbers).isfinite().all()


def test_gumbel_has_the_gumbel_distribution() -> None:
    assert scipy.stats.kstest(gumbel(ALONG["tokens"]()).double().numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("exponent", [-3, -12, -24, -33])
def test_gumbel_is_exact_where_it_is_large(exponent: int) -> None:
    got = gumbel(torch.tensor([2.0**exponent])).item()
    assert got == pytest.approx(-math.log(-math.log1p(-(2.0**exponent))), rel=1e-6)


def test_adding_gumbel_noise_and_taking_the_largest_draws_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0])
    numbers = uniform_vocabulary(ZERO + 5, ZERO, LINE, len(logits), 0)
    counts = (logits + gumbel(numbers)).argmax(-1).bincount(minlength=len(logits))
    expected = logits.double().softmax(-1) * DRAWS
    assert scipy.stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


# Attention

GARBAGE = 1e6  # finite, as a cache promises, but ruinous if any of it is attended to


def attend_by_loops(q, keys, values, page_table, mask, slots: int, scale: float) -> torch.Tensor:
    """Every row and head on its own, over the keys it sees, in float64."""
    batch, rows, heads, _ = q.shape
    page_size, kv_heads = keys.shape[1:3]
    out = torch.empty_like(q, dtype=torch.float64)
    for b in range(batch):
        for m in range(rows):
            seen = [s for s in range(slots) if mask is None or mask[b, m, s]]
            places = [(page_table[b, s // page_size], s % page_size) for s in seen]
            for h in range(heads):
                shared = h * kv_heads // heads
                k = torch.stack([keys[page, offset, shared] for page, offset in places]).double()
                v = torch.stack([values[page, offset, shared] for page, offset in places]).double()
                out[b, m, h] = ((k @ q[b, m, h].double()) * scale).softmax(0) @ v
    return out


def paged_case(batch: int, rows: int, kv_heads: int, group: int, slots: int, page_size: int, seed: int = 0):
    """Random queries, and pages in random order among which everything not in the first `slots` is garbage."""
    g = torch.Generator().manual_seed(seed)
    dim, needed = 6, -(-slots // page_size)
    total = batch * needed + 3
    page_table = torch.randperm(total, generator=g)[: batch * needed].view(batch, needed)
    pages = torch.full((2, total, page_size, kv_heads, dim), GARBAGE, dtype=torch.float64)
    for row in page_table:
        content = torch.randn(2, needed * page_size, kv_heads, dim, generator=g, dtype=torch.float64)
        content[:, slots:] = GARBAGE
        pages[:, row] = content.view(2, needed, page_size, kv_heads, dim)
    q = torch.randn(batch, rows, kv_heads * group, dim, generator=g, dtype=torch.float64)
    mask = torch.rand(batch, rows, slots, generator=g) < 0.5
    mask[:, :, 0] |= ~mask.any(-1)  # a row sees something: itself at least
    return q, pages[0], pages[1], page_table, mask, slots


CASES = {
    "one_row_one_head": (1, 1, 1, 1, 1, 4),
    "one_row_of_many_pages": (1, 1, 2, 2, 19, 4),
    "tree_of_rows": (1, 7, 2, 2, 11, 4),
    "grouped_heads": (1, 3, 2, 4, 9, 4),
    "a_head_for_each": (1, 3, 4, 1, 9, 4),
    "batch": (3, 4, 2, 3, 10, 4),
    "exactly_full_pages": (2, 2, 2, 2, 8, 4),
    "pages_of_64": (2, 3, 1, 2, 130, 64),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@cases
def test_attention_equals_a_loop_over_visible_slots(case: tuple[int, ...]) -> None:
    arguments = paged_case(*case)
    torch.testing.assert_close(paged_attention(*arguments, 0.3), attend_by_loops(*arguments, 0.3))


@cases
def test_attention_without_a_mask_sees_every_slot(case: tuple[int, ...]) -> None:
    q, keys, values, page_table, _, slots = paged_case(*case)
    arguments = (q, keys, values, page_table, None, slots, 0.3)
    torch.testing.assert_close(paged_attention(*arguments), attend_by_loops(*arguments))


@pytest.mark.parametrize("first", [0, 2])
def test_a_range_of_pages_is_the_table_of_those_pages(first: int) -> None:
    q, keys, values, _, mask, slots = paged_case(1, 5, 2, 2, 11, 4)
    keys, values = torch.randn_like(keys), torch.randn_like(values)
    table = torch.arange(first, first + 3)[None]
    got = paged_attention(q, keys, values, slice(first, first + 3), mask, slots, 0.3)
    torch.testing.assert_close(got, attend_by_loops(q, keys, values, table, mask, slots, 0.3))


@settings(max_examples=30, deadline=None)
@given(st.tuples(*(st.integers(1, top) for top in (3, 5, 3, 3, 13, 5))), st.integers(0, 2**32))
def test_attention_equals_a_loop_for_any_shape(case: tuple[int, ...], seed: int) -> None:
    arguments = paged_case(*case, seed=seed)
    torch.testing.assert_close(paged_attention(*arguments, 0.7), attend_by_loops(*arguments, 0.7))


def test_garbage_in_hidden_slots_changes_nothing() -> None:
    q, keys, values, page_table, mask, slots = paged_case(2, 3, 2, 2, 11, 4)
    mask[:, :, 5] = False
    before = paged_attention(q, keys, values, page_table, mask, slots, 0.3)
    for row in page_table:
        keys[row[5 // 4], 5 % 4] = GARBAGE
        values[row[5 // 4], 5 % 4] = -GARBAGE
    assert torch.equal(paged_attention(q, keys, values, page_table, mask, slots, 0.3), before)


def test_attention_keeps_float32_and_its_precision() -> None:
    q, keys, values, page_table, mask, slots = paged_case(2, 5, 2, 2, 40, 16)
    single = paged_attention(q.float(), keys.float(), values.float(), page_table, mask, slots, 0.3)
    assert single.dtype == torch.float32
    exact = attend_by_loops(q, keys, values, page_table, mask, slots, 0.3)
    torch.testing.assert_close(single.double(), exact, atol=1e-5, rtol=1e-5)


# Commit

LAYERS, PAGES, PAGE_SIZE = 3, 4, 4
SLOTS = PAGES * PAGE_SIZE


def random_pages() -> torch.Tensor:
    return torch.randn(LAYERS, PAGES, PAGE_SIZE, 2, 3, generator=torch.Generator().manual_seed(0))


def moved(pages: torch.Tensor, source: list[int], target: list[int]) -> torch.Tensor:
    """What compaction means: all entries are read, then all are written."""
    after = pages.clone()
    for layer in range(LAYERS):
        for s, t in zip(source, target, strict=True):
            after[layer, t // PAGE_SIZE, t % PAGE_SIZE] = pages[layer, s // PAGE_SIZE, s % PAGE_SIZE]
    return after


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([], []),
        ([5], [2]),
        ([4, 5, 6], [3, 4, 5]),
        ([3, 4, 5], [4, 5, 6]),
        ([1, 2], [2, 1]),
        ([2, 7, 13], [1, 2, 3]),
        ([9, 9], [0, 15]),
    ],
    ids=["nothing", "one", "shift_down", "shift_up", "swap", "tree_path_over_pages", "one_to_two_places"],
)
def test_compact_reads_everything_before_it_writes(source: list[int], target: list[int]) -> None:
    pages = random_pages()
    expected = moved(pages, source, target)
    compact(pages, torch.tensor(source, dtype=torch.long), torch.tensor(target, dtype=torch.long))
    assert torch.equal(pages, expected)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_compact_is_read_all_then_write_all_for_any_moves(data: st.DataObject) -> None:
    target = data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1))
    source = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=len(target), max_size=len(target)))
    pages = random_pages()
    expected = moved(pages, source, target)
    compact(pages, torch.tensor(source), torch.tensor(target))
    assert torch.equal(pages, expected)


# Imports


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_selfspec_and_every_kernel_file_import_where_triton_is_absent() -> None:
    modules = ["selfspec", *(f"selfspec.kernels.{path.stem}" for path in sorted((ROOT / "kernels").glob("*.py")))]
    assert len(modules) > 3
    script = f"""
import importlib, importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, Absent())
for name in {modules!r}:
    importlib.import_module(name)
assert "triton" not in sys.modules
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr


def test_importing_selfspec_does_not_import_triton() -> None:
    result = run_python("import selfspec, sys; print('triton' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr
