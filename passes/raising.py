"""Raise: from a candidate to the one canonical record, or a refusal with its reason.

Steps, for each cut worth trying: check that cutting there is safe; normalise it to functional ATen; interpret
it over layouts with the rules of the first family whose operations it uses; take the expert function. The
first cut that goes through wins; if none does, the reason of the one that got furthest is reported.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import (
    Dataflow,
    is_float_tensor,
    is_only_asserted,
    node_value,
    provenance,
    same_size,
    static_size,
    target_name,
    written_node,
)
from memfine_fx.passes.dense_weights import DenseWeights
from memfine_fx.passes.dispatch import DISPATCH_RULES
from memfine_fx.passes.families import combining, dense, einsum, gathered, grouped, loops, slots
from memfine_fx.passes.find import num_stacked_experts
from memfine_fx.passes.layouts import Combined, Lead, RowInterpreter, Rows, Rules, Sizes
from memfine_fx.passes.loops.dense import DENSE_LOOP_RULES, read_dense_loop
from memfine_fx.passes.loops.roll import Rolled, is_loop, roll
from memfine_fx.passes.loops.slot_lists import SlotList, slot_lists
from memfine_fx.passes.loops.slot_roll import roll_slot_list
from memfine_fx.passes.modes import Modes, gradient_stop, modes_at
from memfine_fx.passes.moves import MOVE_RULES
from memfine_fx.passes.normalize import NormalizedRegion, normalize
from memfine_fx.passes.rowwise import ROWWISE_RULES, pointwise_rule
from memfine_fx.records import Candidate, Cut, ExpertFunction, MoERegion, ParamKind, RegionDims, SlotLayout

__all__ = ["FAMILIES", "raise_region"]

FAMILIES: tuple[tuple[str, Rules], ...] = (
    ("grouped", grouped.RULES),
    ("gathered", gathered.RULES),
    ("loops", loops.RULES),
    ("dense", {**dense.RULES, **DENSE_LOOP_RULES}),
    ("einsum", einsum.RULES),
    ("combining", combining.RULES),
)
"""Spellings in the order in which they are tried."""


def raise_region(candidate: Candidate) -> MoERegion:
    """The region of `candidate`.

    Raises:
        CannotChunk: no cut of it is safe, spelled in a known way and proved row-wise.
    """
    flow = Dataflow(candidate.graph_module.graph)
    refusals: list[CannotChunk] = []
    for raise_one in _attempts(candidate, flow):
        try:
            return raise_one()
        except CannotChunk as refusal:
            refusals.append(refusal)
    if not candidate.cuts:
        raise CannotChunk("the experts' results do not meet in one [T,H] tensor", candidate.seed)
    raise max(refusals[: len(candidate.cuts)], key=_progress)


def _attempts(candidate: Candidate, flow: Dataflow) -> Iterator[Callable[[], MoERegion]]:
    """Ways to raise a candidate, the fullest first: routed cuts, then rows in slots alone."""
    for cut in candidate.cuts:
        yield functools.partial(_raise_cut, candidate, cut, flow)
        if not cut.has_dense_weights and _picks_from_stack(cut):
            yield functools.partial(_raise_cut, candidate, cut, flow, rolls_stacks=True)
    if candidate.seed.op == "placeholder":
        return
    for found in slot_lists(flow, flow.descendants([candidate.seed])):
        if set(candidate.expert_ops) <= set(found.cut.nodes):
            yield functools.partial(_raise_slot_list, candidate, found, flow)
    for cut, rows in slots.slot_cuts(flow, candidate.expert_ops):
        for dim in slots.expert_dims(rows, num_stacked_experts(candidate.expert_ops)):
            yield functools.partial(_raise_slots, candidate, cut, flow, rows, dim)


def _picks_from_stack(cut: Cut) -> bool:
    """Whether a cut picks by index out of stacked results."""
    names = set(map(target_name, cut.nodes))
    return bool(names & {"stack", "cat"}) and bool(names & {"gather", "take_along_dim", "getitem"})


def _progress(refusal: CannotChunk) -> bool:
    """Whether a cut failed for a better reason than that its exit or its index was not the right one."""
    return not any(words in refusal.reason for words in _WRONG_CUT)


_WRONG_CUT = ("the exit holds", "rule for aten.scatter", "rule for aten.stack")


def _raise_cut(candidate: Candidate, cut: Cut, flow: Dataflow, *, rolls_stacks: bool = False) -> MoERegion:
    modes = _modes_of(cut, candidate, flow)
    assert cut.expert_index is not None
    index = node_value(cut.expert_index)
    assert isinstance(index, torch.Tensor)
    sizes = _sizes(index, cut.num_token_dims)
    region = normalize(cut, modes)
    rolled = roll(region, cut.expert_index, cut.num_token_dims, sizes.top_k) if _holds_loop(region, cut) else None
    weights = DenseWeights(cut, flow, modes, sizes)
    loop = read_dense_loop(region, weights.columns()) if cut.has_dense_weights or rolls_stacks else None
    rolled = rolled if loop is None else loop.rolled
    interpreter = _interpreter(region if rolled is None else rolled.region, cut, sizes, rolled)
    if rolled is not None:
        interpreter.num_experts = rolled.num_experts
    interpreter.dense_weights = weights.nodes
    interpreter.weight_columns = () if loop is None else loop.columns
    result = _contribution(interpreter, interpreter.run(), cut)
    if loop is not None and loop.base is not None:
        result = dataclasses.replace(result, base=loop.base)
    if interpreter.routing_weight in weights.nodes and not interpreter.weight_columns:
        weights.check_zero_elsewhere(interpreter.routing_weight, interpreter.num_experts)
    if rolled is not None:
        interpreter.num_experts = rolled.num_experts
    raised = _region(candidate, cut, interpreter, result, rolled)
    hidden = node_value(raised.hidden)
    assert isinstance(hidden, torch.Tensor)
    if hidden.ndim not in (2, cut.num_token_dims + 1):
        raise CannotChunk(f"tokens of shape {tuple(hidden.shape)}; expected [T,H]", interpreter.hidden)
    return raised


def _raise_slots(candidate: Candidate, cut: Cut, flow: Dataflow, rows: fx.Node, expert_dim: int) -> MoERegion:
    """The row-wise part of a capacity model: from rows in their experts' slots to the same slots."""
    modes = _modes_of(cut, candidate, flow)
    return _in_slots(candidate, cut, normalize(cut, modes), rows, expert_dim, None)


