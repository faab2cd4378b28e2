"""Models, exits and sessions that do what a test says: silent layers, a model that recites, drafts right on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec import Engine, Plan, Rules
from selfspec.backends.torch_backend import Session
from selfspec.cache.kv_cache import Cache, Rows
from selfspec.governor.rules import Policy
from selfspec.models.decoder import Decoder
from selfspec.sampling import Sampling
from selfspec.sequence import Row
from selfspec.speculation.exit import Exit
from tests.tiny import VOCABULARY, tiny_model

# Every kind of plan: no node, chains, regular trees, and one of uneven depth whose nodes skip ranks.
IRREGULAR = "nodes:0.0,0.2,0.1,1.0,1.3,3.0,4.1,4.0,6.0,8.0"
PLANS = ["none", "chain:1", "chain:4", "tree:3,2,1", "tree:4,2,2,1", IRREGULAR]
DRAFTING_PLANS = PLANS[1:]


def plan_id(plan: str) -> str:
    return "irregular" if plan == IRREGULAR else plan


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids, none of them special."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def left_padded(prompts: Sequence[list[int]], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask of a batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """The model without an end token of its own: it speaks until it is stopped."""
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def silence(model: PreTrainedModel, start_layer: int) -> PreTrainedModel:
    """Makes the layers from `start_layer` on add exactly zero, so that an exit there is always right."""
    for layer in model.model.layers[start_layer:]:
        if model.config.model_type == "gemma3_text":  # it norms the updates; norm weights are stored minus one
            layer.post_attention_layernorm.weight.fill_(-1)
            layer.post_feedforward_layernorm.weight.fill_(-1)
        else:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@torch.no_grad()
def reciting_model(tokens: Sequence[int], **overrides: Any) -> PreTrainedModel:
    """A float64 llama that says `tokens` (all different) in a circle, whatever came before the last token.

    All its layers are silent: any exit drafts perfectly and whole paths are accepted.
    """
    model = silence(endless(tiny_model("llama", hidden_size=128, num_hidden_layers=3, **overrides)), 0)
    model.model.norm.weight.fill_(1)
    model.model.embed_tokens.weight.zero_()
    model.model.embed_tokens.weight[:, :VOCABULARY] = torch.eye(VOCABULARY, dtype=torch.float64)
    model.lm_head.weight.zero_()
    following = dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True))
    for token in range(VOCABULARY):
        model.lm_head.weight[following.get(token, tokens[0]), token] = 10
    return model


class ScriptedExit(Exit):
    """Drafts what `script(position)` says, best first, for the token at that position of a batch of one."""

    def __init__(self, model: Decoder, layer: int, script: Callable[[int], list[int]]) -> None:
        super().__init__(model, layer)
        self.script = script

    def read(self, hidden: torch.Tensor, previous: torch.Tensor, rows: Rows, cache: Cache) -> torch.Tensor:
        self.positions: list[int] = rows.positions[0].tolist()
        return super().read(hidden, previous, rows, cache)

    def logits(self, read: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*read.shape[:2], VOCABULARY)
        for row, position in enumerate(self.positions):
            for rank, token in enumerate(self.script(position + 1)):
                logits[0, row, token] = 1000.0 - rank
        return logits


class ScriptedPolicy:
    """Takes its plans from a list, over and over."""

    def __init__(self, plans: Iterable[str]) -> None:
        self.plans = [Plan.parse(plan) for plan in plans]
        self.cycles = 0

    def choose(self, batch: int) -> tuple[Plan, str | None]:
        plan = self.plans[self.cycles % len(self.plans)]
        self.cycles += 1
        return plan, None


def open_session(
    engine: Engine,
    prompts: Sequence[list[int]],
    plan: str,
    exit: Exit | None,
    new_tokens: int = 12,
    copies: int = 1,
    sampling: Sampling | None = None,
) -> Session:
    """A session whose cycles a test can run one by one; every cycle uses `plan`."""
    sampling = sampling or Sampling()
    rows = [Row(prompt, 0, copy, len(prompt) + new_tokens) for prompt in prompts for copy in range(copies)]
    policy = Policy(Rules(), sampling, mode="force", plan=Plan.parse(plan))
    return Session(engine.model, engine.cache, rows, sampling, policy, exit=exit)
