"""Regions: one walk for each frame of a routing decision until one gives a region, or a refusal with its reason.

What a walk found becomes a record (`extraction`), and then it is asked whether that region may be taken out of the
graph (`removable`). A walk is tried again where it took results of experts for tokens, or where computed tables could
not be followed; a decision whose layer repeats one that was read is not walked at all (`equal`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
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
    refusal_of,
    static_size,
)
from memfine_fx.passes.modes import Modes, modes_at
from memfine_fx.passes.ops import CASTS, GROUPED_MATMULS, LAYOUTS, LOOKUPS, MATMULS, base_name_of, name_of, target_name
from memfine_fx.passes.read.equal import repeated
from memfine_fx.passes.read.expressions import Input, RowsDiffer
from memfine_fx.passes.read.extraction import NoExperts, region_of_rows, region_of_slots
from memfine_fx.passes.read.frame import Frame, Slots
from memfine_fx.passes.read.masked_ids import move_masks_into_ids
from memfine_fx.passes.read.reader import Reader
from memfine_fx.passes.read.removable import check_removable
from memfine_fx.passes.read.rules import rule_of
from memfine_fx.passes.read.seeds import frames_of, given_sources, is_given, is_router, masked, reframed, seeds_of
from memfine_fx.passes.read.sinking import behind_views, is_parameter_view
from memfine_fx.passes.read.tables import move_tables
from memfine_fx.passes.read.unmatched import (
    chooses_for_sequences,
    makes_integers,
    seems_routed,
    sequence_choice,
    unknown_routers,
    unmatched_router,
)
from memfine_fx.passes.read.values import Rows
from memfine_fx.records import MoERegion, Refusal

__all__ = ["read_regions"]

log = logging.getLogger(__name__)

_MOST_READINGS = 4
"""Of one frame: each takes results of experts into the region that were tokens in the one before."""


def read_regions(graph_module: fx.GraphModule, start: Modes | None = None) -> list[MoERegion | Refusal]:
    """Regions of one graph, in graph order, and a refusal for each routing decision whose experts are not raised.

    Bodies of higher-order ops are graphs of their own: call this on each, with the modes in which it starts. The graph
    is not changed, but for ids of masks, masks in ids and views of tables.
    """
    nodes = graph_module.graph.nodes
    seeds = seeds_of(graph_module.graph)
    if seeds:
        move_masks_into_ids(graph_module.graph)
    chosen_by_input = [node for node in nodes if chooses_for_sequences(node)]
    if not seeds and not chosen_by_input and not any(map(makes_integers, nodes)):
        return []
    body = _Body(Dataflow(graph_module.graph), modes_at(graph_module.graph, start or Modes()), frozenset(seeds))
    outcomes: dict[fx.Node, MoERegion | Refusal] = {}
    for seed in seeds:
        # Two regions from one index, or from an input and a part of it, would both claim its experts.
        claimed = {result.expert_index for result in outcomes.values() if isinstance(result, MoERegion)}
        if not claimed.isdisjoint(given_sources(seed)):
            continue
        outcome = _guarded(_repeated, body, seed, claimed) or _guarded(_outcome, body, seed, claimed)
        if outcome is not None:
            outcomes[seed] = outcome
    # A refusal about experts that another decision got right would report a layer twice; of several about the same
    # experts, the last one is of the decision that is closest to them.
    inside = {node for result in outcomes.values() if isinstance(result, MoERegion) for node in result.cut.nodes}
    last = {experts: seed for seed, experts in body.stopped.items()}
    reported = [
        result
        for seed, result in outcomes.items()
        if (experts := body.stopped.get(seed)) is None or (experts not in inside and last[experts] is seed)
    ]
    reported = [move_tables(result) if isinstance(result, MoERegion) else result for result in reported]
    regions = [result for result in reported if isinstance(result, MoERegion)]
    return [*reported, *map(sequence_choice, chosen_by_input), *unknown_routers(body.flow, regions, body.stopped)]


@dataclass(frozen=True)
class _Body:
    """One graph, and what is asked of it for every seed.

    Args:
        stopped: by seed, the experts that its refusal is about, which may be another seed's: a mask of padding is an
            input, as an index may be, and reaches them too.
    """

    flow: Dataflow
    modes: dict[fx.Node, Modes]
    seeds: frozenset[fx.Node]
    known: list[MoERegion] = field(default_factory=list)
    stopped: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def knows(self, seed: fx.Node, region: MoERegion) -> MoERegion:
        """Return the region of a routing decision, which other layers may repeat from now on."""
        self.known.append(replace(region, seed=seed))
        return self.known[-1]

    def refuses(self, seed: fx.Node, stopped: _Refused) -> Refusal:
        """The refusal of these experts."""
        self.stopped[seed] = stopped.where
        return refusal_of(provenance(stopped.where), stopped.refusal)


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
        region = repeated(known, seed, body.flow, body.modes)
        if region is None or region.expert_index in taken:
            continue
        try:
            return body.knows(seed, check_removable(region, body.flow, body.modes))
        except CannotChunk:
            return None  # read it: what is around it may be no obstacle to another exit
    return None


def _outcome(body: _Body, seed: fx.Node, taken: set[fx.Node | None]) -> MoERegion | Refusal | None:
    """Return the region of a seed's experts (of routed rows, else of rows in slots), or the refusal that says why not.

    None where another region has the index, where a later seed picks the experts, or where the seed is no router.
    """
    later = {other for other in body.flow.descendants([seed]) & body.seeds if not is_given(other)}
    refused: _Refused | None = None
    obstacles: list[CannotChunk | None] = []
    frames = frames_of(seed, body.flow)
    for frame in frames:  # grows while it is walked
        if frame.index in taken:
            return None  # two decisions, put together, are one index
        try:
            reading = _reading(body, frame, later, frames, obstacles)
            # Group-limited routers choose groups first, and then experts among them.
            if reading is None and later:  # the next decision may be the same router's, of the same experts
                first = min(later, key=body.flow.position.__getitem__)
                reading = _reading(body, frame, later - {first}, frames, obstacles)
        except _Refused as stopped:
            refused = refused or stopped
            continue
        if reading is not None:
            return body.knows(seed, reading)
    try:
        reading = _in_slots(body, frames[0], later) if frames else None
    except _Refused as stopped:
        refused, reading = refused or stopped, None
    if reading is not None:
        return body.knows(seed, reading)
    if refused is not None and (not is_given(seed) or seems_routed(body.flow, seed)):
        return body.refuses(seed, refused)
    if not is_router(seed) or later:  # group-limited routers hold several top-k nodes; only the last one picks experts
        return None
    return unmatched_router(body.flow, seed, next(filter(None, obstacles), None))


def _reading(
    body: _Body, frame: Frame, later: set[fx.Node], frames: list[Frame], obstacles: list[CannotChunk | None]
) -> MoERegion | None:
    """The region of one frame; None where it leads to no experts, and then `obstacles` grow by why it does not.

    It is read again where results of experts were taken for tokens, and where tables that are computed cannot be
    followed expert by expert.
    What was made of the index without a proof may be the index that counts: its frames are added to `frames`.
    """
    forced: frozenset[fx.Node] = frozenset()
    expanded = ""
    for _ in range(_MOST_READINGS):
        # A walk's values rest upon what it forced, so that another one begins from nothing.
        reader = Reader(body.flow, body.modes, frame, rule_of, forced, expands_tables=bool(expanded))
        try:
            walk_exit = reader.read(later)
            if walk_exit is not None:
                region = check_removable(region_of_rows(reader, walk_exit), body.flow, body.modes)
                why = expanded or reader.why_expanded
                return replace(region, makes_tables=reader.has_computed_tables, why_expanded=why)
            if reader.has_computed_tables:
                expanded = str((reader.refusals or [reader.apart()])[0])
                continue
            _add_frames(body, frame, reader, frames)
            if _expert_nodes(body, reader):
                raise reader.refusals[0] if reader.refusals else reader.obstacle() or reader.apart()
            obstacles.append(reader.obstacle())
            return None
        except RowsDiffer as differ:
            more = forced | _between(body.flow, differ.leaves)
            if more == forced:
                raise _Refused(_where_rows_meet(body, reader, differ), _where(body, reader)) from differ
            forced = more
        except CannotChunk as refusal:
            if reader.has_computed_tables:
                expanded = str(refusal)
                continue
            _add_frames(body, frame, reader, frames)
            if isinstance(refusal, NoExperts) and not _expert_nodes(body, reader):
                obstacles.append(reader.obstacle())
                return None
            raise _Refused(refusal, _where(body, reader)) from refusal
    raise _Refused(
        CannotChunk(Reason.ROWS_NOT_FOLLOWED, "experts take their rows from results of each other", frame.index),
        frame.index,
    )


def _add_frames(body: _Body, frame: Frame, reader: Reader, frames: list[Frame]) -> None:
    """Later integers of the index's shape, and masks of it with dropped tokens."""
    known = {other.index for other in frames}
    frames.extend(reframed(frame, node, body.flow) for node in reversed(reader.indices) if node not in known)
    frames.extend(masked(frame, node) for node in reversed(reader.masks) if node not in known)


