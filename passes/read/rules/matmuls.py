"""Rows times their expert's weights, in every spelling of a product.

grouped     rows sorted by expert, a table, the end of each group        h = rows @ W[e]
gathered    every row brings its own copy of its expert's weights
dense       every token times every expert's weights
loops       an expert's rows times a parameter of its own, or an entry of a table
combine     the choices' weights times their rows, summed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

import memfine_fx.passes.read.normal_form  # noqa: F401  # registers the operations that stay whole
from memfine_fx.errors import Reason
from memfine_fx.passes.dataflow import same_size
from memfine_fx.passes.read.dim_labels import DimLabels, Size
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.rules.pointwise import cast, expression_of, joint_iteration
from memfine_fx.passes.read.rules.reductions import combine_over
from memfine_fx.passes.read.values import Counts, Leaf, LoopIteration, Mask, Partial, Rows, merged

__all__ = ["RULES"]

aten = torch.ops.aten
_ROW = "Z"


def _grouped_mm(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    rows = reader.as_rows(args[0], call)
    reader.note_experts(call, "grouped", call.shape(1)[1])
    table = reader.as_table(args[1], call)
    # Any other offsets would hand rows to another expert than the one that they are sorted to.
    if args[2] != Counts(are_ends=True):
        unproved = call.refused(
            Reason.ROWS_NOT_FOLLOWED, "grouped matmul whose offsets are not the ends of the experts' rows"
        )
        raise getattr(args[2], "why", None) or unproved
    if rows.labels is not DimLabels.SORTED or not rows.iteration.is_all:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, f"grouped matmul of rows that are {rows.labels.in_words}, not sorted by expert"
        )
    expr = reader.emit(aten.mm.default, rows.expr, reader.matrix_of(table))
    return replace(rows, expr=expr, fill_value=None, is_dispatched=True)


def _mm(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Rows times a matrix that is the same for all of them: of one expert in a loop, or shared."""
    if len(args) == 2 and all(map(reader.is_parameter, args)):
        return _product_of_matrices(reader, call, *(reader.as_parameter(value, call) for value in args))
    rows, matrix = reader.as_rows(args[-2], call), reader.as_parameter(args[-1], call)
    bias = [reader.as_parameter(value, call) for value in args[:-2]]
    is_supported = rows.per_row and matrix.labels is DimLabels.NONE and rows.labels.num_dims == 1 and not kwargs
    if not is_supported or any(value.labels is not DimLabels.NONE for value in bias):
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, f"matmul of {rows.labels.in_words} by {matrix.labels.in_words}, or with scaling"
        )
    extra = [value.expr for value in bias]
    dispatched = rows.is_dispatched or matrix.is_dispatched or rows.iteration.expert is not None
    if rows.iteration.expert is not None or matrix.is_dispatched:
        reader.note_experts(call, "loops", call.args[-1].shape[0])
    expr = reader.emit(call.target, *extra, rows.expr, matrix.expr)
    # A zero row stays zero under a product, and not under a bias.
    fill_value = 0.0 if rows.fill_value == 0 and not bias else None
    return replace(rows, expr=expr, fill_value=fill_value, is_dispatched=dispatched)


def _product_of_matrices(reader: Reader, call: Call, left: Rows, right: Rows) -> Rows:
    """A matrix of one expert, or of all, times another: the low-rank product of an adapter in a loop."""
    if left.labels is not DimLabels.NONE or right.labels is not DimLabels.NONE:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "a product of tables that is not each expert's")
    iteration = joint_iteration([left, right], DimLabels.NONE, call)
    expr = reader.emit(aten.mm.default, left.expr, right.expr)
    return replace(left, expr=expr, iteration=iteration, is_dispatched=left.is_dispatched or right.is_dispatched)