def _raise_slot_list(candidate: Candidate, found: SlotList, flow: Dataflow) -> MoERegion:
    """The same where a list of experts takes the slots one by one."""
    modes = _modes_of(found.cut, candidate, flow)
    rolled = roll_slot_list(normalize(found.cut, modes), found, modes)
    return _in_slots(candidate, found.cut, rolled.region, found.rows, found.dim, rolled)


def _in_slots(
    candidate: Candidate, cut: Cut, region: NormalizedRegion, rows: fx.Node, expert_dim: int, rolled: Rolled | None
) -> MoERegion:
    value = node_value(rows)
    assert isinstance(value, torch.Tensor)
    interpreter = _interpreter(region, cut, Sizes((math.prod(value.shape[:-1]),), 1), rolled)
    lead = interpreter.place_in_slots(rows, expert_dim)
    result = interpreter.run()
    if not isinstance(result, Rows) or result.lead is not lead or not result.per_row:
        raise CannotChunk("rows leave the experts in other slots than they came in", cut.exit)
    raised = _region(candidate, cut, interpreter, Combined(result.expr), rolled)
    return dataclasses.replace(raised, family="slots", slots=SlotLayout(expert_dim, value.ndim))


def _holds_loop(region: NormalizedRegion, cut: Cut) -> bool:
    return cut.expert_index in region.inputs and is_loop(region)


def _interpreter(region: NormalizedRegion, cut: Cut, sizes: Sizes, rolled: Rolled | None) -> RowInterpreter:
    rules = {**ROWWISE_RULES, **MOVE_RULES, **DISPATCH_RULES}
    known_params = {} if rolled is None else rolled.params
    return RowInterpreter(region, cut.expert_index, sizes, FAMILIES, rules, pointwise_rule, known_params)


