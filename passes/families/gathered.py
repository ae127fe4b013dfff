"""Gathered weights: every row brings its own copy of its expert's weights to a batched matmul.

h = bmm(W[ids], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)    ->    h = rows @ W[e].T
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.layouts import Lead, RowInterpreter, Rows, Rule

__all__ = ["RULES"]

aten = torch.ops.aten


def _bmm(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = (interpreter.as_rows(value, node) for value in args[:2])
    left_shape, right_shape = (interpreter.fake(source).shape for source in node.args[:2])  # type: ignore[arg-type]  # nodes
    if left.per_row is right.per_row or not _same_rows(interpreter, left, right):
        raise CannotChunk(f"bmm of {left.lead.value} by {right.lead.value}: not rows by their expert's weights", node)
    lead = Lead.FLAT if Lead.TOKEN in (left.lead, right.lead) else left.lead
    if right.per_row and right_shape[2] == 1:
        matrix = interpreter.emit(aten.t.default, interpreter.matrix_of(left))
        vector = interpreter.emit(aten.squeeze.dim, right.expr, 2)
        interpreter.projection_widths.append(int(right_shape[1]))
        out_dim = 2
    elif left.per_row and left_shape[1] == 1:
        matrix = interpreter.matrix_of(right)
        vector = interpreter.emit(aten.squeeze.dim, left.expr, 1)
        interpreter.projection_widths.append(int(left_shape[2]))
        out_dim = 1
    else:
        raise CannotChunk(f"bmm of {tuple(left_shape)} by {tuple(right_shape)}: a row is not a vector", node)
    product = interpreter.emit(aten.mm.default, vector, matrix)
    return Rows(lead, interpreter.emit(aten.unsqueeze.default, product, out_dim), True)


def _same_rows(interpreter: RowInterpreter, left: Rows, right: Rows) -> bool:
    if left.lead is right.lead:
        return left.lead in (Lead.FLAT, Lead.SORTED)
    return interpreter.sizes.top_k == 1 and {left.lead, right.lead} == {Lead.TOKEN, Lead.FLAT}


RULES: dict[Any, Rule] = {aten.bmm.default: _bmm}
