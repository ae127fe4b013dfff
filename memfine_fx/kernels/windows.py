"""Windows of routed rows, and how many tiles one can have whatever the routing; all of it from sizes on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Window", "ceil_div", "most_rows", "most_tiles", "windows_of"]


@dataclass(frozen=True)
class Window:
    """Rows [first, last) in expert order; some of the last may be of dropped assignments.

    Args:
        number: counted from 0.
    """

    number: int
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def windows_of(num_rows: int, rows_per_window: int, border: int = 0) -> list[Window]:
    """Return the windows of N rows; one without rows where there are none, so that empty gradients are written.

    Args:
        border: no window has rows on both sides of it.

    Raises:
        ValueError: a window of no rows.
    """
    if rows_per_window < 1:
        raise ValueError(f"a window has at least one row, not {rows_per_window}")
    border = min(border, num_rows)
    firsts = [*range(0, border, rows_per_window), *range(border, num_rows, rows_per_window)] or [0]
    pairs = enumerate(zip(firsts, [*firsts[1:], num_rows], strict=True))
    return [Window(number, first, last) for number, (first, last) in pairs]


def most_rows(windows: Sequence[Window]) -> int:
    """Return the rows of the largest window."""
    return max(window.num_rows for window in windows)


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Return the most tiles of E experts' rows: each expert that has any may leave its last tile almost empty."""
    num_touched = min(num_experts, num_rows)
    return (num_rows + num_touched * (tile_rows - 1)) // tile_rows
