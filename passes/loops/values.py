"""What the nodes of an unrolled expert loop are: masks of one expert, places of its rows, its rows, sums so far.

A loop over experts asks where the index names expert e, takes those rows, computes, and writes or adds the
results back. `read_loop` walks a normalised region once and gives a value to every node that takes part; a
node without a value is ordinary (computed from tokens or parameters alone, or from one copy's rows, which
`owners` tells). Dimensions are letters: t tokens (b and s where they were never flattened), k choices, n routed
rows in token order, e experts, 1 one expert.

A copy of the loop's body is (expert, choice): the choice is a number where the loop also runs over a token's
choices (`index[:, k] == e`), else None.

Refuses: rows of two experts that meet; masks over tokens where a token may name an expert twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import node_value, same_size, static_size
from memfine_fx.passes.loops.marker import COUNT_ROWS, PUT_ROWS, ROWS_OF

__all__ = ["AllPlaces", "Copy", "Entry", "Loop", "Sum", "is_zeros", "read_loop"]

aten = torch.ops.aten
Dims = tuple[str, ...]
Copy = tuple[int, int | None]


@dataclass(frozen=True)
class Ids:
    """Expert ids, of one choice where `choice` is a number.

    `has_column` marks a trailing dimension of one, for comparison with a row of numbers.
    """

    dims: Dims
    has_column: bool = False
    choice: int | None = None


@dataclass(frozen=True)
class Numbers:
    """0, 1, ..., `count` - 1."""

    count: int


@dataclass(frozen=True)
class Mask:
    """Whether (or how often) the index names `expert`; with "e" among the dimensions, for every expert."""

    expert: int | None
    dims: Dims
    choice: int | None = None


@dataclass(frozen=True)
class MaskedWeight:
    """The routing weight where the index names `expert`, zero elsewhere; over tokens once summed over choices."""

    expert: int
    weight: fx.Node
    dims: Dims
    choice: int | None = None


@dataclass(frozen=True)
class Coordinates:
    """Where a mask holds, [R, number of its dimensions]."""

    expert: int
    dims: Dims
    choice: int | None = None


@dataclass(frozen=True)
class Place:
    """One coordinate of each row of `expert`, [R] (or [R,...], repeated): its token, choice or flat assignment."""

    expert: int
    dim: str
    choice: int | None = None


@dataclass(frozen=True)
class Counts:
    """Rows of every expert, [E]."""


@dataclass(frozen=True)
class Count:
    """Rows of one expert, as a tensor of one element."""

    expert: int


@dataclass(frozen=True)
class SortedOrder:
    """Assignments in expert order, [N]; their tokens where `dim` is "t"."""

    dim: str = "n"


@dataclass(frozen=True)
class AllPlaces:
    """The places of the experts 0 .. `count` - 1, one behind the other: assignments (or tokens) in expert order."""

    dim: str
    count: int


@dataclass(frozen=True)
class Entry:
    """Rows of a copy taken out of `source`.

    Args:
        expert: of the copy.
        by: dimensions that were indexed ("t", "tk", "bs", ...); "sorted" where the source stands in expert order;
            "gate" where it is a [...,E] tensor of which the expert's own column was indexed by token.
        source: node of the tensor.
        choice: of the copy.
        has_column: whether a dimension of one is left behind the rows.
    """

    expert: int
    by: str
    source: fx.Node
    choice: int | None = None
    has_column: bool = False

    @property
    def copy(self) -> Copy:
        return self.expert, self.choice


@dataclass(frozen=True)
class LiftedEntry:
    """An entry with a leading dimension of one, [1, R, ...]: what `x[None, places]` gives."""

    entry: Entry


@dataclass(frozen=True)
class Split:
    """A tensor in expert order, split into its experts' rows."""

    source: fx.Node


@dataclass(frozen=True)
class Sum:
    """Results of some experts, written back so far.

    Args:
        base: node of the tensor that the first was written into; None where results are concatenated.
        by: "t" or "bs" where rows are added to tokens, "n" where each routed row is put in its place, "sorted"
            where they stand in expert order.
        parts: (copy, node of its results).
    """

    base: fx.Node | None
    by: str
    parts: tuple[tuple[Copy, fx.Node], ...]


