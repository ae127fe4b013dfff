"""What may become of a file that holds JSON."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

__all__ = ["damaged_json"]

_WRONG = (None, True, 0, -1, 0.5, 1e300, 5e-324, math.nan, math.inf, 10**400, "1", [], {})


def damaged_json(whole: str) -> Iterator[str]:
    """Yield the text torn at every place, and with each value replaced, left out, given twice or in another order."""
    yield from (whole[:length] for length in range(len(whole)))
    yield from (json.dumps(fields) for fields in _damaged(json.loads(whole)))


def _damaged(fields: Any) -> Iterator[Any]:
    yield from _WRONG
    keys = list(fields) if isinstance(fields, dict) else range(len(fields)) if isinstance(fields, list) else ()
    for key in keys:
        for value in _damaged(fields[key]):
            other = copy.copy(fields)
            other[key] = value
            yield other
        other = copy.copy(fields)
        del other[key]
        yield other
    if isinstance(fields, list):
        yield fields + fields
        yield fields[::-1]
