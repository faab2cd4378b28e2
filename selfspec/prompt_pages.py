"""KV pages that sequences share: samples of one prompt, and prompts that begin with the tokens of an earlier text."""

from __future__ import annotations

from selfspec.backends.base import Backend
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.cache.prefixes import PageKeys
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit, exit_key
from selfspec.speculation.exit_scoring import PROMPT_END


class PromptPages:
    def __init__(self, cache: Cache, prefix_reuse: bool) -> None:
        self._cache = cache
        self.prefix_reuse = prefix_reuse  # whether prompts reuse pages of other requests' texts

    def reuse(self, backend: Backend, sequence: Sequence, exit: Exit | None) -> None:
        """Gives a prompt whose prefill has not begun the registered pages of its first tokens, but none of its last
        PROMPT_END positions: prefill keeps their states to score the exit."""
        if not self.prefix_reuse or sequence.kv.pages:
            return
        keys = sequence.page_keys
        if keys is None:
            keys = sequence.page_keys = PageKeys(backend.prefix_path(len(sequence.prompt)), exit_key(exit))
        if sequence.request.prompt_logprobs is not None:
            return  # these need the final states of all positions
        pages = keys.units(len(sequence.prompt) - 1 - PROMPT_END)
        sequence.kv = self._cache.open_with(keys.first(pages, sequence.prompt), keys.path.unit // PAGE_SIZE)
        sequence.cached_tokens = sequence.kv.length

    def register(self, backend: Backend, sequence: Sequence) -> None:
        """Makes the sequence's filled pages reusable: those of its prompt, and those of generated tokens where decoding
        and prefill write the same bits. A page whose exit KV is not filled yet is not among them."""
        keys = sequence.page_keys
        if keys is None or sequence.request.error is not None:
            return
        # After a late stop the cache is ahead of the tokens.
        tokens = len(sequence.tokens) if keys.path.decodes_alike else len(sequence.prompt) - 1
        unfilled = 0 if keys.exit is None else backend.unfilled(sequence)
        pages = keys.units(min(sequence.kv.length - unfilled, tokens))
        self._cache.register(sequence.kv, keys.first(pages, sequence.tokens))

    def share(self, sequence: Sequence, parent: Sequence) -> None:
        """Gives a further sample of a prompt the pages of that prompt, shared."""
        sequence.kv = self._cache.fork(parent.prompt_kv or parent.kv)
        sequence.previous_feature, sequence.is_prefilled = parent.prompt_feature, True

    def keep(self, ready: list[Sequence]) -> None:
        """Keeps a prompt's pages while further samples of it wait for admission; frees them once all have joined."""
        for parent in dict.fromkeys(sequence.parent or sequence for sequence in ready):
            samples = (sample for sample in parent.request.sequences if sample.parent is parent)
            if any(not sample.is_prefilled for sample in samples):
                parent.prompt_kv = parent.prompt_kv or self._cache.fork(parent.kv)
            elif parent.prompt_kv is not None:
                self._cache.close(parent.prompt_kv)
                parent.prompt_kv = None
