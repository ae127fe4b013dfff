"""Features: private parts of upstream packages that memfine_fx relies on, and the fallback where one is gone."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import pkgutil
import re
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from memfine_fx.errors import CompatibilityWarning

__all__ = ["TESTED_TORCH", "Feature", "all_features", "expect", "forget_failures", "warn_outside_tested_range"]

log = logging.getLogger(__name__)

TESTED_TORCH = ("2.11", "2.16")
"""First torch that the tests pass on, and the first that they have not been run on."""

_failures: dict[str, str | None] = {}
_warned: set[str] = set()


@dataclass(frozen=True)
class Feature:
    """A private part of an upstream package that memfine_fx relies on.

    Args:
        name: as the package spells it.
        package: the distribution it belongs to.
        purpose: what it is for.
        seen: the first and the last version in which it was seen to hold.
        fallback: what is different without it, as a sentence for the user.
        check: raises where the feature does not hold; takes milliseconds and compiles nothing.
    """

    name: str
    package: str
    purpose: str
    seen: tuple[str, str]
    fallback: str
    check: Callable[[], None]

    def holds(self) -> bool:
        """Whether it does, asked once a process; the first no is a warning.

        NOTE: no lock is held meanwhile. A check runs in a thread of its own, and what that thread runs by the way
        (finalizers, where garbage is collected) may ask features too. Two threads may then check the same; the first
        answer stands.
        """
        if self.name not in _failures:
            _failures.setdefault(self.name, _failure_of(self.check))
        failure = _failures[self.name]
        if failure is not None:
            self._warn(failure)
        return failure is None

    def give_up(self, failure: str) -> None:
        """It failed in use: it does not hold from now on, which is a warning."""
        _failures[self.name] = failure
        self._warn(failure)

    def miss(self, failure: str) -> None:
        """It failed in one place and may hold in the next: a line in the log, and the first time a warning."""
        log.info("%s: %s", self.name, failure)
        self._warn(failure)

    def _warn(self, failure: str) -> None:
        if self.name in _warned:
            return
        _warned.add(self.name)
        first, last = self.seen
        warnings.warn(
            f"{self.package} {_version_of(self.package)} differs from what memfine_fx knows of {self.package} {first} "
            f"to {last} ({self.name}: {failure}). {self.fallback}",
            CompatibilityWarning,
            stacklevel=3,
        )


def expect(condition: object, otherwise: str) -> None:
    """A line of a self-check.

    Raises:
        AssertionError: the condition is false; `otherwise` says what was seen.
    """
    if not condition:
        raise AssertionError(otherwise)


def all_features() -> tuple[Feature, ...]:
    """Every feature of this room, by module; imports what the modules import."""
    room = sys.modules[__name__.rpartition(".")[0]]
    names = sorted(module.name for module in pkgutil.iter_modules(room.__path__) if module.name != "__main__")
    modules = [importlib.import_module(f"{room.__name__}.{name}") for name in names]
    return tuple(
        dict.fromkeys(value for module in modules for value in vars(module).values() if isinstance(value, Feature))
    )


def forget_failures() -> None:
    """Ask the features that failed again, and warn again: for tests."""
    for name in [name for name, failure in _failures.items() if failure is not None]:
        del _failures[name]
    _warned.clear()


def warn_outside_tested_range() -> None:
    """One warning a process where torch is older or newer than what was tested."""
    first, end = TESTED_TORCH
    version = _version_of("torch")
    if "torch" in _warned or _numbers(first) <= _numbers(version) < _numbers(end):
        return
    _warned.add("torch")
    warnings.warn(
        f"memfine_fx was tested with torch>={first},<{end}; this is torch {version}. It runs, and what it relies on in "
        "torch is checked before it is used",
        CompatibilityWarning,
        stacklevel=3,
    )


def _failure_of(check: Callable[[], None]) -> str | None:
    """Run a check and return its error in one line; None where it passed.

    NOTE: it runs in a thread of its own. Features are asked in the middle of compilations, whose fake tensors, dispatch
    and gradient modes belong to their thread.
    """
    errors: list[str] = []
    _begin_fake_tensors()

    def run() -> None:
        try:
            check()
        except Exception as error:  # NOTE: a package that has changed may raise anything
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])

    thread = threading.Thread(target=run, name="memfine_fx self-check")
    thread.start()
    thread.join()
    return errors[0] if errors else None


def _begin_fake_tensors() -> None:
    """Have this thread be the first to use fake tensors, if none did.

    NOTE: torch 2.11 built for CUDA crashes on a machine without GPU at the next fake tensor of any thread, once the
    thread that first entered a fake mode has ended.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        pass


def _version_of(package: str) -> str:
    module = sys.modules.get(package)
    version = getattr(module, "__version__", None)
    try:
        return str(version or importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor of a version: (2, 15) of "2.15.0+cpu" and of "2.15.0.dev20260101"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()
