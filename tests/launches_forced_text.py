"""A launch of the kernel that forces tokens, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.forced_text import force_tokens


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    chosen, next_positions = (torch.empty(260, dtype=torch.int32, device="meta") for _ in range(2))
    seeds = torch.empty(4, dtype=torch.int64, device="meta")
    forced = torch.empty(16, 1024, dtype=torch.int32, device="meta")
    yield "four texts", partial(force_tokens, chosen, next_positions, seeds, forced)
