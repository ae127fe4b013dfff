"""Every message that memfine_fx can give, read from its source: errors, refusals, warnings, notes, the command's lines.

A message is found where it is made, e.g. ``raise ConfigError(f"...")`` or ``Refusal(where, "...")``. What is only known
at run time stands as an ellipsis. Calls that hand on a message made elsewhere are named in `_HANDED_ON`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Message", "messages"]

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("memfine_fx", "passes", "models", "planner/memfine_planner")
HOLE = "…"

_ERRORS = frozenset(
    "ConfigError MemfineError MissingCompiler MissingPackage DoubleBackwardError LeftoverShapes BudgetInfeasible "
    "ChunkOutOfMemory ExchangeFailed RanksDisagree RoutingReplayError "
    "ValueError TypeError RuntimeError ImportError NotImplementedError".split()
)
_KINDS = {
    "CannotChunk": "refusal",
    "refused": "refusal",
    "Refusal": "refusal",
    "GuardRefused": "refusal",
    "Unsuited": "refusal",
    "unproved": "refusal",
    "_unproved": "refusal",
    "warn": "warning",
    "warning": "warning",
    "append": "note",
}
_OF_BODIES = frozenset({"GuardRefused", "Unsuited", "unproved", "_unproved"})
"""Calls whose reason is always `Reason.BODY_NOT_RUN`."""
_TEXT_PLACES = {"_unproved": 1, "CannotChunk": 1, "refused": 1, "Refusal": 2}
_RETURNING = {
    "_switch": "note",
    "_record": "verification",
    "hint_for_adapters": "warning",
    "hint_for_packed_layers": "warning",
    "hint_for_recording": "warning",
    "_failure": "verification",
    "hint_for_cut_graphs": "warning",
}
"""Functions that return a message, or nothing."""
_OWN_TEXT = frozenset({"BudgetInfeasible", "ChunkOutOfMemory", "ExchangeFailed", "MissingCompiler", "MissingPackage"})
"""Errors whose text is made in their class, not where they are raised."""
_HANDED_ON = frozenset(
    {
        "f'{what}, in a body that is skipped'",
        "obstacle",
        "refusal.reason",
        "refusal.details",
        "message",
        "'\\n'.join(problems)",
        "f'{where}: {message}'",
        "f'memfine: {error}'",
        "f'memfine: {as_typed(str(error), options)}'",
    }
)
"""Expressions that hold a message found elsewhere."""


@dataclass(frozen=True)
class Message:
    """One message.

    Args:
        kind: the error's class, or "refusal", "warning", "note", "command line".
        text: as written, an ellipsis for each part that is known only at run time.
        source: file in which it is made, relative to the root.
        reason: name of a refusal's `errors.Reason`.
    """

    kind: str
    text: str
    source: str
    reason: str = ""


def messages(root: Path = ROOT) -> list[Message]:
    """Each message once, in the order of files and lines.

    Raises:
        LookupError: a message is made in a way that cannot be read; name the expression in `_HANDED_ON` if it hands one
            on, or write the text where the error is made.
    """
    found: dict[tuple[str, str], Message] = {}
    for path in _sources(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        source = path.relative_to(root).as_posix()
        for kind, text, reason in _of_tree(tree, source):
            found.setdefault((kind, text), Message(kind, text, source, reason))
    return list(found.values())


def _sources(root: Path) -> Iterator[Path]:
    """Python files, those under the links `memfine_fx/passes` and `memfine_fx/models` once."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if path.resolve() == root.resolve() / path.relative_to(root):
                yield path


def _of_tree(tree: ast.Module, source: str) -> Iterator[tuple[str, str, str]]:
    """Kind, text and reason of each message."""
    for node, scope, owner in _scopes(tree):
        kind, expression = _made(node, scope, owner)
        if expression is None or ast.unparse(expression) in _HANDED_ON:
            continue
        texts = [" ".join(text.split()) for text in _texts(expression, [scope, tree])]
        if not texts and kind not in _RETURNING.values():
            raise LookupError(f"{source}:{expression.lineno}: cannot read the message {ast.unparse(expression)!r}")
        reason = _reason(node)
        yield from ((kind, text, reason) for text in texts if text)


