"""Names and imports of selfspec's modules: no cycle, no import of a tier above, no two classes of one name.

Type-checking imports and those within functions count too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATHS = [*(ROOT / "selfspec").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]

# From the lowest to the highest, as in docs/imports.svg: a module may import its own tier and those below. The longest
# name that a module begins with decides.
TIERS = [
    "kernels warn memory profiles.paths",
    "models cache speculation sampling processors logprobs grammar text metrics",
    "governor profiles history",
    "request sequence drafters",
    "backends",
    "scheduler batch batch_scoring prompt_pages loop_thread",
    "engine request_builder results memory_plan warmup __init__",
    "cli commands calibrate serve generate __main__",
]
TIER_OF = {f"selfspec.{name}": number for number, names in enumerate(TIERS) for name in names.split()}


def module_name(path: Path) -> str:
    """The kernels are installed as `selfspec.kernels`."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"selfspec.{name}" if name.startswith("kernels.") else name


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Modules of selfspec that a file imports, also within functions or for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= within or {node.module}
    return (found & modules) - {module_name(path)}


def graph() -> dict[str, set[str]]:
    modules = {module_name(path) for path in PATHS}
    found = {module_name(path): imports_of(path, modules) for path in PATHS}
    assert "selfspec.models.decoder" in found["selfspec.models.loading"]
    return found


def tier(module: str) -> int:
    begins = [name for name in TIER_OF if module == name or module.startswith(f"{name}.")]
    return TIER_OF["selfspec.__init__" if module == "selfspec" else max(begins, key=len)]


def test_imports_form_no_cycle() -> None:
    TopologicalSorter(graph()).prepare()  # raises CycleError, which names the modules


def test_no_module_imports_a_tier_above_its_own() -> None:
    found = graph()
    above = [(module, other) for module, others in found.items() for other in others if tier(other) > tier(module)]
    assert not above
    backend = "selfspec.backends.torch_backend"
    assert any(tier(module) > tier(backend) and backend in others for module, others in found.items())


def test_no_two_classes_have_the_same_name() -> None:
    """Of those that other modules can see."""
    names = Counter(
        node.name
        for path in PATHS
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_library_leaves_the_garbage_collector_to_the_user() -> None:
    """`selfspec serve`, a process of its own, is the only module that changes it."""
    users = [path for path in PATHS if re.search(r"\bgc\.\w", path.read_text(encoding="utf-8"))]
    assert [path.relative_to(ROOT).as_posix() for path in users] == ["selfspec/commands/serve.py"]
