"""What the nodes of an unrolled expert loop are: masks of one expert, places of its rows, its rows, sums so far.

A loop over experts asks where the index names expert e, takes those rows, computes, and writes or adds the
results back. `read_loop` walks a normalised region once and gives a value to every node that takes part; a
node without a value is ordinary (computed from tokens or parameters alone, or from one expert's rows, which
`owners` tells). Dimensions are letters: t tokens, k choices, n routed rows in token order, e experts, 1 one expert.

Refuses: rows of two experts that meet; masks over tokens where a token may name an expert twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import node_value, same_size, static_size
from memfine_fx.passes.loops.marker import COUNT_ROWS, ROWS_OF

__all__ = ["Entry", "Loop", "Sum", "read_loop"]

aten = torch.ops.aten
Dims = tuple[str, ...]


@dataclass(frozen=True)
class Ids:
    """Expert ids; `has_column` marks a trailing dimension of one, for comparison with a row of numbers."""

    dims: Dims
    has_column: bool = False


@dataclass(frozen=True)
class Numbers:
    """0, 1, ..., `count` - 1."""

    count: int


@dataclass(frozen=True)
class Mask:
    """Whether (or how often) the index names `expert`; with "e" among the dimensions, for every expert."""

    expert: int | None
    dims: Dims


@dataclass(frozen=True)
class MaskedWeight:
    """The routing weight where the index names `expert`, zero elsewhere; over tokens once summed over choices."""

    expert: int
    weight: fx.Node
    dims: Dims


@dataclass(frozen=True)
class Coordinates:
    """Where a mask holds, [R, number of its dimensions]."""

    expert: int
    dims: Dims


@dataclass(frozen=True)
class Place:
    """One coordinate of each row of `expert`, [R]: its token, choice or flat assignment."""

    expert: int
    dim: str


@dataclass(frozen=True)
class Counts:
    """Rows of every expert, [E]."""


@dataclass(frozen=True)
class Count:
    """Rows of one expert, as a tensor of one element."""

    expert: int


@dataclass(frozen=True)
class SortedOrder:
    """Assignments in expert order, [N]."""


@dataclass(frozen=True)
class Entry:
    """Rows of `expert` taken out of `source`: by token ("t"), choice ("tk"), flat assignment ("n"), or, where
    the source stands in expert order, as its slice ("sorted")."""

    expert: int
    by: str
    source: fx.Node


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
        by: "t" where rows are added to tokens, "n" where each routed row is put in its place, "sorted" where
            they stand in expert order.
        parts: (expert, node of its results).
    """

    base: fx.Node | None
    by: str
    parts: tuple[tuple[int, fx.Node], ...]


@dataclass(frozen=True)
class Taken:
    """What a sum held at the rows of `expert`, and what was added since."""

    sum: Sum
    expert: int
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
    owners: dict[fx.Node, int] = field(default_factory=dict)
    counts: dict[object, int] = field(default_factory=dict)
    num_classes: int | None = None

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
    loop.values[index] = Ids((("t",) if num_token_dims == 1 else ("b", "s")) + ("k",) if has_choices else ("n",))
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
        loop.owners[node] = value.expert
    elif value is None:
        experts = {loop.owners[source] for source in node.all_input_nodes if source in loop.owners}
        if len(experts) > 1:
            raise CannotChunk(f"rows of experts {sorted(experts)} meet before they are combined", node)
        if experts:
            loop.owners[node] = experts.pop()


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
        return Place(value.expert, value.dims[0])
    if len(source) == len(target) and all(same_size(a, b) for a, b in zip(source, target, strict=True)):
        return _same(loop, node)
    if isinstance(value, (Ids, Mask)) and value.dims == ("t", "k") and len(target) == 1:
        return Ids(("n",)) if isinstance(value, Ids) else Mask(value.expert, ("n",))
    if isinstance(value, Ids) and value.dims == ("b", "s", "k") and len(target) == 1:
        return Ids(("n",))
    if isinstance(value, Ids) and value.dims != ("t", "k") and len(target) == 2 and same_size(target[1], loop.top_k):
        return Ids(("t", "k"))
    if isinstance(value, (Place, Count)):
        return value
    return None


def _squeeze(loop: Loop, node: fx.Node) -> Any:
    value, dim = loop.value(_args(node)[0]), _dim(node, 1)
    if value is None:
        return None
    if isinstance(value, LiftedEntry) and dim == 0:
        return value.entry
    if dim is None or static_size(_shape(_args(node)[0])[dim]) != 1:
        return _same(loop, node)
    if isinstance(value, Coordinates) and len(value.dims) == 1:
        return Place(value.expert, value.dims[0])
    if isinstance(value, Ids) and value.dims == ("t", "k") and dim == 1:
        return Ids(("n",))
    if isinstance(value, Mask) and value.dims[dim] == "1":
        return Mask(value.expert, (*value.dims[:dim], *value.dims[dim + 1 :]))
    if isinstance(value, Mask) and dim < len(value.dims) and value.dims[dim] == "k":
        return Mask(value.expert, _single_choice(value.dims[:dim] + value.dims[dim + 1 :]))
    return None


