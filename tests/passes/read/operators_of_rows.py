"""Samples of operations row by row, along one dimension, and of reductions (`rules/pointwise`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from memfine_fx.passes.read.values import Combined, Counts, Ids, Mask, Rows
from tests.passes.read.routings import HIDDEN, WIDTH
from tests.passes.read.samples import (
    Database,
    K,
    claims,
    dispatched,
    expert_rows,
    flat_rows,
    masks,
    order_of,
    refused,
    sorted_rows,
    tokens_of,
)

__all__ = ["OPERATORS", "POINTWISE"]

aten = torch.ops.aten
ACROSS = "works along the routed dimension"
ALL_DIMS = "a reduction over all dimensions mixes rows"


def on_all_tokens(r: Any, expert: int) -> Any:
    """[T,F], zero where a token did not choose the expert."""
    return (r.hidden * (r.index == expert).any(-1, keepdim=True).to(torch.float64)) @ r.ups[expert]


def on_all_experts(r: Any) -> Any:
    """[T,E,F], zero where a token did not choose the expert."""
    return torch.einsum("th,ehf->tef", r.hidden, r.up) * (masks(r).sum(1) * r.gates).unsqueeze(-1)


OPERATORS: Database = {
    aten._to_copy.default: [
        claims(Rows, lambda r: sorted_rows(r).to(torch.float32)),
        claims(Ids, lambda r: order_of(r)[1].to(torch.int32)),
        claims(Mask, lambda r: masks(r).to(torch.float64)),
        claims(Counts, lambda r: torch.bincount(r.index.reshape(-1), minlength=4).to(torch.float32)),
        refused("may not survive", lambda r: order_of(r)[1].to(torch.bfloat16)),
        refused("may not survive", lambda r: order_of(r)[1].to(torch.bool)),
    ],
    aten.alias.default: [
        claims(Rows, lambda r: aten.alias.default(sorted_rows(r))),
        claims(Ids, lambda r: aten.alias.default(r.index)),
    ],
    aten.clone.default: [
        claims(Rows, lambda r: sorted_rows(r).clone()),
        claims(Mask, lambda r: masks(r).clone()),
    ],
    aten.detach.default: [claims(Rows, lambda r: aten.detach.default(sorted_rows(r)))],
    aten._softmax.default: [
        claims(Rows, lambda r: sorted_rows(r).softmax(-1)),
        claims(Rows, lambda r: flat_rows(r).view(-1, K, WIDTH).softmax(2)),
        claims(Rows, lambda r: r.gates.masked_fill(masks(r).sum(1) == 0, -torch.inf).softmax(-1)),
        refused(ACROSS, lambda r: sorted_rows(r).softmax(0)),
        refused(ACROSS, lambda r: flat_rows(r).view(-1, K, WIDTH).softmax(1)),
    ],
    aten.amax.default: [
        claims(Rows, lambda r: sorted_rows(r).amax(-1, keepdim=True)),
        claims(Mask, lambda r: masks(r).amax(1)),
        claims(Mask, lambda r: masks(r).amax(1, keepdim=True)),
        refused(ACROSS, lambda r: sorted_rows(r).amax(0)),
        refused(ACROSS, lambda r: masks(r).amax(0)),
        refused(ACROSS, lambda r: masks(r).amax(2)),
        refused(ALL_DIMS, lambda r: sorted_rows(r).amax()),
        refused("its mask counts it once", lambda r: masks(r).amax(1), "repeated"),
    ],
    aten.amin.default: [
        claims(Rows, lambda r: sorted_rows(r).amin(-1)),
        refused(ACROSS, lambda r: sorted_rows(r).amin(0)),
        refused(ALL_DIMS, lambda r: sorted_rows(r).amin()),
    ],
    aten.any.dim: [
        claims(Mask, lambda r: (r.index == 1).any(-1)),
        claims(Mask, lambda r: (r.index == 1).any(-1, keepdim=True), "plain", "batched"),
        refused(ACROSS, lambda r: (r.index == 1).any(0)),
        refused("not chosen, or was dropped", lambda r: (r.index != 1).any(-1)),
        refused("not chosen, or was dropped", lambda r: ((r.index == 1) & (r.weight > 0.5)).any(-1)),
    ],
    aten.any.dims: [
        claims(Mask, lambda r: aten.any.dims(masks(r), [1])),
        refused(ACROSS, lambda r: aten.any.dims(masks(r), [0, 1])),
    ],
    aten.glu.default: [
        claims(Rows, lambda r: F.glu(flat_rows(r), -1)),
        refused(ACROSS, lambda r: F.glu(flat_rows(r), 0)),
    ],
    aten.linalg_vector_norm.default: [
        claims(Rows, lambda r: torch.linalg.vector_norm(flat_rows(r), dim=-1, keepdim=True)),
        refused(ACROSS, lambda r: torch.linalg.vector_norm(flat_rows(r), dim=0)),
        refused(ALL_DIMS, lambda r: torch.linalg.vector_norm(flat_rows(r))),
    ],
    aten.native_layer_norm.default: [
        claims(Rows, lambda r: F.layer_norm(sorted_rows(r), (HIDDEN,), r.gain)),
        claims(Rows, lambda r: F.layer_norm(flat_rows(r).view(-1, K, WIDTH), (WIDTH,))),
        refused("mixes rows", lambda r: F.layer_norm(flat_rows(r).view(-1, K, WIDTH), (K, WIDTH))),
    ],
    aten.sum.dim_IntList: [
        claims(Combined, lambda r: flat_rows(r).view(-1, K, WIDTH).sum(1), "plain", "square", "repeated"),
        claims(Combined, lambda r: flat_rows(r).view(-1, K, WIDTH).sum(1, dtype=torch.float32)),
        claims(Rows, lambda r: sorted_rows(r).sum(-1, keepdim=True)),
        claims(Mask, lambda r: masks(r).sum(1)),
        claims(Counts, lambda r: masks(r).sum((0, 1)), "plain", "square", "repeated"),
        claims(Counts, lambda r: masks(r).sum(1).sum(0)),
        claims(Rows, lambda r: (masks(r) * r.weight.unsqueeze(-1)).sum(1)),
        claims(Rows, lambda r: (masks(r) * r.weight.unsqueeze(-1)).sum(1), "repeated"),
        claims(
            Combined,
            lambda r: (torch.einsum("th,ehf->tef", r.hidden, r.up) * (masks(r).sum(1) * r.gates).unsqueeze(-1)).sum(1),
        ),
        refused(
            "not proved zero",
            lambda r: (
                torch.einsum("th,ehf->tef", r.hidden, r.up)
                * torch.where(masks(r).sum(1) == 1, r.gates, 1.0).unsqueeze(-1)
            ).sum(1),
        ),
        refused(
            "name an expert twice",
            lambda r: (
                torch.einsum("th,ehf->tef", r.hidden, r.up) * (masks(r) * r.weight.unsqueeze(-1)).sum(1).unsqueeze(-1)
            ).sum(1),
            "repeated",
        ),
        refused(ACROSS, lambda r: flat_rows(r).sum(0)),
        refused(ACROSS, lambda r: masks(r).sum(0)),
        refused(ACROSS, lambda r: (r.index == 1).sum((0, 1))),
        refused(ACROSS, lambda r: flat_rows(r).view(-1, K, WIDTH).sum(0)),
        refused(ACROSS, lambda r: (dispatched(r, 0)[2]).sum(0)),
        refused(ACROSS, lambda r: flat_rows(r).view(-1, K, WIDTH).sum((0, 1))),
        refused(ACROSS, lambda r: masks(r).sum(2)),
        refused(ALL_DIMS, lambda r: flat_rows(r).sum((), keepdim=True)),
        refused("its mask counts it once", lambda r: masks(r).sum(1), "repeated"),
    ],
    aten.mean.dim: [
        claims(Rows, lambda r: sorted_rows(r).mean(-1, keepdim=True)),
        claims(Rows, lambda r: expert_rows(r, 1).mean(-1)),
        refused(ACROSS, lambda r: expert_rows(r, 1).mean(0)),
        refused(ACROSS, lambda r: flat_rows(r).view(-1, K, WIDTH).mean(1)),
        refused(ALL_DIMS, lambda r: sorted_rows(r).mean((), keepdim=True)),
    ],
}

POINTWISE: Database = {
    aten.relu.default: [
        claims(Rows, lambda r: sorted_rows(r).relu()),
        claims(Rows, lambda r: (masks(r).sum(1) * r.gates).relu()),
    ],
    aten.sigmoid.default: [claims(Rows, lambda r: (masks(r).sum(1) * r.gates).sigmoid())],
    aten.div.Tensor: [
        claims(Rows, lambda r: sorted_rows(r) / (sorted_rows(r).abs() + r.gain)),
        claims(Rows, lambda r: flat_rows(r).view(-1, K, WIDTH) / (flat_rows(r).view(-1, K, WIDTH).abs().sum(-1, True))),
        refused("used as row data", lambda r: sorted_rows(r) / order_of(r)[1].unsqueeze(-1)),
        refused("used as row data", lambda r: sorted_rows(r) / torch.bincount(r.index.reshape(-1), minlength=4)[0]),
    ],
    aten.sub.Tensor: [
        claims(Rows, lambda r: sorted_rows(r) - r.gain),
        claims(Rows, lambda r: r.hidden.unsqueeze(1) - flat_rows(r).view(-1, K, WIDTH).sum(-1, True)),
        claims(Rows, lambda r: flat_rows(r) - r.bias[r.index.reshape(-1)]),
        refused("rows in different orders meet", lambda r: sorted_rows(r) - flat_rows(r).sum(-1, True)),
        refused(
            "rows in different orders meet",
            lambda r: (
                r.hidden.unsqueeze(1)
                - r.hidden[tokens_of(r)][order_of(r)[1].argsort(stable=True)].view(-1, K, HIDDEN)[:, 0].unsqueeze(0)
            ),
        ),
        refused("of experts [0, 1] meet", lambda r: on_all_tokens(r, 0) - on_all_tokens(r, 1)),
        refused("meet", lambda r: sorted_rows(r) - r.hidden[r.index.t().reshape(-1).sort(stable=True)[1] % 5]),
        refused("meet", lambda r: on_all_experts(r) - on_all_experts(r)[:, :1]),
        refused("meet", lambda r: flat_rows(r).view(-1, K, WIDTH) - flat_rows(r).view(-1, K, WIDTH)[:, :1]),
    ],
    aten.silu.default: [claims(Rows, lambda r: F.silu(expert_rows(r, 2)))],
    aten.leaky_relu.default: [claims(Rows, lambda r: F.leaky_relu(expert_rows(r, 2), 0.1))],
    aten.hardswish.default: [claims(Rows, lambda r: F.hardswish(expert_rows(r, 2)))],
}
"""Operations without a rule of their own, which share one: pointwise by ATen's tag, and those that lack it."""
