"""Which nodes that the routing does not reach run as part of a region all the same.

A region's inputs are tensors of a plain role: tokens [T,H], a weight for each choice or expert, parameters. What only
turns these into another shape is taken inside, so that it is not alive for all routed rows at once:

    factories and integers made of them        zeros that results are added to, arange
    entries of parameters                      W[e], W.unbind()[e], W[e].T: the whole table is the parameter then
    copies of tokens                           repeat_interleave(x, K), x.expand(E, T, H), x.unsqueeze(1)
    results that vary over experts or choices  einsum(x, W) of experts that run on all tokens
    tables that are computed                   W + scaling * B @ A: they need exist one expert at a time only
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import fx

from memfine_fx.compat.bitsandbytes import DEQUANTIZE_4BIT
from memfine_fx.compat.operators import qualified_name
from memfine_fx.passes.dataflow import (
    Dataflow,
    is_float_tensor,
    is_int_tensor,
    node_value,
    same_size,
    static_size,
)
from memfine_fx.passes.ops import (
    BROADCASTS,
    CASTS,
    FACTORIES,
    GROUPED_MATMULS,
    LIKE_FACTORIES,
    MATMULS,
    REPEATS,
    RESHAPES,
    SPLITS,
    TRANSPOSES,
    name_of,
)

if TYPE_CHECKING:
    from memfine_fx.passes.read.frame import Frame

__all__ = ["LOOKED_BEHIND", "Sinking", "is_dequantized", "is_parameter_view"]

_VIEWS = RESHAPES | TRANSPOSES | BROADCASTS | CASTS | {"contiguous"}
_ENTRIES = frozenset(("getitem", "select", "unbind"))
_GATHERS = frozenset(("all_experts", "expert_of"))
# What gathers ranks' parts is only ever given parameters, so equal layers need not be compared behind it.
_BEHIND_VIEWS = _VIEWS | _ENTRIES | _GATHERS
LOOKED_BEHIND = _VIEWS | _ENTRIES | SPLITS | REPEATS | FACTORIES | LIKE_FACTORIES
"""Calls behind which reading looks when it decides what a leaf is, or whether to pull it."""


class Sinking:
    """Decides about the leaves of one walk.

    Args:
        flow: of Dynamo's graph.
        frame: sizes of the routing.
        forced: nodes that look like tokens but run as part of the region.
        expands_tables: whether computed tables of parameters are read as leaves, whole, all the same.
    """

    def __init__(
        self, flow: Dataflow, frame: Frame, forced: frozenset[fx.Node], *, expands_tables: bool = False
    ) -> None:
        self.computed_tables: dict[fx.Node, str] = {}
        """Tables that are to be computed expert by expert; why not, or ""."""
        self._expands_tables = expands_tables
        self._flow = flow
        self._frame = frame
        self._forced = forced
        self._of_parameters: dict[fx.Node, bool] = {}

    def wants(self, node: fx.Node, ran: Collection[fx.Node], at: int) -> bool:
        """Whether a leaf runs as part of the region."""
        is_call = node.op in ("call_function", "call_method")
        if not is_call or node is self._frame.index or self._is_written(node, ran, at):
            return False
        if node in self._forced or self._is_factory(node) or is_weight_view(node):
            return True
        source = node.args[0] if name_of(node) == "getitem" else None
        if isinstance(source, fx.Node) and not isinstance(node_value(source), torch.Tensor):
            return source in ran or self.wants(source, ran, at)
        value = node_value(node)
        if isinstance(value, (tuple, list)):
            return any(isinstance(part, torch.Tensor) for part in value) and self._splits_leaf(node)
        if not isinstance(value, torch.Tensor) or not is_float_tensor(node):
            return False
        if self.is_made_of_parameters(node):
            return self._is_computed_table(node, value)
        return name_of(node) in REPEATS | BROADCASTS or self._is_turned(node) or not self._has_plain_role(value)

    def _is_computed_table(self, node: fx.Node, value: torch.Tensor) -> bool:
        """[E,...] matrices that are no view of a parameter, unless they are to be read whole."""
        num_experts = static_size(value.shape[0]) if value.ndim >= 3 else None
        is_table = num_experts is not None and num_experts > 1 and self._frame.num_experts in (None, num_experts)
        is_table = is_table or self._is_low_rank_product(node, value)
        if not is_table or self._expands_tables or is_parameter_view(node):
            return False
        self.computed_tables[node] = ""
        return True

    def _is_low_rank_product(self, node: fx.Node, value: torch.Tensor) -> bool:
        """B A of one expert of a list, [F,H], perhaps cast or detached."""
        while name_of(node) in ("detach", "to") and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        is_product = name_of(node) in ("matmul", "mm", "__matmul__") and len(node.all_input_nodes) == 2
        if not is_product or value.ndim != 2:
            return False
        factor = node_value(node.all_input_nodes[1])
        rank = static_size(factor.shape[0]) if isinstance(factor, torch.Tensor) and factor.ndim == 2 else None
        return rank is not None and all(rank < (static_size(size) or 0) for size in value.shape)

    def packed_numbers(self, node: fx.Node, at: int) -> list[fx.Node]:
        """Return the calls that compute a table [E,...] from packed numbers, as it is read at position `at`.

        Returns:
            Calls in their order, without those that are the same for all experts; [] where the node is no such table,
            or something that is trained is in it.
        """
        value = node_value(node)
        is_call = node.op in ("call_function", "call_method")
        if self._expands_tables or not is_call or not isinstance(value, torch.Tensor) or not is_float_tensor(node):
            return []
        num_experts = static_size(value.shape[0]) if value.ndim >= 3 else None
        if num_experts in (None, 1) or self._frame.num_experts not in (None, num_experts):
            return []
        made_of = self._made_of(node, at)
        calls = {source for source in made_of if not _is_from_outside(source)}
        written = {self._flow.root(target) for call in calls for target in self._flow.mutations.get(call, ())}
        # Integers carry no gradient, so nothing trained may be among the leaves. The calls run again on each expert's
        # part, so what they write into must have been made by one of them.
        packed = [
            source for source in made_of - calls if _is_packed_leaf(source) and _num_entries(source) == num_experts
        ]
        is_frozen = all(map(_is_frozen, made_of - calls)) and written <= calls
        if not packed or not is_frozen or any(map(is_dequantized, calls)):
            return []
        # Scales that were expanded to every number cost what the table does; smaller ones may be made outside, whole,
        # unless that takes other ranks' parts of them.
        large = [call for call in calls if 2 * _num_elements(call) > _num_elements(node)]
        gathered = [source for source in made_of - calls if name_of(source) in _GATHERS]
        depends = self._flow.descendants([*packed, *gathered, *large]).union(large)
        needed = [call for call in calls if call in depends or self._flow.root(call) in written]
        return sorted(needed, key=self._flow.position.__getitem__)

    def _made_of(self, node: fx.Node, at: int) -> set[fx.Node]:
        """All that is in a tensor as it is read at position `at`, itself included: writes, and what they write."""
        root = self._flow.root(node)
        writes = [
            mutation
            for mutation, targets in self._flow.mutations.items()
            if self._flow.position[mutation] < at and root in map(self._flow.root, targets)
        ]
        return self._flow.ancestors([node, *writes]) | {node, *writes}

    def is_tokens(self, value: torch.Tensor) -> bool:
        """[T,...] or [B,S,...], with more behind it."""
        tokens = self._frame.token_shape
        has_tokens = value.ndim >= 2 and same_size(value.shape[0], self._frame.num_tokens)
        return has_tokens or (value.ndim > len(tokens) and all(map(same_size, value.shape, tokens)))

    def is_matmul(self, node: fx.Node) -> bool:
        is_call = node.op in ("call_function", "call_method")
        return is_call and name_of(node) in (MATMULS | GROUPED_MATMULS)

    def is_table(self, node: fx.Node) -> bool:
        """A view of a parameter with three or more dimensions."""
        node = behind_views(node)
        value = node_value(node)
        return isinstance(value, torch.nn.Parameter) and value.ndim >= 3

    def expert_dim(self, node: fx.Node, rows: fx.Node) -> int | None:
        """The dimension of experts of rows in slots that a call reads with a table of weights, or takes apart."""
        value = node_value(rows)
        if not isinstance(value, torch.Tensor) or not is_float_tensor(rows) or value.ndim < 3:
            return None
        if self.is_matmul(node):
            return self._expert_dim_of_product(node, rows, value)
        dim = _dim_taken_apart(node, value)
        num_parts = None if dim is None else static_size(value.shape[dim])
        return dim if num_parts is not None and num_parts > 1 and dim is not None and dim < value.ndim - 1 else None

    def _expert_dim_of_product(self, node: fx.Node, rows: fx.Node, value: torch.Tensor) -> int | None:
        for table in node.all_input_nodes:
            weight = node_value(table)
            is_table = isinstance(weight, torch.Tensor) and weight.ndim >= 3 and self.is_made_of_parameters(table)
            if table is rows or not is_table or not isinstance(weight, torch.Tensor):
                continue
            dims = [
                dim for dim, size in enumerate(value.shape[:-1]) if static_size(size) == static_size(weight.shape[0])
            ]
            by_letter = _dim_by_letter(node, rows, table)
            if by_letter is not None:
                return by_letter if by_letter in dims else None
            batch = value.ndim - 3  # the last dimension of a batch: [...,E,C,H]
            return batch if batch in dims else None
        return None

    def _is_turned(self, node: fx.Node) -> bool:
        """Weights of each choice with choices before tokens: [K,T] may look like [T,K]."""
        source = node.args[0] if name_of(node) in TRANSPOSES and node.args else None
        value = node_value(source) if isinstance(source, fx.Node) else None
        shape = (*self._frame.token_shape, self._frame.top_k)
        return isinstance(value, torch.Tensor) and value.ndim == len(shape) and all(map(same_size, value.shape, shape))

    def _has_plain_role(self, value: torch.Tensor) -> bool:
        tokens, frame = self._frame.token_shape, self._frame
        if self.is_tokens(value):
            is_flat = same_size(value.shape[0], frame.num_tokens) and value.ndim == 2
            return is_flat or value.ndim == len(tokens) + 1
        if value.ndim == len(tokens) and frame.top_k == 1:
            return all(map(same_size, value.shape, tokens))
        return False

    def _splits_leaf(self, node: fx.Node) -> bool:
        """Tokens or copies of them taken apart are no role of their own, parameters' entries are."""
        source = node.args[0] if node.args and name_of(node) in SPLITS else None
        return isinstance(source, fx.Node) and is_float_tensor(source) and not self.is_made_of_parameters(source)

    def is_made_of_parameters(self, node: fx.Node) -> bool:
        """Whether parameters alone are in it (and integers: a range of experts)."""
        known = self._of_parameters.get(node)
        if known is None:
            if is_dequantized(node):
                known = True
            elif node.op in ("placeholder", "get_attr"):
                known = isinstance(node_value(node), torch.nn.Parameter) or not is_float_tensor(node)
                known = known and not (is_int_tensor(node) and node.op == "placeholder")
                known = known or _is_packed_leaf(node)
            else:
                known = all(map(self.is_made_of_parameters, node.all_input_nodes))
            self._of_parameters[node] = known
        return known

    def _is_factory(self, node: fx.Node) -> bool:
        """Made from sizes alone: a factory, or index arithmetic on factories."""
        if name_of(node) in LIKE_FACTORIES:
            return True
        if not isinstance(node_value(node), torch.Tensor):
            return False
        sources = [source for source in node.all_input_nodes if isinstance(node_value(source), torch.Tensor)]
        if not sources:
            return name_of(node) in FACTORIES
        is_call = node.op in ("call_function", "call_method")
        return (
            is_call
            and is_int_tensor(node)
            and all(source.op != "placeholder" for source in sources)
            and all(map(self._is_factory, sources))
        )

    def _is_written(self, node: fx.Node, ran: Collection[fx.Node], at: int) -> bool:
        """Whether something that did not run has written into it before position `at`."""
        # Run later, in the region, it would read what was written since.
        root = self._flow.root(node)
        return any(
            mutation not in ran
            and self._flow.position[node] < self._flow.position[mutation] < at
            and root in map(self._flow.root, targets)
            for mutation, targets in self._flow.mutations.items()
        )