def _bmm(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    left, right = args[:2]
    if reader.is_parameter(left) and reader.is_parameter(right):
        return _product_of_tables(reader, call, reader.as_table(left, call), reader.as_table(right, call))
    if isinstance(left, (Rows, Partial)) or isinstance(right, (Rows, Partial)):
        left = left if isinstance(left, Leaf) else reader.as_rows(left, call)
        right = right if isinstance(right, Leaf) else reader.as_rows(right, call)
    # Tried by what the operands are; at most one of them fits, since their labels differ.
    for product in (_gathered, _dense, _weighed):
        result = product(reader, call, left, right)
        if result is not None:
            return result
    raise call.refused(
        Reason.UNKNOWN_SPELLING, f"no known spelling of experts: bmm of {_words(left)} by {_words(right)}"
    )


def _product_of_tables(reader: Reader, call: Call, left: Rows, right: Rows) -> Rows:
    """Each expert's matrix times another of its own: the low-rank product of an adapter."""
    if left.labels is not DimLabels.EXPERT or right.labels is not DimLabels.EXPERT:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "a product of other than two tables [E,...]")
    product = reader.emit(aten.mm.default, reader.matrix_of(left), reader.matrix_of(right))
    return replace(left, expr=reader.emit(aten.unsqueeze.default, product, 0))


def _table_with_product(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Rows:
    """beta * W + alpha * B A of each expert: its weight with an adapter."""
    table = reader.as_table(args[0], call)
    factors = [reader.as_table(factor, call) for factor in args[1:3]]
    if table.labels is not DimLabels.EXPERT:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "baddbmm of tables with other than a table [E,...]")
    product = _product_of_tables(reader, call, *factors)
    terms = [(table.expr, kwargs.get("beta", 1)), (product.expr, kwargs.get("alpha", 1))]
    scaled = [expr if factor == 1 else reader.emit(aten.mul.Tensor, expr, factor) for expr, factor in terms]
    return replace(product, expr=reader.emit(aten.add.Tensor, *scaled))


def _words(value: Any) -> str:
    return value.labels.in_words if isinstance(value, Rows) else type(value).__name__.lower()


def _gathered(reader: Reader, call: Call, left: Any, right: Any) -> Rows | None:
    """Every row with its own expert's matrix."""
    if not (isinstance(left, Rows) and isinstance(right, Rows)) or left.per_row is right.per_row:
        return None
    if left.labels.num_dims != 1 or right.labels.num_dims != 1:
        return None
    labels = reader.joined(left.labels, right.labels)
    # A batch of experts with one row each is dense, and no row brings its own copy.
    if labels is None or labels is DimLabels.EXPERT:
        return None
    left_shape, right_shape = call.shape(0), call.shape(1)
    rows, table = (right, left) if right.per_row else (left, right)
    iteration = joint_iteration([rows, table], labels, call)
    if right.per_row and same_size(right_shape[2], 1):
        matrix = reader.emit(aten.t.default, reader.matrix_of(left))
        vector = reader.emit(aten.squeeze.dim, right.expr, 2)
        width, out_dim = right_shape[1], 2
    elif left.per_row and same_size(left_shape[1], 1):
        matrix = reader.matrix_of(right)
        vector = reader.emit(aten.squeeze.dim, left.expr, 1)
        width, out_dim = left_shape[2], 1
    else:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, f"bmm of {tuple(left_shape)} by {tuple(right_shape)}: a row is not a vector"
        )
    reader.note_experts(call, "gathered", width)
    # One row times its expert's matrix, for each row of the batch: as rows of one expert these are one product.
    product = reader.emit(aten.mm.default, vector, matrix)
    return Rows(labels, reader.emit(aten.unsqueeze.default, product, out_dim), iteration=iteration, is_dispatched=True)


def _dense(reader: Reader, call: Call, rows: Any, table: Any) -> Rows | None:
    """Every token, or every slot, with every expert's matrix."""
    if isinstance(rows, Leaf):
        rows = reader.as_rows(rows, call)
    if not isinstance(rows, Rows) or not rows.per_row or rows.labels.num_dims != 2 or rows.expr is None:
        return None
    batch = rows.labels.groups[0]
    if isinstance(table, Leaf):
        if batch not in ("e", ""):
            return None
        table = reader.as_table(table, call)
    is_table = isinstance(table, Rows) and not table.per_row and "e" in table.labels.axes
    if not is_table or not (table.labels.groups == (batch,) or (table.labels is DimLabels.EXPERT and not batch)):
        return None
    reader.note_experts(call, "dense", call.shape(1)[1])
    expr = reader.emit(aten.mm.default, rows.expr, reader.matrix_of(table))
    labels = DimLabels(batch or "e", *rows.labels.groups[1:])
    # Tokens that did not choose an expert are in its batch as well, and `fill_value` says what they give.
    return Rows(labels, expr, True, 0.0 if rows.fill_value == 0 else None, rows.iteration, True)


