"""Samples of experts' matmuls, and of results on their way back to tokens (`rules/matmuls`, `rules/combine`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from memfine_fx.passes.read.marker import PUT_ROWS, put_rows
from memfine_fx.passes.read.values import Combined, Counts, Ids, Mask, Partial, Rows
from tests.passes.read.routings import HIDDEN, NUM_EXPERTS, WIDTH
from tests.passes.read.samples import (
    Database,
    K,
    claims,
    counts_of,
    dispatched,
    expert_rows,
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
MIXES = "moves or contracts routed dimensions"


def grouped(r: Any, rows: Any, table: Any, ends: Any = None) -> Any:
    return torch.ops.memfine.grouped_mm(rows, table, counts_of(r).cumsum(0) if ends is None else ends)


def gathered_table(r: Any) -> Any:
    """Every row's own [H,F], [N,H,F]."""
    return r.up[r.index.reshape(-1)]


def iterations(r: Any) -> Any:
    """Tokens, once for each choice, [N,1,H]."""
    return r.hidden.repeat_interleave(K, 0).unsqueeze(1)


def by_choice(r: Any) -> Any:
    """Results of each choice, [T,K,F]."""
    return flat_rows(r).view(-1, K, WIDTH)


def chosen(r: Any) -> Any:
    """[T,E], one where a token chose the expert."""
    return masks(r).sum(1).to(torch.float64)


def all_tokens(r: Any) -> Any:
    """All tokens for every expert, [E,T,H], zero where a token did not choose it."""
    return r.hidden.unsqueeze(0) * chosen(r).t().unsqueeze(-1)


def blank(r: Any) -> Any:
    return torch.zeros_like(r.hidden)


def inverse(r: Any) -> Any:
    """Sorted rows put back in token order, [N,H]."""
    return r.hidden.repeat_interleave(K, 0)


def grown(r: Any, put: Any, experts: Any = range(2)) -> Any:
    """A sum that grows expert by expert."""
    out = blank(r)
    for expert in experts:
        out = put(out, *dispatched(r, expert))
    return out


