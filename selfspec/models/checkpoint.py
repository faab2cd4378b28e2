"""Checks a model folder without reading weights: config.json, the shard index, the headers of the safetensors files.

Raises ValueError for a folder that cannot be decoded. `loading` finds folders and copies tensors from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from selfspec.models.config import SUPPORTED_MODEL_TYPES, ModelConfig, check_supported
from selfspec.models.decoder import Part, model_parts
from selfspec.models.quantized.config import QuantizationFormat, Scheme, read_quantization_config
from selfspec.models.quantized.layouts import check_weight

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTIZED_DTYPES = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn}
_DTYPES = FLOAT_DTYPES | _QUANTIZED_DTYPES  # by safetensors' names

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 3  # names listed in an error
_READ_BY_TRANSFORMERS = ("config*.json", "tokenizer_config*.json")  # files whose auto_map transformers would follow


@dataclass(frozen=True)
class Stored:
    """The entry of a tensor in the header of a safetensors file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as "BF16"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _DTYPES[self.dtype].itemsize

    def unread(self) -> torch.Tensor:
        """The tensor on PyTorch's meta device."""
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device="meta")


@dataclass(frozen=True)
class QuantizedModule:
    """The tensors of a module whose weight is quantized."""

    name: str  # such as "model.layers.0.mlp.up_proj"
    scheme: Scheme
    tensors: dict[str, Stored]  # by the last part of their names


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose config.json is supported and whose safetensors files are complete."""

    config: ModelConfig
    tensors: dict[str, Stored]  # those that the decoder needs, by Hugging Face name
    quantized: dict[str, QuantizedModule]  # by Hugging Face name of the weight

    def stored_nbytes(self, part: Part) -> int:
        """Bytes of a tensor of the decoder in the files."""
        module = self.quantized.get(part.name)
        stored = [self.tensors[part.name]] if module is None else module.tensors.values()
        return sum(tensor.nbytes for tensor in stored)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which most weights that are not quantized are stored."""
        sizes: dict[str, int] = {}
        for stored in self.tensors.values():
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + prod(stored.shape)
        return FLOAT_DTYPES[max(sizes, key=lambda name: sizes[name])]


def check_folder(folder: Path) -> Checkpoint:
    """Checks the config and the headers of the weights; raises ValueError for a fault."""
    config = read_config(folder)
    stored: dict[str, Stored] = {}
    for file in _weight_files(folder):
        stored |= read_header(file)
    parts = [part for of_field in model_parts(config).values() for part in of_field]
    quantized = _quantized_modules(folder, parts, stored)
    parts = [part for part in parts if part.name not in quantized]
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    check_parts(parts, shapes, f"{folder} does not hold the model its config.json describes")
    needed = {part.name: stored[part.name] for part in parts}
    for name, tensor in needed.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} in {tensor.file} is stored as {tensor.dtype}, and config.json does not say how it is "
                "quantized. Use a checkpoint whose config.json has a quantization_config, the 16-bit one, or a GGUF "
                "file."
            )
    return Checkpoint(config, needed, quantized)


def _quantized_modules(folder: Path, parts: list[Part], stored: dict[str, Stored]) -> dict[str, QuantizedModule]:
    """Returns the modules that the folder's quantization_config quantizes, by their weights' names; checks names,
    shapes and dtypes of their tensors."""
    found = _read_format(read_json(folder / "config.json"))
    modules: dict[str, QuantizedModule] = {}
    for part in parts if found is not None else []:
        module, _, last = part.name.rpartition(".")
        scheme = found.scheme(module) if found is not None and last == "weight" else None
        if scheme is None:
            continue
        prefix = f"{module}."
        own = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
        try:
            check_weight(module, scheme, (part.shape[0], part.shape[1]), _on_meta(own))
        except ValueError as error:
            raise ValueError(f"{folder} cannot be loaded: {error}") from error
        modules[part.name] = QuantizedModule(module, scheme, own)
    return modules


def _on_meta(stored: dict[str, Stored]) -> dict[str, torch.Tensor]:
    """Returns tensors without data; raises ValueError for a dtype that no supported format has."""
    for name, tensor in stored.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} in {tensor.file} is stored as {tensor.dtype}, which no supported format has")
    return {name: tensor.unread() for name, tensor in stored.items()}


def _read_format(raw: Mapping[str, Any]) -> QuantizationFormat | None:
    """Returns the format of quantized weights that a config.json describes; None if it describes none."""
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ValueError("quantization_config must be an object; use the checkpoint's own config.json")
    return read_quantization_config(found)


