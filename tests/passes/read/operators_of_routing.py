"""Samples of what the routing's integers and masks go through (`rules/indices`, `rules/masks`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from memfine_fx.passes.read.marker import COUNT_ROWS, count_rows
from memfine_fx.passes.read.values import Coordinates, Counts, Fill, Ids, Mask, Partial, Rows, Taken
from tests.passes.read.routings import HIDDEN, NUM_EXPERTS, WIDTH
from tests.passes.read.samples import (
    Database,
    K,
    claims,
    dispatched,
    flat_rows,
    make,
    masks,
    order_of,
    places_of,
    refused,
    sorted_rows,
    split_rows,
    tokens_of,
)

__all__ = ["OPERATORS"]

aten = torch.ops.aten


def flat(r: Any) -> Any:
    """[N] experts in token order."""
    return r.index.reshape(-1)


def turned(r: Any) -> Any:
    """[N] experts, choices before tokens."""
    return r.index.t().reshape(-1)


def chosen(r: Any) -> Any:
    """[T,E], true where a token chose the expert."""
    return masks(r).sum(1) == 1


def own_choices(r: Any) -> Any:
    """[R,K], one where a token that chose expert 1 chose it."""
    mask = r.index == 1
    return mask[mask.any(-1).nonzero().squeeze(-1)].long()


def added_to(r: Any, blank: Any) -> Any:
    """All results added to a blank tensor [T,H]."""
    return blank.index_add(0, tokens_of(r), sorted_rows(r))


def taken(r: Any) -> Any:
    """What the output holds at an expert's places, the expert's results added."""
    out = torch.zeros_like(r.hidden)
    token, _, rows = dispatched(r, 0)
    return out[token] + rows


INDICES: Database = {
    aten.sort.stable: [
        claims(Ids, lambda r: flat(r).sort(stable=True)[0], "plain", "square", "sparse", "dynamic", "repeated"),
        claims(Ids, lambda r: turned(r).sort(stable=True)[1]),
        claims(Ids, lambda r: order_of(r)[1].sort(stable=True)[1], "plain", "dynamic"),
        claims(Ids, lambda r: turned(r).sort(stable=True)[1].sort(stable=True)[1]),
        claims(Ids, lambda r: r.index.sort(stable=True)[1], "argmax"),
        refused("ascending", lambda r: flat(r).sort(stable=True, descending=True)[1]),
        refused("ascending", lambda r: r.index.sort(stable=True, dim=-1)[0]),
        refused("ascending", lambda r: torch.where(r.index == 1)[0].sort(stable=True)[0]),
        refused("sort of", lambda r: tokens_of(r).sort(stable=True)[1]),
        refused("sort of experts", lambda r: order_of(r)[0].sort(stable=True)[1]),
    ],
    aten.sort.default: [
        claims(Ids, lambda r: flat(r).sort()[1], "plain", "square", "sparse", "repeated"),
        claims(Ids, lambda r: turned(r).sort()[1]),
        claims(Ids, lambda r: flat(r).sort()[1].sort()[1]),
        refused("ascending", lambda r: flat(r).sort(descending=True)[1]),
    ],
    aten.index.Tensor: [
        claims(Rows, lambda r: r.hidden[tokens_of(r)], "plain", "square", "sparse", "dynamic", "repeated"),
        claims(Rows, lambda r: r.weight.reshape(-1)[order_of(r)[1]]),
        claims(Rows, lambda r: r.weight[places_of(r, 1)]),
        claims(Rows, lambda r: flat_rows(r)[order_of(r)[1]]),
        claims(Rows, lambda r: sorted_rows(r)[order_of(r)[1].argsort(stable=True)]),
        claims(Rows, lambda r: flat_rows(r) + r.bias[flat(r)]),
        claims(Rows, lambda r: torch.einsum("th,ehf->tef", r.hidden, r.up)[tokens_of(r), order_of(r)[0]]),
        claims(Rows, lambda r: r.hidden[(r.index == 2).any(-1)]),
        claims(Ids, lambda r: flat(r)[order_of(r)[1]]),
        claims(Taken, taken),
        refused("as if it were", lambda r: flat_rows(r)[tokens_of(r)]),
        refused("as if it were", lambda r: sorted_rows(r)[order_of(r)[1]]),
        refused("places of a mask", lambda r: r.hidden[chosen(r)[:, 0] & (r.gates[:, 0] > 0.5)]),
        refused(
            "another's, or in another order",
            lambda r: sorted_rows(r)[turned(r).sort(stable=True)[1].sort(stable=True)[1]],
        ),
    ],
    aten.index_select.default: [
        claims(Rows, lambda r: r.hidden.index_select(0, tokens_of(r))),
        claims(Rows, lambda r: flat_rows(r) + r.bias.index_select(0, flat(r))),
        refused("as if it were", lambda r: flat_rows(r).index_select(0, tokens_of(r))),
        refused("as if it were", lambda r: flat_rows(r).index_select(1, r.index.reshape(-1))),
    ],
    aten.embedding.default: [
        claims(Rows, lambda r: F.embedding(tokens_of(r), r.hidden)),
        claims(Rows, lambda r: flat_rows(r) + F.embedding(flat(r), r.bias)),
        refused("as if it were", lambda r: F.embedding(tokens_of(r), flat_rows(r))),
    ],
    aten.gather.default: [
        claims(Rows, lambda r: r.gates.gather(1, r.index)),
        claims(Rows, lambda r: flat_rows(r).gather(0, order_of(r)[1].unsqueeze(-1).expand(-1, WIDTH))),
        claims(Rows, lambda r: r.hidden.gather(0, tokens_of(r).unsqueeze(-1).expand(-1, HIDDEN))),
        claims(
            Rows,
            lambda r: torch.einsum("th,ehf->tef", r.hidden, r.up).gather(
                1, r.index.unsqueeze(-1).expand(-1, -1, WIDTH)
            ),
        ),
        refused("of a part of each row", lambda r: flat_rows(r).gather(0, order_of(r)[1].unsqueeze(-1).expand(-1, 2))),
        refused("whole rows", lambda r: flat_rows(r).gather(0, tokens_of(r).unsqueeze(-1).expand(-1, WIDTH))),
        refused(
            "each token's own choices",
            lambda r: torch.einsum("th,ehf->etf", r.hidden, r.up).gather(
                0, r.index.unsqueeze(-1).expand(-1, -1, WIDTH)
            ),
        ),
        claims(Rows, lambda r: r.hidden.gather(1, r.index)),
        refused("gather by expert", lambda r: r.gates.gather(0, r.index), "square"),
        refused("by a routing index", lambda r: flat_rows(r).gather(0, r.weight.sort(dim=0)[1])),
    ],
    aten.nonzero.default: [
        claims(Coordinates, lambda r: torch.nonzero(r.index == 1), "plain", "sparse", "repeated", "single"),
        claims(Coordinates, lambda r: torch.nonzero((r.index == 1).t()), "plain", "sparse"),
        claims(Coordinates, lambda r: torch.nonzero(masks(r)[..., 3])),
        claims(Coordinates, lambda r: torch.nonzero(masks(r).permute(2, 1, 0)[2])),
        claims(Coordinates, lambda r: torch.nonzero((r.index == 3).any(-1))),
        claims(Coordinates, lambda r: torch.nonzero(r.index == 1), "batched"),
        refused("other than one expert", lambda r: torch.nonzero(r.index != 1)),
        refused("other than one expert", lambda r: torch.nonzero(masks(r))),
        refused("other than one expert", lambda r: torch.nonzero((r.index == 1) & (r.weight > 0.5))),
        refused("other than a mask", lambda r: torch.nonzero(r.index)),
    ],
    aten.floor_divide.default: [
        claims(Ids, lambda r: order_of(r)[1] // K, "plain", "square", "dynamic", "repeated"),
        refused("by top-k", lambda r: order_of(r)[1] // 3),
        refused("by top-k", lambda r: turned(r).sort(stable=True)[1] // K),
        refused("by top-k", lambda r: flat(r) // K),
    ],
    aten.div.Tensor_mode: [
        claims(Ids, lambda r: torch.div(order_of(r)[1], K, rounding_mode="floor")),
        claims(Ids, lambda r: torch.div(turned(r).sort(stable=True)[1], 5, rounding_mode="trunc"), "plain"),
        claims(Rows, lambda r: torch.div(sorted_rows(r), 0.25, rounding_mode="floor")),
        refused("by top-k", lambda r: torch.div(order_of(r)[1], 3, rounding_mode="floor")),
    ],
    aten.remainder.Scalar: [
        claims(Ids, lambda r: turned(r).sort(stable=True)[1] % 5, "plain", "sparse"),
        claims(Ids, lambda r: order_of(r)[1] % K),
        claims(Ids, lambda r: r.index % NUM_EXPERTS),
        claims(Ids, lambda r: r.index % (NUM_EXPERTS + 1)),
        claims(Rows, lambda r: sorted_rows(r) % 0.25),
        refused("remainder of", lambda r: r.index % (NUM_EXPERTS - 1)),
        refused("remainder of", lambda r: r.index % 4, "repeated"),
        refused("remainder of", lambda r: order_of(r)[1] % 3),
        refused("remainder of", lambda r: r.index % 4.5),
    ],
    aten.clamp.default: [
        claims(Ids, lambda r: r.index.clamp(0, NUM_EXPERTS - 1), "plain", "sparse", "argmax"),
        claims(Ids, lambda r: order_of(r)[0].clamp(max=NUM_EXPERTS - 1)),
        claims(Ids, lambda r: r.index.clamp(min=0)),
        refused("clamped", lambda r: r.index.clamp(min=0), "repeated"),
        claims(Rows, lambda r: sorted_rows(r).clamp(0.0, 0.5)),
        refused("clamped", lambda r: r.index.clamp(max=NUM_EXPERTS - 2)),
        refused("clamped", lambda r: r.index.clamp(1, NUM_EXPERTS)),
        refused("clamped", lambda r: r.index.clamp(max=NUM_EXPERTS - 1), "repeated"),
    ],
    aten.histc.default: [
        claims(Counts, lambda r: torch.histc(flat(r).double(), 4, 0, 3), "plain", "square", "sparse", "repeated"),
        claims(Counts, lambda r: torch.histc(flat(r).double(), 4, 0, 4)),
        refused("one by one", lambda r: torch.histc(flat(r).double(), 4, 0, 7)),
        refused("one by one", lambda r: torch.histc(flat(r).double(), 4, 1, 3)),
        refused("one by one", lambda r: torch.histc(flat(r).double(), 4)),
        refused("other than expert ids", lambda r: torch.histc(tokens_of(r).double(), 4, 0, 3)),
        refused("other than expert ids", lambda r: torch.histc(r.index[:, 0].double(), 4, 0, 3)),
    ],
    aten.bincount.default: [
        claims(Counts, lambda r: torch.bincount(flat(r), minlength=4), "plain", "square", "repeated", "dynamic"),
        refused("other than expert ids", lambda r: torch.bincount(tokens_of(r), minlength=4)),
        refused("adds up weights", lambda r: torch.bincount(flat(r), r.weight.reshape(-1), minlength=4)),
    ],
    COUNT_ROWS: [
        claims(Counts, lambda r: count_rows(flat(r), 4), "plain", "sparse"),
        refused("other than expert ids", lambda r: count_rows(order_of(r)[1], 32)),
    ],
    aten.cumsum.default: [
        claims(Counts, lambda r: torch.bincount(flat(r), minlength=4).cumsum(0), "plain", "sparse"),
        claims(Rows, lambda r: sorted_rows(r).cumsum(-1)),
        refused("capacity", lambda r: masks(r).view(-1, 4).cumsum(0)),
        refused("capacity", lambda r: torch.bincount(flat(r), minlength=4).cumsum(0).cumsum(0)),
        refused("works along the routed dimension", lambda r: sorted_rows(r).cumsum(0)),
    ],
    aten._local_scalar_dense.default: [claims(type(None), lambda r: split_rows(r)[1], is_silent=True)],
    aten.arange.default: [
        claims(Ids, lambda r: r.index.unsqueeze(-1) == make(r, torch.arange, 4)),
    ],
    aten.arange.start: [
        claims(Ids, lambda r: r.index.unsqueeze(-1) == make(r, torch.arange, 0, 4)),
        refused("count from 0 by 1", lambda r: r.index.unsqueeze(-1) == make(r, torch.arange, 1, 5)),
    ],
    aten.arange.start_step: [
        claims(Ids, lambda r: r.index.unsqueeze(-1) == make(r, torch.arange, 0, 4, 1)),
        refused("count from 0 by 1", lambda r: r.index.unsqueeze(-1) == make(r, torch.arange, 0, 8, 2)),
    ],
    aten.empty_like.default: [
        claims(
            Fill,
            lambda r: torch.empty_like(r.hidden.repeat_interleave(2, 0)).index_copy(0, order_of(r)[1], sorted_rows(r)),
            is_silent=True,
        )
    ],
    aten.empty.memory_format: [
        claims(
            Fill,
            lambda r: make(r, torch.empty, 10, HIDDEN, dtype=torch.float64).index_copy(
                0, order_of(r)[1], sorted_rows(r)
            ),
            "plain",
            is_silent=True,
        )
    ],
    aten.new_empty.default: [
        claims(
            Fill,
            lambda r: r.hidden.new_empty((10, HIDDEN)).index_copy(0, order_of(r)[1], sorted_rows(r)),
            "plain",
            is_silent=True,
        )
    ],
    aten.full.default: [claims(Fill, lambda r: sorted_rows(r) * make(r, torch.full, (), 3.0, dtype=torch.float64))],
    aten.full_like.default: [
        claims(Fill, lambda r: torch.where(chosen(r), r.gates, torch.full_like(r.gates, -torch.inf)))
    ],
    aten.new_full.default: [claims(Fill, lambda r: sorted_rows(r) * r.hidden.new_full((HIDDEN,), 0.5))],
    aten.scalar_tensor.default: [claims(Fill, lambda r: torch.where(chosen(r), r.gates, -torch.inf))],
    aten.ones.default: [
        claims(Fill, lambda r: make(r, torch.zeros, 4).index_add(0, flat(r), make(r, torch.ones, 10)), "plain")
    ],
    aten.ones_like.default: [
        claims(Fill, lambda r: flat(r).new_zeros(4).index_add(0, flat(r), torch.ones_like(flat(r)))),
        claims(Fill, lambda r: torch.zeros_like(r.gates).scatter(1, r.index, torch.ones_like(r.weight))),
    ],
    aten.new_ones.default: [
        claims(Fill, lambda r: flat(r).new_zeros(4).index_add(0, flat(r), flat(r).new_ones(10)), "plain")
    ],
    aten.zeros.default: [
        claims(Fill, lambda r: added_to(r, make(r, torch.zeros, 5, HIDDEN, dtype=torch.float64)), "plain")
    ],
    aten.zeros_like.default: [claims(Fill, lambda r: added_to(r, torch.zeros_like(r.hidden)))],
    aten.new_zeros.default: [claims(Fill, lambda r: added_to(r, r.hidden.new_zeros((5, HIDDEN))), "plain")],
    aten.repeat_interleave.Tensor: [
        claims(Ids, lambda r: torch.repeat_interleave(torch.bincount(flat(r), minlength=4)), "plain", "sparse"),
        refused(
            "other than the experts' counts",
            lambda r: torch.repeat_interleave(torch.bincount(flat(r), minlength=4).cumsum(0)),
        ),
        refused("other than the experts' counts", lambda r: torch.repeat_interleave(r.index.reshape(-1))),
    ],
}

MASKS: Database = {
    aten.argmax.default: [
        claims(Ids, lambda r: own_choices(r).argmax(-1), "plain", "square", "sparse", "dynamic"),
        claims(Ids, lambda r: own_choices(r).argmax(1, keepdim=True), "plain", "dynamic"),
        refused("may not have it", lambda r: (r.index == 1).long().argmax(-1)),
        refused("may not have it", lambda r: (own_choices(r) == 0).long().argmax(-1)),
        refused("may not have it", lambda r: (r.index[tokens_of(r)] == 1).long().argmax(-1)),
        refused("no row-wise rule", lambda r: sorted_rows(r).argmax(-1)),
    ],
    aten.eq.Scalar: [
        claims(Mask, lambda r: r.index == 2, "plain", "square", "sparse", "dynamic", "repeated", "batched", "argmax"),
        claims(Mask, lambda r: order_of(r)[0] == 1),
        claims(Mask, lambda r: masks(r) == 1),
        claims(Mask, lambda r: masks(r) == 0),
        refused("compared with 2", lambda r: masks(r) == 2),
        refused("", lambda r: tokens_of(r) == 1),
        refused(
            "compared with another", lambda r: (r.index.view(-1)[torch.nonzero(r.index.view(-1) == 1).view(-1)]) == 2
        ),
    ],
    aten.ne.Scalar: [
        claims(Mask, lambda r: r.index != 2),
        claims(Mask, lambda r: masks(r) != 0),
        refused("compared with 1", lambda r: masks(r) != 1),
    ],
    aten.gt.Scalar: [
        claims(Mask, lambda r: masks(r) > 0),
        claims(Rows, lambda r: sorted_rows(r) > 0.5),
        refused("compared by size", lambda r: r.index > 1),
    ],
    aten.ge.Scalar: [
        claims(Mask, lambda r: masks(r) >= 1),
        claims(Fill, lambda r: order_of(r)[0] >= NUM_EXPERTS, "plain", "argmax"),
        claims(Fill, lambda r: r.index >= 0),
        refused("compared by size", lambda r: r.index >= 1),
        refused("compared by size", lambda r: r.index >= NUM_EXPERTS - 1),
        refused("compared by size", lambda r: r.index >= NUM_EXPERTS, "repeated"),
    ],
    aten.lt.Scalar: [
        claims(Rows, lambda r: sorted_rows(r) < 0.5),
        claims(Fill, lambda r: r.index < NUM_EXPERTS),
        refused("compared by size", lambda r: r.index < 1),
        refused("compared with 1", lambda r: masks(r) < 1),
    ],
    aten.eq.Tensor: [
        claims(
            Mask, lambda r: r.index.unsqueeze(-1) == make(r, torch.arange, 4), "plain", "square", "sparse", "repeated"
        ),
        claims(Mask, lambda r: make(r, torch.arange, 4).view(4, 1, 1) == r.index),
        claims(Mask, lambda r: flat(r) == make(r, torch.arange, 4).unsqueeze(-1)),
        claims(Rows, lambda r: sorted_rows(r) == sorted_rows(r).relu()),
        refused("ids compared with other ids", lambda r: r.index == r.index[:, :1]),
        refused("along their own dimension", lambda r: flat(r) == make(r, torch.arange, 10), "plain"),
    ],
    aten.ne.Tensor: [
        claims(Mask, lambda r: r.index.unsqueeze(-1) != make(r, torch.arange, 4)),
        claims(Rows, lambda r: sorted_rows(r) != sorted_rows(r).relu()),
    ],
    aten.bitwise_not.default: [
        claims(Mask, lambda r: ~chosen(r)),
        claims(Rows, lambda r: ~(sorted_rows(r) > 0.5)),
    ],
    aten.logical_not.default: [claims(Mask, lambda r: torch.logical_not(masks(r)))],
    aten.bitwise_and.Tensor: [
        claims(Mask, lambda r: (r.index == 1) & (r.weight > 0.5)),
        claims(Rows, lambda r: (sorted_rows(r) > 0.2) & (sorted_rows(r) < 0.8)),
        refused("widened", lambda r: (r.index == 1).unsqueeze(-1) & (r.gates > 0.5).unsqueeze(1)),
    ],
    aten.logical_and.default: [claims(Mask, lambda r: torch.logical_and(r.index == 1, r.weight > 0.5))],
    aten.mul.Tensor: [
        claims(Rows, lambda r: masks(r) * r.weight.unsqueeze(-1), "plain", "square", "repeated"),
        claims(Rows, lambda r: chosen(r) * r.gates),
        refused("", lambda r: chosen(r).t() * r.gates.t(), "plain", "square"),
        claims(Rows, lambda r: (r.index == 1).any(-1, keepdim=True) * r.hidden),
        claims(Rows, lambda r: flat_rows(r) * r.weight.reshape(-1, 1)),
        claims(Mask, lambda r: masks(r) * (r.gates > 0.5).unsqueeze(1)),
        claims(Rows, lambda r: flat_rows(r) * make(r, torch.full, (10, WIDTH), 2.0, dtype=torch.float64), "plain"),
        refused(
            "rows in different orders meet", lambda r: flat_rows(r) * r.weight.reshape(-1)[order_of(r)[1]].unsqueeze(-1)
        ),
        refused("meet", lambda r: (flat_rows(r).view(-1, K, WIDTH)[:, 0]) * flat_rows(r).view(-1, K, WIDTH)[:, 1]),
    ],
    aten.where.self: [
        claims(Rows, lambda r: torch.where(chosen(r), r.gates, 0.0)),
        claims(Rows, lambda r: torch.where(~chosen(r), -torch.inf, r.gates)),
        claims(Rows, lambda r: torch.where((r.index == 1).any(-1, keepdim=True), r.hidden, 0.0)),
        claims(Rows, lambda r: torch.where(sorted_rows(r) > 0.5, sorted_rows(r), 0.0)),
        claims(Rows, lambda r: torch.where(chosen(r) * r.gates > 0.3, chosen(r) * r.gates, 0.0), is_silent=True),
        refused("integers chosen", lambda r: torch.where(chosen(r), 1, 2)),
    ],
    aten.masked_fill.Scalar: [
        claims(Rows, lambda r: r.gates.masked_fill(~chosen(r), 0.0)),
        claims(Rows, lambda r: r.gates.masked_fill(~chosen(r), -torch.inf)),
        claims(Rows, lambda r: r.weight.masked_fill(r.index != 1, 0.0)),
        claims(Rows, lambda r: sorted_rows(r).masked_fill(sorted_rows(r) > 0.5, 0.0)),
        claims(Rows, lambda r: r.gates.masked_fill(chosen(r), 0.0), is_silent=True),
        claims(Rows, lambda r: sorted_rows(r).masked_fill((order_of(r)[0] >= NUM_EXPERTS).unsqueeze(-1), 0.0)),
        claims(Rows, lambda r: flat_rows(r).masked_fill((flat(r) >= NUM_EXPERTS)[order_of(r)[1]].unsqueeze(-1), 0.0)),
    ],
    aten.masked_fill.Tensor: [
        claims(Rows, lambda r: r.gates.masked_fill(~chosen(r), make(r, torch.zeros, (), dtype=torch.float64))),
    ],
    aten.add.Tensor: [
        claims(Rows, lambda r: sorted_rows(r) + r.gain),
        claims(Rows, lambda r: flat_rows(r) + torch.full_like(flat_rows(r), 2.0)),
        refused("wider", lambda r: flat_rows(r).sum(-1, True) + torch.full_like(flat_rows(r), 2.0)),
        refused("another dtype", lambda r: flat_rows(r).float() + torch.full_like(flat_rows(r), 2.0)),
        claims(Taken, taken),
        claims(Partial, lambda r: on_all(r, 0) + on_all(r, 1)),
        claims(Partial, lambda r: on_all(r, 0) + on_all(r, 1) + on_all(r, 2) + on_all(r, 3)),
        claims(Partial, lambda r: r.hidden + on_all(r, 0)),
        claims(Rows, lambda r: on_all(r, 0) + torch.zeros_like(r.hidden)),
        refused("added twice", lambda r: on_all(r, 0) + on_all(r, 1) + on_all(r, 0)),
        refused("weights of different experts", lambda r: gate_on_all(r, 0) + gate_on_all(r, 1)),
        refused("name an expert twice", lambda r: weighed_on_all(r, 0) + weighed_on_all(r, 1), "repeated"),
        refused(
            "other rows than the expert's own", lambda r: torch.zeros_like(r.hidden)[places_of(r, 0)[0]] + 1.0 * r.gain
        ),
        refused("meet", lambda r: sorted_rows(r) + flat_rows(r) @ r.square[:6]),
    ],
}

OPERATORS: Database = INDICES | MASKS


def gate_on_all(r: Any, expert: int) -> Any:
    """One expert's weight of all tokens, [T], zero where it was not chosen."""
    return (r.index == expert).any(-1) * r.gates[:, expert]


def on_all(r: Any, expert: int) -> Any:
    """One expert's results on all tokens, [T,H], zero where it was not chosen."""
    rows = (r.hidden @ r.ups[expert]).relu() @ r.downs[expert]
    return rows * (r.index == expert).any(-1).double().unsqueeze(-1)


def weighed_on_all(r: Any, expert: int) -> Any:
    """Return one expert's results on all tokens, [T,H], times the weights of the choices that name it."""
    share = (r.weight * (r.index == expert)).sum(-1, keepdim=True)
    return r.hidden @ r.ups[expert] @ r.downs[expert] * share