def _weighed(reader: Reader, call: Call, weights: Any, rows: Any) -> Any:
    """weights [T,1,K] times rows [T,K,H]: combined."""
    if isinstance(weights, Leaf):
        weights = reader.as_rows(weights, call)
    if not (isinstance(weights, Rows) and isinstance(rows, Rows)) or call.ndim != 3:
        return None
    groups = rows.labels.groups
    # [T,1,K] by [T,K,H]: the contracted dimension must be the choices' own.
    if len(groups) != 2 or groups[1] not in ("k", "e") or weights.labels.groups != (groups[0], "", groups[1]):
        return None
    iteration = merged(weights.iteration, rows.iteration)
    if iteration is None:
        return None
    column = reader.emit(aten.unsqueeze.default, expression_of(weights, call), 1)
    fill_value = 0.0 if 0.0 in (weights.fill_value, rows.fill_value) else None
    product = Rows(rows.labels, reader.emit(aten.mul.Tensor, rows.expr, column), True, fill_value, iteration, True)
    return combine_over(reader, product, 1, expression_of(product, call), call)


def _baddbmm(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    if reader.is_parameter(args[1]) and reader.is_parameter(args[2]):
        return _table_with_product(reader, call, args, kwargs)
    product = _dense(reader, call.dropping_first(), args[1], args[2])
    if product is None:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "baddbmm of other than all experts' rows and weights")
    bias = reader.as_table(args[0], call)
    shape = call.shape(0)
    if kwargs or len(shape) != 3 or not same_size(shape[1], 1):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "baddbmm with scaling, or of a bias that is not [E,1,F]")
    row = reader.emit(aten.select.int, bias.expr, 1, 0)
    return replace(product, expr=reader.emit(aten.add.Tensor, product.expr, row), fill_value=None)


# Einsum: letters say which dimensions are routed.


@dataclass(frozen=True)
class _Term:
    """An operand: its value, the letters of its labels, and the others."""

    rows: Rows
    labels: str
    inner: str
    is_one: bool = False


