"""The estimate of how much of a text a copied branch would bring."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from selfspec.governor.acceptance import MEMORY
from selfspec.governor.copying import MOST_COPIED, REACH, Copying


def hits(tokens: list[int], prompt: int) -> list[bool]:
    """Of each token after the prompt, whether it is the one after the occurrence that is followed."""
    found, following = [], None
    for position, token in enumerate(tokens):
        hit = following is not None and tokens[following] == token and position >= prompt
        found.append(hit)
        if hit and following is not None:
            following += 1
        else:
            earlier = [at for at in range(position) if tokens[at] == token]
            following = earlier[-1] + 1 if earlier else None
    return found[prompt:]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30), prompt=st.integers(1, 30),
    cuts=st.lists(st.integers(1, 30)),
)  # fmt: skip
def test_every_token_after_the_prompt_is_a_hit_or_a_miss_once(tokens: list[int], prompt: int, cuts: list[int]) -> None:
    prompt = min(prompt, len(tokens))
    copying, expected = Copying(0.5), Copying(0.5).share
    for end in sorted({max(prompt, min(cut, len(tokens))) for cut in cuts}):
        copying.read(tokens[:end], prompt)
    copying.read(tokens, prompt)
    for hit in hits(tokens, prompt):
        expected += (hit - expected) / MEMORY
    assert abs(copying.share - expected) < 1e-9


def test_forced_tokens_are_hits_whatever_they_follow() -> None:
    forced, free = Copying(), Copying()
    text = list(range(180))
    for end in range(10, 180, 10):
        forced.add_forced(end, 10)  # before the step's tokens are read
        assert forced.read(text[:end], 3) >= free.read(text[:end], 3)
    assert forced.level > 12 and free.level == 0


def test_a_text_that_repeats_reaches_the_highest_levels_and_one_that_does_not_the_lowest() -> None:
    period, different = Copying(), Copying()
    assert period.read([1, 2, 3] * 60, 3) == 16
    assert different.read(list(range(180)), 3) == 0
    assert REACH[0].sum() == 0 and REACH[-1].sum() == MOST_COPIED
    assert (np.diff(REACH, axis=0) >= 0).all() and (np.diff(REACH, axis=1) <= 0).all()
