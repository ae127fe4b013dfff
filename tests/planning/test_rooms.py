"""The annex stays apart: what it may import of the compiler, and that the compiler does not import it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "memfine_fx"
ANNEX = PACKAGE / "planning"
SHARED = ("memfine_fx.errors", "memfine_fx.memory.closed_form", "memfine_fx.memory.published", "memfine_fx.compat")
"""Beside the closed form and the paper's table: private names of torch, which cuts of a traced graph need."""
ROOMS = ("files.py", "hardware", "costs", "training", "serving", "splitting")
"""From the lowest: a room imports itself and those before it."""
DOORS = ("cli.py",)
"""Files outside that open the annex: the command line."""


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from package import module` names a module only in its second half.
            folder = PACKAGE.parent.joinpath(*(node.module or "").split("."))
            names = [f"{node.module}.{alias.name}" if folder.is_dir() else str(node.module) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "memfine_fx")


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("path", files(ANNEX), ids=lambda path: path.relative_to(ANNEX).as_posix())
def test_annex_imports_of_the_compiler_only_the_closed_form_and_what_the_paper_prints(path: Path) -> None:
    foreign = {name for name in imports(path) if not name.startswith("memfine_fx.planning")}
    assert [name for name in foreign if not name.startswith(SHARED)] == []


@pytest.mark.parametrize(
    "path",
    [path for room in ROOMS for path in files(ANNEX / room)],
    ids=lambda path: path.relative_to(ANNEX).as_posix(),
)
def test_rooms_import_downwards(path: Path) -> None:
    room = path.relative_to(ANNEX).parts[0]
    below = tuple(f"memfine_fx.planning.{name.removesuffix('.py')}" for name in ROOMS[: ROOMS.index(room) + 1])
    inside = [name for name in imports(path) if name.startswith("memfine_fx.planning")]
    assert [name for name in inside if not name.startswith(below)] == []


def test_compiler_does_not_import_the_annex() -> None:
    outside = [path for path in files(PACKAGE) if ANNEX not in path.parents and path.name not in DOORS]
    assert len(outside) > 50
    assert [path for path in outside if any(name.startswith("memfine_fx.planning") for name in imports(path))] == []
