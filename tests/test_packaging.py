"""The package on disk, in pyproject.toml and at import time is one and the same."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.compatibility import SUPPORTED

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "memfine_fx"
TOP_LEVEL_ROOMS = ("models", "passes")


def run_python(code: str, *, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)


def packages_on_disk() -> list[str]:
    folders = (
        Path(folder).relative_to(ROOT)
        for folder, _, files in os.walk(PACKAGE, followlinks=True)
        if "__init__.py" in files
    )
    return sorted(".".join(folder.parts) for folder in folders)


def setuptools_table() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, object] = tomllib.load(file)["tool"]["setuptools"]
    return table


def test_declared_packages_are_the_packages_on_disk() -> None:
    assert setuptools_table()["packages"] == packages_on_disk()


@pytest.mark.parametrize("room", TOP_LEVEL_ROOMS)
def test_top_level_room_is_mapped_and_linked_into_the_package(room: str) -> None:
    mapping = setuptools_table()["package-dir"]
    assert isinstance(mapping, dict)
    assert mapping[f"memfine_fx.{room}"] == room
    assert os.readlink(PACKAGE / room) == f"../{room}"


@pytest.mark.parametrize("room", TOP_LEVEL_ROOMS)
def test_importing_a_room_by_its_short_name_names_the_full_one(room: str) -> None:
    result = run_python(f"import {room}")
    assert result.returncode == 1
    assert f"ImportError: import memfine_fx.{room}, not {room}" in result.stderr


@pytest.mark.parametrize("room", TOP_LEVEL_ROOMS)
def test_room_imports_by_its_full_name_from_any_folder(room: str, tmp_path: Path) -> None:
    result = run_python(f"import memfine_fx.{room}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_does_not_import_inductor(tmp_path: Path) -> None:
    code = "import sys, memfine_fx; print([m for m in sys.modules if m.startswith('torch._inductor')])"
    result = run_python(code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_package_declares_itself_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def torch_bounds() -> Requirement:
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies = map(Requirement, tomllib.load(file)["project"]["dependencies"])
    return next(one for one in dependencies if one.name == "torch")


def test_torch_is_bounded_by_the_versions_of_the_compatibility_table() -> None:
    bounds = torch_bounds().specifier
    _, newest = map(int, SUPPORTED[-1].split("."))
    assert [f"2.{minor}" for minor in range(30) if f"2.{minor}.0" in bounds] == list(SUPPORTED)
    assert f"2.{newest}.1" in bounds


def test_the_projects_own_environment_takes_one_torch_of_these_and_the_transformers_of_the_coverage_page() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {pin.name: one.version for pin in pins for one in pin.specifier if one.operator == "=="}
    assert versions.keys() == {"torch", "transformers"} and versions["torch"] in torch_bounds().specifier
    assert f"transformers {versions['transformers']}," in (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "venv", "pin"),
    [((), ".venv/", "-c constraints.txt"), (("TORCH=2.15.0",), ".venv-torch-2.15.0/", "torch==2.15.0")],
)
def test_every_install_says_which_torch(arguments: tuple[str, ...], venv: str, pin: str) -> None:
    command = ["make", "-n", "--always-make", "test-torch", "examples", "docs", *arguments]
    # make hands its own variables on to what it runs, these tests among it.
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "TORCH", "PYTHON", "VENV", "PIP_FLAGS")
    outside = {name: value for name, value in os.environ.items() if name not in inherited}
    printed = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True).stdout
    installs = [line for line in printed.splitlines() if "pip install" in line]
    assert len(installs) == 3
    assert all(line.startswith(venv) and f" {pin} " in line for line in installs)
