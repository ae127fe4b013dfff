"""Whether a region that was read may be taken out of its graph: what is around it, not what is in it.

Its routed rows must be read by nobody else, nothing may write into what it reads or holds while it runs, one autocast
and one gradient mode must hold for all of it, and nothing in it may stop gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch
from torch import fx

from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.memory.sizes import size_expr
from memfine_fx.passes.dataflow import (
    Dataflow,
    computed_from,
    in_code,
    is_float_tensor,
    is_only_asserted,
    node_value,
    same_size,
    static_size,
    tensor_of,
)
from memfine_fx.passes.modes import gradient_stop
from memfine_fx.passes.ops import target_name
from memfine_fx.records import Cut, Modes, MoERegion

__all__ = ["check_removable"]


def check_removable(region: MoERegion, flow: Dataflow, modes_at: dict[fx.Node, Modes]) -> MoERegion:
    """The region itself.

    Raises:
        CannotChunk: a call in its place would change what the graph computes, or its gradients.
    """
    cut = region.cut
    inside = set(cut.nodes)
    _check_floats_stay_inside(cut, flow, inside)
    _check_assertions(cut, inside)
    _check_mutations(cut, flow, inside)
    _check_written_insides(cut, flow, inside)
    modes = _uniform_modes(cut, modes_at)
    if torch.is_grad_enabled() and not modes.disables_grad:
        node = gradient_stop([node for node in cut.nodes if node not in region.stops], flow)
        node = region.stops[0] if node is None and _leaves_without_gradient(region) else node
        if node is not None:
            name = target_name(node).removeprefix("_get_").removesuffix("_attr")
            raise CannotChunk(
                Reason.GRADIENTS_STOP,
                f"{name} stops gradients inside the region, which a chunk's backward would not",
                node,
            )
    return region


def _leaves_without_gradient(region: MoERegion) -> bool:
    """Whether something trained is read behind `stops` only: a chunk's backward would give it zeros, not nothing."""
    if not region.stops:
        return False
    graph = region.expert_fn.graph_module.graph

    def is_stop(node: fx.Node) -> bool:
        return node.target is torch.ops.aten.view.dtype and not node.args[1].is_floating_point  # type: ignore[union-attr]

    reached = computed_from(graph.output_node().all_input_nodes, is_stop)
    # Arguments of an expert function: rows, then the weight if there is one, then parameters.
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    params = iter(region.params)
    for kind, placeholder in zip(
        region.expert_fn.param_kinds, placeholders[1 + region.expert_fn.has_weight :], strict=True
    ):
        nodes = [next(params) for _ in range(region.dims.num_experts if kind == "each" else 1)]
        if placeholder not in reached and any(tensor_of(node).requires_grad for node in nodes):
            return True
    return False


def _check_floats_stay_inside(cut: Cut, flow: Dataflow, inside: set[fx.Node]) -> None:
    """Refuse routed rows that are read outside; results of writes in place that the exit replaces may be read."""
    replaced = {cut.exit, *flow.mutations.get(cut.exit, ())}
    num_tokens = None if cut.expert_index is None else tensor_of(cut.expert_index).shape[0]
    for node in cut.nodes:
        outside_users = [user for user in node.users if user not in inside and not is_only_asserted(user)]
        # Integers, and floats with one row a token, may stay in the graph for their readers: they hold no routed rows.
        is_routed = is_float_tensor(node) and (num_tokens is None or _is_routed(node, num_tokens))
        if node not in replaced and outside_users and is_routed:
            raise CannotChunk(
                Reason.ROWS_LEAVE,
                f"routed rows are also used outside the region, by {outside_users[0]}",
                in_code(outside_users[0], node),
            )


def _check_assertions(cut: Cut, inside: set[fx.Node]) -> None:
    """Assertions about sizes inside go with the region, so they must be such as reading has proved.

    Those that Dynamo writes say that sizes of operands agree, or that a number of places, or one that agrees with it,
    is neither negative nor more than there are.
    """
    asserted: dict[fx.Node, sympy.Basic] = {}
    for node in cut.nodes:
        for condition in _asserted(node, inside):
            value = node_value(condition)
            if isinstance(value, torch.SymBool):
                asserted[condition] = value.node.expr
    consistent = [expr for expr in asserted.values() if _is_consistency(expr)]
    for condition, expr in asserted.items():
        if expr not in consistent:
            sizes = set(expr.args[:1])
            sizes.update(*(equal.args for equal in consistent if isinstance(equal, sympy.Eq) and sizes & {*equal.args}))
            if not any(_is_below_places(size, expr, cut) for size in sizes):
                raise CannotChunk(Reason.ROWS_LEAVE, f"it is asserted of an expert's rows that {expr}", condition)


def _asserted(node: fx.Node, inside: set[fx.Node]) -> Iterator[fx.Node]:
    """Conditions that are made of a node's sizes and asserted."""
    for user in node.users:
        if user not in inside and is_only_asserted(user):
            if any(target_name(reader) == "_assert_scalar" for reader in user.users):
                yield user
            yield from _asserted(user, inside)


