"""Loads the tokenizer and the generation config that lie beside a model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from selfspec.models.checkpoint import read_json

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a checked model folder; None if the folder has none."""
    if not any((folder / name).exists() for name in _FILES):
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
