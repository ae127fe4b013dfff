"""Find which sizes and tensors of a graph are zero where a condition skips a loop's body.

The condition is a measure compared with a number (`marker`). If it says that the measure is zero, that is followed
backwards to what the measure was made of, and forwards to what else is made of that:

    places.numel() == 0   ->  the size is zero, and the mask of these places holds nowhere
    mask.any()            ->  the mask holds nowhere, and its places are none
    counts[e] == 0        ->  no id is e, and `ids == e` holds nowhere
    hits[e]               ->  entry e of the mask that hits were summed of holds nowhere

Nothing is concluded of tensors that anything in the graph writes into, and of a sum only where its terms are not
negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from memfine_fx.compat.tensors import storage_id, tree_leaves
from memfine_fx.memory.sizes import size_expr
from memfine_fx.passes.dataflow import Dataflow, is_float_tensor, node_value
from memfine_fx.passes.ops import CASTS, COMPARISONS, LAYOUTS, PLACES, base_name_of, name_of
from memfine_fx.passes.read.marker import COUNT_ROWS

__all__ = ["GraphIndex", "NoRows", "is_mask", "is_pure", "scales_second"]


_MEANS_ZERO: dict[tuple[str, int, bool], bool] = {
    ("==", 0, True): False, ("!=", 0, False): False,
    ("<=", 0, True): True, (">", 0, False): True, ("<", 1, True): True, (">=", 1, False): True,
}  # fmt: skip
"""Of a condition (operator, number, whether it skips where it holds) that means that its measure is zero: whether only
if the measure cannot be negative."""
_NOT_NEGATIVE = COMPARISONS | {
    "logical_not", "bitwise_not", "isnan", "one_hot", "bincount", "count_nonzero", "count_rows", "abs",
}  # fmt: skip
_KEEPS_SIGN = LAYOUTS | CASTS | {"mul", "add", "sum", "cumsum", "getitem", "amax", "max", "index_select"}
_PURE = LAYOUTS | CASTS | PLACES | {
    "eq", "ne", "gt", "getitem", "any", "sum", "one_hot", "select", "argmax", "topk", "softmax", "add", "sub",
}  # fmt: skip
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class _Key:
    """Stands for a node in the key of what reads it; no argument of a call has this type."""

    number: int


class GraphIndex:
    """Facts about one graph that every body in it needs: who makes a storage or a size, and which calls are equal.

    Args:
        graph: with the fake values of its capture; not changed.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.flow = Dataflow(graph)
        self.nodes = list(graph.nodes)
        self.makers: dict[Any, fx.Node] = {}
        """The node whose result brings a size into the graph, by the size's symbol."""
        self._first: dict[int, fx.Node] = {}
        self._keys: dict[fx.Node, _Key] = {}
        self._key_of: dict[object, _Key] = {}
        for node in self.nodes:
            for symbol in _symbols_of(node):
                self.makers.setdefault(symbol, node)
            self.add(node)

    def add(self, node: fx.Node) -> None:
        """Note a node that holds a tensor, or that was inserted to hold one."""
        for leaf in tree_leaves(node_value(node)):
            storage = storage_id(leaf)
            if storage is not None:
                self._first.setdefault(storage, node)

    def made_by(self, node: fx.Node) -> fx.Node | None:
        """Return the first node that holds the storage of a node's tensor."""
        storage = storage_id(node_value(node))
        return None if storage is None else self._first.get(storage)

    def key(self, node: fx.Node) -> Any:
        """Return a key that is equal for nodes which surely compute the same: nothing writes what they read."""
        if not self._keys:
            for earlier in self.nodes:  # in graph order: a chain over many experts is deeper than Python's stack
                self._keys[earlier] = self._new_key(earlier)
        if node not in self._keys:
            self._keys[node] = self._new_key(node)
        return self._keys[node]

    def _new_key(self, node: fx.Node) -> _Key:
        computes_same = is_pure(node) and not any(map(self.flow.is_written, (node, *node.all_input_nodes)))
        # Keys of operands are numbers: texts that hold the texts of their operands double with each operation.
        operands = repr(fx.map_arg((node.args, node.kwargs), self.key)) if computes_same else ""
        call = (name_of(node), operands) if computes_same else node  # a method or a function: names are one for both
        return self._key_of.setdefault(call, _Key(len(self._key_of)))


