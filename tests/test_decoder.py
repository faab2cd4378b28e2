"""The decoder's logits equal transformers' for every family and config variant, for any split of tokens and layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    BitsAndBytesConfig,
    Gemma3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from selfspec import Engine
from selfspec.backends.torch_backend import PREFILL_CHUNK
from selfspec.cache.kv_cache import PAGE_SIZE, KVPages
from selfspec.cache.layout import Rows
from selfspec.models.config import ModelConfig
from selfspec.models.decoder import Decoder
from selfspec.models.loading import adopt
from selfspec.speculation.plan import Plan
from tests.scripted import new_cache
from tests.tiny import FAMILIES, VOCABULARY, tiny_config, tiny_model

LENGTH = PAGE_SIZE + 9  # longer than a page and than every tiny sliding window
TOLERANCE = 1e-4

families = pytest.mark.parametrize("family", FAMILIES)


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def transformers_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


class Run:
    """Sequences of one decoder and one cache, run pass by pass as a backend does."""

    def __init__(self, decoder: Decoder, sequences: int = 1) -> None:
        self.decoder = decoder
        self.cache = new_cache(decoder)
        self.sequences = [self.cache.open() for _ in range(sequences)]

    def tree(self, hidden: torch.Tensor, layers: range, plan: Plan, nodes: range) -> torch.Tensor:
        """Runs a range of layers over some nodes of a plan, for every sequence: [B, M, hidden]. Commits nothing."""
        for sequence in self.sequences:
            self.cache.reserve(sequence, sequence.length + nodes.stop)
        depths = torch.tensor(plan.depths[: nodes.stop])
        ancestors = plan.ancestors[nodes.start : nodes.stop, : nodes.stop]
        rows = Rows(self.sequences, nodes, depths, ancestors, self.decoder.device)
        return self.decoder.run(hidden, layers.start, layers.stop, rows, self.cache)

    def prompt(self, tokens: list[int], chunk: int = LENGTH, index: int = 0) -> torch.Tensor:
        """Runs and commits the tokens of one sequence, chunk by chunk: hidden states [T, hidden]."""
        starts = range(0, len(tokens), chunk)
        return torch.cat([self._chunk(tokens[start : start + chunk], self.sequences[index]) for start in starts])

    def _chunk(self, tokens: list[int], sequence: KVPages) -> torch.Tensor:
        count = len(tokens)
        self.cache.reserve(sequence, sequence.length + count)
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        rows = Rows([sequence], range(count), torch.arange(count), causal, self.decoder.device)
        hidden = self.decoder.embed(torch.tensor([tokens]))
        hidden = self.decoder.run(hidden, 0, self.decoder.config.num_layers, rows, self.cache)
        sequence.length += count
        return hidden[0]


def prompt_logits(model: PreTrainedModel, tokens: list[int], chunk: int) -> torch.Tensor:
    decoder = adopt(model)
    return decoder.logits(Run(decoder).prompt(tokens, chunk))


def max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


# Every family, in any division of tokens and layers


@cache
def reference(family: str) -> tuple[PreTrainedModel, list[int], torch.Tensor]:
    model, tokens = tiny_model(family, torch.float32), random_tokens(LENGTH)
    return model, tokens, transformers_logits(model, tokens)


@families
def test_logits_of_one_pass_equal_transformers(family: str) -> None:
    model, tokens, expected = reference(family)
    assert max_difference(prompt_logits(model, tokens, LENGTH), expected) < TOLERANCE


@families
def test_prefill_in_chunks_then_decoding_equals_transformers(family: str) -> None:
    model, tokens, expected = reference(family)
    run = Run(adopt(model))
    hidden = [run.prompt(tokens[:56], chunk=16), run.prompt(tokens[56:], chunk=1)]
    assert max_difference(run.decoder.logits(torch.cat(hidden)), expected) < TOLERANCE


@pytest.mark.parametrize(("family", "layer"), [*zip(FAMILIES, range(5), strict=True)])
def test_a_pass_split_at_a_layer_equals_transformers(family: str, layer: int) -> None:
    """The layers below run node by node, then the layers above run over all nodes in one pass, as a step does."""
    model, tokens, expected = reference(family)
    run = Run(adopt(model))
    run.prompt(tokens[:-6])
    embedded, plan = run.decoder.embed(torch.tensor([tokens[-6:]])), Plan.parse("chain:5")
    below = [run.tree(embedded[:, n : n + 1], range(layer), plan, range(n, n + 1)) for n in range(6)]
    hidden = run.tree(torch.cat(below, dim=1), range(layer, 4), plan, range(6))
    assert max_difference(run.decoder.logits(hidden[0]), expected[-6:]) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_prompt_of_several_prefill_chunks_equals_transformers(family: str) -> None:
    model, tokens = tiny_model(family, max_position_embeddings=1200), random_tokens(2 * PREFILL_CHUNK + 5)
    seen: list[torch.Tensor] = []

    def remember(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits[0])
        return logits

    Engine.from_model(model).generate(
        torch.tensor([tokens]), max_new_tokens=1, logits_processor=[remember], speculative_decoding=False
    )
    assert max_difference(seen[0], transformers_logits(model, tokens)[-1]) < TOLERANCE


# Trees and batches, in float64: a difference is a fault, not rounding


# Deeper than the windows, so that ancestors of a node lie outside of them, and with several children per node, so that
# slots are not positions.
TREE = Plan.parse("nodes:0.0,0.1,0.2,1.0,1.1,3.0,4.0,6.0,6.1,8.0,7.0,10.0,11.0,12.0,13.0,14.0,15.0,16.0")
ALL_NODES = range(len(TREE) + 1)


@families
def test_every_node_of_a_tree_equals_transformers_on_its_own_path(family: str) -> None:
    model, prompt, nodes = tiny_model(family), random_tokens(20), random_tokens(len(ALL_NODES), seed=1)
    run = Run(adopt(model))
    run.prompt(prompt)
    logits = run.decoder.logits(run.tree(run.decoder.embed(torch.tensor([nodes])), range(4), TREE, ALL_NODES)[0])
    for node in ALL_NODES:
        path = TREE.ancestors[node].nonzero().flatten().tolist()
        expected = transformers_logits(model, prompt + [nodes[n] for n in path])[-1]
        assert max_difference(logits[node], expected) < TOLERANCE, f"node {node}"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_tree_run_level_by_level_equals_the_tree_run_in_one_pass(family: str) -> None:
    decoder = adopt(tiny_model(family))
    embedded = decoder.embed(torch.tensor([random_tokens(len(ALL_NODES), seed=1)]))
    at_once, by_level = Run(decoder), Run(decoder)
    for run in (at_once, by_level):
        run.prompt(random_tokens(20))
    levels = [by_level.tree(embedded[:, level.start : level.stop], range(4), TREE, level) for level in TREE.levels]
    assert max_difference(torch.cat(levels, dim=1), at_once.tree(embedded, range(4), TREE, ALL_NODES)) < 1e-11


@pytest.mark.parametrize(
    ("family", "plan"),
    [("llama", "none"), ("qwen3", "chain:3"), ("gemma3_text", str(TREE))],
    ids=["plain", "chain", "tree"],
)
def test_sequences_of_different_lengths_in_one_pass_equal_each_alone(family: str, plan: str) -> None:
    decoder, shape = adopt(tiny_model(family)), Plan.parse(plan)
    nodes = range(len(shape) + 1)
    prompts = [random_tokens(length, seed=length) for length in (1, 12, PAGE_SIZE - 2, PAGE_SIZE, PAGE_SIZE + 30)]
    embedded = decoder.embed(torch.tensor([random_tokens(len(nodes), 100 + index) for index in range(len(prompts))]))
    together = Run(decoder, len(prompts))
    for index, prompt in enumerate(prompts):
        together.prompt(prompt, index=index)
    batch = together.tree(embedded, range(4), shape, nodes)
    for index, prompt in enumerate(prompts):
        alone = Run(decoder)
        alone.prompt(prompt)
        expected = alone.tree(embedded[index : index + 1], range(4), shape, nodes)
        assert max_difference(batch[index], expected[0]) < 1e-11, f"sequence {index}"


# Config variants


def scaled(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


def windowed(layers_without: int) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": layers_without}


LLAMA3 = scaled("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = scaled(
    "yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3
)
TWO_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    }
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_rope_default_other_base": ("llama", scaled("default", rope_theta=50.0)),
    "llama_rope_linear": ("llama", scaled("linear", factor=3.0)),
    "llama_rope_llama3": ("llama", LLAMA3),
    "llama_rope_yarn": ("llama", YARN),
    "llama_rope_dynamic_to_the_end": ("llama", scaled("dynamic", factor=4.0) | {"max_position_embeddings": LENGTH}),
    "gemma3_two_ropes": ("gemma3_text", TWO_ROPES),
    "gemma3_old_style_ropes": (
        "gemma3_text",
        {"rope_theta": 900.0, "rope_local_base_freq": 15.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2_untied": ("qwen2", {"tie_word_embeddings": False}),
    "gemma3_untied": ("gemma3_text", {"tie_word_embeddings": False}),
    "gemma3_softcapped": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "llama_softcapped": ("llama", {"final_logit_softcapping": 3.0}),  # transformers ignores it
    "gemma3_other_query_scale": ("gemma3_text", {"query_pre_attn_scalar": 40}),
    "gemma3_attention_bias": ("gemma3_text", {"attention_bias": True}),
    "gemma3_pattern_of_layers": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}),
    "llama_both_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_attention_bias": ("qwen3", {"attention_bias": True}),
    "qwen2_windows_from_layer_2": ("qwen2", windowed(2)),
    "qwen2_window_unused": ("qwen2", {"use_sliding_window": False, "sliding_window": 6, "max_window_layers": 0}),
    "qwen3_mixed_layer_types": (
        "qwen3",
        windowed(0) | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "mistral_without_window": ("mistral", {"sliding_window": None}),
    "mistral_window_of_one": ("mistral", {"sliding_window": 1}),
    "llama_kv_head_for_each": ("llama", {"num_key_value_heads": None}),
    "llama_wide_heads": ("llama", {"head_dim": 24}),
    "llama_gelu": ("llama", {"hidden_act": "gelu"}),
    "llama_large_epsilon": ("llama", {"rms_norm_eps": 0.5}),
    "llama_one_layer": ("llama", {"num_hidden_layers": 1}),
}


@pytest.mark.parametrize(("family", "overrides"), VARIANTS.values(), ids=VARIANTS)
def test_variant_equals_transformers(family: str, overrides: dict[str, Any]) -> None:
    model, tokens = tiny_model(family, torch.float32, **overrides), random_tokens(LENGTH)
    expected = transformers_logits(model, tokens)
    assert max_difference(prompt_logits(model, tokens, 48), expected) < TOLERANCE


def test_dynamic_rope_is_not_used_past_its_original_context() -> None:
    config = tiny_config("llama", max_position_embeddings=80, **scaled("dynamic", factor=4.0))
    assert ModelConfig.from_hf(config).context == 80


# 16-bit models: rounding is part of the model

sixteen_bits = pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float16), ("gemma3_text", torch.bfloat16)], ids=["float16", "gemma3-bfloat16"]
)


@sixteen_bits
def test_embedding_is_transformers_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    model, tokens = tiny_model(family, dtype), torch.tensor([random_tokens(40)])
    assert torch.equal(adopt(model).embed(tokens), model.get_input_embeddings()(tokens))


@sixteen_bits
def test_norm_rounds_no_more_than_transformers(family: str, dtype: torch.dtype) -> None:
    model, decoder = tiny_model(family), adopt(tiny_model(family, dtype))
    hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    model.model.norm.weight.data.copy_(decoder.norm)  # the rounded weights, computed with in float64
    exact = model.model.norm(hidden.double())
    roundings = 1 if family == "gemma3_text" else 2
    error = (decoder.normalise(hidden, decoder.norm).double() - exact).abs() / exact.abs()
    assert error.max() < roundings * torch.finfo(dtype).eps / 2 * 1.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_logits_are_float32_for_weights_of_any_dtype(dtype: torch.dtype) -> None:
    assert prompt_logits(tiny_model("llama", dtype), [5, 6, 7], 3).dtype == torch.float32


# Refused configs


def quantized(config: Any) -> PreTrainedConfig:
    hf = tiny_config("llama")
    hf.quantization_config = config
    return hf


@pytest.mark.parametrize(
    "config",
    [Qwen3MoeConfig(num_hidden_layers=1), Gemma3Config()],
    ids=["qwen3_moe", "gemma3_with_images"],
)
def test_unsupported_model_type_is_refused_with_the_supported_ones(config: PreTrainedConfig) -> None:
    with pytest.raises(ValueError, match=f"'{config.model_type}'.*llama, mistral, qwen2, qwen3, gemma3_text"):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        (BitsAndBytesConfig(load_in_8bit=True), "bitsandbytes"),
        ({"bits": 4}, "unknown method"),
    ],
    ids=["dict", "object", "unnamed"],
)
def test_quantized_checkpoint_is_refused_by_its_method(config: Any, method: str) -> None:
    with pytest.raises(ValueError, match=f"quantized .*{method}.*unquantized"):
        ModelConfig.from_hf(quantized(config))


def test_unsupported_rope_type_is_refused_with_the_supported_ones() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = tiny_config("llama", **scaled("longrope", factor=2.0, original_max_position_embeddings=64, **factors))
    with pytest.raises(ValueError, match="'longrope'.*default, linear, llama3, yarn, dynamic"):
        ModelConfig.from_hf(config)


def test_unsupported_rope_type_of_one_kind_of_layer_is_refused() -> None:
    config = tiny_config("gemma3_text", **TWO_ROPES)
    config.rope_parameters["full_attention"]["rope_type"] = "proportional"
    with pytest.raises(ValueError, match="'proportional'"):
        ModelConfig.from_hf(config)


def test_partial_rotation_is_refused() -> None:
    config = tiny_config("llama", **scaled("default", partial_rotary_factor=0.5))
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        ModelConfig.from_hf(config)


def test_unsupported_activation_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ValueError, match="'quick_gelu'.*silu.*gelu"):
        ModelConfig.from_hf(tiny_config("llama", hidden_act="quick_gelu"))


def test_attention_in_both_directions_is_refused() -> None:
    with pytest.raises(ValueError, match="both directions"):
        ModelConfig.from_hf(tiny_config("gemma3_text", use_bidirectional_attention=True))


def test_heads_that_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="4 query heads cannot share 3"):
        ModelConfig.from_hf(tiny_config("llama", num_key_value_heads=3))
