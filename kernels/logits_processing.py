"""Logits processing on the device: logit bias, penalties for repeated tokens, minimum length, and masks of tokens.

Not a kernel of its own: `process` is inlined in the kernels that score logits (`lm_head_topk`, `score_logits`) after
the softcap and before temperature. It works element by element, in this order: bias, repetition, presence, frequency,
minimum length. Penalties count the tokens that the row's sequence has generated and those on the path from the root to
the row's node. A sequence with all parameters off keeps the bits of its scores, whatever other sequences use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from selfspec.kernels.noise import Noise, Truncation, check_rows, check_tensor, mul_rounded
from selfspec.kernels.triton_compat import jit, tl


@dataclass(frozen=True)
class Processing:
    """Parameters of B sequences, for R rows of the nodes `first_node`, `first_node` + 1, ..., node-major.

    `paths` and `depths` describe the whole tree, root and n nodes; `tokens` must be filled for the rows' own nodes and
    their ancestors.
    """

    repetition: torch.Tensor  # [B] float32, above 0; 1: off
    presence: torch.Tensor  # [B] float32; 0: off
    frequency: torch.Tensor  # [B] float32; 0: off
    bias: torch.Tensor  # [B, V] float32, added to the logits: 0 leaves a token as it is, -inf bans it
    counts: torch.Tensor  # [B, V] int32; bit 0: token is in the prompt; >> 1: times generated, the root included
    min_length: torch.Tensor  # [B] int32: no stop token is drawn at a position below this
    stops: torch.Tensor  # [B, S] int32 stop tokens, padded with -1
    positions: torch.Tensor  # [R] int32 or int64: the position of the token being drawn
    paths: torch.Tensor  # [B, n + 1, W] int32: entry i is the node at depth i on the path to a node, i up to its depth
    depths: torch.Tensor  # [n + 1] int32
    tokens: torch.Tensor  # [(n + 1) * B] int32: the nodes' tokens, node-major
    first_node: int = 0

    def check(self, rows: int, vocabulary: int | None, device: torch.device) -> None:
        """vocabulary: number of tokens that are scored; None for a trimmed head, whose token ids are on the device."""
        sequences, nodes = self.repetition.shape[0], self.depths.shape[0]
        check_rows(rows, sequences)
        tokens = self.bias.shape[-1]
        if vocabulary is not None and tokens < vocabulary:
            raise ValueError(f"the bias is for {tokens} tokens, not for a vocabulary of {vocabulary}")
        int32, integer = (torch.int32,), (torch.int32, torch.int64)
        shapes: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
            "repetition": ((sequences,), (torch.float32,)),
            "presence": ((sequences,), (torch.float32,)),
            "frequency": ((sequences,), (torch.float32,)),
            "bias": ((sequences, tokens), (torch.float32,)),
            "counts": ((sequences, tokens), int32),
            "min_length": ((sequences,), int32),
            "stops": ((sequences, self.stops.shape[-1]), int32),
            "positions": ((rows,), integer),
            "paths": ((sequences, nodes, self.paths.shape[-1]), int32),
            "depths": ((nodes,), int32),
            "tokens": ((nodes * sequences,), int32),
        }
        for name, (shape, dtypes) in shapes.items():
            check_tensor(getattr(self, name), f"the processing's {name}", shape, dtypes, device)
        if not 0 <= self.first_node <= nodes - rows // sequences:
            raise ValueError(
                f"first_node={self.first_node} is not possible: {rows // sequences} nodes from there on are not among "
                f"{nodes}"
            )

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The kernels' argument `processing`; its last five entries are strides and the number of stop tokens."""
        return (
            self.repetition, self.presence, self.frequency, self.bias, self.counts, self.min_length, self.stops,
            self.positions, self.paths, self.depths, self.tokens,
            self.bias.stride(0), self.counts.stride(0), self.stops.stride(0), self.paths.stride(0), self.stops.shape[1],
        )  # fmt: skip


