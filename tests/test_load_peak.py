"""Loading quantized weights takes little more memory than the weights: no tensor is in memory twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selfspec.models import shards
from selfspec.models.gguf import native
from selfspec.models.gguf.model import GgufModel
from selfspec.models.loading import load_folder
from selfspec.models.quantized import rounding
from tests.test_native_gguf import ENCODINGS, written
from tests.tiny import tiny_model

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 4096}


class Peak(TorchDispatchMode):
    """Bytes of the tensors that PyTorch's operations made, at the moment when most of them were alive."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            # Not views, and not mapped files, of which safetensors makes tensors with set_.
            if storage is not None and storage._cdata not in given and func is not torch.ops.aten.set_.source_Storage:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.nbytes = max(self.nbytes, sum(size for _, size in self._live.values()))
        return out


def test_rounding_while_loading_takes_at_most_a_fifth_more_than_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks as small beside this model as the real ones beside a model of 700 million weights."""
    tiny_model("llama", torch.float32, **SIZES).to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 8 * 2**14)
    monkeypatch.setattr(rounding, "_CHUNK_VALUES", 2**14)
    monkeypatch.setattr(rounding, "_FACTORS", [1.0])  # to save time
    with Peak() as peak:
        model = load_folder(tmp_path, CPU, torch.bfloat16, "int4")
    assert model.nbytes < peak.nbytes < 1.2 * model.nbytes


def test_a_gguf_file_is_packed_within_a_fifth_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = GgufModel(written(tmp_path, ENCODINGS["Q4_K"], intermediate_size=1024, num_hidden_layers=3))
    monkeypatch.setattr(native, "_PACKED_TOGETHER", 2**15)
    with Peak() as peak:
        model = native.load_native(source, CPU, torch.bfloat16)
    assert model.nbytes < peak.nbytes < 1.2 * model.nbytes
