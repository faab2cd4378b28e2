"""Models of a named shape with random weights, to measure speed where real weights are not available.

Their text is meaningless; times, bytes and exactness are not. The output of the layers from the exit on is scaled
(damped), so that the exit agrees with the whole model at a chosen rate, as a trained one would.

Damping alone gives an exit that is nearly right when it is wrong: with 70% agreement on the best token, the best four
contain it in 96% of the cases, more than with real exits. Where the LM head is a tensor of its own, a share of the
tokens therefore has short embeddings ("hard tokens"): after one of them the damped layers decide the next token, and
the exit's ranking is random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from bench.quantized import head_format, random_weight
from selfspec import Engine
from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.cache.size import pages_for
from selfspec.models.config import ModelConfig
from selfspec.models.decoder import Decoder, model_parts
from selfspec.models.linear import Weight
from selfspec.models.quantized.folder import rounded_bits
from selfspec.models.quantized.rounding import quantize as round_weight
from selfspec.models.quantized.tensor import pack
from selfspec.speculation.exit import Exit

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    },
    "llama-1.5b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 32768,
    },
    "qwen-1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "rope_theta": 1000000.0,
        "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def config_of(shape: str) -> ModelConfig:
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} does not exist: choose one of {', '.join(SHAPES)}")
    return ModelConfig.from_hf(AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]}))


@torch.no_grad()
def synthetic(
    shape: str, device: str, dtype: torch.dtype, exit_layer: int | None = None, damping: float = 1.0, seed: int = 0
) -> Decoder:
    """A model of this shape; the output of its layers from `exit_layer` on is multiplied by `damping`. Every weight is
    drawn on its device and in its dtype, so that no more memory is taken than the model has."""
    config = config_of(shape)
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, parts in model_parts(config).items():
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1:]
        weight = tensors[name] = torch.empty(rows, *columns, device=device, dtype=dtype)
        if name.endswith("norm"):
            weight.fill_(1)
            continue
        weight.normal_(0, _std(name, columns), generator=generator)
        if exit_layer is not None and name.endswith((".out", ".down")) and int(name.split(".")[1]) >= exit_layer:
            weight *= damping
    return Decoder(config, tensors)


@torch.no_grad()
def rounded(model: Decoder, quantize: str) -> Decoder:
    """The model with its weights rounded to "int4" or "int8", as `quantize=` rounds them at load."""
    tensors: dict[str, Weight] = {"embedding": model.embedding.dense, "norm": model.norm}
    if model.head is not model.embedding:
        tensors["head"] = model.head.dense
    for index, layer in enumerate(model.layers):
        tensors |= {f"layers.{index}.{name}": weight for name, weight in layer.tensors().items()}
    for name, weight in tensors.items():
        if isinstance(weight, torch.Tensor) and weight.ndim == 2:
            tensors[name] = pack([round_weight(weight, rounded_bits(name, quantize), 128)])
    return Decoder(model.config, tensors)


@torch.no_grad()
def random_quantized(shape: str, format: str) -> Decoder:
    """A model of this shape on the GPU with random weights of a format of `bench.quantized`."""
    config = config_of(shape)
    tensors: dict[str, Weight] = {}
    for name, parts in model_parts(config).items():
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1:]
        if columns:
            kept = head_format(format) if name in ("embedding", "head") else format
            tensors[name] = random_weight(rows, columns[0], kept, "cuda")
        else:
            tensors[name] = torch.ones(rows, device="cuda", dtype=torch.bfloat16)
    return Decoder(config, tensors)


def _std(name: str, columns: tuple[int, ...]) -> float:
    """Standard deviation of a weight: hidden states of about unit size, logits spread like a trained model's."""
    if name == "embedding":
        return 1.0
    if not columns:
        return 0.3  # a bias
    return (8.0 if name == "head" else 1.0) * columns[0] ** -0.5


RARE = 1 / 64  # factor on the LM head's rows of tokens that shall never be chosen


@torch.no_grad()
def keep_to(model: Decoder, used: int) -> torch.Tensor | None:
    """Restricts the model to its first `used` tokens, as real text uses a part of the vocabulary, and returns their ids
    for a trimmed LM head. Returns None and changes nothing where the head is the embedding."""
    if model.head is model.embedding or used >= model.config.vocab_size:
        return None
    model.head.dense[used:].mul_(RARE)
    return torch.arange(used, device=model.device)


LONG, SHORT = 16.0, 0.25  # factors on embeddings of other and of hard tokens: powers of two, which round nothing
MOST_RANKED = 4  # tokens of the exit that are compared with the model's choice


@dataclass(frozen=True)
class Agreement:
    """Share of positions at which the exit's best token, or one of its best four, is the model's choice."""

    top1: float
    top4: float


