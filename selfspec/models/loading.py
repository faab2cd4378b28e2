"""Loads a model's weights into a Decoder: from a folder, a GGUF file, a hub name, or a live transformers model.

Each weight is in memory once: a folder's tensors are copied in chunks into the decoder's fused tensors; a live model's
parameters become views of them. `checkpoint` checks folders, `gguf.convert` makes folders from GGUF files.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

from selfspec.models.checkpoint import (
    FLOAT_DTYPES,
    SINGLE_FILE,
    Checkpoint,
    check_folder,
    check_parts,
    indexed_files,
    read_config,
)
from selfspec.models.config import ModelConfig
from selfspec.models.decoder import Decoder, Part, model_parts
from selfspec.models.gguf.convert import convert_gguf, fetch_demo, fetch_demo_gguf
from selfspec.models.linear import Linear, Weight
from selfspec.models.names import check_path
from selfspec.models.quantized.folder import BITS, load_packed, load_rounded, read_quantized, rounded_bits
from selfspec.models.shards import Shards, UnreadShards, byte_progress

_log = logging.getLogger(__name__)

_ALIGNMENT = 16  # bytes; kernels load vectors of this size
_HUB_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]  # besides weights: configs, index, tokenizer, chat template


def resolve(path_or_name: str | Path) -> Path:
    """Returns the checked folder of a model, given a folder, a GGUF file (converted once), "demo", or a hub name."""
    _check_name(path_or_name)
    if path_or_name == "demo":
        folder = fetch_demo()
    else:
        path = Path(path_or_name).expanduser()
        if path.is_dir():
            folder = path
        elif path.is_file():
            folder = _from_file(path)
        else:
            check_path(path_or_name)
            folder = _from_hub(str(path_or_name))
    check_folder(folder)
    return folder


def resolve_gguf(path_or_name: str | Path) -> Path | None:
    """Returns the GGUF file of "demo" or of a path that ends with .gguf; None for a folder or hub name."""
    _check_name(path_or_name)
    if path_or_name == "demo":
        return fetch_demo_gguf()
    path = Path(path_or_name).expanduser()
    if path.suffix.lower() != ".gguf" or path.is_dir():
        return None
    if not path.is_file():
        raise ValueError(f"the file {path} does not exist; give the path of a .gguf file")
    return path


def _check_name(path_or_name: str | Path) -> None:
    if not isinstance(path_or_name, str | Path) or not str(path_or_name).strip():
        raise ValueError(f"{path_or_name!r} names no model; give a model folder, a .gguf file, a hub name, or 'demo'")


def _from_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return convert_gguf(path)
    raise ValueError(f"{path} is a file; give the folder that holds config.json and the weights, or a .gguf file")


def _from_hub(name: str) -> Path:
    """Downloads a model: first configs and tokenizer, checks them, then the weight files that the index names.

    Copies of the weights in other formats (consolidated.safetensors, original/*, *.pth) are not downloaded.
    """
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
        read_config(folder)
        weight_files = indexed_files(folder) or [SINGLE_FILE]
        return Path(snapshot_download(name, allow_patterns=[*_HUB_FILES, *weight_files], ignore_patterns=["*/*"]))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ValueError(
            f"{name!r} is neither a folder here nor a model on the hub; check the spelling, or give the path of a "
            "model folder or .gguf file (a private model needs `hf auth login`)"
        ) from error
    except GatedRepoError as error:
        raise OSError(f"the model {name!r} is gated: accept its terms on the hub, then run `hf auth login`") from error
    except ValueError:
        raise
    except Exception as error:  # the hub's client raises its own errors and those of its HTTP library
        raise OSError(
            f"{name!r} is no folder here, and it could not be downloaded: {str(error).rstrip('.')}. Check the name and "
            "the connection, or give the path of a model folder or .gguf file."
        ) from error


