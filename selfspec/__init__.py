"""selfspec: faster generation from one Hugging Face causal LM that drafts and verifies with itself."""

from pathlib import Path as _Path

if not (_Path(__file__).parent / "kernels").is_dir():
    # In a checkout the kernels lie beside the package, where they cannot shadow PyPI's `kernels`.
    __path__.append(str(_Path(__file__).parent.parent))

from selfspec.engine import Engine  # noqa: E402
from selfspec.governor.rules import Rules  # noqa: E402
from selfspec.profiles.profile import Profile  # noqa: E402
from selfspec.results import Completion, GenerateOutput, Stats, Stream  # noqa: E402
from selfspec.speculation.plan import Plan  # noqa: E402

__all__ = ["Completion", "Engine", "GenerateOutput", "Plan", "Profile", "Rules", "Stats", "Stream"]
