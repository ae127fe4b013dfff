"""Regions: what was read, as the one canonical record, or a refusal with its reason.

The region is read off: its exit is where the walk ended, its inside whatever ran between its inputs and that exit, its
inputs the outer nodes that the experts' expression reads. Then it is asked whether it may be taken out of the graph:
one mode of autocast and gradients, no gradient stopped inside, nothing written that somebody else reads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from memfine_fx.errors import CannotChunk, MemfineError, Reason
from memfine_fx.passes.dataflow import (
    Dataflow,
    has_unbacked_rows,
    is_float_tensor,
    is_int_tensor,
    node_value,
    provenance,
    static_size,
    target_name,
    tensor_of,
    written_node,
)
from memfine_fx.passes.modes import Modes, modes_at
from memfine_fx.passes.read.dropped import insert_ids
from memfine_fx.passes.read.equal import KnownRegion, repeated
from memfine_fx.passes.read.expressions import Expressions, Input, RowsDiffer, Slot
from memfine_fx.passes.read.frame import Exit, Frame
from memfine_fx.passes.read.lonely import chooses_for_sequences, lonely_seed, sequence_choice
from memfine_fx.passes.read.normal_form import GROUPED_MATMULS
from memfine_fx.passes.read.pulling import MATMULS, behind_views
from memfine_fx.passes.read.reader import Reader
from memfine_fx.passes.read.removable import check_removable
from memfine_fx.passes.read.rules import rule_of
from memfine_fx.passes.read.seeds import frames_of, is_router, masked, reframed, seeds_of
from memfine_fx.passes.read.tables import move_tables
from memfine_fx.passes.read.values import Combined, Rows
from memfine_fx.records import Cut, ExpertFunction, MoERegion, Refusal, RegionDims, SlotLayout

__all__ = ["read_regions"]

log = logging.getLogger(__name__)

_MOST_READINGS = 4
"""Of one frame: each takes results of experts into the region that were tokens in the one before."""


def read_regions(graph_module: fx.GraphModule, start: Modes | None = None) -> list[MoERegion | Refusal]:
    """Regions of one graph, in graph order, and a refusal for each routing decision whose experts are not raised.

    Bodies of higher-order ops are graphs of their own: call this on each, with the modes in which it starts. The graph
    is not changed, but for ids of masks and views of tables.
    """
    nodes = graph_module.graph.nodes
    seeds = seeds_of(graph_module.graph)
    chosen_by_input = [node for node in nodes if chooses_for_sequences(node)]
    if not seeds and not chosen_by_input:
        return []
    body = _Body(Dataflow(graph_module.graph), modes_at(graph_module.graph, start or Modes()), frozenset(seeds))
    outcomes: list[MoERegion | Refusal] = []
    for seed in seeds:
        taken = {one.expert_index for one in outcomes if isinstance(one, MoERegion)}
        outcome = _guarded(_repeated, body, seed, taken) or _guarded(_outcome, body, seed, taken)
        if outcome is not None:
            outcomes.append(outcome)
    inside = {node for one in outcomes if isinstance(one, MoERegion) for node in one.cut.nodes}
    told = [one for one in outcomes if isinstance(one, MoERegion) or body.stopped.get(one) not in inside]
    told = [move_tables(one) if isinstance(one, MoERegion) else one for one in told]
    return [*told, *map(sequence_choice, chosen_by_input)]


@dataclass(frozen=True)
class _Body:
    """One graph, and what is asked of it for every seed. `stopped`: the experts that a refusal is about, which may be
    another seed's; a mask of padding is an input, as an index may be, and reaches them too."""

    flow: Dataflow
    modes: dict[fx.Node, Modes]
    seeds: frozenset[fx.Node]
    known: list[KnownRegion] = field(default_factory=list)
    stopped: dict[Refusal, fx.Node] = field(default_factory=dict)

    def knows(self, seed: fx.Node, region: MoERegion, where: fx.Node) -> MoERegion:
        """The region, which other layers may repeat from now on."""
        self.known.append(KnownRegion(seed, region, where))
        return region

    def refuses(self, stopped: _Refused) -> Refusal:
        """The refusal of these experts."""
        refusal = stopped.refusal
        told = Refusal(provenance(stopped.where), refusal.reason, refusal.details, refusal.node)
        self.stopped[told] = stopped.where
        return told


class _NoExperts(CannotChunk):
    """What is combined is not made of tokens and parameters of experts: a lookup, or a spelling that is not known."""

    def __init__(self, node: fx.Node) -> None:
        details = "no token-indexed input or no expert parameters reach the output"
        super().__init__(Reason.UNKNOWN_SPELLING, details, node)


class _Refused(Exception):
    """A reading that found experts but no region."""

    def __init__(self, refusal: CannotChunk, where: fx.Node) -> None:
        super().__init__(str(refusal))
        self.refusal, self.where = refusal, where


