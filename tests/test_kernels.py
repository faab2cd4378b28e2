"""Kernel modules as a whole: importing them needs no Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_selfspec_and_every_kernel_file_import_where_triton_is_absent() -> None:
    modules = ["selfspec", *(f"selfspec.kernels.{path.stem}" for path in sorted((ROOT / "kernels").glob("*.py")))]
    assert len(modules) > 3
    script = f"""
import importlib, importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, Absent())
for name in {modules!r}:
    importlib.import_module(name)
assert "triton" not in sys.modules
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr


def test_importing_selfspec_does_not_import_triton() -> None:
    result = run_python("import selfspec, sys; print('triton' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr
