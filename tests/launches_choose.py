"""Launches of the kernels that choose among cut logits, at the sizes they are meant for, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from selfspec.kernels.noise import Noise
from selfspec.kernels.sample import Cuts, Workspace, choose


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    count, share = _empty(1, dtype=torch.int32), _empty(1)
    all_cuts = {
        "greedy": None,
        "top-k up to 64": Cuts(count, share, share, 64),
        "any top-k": Cuts(count, share, share),
        "top-p": Cuts(None, share),
    }
    for vocabulary, names in ((49152, list(all_cuts)), (128256, ["top-p"])):
        seeds, copies = _empty(1, dtype=torch.int64), _empty(1, dtype=torch.int64)
        noise = Noise(seeds, copies, _empty(16, dtype=torch.int32), _empty(1))
        logits, out = _empty(16, vocabulary), _empty(16, dtype=torch.int64)
        work = Workspace.empty(16, vocabulary, "meta")
        for name in names:
            cuts = all_cuts[name]
            drawn = noise if cuts else None
            yield f"{name}, {vocabulary}", partial(choose, logits, out, work, noise=drawn, cuts=cuts)