def pick_device(device: str | torch.device) -> torch.device:
    """Returns the device to run on ("auto": the GPU if there is one); raises ValueError for one that does not exist."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device; use 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'") from error
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (chosen.index or 0) >= count:
            raise ValueError(
                f"device={device!r} does not exist: torch sees {count} CUDA devices; use another, or 'cpu'"
            )
        return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device='mps' does not exist: torch sees no Apple GPU; use 'cpu'")
    if chosen.type not in ("cpu", "mps"):
        raise ValueError(f"device={device!r} is not supported; use 'auto', 'cpu', 'cuda' or 'mps'")
    return chosen


def pick_dtype(dtype: torch.dtype | str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """Returns the dtype to hold the weights in. "auto": float32 on CPU, float16 on mps, a 16-bit type on CUDA."""
    if dtype == "auto":
        if device.type == "cuda":
            return stored if stored.itemsize == 2 else torch.bfloat16
        return torch.float16 if device.type == "mps" else torch.float32
    chosen = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or chosen not in FLOAT_DTYPES.values():
        raise ValueError(
            f"dtype={dtype!r} is not supported; use 'auto', 'bfloat16', 'float16' or 'float32', or 'native' for a "
            "GGUF file"
        )
    return chosen


def load_folder(
    folder: Path, device: torch.device, dtype: torch.dtype | str = "auto", quantize: str | None = None
) -> Decoder:
    """Loads a folder's weights onto a device: allocates each fused tensor once and fills it from the mapped files.

    Weights that are stored in 4 or 8 bits stay so, and `quantize` ("int4", "int8") rounds others; `dtype` is that of
    activations and of weights that are not quantized.
    """
    checkpoint = check_folder(folder)
    check_quantize(quantize, checkpoint, folder)
    dtype = pick_dtype(dtype, device, checkpoint.dtype)
    groups = model_parts(checkpoint.config)
    sizes = {name: sum(checkpoint.stored_nbytes(part) for part in parts) for name, parts in groups.items()}
    tensors: dict[str, Weight] = {}
    # Outside of a caller's inference mode: calibration cannot train exits on inference tensors.
    with torch.inference_mode(False), Shards(checkpoint) as shards, byte_progress() as progress:
        task = progress.add_task("Loading weights", total=sum(sizes.values()))
        for name, parts in groups.items():
            try:
                tensors[name] = _load_group(name, parts, shards, device, dtype, quantize)
            except torch.OutOfMemoryError as error:
                needed = unread_checkpoint(checkpoint, dtype, quantize).nbytes
                raise torch.OutOfMemoryError(
                    f"the weights need {needed / 1e9:.1f} GB in {quantize or dtype}, more than is free on {device}; "
                    "free memory there, use a smaller model, or device='cpu'"
                ) from error
            progress.advance(task, sizes[name])
    return Decoder(checkpoint.config, tensors)


def unread_checkpoint(checkpoint: Checkpoint, dtype: torch.dtype, quantize: str | None = None) -> Decoder:
    """Returns the decoder that loading this checkpoint will make, on PyTorch's meta device; reads no weights."""
    shards, meta = UnreadShards(checkpoint), torch.device("meta")
    groups = model_parts(checkpoint.config)
    tensors = {name: _load_group(name, parts, shards, meta, dtype, quantize) for name, parts in groups.items()}
    return Decoder(checkpoint.config, tensors)


def _load_group(
    name: str, parts: tuple[Part, ...], shards: Shards, device: torch.device, dtype: torch.dtype, quantize: str | None
) -> Weight:
    """Loads one tensor of the decoder."""
    if quantize is None:
        packed = load_packed(parts, shards, device)
    else:
        packed = load_rounded(parts, shards, device, rounded_bits(name, quantize))
    if packed is not None:
        return packed
    if quantize is not None and len(parts[0].shape) == 2:
        _log.warning("%s stays in %s: its rows cannot be divided into groups of 32 columns", name, dtype)
    fused = torch.empty(_fused_shape(parts), device=device, dtype=dtype)
    for part, target in zip(parts, _slices(fused, parts), strict=True):
        if part.name in shards.checkpoint.quantized:
            _log.warning("%s is expanded to %s: not all that is fused with it can be packed", part.name, dtype)
            target.copy_(read_quantized(part, shards).dequantize())
            continue
        for chunk, rows in shards.chunks(part):
            target[rows].copy_(chunk)  # converts the dtype without a temporary tensor
    return fused


def check_quantize(quantize: str | None, checkpoint: Checkpoint, folder: Path) -> None:
    """Raises ValueError for a value that is not supported, and for weights that are quantized already."""
    if quantize is not None and quantize not in BITS:
        raise ValueError(f"quantize={quantize!r} is not supported; use 'int4', 'int8', or None")
    if quantize is not None and checkpoint.quantized:
        raise ValueError(f"{folder} is quantized already; leave out quantize={quantize!r}")


