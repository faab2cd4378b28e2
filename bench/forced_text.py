"""Makes the model write given texts: by a logits processor on the host, or in captured steps on the device.

The model verifies and its exit drafts as usual; only the model's choice is replaced. On the device that is one small
launch more in every step, in all modes alike. `bench.governor_sets` provides the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from selfspec import Engine
from selfspec.backends.cuda.step import DeviceStep
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, pdl_options, tl, triton

FREE = -1  # in place of a forced token: the model's own choice stays
_BLOCK = 128  # choices per program: one for each thread of 4 warps


class ForcedTexts:
    """A logits processor that makes the model continue each prompt with its text; after the text the model is free.

    It depends on the prefix alone, so each prompt has exactly one text.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> None:
        self.texts = {tuple(prompt): list(text) for prompt, text in zip(prompts, texts, strict=True)}
        self._lengths = sorted({len(prompt) for prompt in self.texts}, reverse=True)

    def __call__(self, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens = tuple(prefix[0].tolist())
        prompt = next(tokens[:length] for length in self._lengths if tokens[:length] in self.texts)
        text, place = self.texts[prompt], len(tokens) - len(prompt)
        if place >= len(text):
            return logits
        forced = torch.full_like(logits, -torch.inf)
        forced[0, text[place]] = 0.0
        return forced

    def is_written(self, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether these new tokens are the prompt's text, cut to their number, or the text and anything after it."""
        text = self.texts[tuple(prompt)]
        return list(tokens[: len(text)]) == text[: len(tokens)]


def force_tokens_reference(
    chosen: torch.Tensor, next_positions: torch.Tensor, seeds: torch.Tensor, forced: torch.Tensor
) -> torch.Tensor:
    """The contents of `chosen` after `force_tokens`, if all seeds and positions are within `forced`."""
    tokens = forced[seeds.repeat(len(next_positions) // len(seeds)), next_positions]
    return torch.where(tokens == FREE, chosen, tokens)


@jit(do_not_specialize=["choices", "sequences", "texts", "positions"])
def _force_tokens(
    chosen, next_positions, seeds, forced, choices, sequences, texts, positions, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program for every BLOCK choices."""
    release(PDL)
    wait(PDL)
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    text = tl.load(seeds + choice % sequences)
    position = tl.load(next_positions + choice, mask=choice < choices, other=0)
    is_forced = (choice < choices) & (text >= 0) & (text < texts) & (position < positions)
    token = tl.load(forced + text * positions + position, mask=is_forced, other=-1)
    tl.store(chosen + choice, token, mask=token >= 0)


def force_tokens(
    chosen: torch.Tensor,  # [(n + 1) * B] int32: the model's choice at every node, node-major; replaced
    next_positions: torch.Tensor,  # [(n + 1) * B] int32: the positions of the chosen tokens
    seeds: torch.Tensor,  # [B] int64: each sequence's text, as an index into `forced`
    forced: torch.Tensor,  # [texts, positions] int32, FREE where the model chooses
) -> None:
    """Replaces choices by forced tokens. Choices of other seeds and at later positions stay."""
    choices, (texts, positions) = len(next_positions), forced.shape
    if chosen.numel() != choices or choices % len(seeds):
        raise ValueError(f"{chosen.numel()} choices at {choices} positions are not those of {len(seeds)} sequences")
    if not all(tensor.is_contiguous() for tensor in (chosen, next_positions, seeds, forced)):
        raise ValueError("choices, positions, seeds and forced tokens must be contiguous")
    _force_tokens[(triton.cdiv(choices, _BLOCK),)](
        chosen, next_positions, seeds, forced, choices, len(seeds), texts, positions,
        BLOCK=_BLOCK, num_warps=4, **pdl_options(chosen),
    )  # fmt: skip


class ForcedTextStep(DeviceStep):
    """A step in which sequences write given texts: a sequence's seed is the index of its text."""

    def __init__(self, forced: torch.Tensor, *step: Any) -> None:
        super().__init__(*step)
        self.forced = forced

    def choose(self) -> None:
        super().choose()
        force_tokens(self.chosen.view(-1), self.metadata.next_positions, self.slots.seeds, self.forced)


class ForcedTextEngine:
    """A second engine on an engine's model, with kernels, whose requests write given texts. Captured steps read the
    tensor of forced tokens, so its address never changes."""

    def __init__(self, engine: Engine, texts: int) -> None:
        self.engine = Engine(
            engine.model, engine.tokenizer, engine.generation_config, engine.profile, engine.rules, engine.context,
            engine.max_batch, kernels=True, prefix_reuse=False,
        )  # fmt: skip
        assert self.engine._graphs is not None
        self.forced = torch.full((texts, engine.context), FREE, dtype=torch.int32, device=engine.model.device)
        self.engine._graphs.step_class = partial(ForcedTextStep, self.forced)

    def set_texts(self, prompts: Sequence[Sequence[int]], texts: ForcedTexts) -> None:
        """Replaces the forced texts: a request with one of these prompts, and its index as seed, writes its text."""
        count, positions = self.forced.shape
        if len(prompts) > count:
            raise ValueError(f"{len(prompts)} texts do not fit an engine made for {count}")
        forced = torch.full((count, positions), FREE, dtype=torch.int32)
        for number, prompt in enumerate(prompts):
            text = texts.texts[tuple(prompt)][: positions - len(prompt)]
            forced[number, len(prompt) : len(prompt) + len(text)] = torch.tensor(text, dtype=torch.int32)
        self.engine.scheduler.call(lambda: self.forced.copy_(forced))