class Tunable:
    """A synthetic model whose exit can be made to agree more or less; changes weights in place."""

    def __init__(self, model: Decoder, exit_layer: int) -> None:
        self.model, self.exit_layer = model, exit_layer
        self.damping, self.hard_share = 1.0, 0.0
        self.has_hard_tokens = model.head is not model.embedding
        generator = torch.Generator().manual_seed(0)
        self._order = torch.randperm(model.config.vocab_size, generator=generator).to(model.device)
        if self.has_hard_tokens:
            model.embedding.dense.mul_(LONG)

    def damp(self, damping: float) -> None:
        """Multiplies the original output of the layers from the exit on by `damping`."""
        for layer in self.model.layers[self.exit_layer :]:
            layer.out.dense.mul_(damping / self.damping)
            layer.down.dense.mul_(damping / self.damping)
        self.damping = damping

    def harden(self, share: float) -> None:
        """Makes this share of the tokens hard, always in the same order."""
        count = self.model.config.vocab_size
        now, wanted = round(self.hard_share * count), round(share * count)
        scale = SHORT / LONG if wanted > now else LONG / SHORT
        self.model.embedding.dense[self._order[min(now, wanted) : max(now, wanted)]] *= scale
        self.hard_share = share


@torch.no_grad()
def tune(
    tunable: Tunable, wanted: Agreement, measure: Callable[[], Agreement], rounds: int = 3, steps: int = 7
) -> Agreement:
    """Searches the damping for the wanted top-1 agreement and, where there are hard tokens, their share for top-4."""
    best: tuple[float, float, float, Agreement] | None = None
    low, high = math.log(1e-4), math.log(16.0)
    share = min(0.9, 1 - wanted.top4)
    for _ in range(rounds if tunable.has_hard_tokens else 1):
        if tunable.has_hard_tokens:
            tunable.harden(share)
        for _ in range(steps):
            tunable.damp(math.exp((low + high) / 2))
            found = measure()
            low, high = ((low + high) / 2, high) if found.top1 > wanted.top1 else (low, (low + high) / 2)
            error = abs(found.top1 - wanted.top1) + tunable.has_hard_tokens * abs(found.top4 - wanted.top4)
            if best is None or error < best[0]:
                best = error, tunable.damping, tunable.hard_share, found
        share = min(0.9, max(0.0, share + found.top4 - wanted.top4))
        middle = (low + high) / 2
        low, high = middle - 1, middle + 1  # another share of hard tokens needs a slightly different damping
    assert best is not None
    tunable.damp(best[1])
    if tunable.has_hard_tokens:
        tunable.harden(best[2])
    return best[3]


@torch.no_grad()
def agreement(model: Decoder, exit_layer: int, texts: torch.Tensor, prompt: int) -> Agreement:
    """Agreement of the untrained exit with the model's own texts [B, T], after their first `prompt` tokens."""
    exit, hits = Exit(model, exit_layer), torch.zeros(MOST_RANKED)
    count = texts.shape[1] - 1
    cache = Cache(model.config, model.device, model.dtype, pages_for(count))
    for text in texts.to(model.device):
        sequence = cache.open()
        cache.reserve(sequence, count)
        rows = Rows.causal([sequence], count, model.device)
        hidden = model.run(model.embed(text[None, :-1]), 0, exit_layer, rows, cache)[:, prompt - 1 :]
        ranked = exit.logits(exit.head_input(hidden, hidden, rows, cache))[0].topk(MOST_RANKED).indices
        hits += (ranked == text[prompt:, None]).sum(0).cpu()
        cache.close(sequence)
    shares = hits / (len(texts) * (texts.shape[1] - prompt))
    return Agreement(float(shares[0]), float(shares.sum()))


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of a shape, without special tokens: token i is the word w<i>, after a space."""
    tokenizer = Tokenizer(WordLevel({f"\u2581w{token}": token for token in range(vocabulary)}, unk_token="\u2581w0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def random_prompts(model: Decoder, count: int, length: int, seed: int = 0) -> torch.Tensor:
    """Tokens [count, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count, length), generator=generator)


def own_text_agreement(
    engine: Engine, exit_layer: int, texts: int = 16, prompt: int = 16, new: int = 128, seed: int = 1
) -> Agreement:
    """Agreement of the untrained exit with greedy text that the model writes with its present weights."""
    prompts = random_prompts(engine.model, texts, prompt, seed).to(engine.model.device)
    written = engine.generate(prompts, max_new_tokens=new, do_sample=False, speculative_decoding=False)
    assert isinstance(written, torch.Tensor)
    return agreement(engine.model, exit_layer, written, prompt)


def tune_exit(engine: Engine, exit_layer: int, wanted: Agreement, used: int | None = None) -> dict[str, Any]:
    """Gives the engine an untrained exit that agrees with the model as often as wanted, and restricts both to the first
    `used` tokens, by default a quarter of all. Returns the tuned values."""
    model = engine.model
    rows = keep_to(model, used or model.config.vocab_size // 4)
    engine.drafters.exits[exit_layer] = exit = Exit(model, exit_layer).with_head_rows(rows, [])
    tunable = Tunable(model, exit_layer)
    found = tune(tunable, wanted, lambda: own_text_agreement(engine, exit_layer))
    tuned = {"exit_layer": exit_layer, "damping": tunable.damping, "hard_share": tunable.hard_share, **asdict(found)}
    return tuned | {"wanted_top1": wanted.top1, "wanted_top4": wanted.top4, "draft_tokens": exit.vocabulary}