def _guarded(
    read: Callable[..., MoERegion | Refusal | None], body: _Body, seed: fx.Node, taken: set[fx.Node | None]
) -> MoERegion | Refusal | None:
    try:
        return read(body, seed, taken)
    except MemfineError:
        raise
    except Exception as error:  # NOTE: a bug of ours must not take down a model that compiles without us
        log.warning("memfine_fx failed to read what %s chooses; it stays as it was", seed, exc_info=True)
        details = f"internal error, please report it: {type(error).__name__}: {error}"
        return Refusal(provenance(seed), Reason.INTERNAL_ERROR, details, str(seed))


def _repeated(body: _Body, seed: fx.Node, taken: set[fx.Node | None]) -> MoERegion | None:
    """The region of a layer that repeats one that was read, latest first; None where none does."""
    for known in reversed(body.known):
        found = repeated(known, seed, body.flow, body.modes)
        if found is None or found.region.expert_index in taken:
            continue
        try:
            region = check_removable(found.region, body.flow, body.modes)
        except CannotChunk:
            return None  # read it: what is around it may be no obstacle to another exit
        body.known.append(found)
        return region
    return None


def _outcome(body: _Body, seed: fx.Node, taken: set[fx.Node | None]) -> MoERegion | Refusal | None:
    """What a seed's experts are: a region of routed rows, else one of rows in slots, else why not."""
    later = body.flow.descendants([seed]) & body.seeds
    refused: _Refused | None = None
    frames = frames_of(seed)
    for frame in frames:  # grows while it is walked
        if frame.index in taken:
            return None  # two decisions, put together, are one index
        try:
            found = _reading(body, frame, later, frames)
            if found is None and later:  # the next decision may be the same router's, of the same experts
                found = _reading(body, frame, _after_first(body, later), frames)
        except _Refused as stopped:
            refused = refused or stopped
            continue
        if found is not None:
            return body.knows(seed, *found)
    try:
        found = _in_slots(body, frames[0], later) if frames else None
    except _Refused as stopped:
        refused, found = refused or stopped, None
    if found is not None:
        return body.knows(seed, *found)
    if refused is not None:
        return body.refuses(refused)
    if not is_router(seed) or later:  # group-limited routers hold several top-k nodes; only the last one picks experts
        return None
    return lonely_seed(body.flow, seed)


def _after_first(body: _Body, later: set[fx.Node]) -> set[fx.Node]:
    return later - {min(later, key=body.flow.position.__getitem__)}


def _reading(body: _Body, frame: Frame, later: set[fx.Node], frames: list[Frame]) -> tuple[MoERegion, fx.Node] | None:
    """The region of one frame and the node that reports name; None where it leads to no experts.

    It is read again where results of experts were taken for tokens, and where tables that are computed cannot be
    followed expert by expert.
    What was made of the index without a proof may be the index that counts: its frames are added to `frames`.
    """
    forced: frozenset[fx.Node] = frozenset()
    expanded = ""
    for _ in range(_MOST_READINGS):
        reader = Reader(body.flow, body.modes, frame, rule_of, forced, expands_tables=bool(expanded))
        try:
            found = reader.read(later)
            if found is not None:
                region = check_removable(_routed(body, reader, found), body.flow, body.modes)
                why = expanded or reader.why_expanded
                region = replace(region, makes_tables=reader.has_computed_tables, why_expanded=why)
                return region, _first_matmul(region.cut, reader)
            if reader.has_computed_tables:
                expanded = str((reader.refusals or [CannotChunk(Reason.RESULTS_APART, _APART, frame.index)])[0])
                continue
            _add_frames(frame, reader, frames)
            if _expert_nodes(body, reader):
                raise (reader.refusals or [CannotChunk(Reason.RESULTS_APART, _APART, frame.index)])[0]
            return None
        except RowsDiffer as differ:
            more = forced | _between(body.flow, differ.leaves)
            if more == forced:
                raise _Refused(differ, _where(body, reader)) from differ
            forced = more
        except CannotChunk as refusal:
            if reader.has_computed_tables:
                expanded = str(refusal)
                continue
            _add_frames(frame, reader, frames)
            if isinstance(refusal, _NoExperts) and not _expert_nodes(body, reader):
                return None
            raise _Refused(refusal, _where(body, reader)) from refusal
    raise _Refused(
        CannotChunk(Reason.ROWS_NOT_FOLLOWED, "experts take their rows from results of each other", frame.index),
        frame.index,
    )


_APART = "the experts' results do not meet in one [T,H] tensor"


def _add_frames(frame: Frame, reader: Reader, frames: list[Frame]) -> None:
    """Later integers of the index's shape, and masks of it with dropped tokens."""
    known = {one.index for one in frames}
    frames.extend(reframed(frame, node) for node in reversed(reader.indices) if node not in known)
    frames.extend(masked(frame, node) for node in reversed(reader.masks) if node not in known)