class NoRows:
    """The sizes and tensors that are zero under the assumption that a condition skips its body.

    Args:
        index: of the graph.
        nodes: of which is asked whether they are zero, in graph order.
        enter: the mark of the condition.
    """

    def __init__(self, index: GraphIndex, nodes: Sequence[fx.Node], enter: fx.Node) -> None:
        self.zeros: set[fx.Node] = set()
        """Numbers that are zero, and tensors that are zero everywhere."""
        self._sizes: set[Any] = set()
        self._absent_ids: list[tuple[fx.Node, int]] = []
        self._absent_entries: list[tuple[fx.Node, int, int]] = []
        """A tensor, a dimension and a place in it where the tensor holds zeros only."""
        self._index, self._nodes = index, nodes
        measure, name, number, skips_if, _ = enter.args
        needs_sign = _MEANS_ZERO.get((name, number, skips_if))  # type: ignore[arg-type]  # of a mark
        if (
            needs_sign is not None
            and isinstance(measure, fx.Node)
            and not (needs_sign and self.may_be_negative(measure))
        ):
            self._assume_zero(measure)
            self._spread()

    @property
    def is_nothing(self) -> bool:
        """Whether nothing follows from the condition."""
        return not self._sizes and not self.zeros

    # Of one node.

    def is_empty(self, node: object) -> bool:
        """Return whether a tensor has no elements."""
        value = node_value(node) if isinstance(node, fx.Node) else None
        return isinstance(value, torch.Tensor) and any(map(self.is_zero_size, value.shape))

    def is_zero(self, value: object) -> bool:
        """Return whether a number is zero, or a tensor in every element."""
        if not isinstance(value, fx.Node):
            return type(value) in (int, float) and value == 0
        number = node_value(value)
        return self.is_zero_size(number) if isinstance(number, (torch.SymInt, torch.SymFloat)) else value in self.zeros

    def is_zero_size(self, size: Any) -> bool:
        """Return whether a size, or a number made of sizes, is zero."""
        return (
            bool(self.assumed(size_expr(size)) == 0)
            if not isinstance(size, torch.SymFloat)
            else bool(self.assumed(size.node.expr) == 0)
        )

    def assumed(self, expr: Any) -> Any:
        """Return an expression of sizes with those at zero that are zero."""
        return sympy.sympify(expr).subs(dict.fromkeys(self._sizes, 0))

    # From the condition backwards.

    def _assume_zero(self, node: fx.Node) -> None:
        value = node_value(node)
        if node in self.zeros or (isinstance(value, torch.Tensor) and self._index.flow.is_written(node)):
            return
        self.zeros.add(node)
        name, source = name_of(node), node.args[0] if node.args else None
        if isinstance(value, torch.SymInt):
            self._assume_zero_size(value.node.expr)
        elif isinstance(source, fx.Node):
            if (
                (
                    name in LAYOUTS
                    or (name in CASTS and _is_faithful(node, source))
                    or name in ("item", "any", "count_nonzero")
                )
                or (name in ("sum", "amax") and not node.kwargs.get("dtype") and not self.may_be_negative(source))
                or (
                    name in ("gt", "ne")
                    and node.args[1:] == (0,)
                    and not (_is_above(name) and self.may_be_negative(source))
                )
            ):
                self._assume_zero(source)
            elif name == "getitem" and type(node.args[1]) is int and isinstance(node_value(source), torch.Tensor):
                self._assume_zero_entry(source, node.args[1])

    def _assume_zero_size(self, expr: Any) -> None:
        """A positive multiple of one size that only the data knows is zero, and so is that size."""
        symbols = list(expr.free_symbols)
        factor = sympy.simplify(expr / symbols[0]) if len(symbols) == 1 else None
        if factor is None or not factor.is_number or factor <= 0 or symbols[0] in self._sizes:
            return
        self._sizes.add(symbols[0])
        maker = self._index.makers.get(symbols[0])
        source = maker.args[0] if maker is not None and maker.args else None
        if maker is None or not isinstance(source, fx.Node):
            return
        if (name_of(maker) in PLACES and len(maker.args) == 1) or name_of(maker) == "item":
            self._assume_zero(source)
        elif name_of(maker) == "getitem" and is_mask(maker.args[1]):
            self._assume_zero(maker.args[1])  # type: ignore[arg-type]  # a node

    def _assume_zero_entry(self, source: fx.Node, entry: int, dim: int = 0) -> None:
        """Assume that counts, or truths about them, are zero at one place of a dimension."""
        name, inner = name_of(source), source.args[0] if source.args else None
        if not isinstance(inner, fx.Node) or self._index.flow.is_written(source) or self._index.flow.is_written(inner):
            return
        is_count = source.target is COUNT_ROWS or (name == "bincount" and _has_no_weights(source))
        if is_count or (name == "one_hot" and dim == _num_dims(source) - 1):
            ids = self._ids_behind(inner)
            if ids is not None:
                self._absent_ids.append((ids, entry))
        elif name in ("gt", "ne") and source.args[1:] == (0,):
            if not (_is_above(name) and self.may_be_negative(inner)):
                self._assume_zero_entry(inner, entry, dim)
        elif name in CASTS and _is_faithful(source, inner):
            self._assume_zero_entry(inner, entry, dim)
        elif name == "permute":
            self._assume_zero_entry(inner, entry, _permuted(source)[dim])
        elif name in ("any", "count_nonzero") or (name in ("sum", "amax") and not self.may_be_negative(inner)):
            inner_dim = _dim_before(source, inner, dim)
            if inner_dim is not None and not source.kwargs.get("dtype"):
                self._absent_entries.append((inner, entry, inner_dim))
                self._assume_zero_entry(inner, entry, inner_dim)

    def _ids_behind(self, node: fx.Node) -> fx.Node | None:
        """The ids that are only laid out otherwise, or wider; None where something writes into them."""
        while not self._index.flow.is_written(node):
            source = node.args[0] if node.args else None
            value = node_value(source) if isinstance(source, fx.Node) else None
            is_same = isinstance(value, torch.Tensor) and value.dtype in _INTEGERS
            result = node_value(node)
            is_layout = name_of(node) in LAYOUTS | CASTS and isinstance(result, torch.Tensor)
            if not is_layout or not is_same or result.dtype not in _INTEGERS:  # type: ignore[attr-defined]  # a tensor
                return node
            assert isinstance(source, fx.Node)
            node = source
        return None

    # Forwards, to what else is zero then.

    def _spread(self) -> None:
        before = (-1, -1)
        while before != (len(self._sizes), len(self.zeros)):
            before = (len(self._sizes), len(self.zeros))
            keys = {self._index.key(node) for node in self.zeros}
            for node in self._nodes:
                if node in self.zeros or node.op not in ("call_function", "call_method"):
                    continue
                if self._index.key(node) in keys or self._is_absent(node) or self._is_made_of_zeros(node):
                    self._assume_zero(node)
                self._spread_sizes(node)

    def _spread_sizes(self, node: fx.Node) -> None:
        """The sizes of what is taken where a mask holds nowhere."""
        name, source = name_of(node), node.args[0] if node.args else None
        takes_places = name in PLACES and len(node.args) == 1 and source in self.zeros
        picks = name in ("getitem", "masked_select") and len(node.args) > 1 and is_mask(node.args[1])
        if takes_places or (picks and node.args[1] in self.zeros):
            before = set().union(*map(_symbols_of, node.all_input_nodes))
            self._sizes |= set(_symbols_of(node)) - before

    def _is_absent(self, node: fx.Node) -> bool:
        """Whether a node asks where ids name an expert that they do not name, or takes its entry of a mask."""
        name, source, key = name_of(node), node.args[0] if node.args else None, self._index.key
        if not isinstance(source, fx.Node) or len(node.args) < 2:
            return False
        if name == "eq":
            ids = self._ids_behind(source)
            return ids is not None and any(
                node.args[1] == expert and key(ids) == key(known) for known, expert in self._absent_ids
            )
        return name == "getitem" and any(
            _takes(node.args[1], entry, dim, _num_dims(source)) and key(source) == key(mask)
            for mask, entry, dim in self._absent_entries
        )

    def _is_made_of_zeros(self, node: fx.Node) -> bool:
        """Whether a tensor or a number is zero because its operands are."""
        name, first = name_of(node), node.args[0] if node.args else None
        if not isinstance(node_value(node), (torch.Tensor, torch.SymInt)):
            return False
        if name in ("zeros", "zeros_like", "new_zeros"):
            return True
        if name in ("sum", "any", "count_nonzero"):
            return first in self.zeros or self.is_empty(first)
        if name in LAYOUTS | CASTS | {"neg", "abs", "select", "item", "amax", "amin"}:
            return first in self.zeros
        if name == "getitem":
            return first in self.zeros and isinstance(node_value(first), torch.Tensor)  # type: ignore[arg-type]  # a node
        operands = [
            operand for operand in node.all_input_nodes if isinstance(node_value(operand), (torch.Tensor, torch.SymInt))
        ]
        are_zero = [operand in self.zeros for operand in operands]
        if name in ("mul", "bitwise_and", "logical_and"):  # zero times a float may be no number
            return all(are_zero) or (any(are_zero) and not any(map(is_float_tensor, operands)))
        return name in ("add", "sub") and bool(operands) and all(are_zero) and len(operands) == len(node.args)

    # Signs.

    def may_be_negative(self, node: object) -> bool:
        """Return whether a number or an entry of a tensor may be negative."""
        if not isinstance(node, fx.Node):
            return not (isinstance(node, (int, float)) and node >= 0)
        value, name = node_value(node), name_of(node)
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8):
            return False
        if isinstance(value, torch.SymInt) and name != "item":
            return self._may_be_negative_size(value.node.expr)
        if name in _NOT_NEGATIVE:
            return False
        if scales_second(node):
            return True
        if name == "item" or name in _KEEPS_SIGN:
            operands: list[Any] = node.all_input_nodes[:1] if name == "getitem" else list(node.all_input_nodes)
            numbers = [arg for arg in node.args if isinstance(arg, (int, float)) and name in ("mul", "add")]
            return not operands or any(map(self.may_be_negative, [*operands, *numbers]))
        return True

    def _may_be_negative_size(self, expr: Any) -> bool:
        """Whether a product of sizes and numbers may be negative: a count that is read from a tensor is no size."""
        if expr.is_Symbol:
            maker = self._index.makers.get(expr)
            return maker is None or (name_of(maker) == "item" and self.may_be_negative(maker))
        return any(map(self._may_be_negative_size, expr.args)) if expr.is_Mul else not expr.is_nonnegative


