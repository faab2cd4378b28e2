"""Given texts instead of the model's own: by a logits processor on the host, or in captured steps on the device.

The model computes, and its exit drafts, as ever; only what is chosen is replaced. On the device that is one
small launch more in every step, for all modes alike. Which texts there are is `bench.governor_sets`' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from selfspec import Engine
from selfspec.backends.cuda.step import DeviceStep
from selfspec.kernels.pdl import release, wait
from selfspec.kernels.triton_compat import jit, tl, triton, use_pdl

FREE = -1  # in a script: the model chooses itself
_BLOCK = 128  # rows that one program looks after


class Recital:
    """A logits processor under which texts go on as written; behind their ends the model is free.

    It looks at the prefix alone: each prompt has a text of its own.
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
        """Whether these new tokens are its text: as much of it as there is room for, and whatever follows."""
        text = self.texts[tuple(prompt)]
        return list(tokens[: len(text)]) == text[: len(tokens)]


def recite_reference(
    chosen: torch.Tensor, following: torch.Tensor, seeds: torch.Tensor, script: torch.Tensor
) -> torch.Tensor:
    """What `recite` leaves in `chosen`, where all seeds and positions are the script's."""
    told = script[seeds.repeat(len(following) // len(seeds)), following]
    return torch.where(told == FREE, chosen, told)


@jit(do_not_specialize=["rows", "sequences", "texts", "positions"])
def _recite(
    chosen, following, seeds, script, rows, sequences, texts, positions, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program for every BLOCK rows."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    text = tl.load(seeds + row % sequences)
    position = tl.load(following + row, mask=row < rows, other=0)
    written = (row < rows) & (text >= 0) & (text < texts) & (position < positions)
    token = tl.load(script + text * positions + position, mask=written, other=-1)
    tl.store(chosen + row, token, mask=token >= 0)


def recite(
    chosen: torch.Tensor,  # [(n + 1) * B] int32: the target's choice at every node, node-major; replaced
    following: torch.Tensor,  # [(n + 1) * B] int32: the positions of what is chosen
    seeds: torch.Tensor,  # [B] int64: the numbers of the texts
    script: torch.Tensor,  # [texts, positions] int32, FREE where the model chooses
) -> None:
    """Puts what the script says in place of what was chosen. Whoever has another seed or is further on is free."""
    rows, (texts, positions) = len(following), script.shape
    if chosen.numel() != rows or rows % len(seeds):
        raise ValueError(f"{chosen.numel()} choices at {rows} positions are not those of {len(seeds)} sequences")
    if not all(tensor.is_contiguous() for tensor in (chosen, following, seeds, script)):
        raise ValueError("choices, positions, seeds and script must be contiguous")
    pdl = use_pdl(chosen)
    _recite[(triton.cdiv(rows, _BLOCK),)](
        chosen, following, seeds, script, rows, len(seeds), texts, positions,
        BLOCK=_BLOCK, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


class RecitingStep(DeviceStep):
    """A step in which sequences write given texts: a sequence's seed is the number of its text."""

    def __init__(self, script: torch.Tensor, *step: Any) -> None:
        super().__init__(*step)
        self.script = script

    def choose(self) -> None:
        super().choose()
        recite(self.chosen.view(-1), self.metadata.next_positions, self.slots.seeds, self.script)


class Stage:
    """A second engine around an engine's model, with kernels, whose requests recite. The script keeps its address,
    which captured steps hold."""

    def __init__(self, engine: Engine, texts: int) -> None:
        self.engine = Engine(
            engine.model, engine.tokenizer, engine.generation_config, engine.profile, engine.rules, engine.context,
            engine.max_batch, kernels=True,
        )  # fmt: skip
        assert self.engine._graphs is not None
        self.script = torch.full((texts, engine.context), FREE, dtype=torch.int32, device=engine.model.device)
        self.engine._graphs.new_step = partial(RecitingStep, self.script)

    def learn(self, prompts: Sequence[Sequence[int]], recital: Recital) -> None:
        """From now on a request's prompt goes on as the recital says, if its seed is the prompt's number here."""
        texts, positions = self.script.shape
        if len(prompts) > texts:
            raise ValueError(f"{len(prompts)} texts do not fit a script of {texts}")
        script = torch.full((texts, positions), FREE, dtype=torch.int32)
        for number, prompt in enumerate(prompts):
            text = recital.texts[tuple(prompt)][: positions - len(prompt)]
            script[number, len(prompt) : len(prompt) + len(text)] = torch.tensor(text, dtype=torch.int32)
        self.engine.scheduler.call(lambda: self.script.copy_(script))