def _scopes(tree: ast.Module) -> list[tuple[ast.AST, ast.AST, str]]:
    """Every node with the function (or module) and the class that it stands in, in order."""
    found: list[tuple[ast.AST, ast.AST, str]] = []

    def visit(node: ast.AST, scope: ast.AST, owner: str) -> None:
        found.append((node, scope, owner))
        if isinstance(node, ast.FunctionDef):
            scope = node
        elif isinstance(node, ast.ClassDef):
            owner = node.name
        for child in ast.iter_child_nodes(node):
            visit(child, scope, owner)

    visit(tree, tree, "")
    return found


def _made(node: ast.AST, scope: ast.AST, owner: str) -> tuple[str, ast.expr | None]:
    """The kind and the text of the message that a node makes; no text where it makes none."""
    if isinstance(node, ast.Return):
        return _RETURNING.get(getattr(scope, "name", ""), ""), node.value if _returns_messages(scope) else None
    return _called(node, owner) if isinstance(node, ast.Call) else ("", None)


def _reason(node: ast.AST) -> str:
    """Which `Reason` a call names."""
    if not isinstance(node, ast.Call):
        return ""
    if ast.unparse(node.func).rsplit(".", 1)[-1] in _OF_BODIES:
        return "BODY_NOT_RUN"
    named = (ast.unparse(argument) for argument in node.args)
    return next((name.removeprefix("Reason.") for name in named if name.startswith("Reason.")), "")


def _returns_messages(scope: ast.AST) -> bool:
    """Whether a function is one of those that return messages."""
    return isinstance(scope, ast.FunctionDef) and scope.name in _RETURNING


def _called(call: ast.Call, owner: str) -> tuple[str, ast.expr | None]:
    called = ast.unparse(call.func)
    name = called.rsplit(".", 1)[-1]
    words = {word.arg: word.value for word in call.keywords}
    if called == "super().__init__":
        if _reason(call):
            return "refusal", call.args[1]
        return (owner, call.args[0]) if owner in _OWN_TEXT else ("", None)
    if called == "print":
        return "command line", call.args[0] if _is_complaint(call, words) else None
    if called == "replace" and "failure" in words and not isinstance(words["failure"], ast.Call):
        return "verification", words["failure"]
    if name in _ERRORS and name not in _OWN_TEXT:
        return name, call.args[0] if call.args else None
    if name not in _KINDS or (name == "append" and not called.endswith("notes.append")):
        return "", None
    return _KINDS[name], call.args[_TEXT_PLACES.get(name, 0)]


def _is_complaint(call: ast.Call, words: dict[str | None, ast.expr]) -> bool:
    """Whether a print is the command's last word, `memfine: ...` on stderr."""
    first = next(_texts(call.args[0], []), "") if call.args else ""
    return "file" in words and ast.unparse(words["file"]) == "sys.stderr" and first.startswith("memfine")


def _texts(expression: ast.expr | None, scopes: list[ast.AST]) -> Iterator[str]:
    """Every text that an expression may have."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        yield expression.value
    elif isinstance(expression, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in expression.values)
    elif isinstance(expression, ast.List):
        for part in expression.elts:
            yield from _texts(part, scopes)
    elif isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Mult):
        yield from _texts(expression.left, scopes)
    elif isinstance(expression, ast.BinOp):
        for left in _texts(expression.left, scopes):
            for right in _texts(expression.right, scopes):
                yield left + right
    elif isinstance(expression, ast.IfExp):
        yield from _texts(expression.body, scopes)
        yield from _texts(expression.orelse, scopes)
    elif isinstance(expression, ast.BoolOp):
        for part in expression.values:
            yield from _texts(part, scopes)
    elif isinstance(expression, ast.Name):
        for scope in scopes:
            for node in ast.walk(scope):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == expression.id:
                    yield from _texts(node.value, scopes)
