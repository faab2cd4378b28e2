"""Texts, exits, prompts and costs of tiny models, for the tests of calibration."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from selfspec.calibrate.choice import StepCost
from selfspec.calibrate.corpus import Corpus, Document
from selfspec.calibrate.training import Student
from selfspec.engine import Engine
from selfspec.governor.rules import BATCHES
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_NODES
from tests.scripted import random_prompt
from tests.tiny_tokenizer import tiny_tokenizer

# A user's turn starts with <s>u: and ends with ; and a new line; an answer ends with ; or </s>.
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role[0] }}:{{ message.content }};\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@torch.no_grad()
def quieten(model: PreTrainedModel, from_layer: int, factor: float) -> PreTrainedModel:
    """Scales the output of a llama's layers from `from_layer` on, so that drafts from below are often accepted."""
    for layer in model.model.layers[from_layer:]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_(factor)
    return model


@torch.no_grad()
def random_exit(model: Decoder, layer: int, scale: float = 0.1) -> Exit:
    """An exit whose every tensor differs from an untrained one."""
    generator = torch.Generator().manual_seed(layer)
    student = Student(model, layer)
    for parameter in student.parameters.values():
        parameter += scale * torch.randn(parameter.shape, generator=generator)
    return student.exit()


def random_documents(*lengths: int, written: int = 2) -> list[Document]:
    return [Document(random_prompt(length, seed), written, seed) for seed, length in enumerate(lengths)]


@dataclass(frozen=True)
class Written:
    """A document in a row."""

    start: int
    tokens: list[int]
    positions: list[int]
    predicts: list[bool]
    domains: set[int]


def documents_of(corpus: Corpus, row: int) -> list[Written]:
    """The documents of a row, in order."""
    numbers = corpus.documents[row].tolist()
    found = []
    for number in sorted(set(numbers) - {0}):
        start, count = numbers.index(number), numbers.count(number)
        part = slice(start, start + count)
        assert set(numbers[part]) == {number}, "a document is in one piece"
        tensors = (corpus.tokens, corpus.positions, corpus.predicts)
        lists = (tensor[row, part].tolist() for tensor in tensors)
        found.append(Written(start, *lists, set(corpus.domains[row, part].tolist())))
    return found


def linear_cost(
    plain: float, cycle: float, depth: float, node: float, head_row: float = 0.0, head_rows: int = 0
) -> StepCost:
    """Costs that are linear in the number of nodes; a step that drafts adds `cycle`."""
    ends = tuple((nodes, plain + cycle + nodes * node) for nodes in (1, MAX_NODES))
    return StepCost(plain, depth, ends, head_row, head_rows)


def cheap_drafting(engine: Engine, exits: list[Exit]) -> dict[tuple[int, int], StepCost]:
    """Equal costs for every exit and batch, with which drafting is faster than plain decoding."""
    cost = linear_cost(1.0, cycle=0.02, depth=0.03, node=0.02)
    return {(exit.layer, batch): cost for exit in exits for batch in BATCHES.values()}


def write_prompts(path: Path, letters: str, count: int = 16) -> Path:
    """Writes a domain's prompts: random words of some letters."""
    source = random.Random(letters)
    prompts = ["".join(source.choice(letters) for _ in range(12)) for _ in range(count)]
    return write_lines(path, [json.dumps({"prompt": prompt}) for prompt in prompts])


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
