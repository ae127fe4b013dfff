"""The expert function under construction, and whether the copies of a loop compute the same.

Rules write one call per operation on one expert's rows. Inputs are placeholders that remember the outer node they stand
for and the role it plays. Copies of a loop share one graph: each has written an expression of its own, and `unify`
walks them side by side. Operations and constants must agree; where one copy reads parameter p and the other q, p and q
are one parameter of the expert function, which an expert finds in one of three ways:

    one tensor per expert        W_0, W_1, ...  (an nn.ModuleList of experts)
    entries of one table         W[0], W[1], ...
    one tensor for all experts   the same one in every copy
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from memfine_fx.compat.tensors import tree_flatten, tree_leaves
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import computed_from, is_same_view, node_value, static_size
from memfine_fx.passes.read.values import LoopIteration
from memfine_fx.records import ParamKind

__all__ = ["FLAT", "Expressions", "Input", "Param", "Role", "RowsDiffer"]

aten = torch.ops.aten

FLAT = -1
"""In place of a table's dimension of experts: they stand one behind the other in all of the tensor."""

Role = Literal["rows", "weight", "table", "entry", "whole", "column"]
"""What an outer node is to the experts: the tokens; a weight for each choice ([T,K]) or for each expert ([T,E]), see
`Input.is_gathered`; a table of parameters, one entry of a table, a whole parameter; one expert's weight of each
token."""


@dataclass(frozen=True)
class Input:
    """The outer node that a placeholder stands for, and its role.

    `expert` is the expert of an entry or a column; `dim` is the dimension of a table's experts.
    """

    role: Role
    outer: fx.Node
    expert: int | None = None
    is_gathered: bool = False
    dim: int = 0


@dataclass(frozen=True)
class Param:
    """A parameter of the expert function: how an expert finds it, the outer nodes that hold it, a table's `dim`."""

    kind: ParamKind
    nodes: tuple[fx.Node, ...]
    dim: int = 0


class RowsDiffer(CannotChunk):
    """Copies that read different tokens: results of experts that ran before the region begins.

    Args:
        leaves: the outer nodes that were taken for tokens.
    """

    def __init__(self, leaves: Sequence[fx.Node], node: object) -> None:
        super().__init__(Reason.EXPERTS_DIFFER, "experts take their rows from different tensors", node)
        self.leaves = tuple(leaves)


