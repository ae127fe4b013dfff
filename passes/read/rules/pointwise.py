"""Row by row: operations under which rows of different assignments never meet.

Pointwise operations share one rule, by ATen's own `pointwise` tag; random ones are never admitted, because a recomputed
chunk would draw other numbers. Operations along one dimension must leave the routed dimensions alone.

What no expert is part of (weights before they meet rows) is followed for one thing only: the constant that stands
where a token did not choose an expert. A sum over all experts is a sum over the chosen ones if that constant is zero;
then the entries are constants, so no gradient leaves through them either.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.autograd import run_without_modes
from memfine_fx.compat.operators import OpOverload, is_pointwise, without_write
from memfine_fx.compat.tensors import tree_flatten, tree_unflatten
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import same_size
from memfine_fx.passes.ops import has_random_tag
from memfine_fx.passes.read.dim_labels import DimLabels
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.values import (
    ALL,
    Combined,
    Counts,
    Fill,
    Ids,
    Leaf,
    LoopIteration,
    Mask,
    Partial,
    Rows,
    Taken,
    merged,
)

__all__ = [
    "RULES",
    "Operand",
    "align",
    "along_dim",
    "along_routed",
    "cast",
    "check_about",
    "inner_dim",
    "joint_iteration",
    "pointwise_rule",
]

aten = torch.ops.aten


def pointwise_rule(target: Any) -> Rule | None:
    """The shared rule for pointwise operations, or None."""
    if not isinstance(target, OpOverload) or without_write(target) is not target:  # an expert function writes nothing
        return None
    if not is_pointwise(target) or has_random_tag(target):
        return None
    return pointwise


@dataclass(frozen=True)
class Operand:
    """Rows that meet others in one operation, and the tensor they are."""

    rows: Rows
    tensor: torch.Tensor


def pointwise(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    values, spec = tree_flatten((args, kwargs))
    tensors = tree_flatten((call.args, call.kwargs))[0]
    # Ids are names: arithmetic on them names something else, which only rules of indices may follow.
    refused = next((value for value in values if isinstance(value, (Ids, Combined, Counts))), None)
    if refused is not None:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"{type(refused).__name__.lower()} {refused} used as row data")
    led = _about_choices(reader, call, values, tensors)
    if led is not None:
        return _outside(call, led, values, spec, tensors)
    operands = {
        place: Operand(reader.as_rows(value, call), tensors[place])
        for place, value in enumerate(values)
        if isinstance(value, (Rows, Leaf, Partial, Mask))
    }
    labels, expressions = align(reader, list(operands.values()), call.ndim, call)
    by_place = dict(zip(operands, expressions, strict=True))
    _check_fills(values, tensors, call)
    leaves = [by_place.get(place, _number_of(reader, value, call)) for place, value in enumerate(values)]
    new_args, new_kwargs = tree_unflatten(leaves, spec)
    rows = [operand.rows for operand in operands.values()]
    expr = reader.emit(call.target, *new_args, **new_kwargs)
    fill_value = _fill_value(
        call.target, values, spec, {place: operand.tensor.dtype for place, operand in operands.items()}
    )
    iteration = joint_iteration(rows, labels, call)
    # Rows picked for one expert that meet something are part of it, however far its matmul still is.
    dispatched = any(value.is_dispatched for value in rows) or (iteration.expert is not None and len(rows) > 1)
    return Rows(labels, expr, any(value.per_row for value in rows), fill_value, iteration, dispatched)


def joint_iteration(rows: Sequence[Rows], labels: DimLabels, call: Call) -> LoopIteration:
    """Which assignments rows that meet are about.

    Args:
        rows: what meets.
        labels: of the result.
        call: for refusals.

    Raises:
        CannotChunk: about different experts, or in different orders.
    """
    iteration = ALL
    for value in rows:
        joint = merged(iteration, value.iteration)
        if joint is None or (
            value.labels is DimLabels.SORTED and iteration.order and value.iteration.expert != iteration.expert
        ):
            experts = sorted({part.iteration.expert for part in rows if part.iteration.expert is not None})
            raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"rows of experts {experts} meet before they are combined")
        iteration = joint
    check_about(iteration, labels, call)
    return iteration


def check_about(iteration: LoopIteration, labels: DimLabels, call: Call) -> None:
    """Refuse one expert's entries that meet every expert's, or one choice's that meet all of a token's."""
    if (iteration.expert is not None and "e" in labels.axes) or (iteration.choice is not None and "k" in labels.axes):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "entries of one expert or choice meet those of all")


def _about_choices(
    reader: Reader, call: Call, values: Sequence[Any], tensors: Sequence[Any]
) -> tuple[DimLabels, LoopIteration] | None:
    """Return what operands are about together, if no expert has computed them but some are known where not chosen.

    None for rows, which also have features.
    """
    led = [
        (operand, tensor) for operand, tensor in zip(values, tensors, strict=True) if isinstance(operand, (Rows, Mask))
    ]
    # Once experts are in it, an expression is needed and not only what stands at unchosen entries.
    if any(isinstance(operand, Rows) and operand.is_dispatched for operand, _ in led):
        return None
    if not any(
        isinstance(operand, Mask) or operand.fill_value is not None or operand.expr is None or operand.labels.is_dense
        for operand, _ in led
    ):
        return None
    labels, iteration = DimLabels(*[""] * call.ndim), ALL
    for value, tensor in led:
        own = value.labels.groups + ("",) * (tensor.ndim - value.labels.num_dims)
        joint = merged(iteration, value.iteration)
        joined = reader.joined(labels, DimLabels(*[""] * (call.ndim - len(own)), *own))
        if joint is None or joined is None:
            raise call.refused(Reason.ROWS_NOT_FOLLOWED, "weights of different experts or tokens meet")
        labels, iteration = joined, joint
    check_about(iteration, labels, call)
    # A dimension that no axis names is one of features, which weights of choices have not.
    has_features = any(
        not group and not same_size(size, 1) for group, size in zip(labels.groups, call.out.shape, strict=True)
    )
    return None if has_features else (labels, iteration)


def _outside(
    call: Call, about: tuple[DimLabels, LoopIteration], values: list[Any], spec: Any, tensors: list[Any]
) -> Rows:
    """Numbers about choices: what stands at unchosen entries."""
    # No expression is written: it stays a node of the graph, and becomes an input of the region if rows meet it.
    fill_values: list[Any] = list(values)
    dtypes: dict[int, torch.dtype] = {}
    for place, value in enumerate(values):
        if isinstance(value, Mask):
            fill_values[place] = Rows(value.labels, None, fill_value=float(value.is_negated))
        if isinstance(value, (Rows, Mask, Leaf, Partial)):
            dtypes[place] = tensors[place].dtype
    labels, iteration = about
    return Rows(labels, None, True, _fill_value(call.target, fill_values, spec, dtypes), iteration)


def expression_of(rows: Rows, call: Call) -> fx.Node:
    if rows.expr is None:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, "weights that mix a token's choices meet rows in the middle of an operation"
        )
    return rows.expr


def align(reader: Reader, operands: Sequence[Operand], out_dims: int, call: Call) -> tuple[DimLabels, list[fx.Node]]:
    """Broadcast: the joint labels, and each operand's expression with equally many inner dimensions.

    Raises:
        CannotChunk: rows of different tokens, choices or experts would meet.
    """
    # Broadcasting lines dimensions up from the right: what has fewer of them has its labels further inside.
    routed = [source for source in operands if source.rows.labels is not DimLabels.NONE]
    num_labels = max((out_dims - source.tensor.ndim + _num_led(reader, source) for source in routed), default=0)
    operands = [_shortened(reader, source, num_labels - (out_dims - source.tensor.ndim), call) for source in operands]
    labels = DimLabels(*[""] * num_labels)
    expressions = []
    for operand in operands:
        if operand.rows.labels is DimLabels.NONE:
            expressions.append(_inner_part(reader, operand, out_dims - num_labels if routed else out_dims, call))
            continue
        own, expression = _with_labelled_dims(reader, operand, num_labels, out_dims, call)
        joint = reader.joined(labels, own)
        if joint is None:
            raise call.refused(
                Reason.ROWS_NOT_FOLLOWED, f"rows in different orders meet: {labels.in_words} and {own.in_words}"
            )
        labels = joint
        expressions.append(expression)
    return labels, expressions


def _num_led(reader: Reader, operand: Operand) -> int:
    """Dimensions of labels, less those of size one at its end, which may as well stand inside a row."""
    groups = operand.rows.labels.groups
    ones = ("", "k") if reader.frame.top_k == 1 else ("",)  # one choice a token: [T,1] weights are also [N,1]
    num_dims = len(groups)
    while num_dims and groups[num_dims - 1] in ones and same_size(operand.tensor.shape[num_dims - 1], 1):
        num_dims -= 1
    return num_dims


def _shortened(reader: Reader, operand: Operand, num_labels: int, call: Call) -> Operand:
    """The same with dimensions of size one at the end of the labels inside the row."""
    rows = operand.rows
    if rows.labels is DimLabels.NONE or rows.labels.num_dims <= num_labels:
        return operand
    expr = expression_of(rows, call)
    for _ in range(rows.labels.num_dims - num_labels):
        expr = reader.emit(aten.unsqueeze.default, expr, 1)
    return Operand(replace(rows, labels=DimLabels(*rows.labels.groups[:num_labels]), expr=expr), operand.tensor)


def _with_labelled_dims(
    reader: Reader, operand: Operand, num_labels: int, out_dims: int, call: Call
) -> tuple[DimLabels, fx.Node]:
    """Make dimensions of size one, in front of the labels and after them, part of them."""
    own, shape, expression = operand.rows.labels, operand.tensor.shape, expression_of(operand.rows, call)
    groups = [""] * (out_dims - len(shape)) + list(own.groups)
    for size in shape[own.num_dims : own.num_dims + num_labels - len(groups)]:
        if not same_size(size, 1):
            raise call.refused(
                Reason.TOKENS_INTERACT,
                f"broadcasting {own.in_words} rows of shape {tuple(shape)} into {out_dims}-D mixes rows",
            )
        expression = reader.emit(aten.select.int, expression, 1, 0)
    return DimLabels(*groups, *[""] * (num_labels - len(groups))), expression


def _inner_part(reader: Reader, operand: Operand, num_inner: int, call: Call) -> fx.Node:
    """A tensor that is not routed must broadcast inside a row; leading dimensions of one are dropped."""
    expression = expression_of(operand.rows, call)
    for size in operand.tensor.shape[: max(0, operand.tensor.ndim - num_inner)]:
        if not same_size(size, 1):
            raise call.refused(
                Reason.TOKENS_INTERACT,
                f"a tensor that is not routed varies along the routed dimension ({operand.tensor.ndim}-D)",
            )
        expression = reader.emit(aten.select.int, expression, 0, 0)
    return expression


def _fill_value(target: Any, values: Sequence[Any], spec: Any, dtypes: dict[int, torch.dtype]) -> float | None:
    """Return what entries that no choice names become, or None where that is not one known number."""
    known: list[Any] = []
    for place, value in enumerate(values):
        if place in dtypes:
            known.append(value.fill_value if isinstance(value, Rows) else None)
        else:
            known.append(value.value if isinstance(value, Fill) else value)
    # The constant is computed by the operation itself, in its own dtype, so that roundings are its own.
    fill_values = [known[place] for place in dtypes]
    if (target is aten.mul.Tensor and 0.0 in known) or (target is aten.div.Tensor and known == [0.0, None]):
        return 0.0  # zero by anything: where that is not finite, the original is not a number either
    if (
        not fill_values
        or any(value is None for value in fill_values)
        or any(isinstance(value, torch.SymInt) for value in known)
    ):
        return None

    def constant() -> float:
        tensors = [
            torch.tensor(value, dtype=dtypes[place]) if place in dtypes else value for place, value in enumerate(known)
        ]
        new_args, new_kwargs = tree_unflatten(tensors, spec)
        return float(target(*new_args, **new_kwargs))

    return run_without_modes(constant)


def along_routed(dim: int, call: Call) -> CannotChunk:
    details = f"works along the routed dimension {dim}, so rows are not independent"
    return call.refused(Reason.TOKENS_INTERACT, details)


def inner_dim(rows: Rows, dim: int, num_dims: int, call: Call) -> int:
    """Position in the expression of dimension `dim` of the tensor; the routed ones are off limits."""
    dim = dim + num_dims if dim < 0 else dim
    if rows.labels is DimLabels.NONE:
        return dim
    if dim < rows.labels.num_dims:
        raise along_routed(dim, call)
    return dim - rows.labels.num_dims + 1


def along_dim(position: int, name: str = "dim", default: int | tuple[int, ...] = -1) -> Rule:
    """Rule for an operation along one dimension, given as argument number `position`."""

    def rule(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
        rows = reader.as_rows(args[0], call)
        num_dims = call.args[0].ndim
        dim = args[position] if len(args) > position else kwargs.get(name, default)
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        # No dimension means all of them.
        if not dims or None in dims:
            raise call.refused(Reason.TOKENS_INTERACT, "a reduction over all dimensions mixes rows")
        inner = [inner_dim(rows, axis, num_dims, call) for axis in dims]
        new_args = list(args)
        new_args[0] = expression_of(rows, call)
        new_kwargs = dict(kwargs)
        mapped = inner if isinstance(dim, (list, tuple)) else inner[0]
        if len(new_args) > position:
            new_args[position] = mapped
        elif name in new_kwargs or mapped != default:
            new_kwargs[name] = mapped
        expr = reader.emit(call.target, *new_args, **new_kwargs)
        keeps_zero = rows.fill_value == 0 and call.target in _ZERO_ALONG_DIM
        return replace(rows, expr=expr, fill_value=0.0 if keeps_zero else None)

    return rule


_ZERO_ALONG_DIM = frozenset(
    {
        aten.sum.dim_IntList, aten.mean.dim, aten.cumsum.default, aten.amax.default, aten.amin.default,
        aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
        aten.glu.default,
    }
)  # fmt: skip


def cast(reader: Reader, expr: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    return expr if dtype is None else reader.emit(aten._to_copy.default, expr, dtype=dtype)


def _to_copy(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    dtype, value = kwargs.get("dtype"), args[0]
    if isinstance(value, (Ids, Counts)):
        is_exact = dtype in (None, torch.float32, torch.float64, torch.int32, torch.int64)
        if not is_exact:
            raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"indices cast to {dtype} may not survive")
        return value
    if isinstance(value, (Mask, Fill)):
        return value
    rows = reader.as_rows(value, call)
    return rows if rows.expr is None else replace(rows, expr=cast(reader, rows.expr, dtype))


def same(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    return args[0]


def _check_fills(values: Sequence[Any], tensors: Sequence[Any], call: Call) -> None:
    """Constant tensors become numbers: refuse those that make rows wider, or of another dtype, than numbers would."""
    pairs = [(value, tensor) for value, tensor in zip(values, tensors, strict=True) if isinstance(tensor, torch.Tensor)]
    rows = [tensor for value, tensor in pairs if not isinstance(value, Fill)]
    if not rows or len(rows) == len(pairs):
        return
    dtypes = {tensor.dtype for _, tensor in pairs if tensor.ndim} | {tensor.dtype for tensor in rows}
    is_as_wide = all(
        any(same_size(size, tensor.shape[dim]) for tensor in rows if -dim <= tensor.ndim)
        for dim, size in ((dim, call.out.shape[dim]) for dim in range(-call.ndim, 0))
    )
    if not is_as_wide or _promoted(dtypes) is not _promoted({tensor.dtype for tensor in rows}):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "a constant tensor makes rows wider, or of another dtype")


def _promoted(dtypes: set[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def _number_of(reader: Reader, value: Any, call: Call) -> Any:
    """An argument that is no row data, as it goes into the expert function."""
    if isinstance(value, torch.SymInt):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"a symbolic number {value} enters row data")
    if isinstance(value, Taken):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "what the output holds enters row data")
    if not isinstance(value, Fill):
        return value
    if value.value is None:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "an uninitialised tensor used as row data")
    if call.target is aten.where.self:  # it takes no number in the place of a tensor
        return reader.emit(aten.scalar_tensor.default, value.value, dtype=call.out.dtype, device=call.out.device)
    return value.value


RULES: dict[Any, Rule] = {
    aten._to_copy.default: _to_copy,
    aten.alias.default: same,
    aten.clone.default: same,
    aten.detach.default: same,  # what stops gradients is read in Dynamo's graph
    aten.amin.default: along_dim(1, default=()),
    aten.glu.default: along_dim(1),
    aten.linalg_vector_norm.default: along_dim(2, default=()),
}
