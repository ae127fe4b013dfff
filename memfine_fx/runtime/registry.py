"""Live counterparts of lowered calls, by the string key that is baked into a compiled graph."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

__all__ = ["Registry"]


class _Keyed(Protocol):
    site: str


LiveT = TypeVar("LiveT", bound=_Keyed)


class Registry(Generic[LiveT]):
    """What ops look up; filled while graphs are compiled, by any thread."""

    def __init__(self) -> None:
        self._live: dict[str, LiveT] = {}
        self._lock = threading.Lock()

    def register(self, live: LiveT) -> None:
        with self._lock:
            self._live[live.site] = live

    def unregister(self, site: str) -> None:
        with self._lock:
            del self._live[site]

    def lookup(self, site: str) -> LiveT:
        """The live counterpart of a key.

        Raises:
            KeyError: the graph was compiled by another process and its call never registered here.
        """
        return self._live[site]
