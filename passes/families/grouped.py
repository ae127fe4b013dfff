"""Grouped matmul: rows sorted by expert times a stack of weights, with the end of each group.

ids, perm = idx.reshape(-1).sort()          offsets = cumsum(histc(ids))
h = grouped_mm(x[perm // K], W, offsets)    ->    h = rows @ W[e]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.layouts import IdKind, Ids, Lead, RowInterpreter, Rows, Rule

__all__ = ["RULES"]


def _grouped_mm(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = interpreter.as_rows(args[0], node)
    table = interpreter.as_expert_table(args[1], node)
    if args[2] != Ids(IdKind.OFFSETS, Lead.EXPERT):
        raise CannotChunk("grouped matmul whose offsets are not the ends of the experts' rows", node)
    if rows.lead is not Lead.SORTED:
        raise CannotChunk(f"grouped matmul of rows that are {rows.lead.value}, not sorted by expert", node)
    interpreter.projection_widths.append(int(interpreter.fake(node.args[1]).shape[1]))  # type: ignore[arg-type]  # a node
    return Rows(rows.lead, interpreter.emit(torch.ops.aten.mm.default, rows.expr, interpreter.matrix_of(table)), True)


RULES: dict[Any, Rule] = {torch.ops.memfine.grouped_mm.default: _grouped_mm}
