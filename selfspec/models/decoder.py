"""The one decoder of every supported family: embedding, any contiguous range of layers, final norm and LM head.

Holds weights and computes with them as ModelConfig says. `loading` fills the weights, `cache` lays out slots and pages,
`attention` chooses the attention implementation; drafting and verifying are ranges of layers that a backend runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.kernels.constants import ACTIVATIONS
from selfspec.models.attention import attend
from selfspec.models.config import LayerConfig, ModelConfig
from selfspec.models.linear import Linear, Weight

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q, k, v [B, M, H, D] -> [B, M, Hq, D]


LINEARS = ("qkv", "out", "gate_up", "down")  # fields of Layer that are Linear


@dataclass(frozen=True)
class Part:
    """The Hugging Face name and the shape of a checkpoint tensor."""

    name: str
    shape: tuple[int, ...]


@dataclass
class Layer:
    """Weights of one decoder layer; projections with the same input are fused along the output dimension."""

    attention_norm: torch.Tensor
    qkv: Linear  # [(Hq + 2 Hkv) * D, hidden]
    out: Linear  # [hidden, Hq * D]
    mlp_norm: torch.Tensor
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Weight]) -> Layer:
        """Builds a layer from its weights by the names of `layer_parts`: "qkv", "qkv_bias", "q_norm" and so on."""
        values: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name.endswith("norm")}
        values |= {name: Linear(tensors[name], tensors.get(f"{name}_bias")) for name in LINEARS}
        return cls(**values)

    def tensors(self) -> dict[str, Weight]:
        """Returns the weights that the layer has, by the names of `layer_parts`."""
        named: dict[str, Weight] = {}
        for name, value in vars(self).items():
            if isinstance(value, Linear):
                named[name] = value.weight
                if value.bias is not None:
                    named[f"{name}_bias"] = value.bias
            elif value is not None:
                named[name] = value
        return named


def layer_parts(config: ModelConfig, prefix: str) -> dict[str, tuple[Part, ...]]:
    """Returns, for each weight of a Layer that the model has, the checkpoint tensors that it fuses, in their order."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}

    def part(name: str, *shape: int) -> Part:
        return Part(f"{prefix}.{name}", shape)

    gemma = config.sandwich_norms
    parts: dict[str, tuple[Part, ...]] = {
        "attention_norm": (part("input_layernorm.weight", hidden),),
        "qkv": tuple(part(f"self_attn.{x}_proj.weight", size, hidden) for x, size in heads.items()),
        "out": (part("self_attn.o_proj.weight", hidden, heads["q"]),),
        "mlp_norm": (part(f"{'pre_feedforward' if gemma else 'post_attention'}_layernorm.weight", hidden),),
        "gate_up": tuple(part(f"mlp.{x}_proj.weight", inner, hidden) for x in ("gate", "up")),
        "down": (part("mlp.down_proj.weight", hidden, inner),),
    }
    if config.qkv_bias:
        parts["qkv_bias"] = tuple(part(f"self_attn.{x}_proj.bias", size) for x, size in heads.items())
    if config.out_bias:
        parts["out_bias"] = (part("self_attn.o_proj.bias", hidden),)
    if config.mlp_bias:
        parts["gate_up_bias"] = tuple(part(f"mlp.{x}_proj.bias", inner) for x in ("gate", "up"))
        parts["down_bias"] = (part("mlp.down_proj.bias", hidden),)
    if config.qk_norm:
        parts["q_norm"] = (part("self_attn.q_norm.weight", dim),)
        parts["k_norm"] = (part("self_attn.k_norm.weight", dim),)
    if gemma:
        parts["attention_out_norm"] = (part("post_attention_layernorm.weight", hidden),)
        parts["mlp_out_norm"] = (part("post_feedforward_layernorm.weight", hidden),)
    return parts


