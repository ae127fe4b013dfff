"""Find: candidate MoE regions of a traced graph, by data flow alone.

Terms. A *seed* is an integer routing decision (indices of a top-k or arg-max; an integer [T,K] placeholder
when experts are compiled alone). An *expert op* is a matmul that a seed reaches and one of whose operands is
a table of expert weights: a grouped matmul, a parameter of three or more dimensions, or a parameter gathered
by a seeded index. A *cut* fixes the expert index, the combined output (exit) and what lies between.

Steps:
1. seeds and expert ops;
2. each expert op belongs to the latest seed that reaches it;
3. expert indices worth trying: integer [T,K] nodes between seed and expert ops, the latest first;
4. exits worth trying: post-dominators of all the expert ops with T rows, the nearest first;
5. inside: what the index reaches and what reaches the exit, less the routing weights ([T,K] floats that no
   dispatch touched), plus factories and layout glue that only serve the inside.

Refuses: seeds that no expert op depends on (with the reason, for the report); cuts whose floats are used
outside; cuts that write to their inputs, or whose inputs are written between dispatch and exit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from memfine_fx.passes.dataflow import (
    Dataflow,
    has_unbacked_rows,
    is_float_tensor,
    is_int_tensor,
    node_value,
    provenance,
    same_size,
    static_size,
    target_name,
)
from memfine_fx.passes.lonely import chooses_for_sequences, lonely_seed, sequence_choice
from memfine_fx.passes.loops.slot_lists import slot_lists
from memfine_fx.passes.modes import Modes
from memfine_fx.records import Candidate, Cut, Refusal

__all__ = ["GROUPED_MATMULS", "MATMULS", "cut_weights", "find_candidates", "num_stacked_experts"]

GROUPED_MATMULS = frozenset({"grouped_mm", "_grouped_mm", "grouped_mm_fallback"})
MATMULS = frozenset("mm bmm matmul addmm baddbmm einsum linear __matmul__ dot".split())
_ROUTERS = frozenset("topk argmax max argmin min".split())
_INDEXING = frozenset("getitem index_select embedding gather".split())
_VIEWS = frozenset("transpose permute unsqueeze squeeze view reshape to t contiguous expand float bfloat16".split())
_FACTORIES = frozenset("arange zeros ones empty full tensor".split())
_LIKE_FACTORIES = frozenset("zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full".split())
_GLUE = frozenset("repeat_interleave repeat expand expand_as tile unsqueeze reshape view flatten contiguous".split())
_COPYING_GLUE = frozenset("repeat_interleave repeat expand expand_as tile".split())
_ENTRIES = frozenset("getitem select unbind".split())
_TRANSPOSES = frozenset("getattr t T mT transpose permute".split())
_PRODUCTS = frozenset("mul mul_ imul __mul__ __rmul__ einsum matmul bmm __matmul__ where masked_fill".split())
_MAX_EXITS = 4
_MAX_PREFIXES = 6
_MAX_CUTS = 32
_MAX_LOOP_CUTS = 16  # each holds all copies of the body


def find_candidates(graph_module: fx.GraphModule, start: Modes | None = None) -> list[Candidate | Refusal]:
    """Candidates of one graph, in graph order, and a refusal for each seed that leads nowhere.

    Higher-order-op bodies are graphs of their own: call this on each, with the modes in which it starts.
    """
    nodes = graph_module.graph.nodes
    seeds = [node for node in nodes if _is_seed(node) or _is_table_lookup(node) or _is_index_placeholder(node)]
    chosen_by_input = [node for node in nodes if chooses_for_sequences(node)]
    if not seeds and not chosen_by_input:
        return []
    flow = Dataflow(graph_module.graph)
    by_seed = _attribute_expert_ops(flow, seeds)
    found: list[Candidate | Refusal] = []
    for seed in sorted(seeds, key=flow.position.__getitem__):
        if seed in by_seed:
            found.append(_candidate(graph_module, flow, seed, by_seed[seed], start or Modes()))
        elif _is_router(seed) and not _feeds_a_later_seed(flow, seed, by_seed):
            found.append(lonely_seed(flow, seed))
    return [*found, *map(sequence_choice, chosen_by_input)]


def _is_seed(node: fx.Node) -> bool:
    if not is_int_tensor(node):
        return False
    if target_name(node) in ("argmax", "argmin"):
        return True
    source = node.args[0] if target_name(node) == "getitem" and node.args else None
    is_second = len(node.args) > 1 and isinstance(node.args[1], int) and node.args[1] == 1
    return isinstance(source, fx.Node) and is_second and target_name(source) in _ROUTERS


def _is_table_lookup(node: fx.Node) -> bool:
    """Integers looked up by integers in a table from outside the graph: hash routing."""
    if target_name(node) not in _INDEXING or not is_int_tensor(node) or len(node.all_input_nodes) != 2:
        return False
    tables = [source for source in node.all_input_nodes if source.op in ("placeholder", "get_attr")]
    return bool(tables) and all(map(is_int_tensor, node.all_input_nodes))


def _is_router(seed: fx.Node) -> bool:
    """Whether a seed without experts deserves a line in the report; maxima of scores do not."""
    source = seed.args[0] if seed.args else None
    return target_name(seed) == "argmax" or (isinstance(source, fx.Node) and target_name(source) == "topk")


def _is_index_placeholder(node: fx.Node) -> bool:
    """Whether a node may be the expert index of experts compiled alone; what is embedded is a token."""
    value = node_value(node)
    is_integer = node.op == "placeholder" and is_int_tensor(node) and isinstance(value, torch.Tensor)
    is_embedded = any(target_name(user) == "embedding" for user in node.users)
    return is_integer and not is_embedded and isinstance(value, torch.Tensor) and value.ndim == 2


def _attribute_expert_ops(flow: Dataflow, seeds: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Each expert op to the latest seed that reaches it, or to the one whose weights it meets (dense experts)."""
    reach = {seed: flow.descendants([seed]) for seed in seeds}
    computed = [seed for seed in seeds if seed.op != "placeholder"]
    placeholders = [seed for seed in seeds if seed.op == "placeholder"]
    matmuls = [node for node in flow.graph.nodes if _looks_like_expert_op(node)]
    routed: dict[fx.Node, fx.Node] = {}
    for node in matmuls:
        reaching = [seed for seed in computed if node in reach[seed]]
        reaching = reaching or [seed for seed in placeholders if node in reach[seed]]
        if reaching and _has_expert_operand(flow, node, reach, reaching):
            routed[node] = max(reaching, key=flow.position.__getitem__)
    owners: dict[fx.Node, list[fx.Node]] = {}
    for node in matmuls:
        is_stacked = any(_is_expert_table(operand, set()) for operand in node.all_input_nodes)
        is_routed = node in routed and _takes_routed_rows(node, reach[routed[node]] | {routed[node]})
        dense = _seed_of_dense(flow, node, computed, reach, routed) if is_stacked and not is_routed else None
        owner = dense or routed.get(node)
        if owner is not None:
            owners.setdefault(owner, []).append(node)
    unrouted = [node for node in matmuls if target_name(node) not in GROUPED_MATMULS]
    for seed in computed:
        ops = [node for node in unrouted if seed not in owners and _is_weighed_by(flow, node, seed, reach[seed])]
        if len(ops) > 1:
            owners[seed] = ops
    for seed in sorted(computed, key=flow.position.__getitem__, reverse=True):
        listed = _ops_of_slot_list(flow, reach, seed, unrouted)
        if seed not in owners and listed:
            owners[seed] = listed
    return owners


