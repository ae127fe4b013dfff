"""Einsum: letters say which dimensions are routed, so one rule covers every such spelling.

einsum("tkh,tkhf->tkf", x, W[idx])    ->    h = rows @ W[e]          gathered weights
einsum("th,ehf->tef", x, W)           ->    h = rows @ W[e]          dense
einsum("tk,tkh->th", w, y)            ->    contribution = y * w     combine

Steps: give each letter of a lead its atoms (they must agree between operands); write the same einsum on one
row, where the lead's letters are gone; a letter of choices or experts that the output lacks combines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import same_size
from memfine_fx.passes.layouts import Lead, RowInterpreter, Rows, Rule
from memfine_fx.passes.leads import join
from memfine_fx.passes.rowwise import combine_over

__all__ = ["RULES"]

aten = torch.ops.aten
_ROW = "Z"


@dataclass(frozen=True)
class _Operand:
    rows: Rows
    lead: str
    inner: str


def _einsum(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    equation, values = args[0].replace(" ", ""), args[1]
    inputs, _, output = equation.partition("->")
    operands = []
    for letters, value in zip(inputs.split(","), values, strict=True):
        rows = interpreter.as_rows(value, node)
        if len(set(letters)) != len(letters):
            raise CannotChunk(f"einsum {equation} takes a diagonal", node)
        operands.append(_Operand(rows, letters[: rows.lead.num_dims], letters[rows.lead.num_dims :]))
    leads = set("".join(operand.lead for operand in operands))
    shapes = [interpreter.fake(source).shape for source in node.args[1]]  # type: ignore[arg-type, union-attr]  # nodes
    operands = [_led(interpreter, *pair, leads) for pair in zip(operands, shapes, strict=True)]
    groups = _groups(interpreter, operands, equation, node)
    lead = "".join(letter for letter in output if letter in groups)
    summed = [letter for letter in groups if letter not in output]
    inner = output[len(lead) :]
    if not output.startswith(lead) or any(letter in groups for operand in operands for letter in operand.inner):
        raise CannotChunk(f"einsum {equation} moves or contracts routed dimensions", node)
    expr = _on_one_row(interpreter, operands, inner)
    off = 0.0 if any(operand.rows.off == 0 for operand in operands) else None
    per_row = any(operand.rows.per_row for operand in operands)
    result = Rows(Lead(*(groups[letter] for letter in lead)), expr, per_row, off)
    if not summed:
        return result
    if len(summed) > 1:
        raise CannotChunk(f"einsum {equation} sums over several routed dimensions", node)
    full = Lead(*(groups[letter] for letter in lead), groups[summed[0]])
    return combine_over(Rows(full, expr, per_row, off), full.num_dims - 1, expr, node)


def _led(
    interpreter: RowInterpreter, operand: _Operand, shape: Sequence[int | torch.SymInt], leads: set[str]
) -> _Operand:
    """A token's dimension of one in the place of its choices ([T,1,H], as K = 1 leaves it) belongs to the lead."""
    lead, inner, rows = operand.lead, operand.inner, operand.rows
    while lead and inner and inner[0] in leads and same_size(shape[len(lead)], 1):
        expr = interpreter.emit(aten.select.int, rows.expr, 1, 0)
        rows = replace(rows, lead=Lead(*rows.lead.groups, ""), expr=expr)
        lead, inner = lead + inner[0], inner[1:]
    return _Operand(rows, lead, inner)


def _groups(interpreter: RowInterpreter, operands: list[_Operand], equation: str, node: fx.Node) -> dict[str, str]:
    """Atoms of each letter that is part of a lead."""
    groups: dict[str, str] = {}
    for operand in operands:
        for letter, group in zip(operand.lead, operand.rows.lead.groups, strict=True):
            joint = join(Lead(groups.get(letter, "")), Lead(group), interpreter.size_of)
            if joint is None:
                raise CannotChunk(f"einsum {equation}: rows in different orders meet along {letter}", node)
            groups[letter] = joint.groups[0]
    return groups


def _on_one_row(interpreter: RowInterpreter, operands: list[_Operand], inner: str) -> fx.Node:
    if len(operands) == 2:
        for left, right in (operands, operands[::-1]):
            fast = _product(interpreter, left, right, inner) or _matmul(interpreter, left, right, inner)
            if fast is not None:
                return fast
    terms, exprs = [], []
    for operand in operands:
        has_row_dim = operand.rows.lead is not Lead.NONE
        terms.append((_ROW if operand.rows.per_row else "") + operand.inner)
        is_squeezed = has_row_dim and not operand.rows.per_row
        exprs.append(interpreter.emit(aten.select.int, operand.rows.expr, 0, 0) if is_squeezed else operand.rows.expr)
    is_per_row = any(operand.rows.per_row for operand in operands)
    equation = ",".join(terms) + "->" + (_ROW if is_per_row else "") + inner
    expr = interpreter.emit(aten.einsum.default, equation, exprs)
    return expr if is_per_row else interpreter.emit(aten.unsqueeze.default, expr, 0)


def _product(interpreter: RowInterpreter, rows: _Operand, scale: _Operand, inner: str) -> fx.Node | None:
    """A row times one number."""
    if scale.inner or not scale.rows.per_row or not rows.rows.per_row or rows.inner != inner or not inner:
        return None
    column = scale.rows.expr
    for _ in inner:
        column = interpreter.emit(aten.unsqueeze.default, column, 1)
    return interpreter.emit(aten.mul.Tensor, rows.rows.expr, column)


def _matmul(interpreter: RowInterpreter, rows: _Operand, matrix: _Operand, inner: str) -> fx.Node | None:
    """A row vector times a matrix."""
    is_matmul = rows.rows.per_row and not matrix.rows.per_row and len(rows.inner) == 1 and len(matrix.inner) == 2
    if not is_matmul or rows.inner not in matrix.inner or matrix.inner.replace(rows.inner, "") != inner:
        return None
    weights = matrix.rows.expr if matrix.rows.lead is Lead.NONE else interpreter.matrix_of(matrix.rows)
    if matrix.inner[0] != rows.inner:
        weights = interpreter.emit(aten.t.default, weights)
    return interpreter.emit(aten.mm.default, rows.rows.expr, weights)


RULES: dict[Any, Rule] = {torch.ops.memfine.einsum.default: _einsum}
