"""Operations that mark what an expert loop assumes, so that reading it can check the assumption.

`one_expert` marks a tensor taken apart by the experts' counts, in a rolled loop. The others stand in for a
model's own code while a loop is captured (see `memfine_fx.capture.loops`): `rows_of` marks a mask or its places
whose emptiness skipped an expert, `count_rows` counts rows per expert with a result of known size.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memfine_fx.passes.dataflow import is_only_asserted, target_name

__all__ = [
    "COUNT_ROWS",
    "LOOP_MARKERS",
    "ONE_EXPERT",
    "ROWS_OF",
    "count_rows",
    "is_harmless_marker",
    "one_expert",
    "rows_of",
]


@torch.library.custom_op("memfine::one_expert", mutates_args=())
def one_expert(rows: torch.Tensor) -> torch.Tensor:
    """Marks rows in normalised graphs that must stand in expert order; computes nothing.

    Args:
        rows: [N,...].
    """
    return rows.clone()


@one_expert.register_fake
def _(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows)


@torch.library.custom_op("memfine::rows_of", mutates_args=())
def rows_of(places: torch.Tensor) -> torch.Tensor:
    """The same tensor; says that a loop body was skipped where it selects nothing."""
    return places.clone()


@rows_of.register_fake
def _(places: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(places)


@torch.library.custom_op("memfine::count_rows", mutates_args=())
def count_rows(expert_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E]: how often each expert is named.

    Args:
        expert_index: [N] ints in [0, E).
        num_experts: E.
    """
    return torch.bincount(expert_index, minlength=num_experts)[:num_experts].clone()


@count_rows.register_fake
def _(expert_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    return expert_index.new_empty((num_experts,), dtype=torch.int64)


ONE_EXPERT = torch.ops.memfine.one_expert.default
ROWS_OF = torch.ops.memfine.rows_of.default
COUNT_ROWS = torch.ops.memfine.count_rows.default
LOOP_MARKERS = frozenset({ROWS_OF, COUNT_ROWS, rows_of, count_rows})


_WRITES = frozenset(("index_add_", "index_add"))
_PURE = frozenset(
    "rows_of getitem squeeze unsqueeze view reshape to type float where nonzero index_select eq numel size sym_size "
    "linear mul add sub div matmul mm silu gelu relu chunk split t transpose permute expand contiguous".split()
)


def is_harmless_marker(marker: fx.Node) -> bool:
    """Whether a loop body that was skipped where `marker` selects nothing does nothing then when it is run.

    So it is if what it computes from the places is only ever added, or put, at these places.
    """
    if marker.target not in (ROWS_OF, rows_of):
        return False
    pending, tainted, num_writes = [marker], {marker}, 0
    while pending:
        node = pending.pop()
        for user in node.users:
            places = user.args[2] if target_name(user) in _WRITES and len(user.args) > 2 else None
            places = user.args[1] if user.target is operator.setitem else places
            if places is not None and any(place in tainted for place in _nodes(places)):
                num_writes += 1
                continue
            if is_only_asserted(user):
                continue
            if target_name(user) not in _PURE:
                return False
            if user not in tainted:
                tainted.add(user)
                pending.append(user)
    return num_writes > 0


def _nodes(places: object) -> list[fx.Node]:
    found: list[fx.Node] = []
    found.extend(leaf for leaf in pytree.tree_leaves(places) if isinstance(leaf, fx.Node))
    return found
