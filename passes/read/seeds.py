"""Seeds: integer routing decisions, and the frames in which they may be read.

A seed is the indices of a top-k or an arg-max, integers looked up in a table by integers (hash routing), or integers
that the graph is given: an input, as of experts that are compiled alone, or a part of one, as of routing that is
replayed (ids [B,S,L,K] of all layers).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from memfine_fx.memory.sizes import size_expr
from memfine_fx.passes.dataflow import (
    Dataflow,
    has_unbacked_rows,
    is_float_tensor,
    is_int_tensor,
    node_value,
    same_size,
    static_size,
    tensor_of,
)
from memfine_fx.passes.ops import CASTS, CHOOSERS, COPIES, FLOAT_CASTS, LOOKUPS, RESHAPES, VIEWS, name_of
from memfine_fx.passes.read.frame import Frame

__all__ = [
    "GLUE",
    "frames_of",
    "given_sources",
    "is_along_last",
    "is_chosen",
    "is_given",
    "is_looked_up",
    "is_router",
    "is_seed",
    "masked",
    "proved_of",
    "reframed",
    "seeds_of",
]

GLUE = RESHAPES | COPIES | {"detach", "to", "long", "int"}
"""They neither mix entries nor change ids."""
_PARTS = VIEWS | {"clone", "index_select"} | (CASTS - FLOAT_CASTS)
_WIDE = (torch.int32, torch.int64)


def is_seed(node: fx.Node) -> bool:
    """Whether a node is a routing decision."""
    is_choice = is_chosen(node) and not _is_of_rows(node)
    return is_int_tensor(node) and (is_choice or is_looked_up(node) or is_given(node))


def seeds_of(graph: fx.Graph) -> list[fx.Node]:
    """Routing decisions in graph order.

    An input that is first read behind a choice is none: where experts are compiled alone they come first, and labels,
    integers [B,S] as an index may be, would be read with the whole model in front of the loss.
    """
    position = {node: place for place, node in enumerate(graph.nodes)}
    seeds = [node for node in graph.nodes if is_seed(node)]
    # Whether an integer input is an index only what reads it could tell, so it counts with less right.
    inputs = {seed for seed in seeds if is_given(seed)}
    first = min((position[seed] for seed in seeds if seed not in inputs), default=len(position))
    return [
        seed for seed in seeds if seed not in inputs or min(map(position.__getitem__, seed.users), default=0) < first
    ]


def is_router(seed: fx.Node) -> bool:
    """Whether a seed without experts deserves a line in the report; maxima of scores do not."""
    source = seed.args[0] if seed.args else None
    return name_of(seed) == "argmax" or (isinstance(source, fx.Node) and name_of(source) == "topk")


def frames_of(seed: fx.Node, flow: Dataflow) -> list[Frame]:
    """Return the ways to read a seed's shape, likelier ones first: [T,K] or [B,S,K]; [T] or [B,S] with one choice."""
    num_dims = tensor_of(seed).ndim
    if is_chosen(seed):
        ways = [num_dims == _scores(seed).ndim] if num_dims else []
    else:
        ways = [True] * (num_dims >= 2) + [False] * (num_dims <= 2 and not is_given(seed))
    frames = [_frame(seed, flow, has_choices=has_choices) for has_choices in ways]
    return [frame for frame in frames if frame is not None]


def reframed(frame: Frame, node: fx.Node, flow: Dataflow) -> Frame:
    """Return the frame of integers for each token, or each of its choices, that were made from an index."""
    value = tensor_of(node)
    has_choices = value.ndim > len(frame.token_shape)
    top_k = int(value.shape[-1]) if has_choices else 1
    is_distinct, bound = proved_of(node, flow)
    return replace(
        frame, index=node, has_choices=has_choices, top_k=top_k, is_distinct=is_distinct or top_k == 1,
        bound=bound, num_experts=frame.num_experts if bound is None else bound,
    )  # fmt: skip


