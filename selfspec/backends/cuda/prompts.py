"""Chooses which prompts share a prefill pass, and runs it with the decode kernels or with PyTorch operations."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate

import torch

from selfspec.backends.cuda.decoder import head_logits
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.kernel_prefill import MAX_SEGMENTS, PromptPart, next_part, segments
from selfspec.backends.torch_backend import PREFILL_CHUNK, TorchBackend
from selfspec.cache.kv_cache import PAGE_SIZE
from selfspec.cache.prefixes import PrefillKind
from selfspec.logprobs import prompt_logprobs
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit

# Positions up to which chunks are captured. Beyond, the device takes longer to run a chunk's operations than the host
# takes to launch them.
LONGEST_CAPTURED_PROMPT = 8192

# The decode kernels give a row the same bits in any pass. PyTorch operations give the same bits only in passes of the
# same shape, which whole chunks from the same start position have: so pages are reused in these units.
KERNELS = PrefillKind("kernels", PAGE_SIZE, decode_writes_same_bits=True)
CHUNKS = PrefillKind("chunks", PREFILL_CHUNK, decode_writes_same_bits=False)


class PromptPrefill:
    """Prefills prompts of up to `Graphs.max_kernel_prompt` tokens with the decode kernels, several or a part of one in
    a pass, and longer prompts with PyTorch operations, one chunk at a time. Only a prompt's length decides between the
    two, so its KV depends on its tokens alone.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.cache = graphs, graphs.cache
        self.prompt_ends: dict[Sequence, torch.Tensor] = {}  # states at the last positions, until the prompt is scored
        self._torch = TorchBackend(graphs.model, graphs.cache)

    def prefill_kind(self, tokens: int) -> PrefillKind:
        return KERNELS if tokens - 1 <= self.graphs.max_kernel_prompt else CHUNKS

    def run(self, sequences: Seq[Sequence], exit: Exit | None, captures: bool) -> list[Sequence]:
        """Launches one pass over the prompts of the first sequences, as many as fit into it. Returns the sequences
        whose prompts are then in the cache, all but the last token. `captures`: chunks of longer prompts run as CUDA
        graphs."""
        first, longest = sequences[0], self.graphs.max_kernel_prompt + 1
        if len(first.prompt) == 1:
            return [first]
        if len(first.prompt) > longest:
            return self._prefill_chunk(first, exit, captures)
        group: list[Sequence] = []
        lengths: list[int] = []
        for sequence in sequences:
            length = next_part(len(sequence.prompt) - 1 - sequence.kv.length)
            is_full = sum(map(segments, lengths)) + segments(length) > MAX_SEGMENTS
            if not 1 < len(sequence.prompt) <= longest or is_full:
                break
            group.append(sequence)
            lengths.append(length)
        self._prefill_together(group, lengths, exit)
        return [sequence for sequence in group if sequence.kv.length == len(sequence.prompt) - 1]

    def _prefill_together(self, sequences: list[Sequence], lengths: list[int], exit: Exit | None) -> None:
        """Launches one pass of the decode kernels over the next `lengths` tokens of the sequences' prompts."""
        kvs = [sequence.kv for sequence in sequences]
        ends = [kv.length + length for kv, length in zip(kvs, lengths, strict=True)]
        for kv, end in zip(kvs, ends, strict=True):
            self.cache.reserve(kv, end)
        prefill, replay = self.graphs.kernel_prefill(exit, lengths, max(ends), _wants_logprobs(sequences))
        parts = []
        for sequence, kv, end in zip(sequences, kvs, ends, strict=True):
            parts.append(PromptPart(sequence.prompt[kv.length : end], kv.pages, kv.length, sequence.previous_feature))
        prefill.load(parts)
        replay()
        if exit is not None:
            features = prefill.features[: len(sequences)].clone()
            prompt_ends = prefill.prompt_end[: len(sequences)].clone()
            for sequence, feature, prompt_end in zip(sequences, features, prompt_ends, strict=True):
                sequence.previous_feature = sequence.prompt_feature = feature
                self.prompt_ends[sequence] = prompt_end
        if prefill.final_states is not None:
            firsts = accumulate(map(segments, lengths[:-1]), initial=0)
            rows = [prefill.inputs.rows_of(first, length) for first, length in zip(firsts, lengths, strict=True)]
            self._add_logprobs(sequences, prefill.final_states, rows)
        for kv, length in zip(kvs, lengths, strict=True):
            kv.length += length

    def _prefill_chunk(self, sequence: Sequence, exit: Exit | None, captures: bool) -> list[Sequence]:
        """Runs the next chunk of one prompt with PyTorch operations, captured if `captures` is true and the chunk ends
        within LONGEST_CAPTURED_PROMPT positions. Returns the sequence if that was the prompt's last chunk."""
        kv, context = sequence.kv, sequence.prompt[:-1]
        chunk = context[kv.length : kv.length + PREFILL_CHUNK]
        end = kv.length + len(chunk)
        if end > LONGEST_CAPTURED_PROMPT or not captures:
            ready = self._torch.prefill([sequence], exit)
            self.release(sequence)  # prompts this long are not scored
            return ready
        self.cache.reserve(kv, end)
        prefill, replay = self.graphs.torch_prefill(exit, len(chunk), end, _wants_logprobs([sequence]))
        prefill.load(chunk, kv.length, kv.pages)
        if exit is not None:
            prefill.load_previous(sequence.previous_feature, self.prompt_ends.get(sequence) if kv.length else None)
        replay()
        if exit is not None:
            sequence.previous_feature = sequence.prompt_feature = prefill.feature[0, 0].clone()
            self.prompt_ends[sequence] = prefill.prompt_end.clone()
        if prefill.final_states is not None:
            self._add_logprobs([sequence], prefill.final_states, [torch.arange(len(chunk))])
        kv.length += len(chunk)
        return [sequence] if kv.length == len(context) else []

    def _add_logprobs(self, sequences: list[Sequence], states: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Adds log probabilities of prompt tokens to the sequences whose requests ask for them. `rows`: for each
        sequence, the rows of the normed final `states` [R, hidden] at its positions in this pass, the first of which is
        `sequence.kv.length`; the tokens are those that follow these positions. Waits for the device once."""
        given = zip(sequences, rows, strict=True)
        asked = [(sequence, own) for sequence, own in given if sequence.request.prompt_logprobs is not None]
        some = states.index_select(0, torch.cat([own for _, own in asked]).to(states.device))
        after = [sequence.prompt[sequence.kv.length + 1 :][: len(own)] for sequence, own in asked]
        tops = [sequence.request.prompt_logprobs or 0 for sequence, _ in asked]
        found = prompt_logprobs(some, after, tops, partial(head_logits, self.graphs.model))
        for (sequence, _), logprobs in zip(asked, found, strict=True):
            sequence.prompt_logprobs += logprobs

    def release(self, sequence: Sequence) -> None:
        self.prompt_ends.pop(sequence, None)
        self._torch.release(sequence)


def _wants_logprobs(sequences: Seq[Sequence]) -> bool:
    return any(sequence.request.prompt_logprobs is not None for sequence in sequences)
