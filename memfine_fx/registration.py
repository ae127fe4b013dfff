"""Make backend="memfine" known to Dynamo and to accelerate on `import memfine_fx`, without importing either.

An installed package is found by Dynamo through its entry point. A bare checkout has none, and accelerate (thus
`TrainingArguments(torch_compile_backend="memfine")`) takes only names in an enumeration of its own. So both modules are
watched: one that is loaded already is told now, the other right after it loads.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

__all__ = ["register_backend"]


def register_backend() -> None:
    """Make `backend="memfine"` known, now or when its readers load. Calling it again changes nothing."""
    for name, tell in _READERS.items():
        module = sys.modules.get(name)
        if module is not None:
            tell(module)
        elif not any(isinstance(finder, _Watcher) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watcher(name))


def _tell_dynamo(registry: Any) -> None:
    from memfine_fx.entry import memfine

    if "memfine" not in getattr(registry, "_COMPILER_FNS", {}):
        registry.register_backend(memfine, name="memfine")


def _tell_accelerate(dataclasses: Any) -> None:
    backends = getattr(dataclasses, "DynamoBackend", None)
    if backends is None or "MEMFINE" in backends.__members__:
        return
    member = str.__new__(backends, "MEMFINE")
    member._name_ = member._value_ = "MEMFINE"
    backends._member_names_.append("MEMFINE")
    backends._member_map_["MEMFINE"] = backends._value2member_map_["MEMFINE"] = member


_READERS: dict[str, Callable[[Any], None]] = {
    "torch._dynamo.backends.registry": _tell_dynamo,
    "accelerate.utils.dataclasses": _tell_accelerate,
}


class _Watcher(MetaPathFinder):
    """Finds one module as usual, with a loader that tells it afterwards."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader, _READERS[fullname])
        return spec


class _TellingLoader(Loader):
    def __init__(self, loader: Loader, tell: Callable[[Any], None]) -> None:
        self._loader = loader
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._tell(module)