class Expressions:
    """One graph of calls on one expert's rows."""

    def __init__(self) -> None:
        self.params: dict[fx.Node, Param] = {}
        self.columns: tuple[fx.Node, ...] = ()
        self._graph = fx.Graph()
        self._inputs: dict[Input, fx.Node] = {}
        self._anchor = self._graph.call_function(tuple)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add one call; undoing an unsqueeze gives back what it wrapped.

        Raises:
            CannotChunk: an argument is a symbolic number, which an expert function could not be given.
        """
        # It would be one length for all calls of a body, and chunks differ in theirs.
        if any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves((args, kwargs))):
            raise CannotChunk(Reason.ROWS_NOT_FOLLOWED, "a symbolic number enters row data")
        source = args[0] if args else None
        if target in _UNWRAP and isinstance(source, fx.Node) and source.target is aten.unsqueeze.default:
            wrapped, dim = source.args
            # Copies that reach a row by another way then still have equal expressions, as `unify` asks.
            is_undone = dim == args[1] and args[2:] in ((), (0,))
            if is_undone and isinstance(wrapped, fx.Node):
                return wrapped
        return self._graph.call_function(target, args, kwargs)

    def input(self, one: Input) -> fx.Node:
        """The placeholder of an outer node in a role.

        Raises:
            CannotChunk: copies of a loop have it for a parameter of their own already.
        """
        known = self.params.get(self._inputs[one]) if one in self._inputs else None
        if known is not None and known.kind != "shared":
            raise CannotChunk(
                Reason.EXPERTS_DIFFER, "an expert's parameter is also used outside the loop over experts", one.outer
            )
        if one not in self._inputs:
            # Placeholders must stand before all calls, and new ones are met while calls are written.
            with self._graph.inserting_before(self._anchor):
                self._inputs[one] = self._graph.placeholder(f"input_{len(self._inputs)}")
            self._inputs[one].meta["input"] = one
        return self._inputs[one]

    def inputs_of(self, result: fx.Node) -> dict[fx.Node, Input]:
        """The placeholders that an expression reads, in the order in which they were met."""
        reached = computed_from([result])
        return {node: origin for origin, node in self._inputs.items() if node in reached}

    def is_of_one_expert(self, result: fx.Node) -> bool:
        """Whether an expression reads one entry of a table, no other expert having been put beside it."""
        inputs = self.inputs_of(result).items()
        return any(origin.role == "entry" and placeholder not in self.params for placeholder, origin in inputs)

    def unify(self, iterations: Sequence[LoopIteration], results: Sequence[fx.Node], node: fx.Node) -> fx.Node:
        """The expression of all copies, written with copy 0's; what its parameters stand for goes to `params`.

        Args:
            iterations: all experts in order, for one choice after the other where the loop runs over choices too.
            results: the copies' expressions.
            node: for refusals.

        Raises:
            CannotChunk: two copies differ, or a parameter mixes tables and tensors.
            RowsDiffer: their rows come from different tensors.
        """
        walks = [_Walk(iteration, node) for iteration in iterations]
        for walk, result in zip(walks, results, strict=True):
            walk.pair(results[0], result)
        # From here on copy 0's calls, with expert e's tensors in the place of its own, are copy e's calls.
        num_experts = 1 + max(iteration.expert or 0 for iteration in iterations)
        for walk in walks[num_experts:]:
            # An expert has one tensor for each parameter, so its copies for further choices must read the same ones.
            if walk.met != walks[walk.iteration.expert or 0].met:
                raise CannotChunk(
                    Reason.EXPERTS_DIFFER, f"expert {walk.iteration.expert} differs between a token's choices", node
                )
        # Only copy 0 met its own placeholders, so its keys are those of all walks.
        for placeholder in walks[0].met:
            self._give_param(placeholder, [walk.met[placeholder] for walk in walks[:num_experts]], node)
        return results[0]

    @staticmethod
    def num_alike(iterations: Sequence[LoopIteration], results: Sequence[fx.Node], node: fx.Node) -> int:
        """How many copies, from the first one on, compute the same."""
        for place, (iteration, result) in enumerate(zip(iterations, results, strict=True)):
            try:
                _Walk(iteration, node).pair(results[0], result)
            except CannotChunk:
                return place
        return len(iterations)

    def _give_param(self, placeholder: fx.Node, members: list[Input], node: fx.Node) -> None:
        roles = {member.role for member in members}
        outers = tuple(member.outer for member in members)
        # Sums may be read more than once, each time as a whole.
        if placeholder in self.params and len(set(members)) == 1:
            return  # copies were put together before, and this is what stands for all of them since
        if roles == {"rows"}:
            if len(set(outers)) > 1:
                raise RowsDiffer(list(dict.fromkeys(outers)), node)
            return
        if roles == {"column"} and len(members) > 1:
            # An expert that read another one's weights would be a correct loop, and no table in order.
            if [member.expert for member in members] != list(range(len(members))):
                raise CannotChunk(Reason.EXPERTS_DIFFER, "an expert has several weight columns, or another's", node)
            self.columns = outers
            return
        # Each copy may write the view of the same weights anew.
        if roles == {"weight"} and all(is_same_view(outers[0], outer) for outer in outers):
            return
        self._set_param(placeholder, _param(members, roles, outers, node), node)

    def _set_param(self, placeholder: fx.Node, param: Param, node: fx.Node) -> None:
        if self.params.setdefault(placeholder, param) != param:
            raise CannotChunk(Reason.EXPERTS_DIFFER, "a parameter is found in two ways", node)

    def finish(self, result: fx.Node, order: Sequence[fx.Node]) -> fx.GraphModule:
        """The function that returns `result`, its arguments being these placeholders."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        params = 0
        for source in order:
            role = source.meta["input"].role
            name = {"rows": "rows", "weight": "weight", "column": "weight"}.get(role, f"param_{params}")
            params += name.startswith("param")
            env[source] = graph.placeholder(name)
            env[source].meta["outer"] = source.meta["input"].outer
        reached = computed_from([result])
        # Copies share this graph; what other copies wrote is unreached and stays behind.
        for node in self._graph.nodes:
            if node.op == "call_function" and node is not self._anchor and node in reached:
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(env[result])
        return fx.GraphModule(torch.nn.Module(), graph)


