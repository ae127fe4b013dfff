"""Blocks of tables and rows on their way into products: by descriptor where tiles ask for that, else by pointers.

A descriptor is what Hopper's tensor memory accelerator copies by: one instruction a block, no pointer or mask of any
thread, zeros outside of the tensor. It takes tensors whose last axis is contiguous and whose other strides are
multiples of 16 bytes. Pointers have no mask where tiles divide the sizes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from memfine_fx.compat.tensors import FakeTensor
from memfine_fx.kernels.launches import Tiles
from memfine_fx.kernels.tables import Table

__all__ = ["all_or_none", "by_descriptor", "load_rows", "load_table", "table_by_descriptor"]

_ALIGNMENT = 16  # bytes


@triton.jit
def load_rows(places, begin, LENGTH: tl.constexpr, TILE_DEPTH: tl.constexpr):
    """Load a tile [ROWS,DEPTH] of contiguous rows that begin at `places` [ROWS,1]."""
    depth = begin + tl.arange(0, TILE_DEPTH)
    if LENGTH % TILE_DEPTH == 0:
        tile = tl.load(places + depth[None, :])
    else:
        tile = tl.load(places + depth[None, :], mask=(depth < LENGTH)[None, :], other=0)
    return tile


@triton.jit
def load_table(
    table, block, expert, first_column, begin, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STRIDE_EXPERT: tl.constexpr,
    STRIDE_COLUMN: tl.constexpr, STRIDE_DEPTH: tl.constexpr, LOAD: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """Load a tile [DEPTH,COLUMNS] of an expert's matrix [C,D], by `block` of `table_by_descriptor` or by address.

    A table that is computed tile by tile has the function of `computed_tables.loader_of` as `LOAD`.
    """
    if LOAD != "plain":
        columns, depth = first_column + tl.arange(0, TILE_COLUMNS), begin + tl.arange(0, TILE_DEPTH)
        is_entry = (depth < DEPTH)[:, None] & (columns < COLUMNS)[None, :]
        tile = LOAD(table, expert, columns[None, :], depth[:, None], is_entry)
    elif BY_DESCRIPTOR:
        if STRIDE_DEPTH == 1:
            tile = tl.trans(tl.reshape(block.load([expert, first_column, begin]), [TILE_COLUMNS, TILE_DEPTH]))
        else:
            tile = tl.reshape(block.load([expert, begin, first_column]), [TILE_DEPTH, TILE_COLUMNS])
    else:
        columns, depth = first_column + tl.arange(0, TILE_COLUMNS), begin + tl.arange(0, TILE_DEPTH)
        places = table + expert.to(tl.int64) * STRIDE_EXPERT + columns[None, :].to(tl.int64) * STRIDE_COLUMN
        places += depth[:, None].to(tl.int64) * STRIDE_DEPTH
        if (COLUMNS % TILE_COLUMNS == 0) & (DEPTH % TILE_DEPTH == 0):
            tile = tl.load(places)
        elif DEPTH % TILE_DEPTH == 0:
            tile = tl.load(places, mask=(columns < COLUMNS)[None, :], other=0)
        else:
            tile = tl.load(places, mask=(depth < DEPTH)[:, None] & (columns < COLUMNS)[None, :], other=0)
    return tile


def table_by_descriptor(table: Table, tiles: Tiles, columns: int | None = None) -> Any:
    """Return a descriptor of a table [E,C,D] for `load_table`, along whichever axis is contiguous.

    It is None where tiles or the table do not allow one.

    Args:
        columns: of a tile; those of `tiles` where it is None.
    """
    columns = columns or tiles.columns
    if not isinstance(table, torch.Tensor):
        return None
    if table.stride(2) == 1:
        return by_descriptor(table, [1, columns, tiles.depth], tiles)
    return by_descriptor(table.mT, [1, tiles.depth, columns], tiles)


def all_or_none(blocks: Sequence[Any]) -> list[Any]:
    """Return the descriptors if each tensor has one, else None for each: a kernel is compiled for one or the other."""
    return list(blocks) if all(block is not None for block in blocks) else [None] * len(blocks)


@functools.cache
def _has_descriptors() -> bool:
    """Return whether Triton has descriptors on the host, as it does since 3.4."""
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def by_descriptor(tensor: torch.Tensor, block: Sequence[int], tiles: Tiles) -> Any:
    """Return a descriptor for blocks of a tensor, or None where tiles or the tensor do not allow one."""
    if not tiles.by_descriptor or not _has_descriptors():
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()[:-1]]
    # Fake tensors stand nowhere: what begins a storage is aligned.
    start = tensor.storage_offset() * size if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    is_aligned = all(stride % _ALIGNMENT == 0 for stride in (*strides, start, block[-1] * size))
    if not is_aligned or tensor.stride(-1) != 1 or not tensor.numel():
        return None
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))
