"""Lines about completions: speed, how the tokens were decoded, changes of plan."""

from __future__ import annotations

import pytest

from selfspec import Completion
from selfspec.commands.display import STYLES, origins, summary
from selfspec.history import Change
from tests.completions import completed

FROM_THE_START = Change(0, 0, "tree:4", None)
OFF = Change(3, 6, "none", "goodput")
BACK = Change(11, 14, "nodes:0.0,0.1,0.2,1.0", None)
DRAFTED = completed("de" * 5, FROM_THE_START)
SWITCHED_OFF = completed("de" * 3 + "p" * 8, FROM_THE_START, OFF, plan="none")
CAME_BACK = completed("de" * 3 + "p" * 8 + "de" * 8, FROM_THE_START, OFF, BACK)
TWO_PLANS = completed("de" * 5, FROM_THE_START, Change(2, 4, "chain:5", None))
COPIED = completed("de" * 5, Change(0, 0, "copy:8", None), plan="copy:8")
PLAIN = completed("p" * 10, Change(0, 0, "none", "goodput"), plan="none", disabled_reason="goodput")


def test_every_origin_has_a_style_of_its_own():
    assert len(set(STYLES.values())) == len(STYLES) == 3


def test_every_change_of_plan_is_a_line():
    assert list(origins(CAME_BACK)) == [
        "11 of 30 tokens were drafted (37%)",
        "from the start: tree:4",
        "after token 6: tree:4 -> plain (goodput)",
        "after token 14: plain -> tree of 4 nodes",
    ]


def test_a_change_of_the_reason_alone_is_no_change_of_plan():
    measuring, goodput = Change(0, 0, "none", "measuring"), Change(4, 4, "none", "goodput")
    assert list(origins(completed("pppp", measuring, goodput, plan="none"))) == [
        "0 of 4 tokens were drafted (0%)",
        "from the start: plain (measuring)",
    ]


def test_text_unlike_calibrations_is_named():
    lines = list(origins(completed("ppp", Change(0, 0, "none", "ood"), ood=True)))
    assert lines[1] == "from the start: plain (ood)"
    assert lines[2].startswith("ood: ") and len(lines) == 3


@pytest.mark.parametrize(
    ("completion", "how"),
    [
        (DRAFTED, "plan tree:4 after 3 layers: 2.00 tokens per step, 40% of reached depths accepted"),
        (TWO_PLANS, "mostly plan tree:4 after 3 layers: 2.00 tokens per step, 40% of reached depths accepted"),
        (
            SWITCHED_OFF,
            "drafting at times after 3 layers: 1.27 tokens per step, 40% of reached depths accepted; "
            "8 of 14 tokens decoded plainly (goodput)",
        ),
        (
            CAME_BACK,
            "mostly plan tree:4 after 3 layers: 1.58 tokens per step, 40% of reached depths accepted; "
            "8 of 30 tokens decoded plainly (goodput)",
        ),
        (COPIED, "plan copy:8: 2.00 tokens per step, 40% of reached depths accepted"),
        (PLAIN, "plain decoding (goodput)"),
    ],
    ids=["drafted", "two plans", "switched off", "came back", "copied", "plain"],
)
def test_a_summary_names_speed_and_plan(completion: Completion, how: str):
    count = len(completion.tokens)
    assert summary(completion) == f"{count} tokens in 2.0 s ({count / 2:.1f} tokens/s), {how}"


def test_each_reason_is_named_once():
    measuring, unlike = Change(0, 0, "none", "measuring"), Change(9, 9, "none", "ood")
    started = Change(2, 2, "tree:4", None)
    completion = completed("ppdepdep", measuring, started, OFF, started, unlike, OFF, disabled_reason="goodput")
    assert summary(completion).endswith("; 4 of 8 tokens decoded plainly (measuring, goodput, ood)")
    still_plain = completed("pppp", measuring, plan="none", disabled_reason="goodput")
    assert summary(still_plain).endswith(", plain decoding (measuring, goodput)")
