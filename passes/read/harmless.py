"""Whether running a loop body that its model skips changes anything: the markers of `marker`, read in the graph."""

from __future__ import annotations

import operator

from torch import fx

from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.passes.dataflow import is_only_asserted, target_name
from memfine_fx.passes.read.marker import ROWS_OF, rows_of

__all__ = ["is_harmless_marker"]

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
    return [leaf for leaf in tree_leaves(places) if isinstance(leaf, fx.Node)]
