"""Regions: what was read, as the one canonical record, or a refusal with its reason.

The region is read off: its exit is where the walk ended, its inside whatever ran between its inputs and that exit, its
inputs the outer nodes that the experts' expression reads. Then it is asked whether it may be taken out of the graph:
one mode of autocast and gradients, no gradient stopped inside, nothing written that somebody else reads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from memfine_fx.errors import CannotChunk, MemfineError
from memfine_fx.passes.dataflow import (
    Dataflow,
    has_unbacked_rows,
    is_float_tensor,
    is_only_asserted,
    node_value,
    provenance,
    same_size,
    static_size,
    target_name,
    tensor_of,
    written_node,
)
from memfine_fx.passes.lonely import chooses_for_sequences, lonely_seed, sequence_choice
from memfine_fx.passes.modes import Modes, gradient_stop, modes_at
from memfine_fx.passes.read.dropped import insert_ids
from memfine_fx.passes.read.expressions import Expressions, Input, RowsDiffer, Slot
from memfine_fx.passes.read.frame import Exit, Frame
from memfine_fx.passes.read.normal_form import GROUPED_MATMULS
from memfine_fx.passes.read.pulling import MATMULS, behind_views
from memfine_fx.passes.read.reader import Reader
from memfine_fx.passes.read.rules import RULES, pointwise_rule
from memfine_fx.passes.read.seeds import frames_of, is_router, is_seed, masked, reframed
from memfine_fx.passes.read.values import Combined, Rows
from memfine_fx.records import Cut, ExpertFunction, MoERegion, Refusal, RegionDims, SlotLayout

__all__ = ["read_regions"]

log = logging.getLogger(__name__)

_MOST_READINGS = 4
"""Of one frame: each takes results of experts into the region that were tokens in the one before."""


def read_regions(graph_module: fx.GraphModule, start: Modes | None = None) -> list[MoERegion | Refusal]:
    """Regions of one graph, in graph order, and a refusal for each routing decision whose experts are not raised.

    Bodies of higher-order ops are graphs of their own: call this on each, with the modes in which it starts. The graph
    is not changed.
    """
    nodes = graph_module.graph.nodes
    seeds = [node for node in nodes if is_seed(node)]
    chosen_by_input = [node for node in nodes if chooses_for_sequences(node)]
    if not seeds and not chosen_by_input:
        return []
    body = _Body(Dataflow(graph_module.graph), modes_at(graph_module.graph, start or Modes()), frozenset(seeds))
    outcomes: list[MoERegion | Refusal] = []
    for seed in seeds:
        taken = {one.expert_index for one in outcomes if isinstance(one, MoERegion)}
        outcome = _guarded(body, seed, taken)
        if outcome is not None:
            outcomes.append(outcome)
    return [*outcomes, *map(sequence_choice, chosen_by_input)]


@dataclass(frozen=True)
class _Body:
    """One graph, and what is asked of it for every seed."""

    flow: Dataflow
    modes: dict[fx.Node, Modes]
    seeds: frozenset[fx.Node]


class _Refused(Exception):
    """A reading that found experts but no region."""

    def __init__(self, refusal: CannotChunk, where: fx.Node) -> None:
        super().__init__(str(refusal))
        self.refusal, self.where = refusal, where


def _guarded(body: _Body, seed: fx.Node, taken: set[fx.Node | None]) -> MoERegion | Refusal | None:
    try:
        return _outcome(body, seed, taken)
    except MemfineError:
        raise
    except Exception as error:  # NOTE: a bug of ours must not take down a model that compiles without us
        log.warning("memfine_fx failed to read what %s chooses; it stays as it was", seed, exc_info=True)
        reason = f"internal error, please report it: {type(error).__name__}: {error}"
        return Refusal(provenance(seed), reason, str(seed))


def _outcome(body: _Body, seed: fx.Node, taken: set[fx.Node | None]) -> MoERegion | Refusal | None:
    """What a seed's experts are: a region of routed rows, else one of rows in slots, else why not."""
    later = body.flow.descendants([seed]) & body.seeds
    refused: _Refused | None = None
    frames = frames_of(seed)
    for frame in frames:  # grows while it is walked
        if frame.index in taken:
            return None  # two decisions, put together, are one index
        try:
            region = _reading(body, frame, later, frames)
            if region is None and later:  # the next decision may be the same router's, of the same experts
                region = _reading(body, frame, _after_first(body, later), frames)
        except _Refused as stopped:
            refused = refused or stopped
            continue
        if region is not None:
            return region
    try:
        region = _in_slots(body, frames[0], later) if frames else None
    except _Refused as stopped:
        refused, region = refused or stopped, None
    if region is not None:
        return region
    if refused is not None:
        refusal = refused.refusal
        return Refusal(provenance(refused.where), refusal.reason, refusal.node)
    if not is_router(seed) or later:  # group-limited routers hold several top-k nodes; only the last one picks experts
        return None
    return lonely_seed(body.flow, seed)