def _fused_shape(parts: tuple[Part, ...]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _slices(fused: torch.Tensor, parts: tuple[Part, ...]) -> tuple[torch.Tensor, ...]:
    return fused.split([part.shape[0] for part in parts])


def adopt(hf_model: Any) -> Decoder:
    """Builds a Decoder that shares the storage of a live model. The model stays usable: where tensors are fused, its
    parameters become views of the fused tensor. Fuses one group at a time, so at most one group is in memory twice."""
    config = _live_config(hf_model)
    parameters = dict(hf_model.named_parameters(remove_duplicate=False))
    groups = model_parts(config)
    _check_parameters(parameters, groups)
    with torch.inference_mode(False), torch.no_grad():
        tensors = {
            name: _adopt_group(parts, [parameters[part.name] for part in parts]) for name, parts in groups.items()
        }
    return Decoder(config, tensors)


def _live_config(hf_model: Any) -> ModelConfig:
    """Reads the config of a live model; raises ValueError for an object that is no supported causal LM."""
    hf_config = getattr(hf_model, "config", None)
    if hf_config is None or not callable(getattr(hf_model, "named_parameters", None)):
        raise ValueError(f"from_model needs a transformers causal LM, not {type(hf_model).__name__}")
    quantization = getattr(hf_config, "quantization_config", None)
    if getattr(quantization, "quant_method", None) == "gguf":
        # transformers sets this for a model read from GGUF even with expanded weights; their dtype is checked later.
        hf_config = copy.copy(hf_config)
        del hf_config.quantization_config
    config = ModelConfig.from_hf(hf_config)
    embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
    if embedding is None or head is None:
        raise ValueError(f"{type(hf_model).__name__} has no LM head; load it with AutoModelForCausalLM")
    # By the modules, not the config: the caller may have tied or untied the head after loading.
    return replace(config, tied_head=embedding.weight is head.weight)


def _check_parameters(parameters: dict[str, torch.nn.Parameter], groups: dict[str, tuple[Part, ...]]) -> None:
    """Raises ValueError unless all needed parameters are plain float tensors in memory, of one device and dtype."""
    parts = [part for of_field in groups.values() for part in of_field]
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    check_parts(parts, shapes, "this is not a plain causal LM (merge adapters into it, load it unquantized)")
    used = {part.name: parameters[part.name] for part in parts}
    for name, parameter in used.items():
        if parameter.device.type == "meta":
            raise ValueError(
                f"{name} is not in memory (meta device or offloaded); load the model whole onto one device"
            )
        if type(parameter.data) is not torch.Tensor or parameter.dtype not in FLOAT_DTYPES.values():
            raise ValueError(
                f"{name} is quantized or sharded ({type(parameter.data).__name__}, {parameter.dtype}); selfspec needs "
                "plain 16- or 32-bit weights: load the model unquantized and onto one device"
            )
        if parameter.is_inference():
            raise ValueError(f"{name} was made in torch.inference_mode(); load the model outside of it")
    for attribute, values in (
        ("device", {str(p.device): name for name, p in used.items()}),
        ("dtype", {str(p.dtype): name for name, p in used.items()}),
    ):
        if len(values) > 1:
            found = ", ".join(f"{name} is {value}" for value, name in values.items())
            raise ValueError(
                f"the model's weights differ in {attribute} ({found}); move it with model.to(one {attribute})"
            )


def _adopt_group(parts: tuple[Part, ...], parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Returns one tensor of the decoder: the parameter itself, or a fused tensor of which parameters become views."""
    shared = _as_one(parts, parameters)
    if shared is not None:
        return shared
    first = parameters[0]
    try:
        fused = torch.empty(_fused_shape(parts), device=first.device, dtype=first.dtype)
    except torch.OutOfMemoryError as error:
        needed = sum(parameter.nbytes for parameter in parameters)
        raise torch.OutOfMemoryError(
            f"fusing {', '.join(part.name for part in parts)} into one tensor needs {needed / 1e6:.1f} MB, more than "
            f"is free on {first.device}; free memory there, or move the model to the CPU. The model is still usable"
        ) from error
    for parameter, target in zip(parameters, _slices(fused, parts), strict=True):
        target.copy_(parameter.data)
        parameter.data = target
    return fused


def _as_one(parts: tuple[Part, ...], parameters: list[torch.nn.Parameter]) -> torch.Tensor | None:
    """Returns the parameters as one tensor if they are contiguous in one storage, in this order; else None."""
    first = parameters[0].data
    storage, expected = first.untyped_storage().data_ptr(), first.storage_offset()
    for parameter in parameters:
        data = parameter.data
        if (
            not data.is_contiguous()
            or data.untyped_storage().data_ptr() != storage
            or data.storage_offset() != expected
        ):
            return None
        expected += data.numel()
    if first.is_cuda and first.data_ptr() % _ALIGNMENT:
        return None
    shape = _fused_shape(parts)
    return first.as_strided(shape, torch.empty(shape, device="meta").stride())


def fingerprint(decoder: Decoder) -> list[float]:
    """Returns 60 weights at fixed indices: 5 each of embedding, head, final norm and 3 tensors of the first, middle and
    last layer. `same_fingerprint` compares two."""
    layers = [decoder.layers[index] for index in (0, len(decoder.layers) // 2, -1)]
    linears = [decoder.embedding, decoder.head, Linear(decoder.norm[None])]
    linears += [linear for layer in layers for linear in (layer.qkv, layer.gate_up, layer.down)]
    values: list[float] = []
    for linear in linears:
        rows, columns = linear.shape
        # Irregular fractions: round ones would select the first element of a row.
        indices = [int(fraction * rows * columns) for fraction in (0.0713, 0.2739, 0.4517, 0.6481, 0.8923)]
        row, column = torch.tensor([divmod(index, columns) for index in indices], device=linear.device).unbind(1)
        values += linear.rows(row, torch.float64)[range(len(indices)), column].tolist()
    return values


def same_fingerprint(a: list[float], b: list[float]) -> bool:
    """True if two fingerprints are of the same weights, in the same or in different dtypes.

    Rounding to bfloat16 changes a value by at most 0.4%, to float16 by less (or by 3e-8, near zero), so 0.5% of each
    value is allowed. Fine-tuning and quantizing change weights by a part of their standard deviation, which for the
    smallest of 60 weights is more than 0.5% of its value.
    """
    return len(a) == len(b) and all(isclose(x, y, rel_tol=5e-3, abs_tol=1e-7) for x, y in zip(a, b, strict=True))