def _in_slots(body: _Body, frame: Frame, later: set[fx.Node]) -> MoERegion | None:
    """As `_reading`, of the region between rows in their experts' slots; None where there are no slots."""
    reached = body.flow.descendants([frame.index])
    reader = SlotReader(body.flow, body.modes, frame, rule_of)
    try:
        last_result = reader.read_slots(reached, later)
        if last_result is None or not _is_combined(last_result[0], reached):
            random = [refusal for refusal in reader.refusals if refusal.reason is Reason.RANDOM_NUMBERS]
            if random:
                raise random[0]
            return None  # a layer for each part of any tensor looks the same
        return check_removable(region_of_slots(reader, *last_result), body.flow, body.modes)
    except CannotChunk as refusal:
        raise _Refused(refusal, _where(body, reader)) from refusal


def _is_combined(results: fx.Node, reached: set[fx.Node]) -> bool:
    """Whether results in slots meet weights or a mask of the routing in a product, or are picked by its index."""
    pending = [results]
    while pending:
        node = pending.pop()
        for user in node.users:
            others = [source for source in user.all_input_nodes if source is not node and source in reached]
            is_picked = base_name_of(user) in _PICKS and any(map(is_int_tensor, others))
            if is_picked or (base_name_of(user) in MATMULS | {"mul"} and others):
                return True
            if name_of(user) in LAYOUTS | CASTS | {"mul", "cat", "pad"} or _is_bias_or_dropout(user, node):
                pending.append(user)
    return False


