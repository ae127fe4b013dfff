"""Gathered weights: every row brings its own copy of its expert's weights to a batched matmul.

h = bmm(W[ids], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)    ->    h = rows @ W[e].T
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.layouts import Lead, RowInterpreter, Rows, Rule
from memfine_fx.passes.leads import join

__all__ = ["RULES"]

aten = torch.ops.aten


def _bmm(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args[:2]
    if not (isinstance(left, Rows) and isinstance(right, Rows)):
        return NotImplemented
    left_shape, right_shape = (interpreter.fake(source).shape for source in node.args[:2])  # type: ignore[arg-type]  # nodes
    if left.per_row is right.per_row or left.lead.num_dims != 1 or right.lead.num_dims != 1:
        return NotImplemented
    lead = join(left.lead, right.lead, interpreter.size_of)
    if lead is None or lead is Lead.EXPERT:
        return NotImplemented
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


RULES: dict[Any, Rule] = {aten.bmm.default: _bmm}
