"""The folders of converted models, of profiles, and of the files that come with selfspec.

Creates none of them: the code that writes there does.
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


def shipped_dir() -> Path:
    """What comes with selfspec: the domains' prompts, and profiles of well-known models."""
    package = Path(__file__).parent.parent
    installed = package / "calibration"
    return installed if installed.is_dir() else package.parent / "calibration"  # in a checkout it lies beside it