def _region(
    candidate: Candidate, cut: Cut, interpreter: RowInterpreter, result: Combined, rolled: Rolled | None
) -> MoERegion:
    family = _family(interpreter) if rolled is None else "loops"
    if interpreter.hidden is None or interpreter.num_experts is None:
        raise CannotChunk("no token-indexed input or no expert parameters reach the output", cut.exit)
    hidden = node_value(interpreter.hidden)
    assert isinstance(hidden, torch.Tensor)
    hidden_size = static_size(hidden.shape[-1])
    if hidden_size is None:
        raise CannotChunk(f"tokens of shape {tuple(hidden.shape)}; expected [T,H]", interpreter.hidden)
    params, kinds = _params(interpreter, rolled)
    widths = interpreter.projection_widths or _matmul_widths(interpreter.region)
    sizes = interpreter.sizes
    dims = RegionDims(
        str(sizes.num_tokens), hidden_size, interpreter.num_experts, sizes.top_k, widths[-1] if widths else None
    )
    return MoERegion(
        cut=cut,
        family=family,
        hidden=interpreter.hidden,
        expert_index=cut.expert_index,
        routing_weight=interpreter.routing_weight,
        params=params,
        expert_fn=ExpertFunction(interpreter.finish(result.expr), interpreter.routing_weight is not None, kinds),
        dims=dims,
        where=provenance(candidate.expert_ops[0]),
        drops_out_of_range=family in ("grouped", "loops") and not interpreter.counts_past_the_last,
        base=result.base,
        gathers_weight=interpreter.gathers_weight,
        weight_columns=interpreter.weight_columns,
    )


def _matmul_widths(region: NormalizedRegion) -> list[int]:
    """Inner widths of a rolled loop's plain matmuls."""
    matmuls = [node for node in region.graph_module.graph.nodes if node.target is torch.ops.aten.mm.default]
    values = [node_value(node.args[0]) for node in matmuls]
    return [int(value.shape[1]) for value in values if isinstance(value, torch.Tensor)]


def _params(interpreter: RowInterpreter, rolled: Rolled | None) -> tuple[tuple[fx.Node, ...], tuple[ParamKind, ...]]:
    """Nodes and kinds of the expert function's parameters; those of a rolled loop stand for all experts'."""
    nodes: list[fx.Node] = []
    kinds: list[ParamKind] = []
    for outer, (_, kind) in interpreter.params.items():
        stands_for = None if rolled is None else rolled.params.get(outer)
        nodes.extend([outer] if stands_for is None else stands_for.nodes)
        kinds.append(kind if stands_for is None else stands_for.kind)
    return tuple(nodes), tuple(kinds)


def _sizes(index: torch.Tensor, num_token_dims: int) -> Sizes:
    """T (or B and S) and K; an index without a dimension for choices holds one choice a token."""
    has_choices = index.ndim > num_token_dims
    top_k = int(index.shape[-1]) if has_choices else 1  # a guard where it is symbolic: K belongs to the architecture
    return Sizes(tuple(index.shape[:num_token_dims]), top_k)


def _family(interpreter: RowInterpreter) -> str:
    if interpreter.families_used:
        return next(iter(interpreter.families_used))
    targets = {node.target for node in interpreter.region.graph_module.graph.nodes}
    matmuls = sorted(str(target) for target in targets if "mm" in str(target) or "matmul" in str(target))
    raise CannotChunk(f"no known spelling of experts: matmuls here are {', '.join(matmuls) or 'none'}")


def _contribution(interpreter: RowInterpreter, value: object, cut: Cut) -> Combined:
    """One row's contribution to its token."""
    if isinstance(value, Combined):
        return value
    is_zero_elsewhere = bool(interpreter.weight_columns) and isinstance(value, Rows) and value.off == 0
    if is_zero_elsewhere and isinstance(value, Rows) and Lead(value.lead.atoms) is Lead.TOKEN:
        return Combined(value.expr)
    if interpreter.weight_columns:
        raise CannotChunk("what an expert adds is not proved zero where a token chose others", cut.exit)
    is_single = interpreter.sizes.top_k == 1 and isinstance(value, Rows) and set(value.lead.atoms) <= set("tbsk")
    if is_single and isinstance(value, Rows) and value.per_row and value.lead is not Lead.NONE:
        output = node_value(written_node(cut.exit))
        num_token_dims = sum(bool(set(group) & set("tbs")) for group in value.lead.groups)
        if isinstance(output, torch.Tensor) and output.ndim != num_token_dims + 1:
            raise CannotChunk("the exit holds rows of several dimensions, not yet one vector a token", cut.exit)
        return Combined(value.expr)
    lead = value.lead.value if isinstance(value, Rows) else type(value).__name__
    raise CannotChunk(f"the exit holds {lead}, not rows combined into tokens", cut.exit)