def _ops_of_slot_list(
    flow: Dataflow, reach: dict[fx.Node, set[fx.Node]], seed: fx.Node, matmuls: list[fx.Node]
) -> list[fx.Node]:
    """The matmuls of the first list of experts whose slots this seed, and none after it, fills."""
    for found in slot_lists(flow, reach[seed]):
        later = [other for other in reach if flow.position[other] > flow.position[seed] and found.rows in reach[other]]
        if not later:
            inside = set(found.cut.nodes)
            return [node for node in matmuls if node in inside]
    return []


def _takes_routed_rows(op: fx.Node, tainted: set[fx.Node]) -> bool:
    """Whether the routing says which rows meet which weights: no seed that weighs the results can own such an op."""
    return target_name(op) in GROUPED_MATMULS or any(
        (operand in tainted and has_unbacked_rows(operand)) or _is_gathered_table(operand, tainted)
        for operand in op.all_input_nodes
    )


def _is_weighed_by(flow: Dataflow, op: fx.Node, seed: fx.Node, reached: set[fx.Node]) -> bool:
    """Whether a plain matmul by a parameter runs beside `seed` and meets it first in a product (a dense loop)."""
    if not any(map(_is_parameter_entry, op.all_input_nodes)) or op in reached:
        return False
    behind = flow.descendants([op])
    meeting = min(behind & reached, key=flow.position.__getitem__, default=None)
    return seed not in behind and meeting is not None and _weighs_or_picks(meeting, reached)


