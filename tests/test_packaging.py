"""What an installed selfspec contains and depends on, and that it leaves PyPI's `kernels` alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

import selfspec

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
KERNELS = sorted(path.name for path in (ROOT / "kernels").glob("*.py"))
PROMPTS = sorted(path.name for path in (ROOT / "calibration" / "prompts").glob("*.jsonl"))

# Laid beside the real files before the wheel is built: what a calibration leaves, and what people leave.
A_PROFILE = ["calibration/profiles/tiny/profile.json", "calibration/profiles/tiny/exits.safetensors"]
STRAY = [
    "calibration/profiles/tiny/report.html",
    "calibration/profiles/tiny/checkpoint.pt",
    "calibration/profiles/profile.json",
    "calibration/prompts/notes.txt",
    "calibration/prompts/old/chat.jsonl",
    "calibration/notes.md",
    "kernels/notes.md",
    "selfspec/notes.md",
    "selfspec/calibrate/report.html",
    "selfspec/scratch/module.py",
    "bench/run.py",
    "tests/test_it.py",
    "shared/data.bin",
]


def required(platform: str, extra: str = "") -> set[str]:
    """Names of what pip would install on a platform, with an extra or without."""
    environment = {**default_environment(), "sys_platform": platform, "extra": extra}
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, [])
    requirements = [Requirement(line) for line in lines]
    return {r.name for r in requirements if r.marker is None or r.marker.evaluate(environment)}


@pytest.mark.parametrize(("platform", "needed"), [("linux", True), ("darwin", False), ("win32", False)])
def test_triton_is_a_dependency_on_linux_only(platform, needed):
    assert ("triton" in required(platform)) is needed
    assert {"torch", "transformers", "safetensors"} <= required(platform)


def test_flash_attn_comes_with_the_extra_only():
    assert "flash-attn" in required("linux", "flash")
    assert "flash-attn" not in required("linux") | required("linux", "dev")


def test_transformers_is_new_enough_to_ignore_a_folder_named_kernels():
    (transformers,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "transformers")
    assert not transformers.specifier.contains("5.10.3")
    assert transformers.specifier.contains("5.10.4")


def python(*code: str, path: list[Path], cwd: Path) -> str:
    """Runs lines of Python in a new process that sees nothing but `path` and the environment's packages."""
    start = [f"import sys; sys.path[:0] = {[str(entry) for entry in path]!r}"]
    command = [sys.executable, "-P", "-c", "\n".join([*start, *code])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_checkout_does_not_shadow_the_package_named_kernels(tmp_path):
    """Even from the repository's root, before everything else on the path, the real package wins."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("real = True")
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert python("import kernels; print(kernels.real)", path=[ROOT, tmp_path], cwd=ROOT) == "True\n"


def not_copied(folder: str, names: list[str]) -> set[str]:
    """Compiled modules, and the real profiles, which are large."""
    return {"__pycache__", *(["profiles"] if Path(folder) == ROOT / "calibration" else [])} & set(names)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The files of a wheel built from a copy of the checkout and much that is none of its business, unpacked."""
    try:  # asked for its version only: importing it here would clash with a distutils that is already imported
        found = Version(version("setuptools"))
    except PackageNotFoundError:
        found = Version("0")
    if found < Version("77"):
        pytest.skip("building the wheel needs setuptools 77")
    base = tmp_path_factory.mktemp("build")
    names = ("pyproject.toml", "README.md", "LICENSE", "selfspec", "kernels", "calibration")
    for source in (ROOT / name for name in names if (ROOT / name).exists()):
        if source.is_dir():
            shutil.copytree(source, base / "copy" / source.name, ignore=not_copied)
        else:
            (base / "copy").mkdir(exist_ok=True)
            shutil.copy(source, base / "copy")
    for path in (base / "copy" / name for name in (*A_PROFILE, *STRAY)):
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    build = "from setuptools import build_meta; build_meta.build_wheel('../wheel')"
    (base / "wheel").mkdir()
    python(build, path=[], cwd=base / "copy")
    (wheel,) = (base / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(base / "site")
    return base / "site"


def test_a_wheel_contains_every_module(installed):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "selfspec").rglob("*.py")}
    modules |= {f"selfspec/kernels/{name}" for name in KERNELS}
    assert KERNELS
    assert {path.relative_to(installed).as_posix() for path in installed.rglob("*.py")} == modules


def test_a_wheel_contains_prompts_profiles_the_reports_template_the_typing_marker_and_nothing_else(installed):
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    others = {name for name in files if not name.endswith(".py") and ".dist-info/" not in name}
    expected = {f"selfspec/calibration/prompts/{name}" for name in PROMPTS}
    expected |= {f"selfspec/{name}" for name in A_PROFILE}
    assert len(PROMPTS) == 8
    assert others == expected | {
        "selfspec/calibrate/report.html.jinja",
        "selfspec/serve/page.html",
        "selfspec/py.typed",
    }


def test_a_wheel_has_the_packages_version_and_the_command(installed):
    (info,) = installed.glob("*.dist-info")
    assert f"\nVersion: {selfspec.__version__}\n" in (info / "METADATA").read_text(encoding="utf-8")
    assert "selfspec = selfspec.cli:main" in (info / "entry_points.txt").read_text(encoding="utf-8")


def test_a_wheel_contains_no_top_level_but_selfspec(installed):
    assert [path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")] == ["selfspec"]


def test_the_installed_package_finds_what_comes_with_it(installed, tmp_path):
    """Kernels, prompts, profiles and the report's template, where no checkout lies beside it."""
    out = python(
        "import json",
        "import selfspec.generate, selfspec.kernels.philox as noise, selfspec.calibrate.report as report",
        "from selfspec.calibrate.prompts import shipped_domains",
        "from selfspec.profiles.paths import shipped_dir",
        "profiles = shipped_dir().glob('profiles/*/profile.json')",
        "files = [selfspec.__file__, noise.__file__, *map(str, profiles), report._page().filename]",
        "print(json.dumps([files, [domain.name for domain in shipped_domains()]]))",
        path=[installed],
        cwd=tmp_path,
    )
    files, domains = json.loads(out)
    assert [Path(file).relative_to(installed / "selfspec").as_posix() for file in files] == [
        "__init__.py",
        "kernels/philox.py",
        "calibration/profiles/tiny/profile.json",
        "calibrate/report.html.jinja",
    ]
    assert sorted(f"{name}.jsonl" for name in domains) == PROMPTS