@dataclass(frozen=True)
class Masks:
    """Tokens that may follow each of R rows, one bit per token; the others get -inf after all other processing."""

    of_row: torch.Tensor  # [R] int32: the row of `bits`; -1: all tokens may follow
    bits: torch.Tensor  # [M, ceil(V / 32)] int32: bit t % 32 of word t // 32 is set if token t may follow

    def check(self, rows: int, vocabulary: int | None, device: torch.device) -> None:
        """vocabulary: number of tokens that are scored; None for a trimmed head."""
        check_tensor(self.of_row, "the masks' of_row", (rows,), (torch.int32,), device)
        shape = self.bits.shape[0], self.bits.shape[1] if vocabulary is None else -(-vocabulary // 32)
        check_tensor(self.bits, "the masks' bits", shape, (torch.int32,), device)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.of_row, self.bits, self.bits.stride(0)


def mask_reference(logits: torch.Tensor, masks: Masks) -> torch.Tensor:
    """Logits [R, V] with -inf where a row's mask has no bit."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    words = masks.bits[masks.of_row.clamp(min=0).long()][:, tokens // 32]
    allowed = (words >> (tokens % 32) & 1 > 0) | (masks.of_row < 0)[:, None]
    return logits.masked_fill(~allowed, -torch.inf)


def process_logits_reference(
    logits: torch.Tensor, processing: Processing, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Processed logits [R, N] of `token_ids` [N], or of the tokens 0..N-1."""
    sequences = processing.repetition.shape[0]
    if token_ids is None:
        token_ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.stack([
        _process_row(logits[row], processing, row % sequences, row, token_ids.long()) for row in range(len(logits))
    ])  # fmt: skip


def _process_row(
    logits: torch.Tensor, processing: Processing, sequence: int, row: int, token_ids: torch.Tensor
) -> torch.Tensor:
    sequences = processing.repetition.shape[0]
    node = processing.first_node + row // sequences
    path = processing.paths[sequence, node, 1 : int(processing.depths[node]) + 1].long()  # the root is in the counts
    on_path = processing.tokens[path * sequences + sequence].long()
    counts = processing.counts[sequence, token_ids]
    generated = (counts >> 1) + (on_path[:, None] == token_ids).sum(0)
    occurs = (generated > 0) | (counts & 1 > 0)
    values = logits + processing.bias[sequence, token_ids]
    penalty = processing.repetition[sequence]
    values = torch.where(occurs, torch.where(values < 0, values * penalty, values / penalty), values)
    values = torch.where(generated > 0, values - processing.presence[sequence], values)
    values = values - processing.frequency[sequence] * generated
    if processing.positions[row] < processing.min_length[sequence]:
        values = values.masked_fill(torch.isin(token_ids, processing.stops[sequence].long()), -torch.inf)
    return values


@jit
def load_processing(processing, row, sequence):
    """Repetition, presence, frequency, position and minimum length of each row. Only loads, so a kernel can call it
    long before it needs them."""
    repetition, presence, frequency, _, _, min_length, _, positions, _, _, _, _, _, _, _, _ = processing
    return (
        tl.load(repetition + sequence), tl.load(presence + sequence), tl.load(frequency + sequence),
        tl.load(positions + row), tl.load(min_length + sequence),
    )  # fmt: skip


@jit
def process(values, loaded, processing, row, sequence, sequences, first_node, path_stride, tokens, exists):
    """Processed values [R, N] of `tokens` [N]; columns that do not `exist` [N] keep theirs.

    `loaded` is the result of `load_processing`. A program reads counts and stop tokens only if one of its rows has a
    penalty on, or is below its minimum length.
    """
    (
        _, _, _, bias, counts, _, stops, _, paths, depths, drafted, bias_stride, counts_stride, stops_stride,
        trees_stride, S,
    ) = processing  # fmt: skip
    repetition, presence, frequency, position, min_length = loaded
    at = sequence.to(tl.int64)
    values += tl.load(bias + (at * bias_stride)[:, None] + tokens[None, :], mask=exists[None, :], other=0.0)
    if tl.max(((repetition != 1) | (presence != 0) | (frequency != 0)).to(tl.int32), 0) > 0:
        count = tl.load(counts + (at * counts_stride)[:, None] + tokens[None, :], mask=exists[None, :], other=0)
        node = first_node + row // sequences
        depth = tl.load(depths + node)
        for level in range(1, tl.max(depth, 0) + 1):  # the root is in the counts
            of_node = paths + sequence * trees_stride + node * path_stride
            above = tl.load(of_node + level, mask=level <= depth, other=0)
            token = tl.load(drafted + above * sequences + sequence, mask=level <= depth, other=-1)
            count += (token[:, None] == tokens[None, :]).to(tl.int32) * 2
        values = _penalise(values, count, repetition[:, None], presence[:, None], frequency[:, None])
    early = position < min_length
    if tl.max(early.to(tl.int32), 0) > 0:
        for index in range(S):
            stop = tl.load(stops + at * stops_stride + index, mask=early, other=-1)
            values = tl.where(stop[:, None] == tokens[None, :], float("-inf"), values)
    return values


@jit
def mask(values, masks, row, tokens, exists):
    """Values [R, N] of `tokens` [N] with -inf where the row's mask has no bit."""
    of_row, bits, stride = masks
    at = tl.load(of_row + row)
    words = bits + (at.to(tl.int64) * stride)[:, None] + (tokens // 32)[None, :]
    word = tl.load(words, mask=(at >= 0)[:, None] & exists[None, :], other=-1)
    return tl.where(((word >> (tokens % 32)[None, :]) & 1) != 0, values, float("-inf"))


@jit
def _penalise(values, count, repetition, presence, frequency):
    """Penalties of values [R, N] with token counts [R, N]. Every product and quotient is rounded by itself, as in the
    reference."""
    generated = count >> 1
    repetition = tl.broadcast_to(repetition, values.shape)
    repeated = tl.where(values < 0, mul_rounded(values, repetition), tl.math.div_rn(values, repetition))
    values = tl.where(count > 0, repeated, values)
    values = tl.where(generated > 0, values - presence, values)
    return values - mul_rounded(generated.to(tl.float32), tl.broadcast_to(frequency, values.shape))


def check_sampling(
    rows: int,
    vocabulary: int | None,
    noise: Noise | None,
    truncation: Truncation | None,
    processing: Processing | None,
    device: torch.device,
) -> None:
    """Checks noise, truncation and processing against the number of rows and against each other."""
    if truncation is not None and noise is None:
        raise ValueError("truncation has no effect without sampling: give the noise to draw with")
    if noise is not None:
        noise.check(rows, device)
    if noise is not None and truncation is not None:
        truncation.check(noise.seeds.shape[0], device)
    if processing is not None:
        processing.check(rows, vocabulary, device)
        if noise is not None and noise.seeds.shape != processing.repetition.shape:
            raise ValueError(
                f"the processing is for {processing.repetition.shape[0]} sequences, the noise for "
                f"{noise.seeds.shape[0]}"
            )


def sampling_arguments(
    noise: Noise | None, truncation: Truncation | None, processing: Processing | None
) -> dict[str, Any]:
    """The arguments that all kernels which score logits share."""
    sequences = 1
    if noise is not None:
        sequences = noise.seeds.shape[0]
    elif processing is not None:
        sequences = processing.repetition.shape[0]
    return {
        "noise": None if noise is None else noise.tensors,
        "truncation": None if truncation is None else truncation.tensors,
        "processing": None if processing is None else processing.tensors,
        "sequences": sequences,
        "first_node": 0 if processing is None else processing.first_node,
        "path_stride": 0 if processing is None else processing.paths.stride(1),
        "STREAM": 0 if noise is None else noise.stream,
    }