def _dim_by_letter(node: fx.Node, rows: fx.Node, table: fx.Node) -> int | None:
    """In an einsum: the dimension of the rows that is the table's first."""
    equation = node.args[0] if node.args else None
    if name_of(node) != "einsum" or not isinstance(equation, str):
        return None
    operands = node.args[1:] if isinstance(node.args[1], fx.Node) else node.args[1]
    letters = dict(zip(operands, equation.replace(" ", "").partition("->")[0].split(","), strict=True))  # type: ignore[arg-type]
    return letters[rows].find(letters[table][0]) if letters[table][0] in letters[rows] else None


def _dim_taken_apart(node: fx.Node, value: torch.Tensor) -> int | None:
    """The dimension along which a call takes single entries out of a tensor."""
    name = name_of(node)
    if name in ("chunk", "split", "tensor_split", "unbind"):
        position = 1 if name == "unbind" else 2
        dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
        parts = node_value(node)
        if not isinstance(dim, int) or not isinstance(parts, (tuple, list)):
            return None
        dim = dim % value.ndim
        are_single = name == "unbind" or all(static_size(part.shape[dim]) == 1 for part in parts)
        return dim if are_single else None
    if name == "select" and len(node.args) == 3:
        return node.args[1] % value.ndim if isinstance(node.args[1], int) else None
    if name != "getitem":
        return None
    place = node.args[1]
    places = place if isinstance(place, tuple) else (place,)
    is_entry = all(index == slice(None) for index in places[:-1]) and type(places[-1]) is int
    return len(places) - 1 if is_entry else None