def _single_choice(dims: Dims) -> Dims:
    """With one choice a token, tokens are assignments."""
    return tuple("n" if dim == "t" else dim for dim in dims)


def _unsqueeze(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    is_last = _args(node)[1] in (-1, len(_shape(node)) - 1)
    return Ids(value.dims, has_column=True) if isinstance(value, Ids) and is_last else None


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
        return Mask(None, (*ids.dims, "e"))
    return Mask(other, ids.dims) if isinstance(other, int) and not ids.has_column else None


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
    if not isinstance(value, Mask):
        return None
    num_dims = len(value.dims)
    if node.target is aten.permute.default:
        order = [dim % num_dims for dim in _args(node)[1]]
    else:
        first, second = (0, 1) if node.target is aten.t.default else (dim % num_dims for dim in _args(node)[1:3])
        order = list(range(num_dims))
        order[first], order[second] = order[second], order[first]
    return Mask(value.expert, tuple(value.dims[dim] for dim in order))


def _select(loop: Loop, node: fx.Node) -> Any:
    value, dim, place = loop.value(_args(node)[0]), _dim(node, 1), _args(node)[2]
    if dim is None or not isinstance(place, int):
        return None
    if isinstance(value, Mask) and value.expert is None and value.dims[dim] == "e":
        return Mask(place, value.dims[:dim] + value.dims[dim + 1 :])
    if isinstance(value, Coordinates) and dim == 1:
        return Place(value.expert, value.dims[place])
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
        return Mask(0, (*value.dims[:dim], "1", *value.dims[dim + 1 :])) if static_size(target[dim]) == 1 else value
    is_one = dim is not None and static_size(target[dim]) == 1 and isinstance(_args(node)[2], int)
    if isinstance(value, Mask) and is_one and dim is not None and value.dims[dim] == "e":
        return Mask(_args(node)[2], (*value.dims[:dim], "1", *value.dims[dim + 1 :]))
    return None


def _over_choices(loop: Loop, node: fx.Node) -> Any:
    """any / sum / max over a token's choices."""
    value, dim = loop.value(_args(node)[0]), _dim(node, 1)
    keeps_dim = _args(node)[2] if len(_args(node)) > 2 else node.kwargs.get("keepdim", False)
    if not isinstance(value, (Mask, MaskedWeight)) or keeps_dim or dim is None:
        return None
    if isinstance(value, Mask) and value.dims == ("t", "e") and dim == 0 and node.target is aten.sum.dim_IntList:
        return Counts()
    if value.dims[dim] != "k" or value.expert is None:
        return None
    if not loop.is_distinct:
        raise CannotChunk("a token may name an expert twice here, but its mask counts it once", node)
    left = value.dims[:dim] + value.dims[dim + 1 :]
    if isinstance(value, Mask):
        return Mask(value.expert, left)
    return MaskedWeight(value.expert, value.weight, left) if node.target is aten.sum.dim_IntList else None


def _multiply(loop: Loop, node: fx.Node) -> Any:
    """A routing weight times a mask of its own shape."""
    for weight, mask in (_args(node)[:2], _args(node)[1::-1]):
        value = loop.value(mask)
        is_mask = isinstance(value, Mask) and value.expert is not None and value.dims == ("t", "k")
        if is_mask and isinstance(weight, fx.Node) and weight not in loop.values and weight not in loop.owners:
            if len(_shape(weight)) != 2 or not all(map(same_size, _shape(weight), _shape(mask))):
                return None
            return MaskedWeight(value.expert, weight, value.dims)
    return None


def _nonzero(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    is_mask = isinstance(value, Mask) and value.expert is not None and not {"e", "1"} & set(value.dims)
    return Coordinates(value.expert, value.dims) if is_mask else None


def _unbind(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    is_coordinates = isinstance(value, Coordinates) and _dim(node, 1, 0) == 1
    return [Place(value.expert, dim) for dim in value.dims] if is_coordinates else None


def _getitem(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    if isinstance(value, list):
        return value[_args(node)[1]]
    if isinstance(value, Split):
        return Entry(_args(node)[1], "sorted", value.source)
    return None


def _token_of(loop: Loop, node: fx.Node) -> Any:
    value = loop.value(_args(node)[0])
    return (
        Place(value.expert, "t")
        if isinstance(value, Place) and value.dim == "n" and _args(node)[1] == loop.top_k
        else None
    )


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
    expert, by = which
    held = loop.value(source)
    if by == "t" and isinstance(held, MaskedWeight) and held.expert == expert and held.dims == ("t",):
        return Entry(expert, "tk", held.weight)
    if isinstance(held, Sum) or _is_blank(source):
        return Taken(held if isinstance(held, Sum) else Sum(source, by, ()), expert)
    if held is not None:
        return None
    return Entry(expert, by, source)


def _rows_named(values: list[Any]) -> tuple[int, str] | None:
    """(expert, by what) that index values name together."""
    if len(values) == 1 and isinstance(values[0], Mask) and values[0].expert is not None:
        named = {("t",): "t", ("n",): "n", ("t", "k"): "tk"}.get(values[0].dims)
        return None if named is None else (values[0].expert, named)
    if not values or not all(isinstance(value, Place) for value in values):
        return None
    experts, dims = {value.expert for value in values}, tuple(value.dim for value in values)
    named = {("t",): "t", ("n",): "n", ("t", "k"): "tk"}.get(dims)
    return None if len(experts) > 1 or named is None else (experts.pop(), named)


def _add(loop: Loop, node: fx.Node) -> Any:
    """Rows added to what a sum held at their places."""
    for taken, rows in (_args(node)[:2], _args(node)[1::-1]):
        value = loop.value(taken)
        if isinstance(value, Taken) and value.added is None and isinstance(rows, fx.Node) and not node.kwargs:
            if loop.owners.get(rows) != value.expert:
                raise CannotChunk("other rows than the expert's own are added to its places", node)
            return Taken(value.sum, value.expert, rows)
    return None


def _index_add(loop: Loop, node: fx.Node) -> Any:
    base, dim, place, rows = _args(node)[:4]
    value = loop.value(place)
    if not isinstance(value, Place) or dim != 0 or node.kwargs.get("alpha", 1) != 1:
        return None
    return _grown(loop, base, value.expert, value.dim, rows, node)


def _index_put(loop: Loop, node: fx.Node) -> Any:
    """Put or add rows at an expert's places."""
    base, indices, rows = _args(node)[:3]
    accumulates = _args(node)[3] if len(_args(node)) > 3 else node.kwargs.get("accumulate", False)
    which = _rows_named([loop.value(place) for place in indices])
    if which is None:
        return None
    expert, by = which
    taken = loop.value(rows)
    if accumulates:
        return _grown(loop, base, expert, by, rows, node)
    if isinstance(taken, Taken) and taken.added is not None and taken.expert == expert:
        own = loop.value(base) if isinstance(loop.value(base), Sum) else Sum(base, by, ())
        if own != taken.sum:
            raise CannotChunk("rows are added to another state of the output than they were read from", node)
        if by == "t" and not loop.is_distinct:
            raise CannotChunk("a token may name an expert twice here, but only one of its rows would be added", node)
        return _grown(loop, base, expert, by, taken.added, node)
    if by == "t" and loop.top_k == 1:
        by = "n"
    if by != "n":
        raise CannotChunk("an expert's rows overwrite those of others in the output", node)
    return _grown(loop, base, expert, by, rows, node)


def _grown(loop: Loop, base: Any, expert: int, by: str, rows: Any, node: fx.Node) -> Sum:
    value = loop.value(base)
    before = value if isinstance(value, Sum) else Sum(base, by, ())
    if loop.owners.get(rows) != expert:
        raise CannotChunk(f"other rows than those of expert {expert} are written at its places", node)
    if by == "n" and not _is_blank(before.base):
        raise CannotChunk("experts' rows overwrite a tensor that is not fresh", node)
    if before.by != by or expert in dict(before.parts):
        raise CannotChunk(f"expert {expert} is written back twice, or in two ways", node)
    return Sum(before.base, by, (*before.parts, (expert, rows)))


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
    if not isinstance(value, (Mask, Place, Coordinates)) or value.expert is None:
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
    if not isinstance(sizes, (list, tuple)) or _dim(node, 2, 0) != 0:
        return None
    experts = [_expert_of(loop, size) for size in sizes]
    if experts != list(range(len(experts))):
        return None
    return Split(_args(node)[0])


def _expert_of(loop: Loop, size: Any) -> int | None:
    value = node_value(size) if isinstance(size, fx.Node) else size
    return loop.counts.get(value.node.expr) if isinstance(value, torch.SymInt) else None


def _cat(loop: Loop, node: fx.Node) -> Any:
    parts = _args(node)[0]
    owners = [loop.owners[part] for part in parts if part in loop.owners]
    if len(owners) < len(parts) or len(set(owners)) < len(owners) or _dim_of_cat(node) != 0:
        return None
    if owners != sorted(owners):
        raise CannotChunk("experts' results are concatenated in another order than that of their rows", node)
    return Sum(None, "sorted", tuple(zip(owners, parts, strict=True)))


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
    ROWS_OF: _marked,
    aten.histc.default: _counts,
    aten._local_scalar_dense.default: _count_as_number,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.scatter.value: _scatter,
}
