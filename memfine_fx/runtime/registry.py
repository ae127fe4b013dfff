"""Live counterparts of lowered calls, by the string key that is baked into a compiled graph.

A registry does not keep what it knows alive: a counterpart lives with the record of its graph, and so with the model.
"""

from __future__ import annotations

import threading
import weakref
from typing import Generic, Protocol, TypeVar

__all__ = ["Registry"]


class _Keyed(Protocol):
    region_id: str


LiveT = TypeVar("LiveT", bound=_Keyed)


class Registry(Generic[LiveT]):
    """A table of live counterparts that ops look up; filled while graphs are compiled, by any thread."""

    def __init__(self) -> None:
        self._live: weakref.WeakValueDictionary[str, LiveT] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def register(self, live: LiveT) -> None:
        with self._lock:
            self._live[live.region_id] = live

    def unregister(self, region_id: str) -> None:
        with self._lock:
            del self._live[region_id]

    def lookup(self, region_id: str) -> LiveT:
        """The live counterpart of a key.

        Raises:
            KeyError: the graph was compiled by another process and never registered here, or its model is gone.
        """
        return self._live[region_id]