def _in_slots(body: _Body, frame: Frame, later: set[fx.Node]) -> tuple[MoERegion, fx.Node] | None:
    """As `_reading`, of the region between rows in their experts' slots; None where there are no slots."""
    reader = Reader(body.flow, body.modes, frame, rule_of)
    try:
        reached = body.flow.descendants([frame.index])
        found = reader.read_slots(reached, later)
        if found is None or not _is_combined(found[0], reached):
            return None  # a layer for each part of any tensor looks the same
        region = check_removable(_slotted(body, reader, *found), body.flow, body.modes)
        return region, _first_matmul(region.cut, reader)
    except CannotChunk as refusal:
        raise _Refused(refusal, _where(body, reader)) from refusal


def _is_combined(results: fx.Node, reached: set[fx.Node]) -> bool:
    """Whether results in slots meet weights or a mask of the routing in a product, or are picked by its index."""
    pending = [results]
    while pending:
        node = pending.pop()
        for user in node.users:
            others = [source for source in user.all_input_nodes if source is not node and source in reached]
            is_picked = target_name(user) in _PICKS and any(map(is_int_tensor, others))
            if is_picked or (target_name(user) in _PRODUCTS and others):
                return True
            if target_name(user) in _KEEP_SLOTS:
                pending.append(user)
    return False


_PICKS = frozenset("getitem index_select gather take_along_dim index_add index_add_ scatter_add scatter_add_".split())
_PRODUCTS = frozenset("einsum matmul bmm mm __matmul__ mul __mul__ mul_ __rmul__".split())
_KEEP_SLOTS = frozenset(
    "view reshape permute transpose to contiguous type_as movedim flatten unflatten squeeze mul __mul__ cat pad".split()
)


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
        raise CannotChunk(Reason.UNREADABLE, f"tokens of shape {tuple(hidden.shape)}; expected [T,H]", inputs.hidden)
    if out.ndim not in (2, num_token_dims + 1):
        raise CannotChunk(
            Reason.RESULTS_APART, "the exit holds rows of several dimensions, not yet one vector a token", found.node
        )
    return _record(body, reader, cut, inputs, expr, base, None)


def _slotted(body: _Body, reader: Reader, node: fx.Node, rows: Rows) -> MoERegion:
    assert rows.expr is not None and reader.slots is not None
    inputs = _Inputs.of(reader.expressions, rows.expr, node)
    if inputs.hidden is not reader.slots.root or inputs.weight is not None:
        raise CannotChunk(Reason.RESULTS_APART, "rows leave the experts in other slots than they came in", node)
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
            raise CannotChunk(Reason.ROWS_NOT_FOLLOWED, f"two routing weights, {names}; expected one", node)
        params = [placeholder for placeholder in found if placeholder not in (*rows, *weights)]
        slots = tuple(_slot_of(expressions, placeholder, found[placeholder], node) for placeholder in params)
        if not rows or not any(slot.kind != "shared" for slot in slots):
            raise _NoExperts(node)
        weight = found[weights[0]] if weights else None
        is_column = weight is not None and weight.role == "column"
        if is_column and not expressions.columns:
            raise CannotChunk(Reason.ROWS_NOT_FOLLOWED, "a weight of one expert stands for all", node)
        columns = expressions.columns if is_column else ()
        return _Inputs((*rows, *weights, *params), outers.pop(), weight, columns, slots)


def _slot_of(expressions: Expressions, placeholder: fx.Node, one: Input, node: fx.Node) -> Slot:
    known = expressions.slots.get(placeholder)
    if known is not None:
        return known
    if one.role == "entry":
        raise CannotChunk(Reason.ROWS_NOT_FOLLOWED, "one entry of a table stands for all experts'", node)
    return Slot("expert", (one.outer,), one.dim) if one.role == "table" else Slot("shared", (one.outer,))


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
        raise CannotChunk(Reason.UNREADABLE, f"tokens of shape {tuple(hidden.shape)}; expected [T,H]", inputs.hidden)
    if num_experts is None:
        raise _NoExperts(cut.exit)
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
        where=provenance(_first_matmul(cut, reader)),
        drops_out_of_range=family in ("grouped", "loops") and not reader.counts_past_the_last,
        base=base,
        gathers_weight=is_gathered,
        weight_columns=inputs.columns,
        slots=slots,
        expert_dims=tuple(slot.dim for slot in inputs.slots for _ in slot.nodes),
        stops=tuple(node for node in cut.nodes if node in reader.stops),
    )  # fmt: skip


def _family(reader: Reader, node: fx.Node) -> str:
    if not reader.families:
        raise CannotChunk(Reason.UNKNOWN_SPELLING, "no known spelling of experts", node)
    return next(iter(reader.families))


def _first_matmul(cut: Cut, reader: Reader) -> fx.Node:
    """Of the experts, in graph order: what the report names."""
    names = (node for node in cut.nodes if node in reader.expert_nodes or target_name(node) in MATMULS)
    return next(names, cut.exit)


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
