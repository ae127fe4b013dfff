"""Combine by matmul: the choices' weights times their rows, summed.

out = bmm(weights [T,1,K], rows [T,K,H]).squeeze(1)    ->    contribution = rows * weight
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.passes.layouts import RowInterpreter, Rows, Rule
from memfine_fx.passes.rowwise import combine_over

__all__ = ["RULES"]

aten = torch.ops.aten


def _bmm(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights, rows = args[:2]
    if not (isinstance(weights, Rows) and isinstance(rows, Rows)) or interpreter.fake(node).ndim != 3:
        return NotImplemented
    if rows.lead.groups not in (("t", "k"), ("t", "e")) or weights.lead.groups != ("t", "", rows.lead.groups[1]):
        return NotImplemented
    column = interpreter.emit(aten.unsqueeze.default, weights.expr, 1)
    off = 0.0 if 0.0 in (weights.off, rows.off) else None
    product = Rows(rows.lead, interpreter.emit(aten.mul.Tensor, rows.expr, column), True, off)
    return combine_over(product, 1, product.expr, node)


RULES: dict[Any, Rule] = {aten.bmm.default: _bmm}
