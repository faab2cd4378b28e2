"""Reads the tensors of a folder's safetensors files, some rows at a time; shows progress in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import safe_open

from selfspec.models.checkpoint import Checkpoint
from selfspec.models.decoder import Part

_CHUNK_BYTES = 64 * 2**20  # bytes read at a time: the host memory that loading takes in addition to the weights


class Shards(ExitStack):
    """The files of a checkpoint; each is opened once and closed at the end of the `with` statement."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self._files: dict[Path, Any] = {}

    def tensor(self, name: str, file: Path) -> torch.Tensor:
        return self._open(file).get_tensor(name)

    def chunks(self, part: Part) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yields groups of rows of a tensor, each of at most _CHUNK_BYTES or one row, and their row range."""
        source = self._open(self.checkpoint.tensors[part.name].file).get_slice(part.name)
        row_bytes = 8 * prod(part.shape[1:])  # in float64, the widest dtype
        step = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, part.shape[0], step):
            rows = slice(start, min(start + step, part.shape[0]))
            yield source[rows], rows

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = self.enter_context(safe_open(file, framework="pt", device="cpu"))
        return self._files[file]


class UnreadShards(Shards):
    """The same tensors on PyTorch's meta device: only the headers of the files have been read."""

    def tensor(self, name: str, file: Path) -> torch.Tensor:
        module, _, last = name.rpartition(".")
        return self.checkpoint.quantized[f"{module}.weight"].tensors[last].unread()

    def chunks(self, part: Part) -> Iterator[tuple[torch.Tensor, slice]]:
        yield self.checkpoint.tensors[part.name].unread(), slice(None)


def byte_progress() -> Progress:
    """Returns a progress bar in bytes, shown on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
