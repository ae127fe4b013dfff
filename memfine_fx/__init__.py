"""memfine_fx: train Mixture-of-Experts models in chunked, recomputing expert loops.

    import memfine_fx
    memfine_fx.optimize(model, memory_budget="20GiB")

finds the MoE regions of an unmodified model, rewrites them into chunked loops with recomputation, sizes the
chunks from a symbolic memory model, and compiles with Inductor (MemFine, arXiv 2511.21431).

The import registers the backend and loads nothing else, torch neither; each name below is loaded when it is asked for.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfine_fx.compiler.registration import register_backend as _register_backend

if TYPE_CHECKING:
    from memfine_fx.api import explain, fit, log_scalars, optimize, report, scalars, verify
    from memfine_fx.compiler.replay import record_routing, replay_routing
    from memfine_fx.config import Config
    from memfine_fx.errors import (
        BudgetInfeasible,
        CannotChunk,
        ConfigError,
        DoubleBackwardError,
        MemfineError,
        RoutingReplayError,
    )
    from memfine_fx.records.verification import RegionVerification, VerifyReport
    from memfine_fx.report.entries import RegionReport
    from memfine_fx.report.reports import Report
    from memfine_fx.runtime.halving import ChunkOutOfMemory

__all__ = [
    "BudgetInfeasible",
    "CannotChunk",
    "ChunkOutOfMemory",
    "Config",
    "ConfigError",
    "DoubleBackwardError",
    "MemfineError",
    "RegionReport",
    "RegionVerification",
    "Report",
    "RoutingReplayError",
    "VerifyReport",
    "__version__",
    "explain",
    "fit",
    "log_scalars",
    "optimize",
    "record_routing",
    "replay_routing",
    "report",
    "scalars",
    "verify",
]

__version__ = "0.1.0"

_HOMES = {
    "api": "explain fit log_scalars optimize scalars verify",
    "config": "Config",
    "compiler.replay": "record_routing replay_routing",
    "errors": "BudgetInfeasible CannotChunk ConfigError DoubleBackwardError MemfineError RoutingReplayError",
    "records.verification": "RegionVerification VerifyReport",
    "report.reports": "RegionReport Report",
    "runtime.halving": "ChunkOutOfMemory",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "_restored":  # pickles of models name it here
        return import_module("memfine_fx.compiler.optimized").restored
    if name not in _HOME_OF:
        raise AttributeError(f"module 'memfine_fx' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"memfine_fx.{_HOME_OF[name]}"), name)
    return value


class _Package(ModuleType):
    """This package: `report` is the function, also once the room of that name is imported, which would set it."""

    @property
    def report(self) -> Any:
        return import_module("memfine_fx.api").report

    @report.setter
    def report(self, room: ModuleType) -> None:
        pass


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
_register_backend()