def _weighs_or_picks(meeting: fx.Node, reached: set[fx.Node]) -> bool:
    """Whether the routing meets the experts' results in a product, or as the index of those it picks."""
    if target_name(meeting) in _PRODUCTS:
        return True
    picked = meeting.args[0] if meeting.args else None
    if picked in reached or target_name(meeting) not in ("gather", "take_along_dim", "getitem"):
        return False
    index = meeting.args[1] if target_name(meeting) == "getitem" else None
    names_tokens_too = isinstance(index, tuple) and sum(isinstance(one, fx.Node) for one in index) > 1
    return index is None or names_tokens_too  # table[ids] picks weights, not results


def _is_parameter_entry(node: fx.Node) -> bool:
    """A parameter, an entry of one, or a view of either."""
    while target_name(node) in (_VIEWS | _ENTRIES | _TRANSPOSES) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return isinstance(node_value(node), torch.nn.Parameter)


def _seed_of_dense(
    flow: Dataflow,
    op: fx.Node,
    seeds: list[fx.Node],
    reach: dict[fx.Node, set[fx.Node]],
    routed: dict[fx.Node, fx.Node],
) -> fx.Node | None:
    """The seed that runs beside `op` and first meets its result: its weights pick from all experts' results.

    A seed that meets other expert matmuls earlier has experts of its own.
    """
    behind = flow.descendants([op])
    meetings: dict[fx.Node, int] = {}
    for seed in seeds:
        shared = behind & reach[seed]
        if seed in behind or op in reach[seed] or not shared:
            continue
        first = min(shared, key=flow.position.__getitem__)
        own = [flow.position[other] for other, owner in routed.items() if owner is seed]
        if _weighs_or_picks(first, reach[seed]) and min(own, default=len(flow.position)) > flow.position[first]:
            meetings[seed] = flow.position[first]
    return min(meetings, key=meetings.__getitem__, default=None)


