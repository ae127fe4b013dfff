"""Register the backend with Dynamo on `import memfine_fx`, without importing Dynamo.

An installed package is found by its entry point. A bare checkout has none, so the registry module is watched:
if it is loaded already, register now; if not, right after it loads.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

__all__ = ["register_backend"]

_REGISTRY = "torch._dynamo.backends.registry"


def register_backend() -> None:
    """Make `backend="memfine"` known, now or when Dynamo loads. Calling it again changes nothing."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        _register(registry)
    elif not any(isinstance(finder, _RegistryWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryWatcher())


def _register(registry: ModuleType) -> None:
    from memfine_fx.entry import memfine

    if "memfine" not in getattr(registry, "_COMPILER_FNS", {}):
        registry.register_backend(memfine, name="memfine")


class _RegistryWatcher(MetaPathFinder):
    """Finds the registry module as usual, with a loader that registers after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)