MATMULS: Database = {
    torch.ops.memfine.grouped_mm.default: [
        claims(Rows, lambda r: grouped(r, sorted_rows(r), r.up), "plain", "square", "sparse", "repeated", "dynamic"),
        claims(Rows, lambda r: grouped(r, grouped(r, sorted_rows(r), r.up).relu(), r.down)),
        claims(Rows, lambda r: grouped(r, r.hidden[r.index.reshape(-1).sort()[1] // K], r.up)),
        claims(Rows, lambda r: grouped(r, r.hidden[r.index.t().reshape(-1).sort(stable=True)[1] % 5], r.up), "plain"),
        refused("not the ends", lambda r: grouped(r, sorted_rows(r), r.up, counts_of(r))),
        refused("not sorted by expert", lambda r: grouped(r, inverse(r) * r.weight.reshape(-1, 1), r.up)),
        refused("not sorted by expert", lambda r: grouped(r, flat_rows(r), r.down)),
    ],
    torch.ops.memfine.einsum.default: [
        claims(Rows, lambda r: torch.einsum("nf,nfh->nh", flat_rows(r), r.down[r.index.reshape(-1)])),
        claims(Rows, lambda r: torch.einsum("th,tkhf->tkf", r.hidden, r.up[r.index]), "plain", "square", "repeated"),
        claims(Rows, lambda r: torch.einsum("tkf,tkfh->tkh", by_choice(r), r.down[r.index])),
        claims(Rows, lambda r: torch.einsum("nf,gf->ng", flat_rows(r), r.square[:, :WIDTH])),
        claims(Rows, lambda r: torch.einsum("te,th->teh", chosen(r), r.hidden)),
        claims(Rows, lambda r: torch.einsum("tke,tk->te", masks(r).double(), r.weight)),
        claims(Rows, lambda r: torch.einsum("tke,tk->te", masks(r).double(), r.weight), "repeated"),
        claims(Rows, lambda r: torch.einsum("tke,tk,tk->te", masks(r).double(), r.weight, 1 + r.weight)),
        claims(Combined, lambda r: torch.einsum("tkf,tk->tf", by_choice(r), r.weight), "plain", "square", "repeated"),
        claims(
            Combined,
            lambda r: torch.einsum("tef,te->tf", torch.einsum("th,ehf->tef", r.hidden, r.up), chosen(r) * r.gates),
        ),
        claims(
            Combined,
            lambda r: torch.einsum(
                "tef,te->tf",
                torch.einsum("th,ehf->tef", r.hidden, r.up),
                torch.einsum("tke,tk->te", masks(r).double(), r.weight),
            ),
        ),
        refused("works along the routed dimension", lambda r: torch.einsum("nf,ng->fg", flat_rows(r), flat_rows(r))),
        refused("works along the routed dimension", lambda r: torch.einsum("nf,nf->f", flat_rows(r), flat_rows(r))),
        refused(MIXES, lambda r: torch.einsum("nf,fg->gn", flat_rows(r), r.square[:WIDTH])),
        refused("takes a diagonal", lambda r: torch.einsum("nff->nf", gathered_table(r)[:, :WIDTH])),
        refused("different orders meet", lambda r: torch.einsum("nf,nh->nfh", flat_rows(r), sorted_rows(r))),
        refused("several routed dimensions", lambda r: torch.einsum("tkf,tke->tf", by_choice(r), masks(r).double())),
        refused("choices or experts meet", lambda r: torch.einsum("tf,sf->ts", by_choice(r)[:, 0], by_choice(r)[:, 0])),
        refused("choices or experts meet", lambda r: torch.einsum("tkf,tjf->tkj", by_choice(r), by_choice(r))),
    ],
    aten.mm.default: [
        claims(Rows, lambda r: expert_rows(r, 1) @ r.ups[1], "plain", "sparse", "dynamic"),
        claims(Rows, lambda r: expert_rows(r, 1) @ r.up[1]),
        claims(Rows, lambda r: sorted_rows(r) @ r.square),
        claims(Rows, lambda r: split_rows(r)[3] @ r.ups[3], "plain", "sparse"),
        claims(Rows, lambda r: F.linear(expert_rows(r, 1), r.ups[1] @ r.downs[1], r.gain)),
        claims(Rows, lambda r: (r.hidden * (r.index == 1).any(-1, keepdim=True)) @ r.ups[1]),
        refused("matmul of", lambda r: r.square[:, :5] @ (r.hidden * (r.index == 1).any(-1, keepdim=True))),
        refused(
            "used as row data",
            lambda r: (
                (r.index == 1).any(-1, keepdim=True).double().t() @ (r.hidden * (r.index == 1).any(-1, keepdim=True))
            ),
        ),
        refused("", lambda r: r.weight.t() @ by_choice(r)[:, 0]),
    ],
    aten.addmm.default: [
        claims(Rows, lambda r: F.linear(expert_rows(r, 1), r.square, r.gain)),
        claims(Rows, lambda r: torch.addmm(r.gain, sorted_rows(r), r.square)),
        refused("with scaling", lambda r: torch.addmm(r.gain, sorted_rows(r), r.square, beta=2)),
        refused("matmul of", lambda r: torch.addmm(sorted_rows(r), sorted_rows(r), r.square)),
    ],
    aten.bmm.default: [
        claims(Rows, lambda r: torch.bmm(iterations(r), gathered_table(r)), "plain", "square", "repeated", "dynamic"),
        claims(Rows, lambda r: torch.bmm(gathered_table(r).transpose(1, 2), iterations(r).transpose(1, 2))),
        claims(Rows, lambda r: torch.bmm(sorted_rows(r).unsqueeze(1), r.up[order_of(r)[0]])),
        claims(Rows, lambda r: torch.bmm(all_tokens(r), r.up)),
        claims(Rows, lambda r: (r.hidden.expand(NUM_EXPERTS, -1, -1) @ r.up) * chosen(r).t().unsqueeze(-1)),
        claims(Combined, lambda r: torch.bmm(r.weight.unsqueeze(1), by_choice(r))),
        refused("a row is not a vector", lambda r: torch.bmm(iterations(r).expand(-1, 2, -1), gathered_table(r))),
        refused("no known spelling", lambda r: torch.bmm(iterations(r), r.up[order_of(r)[0]])),
        refused("no known spelling", lambda r: torch.bmm(all_tokens(r).transpose(0, 1), r.up), "square"),
        refused("no known spelling", lambda r: torch.bmm(by_choice(r), r.down * 2), "square"),
        refused("no known spelling", lambda r: torch.bmm(r.weight.t().unsqueeze(1), by_choice(r).transpose(0, 1))),
    ],
    aten.baddbmm.default: [
        claims(Rows, lambda r: torch.baddbmm(r.bias.unsqueeze(1), all_tokens(r), r.up)),
        refused("with scaling", lambda r: torch.baddbmm(r.bias.unsqueeze(1), all_tokens(r), r.up, beta=2)),
        refused(
            "other than all experts'",
            lambda r: torch.baddbmm(r.bias.unsqueeze(1)[:1], iterations(r), gathered_table(r)),
        ),
    ],
}

COMBINE: Database = {
    aten.index_put.default: [
        claims(
            Ids,
            lambda r: torch.empty_like(order_of(r)[1]).index_put((order_of(r)[1],), make(r, torch.arange, 10)),
            "plain",
        ),
        claims(
            Rows,
            lambda r: make(r, torch.zeros, 10, HIDDEN, dtype=torch.float64).index_put(
                (order_of(r)[1],), sorted_rows(r)
            ),
            "plain",
        ),
        claims(
            Combined,
            lambda r: blank(r).index_put((tokens_of(r),), sorted_rows(r), accumulate=True),
            "plain",
            "square",
            "repeated",
        ),
        claims(
            Partial, lambda r: grown(r, lambda out, t, k, rows: out.index_put((t,), out[t] + rows)), "plain", "sparse"
        ),
        claims(
            Partial,
            lambda r: grown(r, lambda out, t, k, rows: out.index_put((t,), rows, accumulate=True)),
            "plain",
            "repeated",
        ),
        claims(Partial, lambda r: grown(r, lambda out, t, k, rows: out.index_put((t,), out[t] + rows), range(2))),
        refused("does not invert", lambda r: blank(r).index_put((tokens_of(r),), sorted_rows(r))),
        refused(
            "does not invert",
            lambda r: make(r, torch.zeros, 10, HIDDEN, dtype=torch.float64).index_put(
                (order_of(r)[1],), flat_rows(r) @ r.square[:6]
            ),
        ),
        refused(
            "overwrite those of others", lambda r: grown(r, lambda out, t, k, rows: out.index_put((t,), rows), (0,))
        ),
        refused("another state", lambda r: twice(r)),
        refused(
            "only one of its rows",
            lambda r: grown(r, lambda out, t, k, rows: out.index_put((t,), out[t] + rows), (0,)),
            "repeated",
        ),
        refused(
            "in their own order",
            lambda r: blank(r).index_put((tokens_of(r),), flat_rows(r) @ r.square[:6], accumulate=True),
        ),
        refused(
            "written back twice",
            lambda r: grown(r, lambda out, t, k, rows: out.index_put((t,), rows, accumulate=True), (0, 0)),
        ),
        refused(
            "other than one routing index",
            lambda r: aten.index_put.default(r.gates, [None, r.index.reshape(-1)], r.gates.repeat(1, 3)[:, :10], True),
        ),
    ],
    aten.index_add.default: [
        claims(
            Combined,
            lambda r: blank(r).index_add(0, tokens_of(r), sorted_rows(r)),
            "plain",
            "square",
            "sparse",
            "repeated",
            "dynamic",
        ),
        claims(Combined, lambda r: (r.hidden * 2).index_add(0, tokens_of(r), sorted_rows(r))),
        claims(
            Partial,
            lambda r: grown(r, lambda out, t, k, rows: out.index_add(0, t, rows)),
            "plain",
            "square",
            "sparse",
            "repeated",
        ),
        claims(Partial, lambda r: r.hidden.index_add(0, *dispatched(r, 2)[::2])),
        claims(
            Counts,
            lambda r: r.index.new_zeros(4).index_add(0, r.index.reshape(-1), torch.ones_like(r.index.reshape(-1))),
        ),
        refused("other than of rows to tokens", lambda r: blank(r).index_add(0, tokens_of(r), sorted_rows(r), alpha=2)),
        refused(
            "other than tokens",
            lambda r: torch.zeros_like(flat_rows(r)).index_add(0, order_of(r)[1], grouped(r, sorted_rows(r), r.up)),
        ),
        refused("in their own order", lambda r: blank(r).index_add(0, tokens_of(r), flat_rows(r) @ r.square[:6])),
        refused(
            "by expert of other than ones",
            lambda r: r.gain[:4].detach().index_add(0, r.index.reshape(-1), r.weight.reshape(-1)),
        ),
        refused(
            "other rows than those of expert 1",
            lambda r: blank(r).index_add(0, places_of(r, 1)[0], dispatched(r, 0)[2]),
            "square",
        ),
        refused("written back twice", lambda r: grown(r, lambda out, t, k, rows: out.index_add(0, t, rows), (1, 1))),
    ],
    aten.index_copy.default: [
        claims(Rows, lambda r: torch.empty_like(inverse(r)).index_copy(0, order_of(r)[1], sorted_rows(r))),
        claims(Partial, lambda r: blank(r).index_copy(0, *dispatched_single(r, 1)), "single"),
        refused(
            "other than the first dimension",
            lambda r: make(r, torch.zeros, 7, 10).double().index_copy(1, order_of(r)[1], inverse(r).t()),
        ),
        refused(
            "does not invert",
            lambda r: torch.empty_like(inverse(r)).index_copy(0, order_of(r)[1], flat_rows(r) @ r.square[:6]),
        ),
    ],
    aten.scatter_add.default: [
        claims(
            Combined, lambda r: blank(r).scatter_add(0, tokens_of(r).unsqueeze(-1).expand(-1, HIDDEN), sorted_rows(r))
        ),
        claims(Rows, lambda r: torch.zeros_like(r.gates).scatter_add(1, r.index, r.weight)),
        claims(Rows, lambda r: torch.zeros_like(r.gates).scatter_add(1, r.index, r.weight), "repeated"),
        claims(Mask, lambda r: torch.zeros_like(r.gates).scatter_add(1, r.index, torch.ones_like(r.weight))),
        claims(
            Counts,
            lambda r: r.index.new_zeros(4).scatter_add(0, r.index.reshape(-1), torch.ones_like(r.index.reshape(-1))),
            "plain",
            "repeated",
        ),
        claims(
            Rows, lambda r: torch.zeros_like(r.gates).scatter_add(1, r.index, torch.ones_like(r.weight)), "repeated"
        ),
        refused(
            "other than of rows to tokens",
            lambda r: blank(r).scatter_add(0, tokens_of(r).unsqueeze(-1).expand(-1, 3), sorted_rows(r)),
        ),
        refused(
            "by expert of other than ones",
            lambda r: r.gates[0].scatter_add(0, r.index.reshape(-1), r.weight.reshape(-1)),
        ),
        refused("into a constant tensor", lambda r: r.gates.scatter_add(1, r.index, r.weight)),
        refused(
            "by other than a routing index", lambda r: blank(r).scatter_add(0, r.weight.sort(dim=0)[1], sorted_rows(r))
        ),
    ],
    aten.scatter_reduce.two: [
        claims(
            Combined,
            lambda r: blank(r).scatter_reduce(0, tokens_of(r).unsqueeze(-1).expand(-1, HIDDEN), sorted_rows(r), "sum"),
        ),
        refused(
            "by other than a sum",
            lambda r: blank(r).scatter_reduce(0, tokens_of(r).unsqueeze(-1).expand(-1, HIDDEN), sorted_rows(r), "amax"),
        ),
        refused(
            "by other than a sum",
            lambda r: blank(r).scatter_reduce(
                0, tokens_of(r).unsqueeze(-1).expand(-1, HIDDEN), sorted_rows(r), "sum", include_self=False
            ),
        ),
    ],
    aten.scatter.src: [
        claims(
            Rows,
            lambda r: torch.zeros_like(r.gates).scatter(-1, r.index, r.weight),
            "plain",
            "square",
            "repeated",
            "batched",
        ),
        claims(Rows, lambda r: torch.full_like(r.gates, -torch.inf).scatter(1, r.index, r.weight)),
        claims(
            Mask,
            lambda r: torch.zeros_like(r.gates).scatter(1, r.index, torch.ones_like(r.weight)),
            "plain",
            "repeated",
        ),
        claims(
            Rows,
            lambda r: torch.empty_like(inverse(r)).scatter(
                0, order_of(r)[1].unsqueeze(-1).expand(-1, HIDDEN), sorted_rows(r)
            ),
        ),
        refused("into a constant tensor", lambda r: torch.zeros_like(r.gates).scatter(0, r.index, r.weight), "square"),
        refused("into a constant tensor", lambda r: r.gates.scatter(1, r.index, r.weight)),
    ],
    aten.scatter.value: [
        claims(Mask, lambda r: torch.zeros_like(r.gates).scatter(1, r.index, 1.0), "plain", "square", "repeated"),
        claims(Mask, lambda r: torch.ones_like(r.gates).scatter(1, r.index, 0.0)),
        claims(Rows, lambda r: torch.full_like(r.gates, -torch.inf).scatter(1, r.index, 0.0)),
        refused("into a constant tensor", lambda r: torch.zeros_like(r.gates).scatter(0, r.index, 1.0), "square"),
    ],
    PUT_ROWS: [
        claims(Partial, lambda r: put_all(r, range(NUM_EXPERTS)), "plain", "sparse"),
        claims(Partial, lambda r: put_all(r, range(2))),
        refused("or twice", lambda r: put_all(r, (0, 0))),
        refused(
            "other rows than those of expert 3",
            lambda r: put_rows(torch.empty_like(inverse(r)), split_rows(r)[0], sizes_of(r), 3),
        ),
        refused("other than a fresh tensor", lambda r: put_rows(inverse(r) * 1, split_rows(r)[1], sizes_of(r), 1)),
        refused(
            "other than a fresh tensor",
            lambda r: put_rows(torch.empty_like(inverse(r)), split_rows(r)[1], sizes_of(r)[::-1], 1),
        ),
        claims(
            Partial, lambda r: put_rows(torch.empty_like(inverse(r).float()), split_rows(r)[1], sizes_of(r), 1).double()
        ),
        refused(
            "change their shape",
            lambda r: put_rows(torch.empty_like(inverse(r)), split_rows(r)[1][:, :1], sizes_of(r), 1),
        ),
    ],
}

OPERATORS: Database = MATMULS | COMBINE


def twice(r: Any) -> Any:
    """Rows added to what the output held before another expert's were added."""
    out = blank(r)
    token, _, rows = dispatched(r, 0)
    held = out[token]
    out = grown(r, lambda out, t, k, rows: out.index_put((t,), rows, accumulate=True), (1,))
    return out.index_put((token,), held + rows)


def dispatched_single(r: Any, expert: int) -> tuple[Any, Any]:
    """The places of an expert, and its results, where a token makes one choice."""
    token, _, rows = dispatched(r, expert)
    return token, rows


def sizes_of(r: Any) -> list[Any]:
    counts = counts_of(r)
    return [counts[expert].item() for expert in range(NUM_EXPERTS)]


def put_all(r: Any, experts: Any) -> Any:
    """Experts' results written at their places in expert order."""
    sizes, out = sizes_of(r), torch.empty_like(inverse(r))
    parts = torch.split(sorted_rows(r), sizes)
    for expert in experts:
        out = put_rows(out, parts[expert] @ r.ups[expert] @ r.downs[expert], sizes, expert)
    return out
