"""Serving and splitting stay apart from the compiler, and small."""

import subprocess
import sys
from pathlib import Path

import pytest

import memfine_planner

MODULES = [
    "memfine_planner.serving.command",
    "memfine_planner.serving.disaggregated",
    "memfine_planner.splitting.command",
]


@pytest.mark.parametrize("room", ["passes", "runtime", "capture"])
def test_planner_names_no_module_of_the_compiler(room: str) -> None:
    root = Path(memfine_planner.__file__).parent
    for folder in ("serving", "splitting"):
        for path in (root / folder).rglob("*.py"):
            assert f"memfine_fx.{room}" not in path.read_text(), path


@pytest.mark.parametrize("folder", ["serving", "splitting"])
def test_siblings_stay_small(folder: str) -> None:
    root = Path(memfine_planner.__file__).parent / folder
    assert sum(len(path.read_text().splitlines()) for path in root.rglob("*.py")) <= 1200


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_module_imports_alone(module: str) -> None:
    result = subprocess.run([sys.executable, "-W", "error", "-c", f"import {module}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
