"""Loads everything that an engine needs of a model: weights, tokenizer and generation config.

`loading` loads folders, `gguf.native` loads GGUF files without expanding them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from selfspec.models.decoder import Decoder
from selfspec.models.gguf.model import GgufModel
from selfspec.models.gguf.native import load_native
from selfspec.models.gguf.tokenizer import build_tokenizer
from selfspec.models.loading import load_folder, resolve, resolve_gguf
from selfspec.models.tokenizer import load_generation_config, load_tokenizer

NATIVE = "native"  # the dtype that keeps a GGUF file's quantized weights


@dataclass(frozen=True)
class Pretrained:
    """A loaded model."""

    model: Decoder
    tokenizer: Any  # None: there is none beside the weights
    generation_config: GenerationConfig


def load_pretrained(
    path_or_name: str | Path, device: torch.device, dtype: torch.dtype | str, quantize: str | None = None
) -> Pretrained:
    """Loads a folder, a GGUF file, "demo" or a hub name. `dtype` NATIVE: see `gguf.native`; of other dtypes a GGUF file
    is expanded once into a folder in the cache. `quantize`: see `load_folder`."""
    if dtype == NATIVE and quantize is not None:
        raise ValueError(f"dtype='native' keeps weights as they are stored; leave out it or quantize={quantize!r}")
    if dtype == NATIVE:
        return _load_gguf(path_or_name, device)
    folder = resolve(path_or_name)
    # Before the weights: a fault in these must not cost their loading.
    tokenizer, config = load_tokenizer(folder), load_generation_config(folder)
    return Pretrained(load_folder(folder, device, dtype, quantize), tokenizer, config)


def _load_gguf(path_or_name: str | Path, device: torch.device) -> Pretrained:
    path = resolve_gguf(path_or_name)
    if path is None:
        raise ValueError(
            f"dtype='native' keeps the quantized weights of a GGUF file, and {path_or_name} is none; use dtype='auto'"
        )
    source = GgufModel(path)
    tokenizer, config = build_tokenizer(source), GenerationConfig(**source.generation_config())
    return Pretrained(load_native(source, device), tokenizer, config)