def _einsum(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Give each letter of the labels its axes; write the same einsum on one row, where the labels' letters are gone; a
    letter of choices or experts that the output lacks combines."""
    equation, values, dtype = args[0].replace(" ", ""), args[1], (*args[2:], None)[0]
    inputs, _, output = equation.partition("->")
    letters = inputs.split(",")
    # A letter twice in one operand pairs entry i of one dimension with entry i of another.
    if any(len(set(own)) != len(own) for own in letters):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"einsum {equation} takes a diagonal")
    if len(values) == 2 and all(map(reader.is_parameter, values)):
        return _einsum_of_tables(reader, call, letters, values, output, dtype)
    terms = [_cast(reader, _term(reader, call, own, value), dtype) for own, value in zip(letters, values, strict=True)]
    all_labels = set("".join(term.labels for term in terms))
    shapes = [tensor.shape for tensor in call.args[1]]
    terms = [_led(reader, term, shape, all_labels) for term, shape in zip(terms, shapes, strict=True)]
    groups = _groups(reader, terms, equation, call)
    iteration = joint_iteration([term.rows for term in terms], DimLabels(*groups.values()), call)
    labels = "".join(letter for letter in output if letter in groups)
    summed = [letter for letter in groups if letter not in output]
    fill_values = [term.rows.fill_value for term in terms]
    fill_value = 0.0 if any(number == 0 for number in fill_values) else None
    if not any(term.rows.is_dispatched for term in terms) and not any(term.inner for term in terms):
        return _outside(
            reader, terms, DimLabels(*(groups[letter] for letter in output)), summed, groups, fill_value, iteration
        )
    inner = output[len(labels) :]
    if not output.startswith(labels) or any(letter in groups for term in terms for letter in term.inner):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"einsum {equation} moves or contracts routed dimensions")
    # A table with labels is each expert's own parameter: this product is a projection.
    if any(term.rows.labels is not DimLabels.NONE and not term.rows.per_row for term in terms):
        reader.note_experts(call, "einsum")
    expr = _on_one_row(reader, [term for term in terms if not term.is_one], inner)
    per_row = any(term.rows.per_row for term in terms)
    dispatched = any(term.rows.is_dispatched for term in terms)
    result = Rows(DimLabels(*(groups[letter] for letter in labels)), expr, per_row, fill_value, iteration, dispatched)
    if not summed:
        return result
    if len(summed) > 1:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"einsum {equation} sums over several routed dimensions")
    full = DimLabels(*result.labels.groups, groups[summed[0]])
    return combine_over(reader, replace(result, labels=full), full.num_dims - 1, expr, call)


def _einsum_of_tables(
    reader: Reader, call: Call, letters: list[str], values: list[Any], output: str, dtype: torch.dtype | None
) -> Rows:
    """einsum("o r e, e r i -> e o i", B, A): experts stand where the output's first letter does, in any dimension; a
    factor without that letter is the same for all of them."""
    expert, inner = output[:1], output[1:]
    parts = [own.replace(expert, "") for own in letters]
    contracted = set(parts[0]) & set(parts[1])
    is_product = all(len(part) == 2 for part in parts) and len(contracted) == 1 and len(inner) == 2
    if not is_product or set(inner) != set("".join(parts)) - contracted:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, f"einsum {call.args[0]} of tables is no product of two matrices each"
        )
    matrices = [
        cast(reader, _factor_of_table(reader, call, value, own.find(expert)), dtype)
        for own, value in zip(letters, values, strict=True)
    ]
    ordered = sorted(zip(parts, matrices, strict=True), key=lambda pair: inner[0] not in pair[0])
    (left, left_matrix), (right, right_matrix) = ordered
    left_matrix = left_matrix if left[0] == inner[0] else reader.emit(aten.t.default, left_matrix)
    right_matrix = right_matrix if right[1] == inner[1] else reader.emit(aten.t.default, right_matrix)
    product = reader.emit(aten.unsqueeze.default, reader.emit(aten.mm.default, left_matrix, right_matrix), 0)
    return Rows(DimLabels.EXPERT, product, per_row=False, is_dispatched=True)


def _factor_of_table(reader: Reader, call: Call, value: Any, dim: int) -> fx.Node:
    """An expert's matrix of an operand whose experts stand in dimension `dim`, or all experts' where that is -1."""
    if dim < 0:
        return reader.matrix_of(reader.as_parameter(value, call))
    if dim and isinstance(value, Rows):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "a computed table whose experts do not come first")
    return reader.matrix_of(reader.as_table(value, call, dim))


def _term(reader: Reader, call: Call, letters: str, value: Any) -> _Term:
    if isinstance(value, Mask):
        rows = Rows(value.labels, None, fill_value=float(value.is_negated), iteration=value.iteration)
        return _Term(rows, letters, "", is_one=not value.is_negated and not value.is_part)
    rows = reader.as_rows(value, call)
    return _Term(rows, letters[: rows.labels.num_dims], letters[rows.labels.num_dims :])


def _cast(reader: Reader, term: _Term, dtype: torch.dtype | None) -> _Term:
    expr = term.rows.expr
    return term if expr is None else replace(term, rows=replace(term.rows, expr=cast(reader, expr, dtype)))


def _outside(
    reader: Reader,
    terms: list[_Term],
    labels: DimLabels,
    summed: list[str],
    groups: dict[str, str],
    fill_value: float | None,
    iteration: LoopIteration,
) -> Rows:
    """Weights times masks, perhaps summed over a token's choices."""
    # Summed over its choices, a token has one number an expert only if it names each at most once.
    sums_choices = all(groups[letter] == "k" for letter in summed)
    exprs = [term.rows.expr for term in terms if not term.is_one]
    is_chosen = not summed or (reader.frame.is_distinct and ("e" in labels.axes or iteration.expert is not None))
    expr = exprs[0] if len(exprs) == 1 and fill_value == 0 and sums_choices and is_chosen else None
    return Rows(labels, expr, True, fill_value if sums_choices else None, iteration)


def _led(reader: Reader, term: _Term, shape: Sequence[Size], all_labels: set[str]) -> _Term:
    """A token's dimension of one in the place of its choices ([T,1,H], as K = 1 leaves it) belongs to the labels."""
    labels, inner, rows = term.labels, term.inner, term.rows
    while labels and inner and inner[0] in all_labels and same_size(shape[len(labels)], 1):
        expr = reader.emit(aten.select.int, rows.expr, 1, 0)
        rows = replace(rows, labels=DimLabels(*rows.labels.groups, ""), expr=expr)
        labels, inner = labels + inner[0], inner[1:]
    return replace(term, rows=rows, labels=labels, inner=inner)


def _groups(reader: Reader, terms: list[_Term], equation: str, call: Call) -> dict[str, str]:
    """Axes of each letter that is part of the labels."""
    groups: dict[str, str] = {}
    for term in terms:
        for letter, group in zip(term.labels, term.rows.labels.groups, strict=True):
            joint = reader.joined(DimLabels(groups.get(letter, "")), DimLabels(group))
            if joint is None:
                raise call.refused(
                    Reason.ROWS_NOT_FOLLOWED, f"einsum {equation}: rows in different orders meet along {letter}"
                )
            groups[letter] = joint.groups[0]
    # Letters that stand for one axis would pair tokens with tokens, as [T,1] does with [1,T].
    whole = DimLabels(*groups.values())
    if reader.joined(whole, whole) is None:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, f"einsum {equation}: rows of different tokens, choices or experts meet"
        )
    return groups