def _looks_like_expert_op(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and target_name(node) in (MATMULS | GROUPED_MATMULS)


def _has_expert_operand(
    flow: Dataflow, node: fx.Node, reach: dict[fx.Node, set[fx.Node]], seeds: list[fx.Node]
) -> bool:
    if target_name(node) in GROUPED_MATMULS:
        return True
    tainted = set().union(*(reach[seed] for seed in seeds), seeds)
    if any(operand in tainted and has_unbacked_rows(operand) for operand in node.all_input_nodes):
        return True
    return any(_is_expert_table(operand, tainted) for operand in node.all_input_nodes)


def _is_expert_table(operand: fx.Node, tainted: set[fx.Node]) -> bool:
    """A view of a >= 3-D parameter, or a parameter gathered by a tainted index."""
    node = _behind_views(operand)
    if target_name(node) in _INDEXING and node.args and isinstance(node.args[0], fx.Node):
        return _is_gathered_table(operand, tainted)
    return _is_stack(node) and isinstance(node_value(node), torch.nn.Parameter)


def _is_gathered_table(operand: fx.Node, tainted: set[fx.Node]) -> bool:
    node = _behind_views(operand)
    if target_name(node) not in _INDEXING or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    indices = [source for source in node.all_input_nodes[1:] if is_int_tensor(source)]
    return any(index in tainted for index in indices) and _is_stack(node.args[0]) and node.args[0] not in tainted


def _behind_views(node: fx.Node) -> fx.Node:
    while target_name(node) in _VIEWS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_stack(node: fx.Node) -> bool:
    value = node_value(node)
    return isinstance(value, torch.Tensor) and value.ndim >= 3 and is_float_tensor(node)


def _feeds_a_later_seed(flow: Dataflow, seed: fx.Node, by_seed: dict[fx.Node, list[fx.Node]]) -> bool:
    """Group-limited routers hold several top-k nodes; only the last one picks experts."""
    later = [other for other in by_seed if flow.position[other] > flow.position[seed]]
    following = min(later, key=flow.position.__getitem__, default=None)
    return following is not None and following in flow.descendants([seed])


def _candidate(
    graph_module: fx.GraphModule, flow: Dataflow, seed: fx.Node, expert_ops: list[fx.Node], start: Modes
) -> Candidate:
    cuts = []
    for index, num_token_dims in _indices(flow, seed, expert_ops):
        for exit_node in _exits(flow, index, num_token_dims, expert_ops):
            cuts.append(_cut(flow, index, exit_node, num_token_dims, expert_ops))
            cuts.extend(_gated_cut(flow, index, exit_node, num_token_dims, expert_ops))
            if _has_distinct_choices(index, num_token_dims):
                cuts.extend(_dense_cut(flow, index, exit_node, num_token_dims, expert_ops))
    is_loop = any(has_unbacked_rows(op) for op in expert_ops)
    cuts = list(dict.fromkeys(cuts))[: _MAX_LOOP_CUTS if is_loop else _MAX_CUTS]
    return Candidate(graph_module, seed, tuple(expert_ops), tuple(cuts), provenance(expert_ops[0]), start)


def _num_dims(node: fx.Node) -> int:
    value = node_value(node)
    return value.ndim if isinstance(value, torch.Tensor) else 0


def _indices(flow: Dataflow, seed: fx.Node, expert_ops: Iterable[fx.Node]) -> list[tuple[fx.Node, int]]:
    """Expert indices worth trying, with how many of their dimensions are tokens: [T,K] before [B,S,K], [B,S], [T]."""
    between = (flow.descendants([seed]) | {seed}) & flow.ancestors(expert_ops)
    between = between or {seed}  # dense experts do not depend on it
    integers = [node for node in between if is_int_tensor(node) and not has_unbacked_rows(node)]
    exposed = [node for node in integers if target_name(node) == "ids_of_mask"]
    masks = flow.descendants(node for node in between if target_name(node) == "one_hot")
    nodes = sorted(filter(_is_no_flattening, exposed or integers), key=flow.position.__getitem__, reverse=True)
    nodes = exposed or [*(node for node in nodes if node not in masks), *(node for node in nodes if node in masks)]
    spellings = ((2, 1), (3, 2), (2, 2), (1, 1))
    return [
        (node, num_token_dims)
        for num_dims, num_token_dims in spellings
        for node in nodes
        if node_value(node).ndim == num_dims  # type: ignore[attr-defined]  # a tensor
    ]


def _is_no_flattening(node: fx.Node) -> bool:
    """False for [N] made of a [T,K]: its entries are assignments, not tokens."""
    value, root = node_value(node), node
    while target_name(root) in _INDEX_GLUE and root.args and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    source = node_value(root)
    is_tensor = isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor)
    return not is_tensor or value.ndim > 1 or source.ndim < 2 or static_size(source.shape[-1]) == 1  # type: ignore[attr-defined]  # tensors