def _is_bias_or_dropout(user: fx.Node, results: fx.Node) -> bool:
    """Whether a call drops entries of results, or adds parameters, which weights or a mask may scale."""
    added = [behind_views(source) for source in user.all_input_nodes if source is not results]
    factors = [[source, *(source.all_input_nodes if base_name_of(source) == "mul" else ())] for source in added]
    are_biases = bool(added) and all(any(map(is_parameter_view, parts)) for parts in factors)
    return "dropout" in name_of(user) or (base_name_of(user) == "add" and are_biases)


_PICKS = LOOKUPS | {"index_add", "scatter_add"}


def _where_rows_meet(body: _Body, reader: Reader, differ: RowsDiffer) -> CannotChunk:
    """The refusal of rows of several tensors: why none of them was followed, or else the first call that reads more
    than one of them, which may be far in front of the combine."""
    if all(leaf in reader.left_outside for leaf in differ.leaves):
        return reader.left_outside[min(differ.leaves, key=body.flow.position.__getitem__)]
    behind = [body.flow.descendants([leaf]) for leaf in differ.leaves]
    both = (node for node in reader.ran if all(node in nodes for nodes in behind))
    return RowsDiffer(differ.leaves, min(both, key=body.flow.position.__getitem__, default=differ.at))


def _between(flow: Dataflow, leaves: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes from what results of several experts share (their tokens) down to these results, included."""
    above = [flow.ancestors([leaf]) | {leaf} for leaf in leaves]
    # What lies above several of them was there before any expert ran; what lies above one is its result.
    times: dict[fx.Node, int] = {}
    for nodes in above:
        for node in nodes:
            times[node] = times.get(node, 0) + 1
    return frozenset(node for node, count in times.items() if count == 1 and node.op not in ("placeholder", "get_attr"))


def _expert_nodes(body: _Body, reader: Reader) -> list[fx.Node]:
    """Projections of experts that ran, in graph order; also those that no rule understood."""
    projections = set(reader.expert_nodes)
    for node in reader.ran:
        is_expert = any(map(_is_expert_operand, node.all_input_nodes))
        if target_name(node) in GROUPED_MATMULS or (target_name(node) in MATMULS and is_expert):
            projections.add(node)
    return sorted(projections, key=body.flow.position.__getitem__)


def _is_expert_operand(node: fx.Node) -> bool:
    root = behind_views(node)
    value = node_value(root)
    is_table = isinstance(value, torch.nn.Parameter) and value.ndim >= 3
    picked = root.args[0] if target_name(root) in ("getitem", "index_select", "embedding", "gather") else None
    weights = node_value(picked) if isinstance(picked, fx.Node) else None
    is_picked = isinstance(weights, torch.nn.Parameter) and weights.ndim >= 3
    return is_table or is_picked or (is_float_tensor(node) and has_unbacked_rows(node))


def _where(body: _Body, reader: Reader) -> fx.Node:
    """The first expert, or where reading began."""
    experts = _expert_nodes(body, reader)
    return experts[0] if experts else reader.frame.index


class SlotReader(Reader):
    """Reads what experts do with the slots [...,E,...,H] that one routing decision fills.

    A capacity model counts tokens against each other, so what fills the slots is no function of one row and stays
    outside, whatever it is. The walk begins where that tensor meets the experts, and ends with their last results that
    stand in the same slots; everything between is read by the same rules as routed rows.
    """

    _reached: Set[fx.Node] = frozenset()
    _last: tuple[fx.Node, Rows] | None = None

    def read_slots(self, reached: Set[fx.Node], later: set[fx.Node]) -> tuple[fx.Node, Rows] | None:
        """Walk until one of the `later` routing decisions, or the graph's end.

        Args:
            reached: the nodes that the routing decision reaches.

        Returns:
            The last of the experts' results that stand in the same slots, and what they are.
        """
        self._reached = reached
        self._end = min(map(self.flow.position.__getitem__, later), default=self._end)
        self._form.reading(self._walk)
        return self._last

    def _walk(self) -> None:
        for node in list(self.flow.graph.nodes)[: self._end]:
            if node not in self._reached:
                continue
            if self.slots is None:
                self._place_slots(node)
            is_call = node.op in ("call_function", "call_method")
            if is_call and self.slots is not None and any(map(self._is_active, node.all_input_nodes)):
                self._run(node)

    def _settle(self, node: fx.Node, *, is_pulled: bool = False) -> None:
        super()._settle(node, is_pulled=is_pulled)
        for tensor in self._results_of(node):
            value = self._value_of(tensor, node)
            is_slots = isinstance(value, Rows) and self.slots is not None and value.labels is self.slots.labels
            if is_slots and value.is_dispatched and node in self.expert_nodes:
                self._last = node, value

    def _place_slots(self, node: fx.Node) -> None:
        """Set the slots where experts' weights meet a tensor that the routing fills, or it is taken apart by expert."""
        for source in node.all_input_nodes:
            dim = self._sinking.expert_dim(node, source) if self._is_filled(source) else None
            if dim is None:
                continue
            (tensor,) = self._form.tensors(self._form.result(source))
            self.slots = Slots(source, dim, tuple(tensor.shape))
            self.num_experts = static_size(tensor.shape[dim])
            expr = self.expressions.input(Input("rows", source))
            self._give_tensor(tensor, Rows(self.slots.labels, expr, is_dispatched=True))
            return

    def _is_filled(self, node: fx.Node) -> bool:
        """Whether the routing reaches a tensor, or something that is written into it."""
        root = self.flow.root(node)
        return node in self._reached or any(
            mutation in self._reached and root in map(self.flow.root, targets)
            for mutation, targets in self.flow.mutations.items()
        )
