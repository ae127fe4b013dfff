"""The features that chunking requires: without one of them gradients could be wrong, or nothing would compile."""

from __future__ import annotations

import importlib

from memfine_fx.compat.checks import Feature

__all__ = ["NAMES", "can_chunk"]

_MODULES = ("operators", "tensors", "shapes", "autograd", "dynamo", "functorch", "inductor")


def can_chunk(inner_backend: str) -> bool:
    """Whether every feature that chunked regions rest upon holds; the first that does not is a warning.

    Args:
        inner_backend: as in `Config`; "eager" needs neither AOT autograd nor Inductor.
    """
    if not NAMES.holds():
        return False
    from memfine_fx.compat import dynamo, functorch, inductor, operators, shapes, tensors

    features = [operators.SCHEMAS, tensors.STORAGES, shapes.SYMBOLS, dynamo.MODE_SWITCHES]
    features += [functorch.PARTITIONER] if inner_backend != "eager" else []
    features += [inductor.COMPILER] if inner_backend == "inductor" else []
    return all(feature.holds() for feature in features)


def _check_names() -> None:
    for name in _MODULES:
        importlib.import_module(f"memfine_fx.compat.{name}")


NAMES = Feature(
    name="torch._ops, torch._subclasses, torch._dispatch, torch._inductor.custom_graph_pass",
    package="torch",
    purpose="the classes that passes over graphs are written in",
    seen=("2.11", "2.15"),
    fallback="No graph can be read, so nothing is chunked: models are compiled as without memfine_fx.",
    check=_check_names,
)
