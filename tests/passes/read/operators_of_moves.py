"""Samples of operations that lay rows out, take them apart and put them together (`rules/moves`, `rules/parts`)."""

from __future__ import annotations

from typing import Any

import torch

from memfine_fx.passes.read.values import Coordinates, Counts, Fill, Ids, Mask, Rows
from tests.passes.read.routings import HIDDEN, NUM_EXPERTS, WIDTH
from tests.passes.read.samples import (
    Database,
    K,
    claims,
    dispatched,
    expert_rows,
    flat_rows,
    masks,
    order_of,
    places_of,
    refused,
    sorted_rows,
    split_rows,
)

__all__ = ["OPERATORS"]

aten = torch.ops.aten
ACROSS = "works along the routed dimension"
MOVES = "moves the routed dimensions"


def by_choice(r: Any) -> Any:
    """[T,K,F]"""
    return flat_rows(r).view(-1, K, WIDTH)


def dense(r: Any) -> Any:
    """Every expert on every token, [T,E,F]."""
    return torch.einsum("th,ehf->tef", r.hidden, r.up) * (masks(r).sum(1) * r.gates).unsqueeze(-1)


def each_on_all(r: Any) -> list[Any]:
    """Every expert's own results on all tokens, each [T,F], zero where it was not chosen."""
    return [r.hidden @ r.ups[e] * (r.index == e).any(-1).to(torch.float64).unsqueeze(-1) for e in range(NUM_EXPERTS)]


MOVES_AND_SHAPES: Database = {
    aten.view.default: [
        claims(Rows, lambda r: flat_rows(r).view(-1, K, WIDTH), "plain", "square", "dynamic"),
        claims(Rows, lambda r: flat_rows(r).view(-1, 2, 3), "plain", "dynamic"),
        claims(Ids, lambda r: r.index.view(-1), "plain", "batched", "argmax"),
        claims(Mask, lambda r: (r.index == 1).view(-1)),
        claims(Mask, lambda r: masks(r).view(-1, NUM_EXPERTS)),
        claims(Ids, lambda r: torch.nonzero(r.index.view(-1) == 1).view(-1)),
        claims(Rows, lambda r: dense(r).view(-1, WIDTH)),
        refused("mixes", lambda r: flat_rows(r).view(-1, K * WIDTH)),
        refused("mixes", lambda r: flat_rows(r).view(K, -1, WIDTH)),
        refused("reshaped to", lambda r: r.index.view(K, -1)),
    ],
    aten._unsafe_view.default: [
        claims(Rows, lambda r: dense(r).transpose(0, 1).reshape(-1, WIDTH)),
        claims(Rows, lambda r: aten._unsafe_view.default(by_choice(r), [10, WIDTH]), "plain"),
        refused("mixes", lambda r: aten._unsafe_view.default(by_choice(r), [5, K * WIDTH])),
    ],
    aten.expand.default: [
        claims(Rows, lambda r: sorted_rows(r).sum(-1, True).expand(-1, WIDTH), "plain", "dynamic"),
        claims(Rows, lambda r: r.hidden.unsqueeze(1).expand(-1, K, -1) + by_choice(r).sum(-1, True)),
        claims(Ids, lambda r: order_of(r)[1].unsqueeze(-1).expand(-1, HIDDEN)),
        claims(
            Rows, lambda r: r.hidden.unsqueeze(0).expand(NUM_EXPERTS, -1, -1) @ r.up * masks(r).sum(1).t().unsqueeze(-1)
        ),
    ],
    aten.repeat.default: [
        claims(
            Rows,
            lambda r: (
                torch.bmm(r.hidden.repeat(NUM_EXPERTS, 1).view(NUM_EXPERTS, -1, HIDDEN), r.up)
                * masks(r).sum(1).t().unsqueeze(-1)
            ),
        ),
        claims(Ids, lambda r: order_of(r)[1].unsqueeze(-1).repeat(1, HIDDEN)),
        refused("repeated", lambda r: sorted_rows(r).repeat(3, 1)),
        refused("other than of whole rows", lambda r: sorted_rows(r).repeat(1, 2)),
        refused("an index repeated", lambda r: order_of(r)[1].repeat(2)),
    ],
    aten.permute.default: [
        claims(Rows, lambda r: by_choice(r).permute(1, 0, 2)),
        claims(Rows, lambda r: flat_rows(r).view(-1, 2, 3).permute(0, 2, 1)),
        claims(Ids, lambda r: r.index.permute(1, 0)),
        claims(Mask, lambda r: masks(r).permute(2, 1, 0)),
        refused(MOVES, lambda r: sorted_rows(r).permute(1, 0)),
        refused(MOVES, lambda r: by_choice(r).permute(0, 2, 1)),
    ],
    aten.transpose.int: [
        claims(Rows, lambda r: by_choice(r).transpose(0, 1), "plain", "square", "dynamic"),
        claims(Rows, lambda r: flat_rows(r).view(-1, 2, 3).transpose(1, 2)),
        claims(Rows, lambda r: flat_rows(r).view(-1, 2, 3).transpose(-1, -2)),
        claims(Mask, lambda r: masks(r).transpose(1, 2)),
        claims(Rows, lambda r: torch.bmm(flat_rows(r).unsqueeze(1), r.up[r.index.view(-1)].transpose(1, 2))),
        refused(MOVES, lambda r: by_choice(r).transpose(1, 2)),
        refused(MOVES, lambda r: sorted_rows(r).transpose(0, 1)),
    ],
    aten.t.default: [
        claims(Ids, lambda r: r.index.t()),
        claims(Rows, lambda r: expert_rows(r, 0) @ r.up[0] @ r.up[0].t()),
        claims(Mask, lambda r: (masks(r).sum(1) == 1).t()),
        refused(MOVES, lambda r: sorted_rows(r).t()),
    ],
    aten.unsqueeze.default: [
        claims(Rows, lambda r: sorted_rows(r).unsqueeze(1)),
        claims(Rows, lambda r: sorted_rows(r).unsqueeze(-1)),
        claims(Rows, lambda r: by_choice(r).unsqueeze(1)),
        claims(Ids, lambda r: r.index.unsqueeze(0)),
        claims(Mask, lambda r: (r.index == 1).unsqueeze(-1)),
        claims(Fill, lambda r: torch.zeros_like(r.gates).unsqueeze(1) + masks(r)),
    ],
    aten.squeeze.dim: [
        claims(Rows, lambda r: sorted_rows(r).unsqueeze(1).squeeze(1)),
        claims(Rows, lambda r: by_choice(r).sum(-1, True).squeeze(-1)),
        claims(Ids, lambda r: torch.nonzero(r.index.view(-1) == 1).squeeze(-1)),
        claims(Ids, lambda r: r.index.squeeze(-1), "single"),
        claims(Mask, lambda r: (r.index == 1).squeeze(-1), "single"),
        claims(Counts, lambda r: torch.bincount(r.index.view(-1), minlength=4).squeeze(0)),
        claims(Coordinates, lambda r: torch.nonzero(r.index == 1).squeeze(-1)),
    ],
    aten.squeeze.dims: [
        claims(Rows, lambda r: sorted_rows(r).unsqueeze(1).unsqueeze(3).squeeze((1, 3))),
        claims(Mask, lambda r: (r.index == 1).unsqueeze(1).squeeze((1,))),
    ],
}

