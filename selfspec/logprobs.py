"""Log probabilities of tokens in the model's own distribution: float32 log-softmax of the logits before temperature,
penalties and other processing, so that no sampling parameter and no draft changes them.

Computed where the logits are, and packed into one tensor, so that one copy brings a step's values to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

MAX_TOP = 20  # most likely tokens of a position: the most that OpenAI's API and vLLM return
ROWS = 64  # positions whose logits exist at a time: 64 of 150,000 tokens in float32 take 38 MB


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


def state_logprobs(
    states: torch.Tensor, tokens: torch.Tensor, top: int, project: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Returns `pack_logprobs` for positions' normed final states [T, hidden] and the tokens [T] after them; `project`
    is the LM head. Computes the logits of ROWS positions at a time; does not wait for the device."""
    parts = zip(states.split(ROWS), tokens.split(ROWS), strict=True)
    return torch.cat([pack_logprobs(project(some), after, top) for some, after in parts])


def prompt_logprobs(
    states: torch.Tensor,
    tokens: Sequence[Sequence[int]],
    tops: Sequence[int],
    project: Callable[[torch.Tensor], torch.Tensor],
) -> list[list[TokenLogprob]]:
    """Returns the log probabilities of each prompt's tokens, with its own number of likely tokens, given the normed
    final states [T, hidden] of the positions before the tokens, prompt by prompt. Waits for the device once."""
    after = torch.tensor(list(chain.from_iterable(tokens)), device=states.device)
    packed = state_logprobs(states, after, max(tops), project).tolist()
    ends = accumulate(map(len, tokens))
    return [
        unpack_logprobs(packed[end - len(prompt) : end], prompt, top)
        for prompt, top, end in zip(tokens, tops, ends, strict=True)
    ]


def logprobs_nbytes(vocabulary: int) -> int:
    """Bytes of the temporary tensors: logits of ROWS positions and their log-softmax, float32."""
    return 2 * 4 * ROWS * vocabulary
