"""Lonely seeds: routing decisions that no expert matmul was found for, and what they are instead.

They differ by what reads the chosen indices: a graph break, a mask, rows of a table (experts of one vector each, or
stored flat), rows of activations (tokens picked for experts, keys for queries), or nothing of this kind (sampling).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence, Set

import torch
from torch import fx

from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import (
    BREAK,
    Dataflow,
    has_unbacked_rows,
    in_code,
    is_float_tensor,
    is_int_tensor,
    node_value,
    provenance,
    refusal_of,
    static_size,
    tensor_of,
)
from memfine_fx.passes.ops import CASTS, CHOOSERS, GROUPED_MATMULS, LAYOUTS, LIKE_FACTORIES, LOOKUPS, MATMULS, name_of
from memfine_fx.passes.read.seeds import given_sources, is_given, is_seed
from memfine_fx.passes.read.sinking import behind_views
from memfine_fx.records import MoERegion, Refusal

__all__ = [
    "chooses_for_sequences",
    "makes_integers",
    "seems_routed",
    "sequence_choice",
    "unknown_routers",
    "unmatched_router",
]


def unmatched_router(flow: Dataflow, seed: fx.Node, obstacle: CannotChunk | None) -> Refusal:
    """The refusal of a seed without experts: what was looked for, and what it is.

    Args:
        obstacle: why what the seed decides was not followed further, where that leads to vectors of tokens.
    """
    users = {user.op if user.op == "output" else name_of(user) for user in seed.users}
    source = seed.args[0] if name_of(seed) == "getitem" else None
    name = name_of(source) if isinstance(source, fx.Node) else name_of(seed)
    picks = list(_picks(flow, seed))

    output = flow.graph.output_node()
    end = in_code(output, seed)
    are_made_to_leave = any(map(_is_output, _integers_of(flow, seed)))
    left_behind = f"{name}: what is made of its indices leaves the captured graph (a graph break before the experts?)"

    def refused(reason: Reason, message: str, at: object | None = seed) -> Refusal:
        return refusal_of(provenance(seed), CannotChunk(reason, message, at))

    if "output" in users:
        message = f"{name}: its indices leave the captured graph (a graph break before the experts?)"
        return refused(Reason.GRAPH_BREAK, message, end)
    if are_made_to_leave and BREAK in output.meta:  # what reads them behind the break says what they choose
        return refused(Reason.GRAPH_BREAK, left_behind, end)
    if any(map(_is_of_vectors, picks)):
        return refused(Reason.EXPERTS_ARE_VECTORS, f"{name}: its experts are rows of a table, which is not raised")
    if any(map(_is_of_activations, picks)):
        return refused(Reason.EXPERTS_CHOOSE_TOKENS, f"{name}: it picks tokens, not an expert for each token")
    if users & {"one_hot", "eq", "where", "nonzero"} and any(
        name_of(node) in MATMULS for node in flow.descendants([seed])
    ):
        return refused(
            Reason.UNKNOWN_SPELLING,
            f"{name}: dispatch by mask or one-hot without a table of expert weights is not raised yet",
        )
    if are_made_to_leave:
        return refused(Reason.GRAPH_BREAK, left_behind)
    why, at = ("", seed) if obstacle is None else (f", as far as it is followed: {obstacle.details}", obstacle.at)
    return refused(Reason.NO_EXPERTS, f"{name}: no expert matmul depends on it{why}", at)


def unknown_routers(flow: Dataflow, regions: Sequence[MoERegion], refused: Collection[fx.Node]) -> list[Refusal]:
    """Return a refusal for each choice of experts that nothing reads: of an unknown operator, or of given integers.

    An operator makes integers of floating-point numbers, and these, or integers that are computed of them, pick entries
    of experts' weights or say which rows experts get. Integers inside regions, and those that are computed of a seed,
    are read, or refused with another reason. So are integers that the graph is given, unless arithmetic on them hides
    that they choose experts.

    Args:
        refused: seeds that have a refusal.
    """
    inside = {node for region in regions for node in region.cut.nodes}
    explained = {source for seed in refused for source in given_sources(seed)}
    known_integers: set[fx.Node] = set()
    refusals = []
    for node in flow.graph.nodes:
        if node in inside or node in known_integers:
            continue
        if is_seed(node):
            reader = _reader_in_experts(flow, node, inside) if is_given(node) and node not in explained else None
            if reader is not None:
                arithmetic = "integers that the graph is given choose experts by arithmetic that no rule follows"
                refusals.append(Refusal(provenance(reader), Reason.INDEX_NOT_FOLLOWED, arithmetic, str(node)))
            known_integers.update(_integers_of(flow, node, with_results=True))
        elif makes_integers(node) and _reader_in_experts(flow, node, inside) is not None:
            known_integers.update(_integers_of(flow, node, with_results=True))
            operator = node.args[0] if name_of(node) == "getitem" else node
            assert isinstance(operator, fx.Node)
            known = ", ".join(sorted(CHOOSERS))
            details = f"{name_of(operator)} chooses experts, which only {known} are known to do"
            refusals.append(Refusal(provenance(operator), Reason.UNKNOWN_ROUTER, details, str(operator)))
    return refusals


def makes_integers(node: fx.Node) -> bool:
    """Whether a call, or an item of its results, is a tensor of integers that follows from floating-point numbers."""
    source = node.args[0] if name_of(node) == "getitem" and node.args else None
    call = source if isinstance(source, fx.Node) and isinstance(node_value(source), (tuple, list)) else node
    is_computed = name_of(call) not in CASTS | LIKE_FACTORIES | {"", "size", "numel", "dim"}
    return is_computed and is_int_tensor(node) and any(map(is_float_tensor, call.all_input_nodes))


def seems_routed(flow: Dataflow, given: fx.Node) -> bool:
    """Whether integers that a graph is given seem to choose experts, and not positions or what is masked.

    They pick or cut experts' weights or rows, or are compared with the numbers of several experts.
    """
    is_read = _reader_in_experts(flow, given, frozenset()) is not None
    return is_read or _num_compared(_integers_of(flow, given)) > 1


def _num_compared(integers: Iterable[fx.Node]) -> int:
    """Return n where integers are compared with 0 to n - 1, as with experts' numbers; kinds of tokens begin at 1."""
    comparisons = [user for node in integers for user in node.users if name_of(user) == "eq"]
    numbers = {user.args[1] for user in comparisons if len(user.args) > 1 and isinstance(user.args[1], int)}
    return next(number for number in itertools.count() if number not in numbers)


