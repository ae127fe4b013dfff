"""The planner stays apart: what it may import of the compiler, and that the compiler does not import it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = tuple(ROOT / folder for folder in ("memfine_fx", "passes", "models"))
PLANNER = ROOT / "planner" / "memfine_planner"
SHARED = (
    "memfine_fx.errors", "memfine_fx.memory.closed_form", "memfine_fx.memory.published", "memfine_fx.compat",
    "memfine_fx.flags", "memfine_fx.progress", "memfine_fx.units", "memfine_fx.report.page",
    "memfine_fx.report.chart",
)  # fmt: skip
"""The closed form, the paper's table, private names of torch for cuts of a traced graph, and what all commands and
pages have in common: flags of the shell, progress, bytes in words, and the writers of pages and charts."""
ROOMS = ("files.py", "hardware", "costs", "training", "serving", "splitting")
"""From the lowest: a room imports itself and those before it."""


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from package import module` names a module only in its second half.
            parts = (node.module or "").split(".")
            folder = (PLANNER.parent if parts[0] == PLANNER.name else ROOT).joinpath(*parts)
            names = [f"{node.module}.{alias.name}" if folder.is_dir() else str(node.module) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("memfine_fx", PLANNER.name))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("path", files(PLANNER), ids=lambda path: path.relative_to(PLANNER).as_posix())
def test_planner_imports_of_the_compiler_only_the_closed_form_and_what_the_paper_prints(path: Path) -> None:
    foreign = {name for name in imports(path) if not name.startswith("memfine_planner")}
    assert [name for name in foreign if not name.startswith(SHARED)] == []


@pytest.mark.parametrize(
    "path",
    [path for room in ROOMS for path in files(PLANNER / room)],
    ids=lambda path: path.relative_to(PLANNER).as_posix(),
)
def test_rooms_import_downwards(path: Path) -> None:
    room = path.relative_to(PLANNER).parts[0]
    below = tuple(f"memfine_planner.{name.removesuffix('.py')}" for name in ROOMS[: ROOMS.index(room) + 1])
    inside = [name for name in imports(path) if name.startswith("memfine_planner")]
    assert [name for name in inside if not name.startswith(below)] == []


def test_compiler_does_not_import_the_planner() -> None:
    paths = [path for folder in COMPILER for path in files(folder)]
    assert len(paths) > 50
    assert [path for path in paths if any(name.startswith(PLANNER.name) for name in imports(path))] == []
