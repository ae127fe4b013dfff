"""Tell another package's module something as soon as it is imported, without importing it."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

__all__ = [
    "ACCELERATE_BACKENDS",
    "ACCELERATOR",
    "DYNAMO_BACKENDS",
    "EXPERTS_FUNCTIONS",
    "FP8_EXPERTS_FUNCTIONS",
    "LLAMAFACTORY_CHECKPOINTS",
    "LORA_LAYERS",
    "MODELS",
    "tell_when_loaded",
]

DYNAMO_BACKENDS = "torch._dynamo.backends.registry"
ACCELERATE_BACKENDS = "accelerate.utils.dataclasses"
ACCELERATOR = "accelerate.accelerator"
EXPERTS_FUNCTIONS = "transformers.integrations.moe"
FP8_EXPERTS_FUNCTIONS = "transformers.integrations.finegrained_fp8"
MODELS = "transformers.modeling_utils"
LORA_LAYERS = "peft.tuners.lora.layer"
LLAMAFACTORY_CHECKPOINTS = "llamafactory.model.model_utils.checkpointing"


def tell_when_loaded(name: str, tell: Callable[[Any], None]) -> None:
    """Call `tell` with a module: now if it is loaded, else right after it loads. A second call changes nothing."""
    module = _loaded(name)
    if module is not None:
        tell(module)
    elif not any(isinstance(finder, _Watcher) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, tell))


def _loaded(name: str) -> ModuleType | None:
    """A module that is imported to its end: it may be one of those in whose midst torch, and so we, are imported."""
    module = sys.modules.get(name)
    is_unfinished = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if is_unfinished else module


class _Watcher(MetaPathFinder):
    """Finds one module as usual, with a loader that tells it afterwards; one that was being imported already is told
    when the next import after its own begins."""

    def __init__(self, name: str, tell: Callable[[Any], None]) -> None:
        self.name = name
        self._tell = tell

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            module = _loaded(self.name)
            if module is not None and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._tell(module)
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader, self._tell)
        return spec


class _NotifyingLoader(Loader):
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
