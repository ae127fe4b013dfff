"""Layouts: what each value of a normalised region is, seen from one routed row.

Raising interprets the region over these values instead of numbers. A value knows which dimensions it leads
with (tokens, choices, routed rows in token order, routed rows in expert order, experts) and, for floats, the
expression that computes one expert's rows of it in the expert function under construction. Order is
bookkeeping: gathering and sorting change the lead, never the expression.

Nothing here decides what an operation means; the rules do (`rowwise`, `dispatch`, `families/`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import is_float_tensor, is_top_k_index, node_value, same_size, static_size
from memfine_fx.passes.leads import Lead, regroup
from memfine_fx.passes.normalize import NormalizedRegion
from memfine_fx.records import ParamKind

__all__ = [
    "Combined",
    "Fill",
    "IdKind",
    "Ids",
    "Lead",
    "Outside",
    "RowInterpreter",
    "Rows",
    "Rule",
    "Rules",
    "Sizes",
]


_UNSQUEEZE = torch.ops.aten.unsqueeze.default
_UNWRAP = (torch.ops.aten.squeeze.dim, torch.ops.aten.select.int)


class IdKind(enum.Enum):
    """What the numbers in an index tensor name."""

    EXPERT = "expert of the row"
    ASSIGNMENT = "flat position t*K+k of the row"
    TOKEN = "token of the row"
    INVERSE = "place of the assignment in expert order"
    COUNTS = "rows per expert"
    OFFSETS = "end of each expert's rows"
    EACH = "every expert, in order"


@dataclass(frozen=True)
class Outside:
    """An input of the region whose role its use decides."""

    node: fx.Node


@dataclass(frozen=True)
class Rows:
    """A float tensor, row by row.

    Args:
        lead: leading dimensions.
        expr: node of the expert function: [R, rest...], or [1, rest...] where `per_row` is False
            (an expert's parameter, the same for all its rows); for Lead.NONE the tensor itself.
        per_row: whether rows of one expert may differ.
        off: with a dense lead, the value of every entry whose token did not choose that expert; None where
            it is not one known number.
    """

    lead: Lead
    expr: fx.Node
    per_row: bool
    off: float | None = None


@dataclass(frozen=True)
class Ids:
    """An index tensor; `is_iota` marks 0..n-1 in order."""

    kind: IdKind
    lead: Lead
    is_iota: bool = False


@dataclass(frozen=True)
class Fill:
    """A tensor of one value (None: uninitialised) that something is written into."""

    value: float | None


@dataclass(frozen=True)
class Combined:
    """The result: rows summed back to their tokens.

    Args:
        expr: one contribution, [R,H].
        base: outer node that they are added to, or None.
    """

    expr: fx.Node
    base: fx.Node | None = None


Rule = Callable[["RowInterpreter", fx.Node, tuple[Any, ...], dict[str, Any]], Any]
Rules = Mapping[Any, Rule]


@dataclass(frozen=True)
class Sizes:
    """Leading sizes of a region: those of tokens, [T] or [B,S], may be symbolic; K is a number."""

    token_shape: tuple[int | torch.SymInt, ...]
    top_k: int

    @property
    def num_tokens(self) -> int | torch.SymInt:
        product: int | torch.SymInt = 1
        for size in self.token_shape:
            product = product * size
        return product

    @property
    def num_rows(self) -> int | torch.SymInt:
        return self.num_tokens * self.top_k


class RowInterpreter:
    """Interprets a normalised region over layouts and writes the expert function.

    Args:
        region: what to interpret.
        expert_index: the outer node with the [T,K] expert ids.
        sizes: T and K.
        families: tables of spellings, tried in order; a rule returns NotImplemented to pass on.
        rules: one rule per ATen overload, asked last; an operation without a rule is a refusal.
        fallback: rule for overloads not in `rules`, or None.
        known_params: outer nodes that are parameters of one expert, whatever their shapes look like.
    """

    def __init__(
        self,
        region: NormalizedRegion,
        expert_index: fx.Node | None,
        sizes: Sizes,
        families: Sequence[tuple[str, Rules]],
        rules: Rules,
        fallback: Callable[[Any], Rule | None],
        known_params: Collection[fx.Node] = (),
    ) -> None:
        self.region = region
        self.sizes = sizes
        self.hidden: fx.Node | None = None
        self.routing_weight: fx.Node | None = None
        self.params: dict[fx.Node, tuple[fx.Node, ParamKind]] = {}
        self.num_experts = _num_experts_hint(region.inputs, sizes.token_shape)
        self.projection_widths: list[int] = []
        self.families_used: dict[str, None] = {}
        self.gathers_weight = False
        self.counts_past_the_last = False
        self.dense_weights: frozenset[fx.Node] = frozenset()
        self.weight_columns: tuple[fx.Node, ...] = ()
        self.slot_sizes: tuple[int | torch.SymInt, ...] = ()
        self._slot_input: fx.Node | None = None
        self._slot_lead = Lead.NONE
        self._families = families
        self._rules = rules
        self._fallback = fallback
        self._graph = fx.Graph()
        self._placeholders: dict[str, fx.Node] = {}
        self._anchor = self._graph.call_function(tuple)
        self._env: dict[fx.Node, Any] = {}
        self._expert_index = expert_index
        self._known_params = known_params

    @property
    def has_top_k_ids(self) -> bool:
        return is_top_k_index(self._expert_index)

    def run(self) -> Any:
        """The value of the region's output.

        Raises:
            CannotChunk: an operation has no rule, or its rule cannot prove that rows stay apart.
        """
        inputs = iter(self.region.inputs)
        for node in self.region.graph_module.graph.nodes:
            if node.op == "placeholder":
                self._env[node] = self._input_value(node, next(inputs))
            elif node.op == "output":
                return fx.map_arg(node.args[0], self._env.__getitem__)
            else:
                self._env[node] = self._evaluate(node)
        raise AssertionError("a graph without an output")

    def finish(self, result: fx.Node) -> fx.GraphModule:
        """The expert function that returns `result`: (rows, weight?, *params)."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        order = [name for name in ("rows", "weight") if name in self._placeholders]
        for name in [*order, *(str(placeholder.target) for placeholder, _ in self.params.values())]:
            source = self._placeholders[name]
            env[source] = graph.placeholder(name)
            env[source].meta.update(source.meta)
        for node in self._graph.nodes:
            if node.op == "call_function" and node is not self._anchor:
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(env[result])
        graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), graph)

    # What rules use.

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add one call to the expert function; undoing an unsqueeze gives back what it wrapped."""
        source = args[0] if args else None
        if target in _UNWRAP and isinstance(source, fx.Node) and source.target is _UNSQUEEZE:
            wrapped, dim = source.args
            is_undone = dim == args[1] and args[2:] in ((), (0,))
            if is_undone and isinstance(wrapped, fx.Node):
                return wrapped
        return self._graph.call_function(target, args, kwargs)

    def fake(self, node: fx.Node) -> torch.Tensor:
        """The fake tensor of a node of the region."""
        value = node_value(node)
        if not isinstance(value, torch.Tensor):
            raise CannotChunk("expected a tensor with a recorded shape", node)
        return value

    def place_in_slots(self, hidden: fx.Node, expert_dim: int) -> Lead:
        """Declare an input to be rows in their experts' slots: [...,E,...,H]. Returns its lead."""
        value = node_value(hidden)
        assert isinstance(value, torch.Tensor)
        num_experts = static_size(value.shape[expert_dim])
        assert num_experts is not None
        groups = [str(dim) for dim in range(value.ndim - 1)]
        groups[expert_dim] = "e"
        self.num_experts, self.slot_sizes = num_experts, tuple(value.shape)
        self.hidden = self._slot_input = hidden
        self._slot_lead = Lead(*groups)
        return self._slot_lead

    def size_of(self, atom: str) -> int | torch.SymInt:
        """Size of an atom of a lead."""
        sizes = self.sizes
        if atom.isdigit():
            return self.slot_sizes[int(atom)]
        if atom == "e":
            assert self.num_experts is not None, "a lead of experts comes from a tensor of experts"
            return self.num_experts
        if atom == "s":
            return sizes.token_shape[1] if len(sizes.token_shape) == 2 else 1
        return {"t": sizes.num_tokens, "b": sizes.token_shape[0], "k": sizes.top_k, "r": sizes.num_rows}[atom]

    def regroup(self, lead: Lead, shape: Sequence[int | torch.SymInt]) -> Lead | None:
        """The lead of a reshape to `shape`; None where rows would mix."""
        return regroup(lead, shape, self.size_of)

    def as_rows(self, value: Any, node: fx.Node) -> Rows:
        """`value` as rows; an outside tensor takes the role its shape gives it."""
        if isinstance(value, Rows):
            return value
        if isinstance(value, Outside):
            return self._resolve(value.node, node)
        raise CannotChunk(f"{type(value).__name__.lower()} {value} used as row data", node)

    def as_tokens(self, value: Any, node: fx.Node) -> Rows:
        """`value` as a token-indexed table; only one outside tensor may be that."""
        if isinstance(value, Rows):
            return value
        if not isinstance(value, Outside):
            raise CannotChunk("indexing by token needs a tensor of tokens", node)
        outside = value.node
        if self.hidden not in (None, outside):
            raise CannotChunk(f"two token-indexed inputs, {self.hidden} and {outside}; expected one", node)
        self.hidden = outside
        value, token_shape = node_value(outside), self.sizes.token_shape
        assert isinstance(value, torch.Tensor)
        keeps_dims = len(token_shape) == 2 and value.ndim > 2 and _starts_with(value, token_shape)
        return Rows(Lead("b", "s") if keeps_dims else Lead.TOKEN, self._placeholder("rows", outside), per_row=True)

    def as_expert_table(self, value: Any, node: fx.Node) -> Rows:
        """`value` as a table of one entry per expert."""
        if isinstance(value, Rows) and value.lead is Lead.EXPERT:
            return value
        if not isinstance(value, Outside):
            raise CannotChunk("expected a table of expert parameters, [E,...], from outside the region", node)
        table = node_value(value.node)
        assert isinstance(table, torch.Tensor)
        num_experts = static_size(table.shape[0])
        if num_experts is None:
            raise CannotChunk(f"number of experts is symbolic: {table.shape[0]}", node)
        self.check_num_experts(num_experts, node)
        param = self._param(value.node, "expert")
        return Rows(Lead.EXPERT, self.emit(torch.ops.aten.unsqueeze.default, param, 0), per_row=False)

    def as_weights_of_experts(self, value: Outside, dim: int, lead: Lead, node: fx.Node) -> Rows:
        """The entries of [T,E] weights that the index names: the lowered region gathers them itself."""
        table = node_value(value.node)
        assert isinstance(table, torch.Tensor)
        num_experts = static_size(table.shape[-1])
        has_tokens = num_experts is not None and _has_shape(table, (*self.sizes.token_shape, num_experts))
        if not has_tokens or dim % table.ndim != table.ndim - 1 or isinstance(table, torch.nn.Parameter):
            raise CannotChunk(
                f"gather by expert out of {tuple(table.shape)}; expected one weight a token and expert", node
            )
        assert num_experts is not None
        self.check_num_experts(num_experts, node)
        self.gathers_weight = True
        return self._weight(value.node, node, lead)

    def check_num_experts(self, num_experts: int, node: fx.Node) -> None:
        if self.num_experts not in (None, num_experts):
            raise CannotChunk(f"tables of {self.num_experts} and of {num_experts} experts in one region", node)
        self.num_experts = num_experts

    def matrix_of(self, rows: Rows) -> fx.Node:
        """The [a,b] matrix of a parameter whose expression is [1,a,b]."""
        assert not rows.per_row
        return self.emit(torch.ops.aten.select.int, rows.expr, 0, 0)

    # Internals.

    def _evaluate(self, node: fx.Node) -> Any:
        value = node_value(node)
        if isinstance(value, (torch.SymInt, int)):
            return value
        if _is_only_asserted(node):
            return None
        if node.op != "call_function":
            raise CannotChunk(f"a {node.op} node has no row-wise rule", node)
        args = fx.map_arg(node.args, self._env.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._env.__getitem__)
        for name, rules in self._families:
            result = rules[node.target](self, node, args, kwargs) if node.target in rules else NotImplemented
            if result is not NotImplemented:
                self.families_used[name] = None
                return result
        rule = self._rules.get(node.target) or self._fallback(node.target)
        if rule is None and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CannotChunk("random numbers are drawn inside the experts (dropout)", _describe(node))
        if rule is None:
            raise CannotChunk(f"no row-wise rule for {node.target}", _describe(node))
        return rule(self, node, args, kwargs)

    def _input_value(self, placeholder: fx.Node, outer: fx.Node) -> Any:
        value = node_value(outer)
        if not isinstance(value, torch.Tensor):
            return value
        if outer is self._slot_input:
            return Rows(self._slot_lead, self._placeholder("rows", outer), per_row=True)
        if outer is self._expert_index:
            return Ids(IdKind.EXPERT, _index_lead(len(self.sizes.token_shape), value.ndim))
        return Outside(outer)

    def _resolve(self, outer: fx.Node, node: fx.Node) -> Rows:
        value = node_value(outer)
        assert isinstance(value, torch.Tensor)
        if outer in self._known_params:
            return Rows(Lead.NONE, self._param(outer, "shared"), per_row=False)
        if not is_float_tensor(outer):
            raise CannotChunk(f"an integer tensor from outside the region, {outer}, used as row data", node)
        token_shape, top_k = self.sizes.token_shape, self.sizes.top_k
        num_token_dims = len(token_shape)
        if outer in self.weight_columns:
            return self._weight_column(outer, value, node)
        if outer in self.dense_weights:
            if not _has_shape(value, (*token_shape, self.num_experts)):
                raise CannotChunk(f"weights of shape {tuple(value.shape)}; expected one per token and expert", node)
            self.gathers_weight = True
            weight = self._weight(outer, node, Lead.DENSE if num_token_dims == 1 else Lead("b", "s", "e"))
            return replace(weight, off=0.0)  # proved once the region is raised, see `dense_weights`
        if _has_shape(value, (*token_shape, top_k)) or (top_k == 1 and _has_shape(value, token_shape)):
            return self._weight(outer, node, _index_lead(num_token_dims, value.ndim))
        has_tokens = same_size(value.shape[0], self.sizes.num_tokens) if value.ndim >= 2 else False
        is_token_like = has_tokens or (value.ndim > num_token_dims and _starts_with(value, token_shape))
        if is_token_like and not isinstance(value, torch.nn.Parameter):
            return self.as_tokens(Outside(outer), node)
        if value.ndim >= 2 and static_size(value.shape[0]) == self.num_experts is not None:
            return self.as_expert_table(Outside(outer), node)
        if any(static_size(size) is None for size in value.shape):
            raise CannotChunk(f"an input of symbolic shape {tuple(value.shape)} is neither tokens nor weights", node)
        return Rows(Lead.NONE, self._param(outer, "shared"), per_row=False)

    def _weight_column(self, outer: fx.Node, value: torch.Tensor, node: fx.Node) -> Rows:
        """One expert's weight of every token, [T] or [T,1]; zero where the token chose others, as is proved."""
        self.gathers_weight = True
        num_token_dims = len(self.sizes.token_shape)
        weight = self._weight(outer, node, Lead.TOKEN if num_token_dims == 1 else Lead("b", "s"))
        has_column = value.ndim > num_token_dims
        expr = self.emit(torch.ops.aten.unsqueeze.default, weight.expr, 1) if has_column else weight.expr
        return replace(weight, expr=expr, off=0.0)

    def _weight(self, outer: fx.Node, node: fx.Node, lead: Lead) -> Rows:
        if self.routing_weight not in (None, outer):
            raise CannotChunk(f"two routing weights, {self.routing_weight} and {outer}; expected one", node)
        self.routing_weight = outer
        return Rows(lead, self._placeholder("weight", outer), per_row=True)

    def _param(self, outer: fx.Node, kind: ParamKind) -> fx.Node:
        known = self.params.get(outer)
        if known is not None:
            if known[1] != kind:
                raise CannotChunk(f"{outer} is used both per expert and as a whole", outer)
            return known[0]
        placeholder = self._placeholder(f"param_{len(self.params)}", outer)
        self.params[outer] = (placeholder, kind)
        return placeholder

    def _placeholder(self, name: str, outer: fx.Node) -> fx.Node:
        if name not in self._placeholders:
            with self._graph.inserting_before(self._anchor):
                self._placeholders[name] = self._graph.placeholder(name)
            self._placeholders[name].meta["outer"] = outer
        return self._placeholders[name]