def _after_first(body: _Body, later: set[fx.Node]) -> set[fx.Node]:
    return later - {min(later, key=body.flow.position.__getitem__)}


def _reading(body: _Body, frame: Frame, later: set[fx.Node], frames: list[Frame]) -> MoERegion | None:
    """One frame read, again where results of experts were taken for tokens; None where it leads to no experts.

    What was made of the index without a proof may be the index that counts: its frames are added to `frames`.
    """
    forced: frozenset[fx.Node] = frozenset()
    for _ in range(_MOST_READINGS):
        reader = Reader(body.flow, body.modes, frame, RULES, pointwise_rule, forced)
        try:
            found = reader.read(later)
            if found is not None:
                return _checked(body, _routed(body, reader, found))
            _add_frames(frame, reader, frames)
            if _expert_nodes(body, reader):
                raise (reader.refusals or [CannotChunk(_APART, frame.index)])[0]
            return None
        except RowsDiffer as differ:
            more = forced | _between(body.flow, differ.leaves)
            if more == forced:
                raise _Refused(differ, _where(body, reader)) from differ
            forced = more
        except CannotChunk as refusal:
            _add_frames(frame, reader, frames)
            raise _Refused(refusal, _where(body, reader)) from refusal
    raise _Refused(CannotChunk("experts take their rows from results of each other", frame.index), frame.index)


_APART = "the experts' results do not meet in one [T,H] tensor"


def _add_frames(frame: Frame, reader: Reader, frames: list[Frame]) -> None:
    """Later integers of the index's shape, and masks of it with dropped tokens."""
    known = {one.index for one in frames}
    frames.extend(reframed(frame, node) for node in reversed(reader.indices) if node not in known)
    frames.extend(masked(frame, node) for node in reversed(reader.masks) if node not in known)


def _in_slots(body: _Body, frame: Frame, later: set[fx.Node]) -> MoERegion | None:
    """The region between rows in their experts' slots; None where there are no slots."""
    reader = Reader(body.flow, body.modes, frame, RULES, pointwise_rule)
    try:
        found = reader.read_slots(body.flow.descendants([frame.index]), later)
        return None if found is None else _checked(body, _slotted(body, reader, *found))
    except CannotChunk as refusal:
        raise _Refused(refusal, _where(body, reader)) from refusal


