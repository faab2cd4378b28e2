"""Log probabilities of tokens in the model's own distribution: float32 log-softmax of the logits before temperature,
penalties and other processing, so that no sampling parameter and no draft changes them.

Computed where the logits are, and packed into one tensor, so that one copy brings a step's values to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MAX_TOP = 20  # most likely tokens of a position: the most that OpenAI's API and vLLM return
_ROWS = 64  # prompt positions whose logits exist at a time: 64 of 150,000 tokens in float32 take 38 MB


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability of one token of a text, and the most likely tokens of its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log probability)


def pack_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """Returns for logits [R, V] and the tokens [R] after them, in columns: the tokens' log probabilities, the `top`
    largest ones, and the token ids of these. [R, 1 + 2 * top] in float64, which holds float32 and token ids exactly."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens.long().clamp(min=0)[:, None])
    values, ids = logprobs.topk(top, dim=-1)
    return torch.cat((chosen.double(), values.double(), ids.double()), dim=1)


def unpack_logprobs(packed: Sequence[Sequence[float]], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Returns the values of the first `len(tokens)` rows, with at most `top` likely tokens each."""
    unpacked = []
    for row, token in zip(packed, tokens, strict=False):
        width = (len(row) - 1) // 2
        likely = zip(map(int, row[1 + width :]), row[1 : 1 + width], strict=True)
        unpacked.append(TokenLogprob(token, row[0], tuple(likely)[:top]))
    return unpacked


def prompt_logprobs(
    states: torch.Tensor, tokens: Sequence[int], top: int, project: Callable[[torch.Tensor], torch.Tensor]
) -> list[TokenLogprob]:
    """Returns the log probabilities of the tokens after prompt positions, given the positions' normed final states
    [T, hidden]; `project` is the LM head. Waits for the device."""
    found: list[TokenLogprob] = []
    for start in range(0, len(tokens), _ROWS):
        some = tokens[start : start + _ROWS]
        logits = project(states[start : start + len(some)])
        packed = pack_logprobs(logits, torch.tensor(some, device=logits.device), top)
        found += unpack_logprobs(packed.tolist(), some, top)
    return found