@dataclass(frozen=True)
class Taken:
    """What a sum held at the rows of a copy, and what was added since."""

    sum: Sum
    copy: Copy
    added: fx.Node | None = None


@dataclass(frozen=True)
class Checked:
    """A test of the index's range, made only to be asserted."""


@dataclass
class Loop:
    """A region read as a loop: values and owners by node."""

    index: fx.Node
    top_k: int
    is_distinct: bool
    values: dict[fx.Node, Any] = field(default_factory=dict)
    owners: dict[fx.Node, Copy] = field(default_factory=dict)
    counts: dict[object, int] = field(default_factory=dict)
    num_classes: int | None = None

    @property
    def has_choices(self) -> bool:
        """Whether the index has a dimension for a token's choices."""
        return "k" in self.values[self.index].dims

    @property
    def experts(self) -> set[int]:
        return {value.expert for value in self.values.values() if isinstance(value, Entry)}

    def value(self, argument: Any) -> Any:
        return self.values.get(argument) if isinstance(argument, fx.Node) else None


def read_loop(graph: fx.Graph, index: fx.Node, num_token_dims: int, top_k: int, *, is_distinct: bool) -> Loop:
    """Give a value to each node that takes part in the loop.

    Args:
        graph: functional ATen.
        index: its placeholder with the expert ids, tokens by choices; choices may be missing where K is 1.
        num_token_dims: 1 for [T], 2 for [B,S].
        top_k: K.
        is_distinct: whether a token never names an expert twice.

    Raises:
        CannotChunk: see the module docstring.
    """
    shape = _shape(index)
    loop = Loop(index, top_k, is_distinct)
    has_choices = len(shape) > num_token_dims
    tokens = ("t",) if num_token_dims == 1 else ("b", "s")
    loop.values[index] = Ids((*tokens, "k") if has_choices else tokens if num_token_dims == 2 else ("n",))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        rule = _RULES.get(node.target)
        value = None if rule is None else rule(loop, node)
        if value is not None:
            loop.values[node] = value
        _own(loop, node)
    return loop


