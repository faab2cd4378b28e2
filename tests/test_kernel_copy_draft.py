"""Copied drafts in Triton's interpreter and in PyTorch, against a naive search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.kernels import copy_draft as module
from selfspec.kernels.copy_draft import LONGEST_MATCH, copy_draft, copy_reference, tiles_of

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def naive(text: list[int], count: int) -> list[int]:
    """What followed the longest of the earlier occurrences of the newest tokens, of several the latest."""
    for length in range(LONGEST_MATCH, 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[end - length : end] == text[-length:]:
                continued = list(text)
                for place in range(count):
                    continued.append(continued[end + place])
                return continued[len(text) :]
    return [-1] * count


@given(text=texts, count=st.integers(1, 9))
def test_the_reference_drafts_what_a_naive_search_finds(text: list[int], count: int) -> None:
    assert copy_reference(torch.tensor(text), count).tolist() == naive(text, count)


@given(
    given_texts=st.lists(texts, min_size=1, max_size=3), count=st.integers(1, 9), spare=st.integers(0, 20),
    given=st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=3, max_size=3) | st.none(),
)  # fmt: skip
def test_the_kernel_drafts_given_tokens_or_what_a_naive_search_finds(
    given_texts: list[list[int]], count: int, spare: int, given: list[list[int]] | None
) -> None:
    """In tiles of 16 positions, so that matches lie in several tiles and cross their borders."""
    sequences, longest = len(given_texts), max(map(len, given_texts)) + spare
    stored = torch.randint(0, 4, (sequences, longest), dtype=torch.int32)  # past a text: anything
    for row, text in zip(stored, given_texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) - 1 for text in given_texts], dtype=torch.int32)
    newest_tokens = torch.tensor([text[-1] for text in given_texts], dtype=torch.int32)
    tokens = torch.full(((count + 1) * sequences,), -9, dtype=torch.int32)
    padded = [[*own, *[-1] * count][:count] for own in given or [[]] * 3][:sequences]
    forced = None if given is None else torch.tensor(padded, dtype=torch.int32).T.flatten()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE", 16)
        keys = torch.zeros(sequences, tiles_of(longest), dtype=torch.int64)
        copy_draft(stored, lengths, newest_tokens, tokens, keys, forced)
    drafts = tokens.view(count + 1, sequences).T.tolist()
    expected = [own if own[0] >= 0 else naive(text, count) for own, text in zip(padded, given_texts, strict=True)]
    assert drafts == [[text[-1], *own] for text, own in zip(given_texts, expected, strict=True)]


def test_tokens_of_no_copied_node_are_refused() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="copied nodes"):
        copy_draft(ints[:, None], ints, ints, ints, torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("longest", [40, 5000, 70_000])
def test_on_a_gpu_texts_of_many_tiles_give_the_references_drafts(longest: int) -> None:
    generator = torch.Generator().manual_seed(longest)
    stored = torch.randint(0, 40, (4, longest), generator=generator, dtype=torch.int32)
    stored[1, -30:] = stored[1, 3:33].clone()  # a long match at the end
    stored[2] = torch.arange(longest) % 7
    stored[3] = torch.arange(longest)  # no match
    lengths = torch.tensor([longest - 1, longest - 1, longest // 2, longest - 1], dtype=torch.int32)
    newest_tokens = stored[torch.arange(4), lengths.long()]
    keys = torch.zeros(4, tiles_of(longest), dtype=torch.int64, device="cuda")
    tokens = torch.zeros(16 * 4, dtype=torch.int32, device="cuda")
    copy_draft(stored.cuda(), lengths.cuda(), newest_tokens.cuda(), tokens, keys)
    drafts = tokens.view(16, 4).T.cpu()
    for draft, text, newest in zip(drafts, stored, lengths.tolist(), strict=True):
        assert draft.tolist() == [int(text[newest]), *copy_reference(text[: newest + 1], 15).tolist()]
