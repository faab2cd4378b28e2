"""A launch of the kernel that recites, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.recital import recite


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    chosen, following = (torch.empty(260, dtype=torch.int32, device="meta") for _ in range(2))
    seeds = torch.empty(4, dtype=torch.int64, device="meta")
    script = torch.empty(16, 1024, dtype=torch.int32, device="meta")
    yield "four texts", partial(recite, chosen, following, seeds, script)