def masked(frame: Frame, node: fx.Node) -> Frame:
    """Return the frame of a mask [T,K,E] with dropped choices: a dropped one names no expert."""
    num_experts = static_size(tensor_of(node).shape[-1])
    return replace(frame, index=node, is_mask=True, bound=None, num_experts=num_experts)


def proved_of(index: fx.Node, flow: Dataflow) -> tuple[bool, int | None]:
    """Return whether a token's ids are surely different, and a number that they are surely below (or None).

    Both hold of the indices of a choice along the last dimension, and of what only lays them out otherwise. Ids that
    are computed from others may meet or leave the range, and so may ids that anything in the graph writes into.
    """
    node = index
    while not is_chosen(node):
        source = node.args[0] if node.args else None
        if name_of(node) not in GLUE or flow.is_written(node):
            return False, None
        value = node_value(source) if isinstance(source, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not _has_choices_of(node, value):
            return False, None
        assert isinstance(source, fx.Node)
        node = source
    if flow.is_written(node) or not is_along_last(node):
        return False, None
    return _is_distinct(node), static_size(_scores(node).shape[-1])


def _has_choices_of(node: fx.Node, source: torch.Tensor) -> bool:
    """Whether each token's choices in `source` [...,K] are those of the same token in the node's tensor."""
    value = tensor_of(node)
    is_cast = name_of(node) in ("to", "long", "int")
    if not value.ndim or not source.ndim or not (value.dtype is source.dtype or (is_cast and value.dtype in _WIDE)):
        return False
    last, before = value.shape[-1], source.shape[-1]
    # A reshape to another last size may give some of a token's choices to another token.
    is_added = value.ndim == source.ndim + 1 and same_size(last, 1)
    is_dropped = value.ndim == source.ndim - 1 and same_size(before, 1)
    return is_added or is_dropped or same_size(last, before)


def _frame(seed: fx.Node, flow: Dataflow, *, has_choices: bool) -> Frame | None:
    value = tensor_of(seed)
    shape = tuple(value.shape)
    # A frame has a number for K, and asking for one would make it a guard that later calls fail.
    if has_choices and free_unbacked_symbols(shape[-1]):
        return None  # how many are chosen is decided by the data
    if has_choices and not _belongs_to_architecture(shape[-1]):
        return _frame(seed, flow, has_choices=False)  # a capacity: experts choose so many tokens
    top_k = int(shape[-1]) if has_choices else 1  # a guard where it is symbolic: K belongs to the architecture
    tokens = shape[:-1] if has_choices else shape
    is_distinct, bound = proved_of(seed, flow)
    return Frame(
        index=seed,
        token_shape=tokens,
        top_k=top_k,
        has_choices=has_choices,
        is_distinct=is_distinct or top_k == 1,
        num_experts=static_size(_scores(seed).shape[-1]) if is_chosen(seed) else None,
        bound=bound,
    )


def _belongs_to_architecture(size: int | torch.SymInt) -> bool:
    """Whether a size is a number or a symbol of its own, which K is, and not computed from others."""
    return bool(size_expr(size).is_number or size_expr(size).is_symbol)


def is_chosen(node: fx.Node) -> bool:
    """Return whether a node is the integers of a choice: the second result of a top-k, or an arg-max."""
    if name_of(node) in ("argmax", "argmin"):
        return True
    source = node.args[0] if name_of(node) == "getitem" and node.args else None
    is_second = len(node.args) > 1 and isinstance(node.args[1], int) and node.args[1] == 1
    return isinstance(source, fx.Node) and is_second and name_of(source) in CHOOSERS


def _is_of_rows(choice: fx.Node) -> bool:
    """Whether it is the place of the one in a mask of an expert's rows: a router chooses by scores, for all tokens."""
    source = choice.args[0] if choice.args else None
    is_argmax = name_of(choice) == "argmax" and isinstance(source, fx.Node)
    return is_argmax and not is_float_tensor(source) and has_unbacked_rows(source)  # type: ignore[arg-type]  # a node


def _scores(seed: fx.Node) -> torch.Tensor:
    """Return the tensor of scores that a choice is made from."""
    source = seed.args[0]
    assert isinstance(source, fx.Node)
    chosen_from = source.args[0] if name_of(seed) == "getitem" else source
    assert isinstance(chosen_from, fx.Node)
    return tensor_of(chosen_from)


def _is_distinct(seed: fx.Node) -> bool:
    """Whether a token's choices are surely different experts: they are one top-k along the last dimension."""
    source = seed.args[0] if seed.args else None
    is_top_k = isinstance(source, fx.Node) and name_of(source) == "topk"
    return is_top_k and is_chosen(seed) and is_along_last(seed)


def is_along_last(seed: fx.Node) -> bool:
    """Return whether a choice is among the entries of the last dimension."""
    source = seed.args[0] if name_of(seed) == "getitem" else seed
    assert isinstance(source, fx.Node)
    place, default = (2, -1) if name_of(source) == "topk" else (1, None)
    dim = source.args[place] if len(source.args) > place else source.kwargs.get("dim", default)
    return dim in (-1, _scores(seed).ndim - 1)


def is_looked_up(node: fx.Node) -> bool:
    """Return whether a node is integers that integers look up in a table from outside the graph: hash routing."""
    if name_of(node) not in LOOKUPS or len(node.all_input_nodes) != 2:
        return False
    if name_of(node) == "index_select" and node.args[1:2] not in ((), (0,)):
        return False  # a part of each row
    # Integers made of integers in the graph are arithmetic on ids, not a choice.
    tables = [source for source in node.all_input_nodes if source.op in ("placeholder", "get_attr")]
    return bool(tables) and all(map(is_int_tensor, node.all_input_nodes))


def is_given(node: fx.Node) -> bool:
    """Whether a node's integers may be routing that the graph is given: an input's, or a part's of one.

    What is embedded is a token. A last size that varies counts where routing weights, an input of the same sizes, come
    with it: labels or a padding mask, [B,S], would be read as [T,K], and K is a number of the architecture, so that
    every S had a graph of its own.
    """
    value, sources = node_value(node), given_sources(node)
    # Integers of other dtypes name no entries, or are a mask (uint8).
    is_index = isinstance(value, torch.Tensor) and value.ndim in (2, 3) and value.dtype in _WIDE
    if not sources or not is_index or any(name_of(user) == "embedding" for source in sources for user in source.users):
        return False
    return static_size(tensor_of(node).shape[-1]) is not None or _comes_with_weights(node)


def given_sources(node: fx.Node) -> list[fx.Node]:
    """Return a node of integers, what it is a view, a part or a cast of, and so on to an input; [] where none is."""
    sources: list[fx.Node] = []
    source: object = node
    while isinstance(source, fx.Node) and (is_int_tensor(source) or isinstance(node_value(source), (tuple, list))):
        sources.append(source)
        if source.op in ("placeholder", "get_attr"):
            return sources
        source = source.args[0] if name_of(source) in _PARTS and source.args and not _is_lookup(source) else None
    return []


def _is_lookup(node: fx.Node) -> bool:
    """Whether tensors say which entries a call takes: integers that a table is asked for are a choice of their own."""
    others = [source for source in node.all_input_nodes if isinstance(node_value(source), torch.Tensor)]
    return len(others) > 1 and name_of(node) != "index_select"


def _comes_with_weights(index: fx.Node) -> bool:
    """Whether another input has the sizes of an index and holds floating-point numbers."""
    sizes = [size_expr(size) for size in tensor_of(index).shape]
    inputs = (node_value(node) for node in index.graph.nodes if node.op == "placeholder")
    tensors = (value for value in inputs if isinstance(value, torch.Tensor) and value.is_floating_point())
    return any([size_expr(size) for size in value.shape] == sizes for value in tensors)