def _reader_in_experts(flow: Dataflow, choice: fx.Node, inside: Set[fx.Node]) -> fx.Node | None:
    """Return what picks entries of weights [E,...] by integers, cuts rows into groups, or compares experts' numbers."""
    computed = set(_integers_of(flow, choice, with_results=True))
    num_compared = _num_compared(computed)
    for node in _integers_of(flow, choice, with_results=True):
        if node in inside:
            return None
        is_compared = node in flow.position and any(name_of(user) in ("one_hot", "eq") for user in node.users)
        products = flow.descendants([node]) if is_compared else ()
        nums_experts = {number for product in products for number in _nums_multiplied(product, computed)}
        for user in node.users:
            is_pick = name_of(user) in LOOKUPS and _is_expert_weight(user.args[0]) and _is_multiplied(user)
            num_classes = static_size(tensor_of(user).shape[-1]) if name_of(user) == "one_hot" else None
            compares = nums_experts & {num_classes, num_compared if name_of(user) == "eq" else None}
            if user not in inside and (is_pick or compares or name_of(user) in GROUPED_MATMULS):
                return user
    return None


def _nums_multiplied(node: fx.Node, computed: Set[fx.Node]) -> Iterator[int]:
    """Yield E of weights [E,...] that a call multiplies with something else than what is computed of a choice alone.

    A product of a one-hot mask and a parameter is a lookup, as of positions.
    """
    weights = [source for source in node.all_input_nodes if _is_expert_weight(source)]
    others = [source for source in node.all_input_nodes if source not in weights]
    if name_of(node) in MATMULS | GROUPED_MATMULS and (not others or any(source not in computed for source in others)):
        yield from (int(tensor_of(behind_views(weight)).shape[0]) for weight in weights)


