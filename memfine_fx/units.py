"""Bytes as people write and read them: "20GiB" as a number, and 2,786,552 as "2.66 MiB"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

__all__ = ["budget_text", "bytes_of_text", "readable_bytes"]

_BINARY = ("KiB", "MiB", "GiB", "TiB")
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]i?)?b|([kmgt]i?))?\s*", re.IGNORECASE)


def bytes_of_text(text: str) -> int:
    """Return the bytes that a text such as "20GiB", "800 MB" or "1.5G" names; 0 where it names none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return 0
    return int(Decimal(match.group(1)) * _UNITS[(match.group(2) or match.group(3) or "").lower()])


def readable_bytes(num_bytes: int) -> str:
    """Return bytes as text of three digits, such as "2.66 MiB" or "812 MiB"; below 1 KiB they are exact."""
    return _in_unit(num_bytes, round)


def budget_text(num_bytes: int) -> str:
    """Return the smallest memory budget of three digits that is not below these bytes, such as "2.67MiB".

    A user can type it where a budget is expected.
    """
    return _in_unit(num_bytes, math.ceil).replace(" ", "").replace(",", "")


def _in_unit(num_bytes: int, to_whole: Callable[[Fraction], int]) -> str:
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    power = next((power for power in range(1, len(_BINARY)) if abs(num_bytes) < 999.5 * 1024**power), len(_BINARY))
    amount = Fraction(num_bytes, 1024**power)
    decimals = max(0, 2 - math.floor(math.log10(abs(amount))))
    return f"{to_whole(amount * 10**decimals) / 10**decimals:,.{decimals}f} {_BINARY[power - 1]}"