_UNWRAP = (aten.squeeze.dim, aten.select.int)


def _param(members: list[Input], roles: set[Role], outers: tuple[fx.Node, ...], node: fx.Node) -> Param:
    if roles == {"entry"}:
        is_one_table = all(is_same_view(outers[0], outer) for outer in outers)  # each expert may view it anew
        if is_one_table and [member.expert for member in members] == list(range(len(members))):
            return Param("expert", outers[:1])
        raise CannotChunk(Reason.EXPERTS_DIFFER, "an expert reads another expert's entry of a table", node)
    if roles != {"whole"}:
        raise CannotChunk(Reason.EXPERTS_DIFFER, "some experts read a table, others tensors of their own", node)
    if len(set(outers)) == 1:
        if any(static_size(size) is None for size in _tensor(outers[0]).shape):
            raise CannotChunk(Reason.EXPERTS_DIFFER, "the experts read all tokens at once", node)
        return Param("shared", outers[:1])
    # One compiled body serves all experts, and was traced for one layout.
    if len(set(map(_layout, outers))) > 1:
        raise CannotChunk(Reason.LAYOUTS_DIFFER, "the experts' parameters differ in shape, strides or dtype", node)
    return Param("each", outers)


def _tensor(node: fx.Node) -> torch.Tensor:
    value = node_value(node)
    assert isinstance(value, torch.Tensor)
    return value


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value = _tensor(node)
    return tuple(map(str, value.shape)), tuple(map(str, value.stride())), value.dtype, value.device


class _Walk:
    """Copy 0's expression beside another's.

    `met` tells for each of copy 0's placeholders what the other copy reads in its place.
    """

    def __init__(self, iteration: LoopIteration, node: fx.Node) -> None:
        self.iteration = iteration
        self.met: dict[fx.Node, Input] = {}
        self._node = node
        self._visited: dict[fx.Node, fx.Node] = {}

    def pair(self, left: fx.Node, right: fx.Node) -> None:
        pending = [(left, right)]
        while pending:
            a, b = pending.pop()
            # What copy 0 computes once and uses twice, another copy may have computed twice, and differently.
            known = self._visited.get(a)
            if known is not None:
                if known is not b:
                    raise CannotChunk(
                        Reason.EXPERTS_DIFFER,
                        f"experts 0 and {self.iteration.expert} share intermediate results differently",
                        a,
                    )
                continue
            self._visited[a] = b
            pending.extend(reversed(list(self._inputs(a, b))))

    def _inputs(self, a: fx.Node, b: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Compare two nodes; the pairs of their inputs."""
        if a.op == b.op == "placeholder":
            self.met[a] = b.meta["input"]
            return
        leaves_a, spec_a = tree_flatten((a.args, a.kwargs))
        leaves_b, spec_b = tree_flatten((b.args, b.kwargs))
        if a.op != b.op or a.target != b.target or spec_a != spec_b:
            raise self._differ()
        for leaf, other in zip(leaves_a, leaves_b, strict=True):
            if isinstance(leaf, fx.Node) and isinstance(other, fx.Node):
                yield leaf, other
            elif isinstance(leaf, fx.Node) or isinstance(other, fx.Node) or leaf != other:
                raise self._differ()

    def _differ(self) -> CannotChunk:
        return CannotChunk(
            Reason.EXPERTS_DIFFER, f"experts 0 and {self.iteration.expert} compute different things", self._node
        )
