"""Where selfspec keeps what it makes: converted models and profiles, under one folder.

Only says where; whoever writes there creates the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def home() -> Path:
    """The folder of all caches: SELFSPEC_HOME, or the platform's cache folder."""
    chosen = os.environ.get("SELFSPEC_HOME")
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("selfspec")


def models_dir() -> Path:
    """Models converted from GGUF, one folder each."""
    return home() / "models"


def profiles_dir() -> Path:
    """What calibration wrote, one folder per model."""
    return home() / "profiles"
