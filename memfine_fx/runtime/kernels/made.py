"""Tables that exist tile by tile: the hook by which a kernel makes the numbers that it multiplies.

A source is Triton text of `made(parts, expert, row, column, is_entry)` (`tables.TileSource`; `packed` has some):
entries of an expert's matrix, in fp32, at rows and columns that broadcast to each other. It may read `parts`, pointers
of tensors with experts in front, and is called where kernels else load a tile of a table; the result is cast to the
rows' dtype, as the table would have been. No table is written, forward or backward, and none has a gradient.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

import triton
import triton.language as tl

from memfine_fx.runtime.kernels.tables import Table, TileTable

__all__ = ["argument_of", "functions_of", "loader_of"]


def argument_of(table: Table) -> Any:
    """What a kernel is given for a table."""
    return table.tensors if isinstance(table, TileTable) else table


def loader_of(table: Table) -> Any:
    """The function of (parts, expert, rows [1,C], columns [D,1], is_entry) that makes a tile [D,C], or "plain"."""
    return (
        _loader(table.how.source, table.firsts, table.steps, table.is_turned)
        if isinstance(table, TileTable)
        else "plain"
    )


@functools.cache
def _loader(source: str, firsts: tuple[int, int], steps: tuple[int, int], is_turned: bool) -> Any:
    names = ("places", "columns") if is_turned else ("columns", "places")
    row, column = (f"{first} + {step} * {one}" for first, step, one in zip(firsts, steps, names, strict=True))
    view = f"""

@triton.jit
def load(parts, expert, columns, places, is_entry):
    return made(parts, expert, {row}, {column}, is_entry)
"""
    return functions_of(source + view)["load"]


@functools.cache
def functions_of(source: str) -> dict[str, Any]:
    """What a text defines under `triton.jit`; Triton finds it where Python's own tools do, beside no file."""
    name = f"<memfine_fx source {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(source, name, "exec"), space)  # written here and by `passes.lower.epilogue`, of what they know
    return space
