"""Buffers that a masked step exchanges with the host: it reads masks and forced tokens, and writes drafted tokens.

`masking.py` writes and reads the host's buffers; the copies to and from the device are part of the captured launches.
"""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np
import torch

from selfspec.backends.cuda.decoder import Scratch, Tree
from selfspec.kernels.logits_processing import Masks


class StepMasks:
    """Buffers of a step of B slots and R = B * (n + 1) rows, in pinned memory and on the device.

    One int32 tensor is copied to the device. Its parts: for each row the number of its mask, -1 for none; the tokens
    that grammars force, for the copied nodes, node-major; the masks, one bit per token. The parts begin at multiples of
    16 bytes, so that one compiled kernel serves all sizes.
    """

    def __init__(self, tree: Tree, vocabulary: int, scratch: Scratch) -> None:
        self._sequences, self._copied = tree.sequences, tree.plan.copied
        self._rows = tree.sequences * (len(tree.plan) + 1)
        self._mask_words = -(-vocabulary // 32)
        self._forced_start = -(-self._rows // 4) * 4
        self._masks_start = self._forced_start + -(-self._sequences * self._copied // 4) * 4
        size = self._masks_start + self._rows * self._mask_words
        self._device = scratch.take("masks", size, dtype=torch.int32)  # once: captured launches hold the address
        zeros = partial(torch.zeros, dtype=torch.int32, pin_memory=self._device.device.type == "cuda")
        self._host = zeros(size)
        self._host[: self._masks_start].fill_(-1)  # no row has a mask when the step runs before it is captured
        self.host_tokens = zeros(self._rows)  # the nodes' tokens, node-major
        self.host_parents = zeros(tree.tensors.parents.shape if tree.plan.beam else 0)  # [B, n + 1] of a beam's nodes

    @cached_property
    def host_views(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The parts of the host's tensor: mask numbers [R]; forced tokens [copied nodes, B]; masks [R, words], uint32.
        The host may write them once it has read the previous step, whose masks have been copied by then."""
        words, copied, count = self._host.numpy(), self._copied, self._sequences
        forced = words[self._forced_start :][: copied * count].reshape(copied, count)
        return words[: self._rows], forced, words[self._masks_start :].view(np.uint32).reshape(self._rows, -1)

    def load(self, count: int) -> None:
        """Copies the mask numbers, the forced tokens and the first `count` masks to the device."""
        end = self._masks_start + count * self._mask_words
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def send(self, tokens: torch.Tensor, parents: torch.Tensor) -> None:
        """Copies the nodes' tokens, and a beam's parents, to the host."""
        self.host_tokens.copy_(tokens, non_blocking=True)
        if self.host_parents.numel():
            self.host_parents.copy_(parents, non_blocking=True)

    def first(self, rows: int) -> Masks:
        """The masks of the first `rows` rows."""
        return Masks(self._device[:rows], self._device[self._masks_start :].view(self._rows, -1))

    @property
    def forced(self) -> torch.Tensor:
        """[copied nodes * B]: tokens that grammars force, node-major; -1 where none is."""
        return self._device[self._forced_start :][: self._copied * self._sequences]
