"""Whole layers on numbers: every claim from the routing to the exit, whatever the routing looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memfine_fx.passes.read.values import Combined, Rows
from tests.passes.read.routings import HIDDEN, NUM_EXPERTS, ROUTINGS
from tests.passes.read.samples import counts_of, dispatched, masks, order_of, sorted_rows, split_rows, tokens_of
from tests.passes.read.walks import Walk, walk

EXPERTS = range(NUM_EXPERTS)


def checked(layer: Callable[[Any], Any], routing: str) -> Walk:
    walked = walk(layer, ROUTINGS[routing])
    for heard, numbers in walked.calls:
        walked.check(heard, numbers)
    return walked


def grouped_results(r: Any) -> Any:
    ends = counts_of(r).cumsum(0)
    inner = torch.ops.memfine.grouped_mm(sorted_rows(r), r.up, ends).relu()
    return torch.ops.memfine.grouped_mm(inner, r.down, ends) * r.weight.reshape(-1)[order_of(r)[1]].unsqueeze(-1)


def grouped(r: Any) -> Any:
    return torch.zeros_like(r.hidden).index_add(0, tokens_of(r), grouped_results(r))


def undone(r: Any) -> Any:
    """Sorted results put back in token order, then summed."""
    rows = grouped_results(r)[order_of(r)[1].argsort(stable=True)]
    return rows.view(-1, 2, HIDDEN).sum(1)


def gathered(r: Any) -> Any:
    inner = torch.einsum("th,tkhf->tkf", r.hidden, r.up[r.index]).relu()
    return torch.einsum("tkf,tkfh,tk->th", inner, r.down[r.index], r.weight)


def loop(r: Any) -> Any:
    out = torch.zeros_like(r.hidden)
    for expert in EXPERTS:
        token, _, rows = dispatched(r, expert)
        out.index_add_(0, token, rows)
    return out


def loop_on_a_base(r: Any) -> Any:
    out = r.hidden * 2.0
    for expert in EXPERTS:
        token, _, rows = dispatched(r, expert)
        out = out.index_add(0, token, rows)
    return out


def split_loop(r: Any) -> Any:
    parts = [(part @ r.ups[expert]).relu() @ r.downs[expert] for expert, part in enumerate(split_rows(r))]
    rows = torch.cat(parts) * r.weight.reshape(-1)[order_of(r)[1]].unsqueeze(-1)
    return torch.zeros_like(r.hidden).index_add(0, tokens_of(r), rows)


def chosen_weights(r: Any) -> Any:
    """[T,E], normalised over the chosen experts."""
    weights = r.gates * masks(r).sum(1)
    return weights / weights.sum(-1, keepdim=True)


def dense(r: Any) -> Any:
    rows = torch.einsum("th,ehf->tef", r.hidden, r.up).relu()
    return torch.einsum("tef,efh,te->th", rows, r.down, chosen_weights(r))


def dense_loop(r: Any) -> Any:
    weights, out = chosen_weights(r), 0
    for expert in EXPERTS:
        out = out + ((r.hidden @ r.up[expert]).relu() @ r.down[expert]) * weights[:, expert].unsqueeze(-1)
    return out


LAYERS = (grouped, undone, gathered, loop, loop_on_a_base, split_loop, dense, dense_loop)


@pytest.mark.parametrize("routing", ["plain", "square", "sparse", "dynamic"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_every_claim_of_a_layer_holds(layer: Callable[[Any], Any], routing: str) -> None:
    checked(layer, routing).check_exit()


@pytest.mark.parametrize("layer", [grouped, undone, gathered, loop], ids=lambda layer: layer.__name__)
def test_it_holds_where_a_token_names_an_expert_twice(layer: Callable[[Any], Any]) -> None:
    checked(layer, "repeated").check_exit()


def test_turned_weights_are_not_taken_for_those_of_tokens() -> None:
    def layer(r: Any) -> Any:
        weights = (r.gates * masks(r).sum(1)).t()
        weights = weights / weights.sum(0, keepdim=True)
        rows = torch.bmm(torch.bmm(r.hidden.expand(NUM_EXPERTS, -1, -1), r.up).relu(), r.down)
        return (rows * weights.unsqueeze(-1)).sum(0)

    for routing in ("plain", "square"):
        checked(layer, routing)


def test_another_sorts_inverse_does_not_bring_rows_back() -> None:
    def layer(r: Any) -> Any:
        turned = r.index.t().reshape(-1).sort(stable=True)[1].argsort(stable=True)
        return grouped_results(r)[turned].view(2, 5, -1).sum(0)

    assert checked(layer, "plain").exit is None


def test_a_claim_that_is_wrong_is_seen() -> None:
    walked = walk(grouped, ROUTINGS["plain"])
    last, numbers = walked.calls[-1]
    assert isinstance(last.results[0], Combined)
    numbers.out[0, 0] += 1.0
    with pytest.raises(AssertionError, match="claimed"):
        walked.check(last, numbers)


def test_rows_in_another_order_are_seen() -> None:
    walked = walk(grouped, ROUTINGS["plain"])
    heard, numbers = next((one, call) for one, call in walked.calls if isinstance(one.results[0], Rows))
    numbers.out.copy_(numbers.out.flip(0))
    with pytest.raises(AssertionError, match="claimed"):
        walked.check(heard, numbers)