PARTS: Database = {
    aten.select.int: [
        claims(Rows, lambda r: sorted_rows(r)[:, 2]),
        claims(Rows, lambda r: by_choice(r).select(1, 1)),
        claims(Mask, lambda r: masks(r).select(2, 3)),
        claims(Mask, lambda r: masks(r).select(1, 0)),
        claims(Ids, lambda r: r.index.select(1, 1)),
        claims(Ids, lambda r: torch.nonzero(r.index == 1).select(1, 0)),
        claims(Counts, lambda r: torch.bincount(r.index.view(-1), minlength=4)[2], "plain", "sparse"),
        claims(Rows, lambda r: expert_rows(r, 1) @ r.up.select(0, 1)),
        claims(Rows, lambda r: dense(r).select(1, 2)),
        refused(ACROSS, lambda r: sorted_rows(r).select(0, 0)),
        refused(ACROSS, lambda r: by_choice(r).select(0, 0)),
        refused(ACROSS, lambda r: r.index.select(0, 1)),
    ],
    aten.slice.Tensor: [
        claims(Rows, lambda r: sorted_rows(r)[:, 1:4]),
        claims(Rows, lambda r: sorted_rows(r)[:, ::2]),
        claims(Rows, lambda r: by_choice(r)[:, 1:]),
        claims(Mask, lambda r: masks(r)[..., 2:3]),
        claims(Mask, lambda r: masks(r)[..., :3]),
        claims(Rows, lambda r: sorted_rows(r)[:]),
        refused(ACROSS, lambda r: sorted_rows(r)[2:]),
        refused(ACROSS, lambda r: sorted_rows(r)[::2]),
        refused(ACROSS, lambda r: masks(r)[..., 1:]),
        refused(ACROSS, lambda r: masks(r)[..., :4:2]),
        refused(ACROSS, lambda r: by_choice(r)[:3]),
    ],
    aten.split.Tensor: [
        claims(Rows, lambda r: flat_rows(r).split(3, -1)[1]),
        claims(Rows, lambda r: by_choice(r).split(1, 1)[1]),
        claims(Mask, lambda r: masks(r).split(1, -1)[1]),
        refused("several experts' rows", lambda r: masks(r).split(2, -1)[0]),
        refused(ACROSS, lambda r: sorted_rows(r).split(2)[0]),
    ],
    aten.split_with_sizes.default: [
        claims(Rows, lambda r: sorted_rows(r).split([4, 3], 1)[1]),
        claims(Rows, lambda r: split_rows(r)[0], "plain", "square", "sparse"),
        refused(ACROSS, lambda r: sorted_rows(r).split([4, 6])[0]),
        refused(ACROSS, lambda r: wrong_counts(r)),
        refused("not sorted by expert", lambda r: split_unsorted(r)),
    ],
    aten.unbind.int: [
        claims(Ids, lambda r: places_of(r, 2)[0]),
        claims(Rows, lambda r: by_choice(r).unbind(1)[1]),
        claims(Rows, lambda r: flat_rows(r).view(-1, 2, 3).unbind(2)[1]),
        claims(Mask, lambda r: masks(r).unbind(-1)[3]),
        claims(Ids, lambda r: r.index.unbind(-1)[1]),
        claims(Rows, lambda r: expert_rows(r, 1) @ r.up.unbind(0)[1]),
        refused(ACROSS, lambda r: sorted_rows(r).unbind(0)[0]),
        refused(ACROSS, lambda r: by_choice(r).unbind(0)[0]),
    ],
    aten.cat.default: [
        claims(Rows, lambda r: torch.cat([flat_rows(r), flat_rows(r).relu()], -1)),
        claims(Rows, lambda r: torch.cat([split_rows_of(r, e) @ r.ups[e] for e in range(4)]), "plain", "sparse"),
        claims(Rows, lambda r: torch.cat([dispatched(r, e)[2] for e in range(4)])),
        claims(Ids, lambda r: torch.cat([places_of(r, e)[0] for e in range(4)])),
        refused("some experts read a table", lambda r: torch.cat([dense(r)[:, e : e + 1] for e in range(4)], 1)),
        claims(
            Fill,
            lambda r: torch.cat([torch.zeros_like(r.hidden), torch.zeros_like(r.hidden)]).index_add(
                0, r.index.view(-1), sorted_rows(r)
            ),
        ),
        refused("another order", lambda r: torch.cat([dispatched(r, e)[2] for e in (1, 0, 2, 3)])),
        refused("all experts' places in order", lambda r: torch.cat([places_of(r, e)[0] for e in (1, 0, 2, 3)])),
        refused("compute different things", lambda r: torch.cat([dispatched(r, e)[2] * (e + 1) for e in range(4)])),
        refused("another order", lambda r: torch.cat([dense(r)[:, e : e + 1] for e in (1, 0, 2, 3)], 1)),
        refused(ACROSS, lambda r: torch.cat([flat_rows(r), flat_rows(r)], 0)),
        refused("different orders meet", lambda r: torch.cat([flat_rows(r), sorted_rows(r)], 1)),
    ],
    aten.stack.default: [
        claims(Rows, lambda r: torch.stack(each_on_all(r), 1)),
        claims(Rows, lambda r: torch.stack(each_on_all(r), 0)),
        refused("another order", lambda r: torch.stack(each_on_all(r)[::-1], 1)),
        refused("stacked beside each other", lambda r: torch.stack([sorted_rows(r), sorted_rows(r)], 1)),
    ],
}

OPERATORS: Database = MOVES_AND_SHAPES | PARTS


def split_rows_of(r: Any, expert: int) -> Any:
    return split_rows(r)[expert]


def wrong_counts(r: Any) -> Any:
    counts = torch.bincount(r.index.reshape(-1), minlength=NUM_EXPERTS)
    return torch.split(sorted_rows(r), [counts[expert].item() for expert in (1, 0, 2, 3)])[0]


def split_unsorted(r: Any) -> Any:
    counts = torch.bincount(r.index.reshape(-1), minlength=NUM_EXPERTS)
    return torch.split(flat_rows(r), [counts[expert].item() for expert in range(NUM_EXPERTS)])[0]
