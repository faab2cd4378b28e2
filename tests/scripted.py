"""Models, exits and batches that follow a script: silent layers, a model with a fixed text, drafts of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec import Engine, Plan, Rules
from selfspec.backends.torch_backend import TorchBackend
from selfspec.batch import Batch
from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.drafters import Drafter, Drafters
from selfspec.governor.candidates import PlanCandidates
from selfspec.governor.rules import Policy
from selfspec.metrics import Metrics
from selfspec.models.decoder import Decoder
from selfspec.sampling import SamplingParams
from selfspec.sequence import Request
from selfspec.sequence import Sequence as Sequence_
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
    """Removes the model's end token, so that sequences end at their maximum length."""
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
def forced_text_model(tokens: Sequence[int], **overrides: Any) -> PreTrainedModel:
    """A float64 llama that generates `tokens` (all different) again and again; each follows from the one before alone.

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
    """Drafts the tokens `script(position)`, best first, at each position of a batch of one sequence."""

    def __init__(self, model: Decoder, layer: int, script: Callable[[int], list[int]]) -> None:
        super().__init__(model, layer)
        self.script = script

    def head_input(self, hidden: torch.Tensor, previous: torch.Tensor, rows: Rows, cache: Cache) -> torch.Tensor:
        self.positions: list[int] = rows.positions[0].tolist()
        return super().head_input(hidden, previous, rows, cache)

    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*head_input.shape[:2], VOCABULARY)
        for row, position in enumerate(self.positions):
            for rank, token in enumerate(self.script(position + 1)):
                logits[0, row, token] = 1000.0 - rank
        return logits


class ScriptedPolicy:
    """Takes the plans of steps from a list, again and again."""

    def __init__(self, plans: Iterable[str]) -> None:
        self.plans = [Plan.parse(plan) for plan in plans]
        self.steps = 0

    only_copies = False

    def reason(self, batch: int) -> str | None:
        return None

    def choose(self, batch: int) -> tuple[Plan, str | None]:
        plan = self.plans[self.steps % len(self.plans)]
        self.steps += 1
        return plan, None


class Decoding:
    """A batch on the reference backend without a scheduler: a test prefills its sequences and runs steps one by one."""

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        prompts: Sequence[list[int]],
        exit: Exit | None = None,
        plans: str | Sequence[str] = "none",
        new_tokens: int = 12,
        samples: int = 1,
        params: SamplingParams | None = None,
        candidates: PlanCandidates | None = None,
        agreement: float | None = None,
        rejection: bool = False,
        criteria: Sequence[Callable] = (),
        seed: int = 0,
    ) -> None:
        params = params or SamplingParams()
        self.sequences: list[Sequence_] = []
        for prompt in prompts:
            of_prompt = [
                Sequence_(prompt, seed, index, len(prompt) + new_tokens, params=params) for index in range(samples)
            ]
            for other in of_prompt[1:]:
                other.parent = of_prompt[0]
            self.sequences += of_prompt
        script = ScriptedPolicy([plans] if isinstance(plans, str) else plans)
        policy: Any = Policy(Rules(), params) if candidates else script
        drafter = None if exit is None else Drafter(exit, None, candidates, agreement)
        self.request = Request(
            self.sequences, policy=policy, drafter=drafter, rejection=rejection, criteria=tuple(criteria)
        )
        self.cache, self.exit, self.policy = cache, exit, policy
        self.backend = TorchBackend(model, cache)
        self.batch = Batch(self.backend, exit, Drafters(model, None, lambda *_: torch.empty(0)), Metrics())

    @torch.inference_mode()
    def prefill(self) -> Decoding:
        for sequence in self.sequences:
            if sequence.parent is None:
                while not self.backend.prefill([sequence], self.exit):
                    pass
            else:
                sequence.kv = self.cache.fork(sequence.parent.kv)
                sequence.previous_feature = sequence.parent.prompt_feature
        self.batch.join(self.sequences)
        return self

    @torch.inference_mode()
    def step(self, steps: int = 1) -> None:
        """Runs steps; returns the pages of sequences that have ended, as the scheduler does."""
        for _ in range(steps):
            self.batch.step()
            for sequence in [sequence for sequence in self.batch.running if sequence.is_finished]:
                self._leave(sequence)

    def run(self) -> Decoding:
        """Prefills and steps until all sequences have ended."""
        self.prefill()
        while self.batch.running:
            self.step()
        return self

    @torch.inference_mode()
    def fill_exit(self) -> None:
        """Fills the exit's KV of plainly decoded tokens."""
        assert self.exit is not None
        self.backend.fill_exit(self.batch.running, self.exit, score=False, in_flight=None)

    @torch.inference_mode()
    def draft(self, plan: str) -> list[list[int]]:
        """The tokens that would be drafted for each sequence in the next step."""
        self.fill_exit()
        shape = Plan.parse(plan)
        for sequence in self.batch.running:
            self.cache.reserve(sequence.kv, sequence.kv.length + len(shape) + 1)
        return self.backend.draft(self.batch.running, shape, self.exit).tokens[:, 1:].tolist()

    def close(self) -> None:
        for sequence in list(self.batch.running):
            self._leave(sequence)

    def _leave(self, sequence: Sequence_) -> None:
        self.batch.leave([sequence])
        self.cache.close(sequence.kv)


def new_cache(model: Decoder, pages: int = 40) -> Cache:
    return Cache(model.config, model.device, model.dtype, pages)


def decoding(engine: Engine, prompts: Sequence[list[int]], plans: Any, exit: Exit | None, **options: Any) -> Decoding:
    """Sequences on the pages of an engine's cache."""
    return Decoding(engine.model, engine.cache, prompts, exit, plans, **options)
