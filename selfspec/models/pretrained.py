"""Loads everything that an engine needs of a model: weights, tokenizer and generation config.

`stored_weights` gives the same weights without reading them, to plan memory.

`loading` loads folders, `gguf.native` loads GGUF files without expanding them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from selfspec.models.checkpoint import Checkpoint, Stored, check_folder, read_json
from selfspec.models.decoder import Decoder
from selfspec.models.gguf.model import GgufModel
from selfspec.models.gguf.native import load_native
from selfspec.models.gguf.tokenizer import build_tokenizer
from selfspec.models.loading import check_quantize, load_folder, pick_dtype, resolve, resolve_gguf, unread_checkpoint
from selfspec.models.quantized.folder import BITS

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
NATIVE = "native"  # the dtype that keeps a GGUF file's quantized weights


def load_pretrained(
    path_or_name: str | Path, device: torch.device, dtype: torch.dtype | str, quantize: str | None = None
) -> tuple[Decoder, Any, GenerationConfig]:
    """Loads a folder, a GGUF file, "demo" or a hub name: model, tokenizer (None: there is none) and generation config.
    `dtype` NATIVE: see `gguf.native`; of other dtypes a GGUF file is expanded once into a folder in the cache.
    `quantize`: see `load_folder`."""
    _check_native(dtype, quantize)
    if dtype == NATIVE:
        source = _native_source(path_or_name)
        tokenizer, config = build_tokenizer(source), GenerationConfig(**source.generation_config())
        return load_native(source, device), tokenizer, config
    folder = resolve(path_or_name)
    # Before the weights: a fault in these must not cost their loading.
    tokenizer, config = load_tokenizer(folder), load_generation_config(folder)
    return load_folder(folder, device, dtype, quantize), tokenizer, config


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a checked model folder; None if the folder has none."""
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise errors of many classes for a damaged file
        raise ValueError(f"the tokenizer in {folder} cannot be read ({error}); download or save it again") from error


def load_generation_config(folder: Path) -> GenerationConfig:
    """Returns the folder's generation_config.json, or the one that transformers derives from its config.json."""
    path = folder / "generation_config.json"
    if path.exists():
        read_json(path)  # raises an error that says what to do
        try:
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ValueError(f"{path} cannot be used ({error}); download or save it again") from error
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return GenerationConfig.from_model_config(config)


def _native_source(path_or_name: str | Path) -> GgufModel:
    path = resolve_gguf(path_or_name)
    if path is None:
        raise ValueError(
            f"dtype='native' keeps the quantized weights of a GGUF file, and {path_or_name} is none; use dtype='auto'"
        )
    return GgufModel(path)


def _check_native(dtype: torch.dtype | str, quantize: str | None) -> None:
    if dtype == NATIVE and quantize is not None:
        raise ValueError(f"dtype='native' keeps the stored weights; leave out dtype='native' or quantize={quantize!r}")


@dataclass(frozen=True)
class Weights:
    """One way to hold a model's weights."""

    name: str  # a value of `quantize` or of `dtype`, or "as stored" for a folder of quantized weights
    model: Decoder  # on PyTorch's meta device


def stored_weights(
    path_or_name: str | Path, device: torch.device, dtype: torch.dtype | str, quantize: str | None = None
) -> list[Weights]:
    """Returns the weights that `load_pretrained` will load on the device, then the other ways to hold them.

    Reads headers only, and expands no GGUF file; downloads a hub name's files.
    """
    _check_native(dtype, quantize)
    is_gguf = dtype == NATIVE or (path_or_name != "demo" and resolve_gguf(path_or_name) is not None)
    source = _native_source(path_or_name) if is_gguf else None
    if source is None:
        folder = resolve(path_or_name)
        checkpoint = check_folder(folder)
        check_quantize(quantize, checkpoint, folder)
    else:
        parts = [part for of_group in source.parts().values() for part in of_group]
        expanded = {part.name: Stored(source.path, part.shape, "BF16") for part in parts}
        checkpoint = Checkpoint(source.config, expanded, {})
    plain = pick_dtype("auto" if dtype == NATIVE else dtype, device, checkpoint.dtype)
    asked = NATIVE if dtype == NATIVE else quantize
    others = [] if checkpoint.quantized else [None, *reversed(BITS)] + ([] if source is None else [NATIVE])
    ways = [asked, *(way for way in others if way != asked)]
    return [_unread(way, checkpoint, source, plain) for way in ways]


def _unread(way: str | None, checkpoint: Checkpoint, source: GgufModel | None, dtype: torch.dtype) -> Weights:
    if way == NATIVE:
        assert source is not None
        return Weights(NATIVE, load_native(source, torch.device("meta"), dtype))
    name = way or ("as stored" if checkpoint.quantized else str(dtype).removeprefix("torch."))
    return Weights(name, unread_checkpoint(checkpoint, dtype, way))
