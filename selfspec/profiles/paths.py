"""Paths of converted models, profiles, and files that ship with selfspec. Creates no folder."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def home() -> Path:
    """The folder of all caches: SELFSPEC_HOME, or the platform's cache folder."""
    chosen = os.environ.get("SELFSPEC_HOME")
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("selfspec")


def models_dir() -> Path:
    """Models converted from GGUF, one folder for each."""
    return home() / "models"


def profiles_dir() -> Path:
    """Profiles that calibration wrote, one folder for each model."""
    return home() / "profiles"


def shipped_dir() -> Path:
    """Files that ship with selfspec: the domains' prompts, and profiles."""
    package = Path(__file__).parent.parent
    installed = package / "calibration"
    return installed if installed.is_dir() else package.parent / "calibration"  # in a checkout it is beside the package