def _between(flow: Dataflow, leaves: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """What lies between results of several experts and what they share: their tokens."""
    above = [flow.ancestors([leaf]) | {leaf} for leaf in leaves]
    times: dict[fx.Node, int] = {}
    for nodes in above:
        for node in nodes:
            times[node] = times.get(node, 0) + 1
    return frozenset(node for node, count in times.items() if count == 1 and node.op not in ("placeholder", "get_attr"))


def _expert_nodes(body: _Body, reader: Reader) -> list[fx.Node]:
    """Projections of experts that ran, in graph order; also those that no rule understood."""
    found = set(reader.expert_nodes)
    for node in reader.ran:
        is_expert = any(map(_is_expert_operand, node.all_input_nodes))
        if target_name(node) in GROUPED_MATMULS or (target_name(node) in MATMULS and is_expert):
            found.add(node)
    return sorted(found, key=body.flow.position.__getitem__)


def _is_expert_operand(node: fx.Node) -> bool:
    root = behind_views(node)
    value = node_value(root)
    is_table = isinstance(value, torch.nn.Parameter) and value.ndim >= 3
    picked = root.args[0] if target_name(root) in ("getitem", "index_select", "embedding", "gather") else None
    weights = node_value(picked) if isinstance(picked, fx.Node) else None
    is_picked = isinstance(weights, torch.nn.Parameter) and weights.ndim >= 3
    return is_table or is_picked or (is_float_tensor(node) and has_unbacked_rows(node))


def _routed(body: _Body, reader: Reader, found: Exit) -> MoERegion:
    value, frame = found.value, reader.frame
    expr = value.expr
    assert expr is not None
    inputs = _Inputs.of(reader.expressions, expr, found.node)
    roots = {*inputs.outers, frame.index}
    base = value.base if isinstance(value, Combined) else None
    cut = _cut(body.flow, reader, found.node, roots | ({base} if base is not None else set()))
    num_token_dims = len(frame.token_shape)
    hidden, out = tensor_of(inputs.hidden), tensor_of(written_node(found.node))
    if hidden.ndim not in (2, num_token_dims + 1):
        raise CannotChunk(f"tokens of shape {tuple(hidden.shape)}; expected [T,H]", inputs.hidden)
    if out.ndim not in (2, num_token_dims + 1):
        raise CannotChunk("the exit holds rows of several dimensions, not yet one vector a token", found.node)
    return _record(body, reader, cut, inputs, expr, base, None)


def _slotted(body: _Body, reader: Reader, node: fx.Node, rows: Rows) -> MoERegion:
    assert rows.expr is not None and reader.slots is not None
    inputs = _Inputs.of(reader.expressions, rows.expr, node)
    if inputs.hidden is not reader.slots.root or inputs.weight is not None:
        raise CannotChunk("rows leave the experts in other slots than they came in", node)
    cut = _cut(body.flow, reader, node, set(inputs.outers))
    return _record(
        body, reader, cut, inputs, rows.expr, None, SlotLayout(reader.slots.expert_dim, len(reader.slots.shape))
    )


@dataclass(frozen=True)
class _Inputs:
    """What an expression reads: placeholders in the order of arguments, and the outer nodes behind them."""

    order: tuple[fx.Node, ...]
    hidden: fx.Node
    weight: Input | None
    columns: tuple[fx.Node, ...]
    slots: tuple[Slot, ...]

    @property
    def outers(self) -> Iterator[fx.Node]:
        yield self.hidden
        if self.weight is not None:
            yield self.weight.outer
        yield from self.columns
        for slot in self.slots:
            yield from slot.nodes

    @staticmethod
    def of(expressions: Expressions, expr: fx.Node, node: fx.Node) -> _Inputs:
        found = expressions.inputs_of(expr)
        rows = [placeholder for placeholder, one in found.items() if one.role == "rows"]
        outers = {found[placeholder].outer for placeholder in rows}
        if len(outers) > 1:
            raise RowsDiffer(list(outers), node)
        weights = [placeholder for placeholder, one in found.items() if one.role in ("weight", "column")]
        if len(weights) > 1:
            names = " and ".join(str(found[placeholder].outer) for placeholder in weights[:2])
            raise CannotChunk(f"two routing weights, {names}; expected one", node)
        params = [placeholder for placeholder in found if placeholder not in (*rows, *weights)]
        slots = tuple(_slot_of(expressions, placeholder, found[placeholder], node) for placeholder in params)
        if not rows or not any(slot.kind != "shared" for slot in slots):
            raise CannotChunk("no token-indexed input or no expert parameters reach the output", node)
        weight = found[weights[0]] if weights else None
        is_column = weight is not None and weight.role == "column"
        if is_column and not expressions.columns:
            raise CannotChunk("a weight of one expert stands for all", node)
        columns = expressions.columns if is_column else ()
        return _Inputs((*rows, *weights, *params), outers.pop(), weight, columns, slots)


def _slot_of(expressions: Expressions, placeholder: fx.Node, one: Input, node: fx.Node) -> Slot:
    known = expressions.slots.get(placeholder)
    if known is not None:
        return known
    if one.role == "entry":
        raise CannotChunk("one entry of a table stands for all experts'", node)
    return Slot("expert" if one.role == "table" else "shared", (one.outer,))


def _record(
    body: _Body,
    reader: Reader,
    cut: Cut,
    inputs: _Inputs,
    expr: fx.Node,
    base: fx.Node | None,
    slots: SlotLayout | None,
) -> MoERegion:
    frame, num_experts = reader.frame, reader.num_experts
    hidden = tensor_of(inputs.hidden)
    hidden_size = static_size(hidden.shape[-1])
    if hidden_size is None:
        raise CannotChunk(f"tokens of shape {tuple(hidden.shape)}; expected [T,H]", inputs.hidden)
    if num_experts is None:
        raise CannotChunk("no token-indexed input or no expert parameters reach the output", cut.exit)
    num_tokens = frame.num_tokens if slots is None else math.prod(hidden.shape[:-1])
    family = "slots" if slots is not None else _family(reader, cut.exit)
    weight = inputs.weight
    is_gathered = weight is not None and (weight.is_gathered or bool(inputs.columns))
    kinds = tuple(slot.kind for slot in inputs.slots)
    graph_module = reader.expressions.finish(expr, inputs.order)
    return MoERegion(
        cut=cut,
        family=family,
        hidden=inputs.hidden,
        expert_index=None if slots is not None else frame.index if not frame.is_mask else insert_ids(frame.index),
        routing_weight=None if weight is None else weight.outer,
        params=tuple(node for slot in inputs.slots for node in slot.nodes),
        expert_fn=ExpertFunction(graph_module, weight is not None, kinds),
        dims=RegionDims(
            str(num_tokens), hidden_size, num_experts, frame.top_k if slots is None else 1,
            reader.widths[-1] if reader.widths else None,
        ),
        where=provenance(_where(body, reader)),
        drops_out_of_range=family in ("grouped", "loops") and not reader.counts_past_the_last,
        base=base,
        gathers_weight=is_gathered,
        weight_columns=inputs.columns,
        slots=slots,
    )  # fmt: skip


def _family(reader: Reader, node: fx.Node) -> str:
    if not reader.families:
        raise CannotChunk("no known spelling of experts", node)
    return next(iter(reader.families))


def _where(body: _Body, reader: Reader) -> fx.Node:
    """The first expert, or where reading began."""
    experts = _expert_nodes(body, reader)
    return experts[0] if experts else reader.frame.index


def _cut(flow: Dataflow, reader: Reader, exit_node: fx.Node, roots: set[fx.Node]) -> Cut:
    """Whatever ran between the inputs and the exit."""
    inside, pending = {exit_node}, [exit_node]
    while pending:
        for source in flow.digraph.predecessors(pending.pop()):
            if source in reader.ran and source not in roots and source not in inside:
                inside.add(source)
                pending.append(source)
    nodes = tuple(sorted(inside, key=flow.position.__getitem__))
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    index = None if reader.slots is not None else reader.frame.index
    return Cut(index, exit_node, nodes, tuple(inputs), len(reader.frame.token_shape))


# Whether it may be taken out of the graph.


def _checked(body: _Body, region: MoERegion) -> MoERegion:
    cut, flow = region.cut, body.flow
    inside = set(cut.nodes)
    _check_floats_stay_inside(cut, flow, inside)
    _check_mutations(cut, flow, inside)
    _check_written_insides(cut, flow, inside)
    modes = _uniform_modes(cut, body.modes)
    if torch.is_grad_enabled() and not modes.disables_grad:
        node = gradient_stop(cut.nodes, flow)
        if node is not None:
            name = target_name(node).removeprefix("_get_").removesuffix("_attr")
            raise CannotChunk(f"{name} stops gradients inside the region, which a chunk's backward would not", node)
    return region


def _check_floats_stay_inside(cut: Cut, flow: Dataflow, inside: set[fx.Node]) -> None:
    """What is written in place up to the exit is read after it as the exit, see `_check_written_insides`."""
    replaced = {cut.exit, *flow.mutations.get(cut.exit, ())}
    num_tokens = None if cut.expert_index is None else tensor_of(cut.expert_index).shape[0]
    for node in cut.nodes:
        outside_users = [user for user in node.users if user not in inside and not is_only_asserted(user)]
        is_routed = is_float_tensor(node) and (num_tokens is None or _is_routed(node, num_tokens))
        if node not in replaced and outside_users and is_routed:
            raise CannotChunk(f"routed rows are also used outside the region, by {outside_users[0]}", node)


def _is_routed(node: fx.Node, num_tokens: int | torch.SymInt) -> bool:
    value = node_value(node)
    return isinstance(value, torch.Tensor) and value.ndim > 1 and not same_size(value.shape[0], num_tokens)


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
                raise CannotChunk(f"{written} is changed in place between dispatch and combine", mutation)


def _first_read(cut: Cut, flow: Dataflow, node: fx.Node) -> int:
    aliases = {alias for alias in cut.inputs if flow.root(alias) is flow.root(node)}
    readers = [flow.position[user] for alias in aliases for user in alias.users if user in set(cut.nodes)]
    return min(readers, default=flow.position[cut.exit])