def is_mask(node: object) -> bool:
    """Return whether something is a node that holds truths."""
    value = node_value(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def is_pure(node: fx.Node) -> bool:
    """Return whether a node is a call that computes the same of the same operands, and nothing else."""
    return node.op in ("call_function", "call_method") and name_of(node) in _PURE and "out" not in node.kwargs


def scales_second(node: fx.Node) -> bool:
    """Return whether a sum or a difference takes a multiple of its second operand: `torch.add(a, b, alpha=-1)`."""
    return "alpha" in node.kwargs or (base_name_of(node) in ("add", "sub") and len(node.args) > 2)


def _is_above(name: str) -> bool:
    return name != "ne"


def _is_faithful(cast: fx.Node, source: fx.Node) -> bool:
    """Whether a cast gives zero for zeros only."""
    result, value = node_value(cast), node_value(source)
    if not isinstance(result, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if result.dtype is torch.bool or value.dtype is torch.bool:
        return True
    is_wider = result.dtype.itemsize >= value.dtype.itemsize
    return (is_wider or result.dtype in _INTEGERS) and result.dtype.is_floating_point >= value.dtype.is_floating_point


def _has_no_weights(bincount: fx.Node) -> bool:
    is_method = bincount.op == "call_method"
    return bincount.kwargs.get("weights") is None and (
        len(bincount.args) == 1 or (is_method and len(bincount.args) == 1)
    )


def _symbols_of(node: fx.Node) -> list[Any]:
    """The symbols of a node's sizes, or of its number."""
    values = tree_leaves(node_value(node))
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]
    return [symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols]


def _num_dims(node: fx.Node) -> int:
    value = node_value(node)
    return value.ndim if isinstance(value, torch.Tensor) else 0


def _permuted(node: fx.Node) -> list[int]:
    """Return the dimension of the operand that each dimension of a permutation's result is."""
    first = node.args[1] if len(node.args) > 1 else node.kwargs["dims"]
    dims: Any = first if isinstance(first, (tuple, list)) else node.args[1:]
    return [dim % len(dims) for dim in dims]


def _dim_before(reduction: fx.Node, source: fx.Node, dim: int) -> int | None:
    """Return which dimension of the operand a dimension of a reduction's result is; None where it is reduced."""
    num_dims, arguments = _num_dims(source), (*reduction.args[1:], None, None)
    wanted = reduction.kwargs.get("dim", arguments[0])
    reduced = wanted if isinstance(wanted, (tuple, list)) else (wanted,)
    if not num_dims or not all(isinstance(part, int) for part in reduced):
        return None
    rest = [part for part in range(num_dims) if part not in {other % num_dims for other in reduced}]
    if reduction.kwargs.get("keepdim", arguments[1]):
        return dim if dim in rest else None
    return rest[dim] if dim < len(rest) else None


def _takes(index: Any, entry: int, dim: int, num_dims: int) -> bool:
    """Whether an index takes no other entries than those at one place of a dimension."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None or isinstance(part, bool) or (isinstance(part, fx.Node) and is_mask(part)) for part in parts):
        return False  # they add a dimension, or stand for several
    if Ellipsis in [part for part in parts if not isinstance(part, fx.Node)]:
        place = next(place for place, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (num_dims - len(parts) + 1)
    part = parts[dim] if dim < len(parts) else None
    return (type(part) is int and part == entry) or part == slice(entry, entry + 1, None)