_PACKED = frozenset({torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu})


def _is_packed_leaf(node: fx.Node) -> bool:
    """Numbers in a few bits that come from outside; token ids are never so short."""
    value = node_value(node)
    return _is_from_outside(node) and isinstance(value, torch.Tensor) and value.dtype in _PACKED


def _is_from_outside(node: fx.Node) -> bool:
    """Whether nothing in the graph makes a tensor; what gathers ranks' parts stands for the whole parameter."""
    return node.op in ("placeholder", "get_attr") or name_of(node) in _GATHERS


def _is_frozen(node: fx.Node) -> bool:
    """Whether a tensor comes from outside, in a shape that is known, and is not trained."""
    value = node_value(node)
    if not isinstance(value, torch.Tensor) or not _is_from_outside(node):
        return False
    return not value.requires_grad and all(static_size(size) is not None for size in value.shape)


def _num_elements(node: fx.Node) -> int:
    value = node_value(node)
    if not isinstance(value, torch.Tensor) or any(static_size(size) is None for size in value.shape):
        return 0
    return int(value.numel())


def _num_entries(node: fx.Node) -> int | None:
    value = node_value(node)
    return static_size(value.shape[0]) if isinstance(value, torch.Tensor) and value.ndim >= 2 else None


def is_dequantized(node: fx.Node) -> bool:
    """Whether a library's operator makes a tensor of packed numbers here."""
    target = getattr(node.target, "default", node.target)  # an operator may be called by its packet
    return qualified_name(target) == DEQUANTIZE_4BIT


def behind_views(node: fx.Node) -> fx.Node:
    while name_of(node) in _VIEWS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_parameter_view(node: fx.Node) -> bool:
    """A parameter, an entry of one, a view of either, or all ranks' parts of one."""
    while name_of(node) in _BEHIND_VIEWS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return isinstance(node_value(node), torch.nn.Parameter) and not _is_packed_leaf(node)


def is_weight_view(node: fx.Node) -> bool:
    """One entry of a parameter, or a transpose of one: taking it inside lets the whole table be the parameter."""
    if node.op not in ("call_function", "call_method") or len(node.all_input_nodes) != 1:
        return False
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if name_of(node) in _ENTRIES:
        is_of_unbound = name_of(source) == "unbind" and is_weight_view(source)
        return is_of_unbound or _is_weight(source)
    return name_of(node) in TRANSPOSES and is_weight_view(source)


def _is_weight(node: fx.Node) -> bool:
    """A parameter, or a reshape of one."""
    while name_of(node) in ("view", "reshape") and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return isinstance(node_value(node), torch.nn.Parameter)
