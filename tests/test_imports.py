"""The imports of selfspec's modules form no cycle, type-checking imports included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


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


def test_imports_form_no_cycle() -> None:
    paths = list((ROOT / "selfspec").rglob("*.py"))
    modules = {module_name(path) for path in paths}
    graph = {module_name(path): imports_of(path, modules) for path in paths}
    assert "selfspec.models.decoder" in graph["selfspec.models.loading"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