def _exits(flow: Dataflow, index: fx.Node, num_token_dims: int, expert_ops: list[fx.Node]) -> list[fx.Node]:
    """Post-dominators with the tokens' rows: of all the expert ops; failing that, of the first ones alone."""
    shape = node_value(index).shape  # type: ignore[attr-defined]  # a tensor
    token_shape = shape[:num_token_dims]
    is_single = len(shape) == num_token_dims or static_size(shape[-1]) == 1
    max_exits = 4 * _MAX_EXITS if is_single else _MAX_EXITS  # with K = 1 everything routed has the tokens' rows
    ordered = sorted(expert_ops, key=flow.position.__getitem__)
    chains = [[op, *flow.post_dominators(op)] for op in ordered]
    exits: dict[fx.Node, None] = {}
    for num_ops in range(len(ordered), max(0, len(ordered) - _MAX_PREFIXES), -1):
        common = set(chains[0]).intersection(*chains[1:num_ops])
        nearest = [node for node in chains[num_ops - 1][1:] if node in common and _has_token_rows(node, token_shape)]
        exits.update((node, None) for node in nearest[:max_exits])
    return list(exits)[: 2 * max_exits]


def _has_token_rows(node: fx.Node, token_shape: tuple[int | torch.SymInt, ...]) -> bool:
    value = node_value(node)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.ndim == len(token_shape) + 1
        and all(same_size(a, b) or _is_of_parts(a) for a, b in zip(value.shape, token_shape, strict=False))
    )


def _is_of_parts(size: int | torch.SymInt) -> bool:
    """Whether a size is counted from the experts' own rows, as of their results put together again."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def _cut(flow: Dataflow, index: fx.Node, exit_node: fx.Node, num_token_dims: int, expert_ops: Iterable[fx.Node]) -> Cut:
    inside = _behind(flow, index, exit_node, expert_ops)
    if node_value(index).ndim == num_token_dims + 1:  # type: ignore[attr-defined]  # a tensor
        inside -= _routing_weights(flow, index, inside)
    inside = _reaching(flow, inside, exit_node)
    return _cut_of(flow, inside, index, exit_node, num_token_dims)


def _behind(flow: Dataflow, index: fx.Node, exit_node: fx.Node, expert_ops: Iterable[fx.Node]) -> set[fx.Node]:
    """What the index or an expert matmul reaches, and what reaches the exit."""
    experts = set(expert_ops)
    behind = flow.descendants([index]) | flow.descendants(experts) | experts
    return behind & (flow.ancestors([exit_node]) | {exit_node})


def _cut_of(flow: Dataflow, inside: set[fx.Node], index: fx.Node, exit_node: fx.Node, num_token_dims: int) -> Cut:
    inside = inside | _serving_inputs(flow, inside, index, num_token_dims)
    nodes = tuple(sorted(inside, key=flow.position.__getitem__))
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        inputs.update((source, None) for source in node.all_input_nodes if source not in inside)
    return Cut(index, exit_node, nodes, tuple(inputs), num_token_dims)


def cut_weights(flow: Dataflow, index: fx.Node, weights: fx.Node, num_token_dims: int) -> Cut:
    """What lies between the expert index and [T,E] weights made from it."""
    inside = flow.descendants([index]) & (flow.ancestors([weights]) | {weights})
    return _cut_of(flow, inside, index, weights, num_token_dims)


def _has_distinct_choices(index: fx.Node, num_token_dims: int) -> bool:
    """Whether a token's choices are surely different experts: it has one, or they are one top-k along the last dim."""
    value = node_value(index)
    assert isinstance(value, torch.Tensor)
    if value.ndim == num_token_dims:
        return True
    node = index
    while target_name(node) in _INDEX_GLUE and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    source = node.args[0] if _is_seed(node) and target_name(node) == "getitem" else None
    if not isinstance(source, fx.Node) or target_name(source) != "topk":
        return static_size(value.shape[-1]) == 1
    dim = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", -1)
    own = node_value(node)
    assert isinstance(own, torch.Tensor)
    return dim in (-1, own.ndim - 1) and same_size(own.shape[-1], value.shape[-1])


