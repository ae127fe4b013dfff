"""A model's methods, rewritten: read from their source, installed on its modules while a compiled call runs.

Left as written: methods without source, with decorators or closures.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import logging
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch

from memfine_fx.capture.installing import InstalledMethods
from memfine_fx.capture.source.helpers import NAMES, PREFIX
from memfine_fx.capture.source.loops import rewrite_function

__all__ = ["RewrittenLoops"]

log = logging.getLogger(__name__)


class RewrittenLoops:
    """The rewritten methods of a model's modules.

    Args:
        model: searched once; later changes of its modules are not seen.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        by_class = {one: _rewritten_methods(one) for one in dict.fromkeys(map(type, model.modules()))}
        self._methods = InstalledMethods(
            [
                (module, name, function)
                for module in model.modules()
                for name, function in by_class[type(module)].items()
                if name not in vars(module)
            ]
        )

    @property
    def places(self) -> list[str]:
        """File and line of each rewritten method, once."""
        found: dict[str, None] = {}
        for _, _, method in self._methods.methods:
            code = method.__func__.__code__
            found[f"{code.co_filename}:{code.co_firstlineno} ({method.__func__.__qualname__})"] = None
        return list(found)

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """The methods in their modules' places, for compilations and calls inside."""
        return self._methods.installed()


def _rewritten_methods(module_class: type[torch.nn.Module]) -> dict[str, Callable[..., Any]]:
    """Methods of a class that change when rewritten, by name; the most derived definition of each."""
    found: dict[str, Callable[..., Any]] = {}
    seen: set[str] = set()
    for owner in module_class.__mro__:
        if owner.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for name, value in vars(owner).items():
            if name in seen:
                continue
            seen.add(name)
            rewritten = _rewritten(value) if isinstance(value, types.FunctionType) else None
            if rewritten is not None:
                found[name] = rewritten
    return found


def _rewritten(function: types.FunctionType) -> Callable[..., Any] | None:
    if hasattr(function, "__wrapped__") or function.__closure__:
        return None
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (definition,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list or not rewrite_function(definition):
        return None
    names = [ast.alias(name, PREFIX + name) for name in NAMES]
    definition.body.insert(0, ast.ImportFrom("memfine_fx.capture.source.helpers", names, 0))
    _drop_annotations(definition)
    module = ast.Module([definition], [])
    ast.increment_lineno(module, function.__code__.co_firstlineno - 1)
    code = compile(ast.fix_missing_locations(module), function.__code__.co_filename, "exec", dont_inherit=True)
    (body,) = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    rewritten = types.FunctionType(body, function.__globals__, function.__name__, function.__defaults__)
    rewritten.__qualname__, rewritten.__kwdefaults__ = function.__qualname__, function.__kwdefaults__
    return rewritten


def _drop_annotations(definition: ast.FunctionDef) -> None:
    """Annotations and defaults are evaluated where a function is defined, which here is nowhere."""
    arguments = definition.args
    definition.returns = None
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for starred in (arguments.vararg, arguments.kwarg):
        if starred is not None:
            starred.annotation = None
