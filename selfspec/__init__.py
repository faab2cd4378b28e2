"""selfspec: faster generation from one Hugging Face causal LM that drafts and verifies with itself."""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if not (_Path(__file__).parent / "kernels").is_dir():
    # In a checkout the kernels lie beside the package, where they cannot shadow PyPI's `kernels`.
    __path__.append(str(_Path(__file__).parent.parent))

if TYPE_CHECKING:
    from selfspec.engine import Engine
    from selfspec.governor.rules import Rules
    from selfspec.memory_plan import MemoryPlan, plan_memory
    from selfspec.profiles.profile import Profile
    from selfspec.results import Completion, GenerateOutput, Stats, Stream
    from selfspec.speculation.plan import Plan

__all__ = [
    "Completion",
    "Engine",
    "GenerateOutput",
    "MemoryPlan",
    "Plan",
    "Profile",
    "Rules",
    "Stats",
    "Stream",
    "__version__",
    "plan_memory",
]

_MODULES = {
    "Completion": "selfspec.results",
    "Engine": "selfspec.engine",
    "GenerateOutput": "selfspec.results",
    "MemoryPlan": "selfspec.memory_plan",
    "Plan": "selfspec.speculation.plan",
    "Profile": "selfspec.profiles.profile",
    "Rules": "selfspec.governor.rules",
    "Stats": "selfspec.results",
    "Stream": "selfspec.results",
    "plan_memory": "selfspec.memory_plan",
}


def __getattr__(name: str) -> Any:
    """Imports a public class when it is first used: importing torch and transformers takes seconds, and commands that
    only parse their arguments do without."""
    if name not in _MODULES:
        raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
    value = getattr(_import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
