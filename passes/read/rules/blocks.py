"""Packed tables: experts stand one behind the other along a tensor's first dimension, with equally many entries each.

    blocks [E,F,G,16] -> reshape [E*F*G,16] -> nibbles -> codebook[nibbles] -> times 2**scales -> reshape [E,F,H]

What makes weights of packed numbers goes through integers and through shapes in which experts and rows are one
dimension, so labels say nothing about it. Positions do: where entries [e*m, (e+1)*m) of a result depend on the same
entries of its operands, and on operands that are read whole, expert e's part needs expert e's parts alone. Each rule
writes the same operation on one expert's part, [m,...]; what would let experts meet is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.tensors import tree_flatten, tree_unflatten
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import static_size
from memfine_fx.passes.read.dim_labels import DimLabels
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.rules.indices import RULES as INDEX_RULES
from memfine_fx.passes.read.rules.pointwise import pointwise_rule
from memfine_fx.passes.read.values import Fill, Leaf, Part, Rows

__all__ = ["BLOCK_RULES", "block_rule"]

aten = torch.ops.aten


def block_rule(target: Any) -> Rule | None:
    """The rule of an overload among packed numbers, or None."""
    is_pointwise = target in _POINTWISE or pointwise_rule(target) is not None
    factory = INDEX_RULES.get(target) if target in _FACTORIES else None
    return BLOCK_RULES.get(target) or factory or (_pointwise if is_pointwise else None)


def _mixes(call: Call) -> CannotChunk:
    name = str(call.target).removeprefix("aten.")
    return call.refused(Reason.ROWS_NOT_FOLLOWED, f"packed numbers of several experts meet in {name}")


def _has_parts(reader: Reader, tensor: torch.Tensor) -> bool:
    size = static_size(tensor.shape[0]) if tensor.ndim else None
    return size is not None and reader.num_experts is not None and size % reader.num_experts == 0


def _part_shape(reader: Reader, tensor: torch.Tensor) -> list[int]:
    assert reader.num_experts is not None
    return [int(tensor.shape[0]) // reader.num_experts, *map(int, tensor.shape[1:])]


def _part(reader: Reader, value: Any, tensor: torch.Tensor, call: Call) -> fx.Node:
    """One expert's part of an operand, [m,...]."""
    if isinstance(value, Part) or (isinstance(value, Rows) and value.labels is DimLabels.EXPERT and not value.per_row):
        return value.expr  # type: ignore[return-value]  # a table's
    if not _has_parts(reader, tensor):
        raise _mixes(call)
    if isinstance(value, Leaf):
        assert reader.num_experts is not None
        flat = reader.part_of_table(value, reader.num_experts, call)
        return reader.emit(aten.reshape.default, flat, _part_shape(reader, tensor))
    if isinstance(value, Fill):
        shape, options = _part_shape(reader, tensor), {"dtype": tensor.dtype, "device": tensor.device}
        return reader.emit(aten.full.default, shape, 0 if value.value is None else value.value, **options)
    raise _mixes(call)


def _whole(reader: Reader, value: Any, tensor: torch.Tensor, call: Call) -> Any:
    """An operand that is the same for all experts."""
    if isinstance(value, Leaf):
        return reader.whole_of(value)
    if isinstance(value, Fill) and value.value is not None:
        options = {"dtype": tensor.dtype, "device": tensor.device}
        return reader.emit(aten.full.default, list(map(int, tensor.shape)), value.value, **options)
    raise _mixes(call)