def _on_one_row(reader: Reader, terms: list[_Term], inner: str) -> fx.Node:
    if len(terms) == 2:
        # Written as `mul` or `mm` where it is one: Inductor does better with these, and kernels match them.
        for left, right in (terms, terms[::-1]):
            fast = _product(reader, left, right, inner) or _matmul(reader, left, right, inner)
            if fast is not None:
                return fast
    letters, exprs = [], []
    for term in terms:
        has_row_dim = term.rows.labels is not DimLabels.NONE
        letters.append((_ROW if term.rows.per_row else "") + term.inner)
        is_squeezed = has_row_dim and not term.rows.per_row
        exprs.append(reader.emit(aten.select.int, term.rows.expr, 0, 0) if is_squeezed else term.rows.expr)
    is_per_row = any(term.rows.per_row for term in terms)
    equation = ",".join(letters) + "->" + (_ROW if is_per_row else "") + inner
    expr = reader.emit(aten.einsum.default, equation, exprs)
    return expr if is_per_row else reader.emit(aten.unsqueeze.default, expr, 0)


def _product(reader: Reader, rows: _Term, scale: _Term, inner: str) -> fx.Node | None:
    """A row times one number."""
    if scale.inner or not scale.rows.per_row or not rows.rows.per_row or rows.inner != inner or not inner:
        return None
    column = scale.rows.expr
    for _ in inner:
        column = reader.emit(aten.unsqueeze.default, column, 1)
    return reader.emit(aten.mul.Tensor, rows.rows.expr, column)


def _matmul(reader: Reader, rows: _Term, matrix: _Term, inner: str) -> fx.Node | None:
    """A row vector times a matrix."""
    is_matmul = rows.rows.per_row and not matrix.rows.per_row and len(rows.inner) == 1 and len(matrix.inner) == 2
    if not is_matmul or rows.inner not in matrix.inner or matrix.inner.replace(rows.inner, "") != inner:
        return None
    weights = matrix.rows.expr if matrix.rows.labels is DimLabels.NONE else reader.matrix_of(matrix.rows)
    if matrix.inner[0] != rows.inner:
        weights = reader.emit(aten.t.default, weights)
    return reader.emit(aten.mm.default, rows.rows.expr, weights)


RULES: dict[Any, Rule] = {
    torch.ops.memfine.grouped_mm.default: _grouped_mm,
    torch.ops.memfine.einsum.default: _einsum,
    aten.mm.default: _mm,
    aten.addmm.default: _mm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
}