def _modes_of(cut: Cut, candidate: Candidate, flow: Dataflow) -> Modes:
    """The modes of a cut that may be taken out."""
    _check_cut(cut, flow)
    modes = _uniform_modes(cut, modes_at(candidate.graph_module.graph, candidate.start))
    if torch.is_grad_enabled() and not modes.disables_grad:
        _check_gradients_pass(cut, flow)
    return modes


def _check_gradients_pass(cut: Cut, flow: Dataflow) -> None:
    node = gradient_stop(cut.nodes, flow)
    if node is not None:
        name = target_name(node).removeprefix("_get_").removesuffix("_attr")
        raise CannotChunk(f"{name} stops gradients inside the region, which a chunk's backward would not", node)


def _check_cut(cut: Cut, flow: Dataflow) -> None:
    inside = set(cut.nodes)
    num_tokens = None if cut.expert_index is None else node_value(cut.expert_index).shape[0]  # type: ignore[attr-defined]  # a tensor
    for node in cut.nodes:
        outside_users = [user for user in node.users if user not in inside and not is_only_asserted(user)]
        is_routed = is_float_tensor(node) and (num_tokens is None or _is_routed(node, num_tokens))
        if node is not cut.exit and outside_users and is_routed:
            raise CannotChunk(f"routed rows are also used outside the region, by {outside_users[0]}", node)
    _check_mutations(cut, flow, inside)
    _check_written_insides(cut, flow, inside)


def _uniform_modes(cut: Cut, modes: dict[fx.Node, Modes]) -> Modes:
    """The modes of all nodes that compute with floats; they must agree for one op to stand for them."""
    expected = modes[cut.exit]
    for node in cut.nodes:
        if is_float_tensor(node) and modes[node] != expected:
            raise CannotChunk("autocast or gradient mode changes inside the region", node)
    return expected


def _check_written_insides(cut: Cut, flow: Dataflow, inside: set[fx.Node]) -> None:
    """What is written in place may be read after the region only as the exit itself (see `lower`)."""
    replaced = {cut.exit, *flow.mutations.get(cut.exit, ())}
    last = flow.position[cut.exit]
    for alias in flow.aliases(cut.exit):
        late = [user for user in alias.users if user not in inside and flow.position[user] > last]
        if alias not in replaced and late and flow.position[alias] < last:
            raise CannotChunk("another view of the combined output is read after the experts", late[0])
    roots = {flow.root(node) for node in inside}
    for mutation, targets in flow.mutations.items():
        is_outside = mutation not in inside and flow.position[mutation] < last
        if is_outside and any(flow.root(target) in roots for target in targets):
            _refuse_unless_before(cut, flow, mutation, roots & {flow.root(target) for target in targets})


def _refuse_unless_before(cut: Cut, flow: Dataflow, mutation: fx.Node, roots: set[fx.Node]) -> None:
    """A write into an input's storage before the region reads it is ordinary; any other is not ours to order."""
    inputs = {flow.root(node) for node in cut.inputs}
    reads = [flow.position[node] for node in cut.nodes if any(flow.root(s) in roots for s in node.all_input_nodes)]
    if not roots <= inputs or flow.position[mutation] > min(reads, default=-1):
        raise CannotChunk("something outside writes into a tensor of the region", mutation)


def _is_routed(node: fx.Node, num_tokens: int | torch.SymInt) -> bool:
    value = node_value(node)
    return isinstance(value, torch.Tensor) and value.ndim > 1 and not same_size(value.shape[0], num_tokens)


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
            if mutation is cut.exit and not _is_graph_input(flow, target):
                continue  # the exit adds to what it is given, and is all that is read of it afterwards
            is_before_use = mutation not in inside and flow.position[mutation] <= _first_read(cut, flow, written)
            if not is_before_use:
                raise CannotChunk(f"{written} is changed in place between dispatch and combine", mutation)


def _is_graph_input(flow: Dataflow, node: fx.Node) -> bool:
    return flow.root(node).op != "call_function" and flow.root(node).op != "call_method"


def _first_read(cut: Cut, flow: Dataflow, node: fx.Node) -> int:
    aliases = {alias for alias in cut.inputs if flow.root(alias) is flow.root(node)}
    readers = [flow.position[user] for alias in aliases for user in alias.users if user in set(cut.nodes)]
    return min(readers, default=flow.position[cut.exit])
