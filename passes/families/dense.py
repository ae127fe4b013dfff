"""Dense experts: every token times every expert's weights, and a sum over the experts that weights it.

h = bmm(x.expand(E, T, H), W)        [E,T,F]        ->    h = rows @ W[e]
out = (h * weights).sum(experts)     [T,H]                for the chosen pairs only

What a token's other experts would add is proved to be zero (`Rows.off` here, `dense_weights` for the weights),
so the routed form computes K/E of it and gives the same sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.layouts import Lead, Outside, RowInterpreter, Rows, Rule

__all__ = ["RULES"]

aten = torch.ops.aten


def _bmm(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, table = args[-2:]
    if not _are_rows_by_table(rows, table):
        return NotImplemented
    weights = table if isinstance(table, Rows) else interpreter.as_expert_table(table, node)
    width = int(interpreter.fake(node.args[-1]).shape[2])  # type: ignore[arg-type]  # a node
    interpreter.projection_widths.append(width)
    expr = interpreter.emit(aten.mm.default, rows.expr, interpreter.matrix_of(weights))
    lead = Lead(rows.lead.groups[0] or "e", *rows.lead.groups[1:])
    return Rows(lead, expr, True, rows.off if rows.off == 0 else None)


def _baddbmm(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    product = _bmm(interpreter, node, args, {})
    if product is NotImplemented:
        return NotImplemented
    bias = interpreter.as_expert_table(args[0], node)
    shape = interpreter.fake(node.args[0]).shape  # type: ignore[arg-type]  # a node
    if kwargs or len(shape) != 3 or shape[1] != 1:
        raise CannotChunk("baddbmm with scaling, or of a bias that is not [E,1,F]", node)
    row = interpreter.emit(aten.select.int, bias.expr, 1, 0)
    return Rows(product.lead, interpreter.emit(aten.add.Tensor, product.expr, row), True)


def _are_rows_by_table(rows: Any, table: Any) -> bool:
    if not isinstance(rows, Rows) or not rows.per_row or rows.lead.num_dims != 2:
        return False
    batch = rows.lead.groups[0]
    if isinstance(table, Outside):
        return batch in ("e", "")
    is_table = isinstance(table, Rows) and not table.per_row and "e" in table.lead.atoms
    return is_table and (table.lead.groups == (batch,) or (table.lead is Lead.EXPERT and not batch))


RULES: dict[Any, Rule] = {aten.bmm.default: _bmm, aten.baddbmm.default: _baddbmm}
