"""Expert loops, once rolled (see `memfine_fx.passes.loops`): rows in expert order times expert 0's own weights.

What stands for the other experts' weights is told by `Rolled.params`; here only the order of rows is proved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.layouts import Lead, Outside, RowInterpreter, Rows, Rule
from memfine_fx.passes.loops.marker import ONE_EXPERT

__all__ = ["RULES"]


def _one_expert(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = interpreter.as_rows(args[0], node)
    if rows.lead is not Lead.SORTED:
        raise CannotChunk(f"split by the experts' counts, but rows are {rows.lead.value}, not sorted by expert", node)
    return rows


def _transpose_matrix(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], (Outside, Rows)):
        return NotImplemented
    matrix = interpreter.as_rows(args[0], node)
    if matrix.lead is not Lead.NONE:
        return NotImplemented
    return Rows(Lead.NONE, interpreter.emit(node.target, matrix.expr), per_row=False)


RULES: dict[Any, Rule] = {torch.ops.aten.t.default: _transpose_matrix, ONE_EXPERT: _one_expert}
