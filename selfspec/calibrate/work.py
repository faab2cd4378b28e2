"""The work folder of a calibration: every finished piece of work as a file, so that a stopped run can continue.

A marker file lists every file that selfspec wrote into the folder. A folder with any other file is refused, and only
listed files are removed. A lock file keeps two processes from working in one folder.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

FOLDER = ".selfspec-calibration"  # within the profile's folder
_MARKER = "made-by-selfspec.json"
_LOCK = "running.lock"


class Work:
    """Named pieces of work in a folder. A piece is replaced in one operation, so it is never there in part."""

    def __init__(self, folder: Path, key: dict[str, Any], resume: bool = False, restart: bool = False) -> None:
        """Opens a new folder, or one that selfspec made, until `close`: to continue the run in it (`resume`; its key
        must be the same) or to drop that run (`restart`), which `begin` does. Raises ValueError for a folder with files
        that selfspec did not write, for one that is open in another process, and for a stopped run when neither was
        asked for."""
        self.folder = folder
        self._key = json.loads(json.dumps(key))  # as `read_json` will return it
        self._stopped_run()  # refuses a folder of others before anything is written to it
        self._lock = FileLock(folder / _LOCK)
        self._created = [path for path in folder.parents if not path.exists()]  # innermost first
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            stopped = self._stopped_run()
            self._check_stopped(stopped, resume, restart)
            self.resumed = bool(stopped["pieces"]) and resume
            self._made: dict[str, Any] = stopped if stopped["pieces"] else {"key": self._key, "pieces": []}
            self._write_marker()
        except Timeout:
            raise ValueError(
                f"another calibration runs in {folder}: wait for its end, or choose another folder with --out"
            ) from None
        except OSError as error:
            self.close()
            raise self._unwritable(error) from error
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Lets another run open the folder."""
        self._lock.release()

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no piece, neither of this run nor of a stopped one."""
        return not self._made["pieces"]

    def begin(self) -> None:
        """Drops the stopped run, unless this one continues it. Call it before the first write."""
        if not self.resumed:
            self._unlink(self._made["pieces"])
            self._made = {"key": self._key, "pieces": []}
            self._write_marker()

    def read_json(self, name: str) -> Any:
        try:
            return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def write_json(self, name: str, value: Any) -> None:
        _replace(self._listed(f"{name}.json"), value)

    def read_tensors(self, name: str) -> dict[str, torch.Tensor] | None:
        path = self.folder / f"{name}.safetensors"
        try:
            return load_file(path) if path.exists() else None
        except (SafetensorError, OSError):
            return None  # a damaged file counts as missing, and the piece is made again

    def write_tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        path = self._listed(f"{name}.safetensors")
        part = _part_of(path)
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, part)
        os.replace(part, path)

    def remove(self) -> None:
        """Removes the files that selfspec wrote, and the folders that it made if nothing else is in them."""
        self._unlink([*self._made["pieces"], _MARKER, _LOCK])
        with suppress(OSError):  # the first that is not empty ends it
            for path in (self.folder, *self._created):
                path.rmdir()
        self.close()

    def _unlink(self, names: list[str]) -> None:
        for path in map(self.folder.joinpath, names):
            path.unlink(missing_ok=True)
            _part_of(path).unlink(missing_ok=True)

    def _stopped_run(self) -> dict[str, Any]:
        """The marker of the run in the folder; one without pieces where there is no folder or an empty one."""
        empty: dict[str, Any] = {"key": {}, "pieces": []}
        try:
            found = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            return empty
        except OSError as error:
            raise self._unwritable(error) from error
        made = self._read_marker() or empty
        own = {*made["pieces"], _MARKER, _LOCK}
        foreign = sorted(found - own - {_part_of(Path(name)).name for name in own})
        if foreign or (_MARKER in found and made is empty):
            names = ", ".join((foreign or [_MARKER])[:3])
            raise ValueError(
                f"{self.folder} holds files that selfspec did not write ({names}): move them away, or choose another "
                "folder with --out"
            )
        return made

    def _check_stopped(self, stopped: dict[str, Any], resume: bool, restart: bool) -> None:
        """Raises ValueError unless the options say what to do with the stopped run, if there is one."""
        if stopped["pieces"] and not resume and not restart:
            raise ValueError(
                f"a calibration was stopped in {self.folder}: pass --resume to continue it, or --restart to drop it"
            )
        if stopped["pieces"] and resume and stopped["key"] != self._key:
            changed = sorted(name for name in self._key if stopped["key"].get(name) != self._key[name])
            raise ValueError(
                f"the stopped run in {self.folder} had other settings ({', '.join(changed)}): repeat them with "
                "--resume, or pass --restart to drop it"
            )

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(f"cannot write to {self.folder.parent} ({error}); choose another folder with --out")

    def _read_marker(self) -> dict[str, Any] | None:
        """None for a marker that is missing or that selfspec did not write."""
        made = self.read_json(Path(_MARKER).stem)
        if not isinstance(made, dict) or not isinstance(made.get("key"), dict):
            return None
        pieces = made.get("pieces")
        plain = isinstance(pieces, list) and all(isinstance(name, str) and Path(name).name == name for name in pieces)
        return made if plain else None

    def _listed(self, name: str) -> Path:
        """The path of a piece, after listing it in the marker."""
        if name not in self._made["pieces"]:
            self._made["pieces"].append(name)
            self._write_marker()
        return self.folder / name

    def _write_marker(self) -> None:
        _replace(self.folder / _MARKER, self._made)


def _replace(path: Path, value: Any) -> None:
    """Writes a value as JSON in place of the file, in one operation."""
    part = _part_of(path)
    part.write_text(json.dumps(value), encoding="utf-8")
    os.replace(part, path)


def _part_of(path: Path) -> Path:
    """The file that is written before it takes the place of `path`."""
    return path.with_name(f"{path.name}.part")