def _describe(node: fx.Node) -> str:
    return f"{node.name} = {node.target}"


def _is_only_asserted(node: fx.Node) -> bool:
    """Whether nothing but assertions reads a node (one-hot checks its index)."""
    if "_assert" in str(node.target):
        return True
    return bool(node.users) and all(map(_is_only_asserted, node.users))


def _num_experts_hint(inputs: Sequence[fx.Node], token_shape: tuple[int | torch.SymInt, ...]) -> int | None:
    """E where all stacked weights among the inputs agree on it; rules check it when they use one."""
    values = [node_value(node) for node in inputs]
    stacks = [
        value
        for value in values
        if isinstance(value, torch.Tensor)
        and value.ndim >= 3
        and (isinstance(value, torch.nn.Parameter) or not _starts_with(value, token_shape))
    ]
    sizes = {
        static_size(value.shape[0]) for value in stacks if all(static_size(size) is not None for size in value.shape)
    }
    return next(iter(sizes)) if len(sizes) == 1 else None


def _index_lead(num_token_dims: int, num_dims: int) -> Lead:
    """Lead of a tensor of the index's shape: tokens, and choices where it has a dimension for them."""
    tokens = ("t",) if num_token_dims == 1 else ("b", "s")
    has_choices = num_dims > num_token_dims
    return Lead(*tokens, "k") if has_choices else Lead(*tokens[:-1], tokens[-1] + "k")


def _has_shape(value: torch.Tensor, shape: tuple[int | torch.SymInt | None, ...]) -> bool:
    return value.ndim == len(shape) and _starts_with(value, shape)


def _starts_with(value: torch.Tensor, shape: tuple[int | torch.SymInt | None, ...]) -> bool:
    return all(size is not None and same_size(size, own) for size, own in zip(shape, value.shape, strict=False))