def _own(loop: Loop, node: fx.Node) -> None:
    value = loop.values.get(node)
    if isinstance(value, Entry):
        loop.owners[node] = value.copy
    elif value is None:
        copies = {loop.owners[source] for source in node.all_input_nodes if source in loop.owners}
        if len(copies) > 1:
            raise CannotChunk(f"rows of experts {sorted({e for e, _ in copies})} meet before they are combined", node)
        if copies:
            loop.owners[node] = copies.pop()


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node_value(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _kwargs(node: fx.Node) -> dict[str, Any]:
    return node.kwargs


def _dim(node: fx.Node, position: int, default: int | None = None) -> int | None:
    """A dimension argument, counted from the front of the first argument."""
    dim = _args(node)[position] if len(_args(node)) > position else node.kwargs.get("dim", default)
    if isinstance(dim, (list, tuple)):
        dim = dim[0] if len(dim) == 1 else None
    return dim % len(_shape(_args(node)[0])) if isinstance(dim, int) else None


def _same(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    if isinstance(value, (Ids, Mask, MaskedWeight, Place, Coordinates, Counts, Count, SortedOrder, Taken)):
        return value
    return None


def _view(loop: Loop, node: fx.Node) -> Any:
    """Reshapes of the index: [T,K] to [N]; reshapes of places change nothing."""
    value, source, target = loop.value(_args(node)[0]), _shape(_args(node)[0]), _shape(node)
    if value is None:
        return None
    if isinstance(value, LiftedEntry):
        is_undone = len(target) == len(source) - 1 and all(map(same_size, source[1:], target))
        return value.entry if is_undone else None
    if isinstance(value, Coordinates) and len(value.dims) == 1 and len(target) == 1:
        return Place(value.expert, value.dims[0], value.choice)
    if isinstance(value, (Place, Count)):
        return value
    if len(source) == len(target) and all(same_size(a, b) for a, b in zip(source, target, strict=True)):
        return _same(loop, node)
    if not isinstance(value, (Ids, Mask, MaskedWeight)) or (isinstance(value, Ids) and value.has_column):
        return None
    if isinstance(value, Ids) and value.dims == ("n",) and len(target) == 2 and same_size(target[1], loop.top_k):
        return Ids(("t", "k"))
    dims = _regrouped(value.dims, source, target)
    return None if dims is None else replace(value, dims=dims)


def _regrouped(dims: Dims, source: tuple[Any, ...], target: tuple[Any, ...]) -> Dims | None:
    """Dimensions after a reshape that merges neighbours."""
    if len(dims) != len(source):
        return None
    groups, place = [], 0
    for number, size in enumerate(target):
        group, product = "", 1
        while place < len(dims) and not (group and same_size(product, size)):
            group, product, place = group + dims[place], product * source[place], place + 1
        while place < len(dims) and len(dims) - place > len(target) - number - 1 and same_size(source[place], 1):
            group, place = group + dims[place], place + 1
        groups.append(_MERGED.get(group, group))
    return tuple(groups) if place == len(dims) and all(len(group) == 1 for group in groups) else None


_MERGED = {"bs": "t", "tk": "n", "bsk": "n"}


def _squeeze(loop: Loop, node: fx.Node) -> Any:
    value, dim = loop.value(_args(node)[0]), _dim(node, 1)
    if value is None:
        return None
    if isinstance(value, LiftedEntry) and dim == 0:
        return value.entry
    if dim is None or static_size(_shape(_args(node)[0])[dim]) != 1:
        return _same(loop, node)
    if isinstance(value, Coordinates) and len(value.dims) == 1:
        return Place(value.expert, value.dims[0], value.choice)
    if isinstance(value, Place):
        return value
    if isinstance(value, Ids) and not value.has_column and value.dims[dim] == "k":
        return Ids(_single_choice(value.dims[:dim] + value.dims[dim + 1 :]))
    if isinstance(value, (Mask, MaskedWeight)) and value.dims[dim] == "1":
        return replace(value, dims=(*value.dims[:dim], *value.dims[dim + 1 :]))
    if isinstance(value, Mask) and dim < len(value.dims) and value.dims[dim] == "k":
        return replace(value, dims=_single_choice(value.dims[:dim] + value.dims[dim + 1 :]))
    return None


def _single_choice(dims: Dims) -> Dims:
    """With one choice a token, tokens are assignments."""
    return tuple("n" if dim == "t" else dim for dim in dims)


def _unsqueeze(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    is_last = _args(node)[1] in (-1, len(_shape(node)) - 1)
    if isinstance(value, MaskedWeight) and is_last:
        return replace(value, dims=(*value.dims, "1"))
    if isinstance(value, Place) and is_last:
        return value
    return replace(value, has_column=True) if isinstance(value, Ids) and is_last and not value.has_column else None


def _repeated(loop: Loop, node: fx.Node) -> Any:
    """Places repeated for every column, as scatter_add wants them."""
    value = loop.value(_args(node)[0])
    keeps_rows = bool(_shape(node)) and same_size(_shape(node)[0], _shape(_args(node)[0])[0])
    return value if isinstance(value, Place) and keeps_rows else None


def _arange(loop: Loop, node: fx.Node) -> Any:
    size = static_size(_shape(node)[0]) if _shape(node) else None
    starts_at_zero = len(_args(node)) == 1 or _args(node)[0] == 0
    return Numbers(size) if size is not None and starts_at_zero and len(_args(node)) < 3 else None


def _equal(loop: Loop, node: fx.Node) -> Any:
    ids, other = loop.value(_args(node)[0]), _args(node)[1]
    if not isinstance(ids, Ids):
        return None
    numbers = loop.value(other)
    if ids.has_column and isinstance(numbers, Numbers):
        return Mask(None, (*ids.dims, "e"), ids.choice)
    return Mask(other, ids.dims, ids.choice) if isinstance(other, int) and not ids.has_column else None


def _is_positive(loop: Loop, node: fx.Node) -> Any:
    """mask > 0, mask != 0, mask >= 1, mask == 1 say what the mask says."""
    value = loop.value(_args(node)[0])
    thresholds: dict[Any, int] = {aten.gt.Scalar: 0, aten.ne.Scalar: 0, aten.ge.Scalar: 1, aten.eq.Scalar: 1}
    if isinstance(value, Mask) and _args(node)[1] == thresholds.get(node.target):
        return value
    if isinstance(value, Ids) and node.target is aten.eq.Scalar:
        return _equal(loop, node)
    return Checked() if isinstance(value, Ids) and node.target is not aten.ne.Scalar else None


def _checked(loop: Loop, node: fx.Node) -> Any:
    return Checked() if isinstance(loop.value(_args(node)[0]), (Checked, Ids)) else None


def _permute(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    is_index = isinstance(value, Ids) and not value.has_column
    if not isinstance(value, Mask) and not is_index:
        return None
    num_dims = len(value.dims)
    if node.target is aten.permute.default:
        order = [dim % num_dims for dim in _args(node)[1]]
    else:
        first, second = (0, 1) if node.target is aten.t.default else (dim % num_dims for dim in _args(node)[1:3])
        order = list(range(num_dims))
        order[first], order[second] = order[second], order[first]
    return replace(value, dims=tuple(value.dims[dim] for dim in order))


def _select(loop: Loop, node: fx.Node) -> Any:
    value, dim, place = loop.value(_args(node)[0]), _dim(node, 1), _args(node)[2]
    if dim is None or not isinstance(place, int):
        return None
    if isinstance(value, Mask) and value.expert is None and value.dims[dim] == "e":
        return replace(value, expert=place, dims=value.dims[:dim] + value.dims[dim + 1 :])
    if isinstance(value, (Ids, Mask)) and value.choice is None and value.dims[dim : dim + 1] == ("k",):
        num_choices = _shape(_args(node)[0])[dim]
        return replace(value, choice=place % num_choices, dims=value.dims[:dim] + value.dims[dim + 1 :])
    if isinstance(value, Coordinates) and dim == 1:
        return Place(value.expert, value.dims[place], value.choice)
    if isinstance(value, Counts):
        return Count(place)
    return None


def _slice(loop: Loop, node: fx.Node) -> Any:
    """Slices that take everything; of a tensor in expert order, the slice that is one expert's rows."""
    source, target = _shape(_args(node)[0]), _shape(node)
    if all(same_size(a, b) for a, b in zip(source, target, strict=True)):
        return _same(loop, node)
    value, dim = loop.value(_args(node)[0]), _dim(node, 1, 0)
    takes_first = len(_args(node)) > 2 and _args(node)[2] == 0 and len(_args(node)) < 5
    if isinstance(value, Mask) and dim is not None and value.dims[dim] == "e" and value.expert is None and takes_first:
        is_first = static_size(target[dim]) == 1
        return replace(value, expert=0, dims=(*value.dims[:dim], "1", *value.dims[dim + 1 :])) if is_first else value
    is_one = dim is not None and static_size(target[dim]) == 1 and isinstance(_args(node)[2], int)
    if isinstance(value, Mask) and is_one and dim is not None and value.dims[dim] == "e":
        return replace(value, expert=_args(node)[2], dims=(*value.dims[:dim], "1", *value.dims[dim + 1 :]))
    return None


def _over_choices(loop: Loop, node: fx.Node) -> Any:
    """any / sum / max over a token's choices."""
    value, dim = loop.value(_args(node)[0]), _dim(node, 1)
    keeps_dim = _args(node)[2] if len(_args(node)) > 2 else node.kwargs.get("keepdim", False)
    if not isinstance(value, (Mask, MaskedWeight)) or dim is None:
        return None
    if isinstance(value, Mask) and value.dims == ("t", "e") and dim == 0 and node.target is aten.sum.dim_IntList:
        return Counts()
    if value.dims[dim] != "k":
        return None
    if not loop.is_distinct:
        raise CannotChunk("a token may name an expert twice here, but its mask counts it once", node)
    left = value.dims[:dim] + (("1",) if keeps_dim else ()) + value.dims[dim + 1 :]
    if isinstance(value, MaskedWeight) and node.target is not aten.sum.dim_IntList:
        return None
    return replace(value, dims=left)


def _multiply(loop: Loop, node: fx.Node) -> Any:
    """A routing weight times a mask of its own shape."""
    for weight, mask in (_args(node)[:2], _args(node)[1::-1]):
        value = loop.value(mask)
        if isinstance(value, Mask):
            return _masked(loop, value, weight, mask)
    return None


def _masked(loop: Loop, value: Mask, weight: Any, mask: fx.Node) -> MaskedWeight | None:
    is_whole = value.expert is not None and value.choice is None and "".join(value.dims) in ("tk", "bsk")
    if not is_whole or not isinstance(weight, fx.Node) or weight in loop.values or weight in loop.owners:
        return None
    has_same_shape = len(_shape(weight)) == len(_shape(mask)) and all(map(same_size, _shape(weight), _shape(mask)))
    assert value.expert is not None
    return MaskedWeight(value.expert, weight, value.dims) if has_same_shape else None


def _where(loop: Loop, node: fx.Node) -> Any:
    """where(mask, weight, 0)"""
    mask, weight, other = _args(node)
    value = loop.value(mask)
    is_zero = isinstance(other, fx.Node) and (other.target in _ZEROS or _is_number(other, 0))
    return _masked(loop, value, weight, mask) if isinstance(value, Mask) and is_zero else None


def _is_number(node: fx.Node, number: float) -> bool:
    is_scalar = node.target in (aten.scalar_tensor.default, aten.full.default, aten.full_like.default)
    return is_scalar and _args(node)[0 if node.target is aten.scalar_tensor.default else 1] == number


def _nonzero(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    is_mask = isinstance(value, Mask) and value.expert is not None and not {"e", "1"} & set(value.dims)
    return Coordinates(value.expert, value.dims, value.choice) if is_mask else None


def _unbind(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    dim = _dim(node, 1, 0)
    is_index = isinstance(value, Ids) and not value.has_column and value.choice is None
    if is_index and dim is not None and value.dims[dim] == "k":
        left = value.dims[:dim] + value.dims[dim + 1 :]
        return [Ids(left, choice=choice) for choice in range(loop.top_k)]
    is_coordinates = isinstance(value, Coordinates) and dim == 1
    return [Place(value.expert, dim, value.choice) for dim in value.dims] if is_coordinates else None


def _getitem(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    if isinstance(value, list):
        return value[_args(node)[1]]
    if isinstance(value, Split):
        order = loop.value(value.source)
        expert = _args(node)[1]
        return Place(expert, order.dim) if isinstance(order, SortedOrder) else Entry(expert, "sorted", value.source)
    return None


def _token_of(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    is_of_assignments = isinstance(value, (Place, SortedOrder)) and value.dim == "n" and _args(node)[1] == loop.top_k
    return replace(value, dim="t") if is_of_assignments and isinstance(value, (Place, SortedOrder)) else None


def _index(loop: Loop, node: fx.Node) -> Any:
    """Take an expert's rows out of a tensor, by places or by a mask."""
    source, indices = _args(node)[0], _args(node)[1]
    if node.target is aten.index_select.default:
        if _args(node)[1] != 0:
            return None
        indices = [_args(node)[2]]
    if len(indices) == 2 and indices[0] is None and isinstance(source, fx.Node):
        entry = _entry(loop, source.args[0], [indices[1]]) if _is_lifted(source) else None
        return LiftedEntry(entry) if isinstance(entry, Entry) else None
    return _entry(loop, source, indices)


def _is_lifted(source: fx.Node) -> bool:
    return source.target is aten.unsqueeze.default and _args(source)[1] == 0


def _entry(loop: Loop, source: Any, indices: list[Any]) -> Any:
    values = [loop.value(place) for place in indices]
    which = _rows_named(values)
    if which is None or not isinstance(source, fx.Node):
        return None
    copy, by = which
    held = loop.value(source)
    if isinstance(held, MaskedWeight) and (held.expert, held.choice) == copy:
        has_column = held.dims[-1:] == ("1",)
        is_over_tokens = "".join(held.dims[:-1] if has_column else held.dims) == by in ("t", "bs")
        return _of_choices(copy, held.weight, has_column) if is_over_tokens else None
    if isinstance(held, Sum) or _is_blank(source):
        return Taken(held if isinstance(held, Sum) else Sum(source, by, ()), copy)
    if held is not None:
        return None
    return _column_entry(loop, source, copy, by) or Entry(copy[0], by, source, copy[1])


def _column_entry(loop: Loop, source: fx.Node, copy: Copy, by: str) -> Entry | None:
    """Rows by token out of W[..., k], the copy's own choice, or out of G[..., e], its own expert."""
    table, column, keeps_dim = _column_of(source)
    if table is None or by not in ("t", "bs") or table in loop.values or table in loop.owners:
        return None
    if copy[1] is not None and column == copy[1] and same_size(_shape(table)[-1], loop.top_k):
        return _of_choices(copy, table, keeps_dim)
    same_tokens = _with_tokens_of(table, _shape(loop.index)[: len(_shape(loop.index)) - (loop.has_choices)])
    if copy[1] is None and column == copy[0] and same_tokens is not None and loop.has_choices:
        return Entry(copy[0], "gate", same_tokens, None, keeps_dim)
    return None


def _of_choices(copy: Copy, weight: fx.Node, has_column: bool) -> Entry:
    """The weight of the copy's choices, [T,K] or [B,S,K]."""
    return Entry(copy[0], "tk" if len(_shape(weight)) == 2 else "bsk", weight, copy[1], has_column)


def _column_of(source: fx.Node) -> tuple[fx.Node | None, int | None, bool]:
    """(table, column, whether its dimension stays) of table[..., column]."""
    if source.target not in (aten.select.int, aten.slice.Tensor):
        return None, None, False
    table, keeps_dim = _args(source)[0], source.target is aten.slice.Tensor
    if _dim(source, 1, 0) != len(_shape(table)) - 1 or (keeps_dim and static_size(_shape(source)[-1]) != 1):
        return None, None, False
    return table, _args(source)[2], keeps_dim


def _with_tokens_of(table: fx.Node, tokens: tuple[Any, ...]) -> fx.Node | None:
    """The table, or what it is a reshape of, whose leading dimensions are those of the index."""
    while table.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        if len(_shape(table)) == len(tokens) + 1 and all(map(same_size, _shape(table), tokens)):
            break
        table = _args(table)[0]
    fits = len(_shape(table)) == len(tokens) + 1 and all(map(same_size, _shape(table), tokens))
    return table if fits and static_size(_shape(table)[-1]) is not None else None


def _rows_named(values: list[Any]) -> tuple[Copy, str] | None:
    """(copy, by what) that index values name together."""
    if len(values) == 1 and isinstance(values[0], Mask):
        copies, dims = {(values[0].expert, values[0].choice)}, "".join(values[0].dims)
    elif values and all(isinstance(value, Place) for value in values):
        copies = {(value.expert, value.choice) for value in values}
        dims = "".join(value.dim for value in values)
    else:
        return None
    expert, choice = copies.pop()
    if copies or expert is None or dims not in ("t", "n", "tk", "bs", "bsk"):
        return None
    return (expert, choice), dims


def _add(loop: Loop, node: fx.Node) -> Any:
    """Rows added to what a sum held at their places."""
    for taken, rows in (_args(node)[:2], _args(node)[1::-1]):
        value = loop.value(taken)
        if isinstance(value, Taken) and value.added is None and isinstance(rows, fx.Node) and not node.kwargs:
            if loop.owners.get(rows) != value.copy:
                raise CannotChunk("other rows than the expert's own are added to its places", node)
            return Taken(value.sum, value.copy, rows)
    return None


def _index_add(loop: Loop, node: fx.Node) -> Any:
    base, dim, place, rows = _args(node)[:4]
    value = loop.value(place)
    if not isinstance(value, Place) or dim != 0 or node.kwargs.get("alpha", 1) != 1:
        return None
    return _grown(loop, base, (value.expert, value.choice), value.dim, rows, node)


def _scatter_add(loop: Loop, node: fx.Node) -> Any:
    """As index_add, with the places repeated for every column."""
    base, dim, place, rows = _args(node)[:4]
    is_sum = node.target is aten.scatter_add.default or (
        _args(node)[4:5] == ("sum",) and node.kwargs.get("include_self", True)
    )
    value = loop.value(place)
    if not isinstance(value, Place) or dim != 0 or not is_sum:
        return None
    if not all(map(same_size, _shape(base)[1:], _shape(rows)[1:])) or len(_shape(place)) != len(_shape(rows)):
        return None
    return _grown(loop, base, (value.expert, value.choice), value.dim, rows, node)


def _index_put(loop: Loop, node: fx.Node) -> Any:
    """Put or add rows at an expert's places."""
    base, indices, rows = _args(node)[:3]
    accumulates = _args(node)[3] if len(_args(node)) > 3 else node.kwargs.get("accumulate", False)
    which = _rows_named([loop.value(place) for place in indices])
    if which is None:
        return None
    copy, by = which
    taken = loop.value(rows)
    if accumulates:
        return _grown(loop, base, copy, by, rows, node)
    if isinstance(taken, Taken) and taken.added is not None and taken.copy == copy:
        own = loop.value(base) if isinstance(loop.value(base), Sum) else Sum(base, by, ())
        if own != taken.sum:
            raise CannotChunk("rows are added to another state of the output than they were read from", node)
        if by in ("t", "bs") and not loop.is_distinct and copy[1] is None:
            raise CannotChunk("a token may name an expert twice here, but only one of its rows would be added", node)
        return _grown(loop, base, copy, by, taken.added, node)
    if by == "t" and loop.top_k == 1:
        by = "n"
    if by in ("tk", "bsk"):
        return _grown(loop, base, copy, "n", rows, node)
    if by != "n" and not (by == "bs" and loop.top_k == 1 and _starts_as_zeros(loop, base)):
        raise CannotChunk("an expert's rows overwrite those of others in the output", node)
    return _grown(loop, base, copy, by, rows, node)


def _starts_as_zeros(loop: Loop, base: fx.Node) -> bool:
    value = loop.value(base)
    first = value.base if isinstance(value, Sum) else base
    return isinstance(first, fx.Node) and is_zeros(first)


def is_zeros(node: fx.Node) -> bool:
    """Whether a node is a fresh tensor of zeros."""
    return node.target in _ZEROS or (node.target is aten.full.default and _args(node)[1] == 0)


def _grown(loop: Loop, base: Any, copy: Copy, by: str, rows: Any, node: fx.Node) -> Sum:
    value = loop.value(base)
    before = value if isinstance(value, Sum) else Sum(base, by, ())
    if loop.owners.get(rows) != copy:
        raise CannotChunk(f"other rows than those of expert {copy[0]} are written at its places", node)
    if by == "n" and not _is_blank(before.base):
        raise CannotChunk("experts' rows overwrite a tensor that is not fresh", node)
    if before.by != by or copy in dict(before.parts):
        raise CannotChunk(f"expert {copy[0]} is written back twice, or in two ways", node)
    return Sum(before.base, by, (*before.parts, (copy, rows)))


def _is_blank(node: fx.Node | None) -> bool:
    return node is not None and node.target in _BLANKS


def _sort(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    is_flat = isinstance(value, Ids) and value.dims == ("n",)
    return [None, SortedOrder()] if is_flat and not node.kwargs.get("descending", False) else None


def _counts(loop: Loop, node: fx.Node) -> Any:
    return Counts() if isinstance(loop.value(_args(node)[0]), Ids) else None


def _marked(loop: Loop, node: fx.Node) -> Any:
    """What an expert was skipped for must be its own mask or places."""
    value = loop.value(_args(node)[0])
    is_own_part = isinstance(value, Entry) and value.by == "sorted"
    if not is_own_part and (not isinstance(value, (Mask, Place, Coordinates)) or value.expert is None):
        raise CannotChunk("an expert is skipped for another reason than that it has no rows", node)
    return value


def _scatter(loop: Loop, node: fx.Node) -> Any:
    """zeros [T,E] with ones at each token's experts."""
    base, dim, ids, value = _args(node)[:4]
    held = loop.value(ids)
    is_one_hot = dim == 1 and value == 1 and isinstance(held, Ids) and held.dims == ("t", "k")
    return Mask(None, ("t", "e")) if is_one_hot and base.target in _ZEROS and loop.is_distinct else None


def _count_as_number(loop: Loop, node: fx.Node) -> Any:
    value, size = loop.value(_args(node)[0]), node_value(node)
    if isinstance(value, Count) and isinstance(size, torch.SymInt):
        loop.counts[size.node.expr] = value.expert
    return None


def _split(loop: Loop, node: fx.Node) -> Any:
    """A tensor split by the experts' counts."""
    sizes = _args(node)[1]
    if not isinstance(sizes, (list, tuple)) or _dim(node, 2, 0) != 0 or not _are_counts(loop, sizes):
        return None
    return Split(_args(node)[0])


def _put_rows(loop: Loop, node: fx.Node) -> Sum:
    """Rows written at their expert's places in expert order."""
    base, rows, counts, expert = _args(node)
    value = loop.value(base)
    before = value if isinstance(value, Sum) else Sum(None, "sorted", ())
    is_fresh = isinstance(value, Sum) or _is_blank(base)
    have_same_dtype = getattr(node_value(base), "dtype", None) is getattr(node_value(rows), "dtype", 0)
    if not is_fresh or before.by != "sorted" or before.base is not None or not _are_counts(loop, counts):
        raise CannotChunk("an expert's rows are written into other than a fresh tensor in expert order", node)
    if loop.owners.get(rows) != (expert, None) or expert in {own for (own, _), _ in before.parts}:
        raise CannotChunk(f"other rows than those of expert {expert} are written at its places, or twice", node)
    if not have_same_dtype or not all(map(same_size, _shape(base)[1:], _shape(rows)[1:])):
        raise CannotChunk("an expert's rows change their dtype or shape where they are written", node)
    return Sum(None, "sorted", (*before.parts, ((expert, None), rows)))


def _are_counts(loop: Loop, sizes: Any) -> bool:
    experts = [_expert_of(loop, size) for size in sizes]
    return experts == list(range(len(experts)))


def _expert_of(loop: Loop, size: Any) -> int | None:
    value = node_value(size) if isinstance(size, fx.Node) else size
    return loop.counts.get(value.node.expr) if isinstance(value, torch.SymInt) else None


def _cat(loop: Loop, node: fx.Node) -> Any:
    parts = _args(node)[0]
    places = [loop.value(part) for part in parts]
    if places and all(isinstance(place, Place) and place.choice is None for place in places):
        return _all_places(places)
    owners = [loop.owners[part] for part in parts if part in loop.owners]
    has_choice = any(choice is not None for _, choice in owners)
    if has_choice or len(owners) < len(parts) or len(set(owners)) < len(owners) or _dim_of_cat(node) != 0:
        return None
    if [expert for expert, _ in owners] != sorted(expert for expert, _ in owners):
        raise CannotChunk("experts' results are concatenated in another order than that of their rows", node)
    return Sum(None, "sorted", tuple(zip(owners, parts, strict=True)))


def _all_places(places: list[Place]) -> AllPlaces | None:
    dims = {place.dim for place in places}
    is_in_order = [place.expert for place in places] == list(range(len(places)))
    return AllPlaces(dims.pop(), len(places)) if is_in_order and dims in ({"t"}, {"n"}) else None


def _dim_of_cat(node: fx.Node) -> int:
    dim: int = _args(node)[1] if len(_args(node)) > 1 else _kwargs(node).get("dim", 0)
    return dim % len(_shape(node))


_BLANKS = frozenset(
    {
        aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty_like.default,
        aten.empty.memory_format, aten.new_empty.default,
    }
)  # fmt: skip

_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})

_RULES: dict[Any, Callable[[Loop, fx.Node], Any]] = {
    aten._to_copy.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.contiguous.default: _same,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.eq.Scalar: _is_positive,
    aten.eq.Tensor: _equal,
    aten.gt.Scalar: _is_positive,
    aten.ne.Scalar: _is_positive,
    aten.ge.Scalar: _is_positive,
    aten.lt.Scalar: _checked,
    aten.all.default: _checked,
    aten._assert_async.msg: _checked,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.any.dim: _over_choices,
    aten.any.dims: _over_choices,
    aten.amax.default: _over_choices,
    aten.sum.dim_IntList: _over_choices,
    aten.mul.Tensor: _multiply,
    aten.where.self: _where,
    aten.expand.default: _repeated,
    aten.repeat.default: _repeated,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_add,
    aten.nonzero.default: _nonzero,
    aten.unbind.int: _unbind,
    operator.getitem: _getitem,
    aten.floor_divide.default: _token_of,
    aten.div.Tensor_mode: _token_of,
    aten.index.Tensor: _index,
    aten.index_select.default: _index,
    aten.add.Tensor: _add,
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.bincount.default: _counts,
    COUNT_ROWS: _counts,
    PUT_ROWS: _put_rows,
    ROWS_OF: _marked,
    aten.histc.default: _counts,
    aten._local_scalar_dense.default: _count_as_number,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.scatter.value: _scatter,
}
