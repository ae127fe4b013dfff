"""The paper's chunks at run time (MemFine, arXiv 2511.21431, section 3): slices of every rank's tokens.

1. Each rank knows s'', the rows that it receives in this layer and step, and s'_max, its plan's rows. It asks for
   c = ceil(s'' / s'_max) slices, raised to the next of the bins if there are any.
2. All take the largest c of any rank. The gathered table holds every rank's s'' and s'_max, so this all-reduce MAX
   needs no exchange of its own.
3. Each rank cuts its tokens in c slices and tells how many rows of each expert a slice holds.

A slice brings a rank s''/c rows if rows are spread evenly over the tokens. Where they are not it brings more, and
nothing bounds it: this is here for comparison with `schedule.Rounds`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfine_fx.expert_parallel.exchange import Exchange, Place, Table, gather_rows
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.schedule import TokenSlices
from memfine_fx.memory.closed_form import chunk_count
from memfine_fx.runtime.routed import Routed
from memfine_fx.runtime.routing import SliceCounter

__all__ = ["agreed_slices", "number_of_slices"]


def number_of_slices(table: Table, placement: Placement, bins: Sequence[int] | None) -> int:
    """Return c, the most slices that any rank asks for."""
    received: list[int] = placement.by_rank(table.counts.sum(dim=0)).tolist()
    return max(chunk_count(rows, limit, bins) for rows, limit in zip(received, table.limits, strict=True))


def agreed_slices(
    exchange: Exchange, placement: Placement, table: Table, routed: Routed, bins: Sequence[int] | None, place: Place
) -> TokenSlices:
    """Return the slices of this step; a collective call.

    Args:
        exchange: of the layer.
        placement: of the experts.
        table: the gathered counts.
        routed: this rank's inputs.
        bins: allowed numbers, or None.
        place: for messages.
    """
    num_slices = number_of_slices(table, placement, bins)
    rank = torch.distributed.get_rank(exchange.group)
    begins = table.begins(rank)
    ends = torch.cat([begins, begins[-1:] + table.counts[rank, -1:]])
    size = max(1, -(-routed.num_tokens // num_slices))
    counter = SliceCounter(routed.order, ends, routed.top_k, routed.num_tokens)
    bounds = counter.bounds(size) - begins
    missing = num_slices + 1 - len(bounds)
    own = torch.cat([bounds, bounds[-1:].expand(missing, -1)])
    everyone = gather_rows(exchange, own.reshape(-1), place)
    return TokenSlices(everyone.view(-1, *own.shape).transpose(0, 1).contiguous(), placement)
