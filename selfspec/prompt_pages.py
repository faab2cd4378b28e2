"""KV pages that sequences share: samples of one prompt, and prompts that begin with the tokens of an earlier text."""

from __future__ import annotations

from collections.abc import Iterable

from selfspec.backends.base import Backend
from selfspec.cache.kv_cache import PAGE_SIZE, Cache, SwappedPages
from selfspec.cache.prefixes import PageKeys
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit, exit_key
from selfspec.speculation.exit_scoring import PROMPT_END


class PromptPages:
    """Shares KV pages between samples of a prompt and between requests."""

    def __init__(self, cache: Cache, prefix_reuse: bool) -> None:
        self._cache = cache
        self.prefix_reuse = prefix_reuse  # whether prompts reuse pages of other requests

    def reuse(self, backend: Backend, sequence: Sequence, exit: Exit | None) -> None:
        """Gives a prompt whose prefill has not begun the registered pages of its first tokens, but none of its last
        PROMPT_END positions: prefill must compute them to score the exit."""
        if not self.prefix_reuse or sequence.kv.pages:
            return
        keys = sequence.page_keys
        if keys is None:
            keys = sequence.page_keys = PageKeys(backend.prefill_kind(len(sequence.prompt)), exit_key(exit))
        if sequence.request.prompt_logprobs is not None:
            return  # these need the final states of all positions
        pages = keys.units(len(sequence.prompt) - 1 - PROMPT_END)
        sequence.kv = self._cache.open_with(keys.first(pages, sequence.prompt), keys.kind.unit // PAGE_SIZE)
        sequence.cached_tokens = sequence.kv.length

    def register(self, backend: Backend, sequence: Sequence) -> None:
        """Makes the sequence's filled pages reusable: those of its prompt, and those of generated tokens where decoding
        and prefill write the same bits. Excludes pages without the exit's KV."""
        keys = sequence.page_keys
        if keys is None or sequence.request.error is not None:
            return
        # Tokens dropped by a late stop may be in the cache.
        tokens = len(sequence.tokens) if keys.kind.decode_writes_same_bits else len(sequence.prompt) - 1
        unfilled = 0 if keys.exit is None else backend.unfilled(sequence)
        pages = keys.units(min(sequence.kv.length - unfilled, tokens))
        self._cache.register(sequence.kv, keys.first(pages, sequence.tokens))

    def share(self, sequence: Sequence, parent: Sequence) -> None:
        """Shares the pages of a prompt, prefilled for its first sample, with a further sample."""
        sequence.kv = self._cache.fork(parent.prompt_kv or parent.kv)
        sequence.previous_feature, sequence.is_prefilled = parent.prompt_feature, True

    def swap_in(self, sequence: Sequence, swapped: SwappedPages) -> None:
        """Copies a swapped-out sequence's pages back; it shares those of its prompt that are held for other samples."""
        held = sequence.first_sample.prompt_kv
        if held is not None and not sequence.kv.pages:
            sequence.kv = self._cache.fork(held)
        self._cache.swap_in(sequence.kv, swapped)

    def hold_for_samples(self, ready: list[Sequence]) -> None:
        """Keeps a prompt's pages while samples of it wait for admission, and frees them once all have their own."""
        for parent in dict.fromkeys(sequence.parent or sequence for sequence in ready):
            samples = (sample for sample in parent.request.sequences if sample.parent is parent)
            if any(not sample.is_prefilled for sample in samples):
                parent.prompt_kv = parent.prompt_kv or self._cache.fork(parent.kv)
            elif parent.prompt_kv is not None:
                self._cache.close(parent.prompt_kv)
                parent.prompt_kv = None

    def swap_out_held(self, waiting: Iterable[Sequence]) -> None:
        """Moves the prompts that are held for waiting samples to host memory, as if the samples had been swapped out
        before their first step."""
        for parent in dict.fromkeys(sample.first_sample for sample in waiting):
            if parent.prompt_kv is None:
                continue
            swapped, parent.prompt_kv = self._cache.swap_out(parent.prompt_kv), None
            for sample in parent.request.sequences:
                if sample.parent is parent and not sample.is_prefilled:
                    sample.swapped, sample.previous_feature = swapped, parent.prompt_feature
                    sample.is_prefilled = True