_INDEX_GLUE = frozenset("to view reshape contiguous long int clone detach unsqueeze squeeze flatten".split())


def num_stacked_experts(expert_ops: Iterable[fx.Node]) -> int | None:
    """E, as the stacked weights of the expert matmuls agree on it."""
    stacks = [source for op in expert_ops for source in op.all_input_nodes if _is_stack(source)]
    sizes = {static_size(node_value(node).shape[0]) for node in stacks if _is_parameter_view(node)}  # type: ignore[attr-defined]  # a tensor
    return next(iter(sizes)) if len(sizes) == 1 else None


def _is_parameter_view(node: fx.Node) -> bool:
    while target_name(node) in _VIEWS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return isinstance(node_value(node), torch.nn.Parameter)


def _dense_cut(
    flow: Dataflow, index: fx.Node, exit_node: fx.Node, num_token_dims: int, expert_ops: list[fx.Node]
) -> list[Cut]:
    """A cut with [T,E] weights, and the masks they are made of, left outside; none where there are no such weights."""
    cut = _cut_without_weights(flow, index, exit_node, num_token_dims, expert_ops, wants_floats=False)
    return [] if cut is None else [replace(cut, has_dense_weights=True)]


def _gated_cut(
    flow: Dataflow, index: fx.Node, exit_node: fx.Node, num_token_dims: int, expert_ops: list[fx.Node]
) -> list[Cut]:
    """A cut with [T,E] weights outside, but masks inside: a loop over experts that reads its own column of weights."""
    if not any(has_unbacked_rows(op) for op in expert_ops):
        return []
    cut = _cut_without_weights(flow, index, exit_node, num_token_dims, expert_ops, wants_floats=True)
    return [] if cut is None else [cut]


def _cut_without_weights(
    flow: Dataflow,
    index: fx.Node,
    exit_node: fx.Node,
    num_token_dims: int,
    expert_ops: list[fx.Node],
    *,
    wants_floats: bool,
) -> Cut | None:
    """The cut without numbers per token, choice and expert that are made from the index; None where there are none."""
    value = node_value(index)
    assert isinstance(value, torch.Tensor)
    inside = _reaching(flow, _behind(flow, index, exit_node, expert_ops), exit_node)
    from_index = inside & flow.descendants([index])
    num_experts = num_stacked_experts(expert_ops)
    weights: set[fx.Node] = set()
    for node in sorted(from_index, key=flow.position.__getitem__):
        is_wanted = is_float_tensor(node) or not wants_floats
        is_from_weights = all(source in weights for source in node.all_input_nodes if source in inside)
        spreads = is_wanted and _spreads_over_experts(node, value, value.shape[:num_token_dims], num_experts)
        if is_from_weights and spreads:
            weights.add(node)
    if not weights or exit_node in weights:
        return None
    kept = _reaching(flow, inside - weights, exit_node)
    return _cut_of(flow, kept, index, exit_node, num_token_dims)


def _spreads_over_experts(
    node: fx.Node, index: torch.Tensor, token_shape: tuple[int | torch.SymInt, ...], num_experts: int | None
) -> bool:
    """Whether a node holds numbers, not vectors, per token, choice and expert: [T], [T,K], [T,E], [T,K,E]."""
    value = node_value(node)
    num_token_dims = len(token_shape)
    if not isinstance(value, torch.Tensor) or not num_token_dims <= value.ndim <= num_token_dims + 2:
        return False
    widths = {1, num_experts, static_size(index.shape[-1])}
    has_tokens = all(same_size(a, b) for a, b in zip(value.shape, token_shape, strict=False))
    return has_tokens and (
        num_experts is None or {static_size(size) for size in value.shape[num_token_dims:]} <= widths
    )


