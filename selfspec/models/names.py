"""Tells paths of models from hub names. Imports no torch: commands check a path before they import it."""

from __future__ import annotations

import re
from pathlib import Path


def check_path(path_or_name: str | Path) -> None:
    """Raises ValueError for a path that does not exist; accepts a string that may be a hub name."""
    path = Path(path_or_name).expanduser()
    is_path = isinstance(path_or_name, Path) or _looks_like_path(path_or_name)
    if is_path and not (path.is_dir() or path.is_file()):
        raise ValueError(f"the path {path} does not exist; give a model folder, a .gguf file, or a hub name")


def _looks_like_path(name: str) -> bool:
    """True for a string that reads as a path rather than as the hub name `owner/model`."""
    if re.match(r"[./~]|[A-Za-z]:", name) or "\\" in name or name.count("/") > 1:
        return True
    return name.lower().endswith((".gguf", ".safetensors", "/")) or ("/" in name and Path(name).parent.is_dir())
