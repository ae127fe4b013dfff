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
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.tables import ListTable, Table, TileTable

__all__ = ["argument_of", "functions_of", "list_constants", "loader_of", "of_expert"]


def argument_of(table: Table) -> Any:
    """What a kernel is given for a table."""
    if isinstance(table, ListTable):
        return table.addresses
    return table.tensors if isinstance(table, TileTable) else table


_LIST_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def list_constants(tables: Sequence[Table]) -> dict[str, Any]:
    """What kernels are compiled for where tables are lists, all of them or none."""
    lists = [one for one in tables if isinstance(one, ListTable)]
    return {
        "LIST_TYPE": _LIST_TYPES[lists[0].dtype] if lists else None,
        "IS_ALIGNED": all(one.is_aligned for one in lists),
    }


@triton.jit
def of_expert(table, expert, LIST_TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Where a table stands that is no list, else where its expert's matrix does."""
    if LIST_TYPE is None:
        place = table
    else:
        place = tl.load(table + expert).to(tl.pointer_type(LIST_TYPE))
        if IS_ALIGNED:
            place = tl.multiple_of(place, 16)
    return place


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
    told = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = f"<memfine_fx source {told}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    # Triton compiles one function for each module and name: of gate's and up's "load" in a kernel, only the first.
    space: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": f"{__name__}_{told}"}
    exec(compile(source, name, "exec"), space)  # written here and by `kernels.epilogue`, of what they know
    return space
