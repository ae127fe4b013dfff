"""The rooms of memfine_fx and who may know whom: every import is read, type-only ones and those in functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"memfine_fx": "memfine_fx", "passes": "memfine_fx.passes", "models": "memfine_fx.models"}
ROOMS_OF_PASSES = ("lower", "step", "head", "verify")

EVERYBODYS = {"units", "errors", "config", "progress", "compat"}
KNOWS = {
    # room: what it may import beside what everybody may. Lowest first: a room knows rooms above its line only.
    "units": "",
    "errors": "",
    "config": "",
    "progress": "",
    "compat": "",
    "records": "",
    "models": "",
    "memory": "records",
    # What is awake at step time is handed decisions through records; it knows no pass, no plan and no compiler.
    "runtime": "records memory",
    "expert_parallel": "memory runtime",
    "plan": "records memory runtime",  # of the runtime only how rows are scheduled
    "passes.read": "records memory",
    "kernels": "records memory runtime passes.read",  # of passes only how a function is traced
    "passes.head": "records passes.read",
    "passes.lower": "records memory runtime expert_parallel kernels passes.read passes.head",
    "passes.step": "records memory runtime plan kernels passes.read",
    "passes.verify": "records runtime passes.read passes.lower",
    "report": "records memory runtime plan passes.read",  # of passes only what draws a region's graph
    "capture": "passes.read",  # only the markers that it writes into expert loops, for the reader to find
    "compiler": "records memory runtime plan kernels passes.read passes.head passes.lower passes.step "
    "passes.verify report capture",
    "fitting": "memory plan report compiler capture",
    "api": "records memory expert_parallel report capture compiler fitting",
    "__init__": "records runtime report compiler api",
    "demo": "memory report __init__",
    "integrations": "report api",
    "flags": "",
    "cli": "records memory plan report fitting compiler api demo flags __init__",
}
"""Reading is what of passes/ is in no other room."""


def imported_names(source: str) -> Iterator[str]:
    """Dotted names that a file imports from memfine_fx; names taken from a module count as its members."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] == "memfine_fx")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "memfine_fx":
            yield from (f"{node.module}.{one.name}" for one in node.names)


def room_of(name: str) -> str:
    parts = name.split(".")
    if parts[1:2] == ["passes"]:
        return f"passes.{parts[2]}" if parts[2:] and parts[2] in ROOMS_OF_PASSES else "passes.read"
    return parts[1] if len(parts) > 1 and parts[1] in KNOWS else "__init__"


@cache
def sources() -> dict[str, str]:
    """Text of each module of the package, by its dotted name."""
    texts: dict[str, str] = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if folder == "memfine_fx" and inside.parts[0] in FOLDERS:
                continue  # the links to passes/ and models/
            module = ".".join((package, *inside.with_suffix("").parts)).removesuffix(".__init__")
            texts[module] = path.read_text(encoding="utf-8")
    return texts


@cache
def edges() -> dict[tuple[str, str], list[str]]:
    """(room, room that it imports) -> the imports that do so."""
    lines: dict[tuple[str, str], list[str]] = {}
    for module, text in sources().items():
        for name in imported_names(text):
            lines.setdefault((room_of(module), room_of(name)), []).append(f"{module} imports {name}")
    return lines


def test_no_modules_import_each_other() -> None:
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for module, text in sources().items():
        for name in imported_names(text):
            imported = name if name in sources() else name.rpartition(".")[0]
            # What the package itself offers is loaded when it is asked for.
            if imported in sources() and "memfine_fx" not in (module, imported):
                graph.add_edge(module, imported)
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
    assert circles == []


def test_every_room_is_in_the_table() -> None:
    inside = {
        path for path in (ROOT / "memfine_fx").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    on_disk = {path.stem for path in inside if path.name != "passes"}
    on_disk |= {f"passes.{path.name}" for path in (ROOT / "passes").iterdir() if path.name in ROOMS_OF_PASSES}
    assert on_disk | {"passes.read"} == KNOWS.keys()


@pytest.mark.parametrize("room", KNOWS)
def test_a_room_knows_what_the_table_says_and_nothing_else(room: str) -> None:
    imported = {to for of, to in edges() if of == room} - {room}
    allowed = set(KNOWS[room].split())
    forbidden = imported - allowed - EVERYBODYS
    assert not forbidden, [line for to in forbidden for line in edges()[room, to]]
    assert allowed <= imported, "the table allows what nothing uses"


def test_rooms_know_only_rooms_above_them_in_the_table() -> None:
    order = list(KNOWS)
    upwards = [(room, to) for room in order for to in KNOWS[room].split() if order.index(to) >= order.index(room)]
    assert upwards == []


@pytest.mark.parametrize(
    ("room", "knows"),
    [
        ("units", set()),
        ("errors", {"units"}),
        ("config", {"units", "errors"}),
        ("progress", {"config"}),
        ("compat", {"errors"}),
    ],
)
def test_what_everybody_knows_knows_nearly_nothing(room: str, knows: set[str]) -> None:
    assert {to for of, to in edges() if of == room} - {room} <= knows


def test_imports_for_types_and_within_functions_count() -> None:
    source = """
if TYPE_CHECKING:
    from memfine_fx.compiler.session import Session
def later():
    import memfine_fx.passes.lower.region
    from memfine_fx import models
    from torch import fx
"""
    assert [room_of(name) for name in imported_names(source)] == ["compiler", "passes.lower", "models"]


def test_the_pipeline_names_its_stages_and_little_else() -> None:
    source = (ROOT / "memfine_fx" / "compiler" / "pipeline.py").read_text(encoding="utf-8")
    assert len(list(imported_names(source))) <= 15


def folder_of(room: str) -> Path:
    return ROOT / room.replace(".", "/") if room.startswith("passes.") else ROOT / "memfine_fx" / room


@pytest.mark.parametrize("room", [room for room in KNOWS if folder_of(room).is_dir()])
def test_a_room_says_what_it_is_for(room: str) -> None:
    folder = folder_of(room)
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert len(docstring.splitlines()) >= 5
