"""Nothing outside `memfine_fx/compat` touches a private name of a host.

Private is a leading underscore anywhere in a dotted path below a host's package, or an attribute with one that no class
of ours defines. Operators are not: `torch.ops.aten._to_copy` is a name of the operator library, kept for saved graphs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOM = ROOT / "memfine_fx" / "compat"
HOSTS = "torch transformers accelerate peft lightning deepspeed trl".split()
SOURCES = [
    path
    for folder in ("memfine_fx", "passes", "models")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ROOM not in path.parents and "memfine_fx/passes" not in str(path) and "memfine_fx/models" not in str(path)
]
_DOTTED = re.compile(rf"(?:{'|'.join(HOSTS)})(?:\.\w+)*\._(?!_)\w+(?:\.\w+)*")
_OPERATORS = ("aten.", "torch.ops.")
_TYPES = ("argparse._SubParsersAction",)
"""Of the standard library, which has no public name for the type of what it returns."""
_LOOKUPS = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def is_of_host(module: str | None) -> bool:
    return (module or "").split(".")[0] in HOSTS


def own_names(trees: list[ast.Module]) -> set[str]:
    """Private names that our own code defines: attributes of self and cls, fields, methods, functions and variables."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own_object(node.value):
                found.add(node.attr)
    return found


def is_own_object(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(source: str, own: set[str]) -> Iterator[str]:
    """What of a host a module touches that is private, with its line."""
    for node in ast.walk(ast.parse(source)):
        for name in _names_at(node, own):
            yield f"{getattr(node, 'lineno', 0)}: {name}"


def _names_at(node: ast.AST, own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and is_of_host(node.module):
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (path for path in paths if any(map(is_private, path.split("."))))
    elif isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names if is_of_host(alias.name)]
        yield from (path for path in paths if any(map(is_private, path.split("."))))
    elif isinstance(node, ast.Attribute) and is_private(node.attr):
        text = ast.unparse(node)
        is_ours = is_own_object(node.value) or (node.attr in own and not is_of_host(text))
        if not is_ours and not text.startswith(_OPERATORS) and text not in _TYPES:
            yield text
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LOOKUPS:
        names = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        yield from (f"{node.func.id} {name}" for name in names if is_private(name) and name not in own)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
        yield repr(node.value)


def test_nothing_outside_the_room_touches_a_private_name() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    own = own_names([ast.parse(text) for text in texts.values()])
    found = [f"{path.relative_to(ROOT)}:{name}" for path, text in texts.items() for name in private_names(text, own)]
    assert not found, "\n".join(["move these into memfine_fx/compat, with a hook:", *found])
    assert len(texts) > 150


@pytest.mark.parametrize(
    "source",
    [
        "from torch._inductor.compile_fx import compile_fx",
        "from torch.utils import _pytree as pytree",
        "import torch._dynamo.config",
        "def f(graph): return torch._C._autograd.x(graph)",
        "def f(model): model._compiled_call_impl = None",
        "def f(node): return node.target._schema.name",
        "def f(model): return getattr(model, '_can_record_outputs', None)",
        "import importlib; importlib.import_module('torch._dynamo.config')",
        "modules = {'torch._dynamo.backends.registry': None}",
    ],
)
def test_a_private_name_is_seen(source: str) -> None:
    assert list(private_names(source, {"_own"}))


@pytest.mark.parametrize(
    "source",
    [
        "import torch; torch.ops.aten._to_copy.default",
        "class A:\n    def f(self): return self._own",
        "def f(other): return other._own",
        "message = 'set torch._dynamo.config.optimize_ddp = False'",
        "def f(x): return type(x).__name__",
    ],
)
def test_what_is_public_or_our_own_is_left_alone(source: str) -> None:
    assert not list(private_names(source, {"_own"}))
