"""The suites, one file each: every module here that defines `SUITE` is found by itself."""

from importlib import import_module
from pkgutil import iter_modules

from benchmarks.suites.base import Part, Suite

__all__ = ["SUITES", "Part", "Suite"]


def _found() -> dict[str, Suite]:
    modules = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)]
    suites: list[Suite] = [module.SUITE for module in modules if hasattr(module, "SUITE")]
    return {suite.name: suite for suite in suites}


SUITES = _found()
