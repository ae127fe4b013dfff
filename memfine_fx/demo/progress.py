"""A progress bar where tqdm is installed, plain lines where it is not."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol


class Progress(Protocol):
    def set_description(self, desc: str) -> None: ...
    def update(self, n: int) -> object: ...
    def close(self) -> None: ...


class PlainProgress:
    """A progress display that writes one line per tick."""

    def __init__(self, total: int, write: Callable[[str], object] = sys.stderr.write) -> None:
        self._total = total
        self._write = write
        self._done = 0
        self._description = ""

    def set_description(self, desc: str) -> None:
        self._description = desc

    def update(self, n: int) -> None:
        self._done += n
        self._write(f"[{self._done}/{self._total}] {self._description}\n")

    def close(self) -> None:
        """Do nothing: no resource is open."""


def open_progress(total: int) -> Progress:
    """Return a progress bar of ``total`` ticks on standard error."""
    if find_spec("tqdm") is None:
        return PlainProgress(total)
    tqdm: Any = import_module("tqdm").tqdm  # it ships no types
    bar: Progress = tqdm(total=total, bar_format="{desc:<44} {bar:24} {n_fmt}/{total_fmt} [{elapsed}]")
    return bar