def _routing_weights(flow: Dataflow, index: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    """Floats per (token, choice) made from the index before any dispatch: they stay outside.

    NOTE: shapes alone cannot tell them from routed rows (K = 1 makes N equal T), so the walk starts at the
    index and stops at the first node that is not a [T,<=K] (or [B,S,<=K]) float. Those of shared experts may be
    joined to them and taken off again (a softmax over both).
    """
    *tokens, top_k = node_value(index).shape  # type: ignore[attr-defined]  # a tensor
    weights: set[fx.Node] = set()
    wide: set[fx.Node] = set()
    for node in sorted(inside, key=flow.position.__getitem__):
        sources = [source for source in node.all_input_nodes if source in inside]
        value = node_value(node)
        is_per_token = (
            isinstance(value, torch.Tensor)
            and value.dtype.is_floating_point
            and value.ndim == len(tokens) + 1
            and all(map(same_size, value.shape, tokens))
        )
        if not is_per_token or not all(source in weights for source in sources):
            continue
        assert isinstance(value, torch.Tensor)
        is_joined = target_name(node) in ("cat", "concat", "concatenate") and bool(sources)
        if same_size(value.shape[-1], top_k) or static_size(value.shape[-1]) == 1:
            weights.add(node)
        elif is_joined or any(source in wide for source in sources):
            wide.add(node)
            weights.add(node)
    return weights


def _reaching(flow: Dataflow, inside: set[fx.Node], exit_node: fx.Node) -> set[fx.Node]:
    """The part of `inside` that still reaches the exit without leaving it."""
    kept = {exit_node}
    for node in sorted(inside, key=flow.position.__getitem__, reverse=True):
        if any(user in kept for user in flow.digraph.successors(node)):
            kept.add(node)
    return kept


def _serving_inputs(flow: Dataflow, inside: set[fx.Node], index: fx.Node, num_token_dims: int) -> set[fx.Node]:
    """Factories (arange, zeros) and layout glue (repeat_interleave of the tokens) that feed the inside."""
    index_value = node_value(index)
    assert isinstance(index_value, torch.Tensor)
    absorbed: set[fx.Node] = set()
    pending = [source for node in inside for source in node.all_input_nodes if source not in inside]
    while pending:
        node = pending.pop()
        is_glue = _is_glue(node, index_value, num_token_dims)
        is_routing = _is_one_choice(node, index_value) or _is_turned_weights(node, index_value)
        is_servant = _is_factory(node) or is_glue or is_routing or _is_weight_view(node)
        if node in absorbed or node is index or not is_servant or _is_written_outside(flow, node, inside):
            continue
        absorbed.add(node)
        pending.extend(source for source in node.all_input_nodes if source not in inside)
    return absorbed


def _is_one_choice(node: fx.Node, index: torch.Tensor) -> bool:
    """The weights of one of a token's choices, W[..., k]: a loop over choices reads all of W."""
    source, value = node.args[0] if node.args else None, node_value(node)
    weights = node_value(source) if isinstance(source, fx.Node) else None
    if (
        target_name(node) not in _ENTRIES
        or not isinstance(weights, torch.Tensor)
        or not isinstance(value, torch.Tensor)
    ):
        return False
    has_shape = weights.ndim == index.ndim and all(map(same_size, weights.shape, index.shape))
    is_column = value.ndim < index.ndim or static_size(value.shape[-1]) == 1
    is_wide = has_shape and static_size(index.shape[-1]) != 1 and weights.dtype.is_floating_point
    return is_wide and is_column and all(map(same_size, value.shape, index.shape[:-1]))


def _is_turned_weights(node: fx.Node, index: torch.Tensor) -> bool:
    """The routing weights with choices before tokens, [K,T] or [K,T,1]."""
    while _only_inserts_dims(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    source = node.args[0] if target_name(node) in _TRANSPOSES and node.args else None
    weights = node_value(source) if isinstance(source, fx.Node) else None
    if not isinstance(weights, torch.Tensor) or not weights.dtype.is_floating_point or index.ndim < 2:
        return False
    return weights.ndim == index.ndim and all(map(same_size, weights.shape, index.shape))


def _is_weight_view(node: fx.Node) -> bool:
    """A view of one entry of a parameter: taking it inside lets the whole table be the parameter."""
    if node.op not in ("call_function", "call_method") or len(node.all_input_nodes) != 1:
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return False
    if target_name(node) in _ENTRIES:
        is_of_unbound = target_name(source) == "unbind" and _is_weight_view(source)
        return is_of_unbound or _is_weight(source)
    return target_name(node) in _TRANSPOSES and _is_weight_view(source)


def _is_weight(node: fx.Node) -> bool:
    """A parameter, or a reshape of one."""
    while target_name(node) in ("view", "reshape") and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return isinstance(node_value(node), torch.nn.Parameter)


def _is_written_outside(flow: Dataflow, node: fx.Node, inside: set[fx.Node]) -> bool:
    root, last = flow.root(node), max(flow.position[user] for user in inside)
    return any(
        mutation not in inside
        and flow.position[node] < flow.position[mutation] < last
        and root in map(flow.root, targets)
        for mutation, targets in flow.mutations.items()
    )


def _is_factory(node: fx.Node) -> bool:
    """Made from sizes alone: a size, a factory, or index arithmetic on factories."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node_value(node), torch.Size) or target_name(node) in _LIKE_FACTORIES:
        return True
    if not isinstance(node_value(node), torch.Tensor):
        return False
    sources = [source for source in node.all_input_nodes if isinstance(node_value(source), torch.Tensor)]
    if not sources:
        return target_name(node) in _FACTORIES
    return is_int_tensor(node) and all(_is_factory(source) for source in sources)


def _is_glue(node: fx.Node, index: torch.Tensor, num_token_dims: int) -> bool:
    """Layout glue that repeats tokens, and whatever else is computed per routed row without the index."""
    value = node_value(node)
    if node.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor) or not value.ndim:
        return False
    token_shape = index.shape[:num_token_dims]
    num_tokens = math.prod(token_shape)
    num_rows = math.prod(index.shape)
    is_routed = same_size(value.shape[0], num_rows) and not same_size(value.shape[0], num_tokens)
    if is_routed and is_float_tensor(node):
        return True
    inserts_dims = _only_inserts_dims(node)
    if target_name(node) not in _GLUE and not inserts_dims:
        return False
    if target_name(node) in _COPYING_GLUE or _repeats_rows(node.args[0]):
        return True
    if value.ndim == 1:
        return same_size(value.shape[0], num_rows)
    has_tokens = all(same_size(a, b) for a, b in zip(value.shape, token_shape, strict=False))
    is_broadcast = same_size(value.shape[0], 1) and inserts_dims
    return value.ndim > num_token_dims + 1 and (has_tokens or is_broadcast)


def _repeats_rows(node: object) -> bool:
    """Whether a node is a copy of tokens per choice or expert, or a reshape of one."""
    while isinstance(node, fx.Node) and target_name(node) in _GLUE:
        if target_name(node) in _COPYING_GLUE:
            return True
        node = node.args[0]
    return False


def _only_inserts_dims(node: fx.Node) -> bool:
    """`unsqueeze`, or indexing by nothing but `None`, `:` and `...`."""
    if target_name(node) == "unsqueeze":
        return True
    if target_name(node) != "getitem" or len(node.args) < 2 or isinstance(node.args[1], int):
        return False
    places = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return None in places and all(place in (None, slice(None), ...) for place in places)