def read_config(folder: Path) -> ModelConfig:
    """Reads config.json; raises ValueError for a model that selfspec does not decode and for one that brings code."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(_no_config(folder))
    raw = read_json(path)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{path} has no model_type; use a folder written by save_pretrained")
    check_no_code(folder)
    # Checked before transformers reads it: its errors about types, quantizers and sizes do not say what to do.
    try:
        _read_format(raw)
        check_supported(SimpleNamespace(**{**raw, "model_type": kind, "quantization_config": None}))
        hf_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        hf_config.quantization_config = None
        return ModelConfig.from_hf(hf_config)
    except Exception as error:
        raise ValueError(f"{path} cannot be used: {error}") from error


def check_no_code(folder: Path) -> None:
    """Raises ValueError if a config of the folder has an `auto_map`: it names Python code for transformers to run."""
    for path in sorted(path for pattern in _READ_BY_TRANSFORMERS for path in folder.glob(pattern)):
        if read_json(path).get("auto_map"):
            raise ValueError(
                f"{path} has the key auto_map: it asks to run Python code that comes with the checkpoint, and selfspec "
                f"runs none. If weights and tokenizer.json are those of a plain {', '.join(SUPPORTED_MODEL_TYPES)} "
                "model, delete that key in a copy of the folder and load the copy; otherwise use another checkpoint."
            )


def read_header(file: Path) -> dict[str, Stored]:
    """Returns the tensors of a safetensors file; checks its header and its size, and reads no tensor data."""
    try:
        with safe_open(file, framework="pt") as opened:
            entries = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: Stored(file, tuple(of.get_shape()), of.get_dtype()) for name, of in entries.items()}
    except SafetensorError as error:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is truncated or damaged, or a Git LFS pointer: {error}. Download or "
            "save it again."
        ) from error


def check_parts(parts: list[Part], shapes: Mapping[str, tuple[int, ...]], failure: str) -> None:
    """Raises ValueError, beginning with `failure`, that names the first tensors that are missing or misshapen."""
    missing = [part.name for part in parts if part.name not in shapes]
    if missing:
        raise ValueError(f"{failure}: missing {_some(missing)}. Use the complete checkpoint of a causal LM.")
    wrong = [
        f"{part.name} is {list(shapes[part.name])} instead of {list(part.shape)}"
        for part in parts
        if tuple(shapes[part.name]) != part.shape
    ]
    if wrong:
        raise ValueError(f"{failure}: {_some(wrong)}. Use the config.json and weights of one and the same checkpoint.")


def indexed_files(folder: Path) -> list[str] | None:
    """Returns the names of the weight files in the folder's index, sorted; None if it has no index."""
    index = folder / INDEX
    if not index.is_file():
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; download or save the checkpoint again")
    names = sorted({str(name) for name in weight_map.values()})
    foreign = [name for name in names if Path(name).name != name]
    if foreign:
        raise ValueError(f"{index} points outside its folder ({_some(foreign)}); download or save the checkpoint again")
    return names


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    names = indexed_files(folder)
    if names is None:
        raise ValueError(_no_weights(folder))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {_some(missing)} of the {len(names)} files in {INDEX}; download the missing files"
        )
    return [folder / name for name in names]


def _no_config(folder: Path) -> str:
    """Returns the error message for a folder without config.json."""
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if (folder / "adapter_config.json").is_file():
        return _ADAPTER.format(folder)
    if ggufs:
        return f"{folder} has no config.json but GGUF files; give the file itself, for example {folder / ggufs[0]}"
    return f"{folder} has no config.json; give the folder of a checkpoint written by save_pretrained"


def _no_weights(folder: Path) -> str:
    """Returns the error message for a folder without safetensors files."""

    def any_of(*patterns: str) -> list[str]:
        return sorted(path.name for pattern in patterns for path in folder.glob(pattern))

    if any_of("adapter_config.json", "adapter_model.*"):
        return _ADAPTER.format(folder)
    pickled = any_of("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
    if pickled:
        return (
            f"{folder} has only pickled weights ({_some(pickled)}), which can run code when they are opened; selfspec "
            "reads safetensors. If you trust them, convert them once: load the model with transformers and call "
            "save_pretrained(new_folder), which writes safetensors."
        )
    return (
        f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX}. "
        "Download the checkpoint again, or use one that comes as safetensors."
    )


_ADAPTER = (
    "{} holds an adapter, not a model; merge it into its base model first (merge_and_unload, then save_pretrained of "
    "the merged model and its tokenizer) and give that folder"
)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file; raises ValueError for a file that holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: JSON that is nested too deep
        raise ValueError(f"{path} cannot be read as JSON ({error}); download or save the checkpoint again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; download or save the checkpoint again")
    return content


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