def model_parts(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Returns the checkpoint tensors of 'embedding', 'norm', 'head' (unless tied), 'layers.0.qkv' and so on."""
    parts: dict[str, tuple[Part, ...]] = {
        "embedding": (Part("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)),),
        "norm": (Part("model.norm.weight", (config.hidden_size,)),),
    }
    if not config.tied_head:
        parts["head"] = (Part("lm_head.weight", (config.vocab_size, config.hidden_size)),)
    for index in range(config.num_layers):
        for field, of_field in layer_parts(config, f"model.layers.{index}").items():
            parts[f"layers.{index}.{field}"] = of_field
    return parts


class Decoder:
    """A causal LM whose layers can be run in any contiguous range."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Weight]) -> None:
        self.config = config
        self.embedding = Linear(tensors["embedding"])  # [vocabulary, hidden]
        self.norm = tensors["norm"]  # [hidden]
        self.head = Linear(tensors["head"]) if "head" in tensors else self.embedding  # [vocabulary, hidden]
        self.layers = [
            Layer.of({name: tensors[f"layers.{index}.{name}"] for name in layer_parts(config, "")})
            for index in range(config.num_layers)
        ]
        self.activation = ACTIVATIONS[config.activation]

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @cached_property
    def is_quantized(self) -> bool:
        """True if at least one weight is stored in 4 or 8 bits."""
        weights = [self.embedding.weight, self.head.weight]
        weights += [weight for layer in self.layers for weight in layer.tensors().values()]
        return not all(isinstance(weight, torch.Tensor) for weight in weights)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied head counts once."""
        head = 0 if self.head is self.embedding else self.head.nbytes
        of_layers = sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors().values())
        return self.embedding.nbytes + self.norm.nbytes + head + of_layers

    @cached_property
    def inv_freqs(self) -> list[torch.Tensor]:
        return [torch.tensor(rope.inv_freq, device=self.device, dtype=torch.float32) for rope in self.config.ropes]

    @cached_property
    def embedding_scale(self) -> torch.Tensor | None:
        scale = self.config.embedding_scale
        # Rounded to the model's dtype, as in transformers.
        return None if scale is None else torch.tensor(scale, device=self.device).to(self.dtype)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [B, M] to hidden states [B, M, hidden]."""
        hidden = self.embedding.rows(tokens, self.dtype)
        return hidden if self.embedding_scale is None else hidden * self.embedding_scale

    def run(self, hidden: torch.Tensor, start_layer: int, stop_layer: int, rows: Rows, cache: Cache) -> torch.Tensor:
        """Runs layers start_layer to stop_layer - 1 over hidden states [B, M, hidden] of `rows`; stores their keys and
        values in the cache."""
        if start_layer == stop_layer:
            return hidden
        rotations = self.rotations_of(rows)
        for index in range(start_layer, stop_layer):
            spec = self.config.layers[index]
            hidden = self.run_layer(
                self.layers[index], spec, hidden, rotations, self.attend_cached(spec, index, rows, cache)
            )
        return hidden

    def attend_cached(self, spec: LayerConfig, cache_layer: int, rows: Rows, cache: Cache) -> Attend:
        """Returns the attention function of a layer whose keys and values are layer `cache_layer` of the cache: its own
        index, or `cache.exit_layer_index` for an exit block."""
        return lambda q, k, v: attend(q, k, v, cache, cache_layer, rows, spec.window, self.config.attention_scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and full head: [..., hidden] to float32 logits [..., vocabulary]."""
        return self.project(self.head_input(hidden), self.head)

    def head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """The LM head's input: the final norm of the last layer's output."""
        return self.normalise(hidden, self.norm)

    def project(self, hidden: torch.Tensor, head: Linear) -> torch.Tensor:
        """Normed states [..., hidden] times head rows [K, hidden]: float32 logits [..., K], computed in the model's
        dtype and softcapped if the model is."""
        logits = head.apply(hidden).float()
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def run_layer(
        self,
        layer: Layer,
        spec: LayerConfig,
        hidden: torch.Tensor,
        rotations: list[tuple[torch.Tensor, torch.Tensor]],
        attend: Attend,
    ) -> torch.Tensor:
        """Runs one decoder layer over hidden states [B, M, hidden]; `attend` masks, and stores keys and values."""
        q, k, v = self.queries_keys_values(layer, hidden, rotations[spec.rope])
        attended = attend(q, k, v)
        update = layer.out.apply(attended.flatten(-2))
        if layer.attention_out_norm is not None:
            update = self.normalise(update, layer.attention_out_norm)
        hidden = hidden + update
        gate, up = layer.gate_up.apply(self.normalise(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        update = layer.down.apply(self.activation(gate) * up)
        if layer.mlp_out_norm is not None:
            update = self.normalise(update, layer.mlp_out_norm)
        return hidden + update

    def queries_keys_values(
        self, layer: Layer, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norms, projects and rotates hidden states: q [B, M, Hq, D], k and v [B, M, Hkv, D] (v is not rotated)."""
        config = self.config
        qkv = layer.qkv.apply(self.normalise(hidden, layer.attention_norm))
        heads = qkv.unflatten(-1, (-1, config.head_dim))
        qk, v = heads.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), dim=-2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split((config.num_heads, config.num_kv_heads), dim=-2)
            qk = torch.cat((self.normalise(q, layer.q_norm), self.normalise(k, layer.k_norm)), dim=-2)
        q, k = rotate(qk, rotation).split((config.num_heads, config.num_kv_heads), dim=-2)
        return q, k, v

    def normalise(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, computed in float32 or wider."""
        if not self.config.norm_offset:
            return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)
        wide = torch.promote_types(hidden.dtype, torch.float32)  # 1 + weight would be rounded in 16 bits
        scale = self.config.norm_offset + weight.to(wide)
        return F.rms_norm(hidden.to(wide), weight.shape, scale, self.config.norm_eps).to(hidden.dtype)

    def rotations_of(self, rows: Rows) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns `rotations` of the rows' positions; computes them once for all layers and calls of `run`."""
        if rows.rotations is None:
            rows.rotations = self.rotations(rows.positions)
        return rows.rotations

    def rotations(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns cosines and signed sines, each [B, M, 1, D], of positions [B, M] for each rope of the model."""
        pairs = []
        for rope, inv_freq in zip(self.config.ropes, self.inv_freqs, strict=True):
            angles = positions[:, :, None, None].float() * inv_freq
            cos = (angles.cos() * rope.scaling).to(self.dtype)
            sin = (angles.sin() * rope.scaling).to(self.dtype)
            pairs.append((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))
        return pairs


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of heads [B, M, H, D]: rotates coordinates i and i + D/2 of a head as a pair."""
    cos, signed_sin = rotation
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * signed_sin
