"""Copied drafts: the tokens that followed the longest earlier occurrence of a sequence's newest tokens.

A match of length m ends at a position whose last m tokens are the newest m tokens of the text, m up to LONGEST_MATCH.
The longest match wins; of several the latest. The tokens after it are the draft; past the text's end the draft repeats
from the token after the match. Without a match the draft is -1, which no token is equal to.

The first launch finds the best match that ends in each tile of positions, for all tiles at once; the second one picks
the best of them and writes the drafts. Both read lengths and texts on the device, so a captured graph serves any step.
"""

from __future__ import annotations

import torch

from selfspec.kernels.noise import check_tensor
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton

LONGEST_MATCH = 4  # tokens compared
_TILE = 1024  # positions of a program: 8 for each thread of 4 warps


def copy_reference(text: torch.Tensor, count: int) -> torch.Tensor:
    """The draft [count] after a text [T] of at least one token."""
    newest = len(text) - 1
    lengths = torch.zeros(newest, dtype=torch.int64, device=text.device)  # of the match that ends at each position
    matches = torch.ones(newest, dtype=torch.bool, device=text.device)
    for back in range(min(LONGEST_MATCH, newest)):
        matches[:back] = False
        matches[back:] &= text[: newest - back] == text[newest - back]
        lengths += matches
    if not lengths.any():
        return text.new_full((count,), -1)
    end = newest - 1 - int(lengths.flip(0).argmax())
    return text[end + 1 + torch.arange(count, device=text.device) % (newest - end)]


@jit(do_not_specialize=["text_stride", "tiles"])
def _match_kernel(
    texts, lengths, keys, text_stride, tiles, LONGEST: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    """Program (sequence, tile) stores the key of its best match, length << 32 | end position; 0: there is none. The
    first launch of a step: it releases the next one only after all earlier work is done (see `pdl`)."""
    wait(PDL)
    release(PDL)
    sequence, tile = tl.program_id(0), tl.program_id(1)
    newest = tl.load(lengths + sequence)
    text = texts + sequence.to(tl.int64) * text_stride
    best = tl.full((), 0, tl.int64)
    if tile * TILE < newest:
        end = tile * TILE + tl.arange(0, TILE)
        matches = end < newest
        length = tl.zeros((TILE,), tl.int32)
        for back in tl.static_range(LONGEST):
            token = tl.load(text + tl.maximum(newest - back, 0))
            matches = matches & (end >= back)
            matches = matches & (tl.load(text + end - back, mask=matches, other=-1) == token)
            length += matches.to(tl.int32)
        best = tl.max(tl.where(length > 0, (length.to(tl.int64) << 32) | end.to(tl.int64), 0), 0)
    tl.store(keys + sequence * tiles + tile, best)


@jit(do_not_specialize=["sequences", "text_stride", "tiles", "count"])
def _copy_kernel(
    texts, lengths, newest_tokens, keys, forced, tokens, sequences, text_stride, tiles, count,
    TILES_P2: tl.constexpr, NODES_P2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per sequence writes the tokens of its root and copied nodes."""
    wait(PDL)
    release(PDL)
    sequence = tl.program_id(0)
    tile = tl.arange(0, TILES_P2)
    best = tl.max(tl.load(keys + sequence * tiles + tile, mask=tile < tiles, other=0), 0)
    end = (best & 0xFFFFFFFF).to(tl.int32)
    period = tl.maximum(tl.load(lengths + sequence) - end, 1)
    node = tl.arange(0, NODES_P2)
    place = end + 1 + tl.maximum(node - 1, 0) % period
    copies = (node > 0) & (node <= tl.where(best > 0, count, 0))
    token = tl.load(texts + sequence.to(tl.int64) * text_stride + place, mask=copies, other=-1)
    if forced is not None:
        replaced = tl.load(forced + (node - 1) * sequences + sequence, mask=(node > 0) & (node <= count), other=-1)
        token = tl.where(tl.load(forced + sequence) >= 0, replaced, token)
    token = tl.where(node == 0, tl.load(newest_tokens + sequence), token)
    tl.store(tokens + node * sequences + sequence, token, mask=node <= count)


def copy_draft(
    texts: torch.Tensor,  # [B, T] int32: each sequence's tokens by position
    lengths: torch.Tensor,  # [B] int32: the position of the newest token
    newest_tokens: torch.Tensor,  # [B] int32: the newest token
    tokens: torch.Tensor,  # [(count + 1) * B] int32, to fill: of roots and copied nodes, node-major
    keys: torch.Tensor,  # [B, `tiles_of` the longest text] int64: partial results
    # [count * B] int32, node-major: tokens that grammars force; they replace a sequence's draft if its first is >= 0
    forced: torch.Tensor | None = None,
) -> None:
    """Writes the newest token of every sequence and the draft after it."""
    sequences, tiles = keys.shape
    count = tokens.numel() // sequences - 1
    check_tensor(texts, "texts", (sequences, texts.shape[-1]), (torch.int32,), lengths.device)
    check_tensor(keys, "keys", (sequences, tiles), (torch.int64,), lengths.device)
    if tokens.numel() != (count + 1) * sequences or not tokens.is_contiguous() or count < 1:
        raise ValueError(f"{tokens.numel()} tokens are not those of roots and copied nodes of {sequences} sequences")
    if forced is not None:
        check_tensor(forced, "forced", (count * sequences,), (torch.int32,), lengths.device)
    pdl = pdl_options(texts)
    _match_kernel[(sequences, tiles)](
        texts, lengths, keys, texts.stride(0), tiles, LONGEST=LONGEST_MATCH, TILE=_TILE, num_warps=4, **pdl
    )
    _copy_kernel[(sequences,)](
        texts, lengths, newest_tokens, keys, forced, tokens, sequences, texts.stride(0), tiles, count,
        TILES_P2=triton.next_power_of_2(tiles), NODES_P2=triton.next_power_of_2(count + 1), num_warps=1, **pdl,
    )  # fmt: skip


def tiles_of(longest: int) -> int:
    """Partial results of a sequence of up to `longest` tokens."""
    return -(-longest // _TILE)