def _is_multiplied(pick: fx.Node) -> bool:
    """Whether a matmul reads entries that were picked; an embedding of positions is added."""
    return any(name_of(user) in MATMULS for view in _views_of(pick) for user in view.users)


def _is_expert_weight(node: object) -> bool:
    """Whether a node is a parameter of three or more dimensions, or a view of one."""
    root = behind_views(node) if isinstance(node, fx.Node) else None
    value = None if root is None else node_value(root)
    return isinstance(value, torch.nn.Parameter) and value.ndim >= 3


def _picks(flow: Dataflow, seed: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls in which the indices, or integers computed of them, pick entries of a tensor of floats."""
    for node in _integers_of(flow, seed):
        for user in node.users:
            if name_of(user) in LOOKUPS and is_float_tensor(user):
                yield user


def _integers_of(flow: Dataflow, seed: fx.Node, *, with_results: bool = False) -> Iterator[fx.Node]:
    """Yield the indices and the integers that are computed of them.

    Args:
        with_results: also yield whatever is computed of nothing else: counts as floats, results of a sort.
    """
    pending, visited = [seed], {seed}
    while pending:
        node = pending.pop()
        yield node
        # Reading inserts nodes, ids of masks for one, which have no position.
        for user in sorted(node.users, key=lambda user: flow.position.get(user, len(flow.position))):
            is_of_ids = (
                with_results and user.op != "output" and all(source in visited for source in user.all_input_nodes)
            )
            if user not in visited and (is_int_tensor(user) or is_of_ids):
                visited.add(user)
                pending.append(user)


def _is_output(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _is_of_vectors(pick: fx.Node) -> bool:
    """Whether rows of a table of parameters meet something computed, not a weight, in a matmul."""
    table = pick.args[0]
    if name_of(pick) == "embedding" and not _is_parameter(table):
        table = pick.args[1]
    weight = node_value(table) if isinstance(table, fx.Node) else None
    if not isinstance(weight, torch.nn.Parameter) or weight.ndim != 2:
        return False
    matmuls = [user for node in _views_of(pick) for user in node.users if name_of(user) in MATMULS]
    return any(
        not _is_parameter(operand) for matmul in matmuls for operand in matmul.all_input_nodes if operand is not pick
    )


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    for user in node.users:
        if name_of(user) in LAYOUTS | CASTS and user.args and user.args[0] is node:
            yield from _views_of(user)


def _is_of_activations(pick: fx.Node) -> bool:
    """Whether whole rows are taken out of something that is no parameter, and not numbers per choice."""
    source, value = pick.args[0], node_value(pick)
    is_computed = isinstance(source, fx.Node) and is_float_tensor(source) and not _is_parameter(source)
    return is_computed and isinstance(value, torch.Tensor) and _width(value) > 1 and not has_unbacked_rows(pick)


def _width(value: torch.Tensor) -> int:
    width = value.shape[-1] if value.ndim > 1 else 1
    return width if isinstance(width, int) else 2


def _is_parameter(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node_value(node), torch.nn.Parameter)


def chooses_for_sequences(node: fx.Node) -> bool:
    """Whether a 1-D integer input is compared with several numbers: a mask of whole sequences for each expert."""
    value = node_value(node)
    if node.op != "placeholder" or not is_int_tensor(node) or not isinstance(value, torch.Tensor) or value.ndim != 1:
        return False
    comparisons = [user for view in _views_of(node) for user in view.users if name_of(user) == "eq"]
    numbers = {user.args[1] for user in comparisons if len(user.args) > 1 and isinstance(user.args[1], int)}
    return len(numbers) > 1 and any(_is_of_rank(user) for user in comparisons)


def _is_of_rank(comparison: fx.Node) -> bool:
    """Whether a comparison stands broadcastable before tokens and features."""
    value = node_value(comparison)
    return isinstance(value, torch.Tensor) and value.ndim == 3


def sequence_choice(node: fx.Node) -> Refusal:
    """The refusal of experts that an input chooses, one for each sequence."""
    first = next(iter(node.users), node)
    return Refusal(
        provenance(first),
        Reason.CHOSEN_FOR_SEQUENCES,
        f"{node.name}: an input chooses one expert for all tokens of a sequence",
        str(node),
    )
