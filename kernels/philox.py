"""Counter-based noise: a pure function of (seed, sample index, position, token id, stream), in PyTorch.

Uniform numbers have the same bits on every device; Gumbel values, which are logarithms, may differ in the last bit.
Philox 4x32 with 10 rounds (Salmon et al., 2011): the counter is (token id // 4, position, sample index, stream), the
key is the seed, and the four 32-bit words of a block serve four consecutive token ids. There is no generator state.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Four random 32-bit words, in int64, for a counter of four such words and a key of two; inputs broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap in signed 64 bits; shift and mask still give the unsigned high and low halves.
        high0, low0 = _split(c0 * _MULTIPLIERS[0])
        high1, low1 = _split(c2 * _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _split(product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (product >> 32) & _MASK, product & _MASK


def uniform(
    seeds: torch.Tensor,  # [R] int64
    sample_indices: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64
    tokens: torch.Tensor,  # [R, K] int64
    stream: int,
) -> torch.Tensor:  # [R, K] float32, strictly inside (0, 1)
    """One uniform number for each row and token."""
    words = _blocks(seeds, sample_indices, positions, tokens >> 2, stream)  # [R, K, 4]
    word = words.gather(-1, (tokens & 3).expand(words.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return _to_unit(word)


def uniform_vocabulary(
    seeds: torch.Tensor, sample_indices: torch.Tensor, positions: torch.Tensor, vocabulary: int, stream: int
) -> torch.Tensor:  # [R, vocabulary] float32
    """`uniform` for the tokens 0..vocabulary-1, at a quarter of the cost: every block's four words are used."""
    blocks = torch.arange(-(-vocabulary // 4), device=seeds.device)[None]
    words = _blocks(seeds, sample_indices, positions, blocks, stream)  # [R, blocks, 4]
    return _to_unit(words.flatten(1)[:, :vocabulary])


def _blocks(
    seeds: torch.Tensor, sample_indices: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor, stream: int
) -> torch.Tensor:
    """Philox blocks [R, K, 4] for rows and block numbers [R or 1, K]."""
    stream_word = torch.full_like(blocks[:1, :1], stream)
    counter = (blocks, positions[:, None] & _MASK, sample_indices[:, None] & _MASK, stream_word)
    key = (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK)
    return torch.stack(torch.broadcast_tensors(*philox(counter, key)), dim=-1)


def _to_unit(words: torch.Tensor) -> torch.Tensor:
    # Uses all 32 bits, so that small numbers, which give the large Gumbel values, keep their relative precision.
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(uniforms: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of uniform numbers in (0, 1); small numbers give large values."""
    return -torch.log(-torch.log1p(-uniforms))
