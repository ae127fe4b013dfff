"""Tables that are computed tile by tile: the hook by which a kernel computes the numbers that it multiplies.

A source is Triton text of `entries(parts, expert, row, column, is_entry)` (`tables.TileSource`; `packed` has some):
entries of an expert's matrix, in fp32, at rows and columns that broadcast to each other. It may read `parts`, pointers
of tensors with experts in front, and is called where kernels else load a tile of a table; the result is cast to the
rows' dtype, as the table would have been. No table is written, forward or backward, and none has a gradient.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.tables import ListTable, Table, TileTable

__all__ = ["argument_of", "functions_of", "list_constants", "loader_of", "of_expert"]


def argument_of(table: Table) -> Any:
    """Return the kernel's argument for a table: a tensor, the addresses of a list, or a tile source's tensors."""
    if isinstance(table, ListTable):
        return table.addresses
    return table.tensors if isinstance(table, TileTable) else table


_LIST_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def list_constants(tables: Sequence[Table]) -> dict[str, Any]:
    """Return the compile-time constants of kernels for tables that are lists, all of them or none."""
    lists = [table for table in tables if isinstance(table, ListTable)]
    return {
        "LIST_TYPE": _LIST_TYPES[lists[0].dtype] if lists else None,
        "IS_ALIGNED": all(table.is_aligned for table in lists),
    }


@triton.jit
def of_expert(table, expert, LIST_TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return the address of a table that is no list, else the address of its expert's matrix."""
    if LIST_TYPE is None:
        place = table
    else:
        place = tl.load(table + expert).to(tl.pointer_type(LIST_TYPE))
        if IS_ALIGNED:
            place = tl.multiple_of(place, 16)
    return place


def loader_of(table: Table) -> Any:
    """Return the function that computes a tile [D,C], or "plain" for a table in memory.

    Its arguments are (parts, expert, rows [1,C], columns [D,1], is_entry).
    """
    return (
        _loader(table.how.source, table.firsts, table.steps, table.is_turned)
        if isinstance(table, TileTable)
        else "plain"
    )


@functools.cache
def _loader(source: str, firsts: tuple[int, int], steps: tuple[int, int], is_turned: bool) -> Any:
    names = ("places", "columns") if is_turned else ("columns", "places")
    row, column = (f"{first} + {step} * {name}" for first, step, name in zip(firsts, steps, names, strict=True))
    view = f"""

@triton.jit
def load(parts, expert, columns, places, is_entry):
    return entries(parts, expert, {row}, {column}, is_entry)
"""
    return functions_of(source + view)["load"]


@functools.cache
def functions_of(source: str) -> dict[str, Any]:
    """Compile a source text, and return what it defines under `triton.jit` by name.

    Triton finds the text where Python's own tools do, in `linecache`: there is no file.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = f"<memfine_fx source {digest}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    # Triton compiles one function for each module and name: of gate's and up's "load" in a kernel, only the first.
    space: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": f"{__name__}_{digest}"}
    exec(compile(source, name, "exec"), space)  # written here and by `kernels.epilogue`, of what they know
    return space
