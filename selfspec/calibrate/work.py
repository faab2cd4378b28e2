"""The work folder of a calibration: every finished piece of work on disk, so that a stopped run can go on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


class Work:
    """Named pieces of work in a folder; a piece is there whole or not at all."""

    def __init__(self, folder: Path, key: dict[str, Any], resume: bool) -> None:
        """Opens the folder of an earlier run with the same key to go on, or begins anew."""
        self.folder = folder
        if resume and folder.is_dir():
            known = self.read_json("key")
            if known is not None and known != json.loads(json.dumps(key)):
                changed = sorted(name for name in key if known.get(name) != json.loads(json.dumps(key[name])))
                raise ValueError(
                    f"the stopped run in {folder} had other settings ({', '.join(changed)}): repeat them to resume, or "
                    "leave out --resume to start anew"
                )
        elif folder.exists():
            shutil.rmtree(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.write_json("key", key)
        except OSError as error:
            raise ValueError(f"cannot write to {folder.parent} ({error}); choose another folder with --out") from error

    def read_json(self, name: str) -> Any:
        try:
            return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def write_json(self, name: str, value: Any) -> None:
        path = self.folder / f"{name}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(value), encoding="utf-8")
        os.replace(part, path)

    def read_tensors(self, name: str) -> dict[str, torch.Tensor] | None:
        path = self.folder / f"{name}.safetensors"
        try:
            return load_file(path) if path.exists() else None
        except (SafetensorError, OSError):
            return None  # as good as not there: it will be made again

    def write_tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        path = self.folder / f"{name}.safetensors"
        part = path.with_suffix(".part")
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, part)
        os.replace(part, path)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
