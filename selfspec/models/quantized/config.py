"""Reads `quantization_config` of config.json: a QuantizationFormat gives each module a Scheme, or None for 16 bits.

Raises ValueError, which names the field, for a format that selfspec does not read. Fields that say how a checkpoint was
made, and those about activations and the KV cache, which stay in 16 bit, are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_USE = "Use a checkpoint in compressed-tensors, GPTQ or AWQ format with 4 or 8 bits, a GGUF file, or the 16-bit one"

_LINEAR = re.compile(r"(_proj|lm_head)$")  # names of the linear modules of the supported families


@dataclass(frozen=True)
class Scheme:
    """The layout of a weight's tensors."""

    layout: str  # pack-quantized, int-quantized, float-quantized, fp8, gptq, gptq_v2 or awq
    bits: int
    shared: tuple[int, int]  # rows and columns of the weight that share a scale; 0: all of them
    symmetric: bool = True

    def group(self, k: int) -> int:
        """Returns the columns that share a scale, for a weight with k columns."""
        return self.shared[1] or k


@dataclass(frozen=True)
class QuantizationFormat:
    """The quantization_config of a checkpoint."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]  # targets and their scheme; "Linear": all linear modules
    ignored: tuple[str, ...] = ()  # like targets

    def scheme(self, module: str) -> Scheme | None:
        """Returns the scheme of a module ("model.layers.0.mlp.up_proj"); None if its weight is not quantized.

        A target or ignored entry is a module's name, "re:" and an expression that matches its beginning, or "Linear".
        Names come before expressions, expressions before "Linear".
        """
        if not _LINEAR.search(module) or any(_match(module, entry) is not None for entry in self.ignored):
            return None
        found = [
            (rank, index)
            for index, (targets, _) in enumerate(self.schemes)
            for target in targets
            if (rank := _match(module, target)) is not None
        ]
        return self.schemes[min(found)[1]][1] if found else None


def _match(module: str, target: str) -> int | None:
    """Returns 0 if a target is the module's name, 1 if its expression matches, 2 if it is "Linear", otherwise None."""
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else None
    return {module: 0, "Linear": 2}.get(target)


