"""A model's methods, rewritten: read from their source, installed on its modules while a compiled call runs.

Left as written: methods without source, with decorators or closures, or whose source is not what they run.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import textwrap
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from memfine_fx.capture.forward_wrappers import is_own
from memfine_fx.capture.installing import InstalledMethods
from memfine_fx.capture.source.helpers import NAMES, PREFIX, get_ready
from memfine_fx.capture.source.loops import LeftAsWritten, rewrite_function

__all__ = ["RewrittenLoops", "rewritten_places"]

_FOR_ITER = dis.opmap["FOR_ITER"]
_PLACE = "_memfine_place"
"""Attribute of a rewritten function: where its first line stands, "file:line"."""


class RewrittenLoops:
    """The rewritten methods of a model's modules.

    Args:
        model: searched once; `structure.FoundAgain` searches again when modules were set in it.
        refused: places, "file:line"; methods that hold one stay as they are written.
    """

    def __init__(self, model: torch.nn.Module, refused: Collection[str] = ()) -> None:
        done: dict[types.FunctionType, _Method] = {}  # classes share what they inherit
        by_class = {cls: _methods_of(cls, done, refused) for cls in dict.fromkeys(map(type, model.modules()))}
        self.left = [
            (name, left)
            for name, module in model.named_modules()
            for method in by_class[type(module)].values()
            for left in method.left
        ]
        """Loops with guards that stay as they are written, each with the path of a module whose code it is."""
        self._methods = InstalledMethods(
            [
                (module, name, method.function)
                for module in model.modules()
                for name, method in by_class[type(module)].items()
                if method.function is not None and not is_own(module, name)
            ]
        )

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """The methods in their modules' places, for compilations and calls inside."""
        return self._methods.installed()


def rewritten_places(model: torch.nn.Module) -> list[str]:
    """Return where the methods begin, "file:line", that stand rewritten in a model's modules now."""
    methods = [value for module in model.modules() for value in vars(module).values()]
    places = (getattr(getattr(method, "__func__", None), _PLACE, None) for method in methods)
    return list(dict.fromkeys(place for place in places if place is not None))


@dataclass(frozen=True)
class _Method:
    """A method rewritten, None where it stays as it is; and the loops in it that do."""

    function: Callable[..., Any] | None
    left: tuple[LeftAsWritten, ...] = ()


def _methods_of(
    module_class: type[torch.nn.Module], done: dict[types.FunctionType, _Method], refused: Collection[str]
) -> dict[str, _Method]:
    """Methods of a class by name; the most derived definition of each."""
    methods: dict[str, _Method] = {}
    visited: set[str] = set()
    for owner in module_class.__mro__:
        if owner.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for name, value in vars(owner).items():
            if name in visited:
                continue
            visited.add(name)
            if not isinstance(value, types.FunctionType):
                continue
            if value not in done:
                done[value] = _rewritten(value, refused)
            methods[name] = done[value]
    return methods


def _rewritten(function: types.FunctionType, refused: Collection[str]) -> _Method:
    """The function with its loops rewritten."""
    if not _may_change(function.__code__):
        return _Method(None)
    definition = _definition(function)
    if definition is None or not _is_source_of(function, _code(definition, function)):
        return _Method(None)
    file, last_line = function.__code__.co_filename, definition.end_lineno or 0
    if any(f"{file}:{line}" in refused for line in range(definition.lineno, last_line + 1)):
        return _Method(None)
    left: list[LeftAsWritten] = []
    if not rewrite_function(definition, file, left):
        return _Method(None, tuple(left))
    get_ready()
    names = [ast.alias(name, PREFIX + name) for name in NAMES]
    definition.body.insert(0, ast.ImportFrom("memfine_fx.capture.source.helpers", names, 0))
    body = _code(definition, function)
    rewritten = types.FunctionType(body, function.__globals__, function.__name__, function.__defaults__)
    rewritten.__qualname__, rewritten.__kwdefaults__ = function.__qualname__, function.__kwdefaults__
    setattr(rewritten, _PLACE, f"{file}:{definition.lineno}")
    return _Method(rewritten, tuple(left))


def _may_change(code: types.CodeType) -> bool:
    """Whether there is a loop, or a call that is rewritten outside of one: most methods have neither, and reading the
    source of all of a model's takes half a second.
    """
    return (
        _FOR_ITER in code.co_code[::2]
        or "bincount" in code.co_names
        or any(_may_change(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    )


def _definition(function: types.FunctionType) -> ast.FunctionDef | None:
    """The syntax of a plain function, at its lines; None of one with decorators, a closure or no source.

    Annotations and defaults are left out: they are evaluated where a function is defined, which here is nowhere.
    """
    if hasattr(function, "__wrapped__") or function.__closure__:
        return None
    try:
        module = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    match module.body:
        case [ast.FunctionDef(decorator_list=[]) as definition]:
            arguments = definition.args
            definition.returns = None
            arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
            for node in ast.walk(arguments):
                if isinstance(node, ast.arg):
                    node.annotation = None
            ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
            return definition
    return None


def _code(definition: ast.FunctionDef, function: types.FunctionType) -> types.CodeType:
    module = ast.fix_missing_locations(ast.Module([definition], []))
    code = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    (body,) = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return body


def _is_source_of(function: types.FunctionType, code: types.CodeType) -> bool:
    """Whether code compiled from the source has the names and constants of what the function runs.

    It has not where the file was edited after it was imported, or where names mean something else inside of a class
    (`self.__experts`).

    NOTE: instructions are not compared: how a call of torch.f is compiled depends on the imports around it.
    """
    return _words(code) == _words(function.__code__)


def _words(code: types.CodeType) -> tuple[object, ...]:
    constants = [repr(constant) for constant in code.co_consts if not isinstance(constant, types.CodeType)]
    return code.co_names, code.co_varnames, constants
