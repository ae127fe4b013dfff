"""The features that chunking requires: without one of them gradients could be wrong, or nothing would compile."""

from __future__ import annotations

import importlib

from memfine_fx.compat.checks import Feature

__all__ = ["GRAPHS", "can_chunk"]


def can_chunk(inner_backend: str) -> bool:
    """Return whether every feature that chunked regions need holds; the first that does not is a warning.

    Args:
        inner_backend: as in `Config`; "eager" needs neither AOT autograd nor Inductor.
    """
    if not GRAPHS.holds():
        return False
    from memfine_fx.compat import functorch, inductor

    features = [functorch.PARTITIONER] if inner_backend != "eager" else []
    features += [inductor.COMPILER] if inner_backend == "inductor" else []
    return all(feature.holds() for feature in features)


_CHECKS = {
    "operators": "check_schemas",
    "tensors": "check_storages",
    "shapes": "check_symbols",
    "functional": "check_functional_tensors",
    "dynamo": "check_mode_switches",
    "autograd": "",
    "functorch": "",
    "inductor": "",
}
"""Check of each module whose import alone fails where torch's classes are elsewhere; "" where the import is all."""


def _check_graphs() -> None:
    for name, check in _CHECKS.items():
        module = importlib.import_module(f"memfine_fx.compat.{name}")
        if check:
            getattr(module, check)()


GRAPHS = Feature(
    name="torch._ops, torch._subclasses, torch._functorch and ShapeEnv",
    package="torch",
    purpose="reading graphs: operators' schemas, storages of fake and functional tensors, symbols of sizes, and modes",
    seen=("2.11", "2.15"),
    fallback="No graph can be read, so nothing is chunked: models are compiled as without memfine_fx.",
    check=_check_graphs,
)