def read_quantization_config(config: Mapping[str, Any]) -> QuantizationFormat:
    """Returns the format that a quantization_config describes; raises ValueError for one that is not supported."""
    method = _text(config, "quant_method", "compressed-tensors" if "config_groups" in config else None)
    readers = {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq, "fp8": _fp8}
    if method not in readers:
        raise _bad("quant_method", method, "selfspec does not read this format")
    return readers[method](config)


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizationFormat:
    if config.get("transform_config"):
        raise _bad("transform_config", "set", "weights that need a rotation of their inputs are not supported")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _bad("sparsity_config", sparsity, "sparse weights are not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _bad("config_groups", groups, "it must be an object with at least one group")
    schemes = tuple(_config_group(config, name, group) for name, group in groups.items())
    ignored = _texts(config, "ignore")
    for entry in (*ignored, *(target for targets, _ in schemes for target in targets)):
        _check_expression(entry)
    return QuantizationFormat(schemes, ignored)


def _config_group(config: Mapping[str, Any], name: str, group: Any) -> tuple[tuple[str, ...], Scheme]:
    where = f"config_groups.{name}."
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise _bad(f"{where}weights", None, "only groups that quantize weights are supported")
    weights, where_weights = group["weights"], f"{where}weights."
    stored = _text(config, "format") if group.get("format") is None else _text(group, "format", where=where)
    kind = _text(weights, "type", "int", where_weights)
    layout = {"naive-quantized": f"{kind}-quantized"}.get(stored, stored)
    kinds = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"}
    if layout not in kinds:
        raise _bad("format", stored, f"selfspec reads {', '.join(kinds)} and naive-quantized with 8 bits")
    if kind != kinds[layout]:
        raise _bad(f"{where_weights}type", kind, f"{layout} weights have type {kinds[layout]}")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _bad(f"{where_weights}actorder", weights["actorder"], "use a checkpoint whose actorder is weight or null")
    if _flag(weights, "dynamic", False, where_weights):
        raise _bad(f"{where_weights}dynamic", True, "weights must have been quantized when the file was written")
    symmetric = _flag(weights, "symmetric", True, where_weights)
    if layout != "pack-quantized" and not symmetric:
        raise _bad(f"{where_weights}symmetric", False, f"{layout} weights must be symmetric")
    bits = _bits(weights, "num_bits", (4, 8) if layout == "pack-quantized" else (8,), where_weights, default=8)
    targets = _texts(group, "targets", where)
    if not targets:
        raise _bad(f"{where}targets", None, "it must name at least one target")
    return targets, Scheme(layout, bits, _shared(layout, weights, where_weights), symmetric)


def _shared(layout: str, weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Returns the rows and columns that share a scale, 0 for all, from the strategy of a group's weights."""
    given = weights.get("group_size")
    default = "tensor" if given is None else "channel" if given == -1 else "group"
    strategy = default if weights.get("strategy") is None else _text(weights, "strategy", where=where)
    allowed = ["channel", "group"] if layout == "pack-quantized" else ["tensor", "channel", "group", "block"]
    if strategy not in allowed:
        raise _bad(f"{where}strategy", strategy, f"selfspec reads {', '.join(allowed)} for {layout} weights")
    if strategy == "group":
        return 1, _integer(weights, "group_size", where=where)
    if strategy == "block":
        return _block(weights, "block_structure", where)
    if given not in (None, -1):
        raise _bad(f"{where}group_size", given, f"the strategy {strategy} has no groups")
    return (1, 0) if strategy == "channel" else (0, 0)


def _gptq(config: Mapping[str, Any]) -> QuantizationFormat:
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise _bad("checkpoint_format", layout, "selfspec reads gptq and gptq_v2; save the checkpoint in one of these")
    if config.get("pack_dtype") not in (None, "int32"):
        raise _bad("pack_dtype", config["pack_dtype"], "selfspec reads int32")
    scheme = Scheme(layout, _bits(config, "bits", (4, 8)), _columns(config, "group_size"), _flag(config, "sym", True))
    return QuantizationFormat(((("Linear",), scheme),), _left_out_by_gptq(config))


def _left_out_by_gptq(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the modules in 16 bit: lm_head unless the config quantizes it, and those that other fields leave out."""
    left_out = [] if _flag(config, "lm_head", False) else ["lm_head"]
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(rule, str) and rule.startswith("-:") for rule in rules):
        raise _bad("dynamic", rules, "selfspec reads rules that exclude modules (-:), not those that change their bits")
    left_out += [_check_expression(f"re:{rule[2:]}") for rule in rules]
    inside = config.get("modules_in_block_to_quantize")
    if inside is not None:
        if not isinstance(inside, list):
            raise _bad("modules_in_block_to_quantize", inside, "it must be a list of module names")
        names = [name for entry in inside for name in (entry if isinstance(entry, list) else [entry])]
        kept = "|".join(re.escape(str(name)) for name in names)
        left_out.append(rf"re:(?!.*\.({kept})$)")  # all that do not end like one of the names
    return tuple(left_out)


def _awq(config: Mapping[str, Any]) -> QuantizationFormat:
    layout = config.get("version") or config.get("format") or "gemm"
    if not isinstance(layout, str) or layout.lower() != "gemm":
        raise _bad("version", layout, "selfspec reads the gemm layout; use a checkpoint with version gemm")
    scheme = Scheme(
        "awq",
        _bits(config, "bits" if "w_bit" not in config else "w_bit", (4,), default=4),
        _columns(config, "group_size" if "q_group_size" not in config else "q_group_size"),
        symmetric=not _flag(config, "zero_point", True),
    )
    return QuantizationFormat(((("Linear",), scheme),), ("lm_head", *_parts(config, "modules_to_not_convert")))


def _fp8(config: Mapping[str, Any]) -> QuantizationFormat:
    if config.get("scale_fmt") not in (None, "float"):
        raise _bad("scale_fmt", config["scale_fmt"], "selfspec reads float scales")
    if config.get("weight_block_size") is None:
        raise _bad("weight_block_size", None, "selfspec reads fp8 weights with block scales, or float-quantized ones")
    scheme = Scheme("fp8", 8, _block(config, "weight_block_size"))
    ignored = "modules_to_not_convert" if config.get("modules_to_not_convert") is not None else "ignored_layers"
    return QuantizationFormat(((("Linear",), scheme),), ("lm_head", *_parts(config, ignored)))


def _parts(config: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Returns a list of names as expressions for the modules in whose names they are one or more whole parts."""
    return tuple(rf"re:(.*\.)?{re.escape(name.strip('.'))}(\.|$)" for name in _texts(config, field))


def _bits(
    config: Mapping[str, Any], field: str, allowed: tuple[int, ...], where: str = "", default: int | None = None
) -> int:
    bits = _integer(config, field, default, where)
    if bits not in allowed:
        raise _bad(where + field, bits, f"selfspec reads {' and '.join(str(n) for n in allowed)} bit")
    return bits


def _columns(config: Mapping[str, Any], field: str) -> tuple[int, int]:
    """Returns the rows and columns that share a scale, from a group size; -1 means all columns of a row."""
    return (1, 0) if config.get(field) == -1 else (1, _integer(config, field, 128))


def _block(config: Mapping[str, Any], field: str, where: str = "") -> tuple[int, int]:
    block = config.get(field)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(x) is int and x > 0 for x in block):
        raise _bad(where + field, block, "it must be a list of two integers above 0")
    return block[0], block[1]


def _integer(config: Mapping[str, Any], field: str, default: int | None = None, where: str = "") -> int:
    value = config.get(field, default)
    if type(value) is not int or value < 1:
        raise _bad(where + field, value, "it must be an integer above 0")
    return value


def _flag(config: Mapping[str, Any], field: str, default: bool, where: str = "") -> bool:
    value = config.get(field, default)
    if type(value) is not bool:
        raise _bad(where + field, value, "it must be true or false")
    return value


def _text(config: Mapping[str, Any], field: str, default: str | None = None, where: str = "") -> str:
    value = config.get(field, default)
    if not isinstance(value, str):
        raise _bad(where + field, value, "it must be a text")
    return value


def _texts(config: Mapping[str, Any], field: str, where: str = "") -> tuple[str, ...]:
    value = config.get(field) or []
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise _bad(where + field, value, "it must be a list of texts")
    return tuple(value)


def _check_expression(entry: str) -> str:
    try:
        re.compile(entry[3:] if entry.startswith("re:") else "")
    except re.error as error:
        raise _bad("targets or ignore", entry, f"it is no regular expression ({error})") from error
    return entry


def _bad(field: str, value: Any, advice: str) -> ValueError:
    return ValueError(f"quantization_config.{field} is {str(value)[:80]!r}: {advice}. {_USE}.")