def _pointwise(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    """Operands that reach the first dimension of the result bring their parts, others are broadcast to all parts."""
    values, spec = tree_flatten((args, kwargs))
    tensors = tree_flatten((call.args, call.kwargs))[0]
    leaves = []
    for value, tensor in zip(values, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            leaves.append(value)
        # Broadcasting lines up from the right: fewer dimensions do not reach the first one.
        elif tensor.ndim == call.ndim and tensor.shape[0] == call.out.shape[0]:
            leaves.append(_part(reader, value, tensor, call))
        else:
            leaves.append(_whole(reader, value, tensor, call))
    new_args, new_kwargs = tree_unflatten(leaves, spec)
    if not _has_parts(reader, call.out):
        raise _mixes(call)
    return Part(reader.emit(call.target, *new_args, **new_kwargs))


def _same(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    """Casts and copies."""
    return Part(reader.emit(call.target, _part(reader, args[0], call.args[0], call), *args[1:], **kwargs))


def _copy(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    target, source = call.args[:2]
    if source.shape != target.shape:
        raise _mixes(call)
    return Part(reader.emit(aten._to_copy.default, _part(reader, args[1], source, call), dtype=target.dtype))


def _reshape(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    """An expert's numbers stay together, in their order, whatever dimensions they are given."""
    if not _has_parts(reader, call.out):
        raise _mixes(call)
    part = _part(reader, args[0], call.args[0], call)
    return Part(reader.emit(aten.reshape.default, part, _part_shape(reader, call.out)))


def _expand(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    source = call.args[0]
    if source.ndim != call.ndim or source.shape[0] != call.out.shape[0]:
        raise _mixes(call)
    part = _part(reader, args[0], source, call)
    return Part(reader.emit(aten.expand.default, part, _part_shape(reader, call.out)))


def _repeat(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    if len(args[1]) != call.args[0].ndim or args[1][0] != 1:
        raise _mixes(call)
    return Part(reader.emit(call.target, _part(reader, args[0], call.args[0], call), list(args[1])))


def _permute(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    # With another dimension in front, an expert's numbers no longer stand one behind the other.
    if args[1][0] % call.ndim != 0:
        raise _mixes(call)
    return Part(reader.emit(call.target, _part(reader, args[0], call.args[0], call), list(args[1])))


def _inside(*positions: int, num_parts: int = 1, more_dims: int = 0) -> Rule:
    """Rule for an operation along dimensions behind the first, which stand at these places of its arguments.

    Args:
        positions: of dimensions among the arguments.
        num_parts: how many of the first arguments are tensors.
        more_dims: dimensions are counted with so many more than the first tensor has.
    """

    def rule(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
        num_dims = call.args[0].ndim + more_dims
        for position in positions:
            dims = args[position] if len(args) > position else kwargs.get("dim", 0)
            dims = dims if isinstance(dims, (list, tuple)) else [dims]
            if dims in ([], [None]) or any(dim % num_dims == 0 for dim in dims):  # none given are all
                raise _mixes(call)
        parts = [_part(reader, args[place], call.args[place], call) for place in range(num_parts)]
        return Part(reader.emit(call.target, *parts, *args[num_parts:], **kwargs))

    return rule


def _slice(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    return args[0] if call.out.shape == call.args[0].shape else _SLICE(reader, call, args, kwargs)


def _slice_scatter(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    return args[1] if call.args[1].shape == call.args[0].shape else _SCATTER(reader, call, args, kwargs)


_SLICE, _SCATTER = _inside(1), _inside(2, num_parts=2)


def _along_lists(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    """Return one expert's part of a `cat` or `stack` along a dimension behind the first."""
    if call.argument(1, "dim", 0) % call.ndim == 0:
        raise _mixes(call)
    parts = [_part(reader, value, tensor, call) for value, tensor in zip(args[0], call.args[0], strict=True)]
    return Part(reader.emit(call.target, parts, *args[1:], **kwargs))


def _lookup(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    """A codebook's entries by numbers: codebook[index]."""
    codebook, (index, *others) = call.args[0], call.args[1]
    # A mask picks as many entries as it has ones, which differ between experts.
    if others or index is None or index.dtype is torch.bool:
        raise _mixes(call)
    part = _part(reader, args[1][0], index, call)
    return Part(reader.emit(call.target, _whole(reader, args[0], codebook, call), [part]))


def _picked(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Part:
    if args[1] % call.args[0].ndim != 0:
        raise _mixes(call)
    index = _part(reader, args[2], call.args[2], call)
    return Part(reader.emit(call.target, _whole(reader, args[0], call.args[0], call), 0, index))


_POINTWISE: frozenset[Callable[..., Any]] = frozenset(
    {
        aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode, aten.remainder.Scalar,
        aten.__and__.Scalar, aten.__or__.Scalar, aten.__xor__.Scalar, aten.__lshift__.Scalar, aten.__rshift__.Scalar,
        aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor, aten.__lshift__.Tensor, aten.__rshift__.Tensor,
    }
)  # fmt: skip

_FACTORIES = frozenset({aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default})

BLOCK_RULES: dict[Any, Rule] = {
    aten._to_copy.default: _same,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.view.dtype: _same,
    aten.copy.default: _copy,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.repeat.default: _repeat,
    aten.transpose.int: _inside(1, 2),
    aten.unsqueeze.default: _inside(1, more_dims=1),
    aten.squeeze.dim: _inside(1),
    aten.select.int: _inside(1),
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _inside(2, num_parts=2),
    aten.amax.default: _inside(1),
    aten.sum.dim_IntList: _inside(1),
    aten.mean.dim: _inside(1),
    aten.cat.default: _along_lists,
    aten.stack.default: _along_lists,
    aten.index.Tensor: _lookup,
    aten.index_select.default: _picked,
}