def _is_consistency(expr: sympy.Basic) -> bool:
    if isinstance(expr, sympy.Eq):
        sides = sorted(expr.args, key=lambda side: side.is_number)
        return not (sides[0].is_Symbol and sides[1].is_number)
    return expr == sympy.true or (isinstance(expr, sympy.Ge) and expr.args[1] == 0)


def _is_below_places(size: sympy.Basic, expr: sympy.Basic, cut: Cut) -> bool:
    """Whether it is `u <= n`, and `size` a number of places in a mask of n entries, or of an expert's rows among n."""
    if not isinstance(expr, sympy.Le) or not expr.args[1].is_number:
        return False
    makers = (node for node in cut.nodes for value in tree_leaves(node_value(node)) if _has_size(value, size))
    of_places = [
        *next(makers, cut.exit).all_input_nodes[-1:],
        *([] if cut.expert_index is None else [cut.expert_index]),
    ]
    values = [value for value in map(node_value, of_places) if isinstance(value, torch.Tensor) and value.ndim]
    lengths = [static_size(value.numel()) for value in values]
    return any(length is not None and length <= expr.args[1] for length in lengths)


def _has_size(value: object, size: sympy.Basic) -> bool:
    return isinstance(value, torch.Tensor) and any(size_expr(length) == size for length in value.shape)


def _is_routed(node: fx.Node, num_tokens: int | torch.SymInt) -> bool:
    value = node_value(node)
    return isinstance(value, torch.Tensor) and value.ndim > 1 and not same_size(value.shape[0], num_tokens)


def _uniform_modes(cut: Cut, modes: dict[fx.Node, Modes]) -> Modes:
    """The modes of all nodes that compute with floats; they must agree for one op to stand for them."""
    # The exit is replaced by the call, and what reads it was recorded in these modes.
    expected = modes[cut.exit]
    for node in cut.nodes:
        if is_float_tensor(node) and modes[node] != expected and not _is_constant(node, modes[node], expected):
            raise CannotChunk(Reason.MODES_CHANGE, "autocast or gradient mode changes inside the region", node)
    return expected


def _is_constant(node: fx.Node, modes: Modes, expected: Modes) -> bool:
    """Whether gradients are switched off where there are none: a frozen table that is dequantized under no_grad."""
    sources = [node_value(source) for source in node.all_input_nodes]
    is_frozen = not any(isinstance(value, torch.Tensor) and value.requires_grad for value in sources)
    return is_frozen and modes.autocast == expected.autocast


def _check_written_insides(cut: Cut, flow: Dataflow, inside: set[fx.Node]) -> None:
    """Refuse other views of a tensor written inside that are read after the region: only the exit is replaced."""
    replaced = {cut.exit, *flow.mutations.get(cut.exit, ())}
    last = flow.position[cut.exit]
    for alias in flow.aliases(cut.exit):
        late = [user for user in alias.users if user not in inside and flow.position[user] > last]
        if alias not in replaced and late and flow.position[alias] < last:
            raise CannotChunk(
                Reason.RESULTS_APART,
                "another view of the combined output is read after the experts",
                in_code(late[0], alias),
            )
    roots = {flow.root(node) for node in inside}
    for mutation, targets in flow.mutations.items():
        is_outside = mutation not in inside and flow.position[mutation] < last
        if is_outside and any(flow.root(target) in roots for target in targets):
            _refuse_unless_before(cut, flow, mutation, roots & {flow.root(target) for target in targets})


def _refuse_unless_before(cut: Cut, flow: Dataflow, mutation: fx.Node, roots: set[fx.Node]) -> None:
    """A write into an input's storage before the region reads it is ordinary; any other is not ours to order."""
    # The call runs where the exit stood, after writes that came before the region's first read.
    inputs = {flow.root(node) for node in cut.inputs}
    reads = [flow.position[node] for node in cut.nodes if any(flow.root(s) in roots for s in node.all_input_nodes)]
    if not roots <= inputs or flow.position[mutation] > min(reads, default=-1):
        raise CannotChunk(Reason.WRITTEN_IN_PLACE, "something outside writes into a tensor of the region", mutation)


def _check_mutations(cut: Cut, flow: Dataflow, inside: set[fx.Node]) -> None:
    """Nothing inside may write to an input, and no input may change between dispatch and exit."""
    inputs = {flow.root(node): node for node in cut.inputs}
    first, last = flow.position[cut.nodes[0]], flow.position[cut.exit]
    for mutation, targets in flow.mutations.items():
        if not first <= flow.position[mutation] <= last:
            continue
        for target in targets:
            written = inputs.get(flow.root(target))
            if written is None:
                continue
            if mutation is cut.exit and flow.root(target).op in ("call_function", "call_method"):
                continue  # the exit adds to what it is given, and is all that is read of it afterwards
            is_before_use = mutation not in inside and flow.position[mutation] <= _first_read(cut, flow, written)
            if not is_before_use:
                raise CannotChunk(
                    Reason.WRITTEN_IN_PLACE, f"{written} is changed in place between dispatch and combine", mutation
                )


def _first_read(cut: Cut, flow: Dataflow, node: fx.Node) -> int:
    aliases = {alias for alias in cut.inputs if flow.root(alias) is flow.root(node)}
    readers = [flow.position[user] for alias in aliases for user in alias.users if user in set(cut.nodes)]
    return min(readers, default=flow.position[cut.exit])
