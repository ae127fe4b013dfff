"""Make backend="memfine" known to Dynamo and to accelerate on `import memfine_fx`, without importing either.

An installed package is found by Dynamo through its entry point. A bare checkout has none, and accelerate (thus
`TrainingArguments(torch_compile_backend="memfine")`) takes only names in an enumeration of its own. So both modules are
watched: one that is loaded already is told now, the other right after it loads.
"""

from __future__ import annotations

from typing import Any

from memfine_fx.compat import accelerate, dynamo
from memfine_fx.compat.loading import tell_when_loaded

__all__ = ["register_backend"]


def register_backend() -> None:
    """Make `backend="memfine"` known, now or when its readers load. Calling it again changes nothing."""
    tell_when_loaded(dynamo.REGISTRY, _tell_dynamo)
    tell_when_loaded(accelerate.MODULE, accelerate.add_backend)


def _tell_dynamo(registry: Any) -> None:
    from memfine_fx.compiler.entry import memfine

    dynamo.register_backend(registry, memfine, "memfine")
